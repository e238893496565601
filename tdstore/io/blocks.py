"""Cutting work into batches of bounded memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from tdstore.types import LeafSpec, Path, StoreIndex

BLOCK_BYTES = 32 << 20


def row_ranges(rows: int, row_bytes: int, block_bytes: int = BLOCK_BYTES) -> Iterator[tuple[int, int]]:
    """Ranges of rows of at most `block_bytes` each (a single row may be larger)."""
    step = max(1, block_bytes // max(1, row_bytes))
    for start in range(0, rows, step):
        yield start, min(rows, start + step)


def leaf_batches(
    specs: Mapping[Path, LeafSpec], block_bytes: int = BLOCK_BYTES
) -> Iterator[list[tuple[Path, StoreIndex]]]:
    """Batches of `(path, rows)` that cover all leaves, small leaves together, large ones in pieces."""
    batch: list[tuple[Path, StoreIndex]] = []
    filled = 0
    for path, spec in specs.items():
        if spec.nbytes <= block_bytes or not spec.shape:
            pieces: list[tuple[StoreIndex, int]] = [((), spec.nbytes)]
        else:
            row = spec.nbytes // spec.shape[0]
            pieces = [((slice(a, b, 1),), (b - a) * row) for a, b in row_ranges(spec.shape[0], row, block_bytes)]
        for index, nbytes in pieces:
            if batch and filled + nbytes > block_bytes:
                yield batch
                batch, filled = [], 0
            batch.append((path, index))
            filled += nbytes
    if batch:
        yield batch
