"""Shape operations of non-tensor entries, each applied to a tensor of positions of the batch's shape."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tdstore.index.shapes import as_dim
from tdstore.pickling import by_name

if TYPE_CHECKING:
    from tdstore.container.values.nontensor import NonTensor


class ValueShapes:
    """view, expand, permute, unbind, ... over two primitives."""

    __slots__ = ()
    batch_size: torch.Size

    @property
    def shape(self) -> torch.Size:
        """Alias of `batch_size`."""
        return self.batch_size

    @property
    def ndim(self) -> int:
        """Number of batch dimensions."""
        return len(self.batch_size)

    batch_dims = ndim

    def dim(self) -> int:
        """Return the number of batch dimensions."""
        return len(self.batch_size)

    def numel(self) -> int:
        """Return the number of batch positions."""
        return self.batch_size.numel()

    def own_lists(self: Any) -> NonTensor:
        """Return the entry with its own dicts and lists, around the same values."""
        made: NonTensor = self
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        return by_name(super().__reduce_ex__(protocol))

    def move(self, fn: Callable[[Tensor], Tensor]) -> NonTensor:
        """Apply a shape operation, given as a function on a tensor of the batch's shape."""
        raise NotImplementedError

    def spread(self, fn: Callable[[Tensor], Sequence[Tensor]]) -> list[NonTensor]:
        """Apply `move` for an operation with several results (unbind, split)."""
        raise NotImplementedError

    def __len__(self) -> int:
        return self.batch_size[0] if self.batch_size else 0

    def __iter__(self) -> Iterator[Any]:
        return iter(self.unbind(0))

    def unbind(self, dim: int = 0) -> tuple[Any, ...]:
        """Return the entries along a dimension."""
        return tuple(self.spread(lambda t: t.unbind(dim)))

    def split(self, split_size: int | list[int], dim: int = 0) -> tuple[Any, ...]:
        """Split along a dimension."""
        return tuple(self.spread(lambda t: t.split(split_size, dim)))

    def expand(self, *shape: Any) -> NonTensor:
        """Expand the values to a larger batch."""
        return self.move(lambda t: t.expand(*shape))

    def view(self, *shape: Any, size: Any = None) -> NonTensor:
        """Return another shape of the same number of positions."""
        return self.move(lambda t: t.view(*shape) if size is None else t.view(size))

    def reshape(self, *args: Any, shape: Any = None) -> NonTensor:
        """Return another shape of the same number of positions."""
        return self.move(lambda t: t.reshape(*args) if shape is None else t.reshape(shape))

    def flatten(self, start_dim: int | None = None, end_dim: int | None = None) -> NonTensor:
        """Flatten several dimensions into one; all of them by default."""
        first, last = 0 if start_dim is None else start_dim, -1 if end_dim is None else end_dim
        return self.move(lambda t: t.flatten(first, last))

    def unsqueeze(self, dim: int) -> NonTensor:
        """Insert a dimension of length one."""
        at = as_dim(dim, len(self.batch_size) + 1)
        return self.move(lambda t: t.unsqueeze(at))

    def squeeze(self, dim: int | None = None) -> NonTensor:
        """Remove dimensions of length one."""
        return self.move(lambda t: t.squeeze() if dim is None else t.squeeze(dim))

    def permute(self, *args: Any, dims: Any = None) -> NonTensor:
        """Reorder the dimensions."""
        return self.move(lambda t: t.permute(*args) if dims is None else t.permute(dims))

    def transpose(self, dim0: int, dim1: int) -> NonTensor:
        """Swap two dimensions."""
        one, two = as_dim(dim0, len(self.batch_size)), as_dim(dim1, len(self.batch_size))
        return self.move(lambda t: t.transpose(one, two))

    def way_back(self, index: Any) -> Callable[[], None] | None:
        """Return the function that updates stored rows from their present values; None for a value in memory."""
        return None


def constant(value: NonTensor, at: tuple[Any, ...]) -> NonTensor | None:
    """Return the values at an index if those along each dimension that it takes one of are all the same."""
    if not value.numel() or value.ndim < len(at):
        return None
    one = value[at]
    wide = one.move(lambda t: t[tuple(None if i == 0 else slice(None) for i in at)].expand(value.batch_size))
    return one if value.same(wide) else None
