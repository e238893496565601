"""The module of parameters, under the path that code imports it from."""

from __future__ import annotations

from tdstore.tensordicts.params import TensorDictParams

__all__ = [
    "TensorDictParams",
]
