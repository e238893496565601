"""TensorDicts as readers of record batches, and so as streams of Arrow's C data interface."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from tdstore.container.core.container import GROUP, LEAF, Container
from tdstore.convert import packages
from tdstore.convert.tables.arrow import to_arrow, value_types
from tdstore.convert.tables.row_blocks import with_rows
from tdstore.io.blocks import BLOCK_BYTES

if TYPE_CHECKING:
    import pyarrow as pa

FIRST_ROWS = 1024
"""The rows of the first block of entries whose size is not known before they are read."""


def to_reader(
    td: Container, separator: str | None, tensors: bool, block_bytes: int = BLOCK_BYTES
) -> pa.RecordBatchReader:
    """Make a reader of record batches, see `TensorDict.to_arrow_reader`."""
    td = with_rows(td, "a table")
    types = value_types(td)
    blocks = _blocks(td, block_bytes)
    # The first block is converted now: a reader has a schema before it is read.
    first = to_arrow(next(blocks), separator, types, tensors)

    def batches() -> Iterator[Any]:
        table, nbytes = first, first.nbytes
        while True:
            yield from table.to_batches()
            try:
                block = blocks.send(nbytes)
            except StopIteration:
                return
            table = to_arrow(block, separator, types, tensors)
            nbytes = table.nbytes

    return packages.pyarrow().RecordBatchReader.from_batches(first.schema, batches())


def _blocks(td: Any, block_bytes: int) -> Any:
    """Yield blocks of rows, and take the bytes that each had as a table: the next one is sized after it.

    Live tensors alone are one block, since a table of them shares their memory.
    """
    rows = td.batch_size[0]
    if isinstance(td, Container._resident_class) and _only_tensors(td):
        yield td
        return
    start, step = 0, max(1, min(FIRST_ROWS, block_bytes // max(1, td.bytes() // max(1, rows))))
    while start < rows or not start:
        stop = min(rows, start + step)
        nbytes = yield td._at(slice(start, stop))
        if stop == rows:
            return
        fitting = block_bytes * (stop - start) // max(1, nbytes)
        start, step = stop, max(1, min(fitting, 8 * step))


def _only_tensors(td: Any) -> bool:
    """Check whether all entries, of nested TensorDicts too, are tensors in memory."""
    return all(
        isinstance(td._raw(key), Container._resident_class) and _only_tensors(td._raw(key))
        if td._kind(key) == GROUP
        else td._kind(key) == LEAF
        for key in td._first_keys()
    )
