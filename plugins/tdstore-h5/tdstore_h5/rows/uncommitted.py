"""Rows of chunked leaves that `close` commits, although later changes of structure are dropped."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from typing import IO

import numpy as np
from torch import Tensor

from tdstore.dtypes import from_numpy, numpy_dtype, to_numpy
from tdstore.types import LeafSpec, Path

IN_MEMORY = 1 << 20
"""Bytes from which on they are in a temporary file."""


class Aside:
    """Rows by leaf, in the order in which they were added.

    Args:
        folder: the folder for a temporary file.
    """

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self._rows: list[tuple[Path, LeafSpec, int, int]] = []
        """Leaf, first row and behind the last one."""
        self._bytes: IO[bytes] | None = None

    def put(self, path: Path, spec: LeafSpec, first: int, last: int, value: Tensor) -> None:
        """Add rows of a leaf (all of it, if it has no dimensions).

        Args:
            path: the leaf.
            spec: its spec.
            first, last: the rows.
            value: their values.
        """
        if self._bytes is None:
            self._bytes = tempfile.SpooledTemporaryFile(IN_MEMORY, dir=self.folder)  # noqa: SIM115 - `clear` closes it
        self._bytes.write(to_numpy(value.contiguous()).tobytes())
        self._rows.append((path, spec, first, last))

    def take(self) -> Iterator[tuple[Path, int, int, Tensor]]:
        """Yield and remove everything."""
        if self._bytes is not None:
            self._bytes.seek(0)
            for path, spec, first, last in self._rows:
                shape = (last - first, *spec.shape[1:]) if spec.shape else ()
                count = int(np.prod(shape, dtype=np.int64)) * spec.dtype.itemsize
                raw = np.frombuffer(bytearray(self._bytes.read(count)), numpy_dtype(spec.dtype))
                yield path, first, last, from_numpy(raw.reshape(shape), spec.dtype)
        self.clear()

    def clear(self) -> None:
        """Drop everything."""
        file, self._bytes = self._bytes, None
        if file is not None:
            file.close()
        self._rows.clear()
