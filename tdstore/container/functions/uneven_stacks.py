"""Lazy stacks whose elements differ: recognise them, and merge one into a TensorDict."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tdstore.container.core.container import GROUP, LEAF, Container
from tdstore.container.core.tensorclasses import class_of, rewrap, unwrap
from tdstore.errors import BatchSizeError
from tdstore.types import Path

if TYPE_CHECKING:
    from tdstore.tensordicts.base import TensorDictBase


def even(td: Any) -> bool:
    """Check whether a lazy stack can become dense without losing anything."""
    keys = set(td._first_keys())
    if any(set(element._first_keys()) != keys for element in td.tensordicts) or -1 in td.batch_size:
        return False
    kinds = {key: td._kind(key) for key in keys}
    if any(-1 in td._leaf_shape(key) for key in keys if kinds[key] == LEAF):
        return False
    groups = [td._raw(key) for key in keys if kinds[key] == GROUP]
    return all(even(group) for group in groups if isinstance(group, td._stack_class))


def differs(source: Any, target: Any) -> bool:
    """Check whether a source is a lazy stack of elements that differ, and the target is none."""
    stack = Container._stack_class
    return isinstance(unwrap(source), stack) and not isinstance(unwrap(target), stack) and not even(unwrap(source))


def merged(target: Any, source: Any, wanted: list[Path] | None, clone: bool) -> TensorDictBase:
    """Merge each row of a TensorDict with an element of a stack, as a lazy stack; neither source changes.

    Args:
        target: a TensorDict of the same batch size.
        source: a lazy stack.
        wanted: the paths to take over; None for all.

    Raises:
        BatchSizeError: the batch sizes differ.
    """
    stack = unwrap(source)
    dim = stack.stack_dim
    td = unwrap(target)._resident()
    rows = td.unbind(dim) if dim < td.batch_dims else ()
    if len(rows) != len(stack.tensordicts):
        raise BatchSizeError(
            f"cannot update a TensorDict of batch size {list(td.batch_size)} with one of {list(stack.batch_size)}"
        )
    for row, element in zip(rows, stack.tensordicts, strict=True):
        row.update(element, clone, keys_to_update=wanted)
    made: TensorDictBase = rewrap(class_of(unwrap(target)), stack._of(rows, dim, stack._dim_name))
    return made
