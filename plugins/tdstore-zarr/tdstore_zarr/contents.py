"""The contents of an opened store: read from its root, compared with the storage, updated after commits of others."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import threading
import time
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from tdstore import lifetime
from tdstore.dtypes import numpy_dtype
from tdstore.engine import EngineCap
from tdstore.errors import CorruptStoreError, StoreBusyError, StoreNotFoundError
from tdstore.header import Header
from tdstore.index.ranges import index_shape
from tdstore.storekit import accept_dirty, refusals
from tdstore.storekit.budget import SUSPECT_BYTES, check_declared, is_suspect, refuse_absent
from tdstore.storekit.foreign_strings import StringsLeaf
from tdstore.threads import ThreadPool, without_interrupts
from tdstore.types import Fault, LeafSpec, Path, Read, path_text
from tdstore_zarr.codec import bridge
from tdstore_zarr.codec.buffers import Buffers, seal_of
from tdstore_zarr.codec.codecs import ChunkError
from tdstore_zarr.foreign import Foreign, relist
from tdstore_zarr.layout.document import NAME, Document, Mark, decode_root
from tdstore_zarr.layout.leaf import TAIL, UNKNOWN, Leaf, Stored
from tdstore_zarr.layout.names import Names
from tdstore_zarr.place.base import Place
from tdstore_zarr.place.redo_log import LoggedEngine, Put, without_log
from tdstore_zarr.reading.reader import Job, Reader

_log = logging.getLogger("tdstore")
MAX_ASKED = 10_000
LOOKED_AT = 20_000
"""Objects of a folder whose sizes are compared at opening; those of a larger store are as they are read."""
PREFETCH = 1024
"""Shard indices that are fetched at opening, where a request is dear."""


class Rows(NamedTuple):
    """The objects of a leaf at one moment, and the positions of uncommitted ones."""

    objects: dict[int, Stored]
    puts: dict[str, Put]


class Contents:
    """An opened store: its catalogue, its bytes, and whether they are those of the last commit."""

    def __init__(
        self, place: Place, *, writable: bool, durable: bool, timeout: float, trust: bool,
        buffer_bytes: int, max_bytes: int | None,
    ) -> None:  # fmt: skip
        self.place = place
        self.closed = False
        self.url = place.url
        self.writable = writable
        self.durable = durable
        self.timeout = timeout
        self.trust = trust
        self.max_bytes = max_bytes
        self.pid = os.getpid()
        self.document = Document(ours=True)
        self._names: Names | None = Names()
        self.root = b""
        """The root as it was read or committed, without a log."""
        self.marked: set[Path] = set()
        """Leaves into which rows were written since."""
        self._moved: dict[Path, Rows | None] = {}
        """Leaves that were made, deleted, renamed or resized since, with the rows that were written before that."""
        self.version = 0
        """How often a reader followed another writer's commit."""
        self._opened: dict[Path, Leaf] | None = None
        """The leaves as they were when the store was opened, where it followed a commit since."""
        self._following = threading.Lock()
        self._accept = False
        self.accepted = False
        """Whether the store differs from its manifest and was accepted as it is: closing writes a new manifest."""
        self.foreign: Foreign | None = None
        self.reader = Reader(place.engine, self.url, local=place.local)
        self.buffers = Buffers(place.engine, self.reader, buffer_bytes)

    @property
    def leaves(self) -> dict[Path, Leaf]:
        """Return every leaf."""
        return self.document.leaves

    @property
    def strings(self) -> dict[Path, StringsLeaf]:
        """Return the leaves in memory: the strings of another program's store."""
        return {} if self.foreign is None else self.foreign.tensors

    @property
    def engine(self) -> LoggedEngine[Any]:
        """Return the engine that reads and writes bytes."""
        return self.place.engine

    # -- opening -------------------------------------------------------------------------
    def load(self, *, verify: str, accept: bool) -> None:
        """Read the root, and compare with the storage. A writer waits for an active one; a reader for none."""
        self._accept = accept
        deadline, settled = time.monotonic() + self.timeout, False
        while True:
            self._read_root()
            if not self.writable:
                break
            who = self.place.holder(self.document.mark)
            if who is None:
                if self.document.log is None:
                    break
                with contextlib.suppress(StoreBusyError):  # another process was faster
                    self._redo()
                    break
            elif who == "this process" and not settled:
                settled = True
                lifetime.settle()  # a handle that was dropped may be about to be closed
                continue
            elif time.monotonic() >= deadline or who == "this process":
                raise refusals.busy(self.url, who)
            time.sleep(0.005)
        self._take_in(self.document)
        if self.document.mark is not None:
            self._judge(self.document.mark, accept)
        if self.document.ours and not self.accepted:
            self._verify(verify)
        if not self.place.local:
            self._prefetch()

    def _read_root(self) -> None:
        self.root = self.place.read_root()
        self.document = self._decode(self._accept)
        self.engine.follow(self.document.log)
        if self.document.log is not None:
            self.root = without_log(self.root)

    def _redo(self) -> None:
        """Finish the commit of a writer that ended."""
        self.place.take()
        try:
            self._settle_log()
        finally:
            self.place.release()

    def _settle_log(self) -> None:
        """Move committed objects to their places."""
        self.engine.apply()
        if self.place.redo and self.durable:
            self.place.sync()
        self._end_log()
        self.engine.clean()

    @without_interrupts
    def _end_log(self) -> None:
        if self.place.redo:
            self.place.put_root(self.root, sync=self.durable)
        self.engine.applied()

    def _take_in(self, document: Document) -> None:
        """Adopt the nodes of a document, and look up those that it leaves out."""
        self.document, self.foreign, self._names = document, None, None
        if not document.ours:
            wary = not self.trust and self.max_bytes is None
            self.foreign = Foreign(self.place, document, trust=self.trust, wary=wary, leaves=not self.writable)
            self.foreign.load()
        check_declared(sum([leaf.spec.nbytes for leaf in document.leaves.values()]), self.max_bytes, self.url)

    @property
    def names(self) -> Names:
        """Return the names of nodes."""
        if self._names is None:
            names, document = Names(), self.document
            for path, node in [*document.groups.items(), *((p, leaf.node) for p, leaf in self.leaves.items())]:
                names.put(path, node)
            for node, path in document.copies.items():
                names.put(path, node)
            self._names = names
        return self._names

    def follow(self, *, ask: bool) -> bool:
        """Read the root again if another writer has committed since; return whether it has.

        Args:
            ask: whether to check even if that costs a request.
        """
        with self._following:
            if self.place.changed() is None and not (ask and self.place.stale()):
                return False
            opened = self.leaves if self._opened is None else self._opened
            try:
                self._read_root()
            except StoreNotFoundError:
                return False
            self.place.forget()
            self.reader = Reader(self.engine, self.url, local=self.place.local)
            self.buffers = Buffers(self.engine, self.reader, self.buffers.limit)
            self._take_in(self.document)
            self._opened = opened
            self.version += 1
            return True

    def is_as_opened(self, path: Path) -> bool:
        """Check whether a leaf is unchanged since the store was opened, except for its rows; added ones are fine."""
        if self._opened is None or path in self.strings:
            return True
        old, new = self._opened.get(path), self.leaves.get(path)
        if old is None or new is None or old.spec.dtype != new.spec.dtype:
            return False
        was, now = old.spec.shape, new.spec.shape
        return was == now or (len(was) == len(now) > 0 and was[1:] == now[1:] and was[0] < now[0])

    def shape(self, leaf: Leaf) -> tuple[int, ...]:
        """Return the shape of a leaf when the store was opened: a reader sees no later rows."""
        return self.opened_spec(leaf).shape

    def opened_spec(self, leaf: Leaf) -> LeafSpec:
        """Return the spec of a leaf when the store was opened; for a leaf created since, the current one."""
        opened = None if self._opened is None else self._opened.get(leaf.path)
        return leaf.spec if opened is None else opened.spec

    def _as_committed(self) -> None:
        """Drop all changes in memory since the last commit."""
        self.buffers.clear()
        self.reader.forget_all()
        self._take_in(self._decode(self._accept))
        if self.document.mark is not None and self._accept:
            self._judge(self.document.mark, accept=True)

    def _decode(self, accept: bool) -> Document:
        try:
            return decode_root(self.root, url=self.url, trust=self.trust)
        except RecursionError:
            raise self._too_deep() from None
        except CorruptStoreError:
            if not accept:
                raise
            # Without our manifest it is a store like another program's.
            root = msgspec.json.decode(self.root)
            root.get("attributes", {}).pop("tdstore", None)
            self.accepted = True
            return decode_root(msgspec.json.encode(root), url=self.url, trust=self.trust)

    def _too_deep(self) -> CorruptStoreError:
        return CorruptStoreError(f"{self.url}: the metadata in its {NAME} is nested too deep", url=self.url)

    def _judge(self, mark: Mark, accept: bool) -> None:
        """Judge the marker of a writer that ended during a change of chunks in place: accept chunks as committed."""
        named = [path for path in map(tuple, mark.leaves) if path in self.leaves]

        def damaged() -> list[Path]:
            unknown = not self.document.ours or len(named) < len(mark.leaves)
            return list(mark.leaves) if unknown or self.faults(named) else []

        if not (accept or mark.leaves):
            raise refusals.dirty(self.url, [], writer=mark.who)  # its structure was being changed
        if accept_dirty(self.url, mark.leaves, accept=accept, damaged=damaged, writer=mark.who):
            for path in named:
                if EngineCap.LIST in self.engine.can:
                    relist(self.engine, self.leaves[path])
        self.accepted = True

    def _verify(self, verify: str) -> None:
        if verify == "full":
            for fault in self.faults(self.leaves):
                raise CorruptStoreError(f"{self.url}: {path_text(fault.path)}: {fault.reason}", url=self.url)
            # Without renames, nodes are put before the root: the root's copy of them is valid.
            for node, data in self.document.metadata.items() if self.place.local else ():
                self._verify_node(node, data)
        elif verify == "size" and self.place.local:
            engine, leaves = self.place.engine, self.leaves.values()
            if sum([len(leaf.objects) for leaf in leaves]) > LOOKED_AT:
                return
            for leaf in leaves:
                for number, stored in leaf.objects.items():
                    try:
                        size = engine.size(leaf.key(number))
                    except StoreNotFoundError:
                        raise self.reader.corrupt(leaf, number, "was written and is missing") from None
                    if size != stored.size:
                        raise self.reader.corrupt(leaf, number, f"has {size} bytes instead of {stored.size}")

    def _verify_node(self, node: str, data: Any) -> None:
        where = self.place.engine.where(f"{node}/{NAME}")
        try:
            there = msgspec.json.decode(bytes(self.place.engine.get(f"{node}/{NAME}").data))
        except StoreNotFoundError:
            raise CorruptStoreError(f"{where} is missing", url=self.url) from None
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            raise CorruptStoreError(f"{where} is not readable: {error}", url=self.url) from error
        try:
            same = there == data
        except RecursionError:
            raise CorruptStoreError(f"{where} is nested too deep", url=self.url) from None
        if not same:
            raise CorruptStoreError(f"{where} is not what was committed", url=self.url)

    def _prefetch(self) -> None:
        """Fetch the indices of shards, and small objects whole, in one round, so that each read is one round."""
        if sum(len(leaf.objects) for leaf in self.leaves.values()) <= PREFETCH:
            self.reader.need_indices((leaf, list(leaf.objects)) for leaf in self.leaves.values() if leaf.complete)

    # -- reading ---------------------------------------------------------------------------
    def read(self, jobs: Sequence[Job]) -> None:
        """Fill every job's `out`, our codecs in one round and the rest through zarr-python."""
        ours = []
        for job in jobs:
            if job.leaf.cut.pipeline is None:
                bridge.read(self.place.engine, job.leaf, job.index, job.out, self.url)
            else:
                if not job.leaf.complete:
                    self._complete(job.leaf)
                ours.append(job)
        if ours:
            self.reader.read(ours, self.buffers if self.buffers else None)

    def check_room(self, reads: Sequence[Read]) -> None:
        """Refuse a read that would allocate far more than is stored, before any allocation."""
        if self.max_bytes is not None or self.trust:
            return
        leaves = self.leaves
        if sum([leaves[r.path].spec.nbytes for r in reads if r.path in leaves]) <= SUSPECT_BYTES:
            return  # whole leaves would not be too much
        wanted: dict[Path, int] = {}
        for read in reads:
            leaf = self.leaves.get(read.path)
            if leaf is not None and read.out is None:
                size = math.prod(index_shape(self.shape(leaf), read.index)) * leaf.meta.itemsize
                # (Repeated rows are intended.)
                wanted[read.path] = min(wanted.get(read.path, 0) + size, leaf.spec.nbytes)
        if sum(wanted.values()) <= SUSPECT_BYTES:
            return
        stored = {path: self.leaves[path].believed for path in wanted}
        if is_suspect(sum(wanted.values()), sum(stored.values())):
            path = max(wanted, key=lambda path: wanted[path] - stored[path])
            raise refuse_absent(path, sum(wanted.values()), sum(self.leaves[p].stored for p in wanted), self.url)

    def _complete(self, leaf: Leaf) -> None:
        """Find the existing objects of a leaf if they cannot be listed: by one request for each."""
        count = math.prod(leaf.meta.grid)
        if count > MAX_ASKED:
            raise CorruptStoreError(
                f"{self.url}: {path_text(leaf.path)} has {count} chunks, too many to ask for one by one",
                url=self.url,
                hint="copy it to where objects can be listed",
            )

        def ask(number: int) -> None:
            with contextlib.suppress(StoreNotFoundError):
                leaf.objects[number] = Stored(self.place.engine.size(leaf.key(number)), UNKNOWN)

        with ThreadPool(32, "tdstore-zarr") as pool:
            list(pool.map(ask, range(count)))
        leaf.complete = True

    def read_whole(self, leaf: Leaf) -> np.ndarray[Any, Any]:
        """Return all of a leaf."""
        out = np.empty(leaf.meta.shape, numpy_dtype(leaf.meta.dtype))
        self.read([Job(leaf, (), out)])
        return out

    def header(self) -> Header:
        """Return the last committed header."""
        if self.foreign is not None:
            return self.foreign.header(self.read_whole)
        return self.document.header

    def faults(self, paths: Iterable[Path]) -> list[Fault]:
        """Return the leaves whose bytes differ from the last commit."""
        found = []
        for path in paths:
            leaf = self.leaves[path]
            try:
                for number, stored in leaf.objects.items():
                    self._check_object(leaf, number, stored)
            except CorruptStoreError as error:
                found.append(Fault(path, error.message))
        return found

    def _check_object(self, leaf: Leaf, number: int, stored: Stored) -> None:
        try:
            data = memoryview(self.place.engine.get(leaf.key(number)).data).cast("B")
        except StoreNotFoundError:
            raise self.reader.corrupt(leaf, number, "was written and is missing") from None
        if len(data) != stored.size:
            raise self.reader.corrupt(leaf, number, f"has {len(data)} bytes instead of {stored.size}")
        if stored.crc != UNKNOWN:
            if seal_of(leaf, data) != stored.crc:
                raise self.reader.corrupt(leaf, number, "has another checksum than when it was committed")
            if not leaf.meta.sharded:
                return
            at = len(data) - leaf.meta.index_bytes - TAIL
            if int.from_bytes(data[at : at + TAIL], "little") != stored.crc:
                raise self.reader.corrupt(leaf, number, "is not the one that was committed")
        self.reader.forget(leaf, number)
        if leaf.meta.sharded:
            self._decode_all(leaf, number, data, self.reader.index_of(leaf, number))
        elif leaf.cut.pipeline is not None:
            self._decode_all(leaf, number, data, np.array([[0, len(data)]]))

    def _decode_all(self, leaf: Leaf, number: int, data: memoryview, index: Any) -> None:
        pipeline, nbytes = leaf.meta.pipeline, leaf.meta.inner_bytes
        assert pipeline is not None
        decode, scratch = pipeline.decoder(nbytes), np.empty(nbytes, np.uint8)
        for start, stop in index.tolist():
            if start >= 0:
                try:
                    decode(data[start:stop], scratch)
                except ChunkError as error:
                    raise self.reader.corrupt(leaf, number, f"cannot be decoded: {error}") from None
