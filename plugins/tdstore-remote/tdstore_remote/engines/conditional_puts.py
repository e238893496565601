"""A probe of conditional puts of a bucket, since some servers accept the header and ignore it."""

from __future__ import annotations

import contextlib
import os
import threading
import time
import uuid
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, NamedTuple

from tdstore.engine import Buffer, Entry
from tdstore.errors import ConflictError, ReadOnlyError, StoreError, StoreIOError, StoreNotFoundError, UnsupportedError

Put = Callable[[str, Buffer, Any], "str | None"]
Delete = Callable[[Sequence[str]], None]
List = Callable[[str], Iterable[Entry]]
FOLDER = "tdstore-probe/"
"""Folder of the objects of this probe: listing them costs one request."""
LEFT = 3600.0
"""Seconds after which such an object is of a process that was killed."""


class Conditions(NamedTuple):
    """The result of the probe for one bucket."""

    works: bool
    quoted: bool = True
    """Whether the tag stands between quotes in `If-Match`, as it does in `ETag`."""

    def match(self, tag: str) -> dict[str, Any]:
        """Return obstore's mode for a put that replaces only this version."""
        return {"e_tag": tag if self.quoted else tag.strip('"')}


_found: dict[Hashable, Conditions] = {}
_lock = threading.Lock()


def _after_fork() -> None:
    global _lock
    _lock = threading.Lock()  # another thread of the parent may have held it


os.register_at_fork(after_in_child=_after_fork)


def of(bucket: Hashable, put: Put, delete: Delete, list_: List) -> Conditions:
    """Return the abilities of this bucket; probed once in a process.

    Args:
        bucket: the bucket.
        put: puts an object in obstore's mode `None`, "create" or `{"e_tag": ...}`; returns the tag.
        delete: removes objects.
        list_: lists objects whose keys start with a prefix.
    """
    with _lock:
        if bucket not in _found:
            _found[bucket] = probe(put, delete)
            sweep(delete, list_, LEFT)
        return _found[bucket]


def accept(bucket: Hashable, found: Conditions) -> None:
    """Accept the result of another process's probe, unless this one has probed."""
    with _lock:
        _found.setdefault(bucket, found)


def sweep(delete: Delete, list_: List, age: float) -> None:
    """Remove the objects of processes that were killed during a probe.

    Args:
        delete: removes objects.
        list_: lists objects whose keys start with a prefix.
        age: how long they must have existed at least, in seconds; 0: all of them.
    """
    limit = time.time() - age
    with contextlib.suppress(StoreError):  # listing may not be allowed
        if old := [entry.key for entry in list_(FOLDER) if not age or entry.modified < limit]:
            delete(old)


def probe(put: Put, delete: Delete) -> Conditions:
    """Probe with an object of a unique name, which is removed again; if the answer is no, probe once more.

    Another process's `sweep` may remove the object in the middle, which then looks like a server without conditions.
    """
    found = _probe_and_remove(put, delete)
    return found if found.works else _probe_and_remove(put, delete)


def _probe_and_remove(put: Put, delete: Delete) -> Conditions:
    key = f"{FOLDER}{uuid.uuid4().hex}"
    try:
        found = _probe(key, put)
    except (StoreNotFoundError, ReadOnlyError):
        raise  # no such bucket, no permission: nothing was written
    except BaseException:
        delete([key])
        raise
    delete([key])
    return found


def _probe(key: str, put: Put) -> Conditions:
    try:
        tag = put(key, b"1", "create")
    except ConflictError:
        tag = put(key, b"1", None)  # our own first attempt, whose answer was lost
    except (UnsupportedError, StoreIOError):
        # Some answer 501 or 400 to a condition. Anything else that is wrong shows here:
        put(key, b"1", None)
        return Conditions(False)
    try:
        put(key, b"2", "create")
        return Conditions(False)
    except ConflictError:
        pass
    if not tag:
        return Conditions(False)
    for quoted in (True, False):
        conditions = Conditions(True, quoted)
        try:
            put(key, b"3", conditions.match('"00000000000000000000000000000000"'))
            return Conditions(False)
        except ConflictError:
            pass
        except (UnsupportedError, StoreIOError):
            return Conditions(False)
        try:
            if put(key, b"4", conditions.match(tag)):
                return conditions
        except ConflictError:
            continue
    return Conditions(False)
