"""A TensorDict is a mutable mapping, and what `td[key]` gives for values per row is a list to pytrees."""

from __future__ import annotations

from .programs import check, programs

START = """
import collections.abc as C
import torch.utils._pytree as pt
@tensorclass
class T:
    a: torch.Tensor
class Y(TypedTensorDict):
    a: torch.Tensor
td = TensorDict({"a": torch.zeros(3)}, [3])
s = TensorDict({"s": NonTensorStack("a", "b"), "x": torch.zeros(2)}, [2])
deep = TensorDict({"s": NonTensorStack.from_list([["a", "b"], ["c", "d"]])}, [2, 2])
lazy = lazy_stack([TensorDict({"s": f"t{i}", "x": torch.zeros(i + 1)}) for i in range(2)])
"""


@programs("""
[isinstance(td, kind) for kind in (C.MutableMapping, C.Mapping, dict)]
---
isinstance(lazy, C.MutableMapping)
---
isinstance(T(a=torch.zeros(3), batch_size=[3]), C.MutableMapping)
---
isinstance(Y(a=torch.zeros(3), batch_size=[3]), C.MutableMapping)
---
isinstance(NonTensorData("a"), C.MutableMapping)
---
isinstance(TensorDictParams(td.clone()), C.MutableMapping)
---
isinstance(PersistentTensorDict.from_dict({"a": torch.zeros(3)}, tmp + "/a.h5"), C.MutableMapping)
---
[issubclass(c, C.MutableMapping) for c in (TensorDict, TensorDictBase, LazyStackedTensorDict, PersistentTensorDict)]
---
net = torch.nn.Sequential(torch.nn.Linear(2, 2))
str(net.load_state_dict(TensorDict.from_module(net).data.flatten_keys(".")))
---
net = torch.nn.Sequential(torch.nn.Linear(2, 2))
net.load_state_dict((TensorDict.from_module(net).data * 0).flatten_keys("."))
net[0].weight.sum().item()
---
TensorDict[str, torch.Tensor]({"a": 1})
---
def f(x: TensorDict[str, torch.Tensor], y: "LazyStackedTensorDict[str, int]") -> TensorDictBase[str, torch.Tensor]:
    return x
f(td, None)
---
TensorDict[str, torch.Tensor].__args__
---
{**td}
---
(lambda **k: sorted(k))(**td)
---
match td:
    case {"a": found}:
        got = found
got
---
td.update(TensorDict({"n": TensorDict({"b": torch.ones(3)}, [3])}, [3]))
---
two = TensorDict({"n": {"b": torch.zeros(3), "c": torch.zeros(3)}}, [3])
two.update({"n": TensorDict({"b": torch.ones(3)}, [3])}, is_leaf=lambda kind: False)
---
both = lazy_stack([td, td.clone()])
(both == both.clone()).all()
---
both = lazy_stack([td, td.clone()])
both[0] = td + 1
both
---
td[0] = TensorDict({"a": torch.tensor(5.0)})
td
""")
def test_mappings(source: str) -> None:
    check(START + source)


@programs("""
pt.tree_leaves(s["s"])
---
pt.tree_map(lambda x: x + "!", s["s"])
---
pt.tree_leaves(deep["s"])
---
pt.tree_leaves(lazy["s"])
---
pt.tree_structure(s["s"]).num_leaves
---
[str(s["s"]), repr(s["s"]), f"{s['s']}", str(deep["s"]), repr(lazy["s"])]
---
s["s"] == ["a", "b"]
---
s["s"][0] = "z"
(s["s"], s.get("s").tolist(), pt.tree_leaves(s["s"]))
---
pt.tree_map_with_path(lambda path, x: len(path), s["s"])
---
str(s["s"][:1])
""")
def test_linked_lists(source: str) -> None:
    check(START + source)
