"""Lanes for trees of plain tensors do what the general ones do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tdstore import NonTensorData, TensorDict, TensorDictParams
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


@pytest.mark.parametrize("parts", [lambda td: td.unbind(0), lambda td: td.split(2), lambda td: td.split([1, 2])])
def test_parts_of_parameters_are_tensordicts(parts: Callable[[Any], Any]) -> None:
    td = tree().float()
    for part, plain in zip(parts(TensorDictParams(td)), parts(td), strict=True):
        assert type(part) is TensorDict and part.batch_size == plain.batch_size
        assert all(torch.equal(part[key], plain[key]) for key in plain.keys(True, True))


@pytest.mark.parametrize("batch", [(3,), (3, 4), (2, 3, 4)])
@pytest.mark.parametrize("index", [0, slice(1, 2), None, [1, 0], (..., 0), (slice(None), 0), torch.tensor([True] * 3)])
def test_values_take_the_batch_size_of_rows(batch: tuple[int, ...], index: Any) -> None:
    td = TensorDict({"a": torch.zeros(batch), "s": "text", "n": {"t": NonTensorData([1], batch)}}, batch)
    try:
        want = torch.zeros(batch)[index].shape
    except IndexError:
        return
    part = td[index]
    assert part.batch_size == want
    assert part._data["s"].batch_size == want and part._data["n"]._data["t"].batch_size == want
    assert part["s"] == "text" and part["n", "t"] == [1]


def test_values_of_parts() -> None:
    td = TensorDict({"a": torch.zeros(3, 4), "s": "text", "long": NonTensorData("x", [3, 4])}, [3])
    for part in (*td.unbind(0), *td.split(1), td[torch.tensor([0])], td[0]):
        assert part["s"] == "text" and part._data["s"].batch_size == part.batch_size
        assert part._data["long"].batch_size == (*part.batch_size, 4)


def test_views_of_tensors_that_are_not_contiguous() -> None:
    td = TensorDict({"a": torch.arange(12).reshape(4, 3).T, "b": torch.zeros(3, 4)}, [3, 4])
    with pytest.raises(RuntimeError, match="view"):
        td.view(-1)
    flat = td.reshape(-1)
    assert torch.equal(flat["a"], td["a"].reshape(-1)) and flat["b"].data_ptr() == td["b"].data_ptr()
    assert TensorDict({"a": torch.zeros(2, 0, 5)}, [2, 0]).view(-1)["a"].shape == (0, 5)


def test_update_on_the_cpu_takes_what_lies_there() -> None:
    td = TensorDict({"a": torch.zeros(2), "n": {"b": torch.zeros(2)}}, [2], device="cpu")
    new = TensorDict({"a": torch.ones(2), "n": {"c": torch.ones(2)}}, [2])
    td.update(new)
    assert td["a"] is new["a"]
    assert td["n", "c"] is new["n", "c"]
    assert td.device == td["n"].device == torch.device("cpu")
    with pytest.raises((RuntimeError, NotImplementedError)):  # a meta tensor has nothing to move to the CPU
        td.update({"a": torch.ones(2, device="meta")})
    assert td["a"] is new["a"]


def test_update_in_place_beside_strings() -> None:
    td = TensorDict({"a": torch.zeros(2), "s": "text"}, [2])
    leaf = td["a"]
    td.update_(TensorDict({"a": torch.ones(2), "s": "text"}, [2]))
    assert td["a"] is leaf
    assert leaf.tolist() == [1.0, 1.0]
    td.update_(TensorDict({"a": torch.ones(2) * 2, "s": "other"}, [2]))
    assert td["s"] == "other"
    assert leaf.tolist() == [2.0, 2.0]
