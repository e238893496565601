"""Writes through one value of a stack, copies of values, names of values, and fields that were deleted."""

from __future__ import annotations

import copy
import pickle
import threading

import pytest
import torch

from tdstore import NonTensorData, NonTensorStack, TensorDict, UnbatchedTensor, tensorclass
from tdstore.errors import BatchSizeError

from .programs import check, programs


@programs("""
s = NonTensorStack("x", "z")
s[0][True] = NonTensorStack("y")
s.tolist()
---
s = NonTensorStack("x")
s[0][True] = NonTensorStack("y")
s.tolist()
---
s = NonTensorStack("a", "b")
s[0].update_(NonTensorData("q"))
s.tolist()
---
s = NonTensorStack("a", "b")
s[0].update(NonTensorData("q"))
s.tolist()
---
s = NonTensorStack("a", "b")
s[0].data = "q"
s.tolist()
---
s = NonTensorStack(NonTensorStack("a", "b"), NonTensorStack("c", "d"))
s[0][1].data = "q"
s.tolist()
---
td = TensorDict({"s": NonTensorStack("a", "b")}, [2])
td.get("s")[0].update_(NonTensorData("q"))
list(td["s"])
---
td = TensorDict({"s": NonTensorStack("a", "b")}, [2])
td[0].get("s").update_(NonTensorData("q"))
list(td["s"])
---
td = TensorDict({"s": NonTensorStack("a", "b")}, [2])
td[0].set_("s", "z")
td[0]["s"] = "k"
list(td["s"])
---
[e.data for e in NonTensorStack("a", "b").tensordicts]
---
NonTensorStack("a", "b").stack_dim
---
TensorDict({"z": NonTensorStack("a", "b", "c")}, [3, 4])
---
TensorDict({"z": NonTensorStack("a", "b")}, [3])
---
TensorDict({}, [3, 4]).set("z", NonTensorStack("a", "b", "c"))
---
td = TensorDict({"o": NonTensorData({"x": {"y": [1]}})}, [])
c = td.clone()
c["o"]["x"]["y"].append(2)
(td["o"], c["o"])
---
o = NonTensorStack({"x": 1}, {"x": 2})
c = o.clone()
c.tolist()[0]["x"] = 3
(o.tolist(), c.tolist())
---
td = TensorDict({"o": NonTensorData([1])}, [])
td.to_tensordict()["o"].append(4)
td["o"]
---
td = TensorDict({"s": "a", "r": NonTensorStack("a", "b")}, [2], names=["t"])
[v.names for v in td.values()] + [v.names for _, v in td.items()]
---
td = TensorDict({"n": {"s": "a"}}, [2], names=["t"])
[v.names for _, v in td.items(True)]
---
td = TensorDict(a=torch.ones(3), batch_size=[3]).lock_()
t = torch.ones(3)
[x.is_locked for x in (td * 2, td + td, -td, td + t, t * td, td.pow(t), td * torch.tensor(2.0))]
---
td = TensorDict(a=torch.ones(3), batch_size=[3]).lock_()
made = (td.clamp(0, 1), td > 0, td == 0, td.softmax(0), td.maximum(torch.ones(3)), td + torch.ones(2, 3))
[x.is_locked for x in made]
---
td = TensorDict({"u": UnbatchedTensor(torch.zeros(2)), "a": torch.zeros(3)}, [3])
td.fill_("u", 3.0)
td["u"].tolist()
---
td = TensorDict({"u": UnbatchedTensor(torch.zeros(2)), "a": torch.zeros(3)}, [3])
td.update_({"u": torch.ones(2)})
td["u"].tolist()
---
m = torch.nn.Linear(2, 1)
(TensorDict.from_module(m).is_locked, TensorDict.from_module(m, as_module=True).is_locked)
---
m = torch.nn.Linear(2, 1)
(TensorDict.from_module(m, lock=True).is_locked, TensorDict.from_modules(m, m).is_locked)
""")
def test_writes_and_copies(source: str) -> None:
    check(source)


@programs("""
@tensorclass
class C:
    a: torch.Tensor
    c: torch.Tensor = None
    s: str = "x"
c = C(torch.zeros(2), torch.ones(2), batch_size=[2])
del c.c
found = [sorted(c.keys()), c.clone().c, c[0].c]
c.c = torch.ones(2)
found + [c.c]
---
# as since 0.15
class C(TensorClass["tensor_only"]):
    a: torch.Tensor
    c: torch.Tensor = None
c = C(torch.zeros(2), torch.ones(2), batch_size=[2])
del c.c
[hasattr(c, "c"), sorted(c.keys())]
---
# as since 0.15
@tensorclass
class C:
    a: torch.Tensor
    c: torch.Tensor = None
c = C(torch.zeros(2), batch_size=[2])
c.__delattr__("c")
---
class T(TypedTensorDict):
    a: torch.Tensor
x = lazy_stack([T(a=torch.zeros(2), batch_size=[2]), T(a=torch.ones(2), batch_size=[2])])
[type(x).__name__, type(x[0]).__name__, x.batch_size, x["a"], isinstance(x, LazyStackedTensorDict)]
---
class T(TypedTensorDict):
    a: torch.Tensor
x = LazyStackedTensorDict.lazy_stack([T(a=torch.zeros(2), batch_size=[2]), T(a=torch.ones(2), batch_size=[2])], 1)
[type(x).__name__, type(x[:, 0]).__name__, x.batch_size, x["a"]]
""")
def test_fields_and_stacks_of_classes(source: str) -> None:
    check(source)


@tensorclass
class Note:
    a: torch.Tensor
    text: str = "x"


def test_a_deleted_field_is_none_until_it_is_set() -> None:
    note = Note(torch.zeros(2), batch_size=[2])
    del note.text
    assert note.text is None and note[0].text is None  # there a KeyError before 0.15
    note.text = "y"
    assert note.text == "y"


def test_a_value_shown_at_several_rows_is_not_written_through_one() -> None:
    wide = NonTensorStack("a", "b").expand(2, 2)
    wide[0, 0].data = "z"
    assert wide.tolist() == [["a", "b"], ["a", "b"]]


def test_an_element_travels_without_its_stack() -> None:
    stack = NonTensorStack("a", "b")
    for made in (copy.deepcopy(stack[0]), copy.copy(stack[0]), pickle.loads(pickle.dumps(stack[0]))):
        made.data = "q"
        assert type(made) is NonTensorData and made.data == "q" and stack.tolist() == ["a", "b"]


def test_what_cannot_be_copied_is_in_the_clone_itself() -> None:
    lock = threading.Lock()  # the peer refuses the clone
    td = TensorDict({"lock": NonTensorData(lock), "f": NonTensorData(check)}, [])
    assert td.clone()["lock"] is lock and td.clone()["f"] is check


def test_an_unbatched_tensor_of_another_shape_is_refused() -> None:
    td = TensorDict({"u": UnbatchedTensor(torch.zeros(2)), "a": torch.zeros(3)}, [3])
    with pytest.raises(BatchSizeError, match="'u'"):
        td.update_({"u": torch.ones(5), "a": torch.ones(3)})
    assert td["a"].sum() == 0
