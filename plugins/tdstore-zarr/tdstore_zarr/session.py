"""One session on a store: what it holds, what was touched, and how it is committed.

Order of an in-place change: the mark in the root names the leaves; then the data; then the nodes;
then the root, with a new manifest and without the mark. A crash in between leaves the mark.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import numpy as np
from torch import Tensor

from tdstore.dtypes import numpy_dtype, to_numpy
from tdstore.engine import EngineCap
from tdstore.errors import CorruptStoreError, StoreBusyError, StoreError, StoreNotFoundError
from tdstore.header import Header
from tdstore.types import Fault, Path, path_text
from tdstore_zarr import bridge
from tdstore_zarr.buffers import Buffers, seal_of
from tdstore_zarr.codecs import ChunkError
from tdstore_zarr.document import NAME, Document, Mark, decode_root, encode_marked, encode_root, mark_now, unmarked
from tdstore_zarr.foreign import Foreign, relist
from tdstore_zarr.leaf import TAIL, UNKNOWN, Leaf, Stored
from tdstore_zarr.names import Names
from tdstore_zarr.nodes import put_copies, wanted_nodes
from tdstore_zarr.place import Place, dirty
from tdstore_zarr.reader import Job, Reader

MAX_ASKED = 10_000
PREFETCH = 1024
"""Shard indices that are fetched at opening, where a request is dear."""


class Session:
    """What a store works with."""

    def __init__(
        self, place: Place, *, writable: bool, durable: bool, timeout: float, trust: bool, buffer_bytes: int
    ) -> None:
        self.place = place
        self.url = place.url
        self.writable = writable
        self.durable = durable
        self.timeout = timeout
        self.trust = trust
        self.pid = os.getpid()
        self.document = Document(ours=True)
        self.names = Names()
        self.root = b""
        """The root as it was read or committed."""
        self.marked: set[Path] = set()
        self.accepted = False
        """Whether the store differs from its manifest and was taken as it is: closing makes that good."""
        self.foreign: Foreign | None = None
        self.stale_nodes = False
        self._dropped: list[tuple[str, list[str]]] = []
        self.reader = Reader(place.engine, self.url, local=place.local)
        self.buffers = Buffers(place.engine, self.reader, buffer_bytes)

    @property
    def leaves(self) -> dict[Path, Leaf]:
        """Every leaf."""
        return self.document.leaves

    @property
    def strings(self) -> dict[Path, Tensor]:
        """Leaves in memory: what a store of another program has of strings."""
        return {} if self.foreign is None else self.foreign.tensors

    # -- opening -------------------------------------------------------------------------
    def load(self, *, verify: str, accept: bool) -> None:
        """Read the root, wait for a writer that is at work, and compare with the medium."""
        deadline = time.monotonic() + self.timeout
        while True:
            self.root = self.place.read_root()
            self.document = self._decode(accept)
            mark = self.document.mark
            if mark is None:
                break
            who = self.place.writer(mark)
            if who is None:
                # (A writer may have committed between the root and the question.)
                if self.place.read_root() == self.root:
                    break
            elif time.monotonic() >= deadline or who == "this process":
                raise StoreBusyError(
                    f"{self.url} is being written by {who}",
                    url=self.url,
                    hint="commit or close it there, or pass a longer lock_timeout=",
                )
            time.sleep(0.005)
        if not self.document.ours:
            self.foreign = Foreign(self.place, self.document, trust=self.trust, leaves=not self.writable)
            self.foreign.load()
            self.foreign.document = self.document
        for path, node in [*self.document.groups.items(), *((p, leaf.node) for p, leaf in self.leaves.items())]:
            self.names.put(path, node)
        for node, path in self.document.copies.items():
            self.names.put(path, node)
        if mark is not None:
            self._judge(mark, accept)
        if self.document.ours and not self.accepted:
            self._verify(verify)
        if not self.place.local:
            self._prefetch()

    def _decode(self, accept: bool) -> Document:
        try:
            return decode_root(self.root, url=self.url, trust=self.trust)
        except CorruptStoreError:
            if not accept:
                raise
            # Without our manifest it is a store like another program's.
            root = msgspec.json.decode(self.root)
            root.get("attributes", {}).pop("tdstore", None)
            self.accepted = True
            return decode_root(msgspec.json.encode(root), url=self.url, trust=self.trust)

    def _judge(self, mark: Mark, accept: bool) -> None:
        """A writer died. Forgive it when what it named is as it was committed."""
        named = [path for path in map(tuple, mark.leaves) if path in self.leaves]
        if accept:
            self.accepted = True
            for path in named:
                if EngineCap.LIST in self.place.engine.can:
                    relist(self.place.engine, self.leaves[path])
            return
        if not self.document.ours or len(named) < len(mark.leaves) or not mark.leaves or self.faults(named):
            raise dirty(self.url, mark)
        self.accepted = True

    def _verify(self, verify: str) -> None:
        if verify == "full":
            for fault in self.faults(self.leaves):
                raise CorruptStoreError(f"{self.url}: {path_text(fault.path)}: {fault.reason}", url=self.url)
            # Where nothing can be renamed, nodes are put before the root: the root's copy of them is what counts.
            for node, data in self.document.metadata.items() if self.place.local else ():
                self._verify_node(node, data)
        elif verify == "size" and self.place.local:
            engine = self.place.engine
            for leaf in self.leaves.values():
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
        if there != data:
            raise CorruptStoreError(f"{where} is not what was committed", url=self.url)

    def _prefetch(self) -> None:
        """Fetch the indices of shards, and small objects whole, in one round, so that each read is one round."""
        if sum(len(leaf.objects) for leaf in self.leaves.values()) <= PREFETCH:
            self.reader.need_indices((leaf, list(leaf.objects)) for leaf in self.leaves.values() if leaf.complete)

    # -- reading ---------------------------------------------------------------------------
    def read(self, jobs: Sequence[Job]) -> None:
        """Fill every job's `out`, ours in one round and the rest through zarr-python."""
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

    def _complete(self, leaf: Leaf) -> None:
        """Find out which objects of a leaf are there, where nothing lists them: by asking for each."""
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

        with ThreadPoolExecutor(32, "tdstore-zarr") as pool:
            list(pool.map(ask, range(count)))
        leaf.complete = True

    def read_whole(self, leaf: Leaf) -> Any:
        """All of a leaf, as a numpy array."""
        out = np.empty(leaf.meta.shape, numpy_dtype(leaf.meta.dtype))
        self.read([Job(leaf, (), out)])
        return out

    def header(self) -> Header:
        """The header last committed."""
        if self.foreign is not None:
            return self.foreign.header(self.read_whole)
        return self.document.header

    def faults(self, paths: Iterable[Path]) -> list[Fault]:
        """Leaves whose bytes are not those of the last commit."""
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

    # -- changes ---------------------------------------------------------------------------
    def mark(self, paths: Iterable[Path], structure: bool = False) -> None:
        """Say on the medium which leaves are about to change in place, or that the structure is."""
        if not self.place.published:
            return
        self.place.take()
        new = set(paths) - self.marked
        if new or (structure and not self.marked):
            mark = mark_now(self.marked | new)
            self.place.put_root(encode_marked(self.root, mark), sync=self.durable)
            self.marked |= new

    def check_places(self, leaves: Mapping[Path, Any]) -> None:
        """Refuse leaves where a group is, and below leaves."""
        held = {path[:depth] for path in self.leaves for depth in range(1, len(path))}
        for path in leaves:
            for depth in range(1, len(path)):
                if path[:depth] in self.leaves or path[:depth] in leaves:
                    raise StoreError(
                        f"{path_text(path[:depth])} of {self.url} is a leaf and cannot hold {path[-1]!r}", url=self.url
                    )
            if path in held:
                raise StoreError(
                    f"{path_text(path)} of {self.url} is a group with leaves; delete those first", url=self.url
                )

    def add(self, leaf: Leaf) -> None:
        """Take a new leaf in."""
        self.leaves[leaf.path] = leaf
        self.names.put(leaf.path, leaf.node)
        self.stale_nodes = True

    def unlink(self, path: Path) -> None:
        """Remove a leaf, or whatever else has that name."""
        leaf = self.leaves.pop(path, None)
        self.stale_nodes = True
        if leaf is None:
            if (node := self.names.nodes.get(path)) is not None and node in self.document.metadata:
                self._remove_node(node, [])
                self.document.groups.pop(path, None)
                self.names.drop(path)
            return
        self.buffers.drop(leaf)
        self.reader.forget(leaf)
        self._remove_node(leaf.node, [leaf.key(number) for number in leaf.objects])
        self.names.drop(path)

    def _remove_node(self, node: str, keys: list[str]) -> None:
        self.document.metadata.pop(node, None)
        self.document.copies.pop(node, None)
        self.place.remove(node, keys)

    def write(self, leaf: Leaf, index: Any, value: Any) -> None:
        """Put a tensor at `leaf[index]`; rows do not repeat."""
        array = to_numpy(value.contiguous() if value.is_conj() or value.is_neg() else value)
        if leaf.cut.pipeline is None:
            bridge.write(self.place.engine, leaf, index, array, self.url)
        else:
            if not leaf.complete:
                self._complete(leaf)
            self.buffers.write(leaf, index, array)

    def rename(self, moves: Mapping[Path, Path]) -> None:
        """Move leaves; names may be exchanged."""
        moves = {old: new for old, new in moves.items() if old != new}
        self.check_places({new: None for new in moves.values() if new not in self.leaves})
        self.mark([*moves, *moves.values()])
        self.buffers.flush()
        for new in moves.values():
            if new in self.leaves and new not in moves:
                self.unlink(new)
        parked = []
        for number, old in enumerate(moves):
            leaf = self.leaves.pop(old)
            self.reader.forget(leaf)
            self._move(leaf, f"tdstore.move-{number}")
            self.names.drop(old)
            parked.append(leaf)
        for leaf, new in zip(parked, moves.values(), strict=True):
            if new in self.names.nodes:
                self.unlink(new)  # an empty group, or a value
            self._move(leaf, self.names.node(new))
            leaf.path = new
            self.add(leaf)

    def _move(self, leaf: Leaf, node: str) -> None:
        metadata = self.document.metadata.pop(leaf.node, None)
        if metadata is not None or leaf.objects:
            with_metadata = self.place.move(leaf.node, node, [leaf.key(number) for number in leaf.objects])
            if metadata is not None and with_metadata:
                self.document.metadata[node] = metadata
        leaf.node = node

    # -- commit ----------------------------------------------------------------------------
    def commit(self, header: Header) -> None:
        """Write the manifest, last; a new store becomes visible by it."""
        if self.place.published:
            self.place.take()
        self.buffers.flush()
        wanted = wanted_nodes(header, self.leaves, self.names, self.place.keys)
        there = self.document.metadata
        if self.place.published and not self.marked and wanted.metadata != there:
            self.mark([], structure=True)
        engine = self.place.engine
        put_copies(engine, wanted, there)
        changed = [node for node, data in wanted.metadata.items() if there.get(node) != data]
        engine.put_many([(f"{node}/{NAME}", msgspec.json.encode(wanted.metadata[node])) for node in changed])
        for node in [n for n in there if n not in wanted.metadata]:
            self.place.remove(node, [f"{node}/{key}" for key in ("c/0", "c.0", "0") if node in self.document.copies])
            self._forget_node(node)
        document = self.document
        document.metadata, document.groups = wanted.metadata, wanted.groups
        document.copies = {node: copy.path for node, copy in wanted.copies.items()}
        document.attributes = {**document.attributes, **wanted.root}
        try:
            root = encode_root(document, header, self.leaves.values(), url=self.url)
        except ValueError as error:
            raise StoreError(str(error), url=self.url) from error
        if self.durable:
            self.place.sync()
        if self.place.published:
            self.place.put_root(root, sync=self.durable)
        else:
            self.place.publish(root, sync=self.durable)
        self._committed(root, header)
        self.place.settled(document)
        self.place.release()

    def _forget_node(self, node: str) -> None:
        for path in [p for p, n in self.names.nodes.items() if n == node]:
            self.names.drop(path)

    def _committed(self, root: bytes, header: Header) -> None:
        self.root = root
        self.marked.clear()
        self.accepted = self.stale_nodes = False
        self.foreign = None
        self.document.ours, self.document.header = True, header

    def settle(self) -> None:
        """Commit what was written in place since the last header."""
        if not self.place.published or not (self.marked or self.buffers or self.accepted):
            return
        if self.document.ours:
            self.commit(self.document.header)
            return
        self.mark(self.marked, structure=True)
        self.buffers.flush()
        if self.stale_nodes:
            for path, leaf in self.leaves.items():
                data = leaf.meta.to_json()
                if self.document.metadata.get(leaf.node) != data:
                    self.document.metadata[leaf.node] = data
                    self.place.engine.put(f"{leaf.node}/{NAME}", msgspec.json.encode(data))
                self.names.put(path, leaf.node)
        if self.durable:
            self.place.sync()
        root = msgspec.json.decode(unmarked(self.root))
        if self.document.consolidated:
            root["consolidated_metadata"]["metadata"] = self.document.metadata
        self.root = msgspec.json.encode(root)
        self.place.put_root(self.root, sync=self.durable)
        self.marked.clear()
        self.place.release()

    def written_keys(self) -> list[str]:
        """Every object that was put."""
        return [leaf.key(number) for leaf in self.leaves.values() for number in list(leaf.objects)]

    def close(self, *, discard: bool = False) -> None:
        """Commit what was changed in place, and let go."""
        try:
            if self.writable and self.pid == os.getpid() and not discard:
                self.settle()
        finally:
            self.buffers.clear()
            self.place.close()
