"""Iteration over a TensorDict in blocks of rows, so that a stored one is never in memory as a whole."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from tdstore.container.core.container import GROUP, LEAF, Container
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


def refuse_ragged(td: Container, what: str) -> None:
    """Raise an error that names the first entry whose rows differ in shape, if there is one."""
    for key in td._first_keys():
        kind = td._kind(key)
        if kind == GROUP:
            refuse_ragged(td._raw(key), what)
        elif kind == LEAF and -1 in td._leaf_shape(key):
            raise BatchSizeError(
                f"{what}: the rows of entry {key!r} differ in shape", hint="call td.to_padded_tensor() first"
            )


def with_jagged(td: Container) -> TensorDictBase:
    """Read a TensorDict into memory; rows of different lengths in a lazy stack become nested tensors.

    Raises:
        BatchSizeError: the rows of an entry differ in another dimension than their first.
    """
    if not check_ragged(td):
        resident: TensorDictBase = td._resident()
        return resident
    made: TensorDictBase = Container._resident_class(batch_size=td.batch_size[:1])
    for key in td._first_keys():
        kind = td._kind(key)
        if kind == GROUP:
            made.set(key, with_jagged(td._raw(key)))
        elif kind == LEAF and -1 in td._leaf_shape(key) and isinstance(td, Container._stack_class):
            made.set(key, td._raw_as(key, as_nested_tensor=True))
        else:
            made.set(key, td._raw(key))
    return made


def check_ragged(td: Any) -> bool:
    """Return whether rows of a lazy stack differ in length; raise an error for other differences of rows."""
    found = False
    for key in td._first_keys():
        kind = td._kind(key)
        if kind == GROUP:
            found |= check_ragged(td._raw(key))
        elif kind == LEAF and -1 in (shape := td._leaf_shape(key)):
            stack = isinstance(td, Container._stack_class)
            if tuple(shape[1:2]) != (-1,) or -1 in shape[2:] or (stack and td._stack_dim):
                raise BatchSizeError(
                    f"a table: the rows of entry {key!r} differ in more than their length",
                    hint="call td.to_padded_tensor() first",
                )
            found |= stack
    return found
