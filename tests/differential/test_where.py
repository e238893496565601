"""`where` where one side has no entries: nothing is lost in silence."""

from __future__ import annotations

from .programs import check, programs


@programs("""
td = TensorDict({"m": torch.tensor([[True], [False]]), "i": torch.arange(2), "f": torch.ones(2, 2, 3)}, [2])
mask = torch.tensor([True, False])
sides = ((td, td.empty()), (td.empty(), td))
[[x.where(mask, y, pad=p)[k] for k in "mif"] for p in (0, 2.5, True) for x, y in sides]
---
td = TensorDict({"n": {"m": torch.tensor([True, False])}, "f": torch.ones(2)}, [2])
[x.where(torch.tensor([True, False]), y, pad=1)["n", "m"] for x, y in ((td, td.select("f")), (td.select("f"), td))]
---
td = TensorDict({"a": torch.zeros(3)}, [3])
td.empty().where(torch.tensor([True, False, True]), td)
---
td = TensorDict({"a": torch.zeros(3)}, [3])
td.where(torch.tensor([True, False, True]), td.empty())
---
td = TensorDict({"a": torch.zeros(3)}, [3])
td.empty().where(torch.tensor([True, False, True]), td, pad=0)
---
td = TensorDict({"a": torch.zeros(3)}, [3])
td.empty().where(torch.tensor([True, False, True]), td.empty())
---
td = TensorDict({"a": torch.zeros(3)}, [3])
td.where(torch.tensor([True, False, True]), td.empty(), pad=1)
---
td = TensorDict({"a": torch.zeros(3), "n": {"b": torch.ones(3)}}, [3])
td.empty().where(torch.tensor([True, False, True]), td)
---
td = TensorDict({"a": torch.zeros(3), "n": {"b": torch.ones(3)}}, [3])
td.select("a").where(torch.tensor([True, False, True]), td)
---
td = TensorDict({"n": {"b": torch.ones(3)}}, [3])
o = TensorDict({"n": {}}, [3])
o.where(torch.tensor([True, False, True]), td)
---
td = lazy_stack([TensorDict({"a": torch.zeros(3)}, [3]) for _ in range(2)])
td.empty().where(torch.tensor([[True, False, True]]*2), td)
---
td = TensorDict({"a": torch.zeros(3)}, [3])
out = TensorDict({}, [3])
td.empty().where(torch.tensor([True, False, True]), td, out=out)
---
x, y = torch.zeros(3), torch.zeros(3)
td, other = (TensorDict({"a": t, "n": {"b": t + 1}}, [3]) for t in (x, torch.ones(3)))
nested, before = td["n"], td["n", "b"]
td.where(torch.tensor([True, False, True]), other, out=td, pad=0)
[x, before, td["a"], td["n", "b"], td["n"] is nested]
---
x = torch.zeros(3)
td, out = TensorDict({"a": x + 1}, [3]), TensorDict({"a": x}, [3])
r = td.where(torch.tensor([True, False, True]), td + 1, out=out)
[r is out, x, out["a"]]
---
x = torch.zeros(3)
td, out = TensorDict({"a": x + 1}, [3]), lazy_stack([TensorDict({"a": t}) for t in x.unbind()])
td.where(torch.tensor([True, False, True]), 5.0, out=out)
[x, out["a"]]
---
x = torch.ones(3, requires_grad=True)
out = TensorDict({"a": torch.zeros(3)}, [3])
TensorDict({"a": x}, [3]).where(torch.tensor([True, False, True]), 5.0, out=out)
out["a"].sum().backward()
x.grad
---
@tensorclass
class C:
    a: torch.Tensor = None
c = C(a=torch.zeros(3), batch_size=[3])
C(batch_size=[3]).where(torch.tensor([True, False, True]), c)
---
td = TensorDict({"a": torch.zeros(3)}, [3]).to_h5(tmp + "/a.h5")
TensorDict({}, [3]).where(torch.tensor([True, False, True]), td)
---
td = TensorDict({"a": torch.zeros(3)}, [3])
td.empty().to_h5(tmp + "/a.h5").where(torch.tensor([True, False, True]), td)
""")
def test_where(source: str) -> None:
    check(source)
