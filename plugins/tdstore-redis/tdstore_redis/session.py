"""One open dataset: its document, reads, and the detection of changes by other writers."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy as np

from tdstore.errors import (
    CorruptStoreError,
    StoreError,
    StoreNotFoundError,
)
from tdstore.storekit import accept_dirty
from tdstore.storekit.budget import SUSPECT_BYTES, check_declared, is_suspect, refuse_absent
from tdstore.types import Path, path_text
from tdstore_redis.cells.fetch import Damaged, fetch
from tdstore_redis.cells.layout import Array, Ids
from tdstore_redis.cells.plans import Fetch, everything
from tdstore_redis.connection import Line, Wire, pack
from tdstore_redis.document import DATASET, MAX_MANIFEST, Document, decode
from tdstore_redis.faults import ServerError
from tdstore_redis.transactions import keyspace
from tdstore_redis.transactions.keyspace import Keys, Writing

_TRIES = 3


class Session:
    """The reading half. `Writer` adds the rest."""

    def __init__(self, line: Line, *, verify: bool = True, max_bytes: int | None = None) -> None:
        self.line = line
        self.url = line.address.url
        self.keys = Keys(line.address.name)
        self.document = Document("", arrays={})
        self.base = self.document
        """The document of the server, as it was last read."""
        self.published = False
        self.verify_sizes = verify
        self.max_bytes = max_bytes
        self.pid = os.getpid()

    # -- opening -------------------------------------------------------------------------
    def load(self, *, accept: bool, tries: int = 10) -> None:
        """Read the manifest, and refuse a dataset that a writer left in the middle.

        Args:
            accept: accept such a dataset.
            tries: how often to read if a writer commits meanwhile.

        Raises:
            StoreNotFoundError: no dataset.
            DirtyStoreError: a writer was killed (`leaves` names the leaves).
            CorruptStoreError: the manifest is damaged, or blocks are missing or truncated.
        """
        with self.line.errors("opening"):
            document, writers = self.line.idempotent(self._load)
            dead = self.line.idempotent(lambda wire: dead_writers(wire, writers)) if writers else []
            if dead:  # a session that committed and disconnected between the two requests was not killed
                document, writers = self.line.idempotent(self._load)
                there = {record.session for record in writers}
                dead = [record for record in dead if record.session in there]
        touched = sorted({tuple(path) for record in dead for path in record.touched})
        accept_dirty(
            self.url,
            touched,
            accept=accept,
            writer=", ".join(sorted({d.who for d in dead})),
            hint="recover='accept' takes these leaves as they are; mode='w' replaces all",
        )
        check_declared(sum(a.spec.nbytes for a in document.arrays.values()), self.max_bytes, self.url)
        self.base = document
        self.document = document.copy()
        self.published = True
        if not self.verify_sizes:
            return
        with self.line.errors("opening"):
            short_leaf = self.line.idempotent(lambda wire: _short_leaf(wire, document))
            if short_leaf is None:
                return
            now = self.line.idempotent(lambda wire: fetch_document(wire, self.keys, self.url))
        if tries > 1 and now is not None and (now.dataset, now.revision) != (document.dataset, document.revision):
            self.load(accept=accept, tries=tries - 1)  # it was replaced between the two looks at it
        else:
            raise self.corrupt(*short_leaf)

    def _load(self, wire: Wire) -> tuple[Document, list[Writing]]:
        document = fetch_document(wire, self.keys, self.url)
        if document is None:
            raise StoreNotFoundError(f"nothing is stored at {self.url}", url=self.url)
        (reply,) = wire.raising([pack(b"HGETALL", self.keys.writers)], limit=keyspace.MAX_RECORDS_BYTES)
        return document, list(keyspace.records(reply, Writing, self.url, self.keys.writers).values())

    # -- reading -------------------------------------------------------------------------
    def read(self, plan: Callable[[], Iterable[Fetch]], wire: Wire | None = None) -> None:
        """Run the fetches of a plan, which is created again after a conflict with a writer.

        Raises:
            CorruptStoreError: a cell is damaged or missing.
            StoreError: another writer replaced the leaf.
        """
        with self.line.errors("reading"):
            for turn in range(_TRIES):
                try:
                    if wire is not None:
                        fetch(wire, plan(), self.promised)
                    else:
                        self.line.idempotent(lambda one: fetch(one, plan(), self.promised))
                except Damaged as damage:
                    # Between the read of a cell and the check whether it was ever written, it may have been written.
                    if turn == _TRIES - 1:
                        self.explain(damage)
                else:
                    return

    def explain(self, damage: Damaged) -> None:
        """Raise the error for a damaged cell: a conflict if the leaf was replaced by now, otherwise corruption."""
        if damage.array.mine is None:
            now = self.line.idempotent(lambda wire: fetch_document(wire, self.keys, self.url))
            there = None if now is None or now.dataset != self.document.dataset else now.arrays.values()
            if there is None or all(a.number != damage.array.number for a in there):
                raise self.replaced()
        raise self.corrupt(damage.path, damage.reason)

    def promised(self, wire: Wire, array: Array, ids: Ids) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Return which of some sorted cells have been written."""
        if array.mine is not None:
            return array.mine[ids]
        first, last = int(ids[0]) // 8, int(ids[-1]) // 8
        key = array.bits_key
        dataset, revision, bits, count = [
            reply
            for replies in wire.raising(
                [
                    pack(b"HMGET", self.keys.head, b"dataset", b"revision"),
                    pack(b"GETRANGE", key, b"%d" % first, b"%d" % last),
                    pack(b"BITCOUNT", key),
                ]
            )
            for reply in (replies if isinstance(replies, list) else [replies])
        ]
        if dataset != self.document.dataset.encode():
            raise self.replaced()
        if revision != b"%d" % self.base.revision:
            # It may have been completed meanwhile; then there is no bitmap any more.
            self.refresh(wire)
            now = self.document.arrays
            if any(a.number == array.number and a.sealed > int(ids[0]) for a in now.values()):
                return ids < array.sealed
            (count,) = wire.raising([pack(b"BITCOUNT", key)])
        if count < array.written:
            return np.ones(len(ids), np.bool_)  # the bitmap is lost: cells that were never written are unknown
        octets = np.frombuffer(bytes(bits).ljust(last - first + 1, b"\0"), np.uint8)
        return np.unpackbits(octets)[ids - first * 8].astype(np.bool_)

    def refresh(self, wire: Wire) -> Document:
        """Adopt the commits of others, as far as they do not change the structure of the leaves here.

        Raises:
            StoreError: the dataset was replaced or removed.
        """
        now = fetch_document(wire, self.keys, self.url)
        if now is None or now.dataset != self.document.dataset:
            raise self.replaced()
        by_number = {a.number: a for a in now.arrays.values()}
        for array in {id(a): a for d in (self.base, self.document) for a in d.arrays.values()}.values():
            other = by_number.get(array.number)
            if other is not None and other.cell == array.cell and other.per_block == array.per_block:
                array.sealed = max(array.sealed, min(other.sealed, array.cells))
                array.written = max(array.written, other.written) if other.sealed < other.cells else 0
        return now

    def faults(self, path: Path, array: Array) -> str | None:
        """Return the fault of a leaf on the server; None if there is none."""
        for piece in everything(path, array):
            try:
                self.read(partial(list, [piece]))
            except CorruptStoreError as error:
                return error.message
        if array.mine is not None:
            return None
        with self.line.errors("verifying"):
            long = self.line.idempotent(lambda wire: _too_long(wire, array))
        return None if long is None else f"block {long} is longer than it should be"

    def check_room(self, reads: Iterable[tuple[Path, Array, int]]) -> None:
        """Refuse to allocate far more memory than the server has data.

        Args:
            reads: each with the bytes that it is to allocate.

        Raises:
            CorruptStoreError: there is far less, and `max_bytes` does not allow it.
        """
        every = list(reads)
        if sum(size for *_, size in every) <= SUSPECT_BYTES:
            return
        arrays = {path: array for path, array, _ in every}
        wanted = dict.fromkeys(arrays, 0)
        for path, array, size in every:
            wanted[path] = min(wanted[path] + size, array.spec.nbytes)  # repeated rows are intended
        stored = {path: self._stored(path, array) for path, array in arrays.items()}
        total, there = sum(wanted.values()), sum(stored.values())
        if self.max_bytes is None and is_suspect(total, there):
            worst = max(wanted, key=lambda path: wanted[path] - stored[path])
            raise refuse_absent(worst, total, there, self.url)

    def _stored(self, path: Path, array: Array) -> int:
        """Return the bytes that the server has of a leaf; missing ones, which a read will report, count too.

        Raises:
            CorruptStoreError: a leaf that is complete lacks a block.
        """
        if array.mine is not None:
            return int(np.count_nonzero(array.mine)) * array.cell
        with self.line.errors("reading"):
            if array.sealed == array.cells:
                missing = self.line.idempotent(lambda wire: _too_short(wire, array))
                if missing is not None:
                    raise self.corrupt(path, f"block {missing} is missing or short")
                return array.spec.nbytes
            (count,) = self.line.idempotent(lambda wire: wire.raising([pack(b"BITCOUNT", array.bits_key)]))
        return max(int(count), array.sealed) * array.cell

    def end(self) -> None:
        """Close the connection."""
        self.line.close()

    # -- errors --------------------------------------------------------------------------
    def corrupt(self, path: Path, reason: str) -> CorruptStoreError:
        """Build the error for a damaged leaf."""
        return CorruptStoreError(
            f"{self.url}: leaf {path_text(path)}: {reason}",
            url=self.url,
            hint="restore the server's data; does its maxmemory-policy evict keys? (noeviction keeps them)",
        )

    def replaced(self) -> StoreError:
        """Build the error for a dataset that another writer replaced."""
        return StoreError(
            f"{self.url} was replaced, or its structure changed, by another writer since it was opened, "
            "or the server lost it",
            url=self.url,
            hint="open it again",
        )


def new_dataset() -> str:
    """Return a name for a new generation."""
    return secrets.token_hex(8)


def fetch_document(wire: Wire, keys: Keys, url: str) -> Document | None:
    """Fetch and decode the manifest, after a check of its size."""
    size, dataset = wire.raising(
        [pack(b"HSTRLEN", keys.head, b"manifest"), pack(b"HGET", keys.head, b"dataset")], limit=MAX_RECORDS
    )
    if dataset is None and not size:
        return None
    if size > MAX_MANIFEST:
        raise CorruptStoreError(f"{url}: the manifest has {size} bytes, more than {MAX_MANIFEST}", url=url)
    dataset, revision, data = wire.raising(
        [pack(b"HMGET", keys.head, b"dataset", b"revision", b"manifest")], limit=MAX_MANIFEST + MAX_RECORDS
    )[0]
    if dataset is None and data is None:
        return None
    if data is None or dataset is None or not DATASET.match(dataset.decode("latin-1")):
        raise CorruptStoreError(f"{url}: the head of the dataset is incomplete", url=url)
    document = decode(data, url=url)
    if document.dataset.encode() != dataset or b"%d" % document.revision != revision:
        raise CorruptStoreError(f"{url}: the manifest is of another generation than its head", url=url)
    return document


MAX_RECORDS = 1 << 20


def dead_writers(wire: Wire, found: list[Writing]) -> list[Writing]:
    """Return the sessions whose process has ended (or is not visible)."""
    alive = keyspace.living(wire, found)
    return [record for record in found if alive is None or record.session not in alive]


def _short_leaf(wire: Wire, document: Document) -> tuple[Path, str] | None:
    """Return a leaf whose last block is missing or truncated, and how; takes one round trip."""
    sealed = [(path, a, (a.sealed - 1) // a.per_block) for path, a in document.arrays.items() if a.sealed]
    if not sealed:
        return None
    sizes = wire.raising([pack(b"STRLEN", a.key(block)) for _, a, block in sealed])
    for (path, a, block), size in zip(sealed, sizes, strict=True):
        need = (a.sealed - block * a.per_block) * a.stride
        if size < need:
            return path, f"block {block} has {size} bytes, not {need}"
    return None


def _too_short(wire: Wire, array: Array) -> int | None:
    return _find_block(wire, array, lambda size, block: size < array.block_size(block))


def _too_long(wire: Wire, array: Array) -> int | None:
    # The last block may have more rows than the last commit: a writer appends them, or ended before it.
    return _find_block(wire, array, lambda size, block: size > array.per_block * array.stride)


def _find_block(wire: Wire, array: Array, is_faulty: Callable[[int, int], bool]) -> int | None:
    for at in range(0, array.blocks, 4096):
        blocks = range(at, min(at + 4096, array.blocks))
        for block, size in zip(blocks, wire.raising([pack(b"STRLEN", array.key(b)) for b in blocks]), strict=True):
            if is_faulty(size, block):
                return block
    return None


def first_error(replies: Iterable[Any]) -> ServerError | None:
    """Return the most specific error reply: the cause of an aborted transaction, rather than the abort."""
    errors = [reply for reply in replies if isinstance(reply, ServerError)]
    return next((e for e in errors if e.code != "EXECABORT"), errors[0] if errors else None)
