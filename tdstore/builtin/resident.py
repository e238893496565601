"""The base of resident stores: leaves are live tensors, so reading and writing is torch's own indexing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from tdstore.builtin.memmap.layout import LeafFile
from tdstore.builtin.readcheck import ReadCheck
from tdstore.dtypes import NAME_TO_DTYPE
from tdstore.storekit import refusals
from tdstore.storekit.budget import SUSPECT_BYTES, check_holes
from tdstore.storekit.checked import CheckedStore, L
from tdstore.storekit.files import io_errors
from tdstore.storekit.pages import copy_rows
from tdstore.types import Path, Read, StoreIndex, Write


class ResidentStore(CheckedStore[L], Generic[L]):
    """Base of stores whose leaves are live tensors, which any process may write that has them."""

    _reading: ReadCheck[LeafFile] | None = None
    """The leaves whose checksums have not been compared yet."""

    def check(self, paths: Sequence[Path], rows: slice | Tensor | None = None) -> None:
        if (reading := self._reading) is not None and reading.pending:
            for path in paths:
                reading.check(self._summed(path), rows)

    def _gather(self, leaf: Tensor, r: Read) -> Tensor:
        """Copy the selected part of a leaf, and compare it with the checksums."""
        if (reading := self._reading) is not None and r.path in reading.pending:
            return reading.gather(self._summed(r.path), leaf, r.index, r.out)
        return copy_rows(leaf, r.index, r.out)

    def _summed(self, path: Path) -> LeafFile:
        """Return a leaf with its checksums."""
        raise NotImplementedError


class FileLeaf(Protocol):
    """A leaf that is mapped from a file, as far as `MappedStore` knows it."""

    path: Path
    shape: torch.Size

    @property
    def nbytes(self) -> int:
        """The bytes of all its elements."""


F = TypeVar("F", bound=FileLeaf)


class MappedStore(ResidentStore[F], Generic[F]):
    """Base of resident stores of files, in which most of a leaf may be holes."""

    _options: dict[str, Any]

    def check(self, paths: Sequence[Path], rows: slice | Tensor | None = None) -> None:
        if rows is not None:
            if self._closed:
                raise refusals.closed(self.url)
            leaves = self._catalogue()
            for path in paths:
                leaf = leaves[path] if path in leaves else self._leaf(path)  # which raises
                # A row of a leaf is no larger than the leaf: most need no arithmetic on the index.
                if leaf.nbytes * (len(rows) if isinstance(rows, Tensor) else 1) > SUSPECT_BYTES:
                    self._refuse_holes(leaf, (rows,))
        if (reading := self._reading) is not None and reading.pending:
            super().check(paths, rows)

    def _refuse_holes(self, leaf: F, index: StoreIndex) -> None:
        """Refuse to copy what takes far more memory than the storage has of it, unless that is allowed."""
        wanted = bytes_of(leaf.shape, leaf.nbytes, index)
        if wanted > SUSPECT_BYTES and self._options["max_bytes"] is None:
            with io_errors(self.url, "looking at leaves", writing=False):
                check_holes(leaf.path, wanted, partial(self._bytes_there, leaf), self.url)

    def _bytes_there(self, leaf: F) -> int:
        """Return the bytes that the storage has of a leaf, or of all leaves together."""
        raise NotImplementedError


class TensorStore(ResidentStore[Tensor]):
    """Base of stores whose leaves are nothing but tensors."""

    _leaves: dict[Path, Tensor]

    def _catalogue(self) -> Mapping[Path, Tensor]:
        return self._leaves

    def _typed(self, leaf: Tensor) -> Tensor:
        return leaf

    def view(self, path: Path) -> Tensor:
        leaf = None if self._closed else self._leaves.get(path)
        return self._leaf(path) if leaf is None else leaf

    def _read(self, wanted: Sequence[tuple[Tensor, Read]]) -> list[Tensor]:
        return [copy_rows(leaf, r.index, r.out) for leaf, r in wanted]

    def _write(self, wanted: Sequence[tuple[Tensor, Write]]) -> None:
        for leaf, w in wanted:
            put(leaf, w.index, w.value)

    def _delete(self, paths: Sequence[Path]) -> None:
        for path in paths:
            del self._leaves[path]


def put(leaf: Tensor, index: StoreIndex, value: Tensor) -> None:
    """Assign `leaf[index] = value`, where no row is named twice."""
    if value.device != leaf.device:
        value = value.resolve_conj().resolve_neg()  # torch loses the sign of negated views that it copies to a GPU
    at = next((i for i, term in enumerate(index) if isinstance(term, Tensor)), None)
    if at is None:
        (leaf[index] if index else leaf).copy_(value)
        return
    rows: Tensor = index[at]  # type: ignore[assignment]
    if carrier := _CARRIER.get(leaf.dtype):
        leaf, value = leaf.view(carrier), value.view(carrier)
    leaf[(*index[:at], rows.to(leaf.device), *index[at + 1 :])] = value.to(leaf.device)


# torch cannot assign to rows of these; integers of the same width carry their bits.
_CARRIER = {
    dtype: (torch.int8, torch.int16, torch.int32, torch.int64)[dtype.itemsize.bit_length() - 1]
    for name, dtype in NAME_TO_DTYPE.items()
    if name.startswith(("uint", "float8"))
}


def bytes_of(shape: Sequence[int], nbytes: int, index: StoreIndex) -> int:
    """Return how many bytes of a leaf of `nbytes` an index selects."""
    for term, length in zip(index, shape, strict=False):
        if not length:
            return 0
        count = len(term) if isinstance(term, Tensor) else len(range(*term.indices(length)))
        nbytes = nbytes // length * count
    return nbytes
