"""`with td.flatten(...)` and `with td.unflatten(...)`: what is set inside has the old shape afterwards."""

from __future__ import annotations

from .programs import check, programs


@programs("""
td = TensorDict({"a": torch.zeros(6)}, [6])
with td.unflatten(0, (2, 3)) as v:
    v["b"] = torch.ones(2, 3)
td, v
---
td = TensorDict({"a": torch.zeros(2, 6, 3)}, [2, 6])
with td.unflatten(1, (2, 3)) as v:
    v["b"] = torch.ones(2, 2, 3)
    v["n"] = {"x": torch.zeros(2, 2, 3, 5)}
    del v["a"]
td
---
td = TensorDict({"a": torch.zeros(2, 6, 3), "n": {"c": torch.zeros(2, 6)}}, [2, 6], names=["x", "y"])
with td.unflatten(-1, (2, 3)) as v:
    v["n", "b"] = torch.ones(2, 2, 3)
td
---
td = TensorDict({"a": torch.zeros(6), "s": "x"}, [6])
with td.unflatten(dim=0, unflattened_size=(2, 3)) as v:
    v["a"] = v["a"] + 1
td
---
td = TensorDict({"a": torch.zeros(6)}, [6]).lock_()
with td.unflatten(0, (2, 3)) as v:
    v["a"].fill_(1)
td
---
td = TensorDict({"a": torch.zeros(6)}, [6]).lock_()
with td.unflatten(0, (2, 3)) as v:
    v["b"] = torch.ones(2, 3)
td
---
td = TensorDict({"a": torch.zeros(6)}, [6])
with td.unflatten(0, (6,)) as v:
    v["b"] = torch.ones(6)
td
---
td = lazy_stack([TensorDict({"a": torch.zeros(6) + i}, [6]) for i in range(2)])
with td.unflatten(1, (2, 3)) as v:
    v["b"] = torch.ones(2, 2, 3)
td
---
td = lazy_stack([TensorDict({"a": torch.zeros(6) + i}, [6]) for i in range(4)])
with td.unflatten(0, (2, 2)) as v:
    v["b"] = torch.ones(2, 2, 6)
td
---
td = lazy_stack([TensorDict({"a": torch.zeros(6) + i}, [6]) for i in range(2)])
with td.flatten(0, 1) as v:
    v["b"] = torch.ones(12)
td
---
td = TensorDict({"a": torch.zeros(6), "t": lazy_stack([TensorDict({"z": torch.zeros(1)}) for _ in range(6)])}, [6])
with td.unflatten(0, (2, 3)) as v:
    v["b"] = torch.ones(2, 3)
td
---
@tensorclass
class C:
    a: torch.Tensor
    b: torch.Tensor = None
c = C(a=torch.zeros(6), batch_size=[6])
with c.unflatten(0, (2, 3)) as v:
    v.b = torch.ones(2, 3)
c.b, c.batch_size, c.a
---
class C(TypedTensorDict):
    a: torch.Tensor
c = C(a=torch.zeros(6), batch_size=[6])
with c.unflatten(0, (2, 3)) as v:
    v["b"] = torch.ones(2, 3)
c["b"], c.batch_size, c.a
---
td = TensorDict({"a": torch.zeros(6)}, [6]).to_h5(tmp + "/a.h5")
with td.unflatten(0, (2, 3)) as v:
    v["b"] = torch.ones(2, 3)
td["b"]
---
td = TensorDict({"a": torch.zeros(6)}, [6]).memmap_(tmp + "/a")
with td.unflatten(0, (2, 3)) as v:
    v["a"].fill_(1)
td["a"]
---
td = TensorDictParams(TensorDict({"a": torch.zeros(6)}, [6]))
with td.unflatten(0, (2, 3)) as v:
    x = v["a"]
x
""")
def test_what_is_set_inside_comes_back(source: str) -> None:
    check(source)
