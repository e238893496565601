"""The keys of a dataset besides its blocks: its active writers, and the remains of dead ones.

    tds:{<bytes of the name>:<name>}:head      HASH  dataset, revision, manifest; owner of a change of structure
    tds:{<bytes of the name>:<name>}:writers   HASH  session -> its process, and the leaves it writes in place
    tds:{<bytes of the name>:<name>}:pending   HASH  id -> arrays that are not in a manifest (yet, or any more)

A session lasts as long as its connection, which has the session's name and which the server drops
once the process has ended, however that happened.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

import msgspec

from tdstore.errors import CorruptStoreError
from tdstore.types import Path
from tdstore_redis.cells.layout import Array
from tdstore_redis.connection import Wire, pack
from tdstore_redis.document import DATASET
from tdstore_redis.faults import ServerError

MAX_RECORDS_BYTES = 64 << 20
_UNLINK = 512
T = TypeVar("T")
_MAX_BLOCKS = 1 << 32
_ARRAY_KEY = re.compile(rb"(\d{1,19}):(?:w|\d{1,10})\Z")
_SESSION = re.compile(r"[0-9a-f]{32}\Z")


class Keys:
    """The keys of one name. A name may have any characters: its length marks its end."""

    __slots__ = ("head", "pending", "writers")

    def __init__(self, name: str) -> None:
        raw = name.encode()
        base = b"tds:{%d:%b}" % (len(raw), raw)
        self.head, self.writers, self.pending = base + b":head", base + b":writers", base + b":pending"


class Writing(msgspec.Struct):
    """A session that writes in place, or changes the structure."""

    session: str
    client: int
    pid: int
    host: str
    touched: list[tuple[str, ...]] = []

    @property
    def who(self) -> str:
        """Describe the writer, for messages."""
        return f"pid {self.pid} on {self.host}"

    @property
    def here(self) -> bool:
        """Check whether this is a session of this process."""
        return self.pid == os.getpid() and self.host == socket.gethostname()


class Pending(msgspec.Struct):
    """Arrays that no manifest names: of an active writer, or (without a session) to be removed."""

    dataset: str
    arrays: list[tuple[int, int]]
    """Number and count of blocks of each."""
    session: str = ""
    client: int = 0


def me(session: str, client: int, touched: Iterable[Path] = ()) -> Writing:
    """Return the record of this process."""
    return Writing(session, client, os.getpid(), socket.gethostname(), sorted(touched))


def record(value: bytes, kind: type[T], url: str, key: bytes, field: bytes) -> T:
    """Decode one record of a hash.

    Args:
        value: the encoded record.
        kind: its type.
        url: the location, for the message.
        key: of the hash, for the message.
        field: of the hash, for the message.

    Raises:
        CorruptStoreError: not as tdstore writes it.
    """
    try:
        return msgspec.json.decode(value, type=kind)
    except (msgspec.DecodeError, RecursionError, ValueError) as error:
        raise CorruptStoreError(
            f"{url}: the field {shown(field)} of {shown(key)} is not a record of a writer: {str(error)[:200]}",
            url=url,
            hint=f"HDEL removes that field, if no process has the dataset open: {shown(key)} {shown(field)}",
        ) from error


def records(reply: list[bytes], kind: type[T], url: str, key: bytes) -> dict[bytes, T]:
    """Decode the records of a HGETALL of `key`.

    Args:
        reply: the reply.
        kind: the type of the records.
        url: the location, for the message.
        key: of the hash, for the message.

    Raises:
        CorruptStoreError: not as tdstore writes it.
    """
    return {field: record(value, kind, url, key, field) for field, value in zip(reply[::2], reply[1::2], strict=True)}


def shown(name: bytes) -> str:
    """Format a key or a field for messages."""
    return repr(name[:100].decode("utf-8", "backslashreplace"))


def living(wire: Wire, found: Iterable[Writing | Pending]) -> set[str] | None:
    """Return the sessions with an open connection; None if the server does not list connections."""
    asked = {one.client: one.session for one in found if one.session}
    if not asked:
        return set()
    ids = [b"%d" % client for client in asked if client > 0]
    (reply,) = wire.pipe([pack(b"CLIENT", b"LIST", b"ID", *ids)] if ids else [pack(b"CLIENT", b"LIST")])
    if isinstance(reply, ServerError) and reply.code != "NOPERM":
        (reply,) = wire.pipe([pack(b"CLIENT", b"LIST")])  # servers before 6.2 have no ID here
    if isinstance(reply, ServerError):
        return None
    names = set(re.findall(r" name=tds-([0-9a-f]{32}) ", bytes(reply).decode("utf-8", "replace")))
    return {session for session in asked.values() if session in names}


def connection_name(session: str) -> bytes:
    """Return the name of a session's connection on the server."""
    assert _SESSION.match(session)
    return b"tds-" + session.encode()


def run_id(wire: Wire) -> str:
    """Return the identity of the server's process, which changes with a restart. Empty if the server has none."""
    (reply,) = wire.pipe([pack(b"INFO", b"server")])
    if isinstance(reply, ServerError):
        return ""
    found = re.search(rb"^run_id:(\S+)", reply, re.MULTILINE)
    return found[1].decode() if found else ""


def keys_of(record: Pending) -> Iterator[bytes]:
    """Yield every key that the arrays of a record may have: those of its blocks, and no others."""
    if not DATASET.match(record.dataset):
        return
    for number, blocks in record.arrays:
        if not (0 < number < 2**62 and 0 <= blocks < _MAX_BLOCKS):
            continue
        prefix = b"tds:%b:%d:" % (record.dataset.encode(), number)
        yield prefix + b"w"
        for block in range(blocks):
            yield prefix + b"%d" % block


def remove(wire: Wire, one: Pending) -> None:
    """Remove the keys of a record's arrays, in at most as many steps as the server has keys, for any record."""
    if sum(max(0, blocks) for _, blocks in one.arrays) <= wire.call(b"DBSIZE"):
        unlink(wire, keys_of(one))
        return
    if not DATASET.match(one.dataset):
        return
    prefix = b"tds:%b:" % one.dataset.encode()
    listed = dict(one.arrays)
    cursor = b"0"
    while True:
        cursor, found = wire.call(b"SCAN", cursor, b"MATCH", prefix + b"*", b"COUNT", b"1000")
        names = {key: _ARRAY_KEY.match(key[len(prefix) :]) for key in found}
        unlink(wire, [key for key, name in names.items() if name is not None and int(name[1]) in listed])
        if cursor == b"0":
            return


def unlink(wire: Wire, keys: Iterable[bytes]) -> None:
    """Remove keys, some hundred at a time: the server frees their memory in the background."""
    group: list[bytes] = []
    commands: list[bytes] = []
    for key in keys:
        group.append(key)
        if len(group) == _UNLINK:
            commands.append(pack(b"UNLINK", *group))
            group = []
        if len(commands) == 32:
            wire.raising(commands)
            commands = []
    if group:
        commands.append(pack(b"UNLINK", *group))
    if commands:
        wire.raising(commands)


def waste(dataset: str, arrays: Sequence[Array]) -> bytes:
    """Encode the record of arrays that are to be removed."""
    return msgspec.json.encode(Pending(dataset, [(a.number, a.blocks) for a in arrays]))


def clean(wire: Wire, keys: Keys, url: str, keep: Sequence[tuple[str, int]] = ()) -> None:
    """Remove the remains of dead writers, and arrays that others meant to remove. `keep`: arrays that are in use."""
    (reply,) = wire.raising([pack(b"HGETALL", keys.pending)], limit=MAX_RECORDS_BYTES)
    if not reply:
        return
    found = records(reply, Pending, url, keys.pending)
    alive = living(wire, found.values())
    used = set(keep)
    for field, one in found.items():
        if one.session:
            if alive is None or one.session in alive:
                continue
            # No longer theirs: a commit that they sent before they ended finds its watched key changed, and fails.
            garbage = msgspec.json.encode(Pending(one.dataset, one.arrays))
            _, now = wire.raising([pack(b"WATCH", keys.pending), pack(b"HGET", keys.pending, field)])
            if now is None or record(now, Pending, url, keys.pending, field).session != one.session:
                wire.call(b"UNWATCH")
                continue
            *_, done = wire.raising([pack(b"MULTI"), pack(b"HSET", keys.pending, field, garbage), pack(b"EXEC")])
            if done is None:
                continue  # another process is removing it
        one.arrays = [(n, blocks) for n, blocks in one.arrays if (one.dataset, n) not in used]
        remove(wire, one)
        wire.call(b"HDEL", keys.pending, field)
