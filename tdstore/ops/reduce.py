"""Reductions: over batch dimensions, over features, over everything.

All of them have `dim=`: if it is absent or None, every leaf is reduced to a scalar and the batch to `[]`; an int, a
dimension name or a tuple of them reduces batch dimensions; `"feature"` reduces the dimensions to the right of the
batch. `reduce=True` returns one tensor over all leaves instead of a TensorDict.
"""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self, overload

import torch
from torch import Tensor

from tdstore.errors import InvalidArgumentError, InvalidStateError, InvalidTypeError
from tdstore.index.shapes import as_dim
from tdstore.ops import block_reductions as how
from tdstore.ops.base import OpsBase, check_container
from tdstore.ops.block_reductions import Reduction
from tdstore.types import DimLike, DimsLike, Names

if TYPE_CHECKING:
    On = Literal[True]
    Off = Literal[False] | None


FEATURE = "feature"


class Over(NamedTuple):
    """Extent of a reduction: the batch dimensions `dims`, or the features, or everything (None and False)."""

    dims: tuple[int, ...] | None
    features: bool
    batch_dims: int

    def of(self, leaf: Tensor) -> tuple[Tensor, tuple[int, ...]]:
        """Return a leaf and its reduced dimensions: at least one (to torch, none means all)."""
        dims = self.dims
        if dims is None:
            dims = tuple(range(self.batch_dims if self.features else 0, leaf.ndim))
        return (leaf, dims) if dims else (leaf.unsqueeze(-1), (leaf.ndim,))

    def nested(self, batch_size: torch.Size, own: torch.Size) -> torch.Size:
        """Return the batch size of a reduced nested TensorDict whose own batch size is `own`."""
        return batch_size if self.dims is None else torch.Size((*batch_size, *own[self.batch_dims :]))


class ReduceOps(OpsBase):
    """all, any, sum, mean, std, ...; on stored data they stream over blocks of rows."""

    __slots__ = ()

    @abstractmethod
    def _reduced(self, kind: Reduction, over: Over, keepdim: bool, batch_size: torch.Size, names: Names) -> Self:
        """Return a container whose leaves are reduced; its batch becomes `batch_size`."""

    @overload
    def all(self, dim: None = None, keepdim: bool = False) -> bool: ...
    @overload
    def all(self, dim: DimsLike, keepdim: bool = False) -> Self: ...
    def all(self, dim: DimsLike | None = None, keepdim: bool = False) -> Any:
        """Return whether every element of every leaf is true: one bool, or a TensorDict reduced over batch dimensions.

        Args:
            dim: batch dimensions to reduce, by number or name. Default: everything, to one bool.
            keepdim: whether reduced batch dimensions stay, with length 1.

        Raises:
            DimensionError: `dim` is not a batch dimension.

        Example:
            >>> td = TensorDict({"a": torch.tensor([[True, False], [True, True]])}, [2])
            >>> td.all(), td.all(dim=0)["a"]
            (False, tensor([ True, False]))
        """
        if dim is None:
            for leaf in self._walk_plain():  # no further one is looked at behind the first that decides
                if leaf is None:
                    return all(every.all() for every in self._every_leaf(how.ALL))
                if not leaf.all():
                    return False
            return True
        return self._reduction(how.ALL, dim, keepdim, None)

    @overload
    def any(self, dim: None = None, keepdim: bool = False) -> bool: ...
    @overload
    def any(self, dim: DimsLike, keepdim: bool = False) -> Self: ...
    def any(self, dim: DimsLike | None = None, keepdim: bool = False) -> Any:
        """Return whether any element of any leaf is true: one bool, or a TensorDict reduced over batch dimensions.

        Args:
            dim: batch dimensions to reduce, by number or name. Default: everything, to one bool.
            keepdim: whether reduced batch dimensions stay, with length 1.

        Raises:
            DimensionError: `dim` is not a batch dimension.

        Example:
            >>> td = TensorDict({"a": torch.tensor([[True, False], [True, False]])}, [2])
            >>> td.any(), td.any(dim=0)["a"]
            (True, tensor([ True, False]))
        """
        if dim is None:
            for leaf in self._walk_plain():  # no further one is looked at behind the first that decides
                if leaf is None:
                    return any(every.any() for every in self._every_leaf(how.ANY))
                if leaf.any():
                    return True
            return False
        return self._reduction(how.ANY, dim, keepdim, None)

    @overload
    def sum(
        self,
        dim: DimsLike | None = None,
        keepdim: bool = False,
        *,
        dtype: torch.dtype | None = None,
        reduce: On,
        key_transform: Callable[[str], str] | None = None,
    ) -> Tensor: ...
    @overload
    def sum(
        self,
        dim: DimsLike | None = None,
        keepdim: bool = False,
        *,
        dtype: torch.dtype | None = None,
        reduce: Off = None,
        key_transform: Callable[[str], str] | None = None,
    ) -> Self: ...
    def sum(
        self,
        dim: DimsLike | None = None,
        keepdim: bool = False,
        *,
        dtype: torch.dtype | None = None,
        reduce: bool | None = None,
        key_transform: Callable[[str], str] | None = None,
    ) -> Any:
        """Compute the sum of elements, as [`torch.sum`][].

        Args:
            dim: what to reduce: None for everything, batch dimensions by number or name, or `"feature"` for the
                dimensions to the right of the batch.
            keepdim: whether reduced batch dimensions stay, with length 1.
            dtype: the dtype that leaves are cast to first, so that small integers do not overflow.
            reduce: True returns one tensor over all leaves.
            key_transform: maps the key of each entry to its key in the result: `str -> str`, `tuple -> tuple`.

        Returns:
            A TensorDict with the remaining batch dimensions, or a tensor with `reduce=True`.

        Raises:
            DimensionError: `dim` is not a batch dimension.
            InvalidTypeError: `keepdim` without batch dimensions to reduce.
            InvalidStateError: `reduce=True` over a batch dimension, and the leaves differ in shape.

        Example:
            >>> td = TensorDict({"x": torch.ones(3, 2)}, [3])
            >>> td.sum()["x"], td.sum(dim=0)["x"], td.sum(dim="feature")["x"]
            (tensor(6.), tensor([3., 3.]), tensor([2., 2., 2.]))
        """
        return self._reduction(how.add_up(dtype), dim, keepdim, reduce, key_transform)

    @overload
    def nansum(
        self, dim: DimsLike | None = None, keepdim: bool = False, *, dtype: torch.dtype | None = None, reduce: On
    ) -> Tensor: ...
    @overload
    def nansum(
        self,
        dim: DimsLike | None = None,
        keepdim: bool = False,
        *,
        dtype: torch.dtype | None = None,
        reduce: Off = None,
    ) -> Self: ...
    def nansum(
        self,
        dim: DimsLike | None = None,
        keepdim: bool = False,
        *,
        dtype: torch.dtype | None = None,
        reduce: bool | None = None,
    ) -> Any:
        """Sum the elements that are not NaN, as [`torch.nansum`][]; arguments as `sum`."""
        return self._reduction(how.add_up(dtype, nan=True), dim, keepdim, reduce)

    @overload
    def mean(
        self,
        dim: DimsLike | None = None,
        keepdim: bool = False,
        *,
        dtype: torch.dtype | None = None,
        reduce: On,
        key_transform: Callable[[str], str] | None = None,
    ) -> Tensor: ...
    @overload
    def mean(
        self,
        dim: DimsLike | None = None,
        keepdim: bool = False,
        *,
        dtype: torch.dtype | None = None,
        reduce: Off = None,
        key_transform: Callable[[str], str] | None = None,
    ) -> Self: ...
    def mean(
        self,
        dim: DimsLike | None = None,
        keepdim: bool = False,
        *,
        dtype: torch.dtype | None = None,
        reduce: bool | None = None,
        key_transform: Callable[[str], str] | None = None,
    ) -> Any:
        """Compute the mean, as [`torch.mean`][]. Integer leaves need `dtype=`.

        Args:
            dim: what to reduce: None for everything, batch dimensions by number or name, or `"feature"`.
            keepdim: whether reduced batch dimensions stay, with length 1.
            dtype: the dtype that leaves are cast to first.
            reduce: True returns one tensor, the mean over the elements of all leaves.
            key_transform: maps the key of each entry to its key in the result.

        Raises:
            DimensionError: `dim` is not a batch dimension.
            InvalidTypeError: `keepdim` without batch dimensions to reduce.
            RuntimeError: a leaf of integers, and no `dtype`.

        Example:
            >>> td = TensorDict({"x": torch.tensor([1.0, 2.0, 6.0])}, [3])
            >>> td.mean()["x"], td.mean(dim=0, keepdim=True)["x"]
            (tensor(3.), tensor([3.]))
        """
        return self._reduction(how.average(dtype), dim, keepdim, reduce, key_transform)

    @overload
    def nanmean(
        self, dim: DimsLike | None = None, keepdim: bool = False, *, dtype: torch.dtype | None = None, reduce: On
    ) -> Tensor: ...
    @overload
    def nanmean(
        self,
        dim: DimsLike | None = None,
        keepdim: bool = False,
        *,
        dtype: torch.dtype | None = None,
        reduce: Off = None,
    ) -> Self: ...
    def nanmean(
        self,
        dim: DimsLike | None = None,
        keepdim: bool = False,
        *,
        dtype: torch.dtype | None = None,
        reduce: bool | None = None,
    ) -> Any:
        """Compute the mean of the elements that are not NaN, as [`torch.nanmean`][]; arguments as `sum`."""
        return self._reduction(how.average(dtype, nan=True), dim, keepdim, reduce)

    @overload
    def prod(
        self, dim: DimsLike | None = None, keepdim: bool = False, *, dtype: torch.dtype | None = None, reduce: On
    ) -> Tensor: ...
    @overload
    def prod(
        self,
        dim: DimsLike | None = None,
        keepdim: bool = False,
        *,
        dtype: torch.dtype | None = None,
        reduce: Off = None,
    ) -> Self: ...
    def prod(
        self,
        dim: DimsLike | None = None,
        keepdim: bool = False,
        *,
        dtype: torch.dtype | None = None,
        reduce: bool | None = None,
    ) -> Any:
        """Compute the product, as [`torch.prod`][].

        Args:
            dim: what to reduce: None for everything, batch dimensions by number or name, or `"feature"`.
            keepdim: whether reduced batch dimensions stay, with length 1.
            dtype: the dtype that leaves are cast to first.
            reduce: True returns one tensor over all leaves.

        Raises:
            DimensionError: `dim` is not a batch dimension.
            InvalidTypeError: `keepdim` without batch dimensions to reduce.

        Example:
            >>> TensorDict({"x": torch.tensor([[1, 2], [3, 4]])}, [2]).prod(dim=0)["x"]
            tensor([3, 8])
        """
        return self._reduction(how.multiply(dtype), dim, keepdim, reduce)

    @overload
    def std(
        self,
        dim: DimsLike | None = None,
        keepdim: bool = False,
        *,
        correction: int = 1,
        reduce: On,
        key_transform: Callable[[str], str] | None = None,
    ) -> Tensor: ...
    @overload
    def std(
        self,
        dim: DimsLike | None = None,
        keepdim: bool = False,
        *,
        correction: int = 1,
        reduce: Off = None,
        key_transform: Callable[[str], str] | None = None,
    ) -> Self: ...
    def std(
        self,
        dim: DimsLike | None = None,
        keepdim: bool = False,
        *,
        correction: int = 1,
        reduce: bool | None = None,
        key_transform: Callable[[str], str] | None = None,
    ) -> Any:
        """Compute the standard deviation, as [`torch.std`][].

        Args:
            dim: what to reduce: None for everything, batch dimensions by number or name, or `"feature"`.
            keepdim: whether reduced batch dimensions stay, with length 1.
            correction: subtracted from the number of elements in the divisor; 0 for the whole population.
            reduce: True returns one tensor over all leaves.
            key_transform: maps the key of each entry to its key in the result.

        Raises:
            DimensionError: `dim` is not a batch dimension.
            InvalidTypeError: `keepdim` without batch dimensions to reduce.
            RuntimeError: a leaf is neither floating-point nor complex.

        Example:
            >>> TensorDict({"x": torch.tensor([1.0, 3.0])}, [2]).std(correction=0)["x"]
            tensor(1.)
        """
        return self._reduction(how.spread(correction, root=True), dim, keepdim, reduce, key_transform)

    @overload
    def var(
        self,
        dim: DimsLike | None = None,
        keepdim: bool = False,
        *,
        correction: int = 1,
        reduce: On,
        key_transform: Callable[[str], str] | None = None,
    ) -> Tensor: ...
    @overload
    def var(
        self,
        dim: DimsLike | None = None,
        keepdim: bool = False,
        *,
        correction: int = 1,
        reduce: Off = None,
        key_transform: Callable[[str], str] | None = None,
    ) -> Self: ...
    def var(
        self,
        dim: DimsLike | None = None,
        keepdim: bool = False,
        *,
        correction: int = 1,
        reduce: bool | None = None,
        key_transform: Callable[[str], str] | None = None,
    ) -> Any:
        """Compute the variance, as [`torch.var`][] with `correction`; arguments as `sum`."""
        return self._reduction(how.spread(correction, root=False), dim, keepdim, reduce, key_transform)

    @overload
    def amax(self, dim: DimsLike | None = None, keepdim: bool = False, *, reduce: On) -> Tensor: ...
    @overload
    def amax(self, dim: DimsLike | None = None, keepdim: bool = False, *, reduce: Off = None) -> Self: ...
    def amax(self, dim: DimsLike | None = None, keepdim: bool = False, *, reduce: bool | None = None) -> Any:
        """Return the largest element, as [`torch.amax`][]; arguments as `sum`."""
        return self._reduction(how.AMAX, dim, keepdim, reduce)

    @overload
    def amin(self, dim: DimsLike | None = None, keepdim: bool = False, *, reduce: On) -> Tensor: ...
    @overload
    def amin(self, dim: DimsLike | None = None, keepdim: bool = False, *, reduce: Off = None) -> Self: ...
    def amin(self, dim: DimsLike | None = None, keepdim: bool = False, *, reduce: bool | None = None) -> Any:
        """Return the smallest element, as [`torch.amin`][]; arguments as `sum`."""
        return self._reduction(how.AMIN, dim, keepdim, reduce)

    def norm(
        self,
        *,
        out: Self | None = None,
        dtype: torch.dtype | None = None,
        key_transform: Callable[[str], str] | None = None,
    ) -> Self:
        """Compute the 2-norm of every leaf.

        Args:
            out: a TensorDict to write the result into, in place.
            dtype: the dtype that leaves are cast to first.
            key_transform: maps the key of each entry to its key in the result.

        Returns:
            A TensorDict of scalars, of batch size `[]`.

        Raises:
            RuntimeError: a leaf is neither floating-point nor complex.

        Example:
            >>> TensorDict({"x": torch.tensor([3.0, 4.0])}, [2]).norm()["x"]
            tensor(5.)
        """
        td: Any = self
        found = td._reduction(how.length(dtype), None, False, None, key_transform)
        made: Self = _into(out, found.lock_() if td.is_locked and out is None else found)
        return made

    def logsumexp(self, dim: DimsLike | None = None, keepdim: bool = False, *, out: Self | None = None) -> Self:
        """Compute the log of the sum of exponentials over batch dimensions (default: all), as [`torch.logsumexp`][]."""
        every = tuple(range(len(self.batch_size))) or None
        made: Self = _into(out, self._reduction(how.LOGSUMEXP, every if dim is None else dim, keepdim, None))
        return made

    def softmax(self, dim: DimLike, dtype: torch.dtype | None = None) -> Self:
        """Compute the softmax along a batch dimension, as [`torch.softmax`][]."""
        at = self._one_dim(dim)
        td: Any = self._in_rows()
        made: Self = td._foreach(lambda leaves: [torch.softmax(leaf, at, dtype) for leaf in leaves]).unlock_()
        return made

    @overload
    def quantile(
        self,
        q: float | Tensor,
        dim: DimsLike | None = None,
        keepdim: bool = False,
        *,
        interpolation: str = "linear",
        reduce: On,
        key_transform: Callable[[str], str] | None = None,
    ) -> Tensor: ...
    @overload
    def quantile(
        self,
        q: float | Tensor,
        dim: DimsLike | None = None,
        keepdim: bool = False,
        *,
        interpolation: str = "linear",
        reduce: Off = None,
        key_transform: Callable[[str], str] | None = None,
    ) -> Self: ...
    def quantile(
        self,
        q: float | Tensor,
        dim: DimsLike | None = None,
        keepdim: bool = False,
        *,
        interpolation: str = "linear",
        reduce: bool | None = None,
        key_transform: Callable[[str], str] | None = None,
    ) -> Any:
        """Compute the `q`-th quantile, `0 <= q <= 1`, as [`torch.quantile`][]; see `sum`. Needs all rows in memory."""
        if isinstance(q, Tensor) and q.ndim:
            raise InvalidArgumentError(
                "quantile takes one q: several would put a dimension before the batch; call it for each"
            )

        def whole(t: Tensor, dims: how.Dims, keep: bool) -> Tensor:
            return how.over_one(t, dims, keep, lambda x, k: torch.quantile(x, q, -1, k, interpolation=interpolation))

        return self._reduction(Reduction(whole), dim, keepdim, reduce, key_transform)

    # -- what they share ---------------------------------------------------------------------
    def _every_leaf(self, kind: Reduction) -> Sequence[Tensor]:
        return self._reduced(kind, Over(None, False, len(self.batch_size)), False, torch.Size(()), None)._leaf_list()

    def _reduction(
        self,
        kind: Reduction,
        dim: Any,
        keepdim: bool,
        reduce: bool | None,
        key_transform: Callable[[str], str] | None = None,
    ) -> Any:
        over, batch, names = self._reach(dim, keepdim)
        if reduce:
            return self._over_leaves(kind, over, keepdim)
        td: Any = self._reduced(kind, over, keepdim, batch, names)
        return td if key_transform is None else td._with_keys(key_transform)

    def _reach(self, dim: Any, keepdim: bool) -> tuple[Over, torch.Size, Names]:
        """Resolve `dim`, and return the remaining batch size and names with it."""
        old, names = self.batch_size, self._dim_names()
        n = len(old)
        if dim is None:
            if keepdim:
                raise InvalidTypeError("keepdim=True needs dim=: a batch dimension, or a tuple of them")
            return Over(None, False, n), torch.Size(()), None
        if isinstance(dim, str) and dim == FEATURE:
            if keepdim:
                raise InvalidTypeError("dim='feature' is incompatible with keepdim=True")
            return Over(None, True, n), old, names
        dims = tuple(sorted({self._one_dim(d) for d in (dim if isinstance(dim, (tuple, list)) else (dim,))}))
        if not dims:
            raise InvalidArgumentError("dim=() reduces nothing: leave dim out to reduce everything")
        if keepdim:
            return Over(dims, False, n), torch.Size(1 if d in dims else s for d, s in enumerate(old)), names
        left = [d for d in range(n) if d not in dims]
        return Over(dims, False, n), torch.Size(old[d] for d in left), names and tuple(names[d] for d in left)

    def _one_dim(self, dim: Any) -> int:
        if isinstance(dim, str):
            names = self._dim_names() or ()
            if dim not in names:
                raise InvalidArgumentError(f"no batch dimension is named {dim!r}; the names are {list(names)}")
            return names.index(dim)
        return as_dim(dim, len(self.batch_size))

    def _over_leaves(self, kind: Reduction, over: Over, keepdim: bool) -> Tensor:
        """Reduce to one tensor over all leaves: the parts to reduce are concatenated first."""
        leaves = self._leaf_list()
        if not leaves:
            raise InvalidStateError("there is no leaf to reduce")
        if len({leaf.dtype for leaf in leaves}) > 1:
            wide = common_dtype(leaves)
            leaves = [leaf.to(wide) for leaf in leaves]
        if over.features:
            rows = torch.cat(
                [
                    leaf.flatten(over.batch_dims) if leaf.ndim > over.batch_dims else leaf.unsqueeze(-1)
                    for leaf in leaves
                ],
                -1,
            )
            return kind.whole(rows, (over.batch_dims,), False)
        if over.dims is None:
            return kind.whole(torch.cat([leaf.ravel() for leaf in leaves]), (0,), False)
        return kind.whole(self._strung(over.dims[0]), over.dims, keepdim)

    def _strung(self, dim: int) -> Tensor:
        """Concatenate all leaves, of one shape, along a dimension."""
        leaves = self._leaf_list()
        if len({leaf.shape for leaf in leaves}) != 1:
            raise InvalidStateError(
                f"reduce=True over batch dimension {dim} needs leaves of one shape, not "
                f"{sorted({tuple(leaf.shape) for leaf in leaves})}; reduce without dim=, or with dim='feature'"
            )
        wide = common_dtype(leaves)
        return torch.cat([leaf.to(wide) for leaf in leaves], dim)


def _into(out: Any, result: Any) -> Any:
    """Return a result, or the TensorDict into which it was to be written."""
    if out is None:
        return result
    check_container(out, "out")
    return out.update(result, inplace=True)


def common_dtype(leaves: Iterable[Tensor]) -> torch.dtype:
    """Return the dtype that all leaves are promoted to when they are concatenated."""
    return functools.reduce(torch.promote_types, (leaf.dtype for leaf in leaves))
