"""Iteration over a TensorDict in blocks of rows, so that a stored one is never in memory as a whole."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from tdstore.container.core.container import GROUP, LEAF
from tdstore.errors import BatchSizeError
from tdstore.index.shapes import common_prefix
from tdstore.io.blocks import row_ranges

if TYPE_CHECKING:
    from tdstore.tensordicts.base import TensorDictBase

TEXT_BLOCK = 4 << 20
"""Bytes of tensors in a block that becomes Python objects or text, which take many times as much."""


def row_blocks(td: Any, block_bytes: int = 32 << 20) -> Iterator[tuple[int, int, Any]]:
    """Yield `(start, stop, TensorDict in memory)` of consecutive rows, of about `block_bytes` each."""
    rows = td.batch_size[0]
    for start, stop in row_ranges(rows, td.bytes() // max(1, rows), block_bytes):
        yield start, stop, td._at(slice(start, stop))._resident()


def with_rows(td: Any, what: str) -> TensorDictBase:
    """Return the TensorDict, or without a batch size one over the first dimension that its tensors share.

    Raises:
        BatchSizeError: there is no batch size, and the tensors share no first dimension.
    """
    if td.batch_dims:
        made: TensorDictBase = td
        return made
    shapes = list(_leaf_shapes(td))
    shared = common_prefix(shapes)
    if not shapes or not shared:
        raise BatchSizeError(
            f"{what} has a row for each element of the first batch dimension, and this TensorDict has none",
            hint="set its batch_size, or use td.unsqueeze(0) for a table of one row",
        )
    found: TensorDictBase = td._resident()._shallow()
    found.batch_size = shared[:1]
    return found


def _leaf_shapes(td: Any) -> Iterator[Any]:
    for node, key in td._leaf_places():
        yield node._leaf_shape(key)


def refuse_ragged(td: Any, what: str) -> None:
    """Raise an error that names the first entry whose rows differ in shape, if there is one."""
    for key in td._first_keys():
        kind = td._kind(key)
        if kind == GROUP:
            refuse_ragged(td._raw(key), what)
        elif kind == LEAF and -1 in td._leaf_shape(key):
            raise BatchSizeError(
                f"{what}: the rows of entry {key!r} differ in shape", hint="call td.to_padded_tensor() first"
            )
