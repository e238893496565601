"""The two commits: a new dataset replaces the old one; changes in place become the next revision."""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from tdstore.errors import CorruptStoreError, StoreError, StoreExistsError
from tdstore.header import Header
from tdstore.storekit import WriterState, refusals
from tdstore_redis.cells.layout import Array
from tdstore_redis.connection import Reply, Wire, pack
from tdstore_redis.document import DATASET, Document, encode
from tdstore_redis.session import dead_writers, fetch_document, first_error, new_dataset
from tdstore_redis.transactions import keyspace
from tdstore_redis.transactions.keyspace import Writing, waste
from tdstore_redis.transactions.row_writes import put_back
from tdstore_redis.transactions.writer import Writer


def begin(writer: Writer, *, exclusive: bool) -> None:
    """Start a new dataset, invisible before `publish`; remains of dead writers are removed.

    Raises:
        StoreExistsError: a dataset exists, and `exclusive`; or another application has keys of that name.
    """
    with writer.line.errors("opening"):
        replaces = writer.line.idempotent(lambda wire: _tidy(writer, wire, new=True))
    if exclusive and replaces is not None:
        raise refusals.place_exists(writer.url)
    writer.replaces = replaces
    writer.exclusive = exclusive
    writer.document = writer.base = Document(new_dataset(), arrays={})


def _foreign_keys(writer: Writer, keys: Sequence[bytes]) -> StoreExistsError:
    names = ", ".join(map(keyspace.shown, keys))
    return refusals.other_kind(writer.url, f"the name of keys of another application: {names}")


def tidy(writer: Writer) -> None:
    """Remove the remains of dead writers from an existing dataset."""
    with writer.line.errors("opening"):
        writer.line.idempotent(lambda wire: _tidy(writer, wire))


def _tidy(writer: Writer, wire: Wire, *, new: bool = False) -> bytes | None:
    """Remove the remains of dead writers; return the current dataset.

    Args:
        writer: the writer.
        wire: the connection.
        new: refuse keys of other applications, which `publish` would replace.
    """
    keys = writer.keys
    *kinds, dataset = wire.pipe(
        [
            *(pack(b"TYPE", key) for key in (keys.head, keys.writers, keys.pending)),
            pack(b"HGET", keys.head, b"dataset"),
        ]
    )
    if new:
        _refuse_foreign_keys(writer, wire, kinds, dataset)
    error = first_error([*kinds, dataset])
    if error is not None:
        raise error
    if kinds[2] != b"none":
        try:
            document = fetch_document(wire, keys, writer.url)
        except CorruptStoreError:
            return bytes(dataset or b"?")  # the arrays in use are unknown: nothing is removed
        keep = [] if document is None else [(document.dataset, a.number) for a in document.arrays.values()]
        keyspace.clean(wire, keys, writer.url, keep)
    return None if dataset is None else bytes(dataset)


def _refuse_foreign_keys(writer: Writer, wire: Wire, kinds: Sequence[Reply], dataset: Reply) -> None:
    """Refuse keys that a new dataset would have, and that tdstore did not write.

    Args:
        writer: the writer.
        wire: the connection.
        kinds: the types of the head, of the writers and of the pending arrays.
        dataset: the name in the head.

    Raises:
        StoreExistsError: it names the keys.
    """

    def is_other(kind: Reply) -> bool:
        return isinstance(kind, bytes) and kind not in (b"none", b"hash")

    names = (writer.keys.head, writer.keys.writers, writer.keys.pending)
    found = [key for key, kind in zip(names, kinds, strict=True) if is_other(kind)]
    if kinds[0] == b"hash" and dataset is None:
        found.append(writer.keys.head)
    if dataset is None and not found:
        # Beside a dataset of ours, a field that cannot be read is damage, which has an error of its own.
        for key, kind, of in ((names[1], kinds[1], Writing), (names[2], kinds[2], keyspace.Pending)):
            if kind == b"hash":
                (reply,) = wire.raising([pack(b"HGETALL", key)], limit=keyspace.MAX_RECORDS_BYTES)
                try:
                    keyspace.records(reply, of, writer.url, key)
                except CorruptStoreError:
                    found.append(key)
    if found:
        raise _foreign_keys(writer, found)


def forgive(writer: Writer) -> None:
    """Accept leaves as dead writers left them: each of their steps was atomic, so the checksums match."""
    with writer.line.errors("opening"):
        wire = writer.wire()
        (reply,) = wire.raising([pack(b"HGETALL", writer.keys.writers)], limit=keyspace.MAX_RECORDS_BYTES)
        found = keyspace.records(reply, Writing, writer.url, writer.keys.writers)
        dead = [record.session for record in dead_writers(wire, list(found.values()))]
        if dead:
            wire.call(b"HDEL", writer.keys.writers, *[session.encode() for session in dead])


# -- the first commit ---------------------------------------------------------------------


def publish(writer: Writer, header: Header) -> None:
    """Replace the current dataset by the new one, in one step; then remove the former.

    Raises:
        StoreExistsError: mode "x", and another process was faster.
        StoreBusyError: another writer published since this store was opened, or still writes in place.
    """
    document = writer.document.copy()
    document.header, document.revision = header, 1
    with writer.line.errors("committing"):
        if not writer.private():
            writer.make({})  # the note that shows, in the transaction, that the server remembers us
        sealed = {id(a): (a.sealed, a.written) for a in document.arrays.values()}
        bitmaps = _settle(document.arrays.values())
        try:
            manifest = encode(document, url=writer.url)
            old = _swap(writer, document, manifest, bitmaps)
        except BaseException:
            for array in document.arrays.values():
                array.sealed, array.written = sealed[id(array)]
            raise
        for array in document.arrays.values():
            array.mine = None
        writer.document, writer.base = document, document.copy()
        writer.published, writer.known, writer._noted = True, header, False
        if old is not None:
            sweep(writer, old)


def _settle(arrays: Iterable[Array]) -> list[bytes]:
    """Record the written cells of each new array; return commands that store the bitmaps of those with gaps."""
    commands = []
    for array in arrays:
        if array.mine is None:
            continue
        count = int(np.count_nonzero(array.mine))
        array.sealed, array.written = (array.cells, 0) if count == array.cells else (0, count)
        if array.sealed < array.cells and count:
            commands.append(pack(b"SET", array.bits_key, np.packbits(array.mine).tobytes()))
    return commands


def _swap(writer: Writer, document: Document, manifest: bytes, bitmaps: list[bytes]) -> bytes | None:
    """Run the transaction. Returns the field in `pending` that lists the replaced arrays."""
    keys, mine = writer.keys, writer.session.encode()
    until = time.monotonic() + writer.lock_timeout
    while True:
        wire = writer.wire()
        _, state, note, notes, fields = wire.raising(
            [
                pack(b"WATCH", keys.head, keys.pending, keys.writers),
                pack(b"HMGET", keys.head, b"dataset", b"owner"),
                pack(b"HEXISTS", keys.pending, mine),
                pack(b"HGETALL", keys.writers),
                pack(b"HLEN", keys.head),
            ],
            limit=keyspace.MAX_RECORDS_BYTES,
        )
        try:
            if not note:
                raise writer.lose("the server forgot what was written: it was restarted, or its data were removed")
            if state[0] is None and fields:
                raise _foreign_keys(writer, [keys.head])
            if state[0] != writer.replaces:
                if writer.exclusive:
                    raise refusals.place_exists(writer.url)
                raise refusals.overtaken(writer.url, "what the other saved is there; save again to replace it")
            others = others_writing(writer, wire, state[1], notes)
            if not others:
                field, listed = replaced_arrays(writer, wire, state[0])
                commands = [
                    pack(b"MULTI"),
                    *bitmaps,
                    pack(b"DEL", keys.head, keys.writers),
                    pack(b"HSET", keys.head, b"dataset", document.dataset.encode(), b"revision", b"1"),
                    pack(b"HSET", keys.head, b"manifest", manifest),
                    pack(b"HDEL", keys.pending, mine),
                    *([pack(b"HSET", keys.pending, field, listed)] if listed is not None else []),
                ]
                if writer.execute(wire, commands):
                    return field if listed is not None else None
        except BaseException:
            writer.disarm(wire)
            raise
        if others and time.monotonic() > until:
            writer.disarm(wire)
            raise refusals.busy(writer.url, ", ".join(sorted(others)), writer.lock_timeout)
        if time.monotonic() > until + 5:
            raise refusals.contended(writer.url, writer.lock_timeout + 5)
        time.sleep(random.uniform(0.002, 0.02))


def others_writing(writer: Writer, wire: Wire, owner: bytes | None, notes: list[bytes]) -> set[str]:
    """Return the writers of other processes that have written in place, and not committed."""
    found = list(keyspace.records(notes, Writing, writer.url, writer.keys.writers).values())
    if owner is not None:
        found.append(keyspace.record(owner, Writing, writer.url, writer.keys.head, b"owner"))
    foreign = [record for record in found if not record.here]
    alive = keyspace.living(wire, foreign) if foreign else set()
    return {record.who for record in foreign if alive is not None and record.session in alive}


def replaced_arrays(writer: Writer, wire: Wire, dataset: bytes | None) -> tuple[bytes, bytes | None]:
    """Return the field in `pending`, and the record, of the arrays of a dataset to be removed; None: it has none."""
    if dataset is None or not DATASET.match(dataset.decode("latin-1")):
        return b"", None
    try:
        old = fetch_document(wire, writer.keys, writer.url)
    except CorruptStoreError:
        return b"", None  # arrays of a damaged manifest are not deleted
    if old is None or not old.arrays:
        return b"", None
    return b"old-" + dataset, waste(old.dataset, list(old.arrays.values()))


def sweep(writer: Writer, field: bytes) -> None:
    """Remove the arrays of a note. If this process is killed meanwhile, the next writer continues."""
    wire = writer.wire()
    listed = wire.call(b"HGET", writer.keys.pending, field)
    if listed is not None:
        keyspace.remove(wire, keyspace.record(listed, keyspace.Pending, writer.url, writer.keys.pending, field))
        wire.call(b"HDEL", writer.keys.pending, field)


# -- later commits ------------------------------------------------------------------------


def commit(writer: Writer, header: Header) -> None:
    """Make the changes in place the next revision.

    Raises:
        StoreBusyError: another writer changed the structure too. None of these changes is visible then.
    """
    with writer.line.errors("committing"):
        writer.unstage()
        until = time.monotonic() + writer.lock_timeout
        document, changed = writer.document, header != writer.known
        structure = changed or writer.private() or writer.dropped or _moved(writer)
        if not structure and not writer.marks and not writer.owns:
            return
        if structure:
            writer.own_structure()
            if changed and writer.base.header != writer.known:
                raise refusals.overtaken(writer.url)
        while not _commit(writer, header, bool(structure)):
            if time.monotonic() > until:
                raise refusals.contended(writer.url, writer.lock_timeout)
            time.sleep(random.uniform(0, 0.01))
        writer.known = header
        writer.replaced_rows.clear()
        dropped, writer.dropped = writer.dropped, []
        for array in document.arrays.values():
            array.mine = None
        if dropped:
            sweep(writer, b"old-%d-" % writer.base.revision + document.dataset.encode())


def _moved(writer: Writer) -> bool:
    return not Document("", header=writer.base.header, arrays=writer.document.arrays).same_structure(writer.base)


def _commit(writer: Writer, header: Header, structure: bool) -> bool:
    keys, mine = writer.keys, writer.session.encode()
    wire = writer.wire()
    writer.disarm(wire)
    _, state, note, pending = wire.raising(
        [
            pack(b"WATCH", keys.head, *([keys.pending] if writer._noted else [])),
            pack(b"HMGET", keys.head, b"dataset", b"revision"),
            pack(b"HEXISTS", keys.writers, mine),
            pack(b"HEXISTS", keys.pending, mine),
        ]
    )
    try:
        if state[0] != writer.document.dataset.encode():
            raise writer.replaced()
        if (writer.marks and not note) or (writer._noted and not pending):
            raise writer.lose("the server forgot what was written: it was restarted, or its data were removed")
        if state[1] != b"%d" % writer.base.revision:
            writer._follow(wire)
        full = _completed(writer, wire)
        bitmaps = _settle(writer.document.arrays.values())
        commands = [pack(b"MULTI"), *bitmaps]
        after = writer.document.copy()
        if structure or full is not None:
            after.revision = writer.base.revision + 1
            after.header = header if structure and header != writer.known else writer.base.header
            commands.append(
                pack(
                    b"HSET", keys.head, b"revision", b"%d" % after.revision, b"manifest", encode(after, url=writer.url)
                )
            )
        if writer.owns:
            commands.append(pack(b"HDEL", keys.head, b"owner"))
        if writer.marks:
            commands.append(pack(b"HDEL", keys.writers, mine))
        if writer._noted:
            commands.append(pack(b"HDEL", keys.pending, mine))
        if writer.dropped:
            field = b"old-%d-" % after.revision + after.dataset.encode()
            commands.append(pack(b"HSET", keys.pending, field, waste(after.dataset, writer.dropped)))
        if full:
            commands.append(pack(b"UNLINK", *full))
        if not writer.execute(wire, commands):
            return False
    except BaseException:
        writer.disarm(wire)
        raise
    writer.document, writer.base = after, after.copy()
    writer.marks, writer.owns, writer._noted = set(), False, False
    return True


def _completed(writer: Writer, wire: Wire) -> list[bytes] | None:
    """Return bitmaps that are no longer needed since every cell is written. None when nothing changed."""
    gaps = [
        writer.document.arrays[path]
        for path in sorted(writer.marks)
        if path in writer.document.arrays and writer.document.arrays[path].mine is None
    ]
    gaps = [a for a in gaps if a.sealed < a.cells]
    if not gaps:
        return None
    full: list[bytes] = []
    counts = wire.raising([pack(b"BITCOUNT", a.bits_key) for a in gaps])
    news = False
    for array, count in zip(gaps, counts, strict=True):
        before = (array.sealed, array.written)
        first = np.arange(0, array.sealed, dtype=np.int64)
        if count == array.cells or (len(first) and _all_written(wire, array)):
            array.sealed, array.written = array.cells, 0
            full.append(array.bits_key)
        else:
            array.written = max(array.written, count)
        news |= before != (array.sealed, array.written)
    return full if news else None


def _all_written(wire: Wire, array: Array) -> bool:
    """Check whether the bitmap has all cells beyond the sealed ones."""
    first = array.sealed // 8
    bits = wire.call(b"GETRANGE", array.bits_key, b"%d" % first, b"%d" % ((array.cells - 1) // 8))
    octets = np.frombuffer(bytes(bits).ljust((array.cells - 1) // 8 + 1 - first, b"\0"), np.uint8)
    return bool(np.unpackbits(octets)[array.sealed - first * 8 :][: array.cells - array.sealed].all())


@dataclass(frozen=True, slots=True)
class Steps:
    """The steps of the commit policy for a writer."""

    writer: Writer

    def state(self) -> WriterState:
        writer = self.writer
        return WriterState(
            pid=writer.pid,
            writable=True,
            published=writer.published,
            structure=writer.owns,
            rows=bool(writer.marks or writer.owns or writer.staging),
            lost=writer._lost is not None,
        )

    def drop_structure(self) -> None:
        self.writer.replaced_rows.clear()  # or `take_back` would restore what was there before them
        take_back(self.writer)

    def commit_rows(self) -> None:
        commit(self.writer, self.writer.known)

    def unmark(self) -> None:
        """Do nothing: a writer without rows and structure has no mark."""

    def take_back(self) -> None:
        """Do nothing: each step was durable, and the next opener finds the marks."""

    def remove_uncommitted(self) -> None:
        if not self.writer.published:
            discard(self.writer)

    def release(self) -> None:
        self.writer.end()


def take_back(writer: Writer) -> None:
    """Return to the leaves of the last commit, and restore rows that were written while these changed.

    The next writer removes what remains on a server that does not answer.

    Raises:
        StoreError: rows could not be restored, and none of them was; another call tries again.
    """
    try:
        if writer.replaced_rows and writer._lost is None:
            put_back(writer)
    finally:
        private, following = writer.private(), writer.document.next
        if writer.published:
            writer.document = writer.base.copy()
        else:
            writer.document = Document(writer.document.dataset, arrays={})
        writer.document.next = following  # numbers are never used again
        writer.dropped = []
        _release(writer, private)


def _release(writer: Writer, private: list[Array]) -> None:
    """Remove uncommitted arrays, and let others change the structure."""
    if writer._lost is not None:
        return
    try:
        with writer.line.errors("taking back changes"):
            wire = writer.wire()
            writer.drop(private)
            field = writer.session.encode()
            commands = [pack(b"HDEL", writer.keys.pending, field)] if writer._noted else []
            commands += [pack(b"HDEL", writer.keys.head, b"owner")] if writer.owns else []
            if commands:
                wire.raising(commands)
    except StoreError:
        return  # the remains are invisible, and the next writer removes them
    writer._noted = writer.owns = writer._armed = False


def discard(writer: Writer) -> None:
    """Remove a dataset, or arrays, that were never committed. After a lost connection the next writer does."""
    if not writer._noted or writer._lost is not None or writer._wire is None or not writer._wire.alive():
        return
    with writer.line.errors("closing"):
        wire = writer.wire()
        for array in writer.private():
            writer.drop([array])
        wire.call(b"HDEL", writer.keys.pending, writer.session.encode())
        writer._noted = False
