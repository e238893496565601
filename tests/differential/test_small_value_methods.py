"""Methods of values: calls, conditions, sizes, writes."""

from __future__ import annotations

import torch

from tdstore import NonTensorData

from .programs import check, programs


@programs("""
NonTensorData("a").contiguous(canonical=True)
---
NonTensorData("a", batch_size=[2]).contiguous(canonical=True, inplace=True)
---
NonTensorStack("a", "b").contiguous(canonical=True)
---
NonTensorData(0).flatten(None, None).shape
---
NonTensorData(0).flatten(None, None)
---
NonTensorData(0).flatten()
---
NonTensorData(0, batch_size=[2, 3]).flatten(None, None)
---
NonTensorData(lambda x: x + 1)(3)
---
NonTensorData(print)
---
NonTensorData("a")(3)
---
NonTensorData(lambda x, y=2: x + y)(3, y=5)
---
NonTensorStack("a", "b", batch_size=[2])
---
NonTensorStack("a", "b", batch_size=[2]).batch_size
---
NonTensorStack(NonTensorData(["a"]), NonTensorData(["b"]), batch_size=[2])
---
NonTensorStack("a", "b", batch_size=[3])
---
NonTensorStack(NonTensorStack("a", "b"), NonTensorStack("c", "d"), batch_size=[2, 2])
---
NonTensorStack("a", "b", stack_dim=0, batch_size=[2])
---
NonTensorStack("a", "b", device="cpu")
---
NonTensorStack("a", "b", names=["x"])
---
NonTensorStack("a", "b").where(torch.tensor([True, False]), NonTensorStack("c", "d"))
---
NonTensorStack("a", "b").where(torch.tensor([True, False]), NonTensorStack("c", "d"), pad=0)
---
o = NonTensorStack("x", "y")
r = NonTensorStack("a", "b").where(torch.tensor([True, False]), NonTensorStack("c", "d"), out=o, pad=0)
(r.tolist(), o.tolist(), r is o)
---
o = NonTensorStack("x", "y")
r = NonTensorStack("a", "b").where(torch.tensor([True, False]), NonTensorStack("c", "d"), out=o)
(r.tolist(), o.tolist(), r is o)
---
NonTensorData("a").where(torch.tensor(True), NonTensorData("b"))
---
NonTensorStack("a", "b").where(torch.tensor([True, False]), NonTensorData("b", batch_size=[2]))
---
torch.where(torch.tensor([True, False]), NonTensorStack("a", "b"), NonTensorStack("c", "d"))
---
NonTensorStack("a", "b").where(torch.tensor([True, True]), NonTensorStack("c", "d")).tolist()
---
s = NonTensorStack("x", "z")
s[0] = "w"
s.tolist()
---
s = NonTensorStack("x", "z")
s[:, None] = NonTensorStack(NonTensorStack("p"), NonTensorStack("q"))
s.tolist()
---
s = NonTensorStack("x", "z")
s[None] = NonTensorStack(NonTensorStack("p", "q"))
s.tolist()
---
s = NonTensorStack("x", "z")
s[torch.tensor([True, False])] = NonTensorStack("p")
s.tolist()
---
s = NonTensorStack("x", "z")
s[torch.tensor([True, False])] = "p"
s.tolist()
---
s = NonTensorStack("x", "z")
s[[1, 0]] = NonTensorStack("p", "q")
s.tolist()
---
s = NonTensorStack("x", "z")
s[:] = NonTensorStack("p", "q")
s.tolist()
---
s = NonTensorStack("x", "z")
s[...] = "p"
s.tolist()
""")
def test_methods_of_values(source: str) -> None:
    check(source)


def test_a_condition_chooses_rows() -> None:
    """The peer gives the first value back."""
    one, two = NonTensorData("a", [2]), NonTensorData("b", [2])
    assert one.where(torch.tensor([True, False]), two).tolist() == ["a", "b"]
    assert torch.where(torch.tensor(False), NonTensorData("a"), NonTensorData("b")).data == "b"
