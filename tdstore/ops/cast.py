"""Casts of every leaf to one dtype. In a module of its own, since methods named `float` or `int` hide the builtins."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Self, TypeAlias

import torch
from torch import Tensor

from tdstore.arguments import check_callable
from tdstore.errors import UnsupportedError
from tdstore.ops.base import OpsBase

CastFilter: TypeAlias = "Callable[[tuple[str, ...], Tensor], object] | None"
"""Called with the path and the tensor of each leaf; the leaves for which it is true are cast."""


class CastOps(OpsBase):
    """The casts that have a method of their own; `to(dtype)` casts to any dtype.

    With `cast_filter=`, they cast the leaves for which `cast_filter(path, leaf)` is true, and share the others.
    """

    __slots__ = ()

    def type(self, dst_type: torch.dtype, *, cast_filter: CastFilter = None) -> Self:
        """Cast every leaf to a dtype, integers included. The result is not locked.

        Args:
            dst_type: a `torch.dtype`.
            cast_filter: called with the path of each leaf, a tuple of strings, and its tensor. Only those for which it
                returns true are cast; default: all.

        Example:
            >>> TensorDict({"a": torch.ones(2)}, [2]).type(torch.int64)["a"]
            tensor([1, 1])
        """
        made: Any = self._cast(dst_type, cast_filter)
        made.unlock_()
        found: Self = made
        return found

    def _cast(self, dst_type: torch.dtype, cast_filter: CastFilter = None) -> Self:
        if cast_filter is None:
            return self._foreach(lambda leaves: cast_all(leaves, dst_type))
        check_callable(cast_filter, "cast_filter")
        wanted = cast_filter

        def convert(key: str | tuple[str, ...], leaf: Tensor) -> Tensor:
            return leaf.type(dst_type) if wanted(key if isinstance(key, tuple) else (key,), leaf) else leaf

        source: Any = self
        made: Self = source._walkable().named_apply(convert, nested_keys=True, filter_empty=False, propagate_lock=True)
        return made

    def bool(self, *, cast_filter: CastFilter = None) -> Self:
        """Cast every leaf to [`torch.bool`][]: whether its elements are not zero.

        Example:
            >>> TensorDict({"a": torch.tensor([0, 2])}, [2]).bool()["a"]
            tensor([False,  True])
        """
        return self._cast(torch.bool, cast_filter)

    def double(self, *, cast_filter: CastFilter = None) -> Self:
        """Cast every leaf to [`torch.float64`][]."""
        return self._cast(torch.float64, cast_filter)

    def float(self, *, cast_filter: CastFilter = None) -> Self:
        """Cast every leaf to [`torch.float32`][], integers included.

        Example:
            >>> TensorDict({"a": torch.tensor([0, 2])}, [2]).float()["a"]
            tensor([0., 2.])
        """
        return self._cast(torch.float32, cast_filter)

    def half(self, *, cast_filter: CastFilter = None) -> Self:
        """Cast every leaf to [`torch.float16`][]."""
        return self._cast(torch.float16, cast_filter)

    def bfloat16(self, *, cast_filter: CastFilter = None) -> Self:
        """Cast every leaf to [`torch.bfloat16`][]."""
        return self._cast(torch.bfloat16, cast_filter)

    def int(self, *, cast_filter: CastFilter = None) -> Self:
        """Cast every leaf to [`torch.int32`][]."""
        return self._cast(torch.int32, cast_filter)

    def float16(self, *, cast_filter: CastFilter = None) -> Self:
        """Cast every leaf to [`torch.float16`][]."""
        return self._cast(torch.float16, cast_filter)

    def float32(self, *, cast_filter: CastFilter = None) -> Self:
        """Cast every leaf to [`torch.float32`][]."""
        return self._cast(torch.float32, cast_filter)

    def float64(self, *, cast_filter: CastFilter = None) -> Self:
        """Cast every leaf to [`torch.float64`][]."""
        return self._cast(torch.float64, cast_filter)

    def complex32(self, *, cast_filter: CastFilter = None) -> Self:
        """Cast every leaf to [`torch.complex32`][]."""
        return self._cast(torch.complex32, cast_filter)

    def complex64(self, *, cast_filter: CastFilter = None) -> Self:
        """Cast every leaf to [`torch.complex64`][]."""
        return self._cast(torch.complex64, cast_filter)

    def complex128(self, *, cast_filter: CastFilter = None) -> Self:
        """Cast every leaf to [`torch.complex128`][]."""
        return self._cast(torch.complex128, cast_filter)

    def int8(self, *, cast_filter: CastFilter = None) -> Self:
        """Cast every leaf to [`torch.int8`][]."""
        return self._cast(torch.int8, cast_filter)

    def int16(self, *, cast_filter: CastFilter = None) -> Self:
        """Cast every leaf to [`torch.int16`][]."""
        return self._cast(torch.int16, cast_filter)

    def int32(self, *, cast_filter: CastFilter = None) -> Self:
        """Cast every leaf to [`torch.int32`][]."""
        return self._cast(torch.int32, cast_filter)

    def int64(self, *, cast_filter: CastFilter = None) -> Self:
        """Cast every leaf to [`torch.int64`][]."""
        return self._cast(torch.int64, cast_filter)

    def uint8(self, *, cast_filter: CastFilter = None) -> Self:
        """Cast every leaf to [`torch.uint8`][]."""
        return self._cast(torch.uint8, cast_filter)

    def uint16(self, *, cast_filter: CastFilter = None) -> Self:
        """Cast every leaf to [`torch.uint16`][]."""
        return self._cast(torch.uint16, cast_filter)

    def uint32(self, *, cast_filter: CastFilter = None) -> Self:
        """Cast every leaf to [`torch.uint32`][]."""
        return self._cast(torch.uint32, cast_filter)

    def uint64(self, *, cast_filter: CastFilter = None) -> Self:
        """Cast every leaf to [`torch.uint64`][]."""
        return self._cast(torch.uint64, cast_filter)

    # -- dtypes with a scale -------------------------------------------------------------------
    def qint8(self, *, cast_filter: CastFilter = None) -> Self:
        """Raise an error: quantized dtypes need a scale, which a cast has not."""
        return self._no_scale("qint8")

    def qint32(self, *, cast_filter: CastFilter = None) -> Self:
        """Raise an error: quantized dtypes need a scale, which a cast has not."""
        return self._no_scale("qint32")

    def quint8(self, *, cast_filter: CastFilter = None) -> Self:
        """Raise an error: quantized dtypes need a scale, which a cast has not."""
        return self._no_scale("quint8")

    def quint4x2(self, *, cast_filter: CastFilter = None) -> Self:
        """Raise an error: quantized dtypes need a scale, which a cast has not."""
        return self._no_scale("quint4x2")

    def _no_scale(self, name: str) -> Self:
        raise UnsupportedError(
            f"a cast to torch.{name} needs a scale and a zero point",
            hint="td.apply(lambda t: torch.quantize_per_tensor(t, scale, zero_point, dtype))",
        )


def cast_all(leaves: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Cast tensors; those that have the dtype are returned themselves."""
    method = _METHODS.get(dtype)
    return [leaf.type(dtype) for leaf in leaves] if method is None else list(map(method, leaves))


_METHODS: dict[torch.dtype, Callable[[Tensor], Tensor]] = {
    torch.bfloat16: Tensor.bfloat16,
    torch.bool: Tensor.bool,
    torch.float16: Tensor.half,
    torch.float32: Tensor.float,
    torch.float64: Tensor.double,
    torch.int8: Tensor.char,
    torch.int16: Tensor.short,
    torch.int32: Tensor.int,
    torch.int64: Tensor.long,
    torch.uint8: Tensor.byte,
}
"""The casts that torch has methods for. These take half the time of `to`, and less than `type`."""
