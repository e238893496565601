"""One leaf: saved, and then it is a part of the file; or new, and then it is an array in memory."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import torch
from tdstore.dtypes import numpy_dtype
from tdstore.types import LeafSpec, StoreIndex
from torch import Tensor

from tdstore_safetensors.files import Array, read_into

BLOCK = 4 << 20


class NewLeaf(NamedTuple):
    """A leaf that waits to be saved. An array without dimensions stands for a leaf of nothing but that element."""

    spec: LeafSpec
    array: Array

    def read(self, index: StoreIndex) -> Array:
        """`leaf[index]`, in memory of its own."""
        return np.array(np.broadcast_to(self.array, self.spec.shape)[numpy_index(index)], order="C")

    def changeable(self) -> NewLeaf:
        """The leaf with all its elements in memory."""
        return self if self.array.shape == self.spec.shape else NewLeaf(self.spec, self.read(()))

    def blocks(self) -> Iterator[memoryview]:
        """The bytes of the leaf, in order, a part at a time."""
        if self.array.shape == self.spec.shape:
            yield self.array.reshape(-1).view(np.uint8).data
            return
        for start in range(0, self.spec.numel, BLOCK):
            yield np.full(min(BLOCK, self.spec.numel - start), self.array).view(np.uint8).data


class SavedLeaf(NamedTuple):
    """A leaf that lies at an offset of the file."""

    spec: LeafSpec
    file: BinaryIO
    offset: int
    url: str

    def read(self, index: StoreIndex) -> Array:
        """`leaf[index]`, in memory of its own; no other rows are read than those that the index names."""
        spec = self.spec
        rows = index[0] if index else slice(0, spec.shape[0] if spec.shape else 1, 1)
        if isinstance(rows, slice):
            ranges, left = [(rows.start, rows.stop)], slice(0, rows.stop - rows.start, rows.step)
        else:
            ranges, left = [(row, row + 1) for row in rows.tolist()], slice(0, len(rows), 1)
        array = np.empty((left.stop, *spec.shape[1:]), numpy_dtype(spec.dtype))
        size, done = math.prod(spec.shape[1:]) * spec.dtype.itemsize, 0
        for start, stop in ranges:
            read_into(array[done : done + stop - start], self.file, self.offset + start * size, self.url)
            done += stop - start
        if spec.dtype is torch.bool:
            array = array.view(np.uint8) != 0  # a file may hold any byte, and a bool of another one breaks torch
        if not index:
            return array.reshape(spec.shape)
        return np.ascontiguousarray(array[numpy_index((left, *index[1:]))])

    def changeable(self) -> NewLeaf:
        """The leaf with all its elements in memory."""
        return NewLeaf(self.spec, self.read(()))

    def blocks(self) -> Iterator[memoryview]:
        """The bytes of the leaf, in order, a part at a time."""
        for start in range(0, self.spec.nbytes, BLOCK):
            block = np.empty(min(BLOCK, self.spec.nbytes - start), np.uint8)
            yield read_into(block, self.file, self.offset + start, self.url).data


def numpy_index(index: StoreIndex) -> tuple[Any, ...]:
    """An index as numpy takes it: row numbers come as a tensor."""
    return tuple(term.numpy() if isinstance(term, Tensor) else term for term in index)
