"""The largest and the smallest element, and their indices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Generic, Literal, NamedTuple, Self, TypeVar, overload

import torch
from torch import Tensor

from tdstore.ops import block_reductions as how
from tdstore.ops.block_reductions import Reduction
from tdstore.ops.reduce import FEATURE, ReduceOps
from tdstore.types import DimLike, DimsLike

if TYPE_CHECKING:
    T = TypeVar("T")
    On = Literal[True]
    Off = Literal[False] | None

    class Pair(NamedTuple, Generic[T]):
        """The result of `torch.max` and the like over one dimension: `torch.return_types.max`, of TensorDicts."""

        values: T
        indices: T


class ExtremeOps(ReduceOps):
    """max, min, cummax, cummin."""

    __slots__ = ()

    @overload
    def max(
        self, dim: DimsLike | None = None, keepdim: bool = False, *, reduce: On, return_indices: bool = True
    ) -> Tensor: ...
    @overload
    def max(
        self, dim: None = None, keepdim: bool = False, *, reduce: Off = None, return_indices: bool = True
    ) -> Self: ...
    @overload
    def max(
        self, dim: DimsLike, keepdim: bool = False, *, reduce: Off = None, return_indices: Literal[False]
    ) -> Self: ...
    @overload
    def max(self, dim: int, keepdim: bool = False, *, reduce: Off = None, return_indices: On = True) -> Pair[Self]: ...
    @overload
    def max(
        self, dim: DimsLike, keepdim: bool = False, *, reduce: Off = None, return_indices: bool = True
    ) -> Self | Pair[Self]: ...
    def max(
        self,
        dim: DimsLike | None = None,
        keepdim: bool = False,
        *,
        reduce: bool | None = None,
        return_indices: bool = True,
    ) -> Any:
        """Return the largest element, as [`torch.max`][]: with its index when one batch dimension is reduced.

        Args:
            dim: what to reduce: None for everything, batch dimensions by number or name, or `"feature"`.
            keepdim: whether reduced batch dimensions stay, with length 1.
            reduce: True returns one tensor over all leaves.
            return_indices: False returns the values alone.

        Returns:
            Over one batch dimension `(values, indices)`: two TensorDicts, with indices of dtype int64, as in torch.
            Otherwise the values: over everything, over several dimensions, over features, or without `return_indices`.

        Raises:
            DimensionError: `dim` is not a batch dimension.
            InvalidTypeError: `keepdim` without batch dimensions to reduce.

        Example:
            >>> td = TensorDict({"a": torch.tensor([[1, 5], [7, 2]])}, [2])
            >>> td.max(dim=0).indices["a"]
            tensor([1, 0])
            >>> td.max(reduce=True)
            tensor(7)
        """
        return self._extreme(torch.max, how.AMAX, dim, keepdim, reduce, return_indices)

    @overload
    def min(
        self, dim: DimsLike | None = None, keepdim: bool = False, *, reduce: On, return_indices: bool = True
    ) -> Tensor: ...
    @overload
    def min(
        self, dim: None = None, keepdim: bool = False, *, reduce: Off = None, return_indices: bool = True
    ) -> Self: ...
    @overload
    def min(
        self, dim: DimsLike, keepdim: bool = False, *, reduce: Off = None, return_indices: Literal[False]
    ) -> Self: ...
    @overload
    def min(self, dim: int, keepdim: bool = False, *, reduce: Off = None, return_indices: On = True) -> Pair[Self]: ...
    @overload
    def min(
        self, dim: DimsLike, keepdim: bool = False, *, reduce: Off = None, return_indices: bool = True
    ) -> Self | Pair[Self]: ...
    def min(
        self,
        dim: DimsLike | None = None,
        keepdim: bool = False,
        *,
        reduce: bool | None = None,
        return_indices: bool = True,
    ) -> Any:
        """Return the smallest element, as [`torch.min`][]; arguments and results as `max`."""
        return self._extreme(torch.min, how.AMIN, dim, keepdim, reduce, return_indices)

    @overload
    def cummax(self, dim: DimLike, *, reduce: Off = None, return_indices: On = True) -> Pair[Self]: ...
    @overload
    def cummax(self, dim: DimLike, *, reduce: Off = None, return_indices: Literal[False]) -> Self: ...
    @overload
    def cummax(self, dim: DimLike, *, reduce: On, return_indices: On = True) -> Pair[Tensor]: ...
    @overload
    def cummax(self, dim: DimLike, *, reduce: On, return_indices: Literal[False]) -> Tensor: ...
    def cummax(self, dim: DimLike, *, reduce: bool | None = None, return_indices: bool = True) -> Any:
        """Return the largest element so far along a batch dimension, as [`torch.cummax`][]: `(values, indices)`.

        With `reduce=True`, it returns two tensors, for all leaves concatenated along `dim`.
        """
        return self._running(torch.cummax, dim, reduce, return_indices)

    @overload
    def cummin(self, dim: DimLike, *, reduce: Off = None, return_indices: On = True) -> Pair[Self]: ...
    @overload
    def cummin(self, dim: DimLike, *, reduce: Off = None, return_indices: Literal[False]) -> Self: ...
    @overload
    def cummin(self, dim: DimLike, *, reduce: On, return_indices: On = True) -> Pair[Tensor]: ...
    @overload
    def cummin(self, dim: DimLike, *, reduce: On, return_indices: Literal[False]) -> Tensor: ...
    def cummin(self, dim: DimLike, *, reduce: bool | None = None, return_indices: bool = True) -> Any:
        """Return the smallest element so far along a batch dimension, as [`torch.cummin`][]; arguments as `cummax`."""
        return self._running(torch.cummin, dim, reduce, return_indices)

    def _extreme(
        self, fn: Any, kind: Reduction, dim: Any, keepdim: bool, reduce: bool | None, return_indices: bool
    ) -> Any:
        dim = _alone(dim)
        if reduce or not return_indices or dim is None or dim == FEATURE or isinstance(dim, (tuple, list)):
            return self._reduction(kind, dim, keepdim, reduce)
        best = self._reduction(kind, dim, keepdim, None)
        indices = self._reduction(how.argument(fn), dim, keepdim, None)
        return getattr(torch.return_types, fn.__name__)((best, indices))

    def _running(self, fn: Any, dim: Any, reduce: bool | None, return_indices: bool) -> Any:
        at = self._one_dim(_alone(dim))
        if reduce:
            whole = fn(self._strung(at), at)
            return whole if return_indices else whole.values
        pairs: list[Any] = []

        def values(leaves: Sequence[Tensor]) -> list[Tensor]:
            made = [fn(leaf, at) for leaf in leaves]
            pairs.extend(made)
            return [pair.values for pair in made]

        best = self._in_rows()._foreach(values)
        best.unlock_()
        if not return_indices:
            return best
        rest = iter(pairs)  # `_foreach` asks once for each nested container that has a class or is a lazy stack
        indices = best._foreach(lambda leaves: [next(rest).indices for _ in leaves])
        return getattr(torch.return_types, fn.__name__)((best, indices))


def _alone(dim: Any) -> Any:
    """Return the dimension of a tuple of one."""
    return dim[0] if isinstance(dim, (tuple, list)) and len(dim) == 1 else dim
