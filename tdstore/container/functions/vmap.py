"""`torch.vmap` over TensorDicts: the mapped dimension is a batch dimension, inside it is gone.

vmap knows tensors in pytrees, and takes a dimension from each of them. A TensorDict goes through it in a
box of tensors, its leaves, which is opened on the other side.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch._functorch import apis
from torch.compiler import is_compiling
from torch.utils import _pytree as pytree

from tdstore.container.core.container import Container
from tdstore.container.core.tensorclasses import Typed
from tdstore.container.entries.unbatched import UnbatchedTensor, is_batched
from tdstore.container.entries.uninitialized import MappedUneven, MappedUninitialized, StackedMixin, is_uninitialized
from tdstore.container.values.nontensor import NonTensor, NonTensorData
from tdstore.errors import InvalidArgumentError, UnevenError, UnsupportedError
from tdstore.index.shapes import as_dim
from tdstore.index.tracing import mapping
from tdstore.types import Path


@dataclass(frozen=True)
class Form:
    """Structure of a TensorDict that its leaves do not show: its lock, and where lazy stacks are in it."""

    locked: bool = False
    stacks: dict[Path, int] = field(default_factory=dict)
    """The stack dimension of each, by path."""
    uneven: bool = False
    """There are entries that cannot be stacked: inside, nothing is taken apart into elements again."""

    @classmethod
    def of(cls, td: Any) -> Form:
        """Return the form of a container."""
        return cls(td.is_locked, {} if isinstance(td, Typed) else dict(_stacks(td, ())))


def _stacks(td: Any, path: Path) -> Iterator[tuple[Path, int]]:
    if isinstance(td, Container._stack_class):
        yield path, td._stack_dim
    elif isinstance(td, Container._resident_class):
        for key, value in td._data.items():
            if isinstance(value, Container) and not isinstance(value, Typed):
                yield from _stacks(value, (*path, key))


_PLAIN = Form()


class MappedValues(list[Any]):
    """The values of all rows, which the mapped function sees in place of its own; the result has them by row again.

    Args:
        rows: the values before mapping.
        dim: the dimension that was mapped.
        level: the level of vmap that the function runs in.
    """

    def __init__(self, rows: NonTensor, dim: int, level: int | None) -> None:
        super().__init__(rows.tolist())
        self.rows, self.dim, self.level = rows, dim, level

    def __deepcopy__(self, memo: dict[int, Any]) -> MappedValues:
        return MappedValues(self.rows, self.dim, self.level)

    def restore(self, key: str, shape: torch.Size, dim: int) -> NonTensor:
        """Return the values by row, with the mapped dimension at `dim`."""
        rows: NonTensor = self.rows.move(lambda t: t.movedim(self.dim, dim))
        if rows.batch_size != shape:
            raise UnsupportedError(
                f"the values of {key!r} differ from row to row and had the shape {list(self.rows.batch_size)} "
                f"before torch.vmap, the result has {list(shape)}",
                hint=f"change the shape outside of the mapped function, or exclude({key!r}) first",
            )
        return rows


class Box:
    """A TensorDict as tensors; `dim` is the batch dimension that is mapped over, None where there is none."""

    __slots__ = ("dim", "form", "parts", "td")

    def __init__(self, td: Any, dim: int | None, parts: list[Tensor], form: Form | None = None) -> None:
        # no default that is an object: torch 2.11 cannot trace it
        self.td, self.dim, self.parts, self.form = td, dim, parts, _PLAIN if form is None else form

    def hides_its_stack(self) -> bool:
        """Check whether the mapped dimension is that of a lazy stack."""
        return bool(self.form.stacks) and self.form.stacks.get(()) == self.dim


def _box(td: Any, dim: int | None, inward: bool) -> Box:
    if inward and dim is None:
        return Box(td, None, [])  # goes in as it is
    if isinstance(td, UnbatchedTensor):
        return Box(td, dim, [torch.empty((), device="cpu").expand(td.batch_size)])
    if isinstance(td, Container._stored_class):
        raise UnsupportedError(
            "torch.vmap maps over tensors in memory, and these entries are stored",
            hint="call to_tensordict() first",
        )
    form = Form.of(td)
    if isinstance(td, Container._stack_class):
        td, uneven = _dense(td)
        if uneven:
            form = replace(form, uneven=True)
    td = td._resident()._in_rows()
    leaves: list[Any] = []
    td._collect(leaves, plain=False)
    parts = [leaf for leaf in leaves if is_batched(leaf) and not is_uninitialized(leaf)]
    return Box(td, dim, parts or [torch.empty((), device="cpu").expand(td._batch_size)], form)


def _dense(stack: Any) -> tuple[Any, bool]:
    """Stack the elements. Entries that cannot be stacked are errors when they are used; say whether there are any."""
    try:
        return stack._resident(), False
    except UnevenError:
        if -1 in stack.batch_size:
            raise
    uneven = {}
    for key in stack.keys(True, True):
        try:
            stack.get(key)
        except UnevenError as error:
            uneven[key] = error.args[0]
    made = stack.exclude(*uneven)._resident()
    for key, message in uneven.items():
        *above, last = (key,) if isinstance(key, str) else key
        node = made
        for name in above:
            node = node._data[name]
        node._data[last] = MappedUneven(message)
    return made, True


def _open(box: Box, inward: bool, restacked: bool) -> Any:
    """Rebuild the TensorDict after mapping: its batch lost, or gained, the mapped dimension.

    Args:
        restacked: a lazy stack that comes out is stacked along the dimension that was mapped, and so is what comes out
            without a batch dimension of its own.
    """
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
    made = _rebuilt(td, torch.Size(batch), iter(box.parts), dim)
    for path, old in ({} if box.form.uneven else box.form.stacks).items():
        made = _stacked_at(made, path, _stack_dim(old, dim, inward, restacked and not path))
    if restacked and dim is not None and () not in box.form.stacks and len(batch) == 1 and _is_resident(made):
        made = made.to_lazystack(0)
    return made.lock_() if box.form.locked else made


def _is_resident(value: object) -> bool:
    return isinstance(value, Container._resident_class) and not isinstance(value, Typed)


def _stack_dim(old: int, dim: int | None, inward: bool, restacked: bool) -> int:
    """Return the new place of a stack dimension; the first dimension stands for a mapped one."""
    if dim is None:
        return old
    if inward:
        return 0 if old == dim else old - (old > dim)
    return dim if restacked else old + (dim <= old)


def _stacked_at(td: Any, path: Path, dim: int) -> Any:
    """Return a copy with the entry at a path as a lazy stack; without a batch dimension there is nothing to stack."""
    if not path:
        return td.to_lazystack(dim) if td.batch_dims else td
    td._data[path[0]] = _stacked_at(td._data[path[0]], path[1:], dim)
    return td


def _rebuilt(td: Any, new: torch.Size, leaves: Iterator[Tensor], dim: int | None) -> Any:
    old, names = td._batch_size, td._names
    if names is not None and dim is not None:
        names = (*names[:dim], *names[dim + 1 :]) if len(new) < len(old) else (*names[:dim], None, *names[dim:])
    data: dict[str, Any] = {}
    for key, value in td._data.items():
        if is_uninitialized(value):
            data[key] = _mapped_later(key, value, len(new) < len(old))
        elif is_batched(value):
            data[key] = next(leaves)
        elif isinstance(value, NonTensor):
            data[key] = value if dim is None else _moved(key, value, new, dim, len(new) < len(old))
        else:
            data[key] = _rebuilt(value, torch.Size((*new, *value._batch_size[len(old) :])), leaves, dim)
    return td._new(data, new, td._device, names if names and any(names) else None)


def _awaits_shape(value: object) -> bool:
    return isinstance(value, Box) and any(map(is_uninitialized, value.td._leaf_list()))


def _mapped_later(key: str, value: Any, inward: bool) -> Any:
    """Return a stacked parameter that gets its shape within vmap, or what cannot be stacked and is not used."""
    if isinstance(value, MappedUneven):
        if inward:
            return value
        raise value.refused()
    level = torch._C._functorch.maybe_current_level()
    if level is None or not inward or not isinstance(value, StackedMixin):
        raise UnsupportedError(
            f"torch.vmap cannot map over the uninitialized parameter {key!r}",
            hint="map over the first dimension of what from_modules returned, and call the module in the function",
        )
    return MappedUninitialized(value, level)


def _moved(key: str, value: NonTensor, new: torch.Size, dim: int, inward: bool) -> NonTensor:
    if isinstance(value, UnbatchedTensor):
        return value.for_batch(new)
    level = torch._C._functorch.maybe_current_level()
    if isinstance(value, NonTensorData):
        mapped = value.data
        if not inward and isinstance(mapped, MappedValues) and mapped.level == (level or 0) + 1:
            return mapped.restore(key, new, dim)
        return NonTensorData(mapped, new)
    if not inward and (mapped := _same_values(value)) is not None and mapped.level == (level or 0) + 1:
        return mapped.restore(key, new, dim)
    if value.ndim < len(new):
        return value.move(lambda t: t.unsqueeze(dim).expand(new))
    rows = value.spread(lambda t: t.unbind(dim))
    if all(row.same(rows[0]) for row in rows):
        return rows[0]
    return NonTensorData(MappedValues(value, dim, level), new)


def _same_values(stack: NonTensor) -> MappedValues | None:
    """Return the mapped values that each position has: those of the elements of a lazy stack."""
    values = stack.flat()
    first = values[0] if values else None
    return first if isinstance(first, MappedValues) and all(value is first for value in values) else None


def _boxed(tree: Any, dims: Any, inward: bool) -> Any:
    """Return the tree with its TensorDicts in boxes, and the dimensions for it."""
    values, spec = pytree.tree_flatten(tree, is_leaf=_is_container)
    if not inward:
        for value in values:
            if isinstance(value, MappedUneven):
                raise value.refused()
        values = [_with_rows(v) if isinstance(v, (Container, UnbatchedTensor)) else v for v in values]
    if not any(isinstance(v, (Container, UnbatchedTensor)) for v in values):
        return tree, dims
    spread = pytree._broadcast_to_and_flatten(dims, spec)
    if spread is None:
        raise InvalidArgumentError(
            f"vmap: the dimensions {dims} do not have the structure of what they are for, {spec}"
        )
    for i, value in enumerate(values):
        if isinstance(value, (Container, UnbatchedTensor)):
            dim = spread[i]
            if dim is not None:
                if not inward and dim < 0:
                    raise InvalidArgumentError(f"vmap: out_dims={dim} of a TensorDict cannot be negative")
                if inward and isinstance(value, Container) and _is_batchless(value):
                    values[i] = box = _box(value, dim, inward)
                    box.dim = None  # of the leaves, which is none of the batch
                    continue
                spread[i] = dim = as_dim(dim, len(value.batch_size) + (not inward))
            values[i] = _box(value, dim, inward)
    return pytree.tree_unflatten(values, spec), pytree.tree_unflatten(spread, spec)


def _is_batchless(td: Any) -> bool:
    """Check whether a TensorDict has tensors and no batch dimensions at any level: its leaves are mapped over."""
    if td.batch_dims:
        return False
    nested = [td, *(v for _, v in td.items(True) if isinstance(v, Container))]
    return not any(node.batch_dims for node in nested) and any(True for _ in td.keys(True, True))


def _with_rows(value: Any) -> Any:
    """Return a result of the mapped function; unbatched tensors that differ from row to row become plain tensors."""
    if isinstance(value, UnbatchedTensor):
        return value.wrapped if _differs(value.wrapped) else value
    if not isinstance(value, Container._resident_class):
        return value
    data = {k: _with_rows(v) if isinstance(v, (Container, UnbatchedTensor)) else v for k, v in value._data.items()}
    if all(v is value._data[k] for k, v in data.items()):
        return value
    return value._new(data, value._batch_size, value._device, value._names)


def _differs(tensor: Tensor) -> bool:
    """Check whether a tensor has a row for each mapped position; torch.compile cannot tell."""
    return not is_compiling() and torch._C._functorch.is_batchedtensor(tensor)


def _is_container(value: object) -> bool:
    return isinstance(value, Container)


def _is_box(value: object) -> bool:
    return isinstance(value, Box)


def _unboxed(tree: Any, inward: bool, restacked: bool = False) -> Any:
    values, spec = pytree.tree_flatten(tree, is_leaf=_is_box)
    if not any(isinstance(v, Box) for v in values):
        return tree
    return pytree.tree_unflatten([_open(v, inward, restacked) if isinstance(v, Box) else v for v in values], spec)


def through_boxes(vmap: Callable[..., Any]) -> Callable[..., Any]:
    """Return the implementation of vmap, with TensorDicts in boxes on their way in and out."""

    def vmap_impl(
        func: Any, in_dims: Any, out_dims: Any, randomness: str, chunk_size: Any, *args: Any, **kwargs: Any
    ) -> Any:
        alone = False  # one TensorDict, for which torch takes `out_dims=(0,)` as it does for one tensor

        def run(*mapped: Any, **options: Any) -> Any:
            nonlocal alone
            with mapping():
                made = func(*_unboxed(mapped, True), **options)
                alone = isinstance(out_dims, tuple) and isinstance(made, (Container, UnbatchedTensor))
                return _boxed((made,) if alone else made, out_dims, False)[0]

        if not is_compiling():
            run.__name__ = getattr(func, "__name__", repr(func))  # for the messages of vmap
        boxes, dims = _boxed(args, in_dims, True)
        if chunk_size is not None and any(map(_awaits_shape, pytree.tree_leaves(boxes, _is_box))):
            raise UnsupportedError(
                "torch.vmap with chunk_size cannot initialize the parameters of lazy modules",
                hint="make the first call without chunk_size",
            )
        made = vmap(run, dims, out_dims, randomness, chunk_size, *boxes, **kwargs)
        restacked = any(isinstance(box, Box) and box.hides_its_stack() for box in pytree.tree_leaves(boxes, _is_box))
        return _unboxed(made[0] if alone else made, False, restacked)

    return vmap_impl


def teach_vmap() -> None:
    """Let `torch.vmap` (and `torch.func.vmap`, the same) know TensorDicts; it has no hook to register with."""
    if Box not in pytree.SUPPORTED_NODES:
        pytree.register_pytree_node(
            Box,
            lambda box: (box.parts, (box.td, box.dim, box.form)),
            lambda parts, of: Box(of[0], of[1], list(parts), of[2]),
        )
        module: Any = apis
        # A private name: a torch that has another refuses TensorDicts in vmap, and all else goes on working.
        if hasattr(module, "vmap_impl"):
            module.vmap_impl = through_boxes(module.vmap_impl)
