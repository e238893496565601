"""A simple store over fsspec's `memory://`: what the wrong stores of `wrong_stores.py` get wrong.

Layout: each write of a leaf is a new immutable object `<root>/<unique>.bin` (raw, C order); the
manifest, one JSON object `<root>/MANIFEST`, is put last and names them. What is written between
two commits is seen by this store only. Reading plans byte ranges, merges near ones and fetches
all of a batch in one `cat_ranges`.
"""

from __future__ import annotations

import itertools
import json
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import fsspec
import google_crc32c
import numpy as np
import torch
from torch import Tensor

from tdstore.dtypes import dtype_name, from_numpy, numpy_dtype, to_numpy
from tdstore.errors import (
    CorruptStoreError,
    KeyNotFoundError,
    OptionError,
    ReadOnlyError,
    StoreClosedError,
    StoreExistsError,
    StoreNotFoundError,
)
from tdstore.header import Header, header_from_builtins, header_to_builtins
from tdstore.index.rows import check_indices
from tdstore.store import Cap, Store, check_writes
from tdstore.storekit import refusals
from tdstore.types import Fault, LeafSpec, Mode, Path, Read, StoreIndex, Write, path_text
from tdstore.values import decode_value, encode_value

GAP = 256  # bytes between two ranges that are cheaper to fetch than to ask for apart


def open_bytes(location: str, *, mode: Mode = "r") -> ByteStore:
    """Open `memory://name/...`."""
    fs, root = fsspec.core.url_to_fs(location)
    there = fs.exists(f"{root}/MANIFEST")
    if mode in ("r", "r+") and not there:
        raise StoreNotFoundError(f"nothing is stored at {location}", url=location)
    if mode == "x" and there:
        raise StoreExistsError(f"there is a store at {location} already", url=location)
    if mode not in ("r", "r+", "w", "x", "a"):
        raise OptionError(f"no mode {mode!r}", url=location)
    return ByteStore(location, fs, root, writable=mode != "r", load=there and mode in ("r", "r+", "a"))


@dataclass(frozen=True)
class Blob:
    """A leaf as the manifest has it; without a key nothing was written and it reads as its fill value."""

    spec: LeafSpec
    key: str | None = None
    crc: int = 0


class ByteStore(Store):
    caps = (
        Cap.WRITE
        | Cap.PARTIAL_READ
        | Cap.PARTIAL_WRITE
        | Cap.RESIZE
        | Cap.PERSISTENT
        | Cap.CONCURRENT_READ
        | Cap.DISCARD
    )

    def __init__(self, url: str, fs: Any, root: str, *, writable: bool, load: bool) -> None:
        self.url, self.writable = url, writable
        self._fs, self._root = fs, root
        self._blobs: dict[Path, Blob] = {}
        self._header = Header()
        self._mine: set[str] = set()  # objects put since the last commit
        self._closed, self._committed, self._written = False, load, False
        self._id = ""  # of the commit that this store knows
        self.requests = 0
        if load:
            self._load()
        self._saved, self._kept = dict(self._blobs), dict(self._blobs)  # the last commit; with rows written since
        self._saved_header = self._header

    # -- catalogue -----------------------------------------------------------------------
    def paths(self) -> Iterator[Path]:
        self._check()
        return iter(list(self._blobs))

    def specs(self, paths: Sequence[Path]) -> list[LeafSpec]:
        return [self._blob(path).spec for path in paths]

    def load_header(self) -> Header:
        self._check()
        return self._header

    def save_header(self, header: Header) -> None:
        self._check(write=True)
        self._header = header
        self._commit()

    # -- data ----------------------------------------------------------------------------
    def create(self, leaves: Mapping[Path, LeafSpec]) -> None:
        self._check(write=True)
        for spec in leaves.values():
            if spec.options:
                raise OptionError(f"{self.url} has no leaf option {next(iter(spec.options))!r}", url=self.url)
        self._blobs |= {path: Blob(spec) for path, spec in leaves.items()}

    def read(self, reads: Sequence[Read]) -> list[Tensor]:
        blobs = [self._blob(r.path) for r in reads]
        check_indices((r.index, blob.spec.shape) for r, blob in zip(reads, blobs, strict=True))
        plans = [np.empty((0, 2), np.int64) if b.key is None else runs(b.spec, r.index) for b, r in zip(blobs, reads)]
        fetched = self._fetch([(b.key, plan) for b, plan in zip(blobs, plans)])
        results = []
        for read, blob, pieces in zip(reads, blobs, fetched):
            shape = result_shape(blob.spec.shape, read.index)
            if blob.key is None:
                value = torch.full(shape, blob.spec.fill_value, dtype=blob.spec.dtype)
            else:
                array = np.frombuffer(bytearray(pieces), numpy_dtype(blob.spec.dtype)).reshape(shape)
                value = from_numpy(array, blob.spec.dtype)
            results.append(value if read.out is None else read.out.copy_(value))
        return results

    def write(self, writes: Sequence[Write]) -> None:
        self._check(write=True)
        check_writes((w, self._blob(w.path).spec.shape, self._blob(w.path).spec.dtype) for w in writes)
        for w in writes:
            blob = self._blobs[w.path]
            if w.index:
                # No partial put on such media: read, change, put a new object.
                array = to_numpy(self.read([Read(w.path)])[0])
                assign_last_wins(array, w.index, to_numpy(w.value))
            else:
                array = to_numpy(w.value)
            new = self._put(blob, np.ascontiguousarray(array).tobytes())
            if self._kept.get(w.path) is blob:
                self._kept[w.path], self._written = new, True
            self._blobs[w.path] = new

    def delete(self, paths: Sequence[Path]) -> None:
        self._check(write=True)
        for path in paths:
            self._blob(path)
        for path in paths:
            self._blobs.pop(path, None)

    def resize(self, lengths: Mapping[Path, int]) -> None:
        self._check(write=True)
        old = {path: self._blob(path) for path in lengths}
        for path, length in lengths.items():
            spec = old[path].spec.replace(shape=(length, *old[path].spec.shape[1:]))
            value = torch.full(spec.shape, spec.fill_value, dtype=spec.dtype)
            keep = min(length, old[path].spec.shape[0])
            value[:keep] = self.read([Read(path, (slice(0, keep, 1),))])[0]
            self._blobs[path] = self._put(Blob(spec), to_numpy(value).tobytes())

    def rename(self, moves: Mapping[Path, Path]) -> None:
        self._check(write=True)
        for path in moves:
            self._blob(path)
        blobs = [self._blobs.pop(path) for path in moves]
        self._blobs |= dict(zip(moves.values(), blobs))

    def discard(self) -> None:
        self._check(write=True)
        self._blobs, self._kept, self._written = dict(self._saved), dict(self._saved), False
        self._header = self._saved_header
        self._remove_mine()

    def verify(self, paths: Sequence[Path] | None = None) -> list[Fault]:
        self._check()
        chosen = [p for p in (self._blobs if paths is None else paths) if self._blob(p).key is not None]
        blobs = [self._blobs[p] for p in chosen]
        fetched = self._fetch([(b.key, runs(b.spec, ())) for b in blobs])
        return [
            Fault(path, "its bytes have another checksum")
            for path, blob, data in zip(chosen, blobs, fetched)
            if google_crc32c.value(bytes(data)) != blob.crc
        ]

    def close(self) -> None:
        if self._closed:
            return
        try:
            if self._written and self._committed:
                self._blobs = self._kept
                self._commit()
        finally:
            self._remove_mine()
            self._closed = True

    # -- inside --------------------------------------------------------------------------
    def _check(self, *, write: bool = False) -> None:
        if self._closed:
            raise StoreClosedError(f"{self.url} was closed", url=self.url)
        if write and not self.writable:
            raise ReadOnlyError(f"{self.url} was opened for reading only", url=self.url)

    def _blob(self, path: Path) -> Blob:
        self._check()
        try:
            return self._blobs[path]
        except KeyError:
            raise KeyNotFoundError(f"no leaf {path_text(path)} in {self.url}") from None

    def _put(self, blob: Blob, data: bytes) -> Blob:
        key = f"{uuid.uuid4().hex}.bin"
        self._fs.makedirs(self._root, exist_ok=True)
        self._fs.pipe_file(f"{self._root}/{key}", data)
        self._mine.add(key)
        return replace(blob, key=key, crc=google_crc32c.value(data))

    def _commit(self) -> None:
        leaves = [
            [list(p), list(b.spec.shape), dtype_name(b.spec.dtype), encode_value(b.spec.fill_value), b.key, b.crc]
            for p, b in self._blobs.items()
        ]
        if self._id and self._manifest()["id"] != self._id:
            raise refusals.overtaken(self.url)
        if not all(self._fs.exists(f"{self._root}/{key}") for key in self._mine):
            raise refusals.overtaken(self.url)  # who saved meanwhile has tidied
        self._id = uuid.uuid4().hex
        document = {"id": self._id, "header": header_to_builtins(self._header), "leaves": leaves}
        self._fs.makedirs(self._root, exist_ok=True)
        self._fs.pipe_file(f"{self._root}/MANIFEST.new", json.dumps(document).encode())
        self._fs.mv(f"{self._root}/MANIFEST.new", f"{self._root}/MANIFEST")
        self._tidy()
        self._mine.clear()
        self._saved, self._kept, self._saved_header = dict(self._blobs), dict(self._blobs), self._header
        self._committed, self._written = True, False

    def _tidy(self) -> None:
        """Remove objects that no leaf has, whoever put them."""
        used = {b.key for b in self._blobs.values()}
        for name in self._fs.ls(self._root, detail=False):
            key = name.rpartition("/")[2]
            if key != "MANIFEST" and key not in used:
                self._fs.rm_file(name)

    def _remove_mine(self) -> None:
        for key in self._mine:
            with suppress(FileNotFoundError):  # another writer has tidied
                self._fs.rm_file(f"{self._root}/{key}")
        self._mine.clear()

    def _manifest(self) -> dict[str, Any]:
        document: dict[str, Any] = json.loads(self._fs.cat_file(f"{self._root}/MANIFEST"))
        return document

    def _load(self) -> None:
        document = self._manifest()
        self._id = document["id"]
        self._header = header_from_builtins(document["header"], url=self.url)
        for path, shape, dtype, fill, key, crc in document["leaves"]:
            spec = LeafSpec(shape, dtype, fill_value=decode_value(fill))
            if key is not None and self._fs.size(f"{self._root}/{key}") != spec.nbytes:
                what = f"{path_text(tuple(path))} of {self.url} is not {spec.nbytes} bytes"
                raise CorruptStoreError(what, url=self.url)
            self._blobs[tuple(path)] = Blob(spec, key, crc)

    def _fetch(self, wanted: Sequence[tuple[str | None, np.ndarray]]) -> list[bytearray]:
        """The bytes of each plan, strung together; all of them in one `cat_ranges`."""
        requests = sorted({(key, a, b) for key, plan in wanted for a, b in merge(plan, GAP)})
        names = [f"{self._root}/{key}" for key, _, _ in requests]
        starts, stops = [a for _, a, _ in requests], [b for _, _, b in requests]
        self.requests += len(requests)
        try:
            found = dict(zip(requests, self._fs.cat_ranges(names, starts, stops, on_error="raise"))) if requests else {}
        except FileNotFoundError:
            raise refusals.replaced(self.url) from None
        results = []
        for key, plan in wanted:
            merged = merge(plan, GAP)
            begins = np.array([a for a, _ in merged])
            out = bytearray()
            for start, stop in plan.tolist():
                block = int(np.searchsorted(begins, start, "right")) - 1
                at, end = merged[block]
                out += found[key, at, end][start - at : stop - at]
            results.append(out)
        return results


# -- the planner: pure ---------------------------------------------------------------------
def result_shape(shape: tuple[int, ...], index: StoreIndex) -> tuple[int, ...]:
    head = tuple(len(t) if isinstance(t, Tensor) else len(range(t.start, t.stop, t.step)) for t in index)
    return (*head, *shape[len(index) :])


def runs(spec: LeafSpec, index: StoreIndex) -> np.ndarray:
    """Byte ranges of `leaf[index]`, one a row, in the order of the result; touching ones joined."""
    terms = [t.numpy() if isinstance(t, Tensor) else np.arange(t.start, t.stop, t.step) for t in index]
    strides = list(itertools.accumulate((spec.dtype.itemsize, *spec.shape[:0:-1]), lambda a, b: a * b))[::-1]
    starts = np.zeros(1, np.int64)
    for term, stride in zip(terms, strides):
        starts = (starts[:, None] + term.astype(np.int64) * stride).ravel()
    size = spec.dtype.itemsize * int(np.prod(spec.shape[len(terms) :], dtype=np.int64))
    if not size or not len(starts):
        return np.empty((0, 2), np.int64)
    breaks = np.flatnonzero(starts[1:] != starts[:-1] + size) + 1
    first = np.concatenate([[0], breaks])
    last = np.concatenate([breaks, [len(starts)]]) - 1
    return np.stack([starts[first], starts[last] + size], 1)


def merge(plan: np.ndarray, gap: int) -> list[tuple[int, int]]:
    """Sorted ranges that cover the plan, near ones made one."""
    merged: list[tuple[int, int]] = []
    for start, stop in plan[np.argsort(plan[:, 0], kind="stable")].tolist():
        if merged and start <= merged[-1][1] + gap:
            merged[-1] = (merged[-1][0], max(merged[-1][1], stop))
        else:
            merged.append((start, stop))
    return merged


def assign_last_wins(array: np.ndarray, index: Iterable[slice | Tensor], value: np.ndarray) -> None:
    terms: list[Any] = list(index)
    for at, term in enumerate(terms):
        if isinstance(term, Tensor):
            last = {row: k for k, row in enumerate(term.tolist())}
            terms[at] = np.fromiter(last, np.int64, len(last))
            value = value.take(np.fromiter(last.values(), np.int64, len(last)), axis=at)
    array[tuple(terms)] = value
