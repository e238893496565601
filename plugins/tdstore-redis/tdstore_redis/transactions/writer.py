"""Writes: into arrays that are not committed yet, and in place by transactions, which `row_writes` builds.

A transaction watches the head of the dataset and every block of which it changes a cell in part. It is
sent as MULTI ... EXEC and does nothing at all when one of them was changed meanwhile; then it is tried again.
So writers of different rows never overwrite one another's, and a dataset that was replaced is never written.

All of it uses one connection. When that is lost with uncommitted changes, no other replaces it
unless the server is the same process and still has the session's notes: a server that restarted may
have lost acknowledged writes, and further writes would only seem to succeed.
"""

from __future__ import annotations

import os
import random
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import msgspec
import numpy as np
import torch
from torch import Tensor

from tdstore.errors import StoreError, TransientError
from tdstore.header import Header
from tdstore.storekit import refusals
from tdstore.threads import without_interrupts
from tdstore.types import LeafSpec, Path, StoreIndex, Write
from tdstore_redis.cells.encoding import CellWrites, stored_cells
from tdstore_redis.cells.fetch import Damaged
from tdstore_redis.cells.layout import Array, Command, new_array
from tdstore_redis.cells.plans import Change, Fetch, Run, plan_read, plan_write
from tdstore_redis.connection import Line, Wire, pack
from tdstore_redis.faults import ServerError
from tdstore_redis.session import Session, dead_writers, first_error
from tdstore_redis.transactions import keyspace
from tdstore_redis.transactions.keyspace import Pending, Writing, me, record

STEP = 64 << 20
"""Bytes that are copied at a time."""

_MULTI, _EXEC = pack(b"MULTI"), pack(b"EXEC")


@dataclass(slots=True)
class Extra:
    """Additional commands of a transaction."""

    prepare: Callable[[Wire], None]
    """Called in each attempt, after the head is watched."""
    commands: Callable[[], list[Command]]
    """Packed commands that come before the changes of cells."""
    touched: set[Path]
    """The leaves that it changes."""


class Writer(Session):
    """A session that may also write."""

    def __init__(
        self, line: Line, *, verify: bool, lock_timeout: float, block: int, max_bytes: int | None = None
    ) -> None:
        super().__init__(line, verify=verify, max_bytes=max_bytes)
        self.lock_timeout = lock_timeout
        self.block = block
        self.session = secrets.token_hex(16)
        self.marks: set[Path] = set()
        """Leaves with writes that were not committed, as the server's notes have them."""
        self.dropped: list[Array] = []
        """Arrays of the last commit that the next one leaves out."""
        self.replaced_rows: list[tuple[Write, Array]] = []
        """What rows of the last commit's leaves held before they were written while the structure changed."""
        self.replaces: bytes | None = None
        """The dataset that was there when a new one was begun."""
        self.staging: dict[int, int] = {}
        """Numbers under which blocks are staged for a write of many rows, and how many blocks each may have."""
        self.staged: set[bytes] = set()
        """Keys of blocks that are staged."""
        self.exclusive = False
        self.known = Header()
        """The header of our caller: the one read at opening, or saved last."""
        self.owns = False
        """Whether the structure is ours to change."""
        self._wire: Wire | None = None
        self._run = ""
        self._armed = False
        self._noted = False
        """Whether the server has a note of ours in `pending`."""
        self._lost: str | None = None
        self._doubtful: set[bytes] = set()
        """Blocks of a step that the server refused in part: they may be there."""

    # -- the connection ------------------------------------------------------------------
    def wire(self) -> Wire:
        """Return the connection of this session.

        Raises:
            StoreError: it was lost, and with it perhaps uncommitted changes.
        """
        if self.pid != os.getpid():
            self._in_child()
        if self._lost is not None:
            raise StoreError(self._lost, url=self.url, hint="open it again, and look at what is there")
        if self._wire is not None and self._wire.alive():
            return self._wire
        if self._wire is not None:
            self._wire.close()
        self._armed = False
        fresh = self.line.wire(keyspace.connection_name(self.session))
        run = keyspace.run_id(fresh)
        if self._wire is not None and (self.marks or self._noted or self.owns):
            self._resume(fresh, run)
        self._wire, self._run = fresh, run
        return fresh

    def _resume(self, fresh: Wire, run: str) -> None:
        note, own, owner = fresh.raising(
            [
                pack(b"HGET", self.keys.writers, self.session.encode()),
                pack(b"HGET", self.keys.pending, self.session.encode()),
                pack(b"HGET", self.keys.head, b"owner"),
            ]
        )
        field, keys = self.session.encode(), self.keys
        noted = own is not None and record(own, Pending, self.url, keys.pending, field).session == self.session
        mine = owner is not None and record(owner, Writing, self.url, keys.head, b"owner").session == self.session
        whole = (not self.marks or note is not None) and (not self._noted or noted) and (not self.owns or mine)
        if not run or run != self._run or not whole:
            fresh.close()
            raise self.lose("the server was restarted, or its data removed, before what was written was committed")
        self._wire = fresh
        if self.marks:
            fresh.call(b"HSET", self.keys.writers, self.session.encode(), self._note(self.marks))
        if self._noted:
            self.note_pending(fresh)
        if self.owns:
            fresh.call(b"HSET", self.keys.head, b"owner", self._note(()))

    def end(self) -> None:
        """Close the connection; in a forked child only this process's end of the parent's connection."""
        if self._wire is not None:
            self._wire.close()
        super().end()

    def lose(self, why: str) -> StoreError:
        """Refuse all later writes; uncommitted changes may be lost."""
        self._lost = f"{self.url}: {why}; nothing more can be written through this store"
        if self._wire is not None:
            self._wire.close()
        return StoreError(self._lost, url=self.url, hint="open it again, and look at what is there")

    def _in_child(self) -> None:
        """Begin a new session after a fork: the connection belongs to the parent."""
        if not self.published or any(a.mine is not None for a in self.document.arrays.values()) or self.owns:
            raise refusals.forked(self.url)
        self.pid = os.getpid()
        self.session = secrets.token_hex(16)
        self.marks, self._wire, self._armed, self._noted, self._lost = set(), None, False, False, None
        self.staging, self.staged = {}, set()

    def _note(self, touched: Iterable[Path]) -> bytes:
        client = self._wire.client_id if self._wire is not None else 0
        return msgspec.json.encode(me(self.session, client, touched))

    def sending(self, wire: Wire, commands: Sequence[Command]) -> list[object]:
        """Send commands that write; a lost connection ends the session, since it is unknown which arrived."""
        try:
            return wire.pipe(commands)
        except OSError:
            self.lose("the connection was lost while writing: whether the last step was written is not known")
            raise

    def execute(self, wire: Wire, commands: Sequence[Command]) -> bool:
        """Run commands, which begin with MULTI, in one transaction.

        Returns:
            whether it ran: False if a watched key was changed.

        Raises:
            ServerError: the server refused a command.
        """
        replies = self.sending(wire, [*commands, _EXEC])
        done = replies[-1]
        error = first_error([*replies, *(done if isinstance(done, list) else [])])
        if error is not None:
            raise error
        return done is not None

    # -- arrays of our own ---------------------------------------------------------------
    def private(self) -> list[Array]:
        """Return arrays that are in no manifest yet."""
        return [a for a in self.document.arrays.values() if a.mine is not None]

    def make(self, leaves: dict[Path, LeafSpec]) -> None:
        """Create arrays for these leaves, recorded on the server before any of their cells."""
        wire = self.wire()
        fresh: dict[Path, Array] = {}
        for path, spec in leaves.items():
            fresh[path] = new_array(spec, self.document.next, self.document.dataset, block=self.block)
            self.document.next += 1
        old = [self.document.arrays[p] for p in fresh if p in self.document.arrays]
        before = dict(self.document.arrays)
        self.document.arrays.update(fresh)
        try:
            self.note_pending(wire)
        except BaseException:
            self.document.arrays = before
            raise
        self.drop(old)

    def note_pending(self, wire: Wire) -> None:
        """Record uncommitted arrays on the server: if this process is killed, the next writer removes them."""
        for reply in self.sending(wire, [self._pending_note(wire, self.staging)]):
            if isinstance(reply, ServerError):
                raise reply
        self._noted = True

    def _pending_note(self, wire: Wire, staging: Mapping[int, int]) -> bytes:
        arrays = [*((a.number, a.blocks) for a in self.private()), *staging.items()]
        record = Pending(self.document.dataset, arrays, self.session, wire.client_id)
        return pack(b"HSET", self.keys.pending, self.session.encode(), msgspec.json.encode(record))

    def pending_without_staging(self, wire: Wire) -> bytes:
        """Return the command that removes staged blocks from the note."""
        if self.private():
            return self._pending_note(wire, {})
        return pack(b"HDEL", self.keys.pending, self.session.encode())

    def nothing_staged(self) -> None:
        """Record that staged blocks are at their keys, or removed."""
        self.staging, self.staged = {}, set()
        self._noted = bool(self.private())

    @without_interrupts
    def unstage(self) -> None:
        """Remove the staged blocks of a write that failed."""
        if not self.staging:
            return
        # A transaction that went over a connection that was lost, and was not carried out yet, will not be: it watches
        # the note, which the new connection wrote again. None is made of this: a server without memory takes no MULTI.
        wire = self.wire()
        keyspace.unlink(wire, sorted(self.staged))
        if not self.private():  # else the note lists too much until it is written again
            wire.call(b"HDEL", self.keys.pending, self.session.encode())
        self.nothing_staged()

    def drop(self, arrays: Sequence[Array]) -> None:
        """Remove arrays that no leaf uses any more: uncommitted ones at once, committed ones after the next commit."""
        for array in arrays:
            if array.mine is None:
                self.dropped.append(array)
            else:
                blocks = np.unique(np.flatnonzero(array.mine) // array.per_block)
                doubtful = {key for key in self._doubtful if key.startswith(array.prefix)}
                keyspace.unlink(self.wire(), doubtful.union(map(array.key, blocks.tolist())))
                self._doubtful -= doubtful

    # -- writing values ------------------------------------------------------------------
    def store(self, changes: Sequence[Change]) -> None:
        """Change cells of uncommitted blocks, one after another."""
        wire = self.wire()
        commands: list[Command] = []
        for change, stored in zip(changes, stored_cells(wire, changes, self.promised), strict=True):
            commands += change.array.set_commands(change.ids, stored)
        error = first_error(self.sending(wire, commands))
        if error is not None:
            raise error

    @without_interrupts
    def put(self, changes: Sequence[Change]) -> None:
        """Change cells of arrays that are in no manifest yet."""
        try:
            self.store(changes)
        except ServerError:
            self._doubtful |= {c.array.key(b) for c in changes for b in c.blocks()}
            raise
        for change in changes:
            assert change.array.mine is not None
            ids = change.ids
            change.array.mine[slice(ids.start, ids.stop) if isinstance(ids, range) else ids] = True

    def transact(self, writes: CellWrites, extra: Extra | None = None) -> None:
        """Change cells of committed arrays, in one transaction: all of them, or none.

        Raises:
            StoreBusyError: others changed the same blocks for longer than `lock_timeout`.
        """
        until = time.monotonic() + self.lock_timeout
        turn = damaged = 0
        while True:
            try:
                if self._try(writes, extra):
                    return
            except Damaged:
                # Between the read of a cell and the check whether it was ever written, it may have been written.
                damaged += 1
                if damaged == 3:
                    raise
            turn += 1
            if time.monotonic() > until:
                raise refusals.contended(self.url, self.lock_timeout)
            if turn > 1:
                time.sleep(random.uniform(0, min(0.001 * turn, 0.02)))

    def _arming(self) -> list[bytes]:
        keys = self.keys
        return [
            pack(b"WATCH", keys.head),
            pack(b"HMGET", keys.head, b"dataset", b"revision"),
            pack(b"HEXISTS", keys.writers, self.session.encode()),
        ]

    def _check_armed(self, wire: Wire, replies: Sequence[object]) -> None:
        """Check that the watched head is unchanged, and that it still lists this session."""
        _, state, known = replies
        assert isinstance(state, list)
        if state[0] != self.document.dataset.encode():
            raise self.replaced()
        if self.marks and not known:
            raise self.lose("the server forgot this session: it was restarted, or its data were removed")
        if state[1] != b"%d" % self.base.revision:
            self._follow(wire)
        self._armed = True

    def _follow(self, wire: Wire) -> None:
        """Adopt the commits of others that leave the leaves of this session unchanged."""
        now = self.refresh(wire)
        for path, array in self.base.arrays.items():
            other = now.arrays.get(path)
            if other is None or other.number != array.number or other.spec != array.spec:
                raise refusals.overtaken(self.url)
            now.arrays[path] = array
        if not now.same_structure(self.base):
            if self.owns or self.private():
                raise refusals.overtaken(self.url)
            self.document = now.copy()
        self.base = now
        self.document.revision = now.revision

    @without_interrupts
    def _try(self, writes: CellWrites, extra: Extra | None) -> bool:
        wire = self.wire()
        blocks = writes.partial_blocks()
        if not self._armed:
            self._check_armed(wire, wire.raising(self._arming()))
        try:
            if extra is not None:
                extra.prepare(wire)
            # Watched before they are read, in the same round trip.
            cells = writes.commands(wire, self.promised, [pack(b"WATCH", *blocks)] if blocks else ())
        except BaseException:
            self.disarm(wire)
            raise
        touched = self.marks | writes.paths
        if extra is not None:
            touched |= extra.touched
        commands: list[Command] = [_MULTI]
        if touched != self.marks:
            commands.append(pack(b"HSET", self.keys.writers, self.session.encode(), self._note(touched)))
        if extra is not None:
            commands += extra.commands()
        commands += cells
        commands.append(_EXEC)
        arming = self._arming()
        replies = self.sending(wire, [*commands, *arming])
        self._armed = False
        done = replies[len(commands) - 1]
        error = first_error([*replies[: len(commands)], *(done if isinstance(done, list) else [])])
        if error is not None:
            self.disarm(wire)
            raise error
        if done is not None:
            self.marks = touched
            # The watched keys are unchanged: the next step needs no round trip to check them.
            _, state, known = replies[-len(arming) :]
            self._armed = bool(known) and state == [self.document.dataset.encode(), b"%d" % self.base.revision]
        if not self._armed:
            self.disarm(wire)
        return done is not None

    def disarm(self, wire: Wire) -> None:
        """End the watch of a transaction that is not sent."""
        self._armed = False
        if not wire.broken:
            wire.pipe([pack(b"UNWATCH")])

    # -- structure -----------------------------------------------------------------------
    def own_structure(self) -> None:
        """Become the only session that may change the leaves; a new dataset has no other.

        Raises:
            StoreBusyError: another session is, for longer than `lock_timeout`.
        """
        if not self.published or self.owns:
            return
        until = time.monotonic() + self.lock_timeout
        while True:
            wire = self.wire()
            self._armed = False
            _, state = wire.raising(
                [
                    pack(b"WATCH", self.keys.head),
                    pack(b"HMGET", self.keys.head, b"dataset", b"revision", b"owner"),
                ]
            )
            try:
                if state[0] != self.document.dataset.encode():
                    raise self.replaced()
                raw = state[2]
                owner = None if raw is None else record(raw, Writing, self.url, self.keys.head, b"owner")
                if owner is None or dead_writers(wire, [owner]):
                    if state[1] != b"%d" % self.base.revision:
                        self._follow(wire)
                    note = self._note(())
                    *_, done = wire.raising([_MULTI, pack(b"HSET", self.keys.head, b"owner", note), _EXEC])
                    if done is not None:
                        self.owns = True
                        return
                    owner = None
            except BaseException:
                self.disarm(wire)
                raise
            if owner is not None and time.monotonic() > until:
                self.disarm(wire)
                raise refusals.busy(self.url, owner.who, self.lock_timeout)
            if time.monotonic() > until + 5:
                self.disarm(wire)
                raise TransientError(f"{self.url} is changed too often to take part", url=self.url)
            time.sleep(random.uniform(0.002, 0.02))

    def resize(self, path: Path, length: int) -> None:
        """Set the length of the first dimension: in place if the leaf grows, as a copy if it shrinks."""
        array = self.document.arrays[path]
        spec = array.spec.replace(shape=(length, *array.spec.shape[1:]))
        if length > array.spec.shape[0] and array.row and self._clean_beyond(path, array, spec):
            grown = Array(spec, array.number, array.cell, array.per_block, array.dataset, array.sealed, array.written)
            if array.mine is not None:
                grown.mine = np.zeros(grown.cells, np.bool_)
                grown.mine[: array.cells] = array.mine
            self.document.arrays[path] = grown
            if array.mine is not None:
                self.note_pending(self.wire())
            return
        if spec == array.spec:
            return
        # The old rows must not reappear when it grows again, nor for readers of the former length.
        self.document.arrays[path] = copy = new_array(spec, self.document.next, self.document.dataset, block=self.block)
        self.document.next += 1
        self.note_pending(self.wire())
        rows = min(length, array.spec.shape[0])
        self._copy_rows(path, array, copy, rows)
        self.drop([array])

    def _copy_rows(self, path: Path, array: Array, copy: Array, rows: int) -> None:
        step = max(1, STEP // max(1, array.row))
        for at in range(0, rows if array.row else 0, step):
            stop = min(rows, at + step)
            part = torch.empty((stop - at, *array.spec.shape[1:]), dtype=array.spec.dtype, device="cpu")
            index = (slice(at, stop, 1),)
            self.read(partial(_plan, path, array, index, part), self.wire())
            for change in plan_write(path, copy, index, part):
                self.put([change])

    def _clean_beyond(self, path: Path, array: Array, spec: LeafSpec) -> bool:
        """Check whether no cells exist where an array is to grow: a session that ended early may have left rows."""
        wire = self.wire()
        if array.mine is None:
            grown = Array(spec, array.number, array.cell, array.per_block, array.dataset)
            last = (grown.cells - 1) // 8
            (bits,) = wire.raising([pack(b"GETRANGE", array.bits_key, b"%d" % (array.cells // 8), b"%d" % last)])
            found = np.unpackbits(np.frombuffer(bits, np.uint8))[array.cells % 8 :]
            if found.any():
                return False
        used = array.spec.nbytes % array.cell
        if not used or (array.mine is not None and not array.mine[-1]):
            return True
        held = np.zeros((1, array.cell), np.uint8)
        self.read(lambda: [Run(path, array, array.cells - 1, array.cells, held[0])], wire)
        return bool((held[0, used:] == array.fill_cell()[used:]).all())


def _plan(path: Path, array: Array, index: StoreIndex, out: Tensor) -> list[Fetch]:
    return plan_read(path, array, index, out)[0]
