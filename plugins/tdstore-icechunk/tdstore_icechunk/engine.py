"""The objects of one session of icechunk, as the zarr plugin reads and writes them."""

from __future__ import annotations

from collections.abc import Coroutine, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import icechunk
from icechunk._icechunk_python import PySession
from tdstore_zarr.layout.document import NAME
from tdstore_zarr.place.redo_log import LoggedEngine, Put, RedoLog
from tdstore_zarr.store_objects import StoreEngine
from zarr.core.buffer import default_buffer_prototype
from zarr.core.sync import sync

from tdstore.engine import Buffer
from tdstore.errors import CorruptStoreError, StoreError, StoreNotFoundError
from tdstore.index.ranges import Range
from tdstore_icechunk.faults import icechunk_errors

T = TypeVar("T")
AT_ONCE = 64
"""Objects that are in memory while they are written again."""


class SessionEngine(StoreEngine):
    """The objects of a session. What icechunk cannot read is an error, never a missing object."""

    def __init__(self, url: str, session: icechunk.Session) -> None:
        super().__init__(session.store)
        self.url = url
        self.session = session

    def swap(self, session: icechunk.Session) -> None:
        """Continue with another session."""
        self.session, self._store = session, session.store

    def state(self) -> bytes:
        """Return the session with all its changes; `restored` makes an independent session of the result."""
        with icechunk_errors(self.url, "writing"):
            state: bytes = self.session._session.as_bytes()
        return state

    def _run(self, coroutine: Coroutine[Any, Any, T], what: str) -> T:
        try:
            with icechunk_errors(self.url, what):
                return sync(coroutine)
        finally:
            coroutine.close()

    def _tag(self, data: bytes) -> str | None:
        return None

    def get_ranges(self, ranges: Sequence[Range]) -> list[Buffer]:
        """Read ranges, as `Engine.get_ranges` does, by one call of icechunk.

        icechunk returns None for what it cannot read, whatever the reason: such a range is requested again, by itself.
        """
        if any(r.start < 0 for r in ranges):
            return super().get_ranges(ranges)
        wanted = [(r.key, (r.start, r.stop)) for r in ranges]
        answers: list[bytes | None] = self._run(self._many(wanted), "reading")
        found: list[Buffer] = []
        for r, data in zip(ranges, answers, strict=True):
            if data is None:
                (data,) = super().get_ranges([r])  # type: ignore[assignment]
            assert data is not None
            if r.stop is not None and len(data) != r.stop - r.start:
                raise CorruptStoreError(f"{self.where(r.key)} ends before byte {r.stop}", url=self.url)
            found.append(data)
        return found

    async def _many(self, wanted: list[tuple[str, tuple[int, int | None]]]) -> list[bytes | None]:
        answers: list[bytes | None] = await self._store._store.get_partial_values(wanted)  # type: ignore[attr-defined]
        return answers

    async def _put(self, key: str, data: bytes, if_absent: bool, if_match: str | None) -> str | None:
        await self._store.set(key, default_buffer_prototype().buffer.from_bytes(data))
        return ""


def restored(url: str, state: bytes) -> icechunk.Session:
    """Return a session as `SessionEngine.state` recorded it."""
    with icechunk_errors(url, "reading"):
        return icechunk.Session(PySession.from_bytes(state))


class SessionLog(LoggedEngine[SessionEngine]):
    """The changes of a session. The session itself is the log: no other process sees it before its commit.

    Attributes:
        nbytes: bytes that were put since the last commit.
        littered: whether objects were put that no commit will name.
    """

    def __init__(self, base: SessionEngine) -> None:
        super().__init__(base)
        self.active = True
        self.nbytes = 0
        self.littered = False
        self._changed: set[str] = set()
        self._waiting: dict[str, Buffer] = {}
        """Chunks that were put before the metadata of their array, which icechunk refuses."""
        self._states: list[bytes] = []
        """Sessions as they were when objects were held."""
        self._undo: bytes | None = None
        self._moves: tuple[bytes, dict[str, str]] | None = None

    # -- changes -------------------------------------------------------------------------
    def put(self, key: str, data: Buffer, *, if_absent: bool = False, if_match: str | None = None) -> str | None:
        """Write an object, as `Engine.put` does."""
        self.put_many([(key, data)])
        return None

    def put_many(self, items: Sequence[tuple[str, Buffer]]) -> None:
        """Write objects, as `Engine.put_many` does: the metadata of arrays first, then their chunks."""
        self._before_a_change()
        nodes = [item for item in items if item[0].endswith(NAME)]
        self.base.put_many(nodes)
        prefixes = tuple(key.removesuffix(NAME) for key, _ in nodes)
        chunks = [item for item in items if not item[0].endswith(NAME)]
        chunks += [(key, self._waiting.pop(key)) for key in list(self._waiting) if key.startswith(prefixes)]
        try:
            self.base.put_many(chunks)
        except StoreNotFoundError:
            self._waiting.update(chunks)
        keys = {key for key, _ in items if not key.endswith(NAME)}
        self.littered = self.littered or not self._changed.isdisjoint(keys)
        self._changed |= keys
        self.nbytes += sum(len(data) for _, data in items)

    def delete(self, keys: Sequence[str]) -> None:
        """Delete objects, as `Engine.delete` does."""
        self._before_a_change()
        self.base.delete(keys)
        self._changed.update(keys)

    def move(self, moves: Mapping[str, str]) -> None:
        """Rename objects: `carry_out` does it, once the arrays have their new metadata."""
        self._moves = self.base.state(), dict(moves)

    def carry_out(self) -> None:
        """Write the objects of `move` under their new names."""
        if self._moves is not None:
            (state, moves), self._moves = self._moves, None
            self._copy_from(state, moves)

    def _copy_from(self, state: bytes, moves: Mapping[str, str]) -> None:
        source, pairs = SessionEngine(self.url, restored(self.url, state)), list(moves.items())
        for at in range(0, len(pairs), AT_ONCE):
            lot = pairs[at : at + AT_ONCE]
            found = source.get_ranges([Range(old, 0, None) for old, _ in lot])
            self.put_many([(new, data) for (_, new), data in zip(lot, found, strict=True)])

    # -- the way back ---------------------------------------------------------------------
    def _before_a_change(self) -> None:
        if self._before is not None and self._undo is None:
            self._undo = self.base.state()

    def end(self, *, keep: bool) -> None:
        """Keep the changes since `begin`, or undo them."""
        undo, self._undo, self._before = self._undo, None, None
        if undo is not None and not keep:
            self.littered = True
            self.base.swap(restored(self.url, undo))

    def hold(self, keys: Iterable[str]) -> dict[str, Put]:
        """Return where to read these objects again, if they were changed."""
        found = [key for key in keys if key in self._changed]
        if found:
            self._states.append(self.base.state())
        return {key: Put(str(len(self._states) - 1), 0) for key in found}

    def restore(self, puts: Mapping[str, Put], gone: Iterable[str]) -> None:
        """Return to the last commit, with these changes applied."""
        states = self._states
        self.abandon()
        for number, state in enumerate(states):
            here = [key for key, put in puts.items() if put.key == str(number)]
            self._copy_from(state, dict(zip(here, here, strict=True)))
        self.delete(list(gone))

    def abandon(self) -> None:
        """Return to the last commit."""
        self.littered = self.littered or self.nbytes > 0
        self.ended()
        if not self.base.session.read_only:
            with icechunk_errors(self.url, "discarding changes of"):
                self.base.session.discard_changes()

    # -- commit ----------------------------------------------------------------------------
    def ended(self) -> None:
        """Forget the data of changes that were committed or discarded."""
        self._changed, self._waiting, self._states = set(), {}, []
        self._undo = self._moves = None
        self.nbytes = 0

    def check_complete(self) -> None:
        """Refuse a commit without the metadata of an array."""
        if self._waiting:
            raise StoreError(f"{self.where(next(iter(self._waiting)))} has no array", url=self.url)

    def record(self) -> None:
        """Return None, as `LoggedEngine.record` does for a log that is empty."""

    def follow(self, log: RedoLog | None) -> None:
        """Refuse a log: it belongs to another storage of zarr."""
        if log is not None:
            raise CorruptStoreError(f"{self.url}: its root names a redo log, which no icechunk store has", url=self.url)

    def clean(self) -> None:
        """Do nothing: icechunk's garbage collection finds what is not used."""

    def close(self) -> None:
        """Do nothing: a session holds no handle."""
