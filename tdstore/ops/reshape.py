"""Shape operations on the batch dimensions; feature dimensions never move."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Self

import torch
from torch import Tensor

from tdstore.errors import InvalidArgumentError
from tdstore.index.shapes import as_dim, as_size, chunk_size, expand_shape, flat_args, split_sizes, view_shape
from tdstore.ops import nested
from tdstore.ops.base import OpsBase, check_container
from tdstore.types import Names, SizeLike


def _without(names: Names, dims: Sequence[int]) -> Names:
    return None if names is None else tuple(n for i, n in enumerate(names) if i not in dims)


class ReshapeOps(OpsBase):
    """view, reshape, permute, squeeze, split, ... over two primitives."""

    __slots__ = ()

    def view(
        self, *shape: SizeLike | torch.dtype, size: SizeLike | None = None, batch_size: SizeLike | None = None
    ) -> Self:
        """View the batch as `shape`, sharing memory: leaves `[*B, ...]` become `[*shape, ...]`.

        `view(dtype)` reads the bytes of every leaf as another dtype, as `Tensor.view` does: the last dimension of a
        leaf, which must not be a batch dimension, grows or shrinks with the size of an element. `batch_size` is then
        that of the result.

        Args:
            *shape: the new batch size, as numbers or as one sequence; one -1 is computed from the others. Or a dtype.
            size: the new batch size, by this name.
            batch_size: the new batch size, by this name.

        Raises:
            BatchSizeError: another number of elements.
            RuntimeError: the strides of a leaf do not allow a view.

        Example:
            >>> td = TensorDict({"a": torch.zeros(2, 3, 5)}, [2, 3])
            >>> td.view(3, 2)["a"].shape
            torch.Size([3, 2, 5])
        """
        if shape and isinstance(shape[0], torch.dtype):
            return self._bytes_as(shape[0], batch_size)
        old = self.batch_size
        wanted = size if size is not None else batch_size if batch_size is not None else flat_args(shape)
        new = view_shape(old, as_size(wanted))
        if new == old:
            return self._return_unchanged()
        n = len(old)

        def viewed(t: Tensor) -> Tensor:
            if flat and t.is_contiguous():
                return t.flatten(0, n - 1)  # the shape of the features need not be looked at
            return t.view(*new, *t.shape[n:]) if new else t.view(t.shape[n:])

        flat = n > 0 and len(new) == 1
        return self._move(
            viewed,
            new,
            None,
            lambda v: v.reshape(old),
            views=True,
        )

    def reshape(
        self, *args: SizeLike, shape: SizeLike | None = None, size: SizeLike | None = None, inplace: bool = False
    ) -> Self:
        """Reshape as `view`, copying leaves where a view is impossible: leaves `[*B, ...]` become `[*shape, ...]`.

        Args:
            *args: the new batch size, as numbers or as one sequence; one -1 is computed from the others.
            shape: the new batch size, by this name.
            size: the new batch size, by this name.
            inplace: let this TensorDict take over the result's entries and batch size: see `flatten`.

        Raises:
            BatchSizeError: another number of elements.
            LockedError: `inplace`, and this TensorDict is locked.

        Example:
            >>> td = TensorDict({"a": torch.zeros(2, 3, 5)}, [2, 3])
            >>> td.reshape(-1)["a"].shape
            torch.Size([6, 5])
        """
        old = self.batch_size
        new = view_shape(old, as_size(shape if shape is not None else size if size is not None else flat_args(args)))
        if new == old:
            return self if inplace else self._return_unchanged()
        n = len(old)

        def reshaped(t: Tensor) -> Tensor:
            if flat:
                return t.flatten(0, n - 1)  # the shape of the features need not be looked at
            return t.reshape(*new, *t.shape[n:]) if new else t.reshape(t.shape[n:])

        flat = n > 0 and len(new) == 1
        result = self._move(reshaped, new, None, lambda v: v.reshape(old))
        return self._apply_inplace_result(result, "reshape", inplace)

    def permute(self, *args: SizeLike, dims: Sequence[int] | None = None) -> Self:
        """Reorder the batch dimensions, sharing memory; feature dimensions stay where they are.

        Args:
            *args: all batch dimensions in their new order, as numbers or as one sequence.
            dims: the same, by this name.

        Raises:
            DimensionError: a dimension is out of range.
            InvalidArgumentError: a dimension is missing or repeated.

        Example:
            >>> td = TensorDict({"a": torch.zeros(2, 3, 5)}, [2, 3])
            >>> td.permute(1, 0)["a"].shape
            torch.Size([3, 2, 5])
        """
        n = len(self.batch_size)
        wanted = flat_args(args if dims is None else (dims,))
        order = [as_dim(d, n) for d in wanted]
        if sorted(order) != list(range(n)):
            raise InvalidArgumentError(f"permute needs each of the {n} batch dimensions once, not {wanted}")
        if order == list(range(n)):
            return self._return_unchanged()
        return self._permuted(order)

    def _permuted(self, order: list[int]) -> Self:
        names, n = self._dim_names(), len(order)
        new = torch.Size(self.batch_size[d] for d in order)
        back = sorted(range(n), key=order.__getitem__)
        return self._move(
            lambda t: t.permute(*order, *range(n, t.ndim)),
            new,
            names and tuple(names[d] for d in order),
            lambda v: v.permute(*back),
            views=True,
        )

    def transpose(self, dim0: int, dim1: int) -> Self:
        """Swap two batch dimensions, sharing memory.

        Args:
            dim0: a batch dimension.
            dim1: the other one.

        Raises:
            DimensionError: a dimension is out of range.

        Example:
            >>> TensorDict({"a": torch.zeros(2, 3, 5)}, [2, 3]).transpose(0, 1)["a"].shape
            torch.Size([3, 2, 5])
        """
        n = len(self.batch_size)
        a, b = as_dim(dim0, n), as_dim(dim1, n)
        if a == b:
            return self._return_unchanged()
        order = list(range(n))
        order[a], order[b] = b, a
        return self.permute(*order)

    def squeeze(self, dim: int | None = None) -> Self:
        """Drop a batch dimension of size 1, or all of them, sharing memory.

        Args:
            dim: the batch dimension. One of another size is not dropped. Default: all of size 1.

        Raises:
            DimensionError: `dim` is out of range.

        Example:
            >>> td = TensorDict({"a": torch.zeros(1, 3, 1, 5)}, [1, 3, 1])
            >>> td.squeeze()["a"].shape, td.squeeze(0)["a"].shape
            (torch.Size([3, 5]), torch.Size([3, 1, 5]))
        """
        old = self.batch_size
        gone = [i for i, n in enumerate(old) if n == 1]
        if dim is not None:
            at = as_dim(dim, len(old))
            gone = [at] if at in gone else []
        if not gone:
            return self._return_unchanged()
        new = torch.Size(n for i, n in enumerate(old) if i not in gone)
        return self._move(
            lambda t: t.squeeze(tuple(gone)),
            new,
            _without(self._dim_names(), gone),
            lambda v: v.reshape(old),
            views=True,
        )

    def unsqueeze(self, dim: int) -> Self:
        """Insert a batch dimension of size 1, sharing memory.

        Args:
            dim: its position in the result, from `-len(B) - 1` to `len(B)` for a batch size `[*B]`: features stay after
                it.

        Raises:
            DimensionError: `dim` is out of range.

        Example:
            >>> TensorDict({"a": torch.zeros(3, 5)}, [3]).unsqueeze(-1)["a"].shape
            torch.Size([3, 1, 5])
        """
        old = self.batch_size
        at = as_dim(dim, len(old) + 1)
        names = self._dim_names()
        new = torch.Size((*old[:at], 1, *old[at:]))
        return self._move(
            lambda t: t.unsqueeze(at),
            new,
            names and (*names[:at], None, *names[at:]),
            lambda v: v.reshape(old),
            views=True,
        )

    def expand(self, *shape: SizeLike) -> Self:
        """Expand batch dimensions of size 1, and add leading ones, without copying.

        The rows of the result share memory: writing to one in place writes to all.

        Args:
            *shape: the new batch size, as numbers or as one sequence; -1 leaves a dimension as it is.

        Raises:
            BatchSizeError: the batch size cannot be expanded so.

        Example:
            >>> TensorDict({"a": torch.zeros(3, 5)}, [3]).expand(2, 3)["a"].shape
            torch.Size([2, 3, 5])
        """
        old = self.batch_size
        new = expand_shape(old, as_size(flat_args(shape)))
        n, names = len(old), self._dim_names()
        return self._move(lambda t: t.expand((*new, *t.shape[n:])), new, names and ((None,) * (len(new) - n) + names))

    def expand_as(self, other: Tensor | OpsBase) -> Self:
        """Expand each leaf to the shape of the leaf of the same key, and the batch to the batch size of `other`.

        Args:
            other: a TensorDict that has the leaves of this one; or a tensor, to whose shape the batch is expanded.

        Raises:
            KeyNotFoundError: `other` lacks a leaf.
            BatchSizeError: a leaf or the batch cannot be expanded like this.

        Example:
            >>> td = TensorDict({"a": torch.ones(3, 1)}, [3])
            >>> td.expand_as(TensorDict({"a": torch.zeros(2, 3, 5)}, [2, 3]))["a"].shape
            torch.Size([2, 3, 5])
        """
        if isinstance(other, Tensor):
            return self.expand(other.shape)
        check_container(other, "what expand_as() takes")
        return self._expanded_as(other, len(other.batch_size) - len(self.batch_size))

    def flatten(self, start_dim: int | None = None, end_dim: int | None = None, *, inplace: bool = False) -> Self:
        """Merge batch dimensions into one, sharing memory where strides allow it. A batch size `[]` becomes `[1]`.

        Args:
            start_dim: the first dimension to merge. Default: 0.
            end_dim: the last one, included. Default: the last batch dimension.
            inplace: let this TensorDict take over the result's leaves, and return it. Its keys and nested TensorDicts
                stay the same objects. (The same holds for other methods with `inplace`.)

        Raises:
            DimensionError: a dimension is out of range.
            InvalidArgumentError: `end_dim` comes before `start_dim`.
            LockedError: `inplace`, and this TensorDict is locked.

        Example:
            >>> TensorDict({"a": torch.zeros(2, 3, 5)}, [2, 3]).flatten()["a"].shape
            torch.Size([6, 5])
        """
        return self._apply_inplace_result(self._flattened(start_dim, end_dim), "flatten", inplace)

    def _flattened(self, start_dim: int | None, end_dim: int | None) -> Self:
        old = self.batch_size
        if not old:
            as_dim(start_dim or 0, 1)
            as_dim(end_dim or 0, 1)
            return self.unsqueeze(0)
        start = as_dim(0 if start_dim is None else start_dim, len(old))
        end = as_dim(len(old) - 1 if end_dim is None else end_dim, len(old))
        if end < start:
            raise InvalidArgumentError(f"flatten from dimension {start} to {end}: the end comes first")
        names = self._dim_names()
        new = torch.Size((*old[:start], math.prod(old[start : end + 1]), *old[end + 1 :]))
        return self._move(
            lambda t: t.flatten(start, end),
            new,
            names and (*names[:start], names[start] if start == end else None, *names[end + 1 :]),
            lambda v: v.reshape(old),
        )

    def unflatten(self, dim: int, unflattened_size: Sequence[int], *, inplace: bool = False) -> Self:
        """Split a batch dimension into several, sharing memory.

        Args:
            dim: the batch dimension.
            unflattened_size: the sizes that replace it; one -1 is computed from the others.
            inplace: let this TensorDict take over the result's leaves, and return it.

        Raises:
            DimensionError: `dim` is out of range.
            BatchSizeError: the sizes do not multiply to the size of `dim`.
            LockedError: `inplace`, and this TensorDict is locked.

        Example:
            >>> TensorDict({"a": torch.zeros(6, 5)}, [6]).unflatten(0, (2, -1))["a"].shape
            torch.Size([2, 3, 5])
        """
        old = self.batch_size
        at = as_dim(dim, len(old))
        sizes = view_shape(old[at : at + 1], as_size(unflattened_size))
        names = self._dim_names()
        new = torch.Size((*old[:at], *sizes, *old[at + 1 :]))
        result = self._move(
            lambda t: torch.unflatten(t, at, sizes),
            new,
            names and (*names[:at], *(None,) * len(sizes), *names[at + 1 :]),
            lambda v: v.reshape(old),
        )
        return self._apply_inplace_result(result, "unflatten", inplace)

    def unbind(self, dim: int = 0) -> tuple[Self, ...]:
        """Return a tuple with one TensorDict per index of a batch dimension, sharing memory.

        Args:
            dim: the batch dimension, which the results do not have.

        Raises:
            DimensionError: `dim` is out of range.

        Example:
            >>> first, second = TensorDict({"a": torch.tensor([1, 2])}, [2]).unbind()
            >>> second["a"]
            tensor(2)
        """
        old = self.batch_size
        at = as_dim(dim, len(old))
        new = torch.Size((*old[:at], *old[at + 1 :])) if at else old[1:]
        # Called as methods, which mapped tensors have of their own; without a dimension it takes less time.
        rows: Callable[[Tensor], Sequence[Tensor]] = (lambda t: t.unbind(at)) if at else (lambda t: t.unbind())
        return self._fan_out(rows, [new] * old[at], _without(self._dim_names(), [at]))

    def split(self, split_size: int | Sequence[int], dim: int = 0) -> tuple[Self, ...]:
        """Split a batch dimension into pieces, sharing memory.

        Args:
            split_size: the length of each piece (the last may be shorter), or a list of lengths that add up to the size
                of `dim`.
            dim: the batch dimension.

        Returns:
            A tuple of TensorDicts, locked if this one is.

        Raises:
            DimensionError: `dim` is out of range.
            InvalidArgumentError: `split_size` is not positive.
            BatchSizeError: the lengths do not add up to the size of `dim`.

        Example:
            >>> [len(piece) for piece in TensorDict({"a": torch.zeros(10)}, [10]).split(4)]
            [4, 4, 2]
        """
        old = self.batch_size
        at = as_dim(dim, len(old))
        sizes = split_sizes(old[at], split_size)
        first = torch.Size((*old[:at], *sizes[:1], *old[at + 1 :]))
        batches = [first if n == sizes[0] else torch.Size((*old[:at], n, *old[at + 1 :])) for n in sizes]

        def cut(leaf: Tensor) -> Sequence[Tensor]:
            if leaf.is_nested:
                return nested.split(leaf, sizes, at)
            # Mapped tensors have a method of their own; the one of torch is Python.
            return leaf.split_with_sizes(sizes, at) if type(leaf) is Tensor else leaf.split(sizes, at)

        return self._fan_out(cut, batches, self._dim_names(), keep_lock=True)

    def chunk(self, chunks: int, dim: int = 0) -> tuple[Self, ...]:
        """Split a batch dimension into at most `chunks` equal pieces (the last may be shorter), sharing memory.

        Args:
            chunks: the largest number of pieces.
            dim: the batch dimension.

        Raises:
            DimensionError: `dim` is out of range.
            InvalidArgumentError: `chunks` is not positive.

        Example:
            >>> [len(piece) for piece in TensorDict({"a": torch.zeros(10)}, [10]).chunk(3)]
            [4, 4, 2]
        """
        at = as_dim(dim, len(self.batch_size))
        return self.split(chunk_size(self.batch_size[at], chunks), at)
