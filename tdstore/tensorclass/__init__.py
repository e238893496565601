"""Classes with named fields over a container: `@tensorclass` and `TensorClass`.

The values that are no tensors come with them, since code imports those from here.
"""

from __future__ import annotations

from tdstore.container.values.nontensor import MetaData, NonTensorData, NonTensorStack
from tdstore.tensorclass.base import TensorClass
from tdstore.tensorclass.making import from_dataclass, is_tensorclass, tensorclass
from tdstore.tensordicts.kinds import is_non_tensor

__all__ = [
    "MetaData",
    "NonTensorData",
    "NonTensorStack",
    "TensorClass",
    "from_dataclass",
    "is_non_tensor",
    "is_tensorclass",
    "tensorclass",
]
