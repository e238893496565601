"""`from_dict`: which batch sizes the result has."""

from __future__ import annotations

from pathlib import Path

import torch

from tdstore import PersistentTensorDict, TensorDict, tensorclass

from .programs import check, programs


@programs("""
d = {"a": torch.zeros(3, 4), "n": {"b": torch.zeros(3, 4, 5)}}
TensorDict.from_dict(d, batch_dims=1)
---
d = {"a": torch.zeros(3, 4), "n": {"b": torch.zeros(3, 4, 5)}}
TensorDict.from_dict(d, batch_dims=2)
---
d = {"a": torch.zeros(3, 4), "n": {"b": torch.zeros(3, 4, 5)}}
TensorDict.from_dict(d, batch_dims=3)
---
d = {"a": torch.zeros(3, 4), "n": {"b": torch.zeros(3, 4, 5)}}
TensorDict.from_dict(d, batch_dims=0)
---
d = {"a": torch.zeros(3, 4), "n": {"b": torch.zeros(3, 4, 5)}}
TensorDict.from_dict(d, batch_size=[3, 4], batch_dims=1)
---
d = {"a": torch.zeros(3, 4), "n": {"b": torch.zeros(3, 4, 5)}}
TensorDict.from_dict(d, batch_size=[3], auto_batch_size=True)
---
d = {"a": torch.zeros(3, 4), "n": {"b": torch.zeros(3, 4, 5)}}
TensorDict.from_dict(d, batch_size=[3])
---
d = {"a": torch.zeros(3, 4), "n": {"b": torch.zeros(3, 4, 5)}}
TensorDict.from_dict(d, auto_batch_size=True)
---
d = {"a": torch.zeros(3, 4), "n": {"b": torch.zeros(3, 4, 5)}}
TensorDict.from_dict(d, auto_batch_size=True, batch_dims=1)
---
d = {"a": torch.zeros(3, 4), "n": {"b": torch.zeros(3, 4, 5)}}
TensorDict.from_dict(d, auto_batch_size=False)
---
d = {"a": torch.zeros(3, 4), "n": {"b": torch.zeros(3, 4, 5)}}
TensorDict.from_dict(d, auto_batch_size=False, batch_dims=1)
---
d = {"a": torch.zeros(3, 4), "n": {"b": torch.zeros(3, 4, 5)}}
TensorDict.from_dict(d)
---
d = {"a": torch.zeros(3, 4), "n": {"b": torch.zeros(3, 4, 5)}}
TensorDict.from_dict(d, batch_size=[])
---
td = TensorDict({"a": torch.zeros(3, 4), "n": TensorDict({"b": torch.zeros(3, 4, 5)}, [3, 4])}, [3])
TensorDict.from_dict(td)
---
td = TensorDict({"a": torch.zeros(3, 4), "n": TensorDict({"b": torch.zeros(3, 4, 5)}, [3, 4])}, [3])
TensorDict.from_dict(td, auto_batch_size=True)
---
td = TensorDict({"a": torch.zeros(3, 4), "n": TensorDict({"b": torch.zeros(3, 4, 5)}, [3, 4])}, [3])
TensorDict.from_dict(td, auto_batch_size=False)
---
td = TensorDict({"a": torch.zeros(3, 4), "n": TensorDict({"b": torch.zeros(3, 4, 5)}, [3, 4])}, [3])
TensorDict.from_dict(td, batch_dims=1)
---
td = TensorDict({"a": torch.zeros(3, 4)}, [3], names=["x"])
TensorDict.from_dict(td)
---
td = TensorDict({"a": torch.zeros(3, 4)}, [3], device="cpu")
TensorDict.from_dict(td)
---
td = TensorDict({"a": torch.zeros(3, 4)}, [3])
r = TensorDict.from_dict(td)
(r is td, r["a"] is td["a"])
---
d = {"a": torch.zeros(3, 4), "n": TensorDict({"b": torch.zeros(3, 4, 5)}, [3, 4])}
TensorDict.from_dict(d)
---
d = {"a": torch.zeros(3, 4), "n": TensorDict({"b": torch.zeros(3, 4, 5)}, [3, 4])}
TensorDict.from_dict(d, auto_batch_size=True)
---
d = {"a": torch.zeros(3, 4), "n": TensorDict({"b": torch.zeros(3, 4, 5)}, [3, 4])}
TensorDict.from_dict(d, batch_size=[3])
---
td = TensorDict({"a": torch.zeros(3, 4)}, [3])
PersistentTensorDict.from_dict(td, tmp+"/a.h5").batch_size
---
td = TensorDict({"a": torch.zeros(3, 4), "n": TensorDict({"b": torch.zeros(3, 4, 5)}, [3, 4])}, [3])
p = PersistentTensorDict.from_dict(td, tmp+"/a.h5")
(p.batch_size, p["n"].batch_size)
---
d = {"a": torch.zeros(3, 4), "n": {"b": torch.zeros(3, 4, 5)}}
p = PersistentTensorDict.from_dict(d, tmp+"/a.h5")
(p.batch_size, p["n"].batch_size)
---
d = {"a": torch.zeros(3, 4), "n": {"b": torch.zeros(3, 4, 5)}}
p = PersistentTensorDict.from_dict(d, tmp+"/a.h5", auto_batch_size=False)
(p.batch_size, p["n"].batch_size)
---
d = {"a": torch.zeros(3, 4), "n": {"b": torch.zeros(3, 4, 5)}}
p = PersistentTensorDict.from_dict(d, tmp+"/a.h5", auto_batch_size=True)
(p.batch_size, p["n"].batch_size)
---
d = {"a": torch.zeros(3, 4), "n": {"b": torch.zeros(3, 4, 5)}}
p = PersistentTensorDict.from_dict(d, tmp+"/a.h5", batch_size=[3])
(p.batch_size, p["n"].batch_size)
---
# as since 0.15
from_dict({"a": torch.zeros(3, 4), "n": {"b": torch.zeros(3, 4, 5)}}, batch_dims=1)
---
from_dict({"a": torch.zeros(3, 4), "n": {"b": torch.zeros(3, 4, 5)}}, batch_size=[3], batch_dims=1)
---
from_dict({"a": torch.zeros(3, 4), "n": {"b": torch.zeros(3, 4, 5)}}, auto_batch_size=True)
---
from_dict({"a": torch.zeros(3, 4), "n": {"b": torch.zeros(3, 4, 5)}}, batch_size=[3], auto_batch_size=True)
---
from_any({"a": torch.zeros(3, 4)}, batch_size=[3], batch_dims=1)
---
@tensorclass
class C:
    a: torch.Tensor
    n: Any = None
c = C.from_dict({"a": torch.zeros(3, 4), "n": {"b": torch.zeros(3, 4, 5)}}, batch_dims=1)
(c.batch_size, c.n.batch_size)
---
@tensorclass
class C:
    a: torch.Tensor
    n: Any = None
c = C.from_dict({"a": torch.zeros(3, 4), "n": {"b": torch.zeros(3, 4, 5)}}, auto_batch_size=True)
(c.batch_size, c.n.batch_size)
---
@tensorclass
class C:
    a: torch.Tensor
c = C.from_dict({"a": torch.zeros(3, 4)}, batch_size=[3], batch_dims=1)
c.batch_size
---
TensorDict({}, []).from_dict_instance({"a": torch.zeros(3, 4)}, batch_dims=1)
---
TensorDict({}, []).from_dict_instance({"a": torch.zeros(3, 4)}, batch_size=[3], batch_dims=1)
---
TensorDict({}, []).from_dict_instance({"a": torch.zeros(3, 4)}, batch_size=[3], auto_batch_size=True)
---
TensorDict({}, []).from_dict_instance(TensorDict({"a": torch.zeros(3, 4)}, [3]))
---
td = TensorDict({"a": torch.zeros(3, 4), "n": {"b": torch.zeros(3, 4)}}, [3])
td.from_dict_instance({"a": torch.zeros(3, 4), "n": {"b": torch.ones(3, 4)}})
---
d = {"0": {"a": torch.zeros(3)}, "1": {"a": torch.zeros(4)}}
LazyStackedTensorDict.from_dict(d, auto_batch_size=True).batch_size
---
LazyStackedTensorDict.from_dict([{"a": torch.zeros(3)}, {"a": torch.zeros(4)}], batch_dims=1).batch_size
---
TensorDict.from_dict({"a": [1,2,3], "b": "x"}, batch_dims=1)
---
TensorDict.from_dict({"a": torch.zeros(3,4), "b": "x"}, auto_batch_size=True)
---
TensorDict.from_dict({"a": torch.zeros(3,4), "b": torch.zeros(())}, batch_dims=1)
---
TensorDict.from_dict({"a": torch.zeros(3,4), "b": torch.zeros(5)}, batch_dims=1)
---
TensorDict.from_dict({}, batch_dims=1)
---
TensorDict.from_dict({"a": torch.zeros(3,4)}, batch_size=[3], names=["x"], device="cpu")
---
class T(TypedTensorDict):
    a: torch.Tensor
t = T.from_dict({"a": torch.zeros(3, 4)}, batch_dims=1)
t.batch_size
---
class T(TypedTensorDict):
    a: torch.Tensor
t = T.from_dict(TensorDict({"a": torch.zeros(3, 4)}, [3]))
t.batch_size
---
TensorDict.from_dataclass(3)
---
make_tensordict({"a": torch.zeros(3, 4)}, batch_size=[3], auto_batch_size=True)
---
make_tensordict(a=torch.zeros(3, 4), auto_batch_size=True)
---
make_tensordict({"a": torch.zeros(3, 4), "n": {"b": torch.zeros(3)}})
---
make_tensordict({"a": torch.zeros(3, 4)}, batch_size=[3], device="cpu")
""")
def test_from_dict(source: str) -> None:
    check(source)


def test_another_batch_size_of_a_tensordict() -> None:
    """The peer ignores it."""
    td = TensorDict({"a": torch.zeros(3, 4)}, [3])
    found = TensorDict.from_dict(td, batch_size=[3, 4])
    assert found.batch_size == torch.Size([3, 4])
    assert td.batch_size == torch.Size([3])
    assert found["a"] is td["a"]


def test_a_class_is_made_of_a_tensordict() -> None:
    """The peer takes dicts only since 0.15."""

    @tensorclass
    class Data:
        a: torch.Tensor

    td = TensorDict({"a": torch.zeros(3, 4)}, [3])
    made = Data.from_dict(td)
    assert made.batch_size == torch.Size([3])
    assert made.a is td["a"]


def test_stored_tensordicts_are_their_own_source(tmp_path: Path) -> None:
    stored = TensorDict({"a": torch.zeros(3, 4)}, [3]).save(tmp_path / "a.h5")
    assert TensorDict.from_dict(stored) is stored
    assert PersistentTensorDict.from_dict(stored, tmp_path / "b.h5").batch_size == torch.Size([3])
