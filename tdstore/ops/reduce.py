"""Reductions over batch dimensions or everything."""

from __future__ import annotations

from typing import Any, Self

import torch

from tdstore.ops.base import OpsBase
from tdstore.shapes import as_dim


class ReduceOps(OpsBase):
    """all and any; the numeric reductions join them here."""

    __slots__ = ()

    def all(self, dim: int | None = None) -> Any:
        """Whether every element of every leaf is true (a bool), or a TensorDict reduced over batch `dim`."""
        if dim is None:
            return all(bool(leaf.all()) for leaf in self._leaf_list())
        return self._along(torch.all, dim)

    def any(self, dim: int | None = None) -> Any:
        """Whether any element of any leaf is true (a bool), or a TensorDict reduced over batch `dim`."""
        if dim is None:
            return any(bool(leaf.any()) for leaf in self._leaf_list())
        return self._along(torch.any, dim)

    def _along(self, fn: Any, dim: int) -> Self:
        old, names = self.batch_size, self._dim_names()
        at = as_dim(dim, len(old))
        new = torch.Size((*old[:at], *old[at + 1 :]))
        return self._reduce(lambda t: fn(t, dim=at), new, names and (*names[:at], *names[at + 1 :]), keep_values=True)
