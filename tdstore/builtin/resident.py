"""The base of resident stores: leaves are live tensors, so reading and writing is torch's own indexing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from tdstore.builtin.memmap.layout import LeafFile
from tdstore.builtin.readcheck import ReadCheck
from tdstore.dtypes import NAME_TO_DTYPE
from tdstore.errors import KeyNotFoundError, ReadOnlyError, StoreClosedError
from tdstore.index.ranges import check_writes
from tdstore.index.rows import check_indices
from tdstore.index.selection import last_wins
from tdstore.store import Store
from tdstore.storekit.pageadvice import copy_rows
from tdstore.types import LeafSpec, Path, Read, StoreIndex, Write, path_text


class ResidentStore(Store):
    """Base of stores whose leaves are tensors of this process: a subclass provides `_leaves`."""

    _leaves: dict[Path, Tensor]
    _closed = False
    _reading: ReadCheck[LeafFile] | None = None
    """What is still to be compared with checksums."""

    def paths(self) -> Iterator[Path]:
        self._check_open()
        return iter(tuple(self._leaves))

    def specs(self, paths: Sequence[Path]) -> list[LeafSpec]:
        return [LeafSpec(t.shape, t.dtype) for t in map(self.view, paths)]

    def view(self, path: Path) -> Tensor:
        self._check_open()
        try:
            return self._leaves[path]
        except KeyError:
            raise KeyNotFoundError(f"no leaf {path_text(path)} in {self.url}") from None

    def read(self, reads: Sequence[Read]) -> list[Tensor]:
        views = [self.view(r.path) for r in reads]
        check_indices((r.index, leaf.shape) for r, leaf in zip(reads, views, strict=True))
        return [copy_rows(leaf, r.index, r.out) for leaf, r in zip(views, reads, strict=True)]

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

    def write(self, writes: Sequence[Write]) -> None:
        self._check_writable()
        views = [self.view(w.path) for w in writes]
        check_writes((w, leaf.shape, leaf.dtype) for w, leaf in zip(writes, views, strict=True))
        for leaf, w in zip(views, writes, strict=True):
            put(leaf, w.index, w.value)

    def delete(self, paths: Sequence[Path]) -> None:
        self._check_writable()
        for path in paths:
            self.view(path)
        for path in dict.fromkeys(paths):
            del self._leaves[path]

    def close(self) -> None:
        self._closed = True

    def _check_open(self) -> None:
        if self._closed:
            raise StoreClosedError(f"{self.url} was closed", url=self.url)

    def _check_writable(self) -> None:
        self._check_open()
        if not self.writable:
            raise ReadOnlyError(
                f"{self.url} was opened for reading only", url=self.url, hint="open it with mode='r+' to write"
            )


def put(leaf: Tensor, index: StoreIndex, value: Tensor) -> None:
    """Assign `leaf[index] = value`; of repeated rows the last one wins (torch leaves that undefined)."""
    at = next((i for i, term in enumerate(index) if isinstance(term, Tensor)), None)
    if at is None:
        (leaf[index] if index else leaf).copy_(value)
        return
    rows, positions = last_wins(index[at])  # type: ignore[arg-type]
    if carrier := _CARRIER.get(leaf.dtype):
        leaf, value = leaf.view(carrier), value.view(carrier)
    value = value.to(leaf.device)
    if positions is not None:
        value = value.index_select(at, positions.to(leaf.device))
    leaf[(*index[:at], rows.to(leaf.device), *index[at + 1 :])] = value


# torch cannot assign to rows of these; integers of the same width carry their bits.
_CARRIER = {
    dtype: (torch.int8, torch.int16, torch.int32, torch.int64)[dtype.itemsize.bit_length() - 1]
    for name, dtype in NAME_TO_DTYPE.items()
    if name.startswith(("uint", "float8"))
}


def rows_of(shape: Sequence[int], index: StoreIndex) -> int:
    """Return how many rows of the first dimension an index selects."""
    if not shape:
        return 1
    first = index[0] if index else slice(None)
    return len(first) if isinstance(first, Tensor) else len(range(*first.indices(shape[0])))


def full(spec: LeafSpec, device: str | torch.device = "cpu") -> Tensor:
    """Return a tensor full of the spec's fill value; large zeros on the CPU cost no memory until touched."""
    if spec.fill_value or str(spec.fill_value) == "-0.0":
        return torch.full(spec.shape, spec.fill_value, dtype=spec.dtype, device=device)
    if torch.device(device).type == "cpu" and spec.nbytes >= _LAZY_BYTES:
        # torch.zeros writes its zeros; numpy's come from the system, page by page as they are touched.
        return torch.from_numpy(np.zeros(spec.nbytes, np.uint8)).view(spec.dtype).view(spec.shape)
    return torch.zeros(spec.shape, dtype=spec.dtype, device=device)


_LAZY_BYTES = 1 << 20
