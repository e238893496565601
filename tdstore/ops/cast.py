"""Casts of every leaf to one dtype. In a module of its own, since methods named `float` or `int` hide the builtins."""

from __future__ import annotations

from typing import Any, Self

import torch

from tdstore.errors import UnsupportedError
from tdstore.ops.base import OpsBase


class CastOps(OpsBase):
    """The casts that have a method of their own; `to(dtype)` casts to any dtype."""

    __slots__ = ()

    def type(self, dst_type: torch.dtype) -> Self:
        """Cast every leaf to a dtype, integers included. The result is not locked.

        Args:
            dst_type: a `torch.dtype`.

        Example:
            >>> TensorDict({"a": torch.ones(2)}, [2]).type(torch.int64)["a"]
            tensor([1, 1])
        """
        made: Any = self._cast(dst_type)
        made.unlock_()
        found: Self = made
        return found

    def _cast(self, dst_type: torch.dtype) -> Self:
        return self._foreach(lambda leaves: [t.to(dst_type) for t in leaves])

    def bool(self) -> Self:
        """Cast every leaf to [`torch.bool`][]: whether its elements are not zero.

        Example:
            >>> TensorDict({"a": torch.tensor([0, 2])}, [2]).bool()["a"]
            tensor([False,  True])
        """
        return self._cast(torch.bool)

    def double(self) -> Self:
        """Cast every leaf to [`torch.float64`][]."""
        return self._cast(torch.float64)

    def float(self) -> Self:
        """Cast every leaf to [`torch.float32`][], integers included.

        Example:
            >>> TensorDict({"a": torch.tensor([0, 2])}, [2]).float()["a"]
            tensor([0., 2.])
        """
        return self._cast(torch.float32)

    def half(self) -> Self:
        """Cast every leaf to [`torch.float16`][]."""
        return self._cast(torch.float16)

    def bfloat16(self) -> Self:
        """Cast every leaf to [`torch.bfloat16`][]."""
        return self._cast(torch.bfloat16)

    def int(self) -> Self:
        """Cast every leaf to [`torch.int32`][]."""
        return self._cast(torch.int32)

    def float16(self) -> Self:
        """Cast every leaf to [`torch.float16`][]."""
        return self._cast(torch.float16)

    def float32(self) -> Self:
        """Cast every leaf to [`torch.float32`][]."""
        return self._cast(torch.float32)

    def float64(self) -> Self:
        """Cast every leaf to [`torch.float64`][]."""
        return self._cast(torch.float64)

    def complex32(self) -> Self:
        """Cast every leaf to [`torch.complex32`][]."""
        return self._cast(torch.complex32)

    def complex64(self) -> Self:
        """Cast every leaf to [`torch.complex64`][]."""
        return self._cast(torch.complex64)

    def complex128(self) -> Self:
        """Cast every leaf to [`torch.complex128`][]."""
        return self._cast(torch.complex128)

    def int8(self) -> Self:
        """Cast every leaf to [`torch.int8`][]."""
        return self._cast(torch.int8)

    def int16(self) -> Self:
        """Cast every leaf to [`torch.int16`][]."""
        return self._cast(torch.int16)

    def int32(self) -> Self:
        """Cast every leaf to [`torch.int32`][]."""
        return self._cast(torch.int32)

    def int64(self) -> Self:
        """Cast every leaf to [`torch.int64`][]."""
        return self._cast(torch.int64)

    def uint8(self) -> Self:
        """Cast every leaf to [`torch.uint8`][]."""
        return self._cast(torch.uint8)

    def uint16(self) -> Self:
        """Cast every leaf to [`torch.uint16`][]."""
        return self._cast(torch.uint16)

    def uint32(self) -> Self:
        """Cast every leaf to [`torch.uint32`][]."""
        return self._cast(torch.uint32)

    def uint64(self) -> Self:
        """Cast every leaf to [`torch.uint64`][]."""
        return self._cast(torch.uint64)

    # -- dtypes with a scale -------------------------------------------------------------------
    def qint8(self) -> Self:
        """Raise an error: quantized dtypes need a scale, which a cast has not."""
        return self._no_scale("qint8")

    def qint32(self) -> Self:
        """Raise an error: quantized dtypes need a scale, which a cast has not."""
        return self._no_scale("qint32")

    def quint8(self) -> Self:
        """Raise an error: quantized dtypes need a scale, which a cast has not."""
        return self._no_scale("quint8")

    def quint4x2(self) -> Self:
        """Raise an error: quantized dtypes need a scale, which a cast has not."""
        return self._no_scale("quint4x2")

    def _no_scale(self, name: str) -> Self:
        raise UnsupportedError(
            f"a cast to torch.{name} needs a scale and a zero point",
            hint="td.apply(lambda t: torch.quantize_per_tensor(t, scale, zero_point, dtype))",
        )
