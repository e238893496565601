"""`TensorCollection` is the type of what `is_tensor_collection` accepts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import tdstore
from tdstore import NonTensorData, NonTensorStack, TensorCollection, TensorDict, UnbatchedTensor, is_tensor_collection


@tdstore.tensorclass
class Decorated:
    x: torch.Tensor


class Derived(tdstore.TensorClass):
    x: torch.Tensor


def kinds(tmp: Path) -> list[object]:
    td = TensorDict({"x": torch.zeros(2)}, [2])
    return [
        td,
        tdstore.lazy_stack([td, td]),
        tdstore.TensorDictParams(td),
        td.save(tmp / "mapped"),
        td.to_h5(tmp / "stored.h5"),
        Decorated(torch.zeros(2), batch_size=[2]),
        Derived(torch.zeros(2), batch_size=[2]),
        NonTensorData("a"),
        NonTensorStack("a", "b"),
    ]


@pytest.mark.parametrize("number", range(9))
def test_all_kinds_are_collections(number: int, tmp_path: Path) -> None:
    made = kinds(tmp_path)[number]
    assert isinstance(made, TensorCollection) and is_tensor_collection(made)
    assert issubclass(type(made), TensorCollection) and is_tensor_collection(type(made))


@pytest.mark.parametrize("other", [torch.zeros(2), UnbatchedTensor(torch.zeros(2)), {"x": 1}, None, "a"], ids=repr)
def test_tensors_and_dicts_are_none(other: object) -> None:
    assert not isinstance(other, TensorCollection) and not is_tensor_collection(other)
