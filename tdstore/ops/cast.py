"""Casts of every leaf to one dtype. Kept apart: methods named `float` or `int` would hide the builtins."""

from __future__ import annotations

from typing import Self

import torch

from tdstore.ops.base import OpsBase


class CastOps(OpsBase):
    """The casts that have a name of their own; `to(dtype)` takes any."""

    __slots__ = ()

    def type(self, dst_type: torch.dtype) -> Self:
        """Cast every leaf to `dst_type`, integers included."""
        return self._foreach(lambda leaves: [t.to(dst_type) for t in leaves])

    def bool(self) -> Self:
        """Cast every leaf to [`torch.bool`][]."""
        return self.type(torch.bool)

    def double(self) -> Self:
        """Cast every leaf to [`torch.float64`][]."""
        return self.type(torch.float64)

    def float(self) -> Self:
        """Cast every leaf to [`torch.float32`][]."""
        return self.type(torch.float32)

    def half(self) -> Self:
        """Cast every leaf to [`torch.float16`][]."""
        return self.type(torch.float16)

    def bfloat16(self) -> Self:
        """Cast every leaf to [`torch.bfloat16`][]."""
        return self.type(torch.bfloat16)

    def int(self) -> Self:
        """Cast every leaf to [`torch.int32`][]."""
        return self.type(torch.int32)
