"""A `.safetensors` file as a store: read where it lies, row by row; written whole, or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import BinaryIO

import torch
from tdstore import errors
from tdstore.dtypes import from_numpy, to_numpy
from tdstore.header import Header
from tdstore.store import Cap, Store, check_indices, check_writes
from tdstore.types import LeafSpec, Mode, Path, Read, Write, path_text
from torch import Tensor

from tdstore_safetensors.document import KEY, names_of, read_document, write_document
from tdstore_safetensors.files import system_errors, write_whole
from tdstore_safetensors.format import build, header_length, parse
from tdstore_safetensors.leaf import NewLeaf, SavedLeaf, numpy_index


class SafetensorsStore(Store):
    """The tensors of one file as leaves. Made by `open_safetensors`."""

    caps = Cap.WRITE | Cap.PARTIAL_READ | Cap.PARTIAL_WRITE | Cap.PERSISTENT | Cap.CONCURRENT_READ | Cap.DISCARD

    def __init__(self, path: str, mode: Mode, metadata: Mapping[str, str]) -> None:
        self.url, self.writable, self.metadata = path, mode != "r", dict(metadata)
        self._exclusive, self._closed = mode == "x", False
        self._file: BinaryIO | None = None
        self._header, self._leaves = Header(), dict[Path, NewLeaf | SavedLeaf]()
        if mode in ("r", "r+"):
            with system_errors(path, "opening"):
                self._file = open(path, "rb")
                try:
                    self._load(self._file)
                except BaseException:
                    self._file.close()
                    raise
        self._saved, self._kept, self._written = dict(self._leaves), dict(self._leaves), False

    def _load(self, file: BinaryIO) -> None:
        size = os.fstat(file.fileno()).st_size
        length = header_length(file.read(8), size, self.url)
        tensors, metadata = parse(file.read(length), size - 8 - length, self.url)
        self._header, leaves = read_document(metadata.pop(KEY, None), tensors, self.url)
        self._leaves = {path: SavedLeaf(spec, file, 8 + length + at, self.url) for path, (spec, at) in leaves.items()}
        self.metadata = {**metadata, **self.metadata}

    # -- looking ---------------------------------------------------------------------------
    def _check(self, *, writing: bool = False) -> None:
        if self._closed:
            raise errors.StoreClosedError(f"{self.url} was closed", url=self.url)
        if writing and not self.writable:
            raise errors.ReadOnlyError(f"{self.url} was opened for reading", url=self.url, hint="mode='r+' can write")

    def _leaf(self, path: Path) -> NewLeaf | SavedLeaf:
        self._check()
        if path not in self._leaves:
            raise errors.KeyNotFoundError(f"no leaf {path_text(path)} in {self.url}")
        return self._leaves[path]

    def paths(self) -> Iterator[Path]:
        self._check()
        return iter(tuple(self._leaves))

    def specs(self, paths: Sequence[Path]) -> list[LeafSpec]:
        return [self._leaf(path).spec for path in paths]

    def load_header(self) -> Header:
        self._check()
        return self._header

    # -- reading ---------------------------------------------------------------------------
    def read(self, reads: Sequence[Read]) -> list[Tensor]:
        leaves = [self._leaf(r.path) for r in reads]
        check_indices((r.index, leaf.spec.shape) for r, leaf in zip(reads, leaves, strict=True))
        values = [from_numpy(leaf.read(r.index), leaf.spec.dtype) for leaf, r in zip(leaves, reads, strict=True)]
        return [v if r.out is None else r.out.copy_(v) for r, v in zip(reads, values, strict=True)]

    # -- changing: in memory, until it is saved ----------------------------------------------
    def create(self, leaves: Mapping[Path, LeafSpec]) -> None:
        self._check(writing=True)
        for option in (name for spec in leaves.values() for name in spec.options):
            raise errors.OptionError(f"{self.url} has no leaf option {option!r}", url=self.url)
        for path, spec in leaves.items():
            self._leaves[path] = NewLeaf(spec, to_numpy(torch.full((), spec.fill_value, dtype=spec.dtype)))

    def write(self, writes: Sequence[Write]) -> None:
        self._check(writing=True)
        places = [(w, self._leaf(w.path).spec) for w in writes]
        check_writes((w, spec.shape, spec.dtype) for w, spec in places)
        for w, spec in places:
            leaf = self._leaves[w.path].changeable() if w.index else NewLeaf(spec, to_numpy(w.value).copy())
            if w.index:
                leaf.array[numpy_index(w.index)] = to_numpy(w.value)
            if self._kept.get(w.path) is self._leaves[w.path]:  # a leaf of the last commit: `close` keeps its rows
                self._kept[w.path], self._written = leaf, True
            self._leaves[w.path] = leaf

    def delete(self, paths: Sequence[Path]) -> None:
        self._check(writing=True)
        for path in [path for path in paths if self._leaf(path)]:
            self._leaves.pop(path, None)

    # -- saving: the whole file --------------------------------------------------------------
    def save_header(self, header: Header) -> None:
        self._check(writing=True)
        names = names_of(self._leaves)
        specs = {name: self._leaves[path].spec for name, path in names.items()}
        begin, starts = build(specs, {**self.metadata, KEY: write_document(header, names, specs)})
        blocks = (block for name in starts for block in self._leaves[names[name]].blocks())
        file = write_whole(self.url, chain([begin], blocks), exclusive=self._exclusive)
        if self._file:
            self._file.close()
        self._file, self._header, self._exclusive = file, header, False
        self._leaves = {path: SavedLeaf(specs[name], file, starts[name], self.url) for name, path in names.items()}
        self._saved, self._kept, self._written = dict(self._leaves), dict(self._leaves), False

    def discard(self) -> None:
        self._check(writing=True)
        self._leaves, self._kept, self._written = dict(self._saved), dict(self._saved), False

    def close(self) -> None:
        try:
            if self._written and not self._closed:
                self._leaves = self._kept
                self.save_header(self._header)
        finally:
            self._closed = True
            if self._file:
                self._file.close()


def open_safetensors(location: str, *, mode: Mode = "r", metadata: Mapping[str, str] | None = None) -> SafetensorsStore:
    """Open one file. `metadata`: strings to write beside the tensors, such as `{"format": "pt"}`."""
    if not location:
        raise errors.OptionError("the safetensors backend needs a location", hint="the name of a file, 'x.safetensors'")
    if metadata and (mode == "r" or not all(isinstance(text, str) for text in [*metadata, *metadata.values()])):
        raise errors.OptionError(f"{location}: metadata= takes strings, and writes them: there are none in mode 'r'")
    path = os.path.realpath(location)
    if mode == "a":
        mode = "r+" if os.path.exists(path) else "x"
    if mode in ("r", "r+") and not os.path.isfile(path):
        raise errors.StoreNotFoundError(f"there is no file {location}", url=path)
    if os.path.exists(path) and (mode == "x" or not os.path.isfile(path)):
        raise errors.StoreExistsError(f"{location} exists", url=path, hint="mode='w' replaces a file")
    return SafetensorsStore(path, mode, metadata or {})
