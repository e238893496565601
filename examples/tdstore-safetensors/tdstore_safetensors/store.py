"""A `.safetensors` file as a store: read where it lies, row by row; written whole, or not at all."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import BinaryIO

import torch
from tdstore.dtypes import from_numpy, to_numpy
from tdstore.errors import OptionError
from tdstore.header import Header
from tdstore.store import Cap
from tdstore.storekit import CheckedStore, io_errors, refusals
from tdstore.types import LeafSpec, Mode, Path, Read, Write
from torch import Tensor

from tdstore_safetensors.document import KEY, names_of, read_document, write_document
from tdstore_safetensors.files import write_whole
from tdstore_safetensors.format import build, header_length, parse
from tdstore_safetensors.leaf import NewLeaf, SavedLeaf, numpy_index

Leaf = NewLeaf | SavedLeaf


class SafetensorsStore(CheckedStore[Leaf]):
    """The tensors of one file as leaves. Made by `open_safetensors`."""

    caps = Cap.WRITE | Cap.PARTIAL_READ | Cap.PARTIAL_WRITE | Cap.PERSISTENT | Cap.CONCURRENT_READ | Cap.DISCARD

    def __init__(self, path: str, mode: Mode, metadata: Mapping[str, str]) -> None:
        super().__init__(path, writable=mode != "r")
        self.metadata, self._exclusive = dict(metadata), mode == "x"
        self._file: BinaryIO | None = None
        self._leaves = dict[Path, Leaf]()
        if mode in ("r", "r+"):
            with io_errors(path, "opening", writing=False):
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

    def _catalogue(self) -> Mapping[Path, Leaf]:
        return self._leaves

    def _read(self, wanted: Sequence[tuple[Leaf, Read]]) -> list[Tensor]:
        return [from_numpy(leaf.read(r.index), leaf.spec.dtype) for leaf, r in wanted]

    # -- changing: in memory, until it is saved ----------------------------------------------
    def _create(self, leaves: Mapping[Path, LeafSpec]) -> None:
        for path, spec in leaves.items():
            self._leaves[path] = NewLeaf(spec, to_numpy(torch.full((), spec.fill_value, dtype=spec.dtype)))

    def _write(self, wanted: Sequence[tuple[Leaf, Write]]) -> None:
        for _, w in wanted:
            old = self._leaves[w.path]
            leaf = old.changeable() if w.index else NewLeaf(old.spec, to_numpy(w.value).copy())
            if w.index:
                leaf.array[numpy_index(w.index)] = to_numpy(w.value)
            if self._kept.get(w.path) is self._leaves[w.path]:  # a leaf of the last commit: `close` keeps its rows
                self._kept[w.path], self._written = leaf, True
            self._leaves[w.path] = leaf

    def _delete(self, paths: Sequence[Path]) -> None:
        for path in paths:
            del self._leaves[path]

    # -- saving: the whole file --------------------------------------------------------------
    def _save(self, header: Header) -> None:
        names = names_of(self._leaves)
        specs = {name: self._leaves[path].spec for name, path in names.items()}
        begin, starts = build(specs, {**self.metadata, KEY: write_document(header, names, specs)})
        blocks = (block for name in starts for block in self._leaves[names[name]].blocks())
        with self._turn():
            file = write_whole(self.url, chain([begin], blocks), exclusive=self._exclusive)
        if self._file:
            self._file.close()
        self._file, self._header, self._exclusive = file, header, False
        self._leaves = {path: SavedLeaf(specs[name], file, starts[name], self.url) for name, path in names.items()}
        self._saved, self._kept, self._written = dict(self._leaves), dict(self._leaves), False

    def _discard(self) -> None:
        self._leaves, self._kept, self._written = dict(self._saved), dict(self._saved), False

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Commit alone, and over the file that was opened: another one at its name is another writer's commit."""
        file = self._file
        if file is None:  # mode "w" replaces what is there
            yield
            return
        with io_errors(self.url, "locking"):
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise refusals.busy(self.url, "another process, which commits") from None
        try:
            if not os.path.exists(self.url) or not os.path.samestat(os.fstat(file.fileno()), os.stat(self.url)):
                raise refusals.overtaken(self.url)
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)

    def _close(self) -> None:
        try:
            if self._written and not self._forked:
                self._leaves = self._kept
                self._save(self._header)
        finally:
            if self._file:
                self._file.close()


def open_safetensors(location: str, *, mode: Mode = "r", metadata: Mapping[str, str] | None = None) -> SafetensorsStore:
    """Open one file. `metadata`: strings to write beside the tensors, such as `{"format": "pt"}`."""
    if not location:
        raise OptionError("the safetensors backend needs a location", hint="the name of a file, 'x.safetensors'")
    if metadata and (mode == "r" or not all(isinstance(text, str) for text in [*metadata, *metadata.values()])):
        raise OptionError(f"{location}: metadata= takes strings, and writes them: there are none in mode 'r'")
    path = os.path.realpath(location)
    if mode == "a":
        mode = "r+" if os.path.exists(path) else "x"
    if mode in ("r", "r+") and not os.path.isfile(path):
        raise refusals.not_found(path)
    if os.path.exists(path) and (mode == "x" or not os.path.isfile(path)):
        raise refusals.place_exists(path)
    return SafetensorsStore(path, mode, metadata or {})
