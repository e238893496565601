"""`torch.vmap` over TensorDicts: the mapped dimension is a batch dimension, inside it is gone.

vmap knows tensors in pytrees, and takes a dimension from each of them. A TensorDict goes through it in a
box of tensors, its leaves, which is opened on the other side.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch._functorch import apis
from torch.compiler import is_compiling
from torch.utils import _pytree as pytree

from tdstore.container.core import Container
from tdstore.container.nontensor import NonTensor, NonTensorData
from tdstore.container.unbatched import UnbatchedTensor, is_batched
from tdstore.errors import UnsupportedError
from tdstore.shapes import as_dim
from tdstore.tracing import mapping


class Box:
    """A TensorDict as tensors; `dim` is the batch dimension that is mapped over, None where there is none."""

    __slots__ = ("dim", "parts", "td")

    def __init__(self, td: Any, dim: int | None, parts: list[Tensor]) -> None:
        self.td, self.dim, self.parts = td, dim, parts


def _box(td: Any, dim: int | None, inward: bool) -> Box:
    if inward and dim is None:
        return Box(td, None, [])  # goes in as it is
    if isinstance(td, UnbatchedTensor):
        return Box(td, dim, [torch.empty(()).expand(td.batch_size)])
    if isinstance(td, Container._stored_class):
        raise UnsupportedError(
            "torch.vmap maps over tensors in memory, and these entries are stored",
            hint="call to_tensordict() first",
        )
    td = td._resident()._in_rows()
    leaves: list[Any] = []
    td._collect(leaves, plain=False)
    return Box(td, dim, list(filter(is_batched, leaves)) or [torch.empty(()).expand(td._batch_size)])


def _open(box: Box, inward: bool) -> Any:
    """The TensorDict of what came through: its batch has lost, or got, the dimension that was mapped."""
    td, dim = box.td, box.dim
    if not box.parts:
        return td
    batch = list(td.batch_size)
    if dim is not None and inward:
        del batch[dim]
    elif dim is not None:
        batch.insert(dim, box.parts[0].shape[dim])
    if isinstance(td, UnbatchedTensor):
        return td.for_batch(torch.Size(batch))
    return _rebuilt(td, torch.Size(batch), iter(box.parts), dim)


def _rebuilt(td: Any, new: torch.Size, leaves: Iterator[Tensor], dim: int | None) -> Any:
    old, names = td._batch_size, td._names
    if names is not None and dim is not None:
        names = (*names[:dim], *names[dim + 1 :]) if len(new) < len(old) else (*names[:dim], None, *names[dim:])
    data: dict[str, Any] = {}
    for key, value in td._data.items():
        if is_batched(value):
            data[key] = next(leaves)
        elif isinstance(value, NonTensor):
            data[key] = value if dim is None else _moved(key, value, new, dim)
        else:
            data[key] = _rebuilt(value, torch.Size((*new, *value._batch_size[len(old) :])), leaves, dim)
    return td._new(data, new, td._device, names if names and any(names) else None)


def _moved(key: str, value: NonTensor, new: torch.Size, dim: int) -> NonTensor:
    if isinstance(value, UnbatchedTensor):
        return value.for_batch(new)
    if isinstance(value, NonTensorData):
        return NonTensorData(value.data, new)
    if value.ndim < len(new):
        return value.move(lambda t: t.unsqueeze(dim).expand(new))
    rows = value.spread(lambda t: t.unbind(dim))
    if not all(row.same(rows[0]) for row in rows):
        raise UnsupportedError(
            f"torch.vmap cannot map over {key!r}, whose values differ from row to row",
            hint=f"exclude({key!r}) first",
        )
    return rows[0]


def _boxed(tree: Any, dims: Any, inward: bool) -> Any:
    """The tree with its TensorDicts in boxes, and the dimensions for it."""
    values, spec = pytree.tree_flatten(tree, is_leaf=_is_container)
    if not inward:
        values = [_with_rows(v) if isinstance(v, (Container, UnbatchedTensor)) else v for v in values]
    if not any(isinstance(v, (Container, UnbatchedTensor)) for v in values):
        return tree, dims
    spread = pytree._broadcast_to_and_flatten(dims, spec)
    if spread is None:
        raise ValueError(f"vmap: the dimensions {dims} do not have the structure of what they are for, {spec}")
    for i, value in enumerate(values):
        if isinstance(value, (Container, UnbatchedTensor)):
            dim = spread[i]
            if dim is not None:
                if not inward and dim < 0:
                    raise ValueError(f"vmap: out_dims={dim} of a TensorDict cannot be negative")
                spread[i] = dim = as_dim(dim, len(value.batch_size) + (not inward))
            values[i] = _box(value, dim, inward)
    return pytree.tree_unflatten(values, spec), pytree.tree_unflatten(spread, spec)


def _with_rows(value: Any) -> Any:
    """A result of the mapped function whose unbatched tensors, where they differ from row to row, are tensors."""
    if isinstance(value, UnbatchedTensor):
        return value.wrapped if _differs(value.wrapped) else value
    if not isinstance(value, Container._resident_class):
        return value
    data = {k: _with_rows(v) if isinstance(v, (Container, UnbatchedTensor)) else v for k, v in value._data.items()}
    if all(v is value._data[k] for k, v in data.items()):
        return value
    return value._new(data, value._batch_size, value._device, value._names)


def _differs(tensor: Tensor) -> bool:
    """Whether a tensor has a row for each that is mapped; torch.compile does not tell."""
    return not is_compiling() and torch._C._functorch.is_batchedtensor(tensor)


def _is_container(value: object) -> bool:
    return isinstance(value, Container)


def _is_box(value: object) -> bool:
    return isinstance(value, Box)


def _unboxed(tree: Any, inward: bool) -> Any:
    values, spec = pytree.tree_flatten(tree, is_leaf=_is_box)
    if not any(isinstance(v, Box) for v in values):
        return tree
    return pytree.tree_unflatten([_open(v, inward) if isinstance(v, Box) else v for v in values], spec)


def through_boxes(vmap: Callable[..., Any]) -> Callable[..., Any]:
    """The implementation of vmap, with TensorDicts in boxes on their way in and out."""

    def vmap_impl(
        func: Any, in_dims: Any, out_dims: Any, randomness: str, chunk_size: Any, *args: Any, **kwargs: Any
    ) -> Any:
        def run(*mapped: Any, **options: Any) -> Any:
            with mapping():
                return _boxed(func(*_unboxed(mapped, True), **options), out_dims, False)[0]

        if not is_compiling():
            run.__name__ = getattr(func, "__name__", repr(func))  # for the messages of vmap
        boxes, dims = _boxed(args, in_dims, True)
        return _unboxed(vmap(run, dims, out_dims, randomness, chunk_size, *boxes, **kwargs), False)

    return vmap_impl


def teach_vmap() -> None:
    """Let `torch.vmap` (and `torch.func.vmap`, the same) know TensorDicts; it has no hook to register with."""
    if Box not in pytree.SUPPORTED_NODES:
        pytree.register_pytree_node(
            Box, lambda box: (box.parts, (box.td, box.dim)), lambda parts, of: Box(of[0], of[1], list(parts))
        )
        module: Any = apis
        # A private name: a torch that has another refuses TensorDicts in vmap, and all else goes on working.
        if hasattr(module, "vmap_impl"):
            module.vmap_impl = through_boxes(module.vmap_impl)
