"""What comes to a store when an entry is set through a window: rows outside of a new one hold zeros, values None."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tdstore.container.core.container import GROUP, LEAF, Container
from tdstore.container.core.tensorclasses import class_of, kind_of, rewrap, unwrap
from tdstore.container.entries.unbatched import UnbatchedTensor
from tdstore.container.values.nontensor import NonTensor, NonTensorData, assign
from tdstore.container.varlen.nested_leaves import leaf_below
from tdstore.errors import TDStoreError, UnsupportedError
from tdstore.index.selection import Selection
from tdstore.types import LeafSpec, Names, Path

if TYPE_CHECKING:
    from tdstore.tensordicts.base import TensorDictBase
    from tdstore.tensordicts.resident.tensordict import TensorDict


def widened(entry: Any, sel: Selection, source: torch.Size, names: Names) -> TensorDictBase:
    """Expand `entry` to all rows: values of the window's rows stay, tensors are zeros that take no memory.

    Args:
        sel: the rows of `entry` among those of the `source`, whose dimensions have these names.
    """
    td = dense(entry)
    n = len(sel.shape)
    data: dict[str, Any] = {}
    for key in td._first_keys():
        kind = td._kind(key)
        if kind == LEAF:
            shape, _, dtype, *_ = td._leaf_facts(key)
            if -1 in shape or td._leaf_layout(key) is not torch.strided:
                raise UnsupportedError(
                    f"the nested tensor {key!r} cannot be set through a window",
                    hint="set it on the TensorDict that was indexed",
                )
            data[key] = torch.zeros((), dtype=dtype, device="cpu").expand((*source, *shape[n:]))
        elif kind == GROUP:
            data[key] = widened(td._raw(key), sel, source, names)
        else:
            value = td._raw(key)
            empty = NonTensorData(None, (*source, *value.batch_size[n:]))
            data[key] = put_rows(key, empty, sel, value)
    rest = td.batch_size[n:]
    every = (*(names or (None,) * len(source)), *((td._names or ())[n:] or (None,) * len(rest)))
    made = td._resident_class._new(data, torch.Size((*source, *rest)), td.device, every if any(every) else None)
    found: TensorDictBase = rewrap(class_of(entry), made)
    return found


def dense(entry: Any) -> TensorDict:
    """Return a container without its class; of a lazy stack, the TensorDict that it stands for."""
    td: TensorDict = unwrap(entry)
    if not isinstance(td, Container._stack_class):
        return td
    try:
        made: TensorDict = unwrap(td._resident())
        return made
    except (TDStoreError, RuntimeError) as error:
        raise UnsupportedError(
            f"a lazy stack whose elements differ cannot be set through a window: {error}",
            hint="set it on the TensorDict that was indexed",
        ) from error


def rows_below(entry: Any, path: Path) -> Tensor:
    """Return a leaf of `entry` by its path in what `widened` makes of it."""
    node = dense(entry)
    for key in path[:-1]:
        node = dense(node._child(key))
    return leaf_below(node, path[-1:])


def is_of_value(widened: Any, path: Path) -> bool:
    """Return whether a leaf is one of those that hold a value, which has its rows in it already."""
    node = unwrap(widened)
    for key in path[:-1]:
        node = unwrap(node._child(key))
    return isinstance(node, NonTensor)


def put_rows(key: str, old: NonTensor, sel: Selection, value: NonTensor) -> NonTensor:
    """Return the values of all rows after those of a selection were written."""
    if isinstance(value, UnbatchedTensor) and not isinstance(old, UnbatchedTensor):
        raise UnsupportedError(
            f"the unbatched tensor {key!r} cannot be set through a window: it belongs to all rows",
            hint="set it on the TensorDict that was indexed",
        )
    size = old.batch_size
    sel.check_there(size)
    plan = sel.read_plan()
    places = torch.arange(size.numel(), device="cpu").reshape(size)
    if more := sel.src_shape[len(size) :]:
        places = places.reshape(*size, *(1,) * len(more)).expand(*size, *more)
    flat = old.move(lambda t: t.reshape(-1))
    return assign(flat, plan.finish(places[plan.index]), value).move(lambda t: t.reshape(size))


def can_hold_rows(kind: str, group: Any, entry: Any, *, exactly: bool = False) -> bool:
    """Return whether a group whose record says `kind` can hold the rows of `entry` beside its other rows.

    Args:
        exactly: with the keys that it has, no more and no fewer.
    """
    there, keys = set(group._first_keys()), set(entry._first_keys())
    if class_of(entry) is None and kind != kind_of(None):
        return keys <= there and (not exactly or keys == there)
    return kind_of(class_of(entry)) == kind and (not exactly or keys == there)


def entry_text(entry: Any) -> str:
    """Return what an entry is, for an error: one that is to be set, a leaf's spec, or another entry of a store."""
    if isinstance(entry, (NonTensor, Container)):
        return "a value" if isinstance(entry, NonTensor) else f"a {type(entry).__name__}"
    if isinstance(entry, (Tensor, LeafSpec)):
        nested = isinstance(entry, Tensor) and entry.is_nested
        return "a nested tensor" if nested else f"a tensor of shape {list(entry.shape)}"
    return {LEAF: "a nested tensor", GROUP: "a nested TensorDict"}.get(entry.kind, "a value")
