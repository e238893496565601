"""`unpad_sequence` undoes `pad_sequence`; what is pinned here is what tensordict 0.15.3 returned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import tdstore
from tdstore import LazyStackedTensorDict, NonTensorStack, TensorDict, lazy_stack, pad_sequence, unpad_sequence
from tdstore.errors import BatchSizeError, InvalidArgumentError, InvalidTypeError, KeyNotFoundError, OutOfRangeError

MASK = torch.tensor([[1, 1, 0], [1, 1, 1], [1, 0, 0]]).bool()


@tdstore.tensorclass
class Step:
    a: torch.Tensor


def samples() -> list[TensorDict]:
    return [
        TensorDict({"a": torch.arange(n) + 1, "n": {"b": torch.rand(n, 2)}, "s": NonTensorStack(*"xyz"[:n])}, [n])
        for n in (2, 3, 1)
    ]


def same(found: Any, wanted: list[Any]) -> None:
    assert [td.batch_size for td in found.unbind(0)] == [td.batch_size for td in wanted]
    for mine, other in zip(found.unbind(0), wanted, strict=True):
        assert set(mine.keys(True)) == set(other.keys(True))
        assert all(torch.equal(mine[key], other[key]) for key in other.keys(True, True) if key != "s")
        assert "s" not in other or mine.get("s").tolist() == other.get("s").tolist()


@pytest.mark.parametrize("place", ["dense", "lazy", "memmap", "h5"])
def test_round_trip(place: str, tmp_path: Path) -> None:
    made = pad_sequence(samples(), return_mask=True)
    wanted, parts = samples(), made.unbind(0)
    for td, part in zip(wanted, parts, strict=True):
        td["n", "b"] = part["n", "b"][: len(td)]
    if place == "lazy":
        made = lazy_stack(list(parts))
    elif place != "dense":
        made = made.save(str(tmp_path / ("a.h5" if place == "h5" else "a")))
    found = unpad_sequence(made)
    assert isinstance(found, LazyStackedTensorDict) and found.batch_size == torch.Size([3, -1])
    same(found, wanted)
    same(unpad_sequence(made.exclude("masks"), made["masks"]), wanted)
    same(unpad_sequence(made.exclude("masks"), MASK), wanted)
    same(unpad_sequence(made.exclude("masks"), MASK.int()), wanted)
    assert "masks" in made and "masks" not in found[0]


def test_tensors_are_views_and_left_padding_is_read() -> None:
    td = TensorDict({"a": torch.arange(6).view(2, 3)}, [2, 3], names=["b", "t"])
    found = unpad_sequence(td, torch.tensor([[0, 1, 1], [0, 0, 0]]).bool())
    assert [part["a"].tolist() for part in found.unbind(0)] == [[1, 2], []] and found.names == [None, "t"]
    found[0]["a"].fill_(7)
    assert td["a"].tolist() == [[0, 7, 7], [3, 4, 5]]


def test_entries_of_their_own_lengths() -> None:
    tds = [TensorDict({"a": torch.arange(n), "b": torch.ones(n + 1, 2), "n": {"c": torch.ones(2)}}) for n in (2, 3, 1)]
    same(unpad_sequence(pad_sequence(tds, return_mask=True)), tds)
    inner = [TensorDict({"n": TensorDict({"c": torch.arange(n)}, [n])}) for n in (2, 1)]
    padded = TensorDict({"n": TensorDict({"c": torch.tensor([[0, 1], [0, 9]])}, [2, 2])}, [2])
    same(unpad_sequence(padded, torch.tensor([[True, True], [True, False]])), inner)


def test_other_dimensions() -> None:
    tds = [TensorDict({"a": torch.rand(2, n), "b": torch.rand(2, n, 3)}, [2]) for n in (2, 3, 1)]
    made = pad_sequence(tds, pad_dim=1, return_mask=True)
    found = unpad_sequence(made, pad_dim=1)
    assert found.batch_size == torch.Size([3, 2])
    same(found, tds)
    with pytest.raises(InvalidArgumentError, match="pad_dim"):  # all was returned there
        unpad_sequence(made)


def test_masks_that_are_entries_are_cut_too() -> None:
    made = pad_sequence(samples(), return_mask="m")
    found = unpad_sequence(made, made["m"])
    assert [part["m", "n", "b"].tolist() for part in found.unbind(0)] == [[True] * 2, [True] * 3, [True]]


def test_tensorclasses_and_nothing() -> None:
    made = unpad_sequence(Step(torch.arange(9).view(3, 3), batch_size=[3, 3]), MASK)
    assert [type(part) for part in made.unbind(0)] == [Step] * 3
    assert [part.a.tolist() for part in made.unbind(0)] == [[0, 1], [3, 4, 5], [6]]
    assert len(unpad_sequence(TensorDict({"a": torch.ones(0, 3)}, [0, 3]), MASK[:0])) == 0


def td() -> TensorDict:
    return TensorDict({"a": torch.ones(3, 3), "b": torch.ones(3, 3, 2)}, [3, 3])


def masks(a: torch.Tensor, b: torch.Tensor) -> TensorDict:
    return TensorDict({"a": a, "b": b}, [3])


WRONG: dict[str, tuple[Any, Any, Any, type[Exception], str]] = {
    "a tensor": (torch.ones(3), None, 0, InvalidTypeError, "TensorDict"),
    "no batch": (TensorDict({"a": torch.ones(3)}), MASK, 0, BatchSizeError, "batch dimension"),
    "no mask": (td(), None, 0, InvalidArgumentError, "needs a mask"),
    "a list as a mask": (td(), MASK.tolist(), 0, InvalidTypeError, "mask"),
    "too short": (td(), MASK[:, :2], 0, InvalidArgumentError, "'a'"),
    "of one dimension": (td(), MASK[0], 0, InvalidArgumentError, "longest"),
    "gaps": (td(), torch.tensor([[1, 0, 1]] * 3), 0, InvalidArgumentError, "between the values"),
    "a tensor lacks": (td(), TensorDict({"a": MASK}, [3]), 0, KeyNotFoundError, "'b'"),
    "lengths in a batch": (td(), masks(MASK, MASK.flip(0)), 0, InvalidArgumentError, "differ in padding"),
    "negative": (td(), MASK, -1, OutOfRangeError, "at least 0"),
    "no such dimension": (td(), MASK, 5, InvalidArgumentError, "dimension 5"),
    "no number": (td(), MASK, "x", InvalidTypeError, "pad_dim"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments(case: str) -> None:
    padded, mask, dim, error, text = WRONG[case]
    with pytest.raises(error, match=text):
        unpad_sequence(padded, mask, pad_dim=dim)
