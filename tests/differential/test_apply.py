"""`apply`: where results go, and on which entries the function is called."""

from __future__ import annotations

from inspect import signature
from pathlib import Path

import pytest
import tensordict
import torch

from tdstore import TensorDict

from .programs import check, programs


@programs("""
td = TensorDict({"i": torch.arange(3)}, [3])
r = td.apply(lambda x: x.float(), out=td)
(r is td, td)
---
td = TensorDict({"i": torch.arange(3), "n": {"j": torch.arange(3)}}, [3])
n = td["n"]
r = td.apply(lambda x: x.float(), out=td)
(r is td, td, td["n"] is n)
---
td = TensorDict({"i": torch.arange(3), "n": {"j": torch.arange(3)}}, [3])
out = TensorDict({}, [3])
r = td.apply(lambda x: x.float(), out=out)
(r is out, out, td)
---
td = TensorDict({"i": torch.arange(3), "n": {"j": torch.arange(3)}}, [3])
out = TensorDict({"z": torch.zeros(3), "n": {"w": torch.ones(3)}}, [3])
n = out["n"]
r = td.apply(lambda x: x.float(), out=out)
(r is out, out, td, out["n"] is n)
---
td = TensorDict({"i": torch.arange(3), "n": {"j": torch.arange(3)}}, [3])
out = TensorDict({"i": torch.zeros(3), "n": {"j": torch.ones(3)}}, [3])
i = out["i"]
r = td.apply(lambda x: x.float(), out=out)
(r is out, out, out["i"] is i, i)
---
td = TensorDict({"i": torch.arange(3), "n": {"j": torch.arange(3)}}, [3])
out = TensorDict({"n": {"j": torch.ones(3)}}, [3]).lock_()
td.apply(lambda x: x.double(), out=out)
---
td = TensorDict({"i": torch.arange(3)}, [3])
td.apply(lambda x: x.float(), inplace=True)
td
---
td = TensorDict({"i": torch.arange(3)}, [3])
td.apply_(lambda x: x.float())
td
---
td = TensorDict({"i": torch.arange(3)}, [3]).lock_()
td.apply(lambda x: x.float(), inplace=True)
td
---
td = TensorDict({"i": torch.arange(3), "s": "x"}, [3])
out = TensorDict({}, [3])
td.apply(lambda x: x.float(), out=out)
out
---
td = TensorDict({"i": torch.arange(3)}, [3])
out = TensorDict({}, [3])
r = td.apply(lambda x: x.sum(), out=out, batch_size=[])
(r is out, out)
---
td = TensorDict({"i": torch.arange(3)}, [3])
out = TensorDict({}, [])
r = td.apply(lambda x: x.sum(), out=out)
(r is out, out)
---
td = TensorDict({"i": torch.arange(3)}, [3])
out = TensorDict({}, [4])
r = td.apply(lambda x: x+1, out=out)
out
---
td = TensorDict({"i": torch.arange(3)}, [3])
out = TensorDict({}, [3])
r = td.apply(lambda x: x + 1, out=out, inplace=True)
(r is out, r is td, out, td)
---
td = TensorDict({"i": torch.ones(2, 3)}, [2, 3])
out = lazy_stack([TensorDict({"i": torch.arange(3)}, [3]) for _ in range(2)])
r = td.apply(lambda x: x.float(), out=out)
(r is out, out)
---
td = TensorDict({"i": torch.ones(2, 3)}, [2, 3])
out = lazy_stack([TensorDict({}, [3]) for _ in range(2)])
r = td.apply(lambda x: x.float(), out=out)
(r is out, out)
---
@tensorclass
class C:
    i: torch.Tensor
c = C(i=torch.arange(3), batch_size=[3])
r = c.apply(lambda x: x.float(), out=c)
(r is c, c.i)
---
@tensorclass
class C:
    i: torch.Tensor
c = C(i=torch.arange(3), batch_size=[3])
d = C(i=torch.arange(3), batch_size=[3])
r = c.apply(lambda x: x.float(), out=d)
(r is d, d.i, c.i)
---
@tensorclass
class C:
    i: torch.Tensor
td = TensorDict(c=C(i=torch.arange(3), batch_size=[3]), batch_size=[3])
c = td["c"]
r = td.apply(lambda x: x.float(), out=td)
(r is td, td["c"] is c, td["c"].i, type(td["c"]).__name__)
---
class T(TypedTensorDict):
    i: torch.Tensor
c = T(i=torch.arange(3), batch_size=[3])
r = c.apply(lambda x: x.float(), out=c)
(r is c, c.i)
---
td = TensorDict({"i": torch.arange(3)}, [3]).to_h5(tmp+"/a.h5")
r = td.apply(lambda x: x.float() + 0.5, out=td)
(r is td, td["i"])
---
td = TensorDict({"i": torch.ones(3)}, [3])
out = TensorDict({"i": torch.arange(3)}, [3]).to_h5(tmp+"/a.h5")
r = td.apply(lambda x: x.float() + 0.5, out=out)
(r is out, out["i"])
---
td = TensorDict({"i": torch.ones(3)}, [3])
out = TensorDict({}, [3]).to_h5(tmp+"/a.h5")
r = td.apply(lambda x: x.float() + 0.5, out=out)
(r is out, out["i"])
---
p = TensorDictParams(TensorDict({"i": torch.ones(3)}, [3]))
r = p.apply(lambda x: x + 1, out=p)
(r is p, type(p["i"]).__name__, p["i"])
---
p = TensorDictParams(TensorDict({"i": torch.ones(3)}, [3]))
out = TensorDict({}, [3])
r = p.apply(lambda x: x.data + 1, out=out)
(r is out, type(out["i"]).__name__, out["i"])
---
p = TensorDictParams(TensorDict({"i": torch.ones(3)}, [3]))
td = TensorDict({"i": torch.ones(3)}, [3])
r = td.apply(lambda x: x.data + 1, out=p.data)
(type(r).__name__, p["i"])
---
td = TensorDict({"i": torch.arange(3)}, [3])
out = TensorDict({}, [3], device="cpu")
r = td.apply(lambda x: x.float(), out=out)
out
---
td = TensorDict({"i": torch.arange(3)}, [3], names=["x"])
out = TensorDict({}, [3])
r = td.apply(lambda x: x.float(), out=out)
out
---
td = TensorDict({"i": torch.arange(3)}, [3])
out = TensorDict({"i": torch.zeros(3)}, [3])
r = td.apply(lambda x, y: x + y, out, out=out)
(r is out, out)
---
td = TensorDict({"i": torch.arange(3), "n": {}}, [3])
out = TensorDict({}, [3])
r = td.apply(lambda x: x.float(), out=out)
(r is out, out)
---
td = TensorDict({"i": torch.arange(3), "n": {}}, [3])
out = TensorDict({}, [3])
r = td.apply(lambda x: x.float(), out=out, filter_empty=False)
(r is out, out)
---
td = TensorDict({"a": torch.zeros(3), "s": "x", "l": ["p","q","r"]}, [3])
seen = []
r = td.apply(lambda x: seen.append(type(x).__name__), is_leaf=is_leaf_nontensor, filter_empty=True)
(r, seen)
---
td = TensorDict({"a": torch.zeros(3), "s": "x", "l": ["p","q","r"]}, [3])
seen = []
r = td.apply(lambda x: seen.append(type(x).__name__), is_leaf=is_leaf_nontensor)
(r, seen)
---
td = TensorDict({"a": torch.zeros(3), "s": "x", "l": ["p","q","r"]}, [3])
seen = []
r = td.apply(lambda x: seen.append(type(x).__name__), is_leaf=is_leaf_nontensor, filter_empty=False)
(r, seen)
---
td = TensorDict({"a": torch.zeros(3), "s": "x", "l": ["p","q","r"]}, [3])
r = td.apply(lambda x: x, is_leaf=is_leaf_nontensor)
r
---
td = TensorDict({"a": torch.zeros(3), "s": "x", "l": ["p","q","r"]}, [3])
r = td.apply(lambda x: x + 1 if isinstance(x, torch.Tensor) else None, is_leaf=is_leaf_nontensor)
r
---
td = TensorDict({"a": torch.zeros(3), "s": "x", "l": ["p","q","r"]}, [3])
new = NonTensorData("new", batch_size=[3])
td.apply(lambda x: x + 1 if isinstance(x, torch.Tensor) else new, is_leaf=is_leaf_nontensor)
---
td = TensorDict({"a": torch.zeros(3), "n": {"s": "x", "b": torch.ones(3)}}, [3])
r = td.apply(lambda x: x + 1 if isinstance(x, torch.Tensor) else None, is_leaf=is_leaf_nontensor)
r
---
td = TensorDict({"a": torch.zeros(3), "n": {"s": "x"}}, [3])
r = td.apply(lambda x: x + 1 if isinstance(x, torch.Tensor) else None, is_leaf=is_leaf_nontensor)
r
---
td = TensorDict({"a": torch.zeros(3), "n": {"s": "x"}}, [3])
r = td.apply(lambda x: x + 1 if isinstance(x, torch.Tensor) else None, is_leaf=is_leaf_nontensor, filter_empty=True)
r
---
td = TensorDict({"n": {"s": "x"}}, [3])
r = td.apply(lambda x: None, is_leaf=is_leaf_nontensor, filter_empty=True)
r
---
td = TensorDict({"a": torch.zeros(3), "n": {"s": "x"}}, [3])
keys = []
td.named_apply(lambda n, x: keys.append(n), is_leaf=is_leaf_nontensor)
keys
---
td = TensorDict({"a": torch.zeros(3), "n": {"s": "x"}}, [3])
keys = []
td.named_apply(lambda n, x: keys.append(n), is_leaf=is_leaf_nontensor, nested_keys=True)
keys
---
td = TensorDict({"a": torch.zeros(3), "n": {"b": torch.ones(3)}}, [3])
seen = []
r = td.apply(lambda x: seen.append(type(x).__name__) or x, is_leaf=lambda c: True)
(r, seen)
---
td = TensorDict({"a": torch.zeros(3)}, [3])
td.apply(lambda x: x, checked=True)
---
td = TensorDict({"a": torch.zeros(3), "s": "x"}, [3])
o = td.clone()
seen = []
r = td.apply(lambda x, y: seen.append((type(x).__name__, type(y).__name__)) or x, o, is_leaf=is_leaf_nontensor)
(r, seen)
---
td = TensorDict({"a": torch.zeros(3), "s": "x"}, [3])
o = td.select("a")
seen = []
fn = lambda x, y: seen.append((type(x).__name__, type(y).__name__)) or x
(td.apply(fn, o, is_leaf=is_leaf_nontensor, default=None), seen)
---
td = TensorDict({"a": torch.zeros(3), "s": "x"}, [3])
o = td.select("a")
td.apply(lambda x, y: x, o, is_leaf=is_leaf_nontensor)
---
td = lazy_stack([TensorDict({"a": torch.zeros(3), "s": "x"}, [3]), TensorDict({"a": torch.zeros(3), "s": "y"}, [3])])
seen = []
r = td.apply(lambda x: seen.append(type(x).__name__) or x, is_leaf=is_leaf_nontensor)
(r, seen)
---
td = lazy_stack([TensorDict({"a": torch.zeros(3), "s": "x"}, [3]), TensorDict({"a": torch.zeros(3), "s": "y"}, [3])])
r = td.apply(lambda x: None, is_leaf=is_leaf_nontensor, filter_empty=True)
r
---
@tensorclass
class C:
    a: torch.Tensor
    s: str
c = C(a=torch.zeros(3), s="x", batch_size=[3])
seen = []
r = c.apply(lambda x: seen.append(type(x).__name__) or x, is_leaf=is_leaf_nontensor)
(r.a, r.s, seen)
---
@tensorclass
class C:
    a: torch.Tensor
    s: str
c = C(a=torch.zeros(3), s="x", batch_size=[3])
c.apply(lambda x: None, is_leaf=is_leaf_nontensor, filter_empty=True)
---
@tensorclass
class C:
    a: torch.Tensor
    s: str
td = TensorDict(c=C(a=torch.zeros(3), s="x", batch_size=[3]), batch_size=[3])
seen = []
r = td.apply(lambda x: seen.append(type(x).__name__) or x, is_leaf=is_leaf_nontensor)
(seen, type(r["c"]).__name__)
---
td = TensorDict({"a": torch.zeros(3), "s": "x"}, [3])
seen = []
td.apply_(lambda x: seen.append(type(x).__name__) or x, is_leaf=is_leaf_nontensor)
seen
---
td = TensorDict({"a": torch.zeros(3), "s": "x"}, [3])
td.apply(lambda x: x, call_on_nested=True)
---
td = TensorDict({"a": torch.zeros(3), "s": "x", "n": {"b": torch.ones(3)}}, [3])
seen = []
td.apply(lambda x: seen.append(type(x).__name__) or x, call_on_nested=True)
seen
---
td = TensorDict({"a": torch.zeros(3), "s": "x"}, [3])
td.apply(lambda x: None)
---
td = TensorDict({"a": torch.zeros(3), "s": "x"}, [3])
td.apply(lambda x: None, filter_empty=True)
---
td = TensorDict({"a": torch.zeros(3), "s": "x"}, [3])
td.apply(lambda x: None, filter_empty=False)
---
td = TensorDict({"s": "x"}, [3])
td.apply(lambda x: None)
---
td = TensorDict({"s": "x"}, [3])
td.apply(lambda x: None, filter_empty=True)
---
td = TensorDict({"s": "x", "n": {"t": "z"}}, [3])
td.apply(lambda x: x, filter_empty=True)
---
td = TensorDict({"n": {"t": "z"}, "m": {}}, [3])
td.apply(lambda x: x, filter_empty=True)
---
td = TensorDict({"n": {"t": "z"}, "m": {}}, [3])
td.apply(lambda x: x)
""")
def test_apply(source: str) -> None:
    check(source)


def test_a_locked_out_keeps_its_leaves() -> None:
    """The peer refuses."""
    out = TensorDict(i=torch.zeros(3), batch_size=[3]).lock_()
    leaf = out["i"]
    assert TensorDict(i=torch.arange(3), batch_size=[3]).apply(lambda x: x.double() + 1, out=out) is out
    assert out["i"] is leaf
    assert leaf.tolist() == [1.0, 2.0, 3.0]


@pytest.mark.parametrize("rows", [3, 5000])
def test_a_stored_out_takes_other_dtypes(tmp_path: Path, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the results would go in blocks."""
    monkeypatch.setattr("tdstore.container.storage.block_writer.row_ranges", lambda n, size: [(0, 2), (2, n)])
    stored = TensorDict(i=torch.arange(rows), batch_size=[rows]).to_h5(tmp_path / "a.h5")
    assert stored.apply(lambda x: x.float() + 0.5, out=stored) is stored
    assert stored["i"].dtype is torch.float32
    assert stored["i"][:2].tolist() == [0.5, 1.5]
    stored.apply(lambda x: x + 1, out=stored)
    assert stored["i"][-1] == rows + 0.5


def test_named_apply_has_the_parameters_of_apply() -> None:
    named, plain = (list(signature(getattr(TensorDict, name)).parameters.values()) for name in ("named_apply", "apply"))
    assert [p for p in named if p.name != "nested_keys"] == plain
    theirs = signature(tensordict.TensorDict.named_apply).parameters
    assert {p.name for p in named} >= set(theirs) - {"constructor_kwargs"}


@pytest.mark.parametrize(
    "call", ["apply(fn, inplce=True)", "named_apply(fn, inplce=True)", "apply_(fn, non_blockin=1)"]
)
def test_misspelt_keywords_are_refused(call: str) -> None:
    with pytest.raises(TypeError, match="unexpected keyword"):
        eval(f"td.{call}", {"td": TensorDict(i=torch.zeros(3)), "fn": lambda *x: x[-1]})
