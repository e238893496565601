"""`MetaData[type]`, and fields that are annotated with it."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any, Literal, Optional

import pytest
import torch

from tdstore import MetaData, TensorDict

from .programs import check, programs


@programs("""
MetaData[str]("v1")
---
MetaData[str]("v1", batch_size=[2])[0]
---
m = MetaData[int](0)
isinstance(m, MetaData[int]), isinstance(m, MetaData), isinstance(m, MetaData[str])
---
isinstance(MetaData("x"), MetaData[str])
---
MetaData[int] is MetaData[int], MetaData[int] == MetaData[str], issubclass(MetaData[int], MetaData)
---
MetaData[int]("x")
---
MetaData[float](1)
---
MetaData[int](True)
---
MetaData[int | None](None)
---
MetaData[int | str](1.0)
---
MetaData[int][str]
---
MetaData[int](MetaData("x"))
---
MetaData[int](MetaData(3))
---
MetaData[torch.Tensor](torch.ones(3)).data
---
MetaData[int].__name__, MetaData[list[int]].__name__, repr(MetaData[int](3))
---
torch.stack([MetaData[int](3)] * 2)
---
torch.stack([MetaData[int](3), MetaData[int](4)])
---
td = TensorDict({"a": MetaData[str]("x")}, [3])
td["a"], td.get("a"), td[0], td.clone(), td.expand(2, 3), torch.stack([td, td])
---
isinstance(MetaData[int](3).clone(), MetaData[int]), isinstance(MetaData[int](3).expand(2), MetaData[int])
---
m = MetaData[int](3)
m.update(MetaData("x"))
m.data
---
@tensorclass
class C:
    a: torch.Tensor
    m: MetaData[str]
c = C(a=torch.ones(3), m=MetaData[str]("x"), batch_size=[3])
c.m, c[0].m, c.get("m"), torch.stack([c, c]).m
---
@tensorclass
class C:
    a: torch.Tensor
    m: MetaData[int]
C(a=torch.ones(3), m="x", batch_size=[3]).m
---
class C(TensorClass["autocast"]):
    a: torch.Tensor
    m: MetaData[int]
C(a=torch.ones(3), m=3, batch_size=[3]).m
---
class C(TensorClass["autocast"]):
    a: torch.Tensor
    m: MetaData[int]
C(a=torch.ones(3), m="3", batch_size=[3])
---
class C(TensorClass["autocast"]):
    a: torch.Tensor
    m: MetaData[int]
C(a=torch.ones(3), m=MetaData("x"), batch_size=[3])
---
class C(TensorClass["tensor_only"]):
    a: torch.Tensor
    m: MetaData[str]
c = C(a=torch.ones(3), m=MetaData[str]("x"), batch_size=[3])
d = torch.stack([c, c])
c.m, c.get("m"), d.m, d[0].m, c.clone().m, c.to_tensordict()
---
class C(TensorClass["tensor_only"]):
    a: torch.Tensor
    m: MetaData[str] | None = None
c = C(a=torch.ones(3), batch_size=[3])
before = c.m
c.m = "y"
before, c.m
---
class C(TensorClass["tensor_only"]):
    a: torch.Tensor
    m: MetaData[int]
C(a=torch.ones(3), m=3, batch_size=[3])
---
class C(TensorClass["tensor_only"]):
    a: torch.Tensor
    m: str
C
""")
def test_typed_metadata(source: str) -> None:
    check(source)


@pytest.mark.parametrize(
    ("kind", "right", "wrong"),
    [
        (list[int], [1], (1,)),
        (Optional[list], None, 3),  # noqa: UP045
        (Literal["a", "b"], "a", "c"),
        (Any, object, None),
        ((int, str), 3, 1.0),
    ],
)
def test_kinds_that_are_no_class(kind: Any, right: Any, wrong: Any) -> None:
    """The peer raises the TypeError of isinstance for most."""
    assert MetaData[kind](right).data == right
    if wrong is not None:
        with pytest.raises(TypeError, match="takes a"):
            MetaData[kind](wrong)


def test_copies_and_pickles_are_of_the_class() -> None:
    value = MetaData[int](3, [2])
    for made in (copy.deepcopy(value), copy.copy(value), pickle.loads(pickle.dumps(value))):
        assert type(made) is MetaData[int]
        assert (made.data, made.batch_size) == (3, torch.Size([2]))
    file = io.BytesIO()
    torch.save(TensorDict(m=value, batch_size=[2]), file)
    file.seek(0)
    assert type(torch.load(file, weights_only=True).get("m")) is MetaData[int]


def test_it_is_stored_as_metadata(tmp_path: Any) -> None:
    found = TensorDict(m=MetaData[int](3), batch_size=[2]).save(tmp_path / "x").load(tmp_path / "x").get("m")
    assert isinstance(found, MetaData)
    assert found.data == 3
