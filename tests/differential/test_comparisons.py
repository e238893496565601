"""Comparisons of TensorDicts some of whose entries are not tensors."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tdstore import NonTensorData, TensorDict, assert_close

from .programs import check, programs


@programs("""
td = TensorDict({"a": torch.zeros(3), "s": "hello"}, [3])
td == 0
---
td = TensorDict({"a": torch.zeros(3), "s": "hello"}, [3])
(td == 0).all()
---
td = TensorDict({"a": torch.zeros(3), "s": "hello"}, [3])
(td != 0)
---
td = TensorDict({"a": torch.zeros(3), "s": "hello"}, [3])
(td != 0).any()
---
td = TensorDict({"a": torch.zeros(3), "s": "hello"}, [3])
td == torch.zeros(())
---
td = TensorDict({"a": torch.zeros(3), "s": ["a","b","c"]}, [3])
((td == 0).all(), (td == 0).any(), (td != 0).any(), (td != 0).all())
---
td = TensorDict({"a": torch.zeros(3), "n": {"s": ["a","b","c"]}}, [3])
((td == 0).all(), (td == 0).any(), (td != 0).any(), (td != 0).all())
---
td = TensorDict({"a": torch.zeros(3), "s": "x"}, [3])
(td == td)
---
td = TensorDict({"a": torch.zeros(3), "s": "x"}, [3])
(td != td)
---
td = TensorDict({"a": torch.zeros(3), "s": ["a","b","c"]}, [3])
(td == td)
---
td = TensorDict({"a": torch.zeros(3), "s": ["a","b","c"]}, [3])
o = TensorDict({"a": torch.zeros(3), "s": ["a","b","d"]}, [3])
((td == o).all(), (td!=o).any(), td == o)
---
td = TensorDict({"a": torch.zeros(3), "s": "x"}, [3])
o = TensorDict({"a": torch.zeros(3), "s": "y"}, [3])
((td == o).all(), (td!=o).any(), td == o)
---
(NonTensorData("x", [3]) == 0).all()
---
NonTensorData("x", [3]) == "x"
---
NonTensorData(3) == torch.tensor(3)
---
NonTensorData(3) == 3
---
(NonTensorStack("a","b") == 0).all()
---
NonTensorStack("a","b") == NonTensorStack("a","c")
---
NonTensorStack("a","b") == "a"
---
NonTensorStack("a","b") != NonTensorStack("a","c")
---
@tensorclass
class C:
    a: torch.Tensor
    s: str
c = C(a=torch.zeros(3), s="x", batch_size=[3])
((c == 0).all(), (c!=0).any(), (c==torch.zeros(3)).all())
---
@tensorclass
class C:
    a: torch.Tensor
    s: str
c = C(a=torch.zeros(3), s="x", batch_size=[3])
((c == c).all(), (c == c.clone()).all(), (c!=c).any())
---
@tensorclass
class C:
    a: torch.Tensor
    s: str
c = C(a=torch.zeros(3), s="x", batch_size=[3])
mask = torch.tensor([True, False, True])
c[mask] = 1
(c[mask] == 1).all()
---
td = TensorDict({"a": torch.zeros(3), "s": "x"}, [3])
mask = torch.tensor([True, False, True])
td[mask] = 1
(td[mask] == 1).all()
---
td = lazy_stack([TensorDict({"a": torch.zeros(3), "s": "x"}, [3]), TensorDict({"a": torch.zeros(3), "s": "y"}, [3])])
((td == 0).all(), (td != 0).any(), (td == 0), (td == td).all(), (td == torch.zeros(2,3)).all())
---
td = lazy_stack([TensorDict({"a": torch.zeros(3), "s": "x"}, [3]), TensorDict({"a": torch.zeros(3), "s": "y"}, [3])])
td == td
---
td = lazy_stack([TensorDict({"a": torch.zeros(3), "s": "x"}, [3]), TensorDict({"a": torch.zeros(3), "s": "y"}, [3])])
(td == td.to_tensordict()).all()
---
td = lazy_stack([TensorDict({"a": torch.zeros(3), "s": "x"}, [3]), TensorDict({"a": torch.zeros(3), "s": "y"}, [3])])
td2 = lazy_stack([TensorDict({"a": torch.zeros(3), "s": "x"}, [3]), TensorDict({"a": torch.zeros(3), "s": "z"}, [3])])
((td == td2).all(), (td!=td2).any())
---
class C(TypedTensorDict):
    a: torch.Tensor
    s: str
c = C(a=torch.zeros(3), s="x", batch_size=[3])
((c == 0).all(), (c != 0).any(), (c == c).all())
---
td = TensorDictParams(TensorDict({"a": torch.zeros(3)}, [3]))
(td == 0).all()
---
@tensorclass
class P:
    x: torch.Tensor
    y: str = None
td = TensorDict(p=P(torch.ones(3), batch_size=[3]), batch_size=[3])
(td == td.to_tensordict(retain_none=True)).all()
---
@tensorclass
class P:
    x: torch.Tensor
    y: str = None
td = TensorDict(p=P(torch.ones(3), batch_size=[3]), batch_size=[3])
(td == td.to_dict()).all()
---
@tensorclass
class P:
    x: torch.Tensor
    y: str = None
td = TensorDict(p=P(torch.ones(3), batch_size=[3]), batch_size=[3])
(td == td.to_tensordict(retain_none=False)).all()
---
@tensorclass
class P:
    x: torch.Tensor
    y: str = None
td = TensorDict(p=P(torch.ones(3), batch_size=[3]), batch_size=[3])
(td.to_tensordict(retain_none=True) == td).all()
---
@tensorclass
class P:
    x: torch.Tensor
    y: str = None
p = P(torch.ones(3), batch_size=[3])
(p.to_tensordict(retain_none=True) == p).all()
---
@tensorclass
class P:
    x: torch.Tensor
    y: str = None
p = P(torch.ones(3), batch_size=[3])
q = P(torch.ones(3), y="a", batch_size=[3])
(p == q).all()
---
@tensorclass
class P:
    x: torch.Tensor
    y: str = None
p = P(torch.ones(3), batch_size=[3])
q = P(torch.ones(3), y="a", batch_size=[3])
(p != q).any()
---
@tensorclass
class P:
    x: torch.Tensor
    y: torch.Tensor = None
p = P(torch.ones(3), batch_size=[3])
q = P(torch.ones(3), y=torch.ones(3), batch_size=[3])
(p == q).all()
---
(TensorDict(s="x", batch_size=[]) == TensorDict(s="x", batch_size=[3])).all()
---
(TensorDict(s="x", batch_size=[3]) == TensorDict(s="x", batch_size=[])).all()
---
(TensorDict(s="x", batch_size=[3]) == TensorDict(s="y", batch_size=[])).all()
---
(TensorDict(s="x", a=torch.ones(()), batch_size=[]) == TensorDict(s="x", a=torch.ones(3), batch_size=[3])).all()
---
(TensorDict(s=["a","a","a"], batch_size=[3]) == TensorDict(s="a", batch_size=[3])).all()
---
td = TensorDict({"a": torch.ones(3), "s": "x"}, [3])
assert_close(TensorDict(td.numpy()), td)
---
td = TensorDict({"a": torch.ones(3), "s": "x"}, [3])
assert_close(td, TensorDict(td.numpy()))
---
td = TensorDict({"a": torch.ones(3), "s": ["x","x","x"]}, [3])
assert_close(td, TensorDict({"a": torch.ones(3), "s": "x"}, [3]))
---
td = TensorDict({"a": torch.ones(3), "i": NonTensorData(3)}, [3])
o = TensorDict.from_dict(td.to_dict())
(o == td).all()
---
td = TensorDict({"a": torch.ones(3), "i": NonTensorData(3)}, [3])
o = TensorDict.from_dict(td.to_dict())
(td == o).all()
---
td = TensorDict({"i": NonTensorData(1)}, [3])
o = TensorDict({"i": torch.ones(3)}, [3])
assert_close(td, o)
---
td = TensorDict({"a": torch.ones(3), "s": "x"}, [3])
(td == td.to_dict()).all()
---
td = TensorDict({"a": torch.ones(3), "s": "x"}, [3])
(td == {"a": torch.ones(3)})
---
td = TensorDict({"a": torch.ones(3), "b": torch.ones(3)}, [3])
td == td.select("a")
---
td = TensorDict({"a": torch.ones(3), "s": "x"}, [3])
td == td.select("a")
---
td = TensorDict({"a": torch.ones(3), "s": "x"}, [3])
td.select("a") == td
---
td = TensorDict({"a": torch.ones(3), "s": "x"}, [3]).to_h5(tmp+"/a.h5")
((td == 1).all(), (td != 1).any())
---
td = TensorDict({"a": torch.ones(3), "s": "x"}, [3]).memmap_(tmp+"/a")
((td == 1).all(), (td != 1).any())
---
td = TensorDict({"a": torch.ones(3), "s": "x"}, [3])
(td == "x")
---
td = TensorDict({"a": torch.ones(3), "s": "x"}, [3])
(td == None)
---
td = TensorDict({"a": torch.ones(3), "s": "x"}, [3])
(td > 0), (td >= 1).all(), (td < 3).all()
---
td = TensorDict({"a": torch.ones(3), "m": MetaData("x")}, [3])
((td == 1).all(), (td == td).all())
---
td = TensorDict({"s": "x"}, [3])
((td == 1).all(), (td != 1).any(), (td == 1))
""")
def test_values_in_comparisons(source: str) -> None:
    check(source)


def test_a_value_compares_with_a_tensor() -> None:
    """The peer leaves both out."""
    one, two = TensorDict(i=NonTensorData(3), batch_size=[2]), TensorDict(i=torch.tensor([3, 4]), batch_size=[2])
    for found in (one == two, two == one):
        assert found["i"].tolist() == [True, False]
    assert (one != two)["i"].tolist() == [False, True]
    assert not (TensorDict(i=NonTensorData("x"), batch_size=[2]) == two).any()
    assert (one == TensorDict(i=torch.tensor(3)))["i"].tolist() == [True, True]


def test_values_compare_row_by_row() -> None:
    one, two = (TensorDict(s=rows, batch_size=[3]) for rows in (["a", "b", "c"], ["a", "a", "c"]))
    assert (one == two)["s"].tolist() == [True, False, True]
    assert (one != TensorDict(s="a", batch_size=[3]))["s"].tolist() == [False, True, True]  # the peer: nothing differs


def test_closeness_is_about_values_too() -> None:
    """The peer does not look at them."""
    one = TensorDict(s="x", batch_size=[3])
    assert_close(one, TensorDict(s=["x", "x", "x"], batch_size=[3]))
    with pytest.raises(AssertionError, match="'x' is not 'y'"):
        assert_close(one, TensorDict(s="y", batch_size=[3]))
    with pytest.raises(AssertionError, match="differs"):
        assert_close(one, TensorDict(s=torch.ones(3), batch_size=[3]))


def test_an_array_is_an_operand() -> None:
    assert (TensorDict(a=torch.ones(3), s="x", batch_size=[3]) == np.array([1.0, 0, 1]))["a"].tolist() == [
        True,
        False,
        True,
    ]
