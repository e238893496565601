"""Read-only HDF5 behind a URL: rows of all leaves come in one round of requests; h5py locates and decodes them."""

from __future__ import annotations

import contextlib
import itertools
import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import h5py
import numpy as np
import torch
from torch import Tensor

from tdstore.dtypes import from_numpy, numpy_dtype, repair_bools, to_numpy
from tdstore.engine import Engine, parent_and_name
from tdstore.errors import (
    CorruptStoreError,
    ReadOnlyError,
    StoreError,
)
from tdstore.header import Header
from tdstore.index.ranges import Batch, Ints, byte_ranges, cover, distinct, index_shape
from tdstore.index.rows import gather
from tdstore.registry import registry
from tdstore.store import Cap
from tdstore.storekit import CheckedStore, accept_dirty, refusals
from tdstore.storekit.budget import SUSPECT_BYTES, check_declared, is_suspect, refuse_absent
from tdstore.storekit.checked import full
from tdstore.types import Fault, LeafSpec, Mode, Path, Read, StoreIndex, path_text
from tdstore_h5.faults import h5_errors
from tdstore_h5.file.document import DIRTY, MANIFEST, Document, decode_dirty, decode_document, get_attribute
from tdstore_h5.file.tree import Contents, Leaf, Walker, check_believable
from tdstore_h5.foreign import foreign_header
from tdstore_h5.remote.engine_file import EngineFile
from tdstore_h5.remote.row_chunks import RowChunks
from tdstore_h5.rows import chunked
from tdstore_h5.rows.checksums import LeafSums, Sums, hashed
from tdstore_h5.rows.contiguous import Bytes, blocks_of

_NO_ROWS: Ints = np.empty((0, 2), np.int64)
_NO_GRAINS: Ints = np.empty(0, np.int64)
VERIFY_BYTES = 32 << 20
"""Bytes of a round of `verify`."""
LEVELS = 8
"""Rounds in which the index of the chunks of a dataset is read; if it takes more, it is no tree."""
SLACK = 256 << 10
"""Bytes that a read of a leaf may fetch beside its own, or as many as its own, to compare whole grains."""


def is_url(location: object) -> bool:
    """Check whether a location is reached through an engine."""
    if not isinstance(location, str):
        return False
    return "::" in location or ("://" in location and location.partition("://")[0] not in ("h5", "file"))


def open_remote_h5(
    location: str,
    *,
    mode: Mode,
    storage_options: Mapping[str, Any] | None,
    verify: str,
    recover: str | None,
    trust: bool,
    max_bytes: int | None = None,
) -> RemoteH5Store:
    """Open an HDF5 file behind a URL, with the engine of a plugin. The options are those of `open_h5`."""
    if mode != "r":
        raise ReadOnlyError(
            f"{_plain(location)}: HDF5 files behind a URL are read only",
            url=_plain(location),
            hint="write it locally and upload it",
        )
    parent, name = parent_and_name(location)
    source = EngineFile(registry().engine(parent, storage_options), name)
    try:
        store = RemoteH5Store(source, trust=trust, reopen=(location, storage_options, verify, recover, max_bytes))
        store.load()
        check_declared(sum(spec.nbytes for spec in store.specs(list(store.paths()))), max_bytes, store.url)
        store.compare_manifest(verify=verify, accept=recover == "accept")
    except BaseException:
        source.close()
        raise
    return store


def _plain(location: str) -> str:
    return location.partition("?")[0]


def covered_bytes(ranges: Ints) -> int:
    """Return how many bytes are fetched for ranges, with the gaps between near ones."""
    merged = cover(ranges)
    return int((merged[:, 1] - merged[:, 0]).sum())


class RemoteH5Store(CheckedStore[Leaf]):
    """The datasets of one HDF5 file as leaves, read only. Made by `open_h5` for a URL."""

    caps = Cap.PARTIAL_READ | Cap.PERSISTENT | Cap.CONCURRENT_READ

    def __init__(self, source: EngineFile, *, trust: bool, reopen: tuple[Any, ...]) -> None:
        super().__init__(source.url, writable=False)
        self._source = source
        self._trust = trust
        self._reopen = reopen
        self._contents = Contents()
        self._document = Document()
        self._ours = False
        self._mark: set[Path] | None = None
        self._sums = Sums()
        """Checksums that are still to be compared."""
        self._file: h5py.File | None = None
        self._chunks: dict[Path, dict[tuple[int, ...], tuple[int, int]]] = {}
        self._row_chunks: dict[Path, RowChunks] = {}
        # h5py works on one file object, which holds the ranges of one read.
        self._reading = threading.Lock()

    @property
    def engine(self) -> Engine:
        """Return the engine that fetches the bytes."""
        return self._source.engine

    # -- opening -------------------------------------------------------------------------
    def load(self) -> None:
        """Read structure and manifest."""
        with self._h5("reading its structure"):
            file = self._file = h5py.File(self._source, "r")
            attributes = file.attrs
            text, mark = get_attribute(attributes, MANIFEST, self.url), get_attribute(attributes, DIRTY, self.url)
            # Whatever is trusted: a file from elsewhere must not lead to files of this machine.
            self._contents = Walker(file, self.url, trust=False).walk()
            if text is not None:
                self._ours, self._document = True, decode_document(text, self._contents.leaves, url=self.url)
            self._mark = None if mark is None else decode_dirty(mark, url=self.url)

    def compare_manifest(self, *, verify: str, accept: bool) -> None:
        """Compare the file with its manifest."""
        leaves, specs = self._contents.leaves, self._document.specs
        if not self._ours and not self._trust:
            check_believable(self._contents, self.url)
        for leaf in leaves.values():
            if leaf.offset is not None and leaf.offset + leaf.spec.nbytes > self._source.size:
                self._source.read_at(0, leaf.offset + leaf.spec.nbytes)  # raises the error for a truncated file
        hint = "recover='accept' opens it as it is: those leaves may hold old and new rows"
        if accept_dirty(self.url, sorted(self._mark or ()), accept=accept, hint=hint):
            return
        if self._ours and verify != "none":
            for path in leaves.keys() | specs.keys():
                if path not in leaves or path not in specs or leaves[path].spec != specs[path]:
                    raise CorruptStoreError(
                        f"{self.url}: {path_text(path)} is not what the manifest says",
                        url=self.url,
                        hint="if another program changed the file on purpose, recover='accept' takes it as it is",
                    )
        if verify == "size":
            for path in leaves.keys() & self._document.sums.keys():
                self._sums.put(path, self._document.sums[path])
        if verify == "full":
            for fault in self.verify():
                raise CorruptStoreError(f"{self.url}: {path_text(fault.path)}: {fault.reason}", url=self.url)

    # -- catalogue -----------------------------------------------------------------------
    def _catalogue(self) -> Mapping[Path, Leaf]:
        return self._contents.leaves

    def load_header(self) -> Header:
        """Return the header, or one built from the contents of another program's file."""
        self._check_open()
        if self._ours:
            return self._document.header
        with self._reading, self._h5("reading values"):
            assert self._file is not None
            header = foreign_header(self._file, self._contents, self.url, self._source.read_at)
            if self._source.failure is not None:  # then HDF5's error is no damage
                raise self._source.failure
            return header

    # -- data ----------------------------------------------------------------------------
    def _read(self, wanted: Sequence[tuple[Leaf, Read]]) -> list[Tensor]:
        with self._reading:
            self._refuse_absent(wanted)
            self._locate_chunks([leaf_and_read for leaf_and_read in wanted if not leaf_and_read[0].plain])
            plans = [self._plan(leaf, r) for leaf, r in wanted]
            grains = [self._grains(leaf, r) for leaf, r in wanted]
            further = [self._plan_grains(leaf, r.path, g) for (leaf, r), g in zip(wanted, grains, strict=True)]
            batch = self._source.fetch([*plans, *further])
            pairs = zip((*plans, *further), (*wanted, *wanted), strict=True)
            self._source.hold(batch, [ranges for ranges, (leaf, _) in pairs if not leaf.plain])
            try:
                for (leaf, r), some in zip(wanted, grains, strict=True):
                    self._compare(leaf, r.path, some, batch)
                return [self._one(leaf, r, ranges, batch) for (leaf, r), ranges in zip(wanted, plans, strict=True)]
            finally:
                self._source.hold(batch, [])

    def _refuse_absent(self, wanted: Sequence[tuple[Leaf, Read]]) -> None:
        """Refuse a read that would allocate far more than the file holds, unless that is allowed."""
        if self._reopen[-1] is not None:
            return
        sizes = [math.prod(index_shape(leaf.spec.shape, r.index)) * leaf.spec.dtype.itemsize for leaf, r in wanted]
        if sum(sizes) > SUSPECT_BYTES and is_suspect(sum(sizes), self._source.size):
            raise refuse_absent(wanted[sizes.index(max(sizes))][1].path, sum(sizes), self._source.size, self.url)

    # -- checksums of reads ---------------------------------------------------------
    def _grains(self, leaf: Leaf, r: Read) -> Ints:
        """Return the grains to compare: those that a read covers whole, and others if they cost few more bytes."""
        if not self._sums.some_unseen(r.path) or (leaf.plain and leaf.offset is None):
            return _NO_GRAINS
        starts, size = blocks_of(leaf.spec.shape, r.index)
        found = self._sums.unseen(r.path, leaf.spec, starts, size)
        if not len(found):
            return found
        partly = np.intersect1d(found, self._sums.partly(r.path, leaf.spec, starts, size))
        if len(partly) * self._sums.leaves[r.path].grain > max(SLACK, len(starts) * size * leaf.spec.dtype.itemsize):
            return np.setdiff1d(found, partly)
        if len(partly) and not leaf.plain:  # its chunks may lie between those of other leaves
            plan = self._plan(leaf, r)
            fetched = covered_bytes(plan)
            more = covered_bytes(np.concatenate([plan, self._plan_grains(leaf, r.path, found)])) - fetched
            if more > max(SLACK, fetched):
                return np.setdiff1d(found, partly)
        return found

    def _plan_grains(self, leaf: Leaf, path: Path, grains: Ints) -> Ints:
        """Return the bytes of the file that grains need."""
        if not len(grains):
            return _NO_ROWS
        grain, spec = self._sums.leaves[path].grain, leaf.spec
        ranges = np.stack([grains * grain, np.minimum((grains + 1) * grain, spec.nbytes)], 1)
        if leaf.plain:
            return ranges + leaf.offset
        if not spec.shape:
            return self._plan(leaf, Read(path))
        row = spec.nbytes // spec.shape[0]
        rows = np.concatenate([np.arange(a // row, -(-b // row)) for a, b in ranges.tolist()])
        return self._plan(leaf, Read(path, (torch.from_numpy(distinct(rows)),)))

    def _compare(self, leaf: Leaf, path: Path, grains: Ints, batch: Batch[str]) -> None:
        def read(_: Path, start: int, stop: int) -> Bytes:
            if leaf.plain and leaf.offset is not None:
                return np.frombuffer(batch.take(self._source.key, leaf.offset + start, leaf.offset + stop), np.uint8)
            if leaf.spec.shape:
                row = leaf.spec.nbytes // leaf.spec.shape[0]
                first = start // row
                rows = self._decoded(Read(path, (slice(first, -(-stop // row), 1),)), batch)
                if rows is not None:
                    return to_numpy(rows.reshape(-1)).view(np.uint8)[start - first * row : stop - first * row]
            with self._h5(f"reading {path_text(path)}"):
                return chunked.read_bytes(self._dataset(leaf), leaf.spec, start, stop)

        if not len(grains):
            return
        wrong = self._sums.compare(path, leaf.spec, grains, read, self._sums.leaves[path].grain)
        if wrong is not None:
            raise CorruptStoreError(
                f"{self.url}: {path_text(path)} is damaged in {self._sums.leaves[path].rows(wrong, leaf.spec)}: "
                "the bytes have another checksum than was committed",
                url=self.url,
                hint="other rows can be read; verify='none' reads all bytes as they are; restore the file from a copy",
            )

    def _plan(self, leaf: Leaf, r: Read) -> Ints:
        """Return the bytes of the file that a read needs."""
        spec = leaf.spec
        if leaf.plain:
            if leaf.offset is None:
                return _NO_ROWS
            return byte_ranges(spec.shape, spec.dtype.itemsize, r.index) + leaf.offset
        if 0 in index_shape(spec.shape, r.index):
            return _NO_ROWS
        chunks = self._row_chunks.get(r.path)
        rows = None if chunks is None else chunks.rows(r.index)
        if chunks is not None and rows is not None:
            return chunks.ranges(rows)
        with self._h5(f"locating {path_text(r.path)}"):
            dataset = self._dataset(leaf)
            if dataset.chunks is None:
                offset = dataset.id.get_offset()
                if offset is None:
                    return _NO_ROWS
                # h5py also reads the bytes between near rows
                return cover(byte_ranges(spec.shape, dataset.dtype.itemsize, r.index) + offset, 64 << 10)
            return self._chunk_ranges(r.path, dataset, r.index)

    def _locate_chunks(self, wanted: Sequence[tuple[Leaf, Read]]) -> None:
        """Read the indices of the chunks of these leaves, all in as many rounds as the deepest of them has levels."""
        new = {r.path: leaf for leaf, r in wanted if r.path not in self._chunks}
        for _ in range(LEVELS):
            new = {path: leaf for path, leaf in new.items() if not self._read_index(path, leaf, collecting=True)}
            if not new or not self._source.fetch_missing():
                break
        for path, leaf in new.items():  # an index of another kind
            self._read_index(path, leaf, collecting=False)
        self._source.forget_nodes()

    def _read_index(self, path: Path, leaf: Leaf, *, collecting: bool) -> bool:
        """Read the index of the chunks of a dataset; return whether all of it was there, or there is none."""
        found: dict[tuple[int, ...], tuple[int, int]] = {}
        skipped: dict[tuple[int, ...], int] = {}

        def add(info: Any) -> None:
            found[tuple(info.chunk_offset)] = (info.byte_offset, info.byte_offset + info.size)
            if info.filter_mask:
                skipped[tuple(info.chunk_offset)] = info.filter_mask

        with self._h5(f"locating {path_text(path)}"):
            dataset = self._dataset(leaf)
            if dataset.chunks is None:
                return True
            if collecting:
                try:
                    with self._source.collecting(len(dataset.shape)):
                        dataset.id.chunk_iter(add)
                except (OSError, RuntimeError):
                    if not self._source.is_missing_some:
                        raise
                    return False
            else:
                dataset.id.chunk_iter(add)
            rows = RowChunks.of(dataset, leaf.spec, found, skipped)
        self._chunks[path] = found
        if rows is not None:
            self._row_chunks[path] = rows
        return True

    def _chunk_ranges(self, path: Path, dataset: h5py.Dataset, index: StoreIndex) -> Ints:
        known = self._chunks[path]
        axes = []
        for dim, (size, chunk) in enumerate(zip(dataset.shape, dataset.chunks, strict=True)):
            term = index[dim] if dim < len(index) else slice(0, size, 1)
            rows = term.numpy() if isinstance(term, Tensor) else np.arange(term.start, term.stop, term.step)
            axes.append((distinct(rows // chunk) * chunk).tolist())
        if math.prod(map(len, axes)) > 4 * len(known):
            wanted = [set(axis) for axis in axes]
            places = [r for at, r in known.items() if all(a in w for a, w in zip(at, wanted, strict=True))]
        else:
            places = [known[at] for at in itertools.product(*axes) if at in known]  # the others hold the fill value
        return np.array(places, np.int64).reshape(-1, 2)

    def _one(self, leaf: Leaf, r: Read, ranges: Ints, batch: Batch[str]) -> Tensor:
        spec = leaf.spec
        if not leaf.plain:
            decoded = self._decoded(r, batch)
            if decoded is not None:
                value = decoded if r.out is None else r.out.copy_(decoded)
            else:
                with self._h5(f"reading {path_text(r.path)}"):
                    value = chunked.read(self._dataset(leaf), spec, r.index, r.out)
        elif leaf.offset is None:
            blank = full(LeafSpec((1,), spec.dtype, fill_value=spec.fill_value)).expand(spec.shape)
            value = gather(blank, r.index, r.out)
        else:
            value = self._assemble(spec, r, ranges, batch)
        repair_bools(value)
        return value

    def _decoded(self, r: Read, batch: Batch[str]) -> Tensor | None:
        """Return rows of chunks that were fetched; None if h5py must read them."""
        chunks, key = self._row_chunks.get(r.path), self._source.key
        return None if chunks is None else chunks.read(r.index, lambda a, b: batch.take(key, a, b))

    def _assemble(self, spec: LeafSpec, r: Read, ranges: Ints, batch: Batch[str]) -> Tensor:
        shape = index_shape(spec.shape, r.index)
        buffer = bytearray(math.prod(shape) * spec.dtype.itemsize)
        view, at = memoryview(buffer), 0
        for start, stop in ranges.tolist():
            view[at : at + stop - start] = batch.take(self._source.key, start, stop)
            at += stop - start
        array = np.frombuffer(buffer, numpy_dtype(spec.dtype)).reshape(shape)
        return from_numpy(array, spec.dtype)

    def _read_only(self) -> ReadOnlyError:
        why = "HDF5 files behind a URL cannot be changed"
        return refusals.read_only(self.url, "copy it to a local path first", why=why)

    # -- life ----------------------------------------------------------------------------
    def verify(self, paths: Sequence[Path] | None = None) -> list[Fault]:
        self._check_open()
        found = []
        for path in self._contents.leaves if paths is None else paths:
            leaf, sums = self._leaf(path), self._document.sums.get(path)
            if sums is None:
                continue
            with self._reading:
                grain = self._wrong_grain(path, leaf, sums)
            if grain is not None:
                rows = sums.rows(grain, leaf.spec)
                found.append(Fault(path, f"{rows}: the bytes have another checksum than was committed"))
        return found

    def _wrong_grain(self, path: Path, leaf: Leaf, sums: LeafSums) -> int | None:
        def read(_: Path, start: int, stop: int) -> Bytes:
            if leaf.plain and leaf.offset is not None:
                a, b = leaf.offset + start, leaf.offset + stop
                batch = self._source.fetch([np.array([(a, b)], np.int64)])
                return np.frombuffer(batch.take(self._source.key, a, b), np.uint8)
            with self._h5(f"reading {path_text(path)}"):
                return chunked.read_bytes(self._dataset(leaf), leaf.spec, start, stop)

        for grain, crc in hashed(sums, path, leaf.spec, np.arange(len(sums.crcs)), read, VERIFY_BYTES):
            if crc != sums.crcs[grain]:
                return grain
        return None

    def nbytes_stored(self) -> int | None:
        self._check_open()
        return self._source.size

    def reopen_token(self) -> tuple[str, Mode, dict[str, Any]]:
        location, options, verify, recover, max_bytes = self._reopen
        reopen_options = {"storage_options": options, "verify": verify, "recover": recover, "max_bytes": max_bytes}
        reopen_options["trust"] = "h5" if self._trust else None
        return location, "r", {name: value for name, value in reopen_options.items() if value is not None}

    def _close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with self._h5("closing"):
                file.close()
        self._source.close()

    def __del__(self) -> None:
        if getattr(self, "_file", None) is not None:
            self.close()

    def _dataset(self, leaf: Leaf) -> h5py.Dataset:
        assert self._file is not None
        return self._file[leaf.name]

    @contextlib.contextmanager
    def _h5(self, doing: str) -> Iterator[None]:
        """Map HDF5's errors; an error of the engine below it is raised in its place."""
        self._source.failure = None
        try:
            with h5_errors(self.url, doing):
                yield
        except StoreError as error:
            failure = self._source.failure
            if failure is not None and failure is not error:
                raise failure from None
            raise
