"""Lanes for trees of plain tensors do what the general ones do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tdstore import TensorDict
from tdstore.container.core.key_views import ItemsView, ValuesView
from tdstore.errors import BatchSizeError


def tree() -> TensorDict:
    return TensorDict({"a": torch.ones(3, 2), "n": {"b": torch.arange(3), "m": {"c": torch.zeros(3)}}}, [3])


FUNCTIONS: dict[str, Callable[[torch.Tensor], Any]] = {
    "a tensor": lambda t: t + 1,
    "None for some": lambda t: t if t.ndim > 1 else None,
    "None for all": lambda t: None,
    "None in one group": lambda t: None if t.dtype is torch.int64 else t,
    "an unwrapped value": lambda t: str(t.dtype),
    "a dict": lambda t: {"x": t, "y": t},
    "another container": lambda t: TensorDict({"x": t}, [3]),
    "an array": lambda t: t.numpy(),
    "another dtype": lambda t: t.to(torch.bfloat16),
}


def plain(td: Any) -> Any:
    return None if td is None else td.to_dict(convert_tensors=True)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_apply_gives_the_same_by_both_lanes(name: str):
    fn = FUNCTIONS[name]
    fast, slow = tree().apply(fn), tree().named_apply(lambda key, t: fn(t))
    assert plain(fast) == plain(slow)
    if fast is not None:
        assert fast.batch_size == slow.batch_size
        assert list(fast.keys(True)) == list(slow.keys(True))


def test_apply_of_a_plain_tree_refuses_another_batch_size():
    with pytest.raises(BatchSizeError):
        tree().apply(lambda t: t[:2])


def test_apply_of_a_locked_tree_gives_an_unlocked_one():
    made = tree().lock_().apply(lambda t: t + 1)
    assert not made.is_locked
    assert not made["n"].is_locked


@pytest.mark.parametrize("names", [None, ["rows"]])
def test_items_and_values_of_all_levels_are_those_of_the_views(names: list[str] | None):
    td = TensorDict(tree().to_dict(), [3], names=names)
    td["text"] = "x"
    td["rows"] = TensorDict.lazy_stack([TensorDict({"z": torch.tensor(i)}) for i in range(3)])
    for source in (td, td.exclude("rows")):
        seen = list(source.items(True))
        wanted = list(ItemsView(source, True, False, None, False))
        assert [key for key, _ in seen] == [key for key, _ in wanted]
        same = ValuesView(source, True, False, None, False)
        assert [type(v) for v in source.values(True)] == [type(v) for v in same]
        tensors = [(v, w) for (_, v), (_, w) in zip(seen, wanted, strict=True) if type(w) is torch.Tensor]
        assert tensors
        assert all(torch.equal(v, w) for v, w in tensors)
