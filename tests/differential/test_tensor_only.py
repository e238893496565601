"""Classes whose fields are tensors: annotations, mappings and deletion."""

from __future__ import annotations

from .programs import check, programs

START = """
from collections import UserDict
class Long(TensorClass["tensor_only"]):
    a: torch.LongTensor
    b: torch.IntTensor = None
class Typed(TensorClass["tensor_only"]):
    c: TensorDict[str, torch.Tensor]
class Loose(TensorClass["tensor_only"]):
    c: TensorDict
    d: torch.Tensor = None
"""


@programs("""
Long(a=torch.zeros(3).long(), batch_size=[3]).a
---
Long(a=[1, 2, 3], batch_size=[3]).a
---
type(Typed(c={"x": torch.zeros(3)}, batch_size=[3]).c).__name__
---
Typed(c=UserDict({"x": torch.zeros(3)}), batch_size=[3]).c
---
Loose(c=UserDict({"x": torch.zeros(3)}), batch_size=[3]).c["x"]
---
# as since 0.15
t = Loose(c={"x": torch.zeros(3)}, batch_size=[3])
del t.c
hasattr(t, "c")
---
# as since 0.15
t = Typed(c={"x": torch.zeros(3)}, batch_size=[3])
del t.c
t.c
---
Loose(c={"x": torch.zeros(3)}, batch_size=[3]).d
---
TensorClass["tensor_only", "autocast"]("x")
---
class Both(TensorClass["tensor_only", "autocast"]):
    a: torch.Tensor
Both
---
class Plain:
    a: torch.Tensor
tensorclass(Plain, tensor_only=True, autocast=True)
""")
def test_tensor_only(source: str) -> None:
    check(START + source)
