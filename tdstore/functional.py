"""Functions of several TensorDicts, under the path that code imports them from."""

from __future__ import annotations

from tdstore.container.functions.merge import merge_tensordicts
from tdstore.container.functions.padding import dense_stack_tds, pad, pad_sequence, unpad_sequence
from tdstore.convert.objects.python import make_tensordict

__all__ = [
    "dense_stack_tds",
    "make_tensordict",
    "merge_tensordicts",
    "pad",
    "pad_sequence",
    "unpad_sequence",
]
