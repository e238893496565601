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
