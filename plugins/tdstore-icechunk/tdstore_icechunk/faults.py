"""The errors of icechunk as those of tdstore, and the refusal to use it where it would block forever."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager

import icechunk

from tdstore.errors import (
    ConflictError,
    CorruptStoreError,
    StoreError,
    StoreIOError,
    StoreNotFoundError,
    TDStoreError,
    UnsupportedError,
)

_LOST = re.compile(
    r"object store error Object at location|NoSuchKey|(key|object|snapshot|manifest) not found|not found: No such"
)
_DAMAGED = re.compile(
    r"deseriali|decod|decompress|magic|flatbuffer|invalid (file|object|header|snapshot|manifest)|malformed|checksum"
    r"|unexpected end|out of (range|bounds)|invalid range|InvalidRange|range .*exceed|panick|EOF|invalid utf-8"
    r"|frame descriptor|bad file|version",
    re.IGNORECASE,
)
_used = False
"""Whether icechunk was called, which then starts its threads."""
_dead = False


def _in_child() -> None:
    global _dead
    _dead = _dead or _used


os.register_at_fork(after_in_child=_in_child)


def check_process(url: str) -> None:
    """Refuse to use icechunk in a child of a process that used it: every call would wait for threads of the parent."""
    global _used
    if _dead:
        raise UnsupportedError(
            f"{url}: icechunk cannot be used in a process that was forked from one that had used it",
            url=url,
            hint="start workers by 'spawn' or 'forkserver': DataLoader(..., multiprocessing_context='forkserver')",
        )
    _used = True


@contextmanager
def icechunk_errors(url: str, doing: str) -> Iterator[None]:
    """Raise the errors of tdstore for those of icechunk, whose panics are not an `Exception`."""
    check_process(url)
    try:
        yield
    except (TDStoreError, MemoryError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except icechunk.ConflictError as error:
        raise conflict(url) from error
    except BaseException as error:
        raise _named(error, url, doing) from error


def conflict(url: str) -> ConflictError:
    """Create the error for a change on top of a commit that is no longer the last one."""
    return ConflictError(
        f"{url} was changed by another writer since it was opened here; nothing of this writer was published",
        url=url,
        hint="open it again, and repeat the change",
    )


def _named(error: BaseException, url: str, doing: str) -> StoreError:
    # One class for all that can happen: the text says what it is, and where in Rust.
    text = " ".join(str(error).partition("context:")[0].replace("|", " ").split()).removeprefix("x ")
    if isinstance(error, KeyError) or "node not found" in text or "ref not found" in text:
        return StoreNotFoundError(f"{url}: {text}", url=url)
    if _LOST.search(text):
        return CorruptStoreError(f"{url}: an object of the repository is missing: {text}", url=url)
    if _DAMAGED.search(text) or not isinstance(error, icechunk.IcechunkError):
        return CorruptStoreError(f"{url}: an object of the repository is damaged: {text}", url=url)
    system = re.search(r"\(os error (\d+)\)", str(error))
    return StoreIOError(f"{doing} {url} failed: {text}", url=url, errno=int(system[1]) if system else None)
