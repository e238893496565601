"""Rearrangement of rows and batch dimensions: flip, roll, gather, repeat, pad, movedim."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Self

import torch
from torch import Tensor

from tdstore.arguments import as_list, check_int, refuse_type
from tdstore.errors import BatchSizeError, InvalidArgumentError
from tdstore.index.shapes import as_dim, flat_args
from tdstore.ops import nested
from tdstore.ops.base import check_container
from tdstore.ops.reshape import ReshapeOps
from tdstore.types import Names, SizeLike


def _dims(dims: Any, n: int) -> tuple[int, ...]:
    return tuple(as_dim(d, n) for d in (dims if isinstance(dims, (tuple, list)) else (dims,)))


class CopyFunction:
    """A function of a leaf that copies, so that no caller tests whether it makes a view."""

    # No subclass of functools.partial: torch.compile cannot trace one.
    def __init__(self, fn: Callable[[Tensor], Tensor]) -> None:
        self.fn = fn

    def __call__(self, leaf: Tensor) -> Tensor:
        """Return the copy."""
        return self.fn(leaf)


@dataclass
class Padding:
    """Padding that enlarges the batch dimensions of a tensor, or crops them."""

    ndim: int
    new: torch.Size
    amounts: tuple[int, ...]
    """(before, after) of each batch dimension, the last one first."""
    value: float

    @classmethod
    def of(cls, batch_size: torch.Size, pad_size: Sequence[int], value: float) -> Padding:
        """Parse the padding of a batch.

        Args:
            pad_size: (before, after) of dimension 0, then of 1, and so on; negative amounts crop.

        Raises:
            BatchSizeError: not one pair for each of some leading batch dimensions, or more is cropped than there is.
        """
        for amount in as_list(pad_size, "pad_size", "a sequence of ints"):
            check_int(amount, "an amount of pad_size")
        if len(pad_size) % 2 or len(pad_size) > 2 * len(batch_size):
            raise BatchSizeError(
                f"pad_size needs (before, after) for at most {len(batch_size)} batch dimensions, not {list(pad_size)}"
            )
        pairs = [(pad_size[i], pad_size[i + 1]) for i in range(0, len(pad_size), 2)]
        new = list(batch_size)
        for dim, (before, after) in enumerate(pairs):
            if max(-before, 0) + max(-after, 0) > batch_size[dim]:
                raise BatchSizeError(
                    f"pad_size {list(pad_size)} crops more rows of dimension {dim} than the {batch_size[dim]} there are"
                )
            new[dim] += before + after
        amounts = [amount for pair in reversed(pairs) for amount in pair]
        return cls(
            len(batch_size), torch.Size(new), (0,) * (2 * len(batch_size) - len(amounts)) + tuple(amounts), value
        )

    def __call__(self, tensor: Tensor) -> Tensor:
        """Return a tensor of the new size, with `value` around the old one."""
        return self.filled(tensor, self.value)

    def filled(self, tensor: Tensor, value: float) -> Tensor:
        """Return the same padding with another value."""
        return torch.constant_pad_nd(tensor, (0, 0) * (tensor.ndim - self.ndim) + self.amounts, value)

    def of_values(self, values: list[Any], shape: torch.Size) -> tuple[list[Any], Tensor]:
        """Pad values that are not numbers with None: return the values of all rows, and numbers for each."""
        places = self.filled(torch.arange(len(values), device="cpu").reshape(shape), len(values))
        made = [*values, None]
        return [made[i] for i in places.flatten().tolist()], torch.arange(places.numel(), device="cpu").reshape(
            places.shape
        )


_FEW_PARTS = 16


class RearrangeOps(ReshapeOps):
    """flip, roll, repeat, tile, pad and their relatives; feature dimensions never change."""

    __slots__ = ()

    # -- dimensions, by their other names ----------------------------------------------------
    def movedim(self, source: int | Sequence[int], destination: int | Sequence[int]) -> Self:
        """Move batch dimensions to other positions, as [`torch.movedim`][].

        Raises:
            BatchSizeError: not as many positions as dimensions. DimensionError: one that is out of range.
        """
        n = len(self.batch_size)
        old, new = _dims(source, n), _dims(destination, n)
        if len(old) != len(new):
            raise BatchSizeError(f"movedim of {source} to {destination}: not as many places as dimensions")
        if len(old) != 1 or type(source) is not int or type(destination) is not int:
            torch.empty(self.batch_size, device="meta").movedim(source, destination)  # type: ignore[arg-type]  # checks
        elif old == new:
            return self._return_unchanged()
        pairs = dict(zip(new, old, strict=True))
        rest = iter(d for d in range(n) if d not in pairs.values())
        return self.permute([pairs[d] if d in pairs else next(rest) for d in range(n)])

    def moveaxis(self, source: int | Sequence[int], destination: int | Sequence[int]) -> Self:
        """Call `movedim`; this is an alias."""
        return self.movedim(source, destination)

    def swapaxes(self, axis0: int, axis1: int) -> Self:
        """Call `transpose`, of which this is an alias."""
        return self.transpose(axis0, axis1)

    def swapdims(self, axis0: int, axis1: int) -> Self:
        """Call `transpose`, of which this is an alias."""
        return self.transpose(axis0, axis1)

    def atleast_1d(self) -> Self:
        """Return at least one batch dimension: `[]` becomes `[1]`."""
        return self._atleast(1)

    def atleast_2d(self) -> Self:
        """Return at least two batch dimensions: `[n]` becomes `[1, n]`."""
        return self._atleast(2)

    def atleast_3d(self) -> Self:
        """Return at least three batch dimensions, new ones first: `[n, m]` becomes `[1, n, m]`."""
        return self._atleast(3)

    def _atleast(self, ndim: int) -> Self:
        td = self
        while len(td.batch_size) < ndim:
            td = td.unsqueeze(0)
        return td

    def broadcast_to(self, *args: SizeLike, shape: Sequence[int] | None = None) -> Self:
        """Expand the batch: another name of `expand`.

        Args:
            *args: the new batch size, as numbers or as one sequence; -1 leaves a dimension as it is.
            shape: the new batch size, by this name.

        Raises:
            BatchSizeError: the batch size cannot be expanded like this.

        Example:
            >>> TensorDict({"a": torch.zeros(3, 5)}, [3]).broadcast_to(2, 3)["a"].shape
            torch.Size([2, 3, 5])
        """
        return self.expand(*(args if shape is None else shape))

    # -- rows ----------------------------------------------------------------------------------
    def narrow(self, dim: int, start: int, length: int) -> Self:
        """Return `length` positions of batch dimension `dim` from `start`, sharing memory, as [`torch.narrow`][]."""
        old = self.batch_size
        at = as_dim(dim, len(old))
        new = torch.empty(old, device="meta").narrow(at, start, length).shape  # torch checks the range
        first = start + old[at] if start < 0 else start
        return self._move(lambda t: nested.narrow(t, at, first, length), new, self._dim_names(), views=True)

    def flip(self, *args: SizeLike, dims: SizeLike | None = None) -> Self:
        """Reverse the order along batch dimensions, as [`torch.flip`][]. Copies."""
        which = _dims(flat_args(args) if dims is None else dims, len(self.batch_size))
        return self._move(CopyFunction(lambda t: t.flip(which)), self.batch_size, self._dim_names())

    def fliplr(self) -> Self:
        """Reverse the order along batch dimension 1."""
        return self.flip(1)

    def flipud(self) -> Self:
        """Reverse the order along batch dimension 0."""
        return self.flip(0)

    def roll(self, shifts: int | Sequence[int], dims: SizeLike | None = None, *, inplace: bool = False) -> Self:
        """Shift rows along batch dimensions, as [`torch.roll`][]: rows that leave at one end enter at the other.

        Args:
            shifts: how far to shift; a sequence for several `dims`.
            dims: batch dimensions. Default: roll the batch as if it were flat.
            inplace: let this TensorDict take over the result's leaves, and return it.

        Raises:
            DimensionError: a dimension is out of range.
            LockedError: `inplace`, and this TensorDict is locked.

        Example:
            >>> TensorDict({"a": torch.arange(4)}, [4]).roll(1)["a"]
            tensor([3, 0, 1, 2])
        """
        old, n = self.batch_size, len(self.batch_size)
        which = None if dims is None else _dims(dims, n)

        @CopyFunction
        def rolled(t: Tensor) -> Tensor:
            if which is not None:
                return t.roll(shifts, which)
            return t.flatten(0, n - 1).roll(shifts, 0).unflatten(0, old) if n else t

        return self._apply_inplace_result(self._move(rolled, old, self._dim_names()), "roll", inplace)

    def rot90(self, k: int = 1, dims: Sequence[int] = (0, 1)) -> Self:
        """Rotate by `k` times 90 degrees in the plane of two batch dimensions, as [`torch.rot90`][]."""
        a, b = _dims(dims, len(self.batch_size))
        new, names = list(self.batch_size), self._dim_names()
        if k % 2:
            new[a], new[b] = new[b], new[a]
            if names:
                swapped = list(names)
                swapped[a], swapped[b] = swapped[b], swapped[a]
                names = tuple(swapped)
        return self._move(lambda t: t.rot90(k, (a, b)), torch.Size(new), names)

    def repeat(self, *repeats: SizeLike, inplace: bool = False) -> Self:
        """Repeat the batch `repeats[d]` times along each dimension, as `Tensor.repeat`. Copies."""
        times = flat_args(repeats)
        old = self.batch_size
        if len(times) != len(old):
            raise InvalidArgumentError(
                f"repeat needs one number for each of the {len(old)} batch dimensions, not {list(times)}"
            )
        return self._apply_inplace_result(self._repeated(tuple(times), self._dim_names()), "repeat", inplace)

    def tile(self, *args: SizeLike, dims: Sequence[int] | None = None) -> Self:
        """Repeat the batch as [`torch.tile`][]: fewer numbers stand for the last dimensions."""
        times, n = tuple(flat_args(args) if dims is None else dims), len(self.batch_size)
        if len(times) > n:
            td = self
            for _ in range(len(times) - n):
                td = td.unsqueeze(0)
            return td._repeated(times, None)
        return self._repeated((1,) * (n - len(times)) + times, None)

    def _repeated(self, times: tuple[int, ...], names: Names) -> Self:
        new = torch.Size(a * b for a, b in zip(self.batch_size, times, strict=True))
        more = [d for d, n in enumerate(times) if n != 1]
        once = len(more) == 1 and 0 < times[more[0]] <= _FEW_PARTS

        def repeated(t: Tensor) -> Tensor:
            if type(t) is Tensor and t.layout is torch.strided and not t.is_nested:  # a quarter of the time of `repeat`
                if once:
                    return torch.cat([t] * times[more[0]], more[0])
                if not more:
                    return t.clone(memory_format=torch.contiguous_format)
            return t.repeat(*times, *(1,) * (t.ndim - len(times)))

        return self._move(repeated, new, names)

    def repeat_interleave(
        self,
        repeats: SizeLike | Tensor,
        dim: int | None = None,
        *,
        output_size: int | None = None,
        inplace: bool = False,
    ) -> Self:
        """Repeat each position, as [`torch.repeat_interleave`][]; without `dim` the batch is flattened first."""
        old, names = self.batch_size, self._dim_names()
        if dim is None:
            if len(old) != 1:
                flat = self.reshape(-1).repeat_interleave(repeats, 0, output_size=output_size)
                return self._apply_inplace_result(flat, "repeat_interleave", inplace)
            dim = 0
        if not old:
            as_dim(dim, 1)  # as of a tensor without dimensions
            many = self.unsqueeze(0).repeat_interleave(repeats, 0, output_size=output_size)
            return self._apply_inplace_result(many, "repeat_interleave", inplace)
        at = as_dim(dim, len(old))
        new = list(old)
        if type(repeats) is int and repeats >= 0 and output_size is None:
            new[at] *= repeats
        else:
            new[at] = (
                torch.arange(old[at], device="cpu")
                .repeat_interleave(torch.as_tensor(repeats).cpu(), 0, output_size=output_size)
                .numel()
            )
        many = self._interleaved(repeats, at, output_size, torch.Size(new), names)
        return self._apply_inplace_result(many, "repeat_interleave", inplace)

    def _interleaved(self, repeats: Any, at: int, output_size: int | None, new: torch.Size, names: Names) -> Self:
        def interleaved(t: Tensor) -> Tensor:
            many = repeats.to(t.device) if isinstance(repeats, Tensor) else repeats
            return t.repeat_interleave(many, at, output_size=output_size)

        return self._move(interleaved, new, names)

    def gather(self, dim: int, index: Tensor, out: Self | None = None, *, inplace: bool = False) -> Self:
        """Gather rows along a batch dimension, as `torch.gather` on every leaf.

        Args:
            dim: the batch dimension.
            index: an int64 tensor of positions along `dim`, with at most as many dimensions as the batch; missing last
                dimensions are taken whole.
            out: a TensorDict of the result's batch size to write into, in place.
            inplace: let this TensorDict take over the result's leaves, and return it.

        Raises:
            InvalidArgumentError: both `out` and `inplace`.
            BatchSizeError: `index` has more dimensions than the batch, or none for `dim`.
            DimensionError: `dim` is out of range.

        Example:
            >>> td = TensorDict({"a": torch.tensor([10, 20, 30])}, [3])
            >>> td.gather(0, torch.tensor([2, 0]))["a"]
            tensor([30, 10])
        """
        if out is not None and inplace:
            raise InvalidArgumentError("gather writes into `out` or in place: give one of the two")
        if not isinstance(index, Tensor):
            raise refuse_type("the index", "an int64 tensor", index)
        if out is not None:
            check_container(out, "out")
        old = self.batch_size
        n, k = len(old), index.ndim
        at = as_dim(dim, n)
        if not at < k <= n:
            raise BatchSizeError(f"an index of {k} dimensions cannot gather along dimension {at} of a batch of {n}")

        @CopyFunction
        def take(t: Tensor) -> Tensor:
            rest = t.shape[k:]
            wide = index.reshape(*index.shape, *(1,) * len(rest)).expand(*index.shape, *rest)
            return t.gather(at, wide.to(t.device))

        names = self._dim_names()
        result = self._move(take, torch.Size((*index.shape, *old[k:])), names, keep_lock=False)
        if out is None:
            return self._apply_inplace_result(result, "gather", inplace)
        update: Any = out
        return update.update_(result)  # type: ignore[no-any-return]

    def pad(self, pad_size: Sequence[int], value: float = 0.0, inplace: bool = False, safe: bool = True) -> Self:
        """Pad batch dimensions with a number. Entries that have one non-tensor value per row get None in the new rows.

        Args:
            pad_size: `(before, after)` of dimension 0, then of dimension 1, and so on. Negative amounts crop.
            value: the number.
            inplace: let this TensorDict take over the result's leaves, and return it.
            safe: accepted for compatibility: what cannot be padded is always found before anything changes.

        Raises:
            BatchSizeError: not one pair for each of some leading batch dimensions, or more is cropped than there is.

        Example:
            >>> TensorDict({"x": torch.ones(2, 3)}, [2]).pad([1, 0])["x"][:, 0]
            tensor([0., 1., 1.])
        """
        padding = Padding.of(self.batch_size, pad_size, value)
        return self._apply_inplace_result(
            self._move(padding, padding.new, self._dim_names(), keep_lock=False), "pad", inplace
        )

    def tensor_split(self, indices_or_sections: SizeLike | Tensor, dim: int = 0) -> tuple[Self, ...]:
        """Split along a batch dimension into about equal parts, or at given positions, as [`torch.tensor_split`][]."""
        old = self.batch_size
        at = as_dim(dim, len(old))
        parts = torch.empty(old, device="meta").tensor_split(_plain(indices_or_sections), at)
        where = _plain(indices_or_sections)
        shapes = [part.shape for part in parts]
        ends = [*accumulate(shape[at] for shape in shapes)][:-1] if isinstance(where, int) else where
        rows = [range(old[at])[slice(*cut)] for cut in zip([None, *ends], [*ends, None], strict=True)]
        return self._fan_out(
            lambda t: [nested.narrow(t, at, row.start, len(row)) for row in rows],
            shapes,
            self._dim_names(),
            keep_lock=True,
        )


def _plain(places: Any) -> Any:
    """Return the positions at which to split as ints: a tensor would have to be on the CPU."""
    return places.tolist() if isinstance(places, Tensor) else places
