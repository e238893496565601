"""Padding: negative amounts, values, identity, and what is refused."""

from __future__ import annotations

from .programs import check, programs


@programs("""
pad(TensorDict({"x": torch.arange(3)}, [3]), [0])
---
pad(TensorDict({"x": torch.arange(3)}, [3]), [0, 1, 0, 1])
---
pad(TensorDict({"x": torch.arange(3)}, [3]), [-1, 1])
---
pad(TensorDict({"x": torch.arange(3)}, [3]), [-1, -1])
---
pad(TensorDict({"x": torch.arange(3)}, [3]), [-2, -1])
---
pad(TensorDict({"x": torch.arange(3)}, [3]), [-3, -1])
---
pad(TensorDict({"x": torch.arange(3)}, [3]), [-4, 1])
---
pad(TensorDict({"x": torch.arange(3)}, [3]), [-4, 4])
---
pad(TensorDict({"x": torch.arange(3)}, [3]), [-3, -1], safe=False)
---
pad(TensorDict({"x": torch.arange(3)}, [3]), [-4, 1], safe=False)
---
pad(TensorDict({"x": torch.arange(3)}, [3]), [-4, 4], safe=False)
---
td = TensorDict({"x": torch.arange(3)}, [3])
try: pad(td, [-3, -1], inplace=True)
except RuntimeError as e: pass
td
---
td = TensorDict({"x": torch.arange(3)}, [3])
r = pad(td, [-1, 2], inplace=True)
(r is td, td)
---
td = TensorDict({"x": torch.arange(6).view(2,3), "n": {"y": torch.ones(2,3,2)}}, [2,3])
n = td["n"]
r = pad(td, [1, 0, -1, 2], inplace=True, value=5)
(r is td, td, td["n"] is n)
---
pad(TensorDict({"x": torch.arange(3)}, [3]), [])
---
pad(TensorDict({"x": torch.arange(3)}, [3]), [0, 0])
---
pad(TensorDict({"x": torch.arange(3)}, [3]), (1, 1))
---
pad(TensorDict({"x": torch.arange(3)}, [3]), torch.Size([1, 1]))
---
pad(TensorDict({"x": torch.arange(3)}, []), [1, 1])
---
pad(TensorDict({"x": torch.arange(3)}, []), [])
---
pad(NonTensorStack("a", "b"), [1, 1])
---
pad(NonTensorStack("a", "b"), [1, 1]).tolist()
---
pad(NonTensorStack("a", "b"), [-1, 1]).tolist()
---
pad(NonTensorStack("a", "b"), [-1, 0]).tolist()
---
pad(NonTensorStack("a", "b"), [-3, 0]).tolist()
---
pad(NonTensorStack("a", "b"), [1])
---
pad(NonTensorStack("a", "b"), [1, 1, 1, 1])
---
s = NonTensorStack("a", "b")
r = pad(s, [1, 1], inplace=True)
(r is s, s.tolist(), s.batch_size)
---
s = NonTensorStack("a", "b")
r = pad(s, [-1, 1], inplace=True)
(r is s, s.tolist(), s.batch_size)
---
td = TensorDict({"s": NonTensorStack("a", "b"), "x": torch.ones(2)}, [2])
s = td.get("s")
r = pad(td, [1, 1], inplace=True)
(r is td, td.get("s") is s, td["s"], td)
---
td = TensorDict({"s": NonTensorStack("a", "b"), "x": torch.ones(2)}, [2])
pad(td, [1, 1])
---
td = TensorDict({"n": {"s": NonTensorStack("a", "b")}, "x": torch.ones(2)}, [2])
pad(td, [1, 1], value=2.0)
---
pad(NonTensorData("a", [2]), [0, 1], inplace=True)
---
td = TensorDict({"s": "a", "x": torch.ones(2)}, [2])
pad(td, [0, 1]).batch_size
---
td = TensorDict({"x": torch.ones(2)}, [2]).lock_()
r = pad(td, [0, 1])
(r, r.is_locked)
---
td = TensorDict({"x": torch.ones(2)}, [2]).lock_()
pad(td, [0, 1], inplace=True)
---
l = lazy_stack([TensorDict({"x": torch.ones(2)}, [2]), TensorDict({"x": torch.zeros(2)}, [2])])
pad(l, [1, 0, 0, 1])
---
l = lazy_stack([TensorDict({"x": torch.ones(2)}, [2]), TensorDict({"x": torch.zeros(2)}, [2])])
pad(l, [1, 0])
---
l = lazy_stack([TensorDict({"x": torch.ones(2)}, [2]), TensorDict({"x": torch.zeros(2)}, [2])])
pad(l, [-1, 0, -1, 0])
---
l = lazy_stack([TensorDict({"x": torch.ones(2)}, [2]), TensorDict({"x": torch.zeros(2)}, [2])])
r = pad(l, [1, 0], inplace=True)
(r is l, l.batch_size)
---
@tensorclass
class C:
    x: torch.Tensor
c = C(x=torch.arange(3), batch_size=[3])
r = pad(c, [1, 1], inplace=True)
(r is c, c.x, c.batch_size)
---
@tensorclass
class C:
    x: torch.Tensor
c = C(x=torch.arange(3), batch_size=[3])
pad(c, [1])
---
td = TensorDict({"x": torch.arange(3)}, [3]).to_h5(tmp+"/a.h5")
pad(td, [-1, 1])
---
td = TensorDict({"x": torch.arange(3.0)}, [3]).memmap_(tmp+"/a")
pad(td, [-1, 1])
---
td = TensorDict({"x": torch.arange(3, dtype=torch.bool)}, [3])
pad(td, [1, 1], value=1)
---
td = TensorDict({"x": torch.arange(3)}, [3])
pad(td, [1, 1], value=1.5)
---
td = TensorDict({"x": torch.arange(3)}, [3])
pad(tensordict=td, pad_size=[1, 1], value=1)
---
td = TensorDict({"x": torch.arange(3)}, [3])
td.pad([1,1])
---
td = TensorDict({"x": torch.arange(3)}, [3])
pad(td, [1.5, 1])
---
td = TensorDict({"x": torch.arange(3)}, [3])
pad(td, 1)
---
td = TensorDict({"x": torch.arange(3).to(torch.complex64)}, [3])
pad(td, [1, 1])
---
td = TensorDict({"x": torch.ones(3, requires_grad=True)}, [3])
pad(td, [1, 1])["x"].requires_grad
---
td = TensorDict({"n": TensorDict({"x": torch.ones(3,4)}, [3, 4])}, [3])
pad(td, [1, 1])
---
td = TensorDict({"n": {}}, [3])
pad(td, [1, 1])
---
torch.nn.functional.pad(TensorDict({"x": torch.arange(3)}, [3]), [1, 1])
---
pad_sequence([TensorDict({"a": torch.ones(i)}, [i]) for i in (1, 2)])
---
pad(NonTensorData("a", batch_size=[2]), [0, 1], inplace=True)
---
pad(NonTensorData("a", batch_size=[2]), [0, 1])
---
pad(NonTensorData("a", batch_size=[2]), [-1, 0])
---
pad(NonTensorData("a", batch_size=[2]), [-1, 0], inplace=True)
---
pad(NonTensorStack(NonTensorStack("a", "b"), NonTensorStack("c", "d")), [0, 1, 1, 0])
---
pad(NonTensorStack(NonTensorStack("a", "b"), NonTensorStack("c", "d")), [0, 0, 1, -1], inplace=True)
""")
def test_padding(source: str) -> None:
    check(source)
