"""Batches without dimensions: objects of classes are updated, and a dimension of them is that of a number."""

from __future__ import annotations

import pytest

from .programs import check, programs

CALLS = ["update_(source)", "copy_(source)", "update_(source, keys_to_update='a')", "update_({'a': torch.ones(2)})"]
ITEM = """
class Item(TensorClass):
    a: torch.Tensor
    n: TensorDict
item = Item(torch.zeros({size}2), TensorDict({{"x": torch.zeros({size}3)}}, [{size}]), batch_size=[{size}])
source = TensorDict({{"a": torch.ones({size}2), "n": {{"x": torch.ones({size}3)}}}}, [{size}])
"""


@pytest.mark.parametrize("call", CALLS)
def test_an_object_without_batch_dimensions_is_updated(call: str) -> None:
    check(f"{ITEM.format(size='')}\nitem.{call}\n(item.a, item.n['x'])")


def test_a_row_of_an_object_is_updated() -> None:
    check(f"{ITEM.format(size='3, ')}\nitem.copy_at_(source[0], 0)\n(item.a, item.n['x'])")


@programs("""
TensorDict({"a": torch.arange(2)}).flatten(0, 1)
---
TensorDict({"a": torch.arange(2)}).flatten(0, 9)
---
TensorDict({"a": torch.arange(2)}).flatten(-3)
---
TensorDict({"a": torch.arange(2)}).flatten(0, -1)
---
TensorDict({"a": torch.arange(2)}).flatten()
---
TensorDict({"a": torch.arange(2), "n": {"b": torch.ones(())}}).repeat_interleave(2, dim=0)
---
TensorDict({"a": torch.arange(2)}).repeat_interleave(2)
""")
def test_a_dimension_of_no_dimensions(source: str) -> None:
    check(source)
