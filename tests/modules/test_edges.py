"""State dicts and the way to the other packages, for what is seldom: None, values per row, no rows, dumps."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import tensordict as peer
import torch
from torchrl import data as rl

import tdstore
from tdstore import NonTensorData, NonTensorStack, TensorClass, TensorDict, lazy_stack
from tdstore.errors import LockedError, StateDictError
from tdstore.interop import from_tensordict, to_tensordict, torchrl_storage


class Note(TensorClass):
    x: torch.Tensor
    text: Any = None
    more: torch.Tensor | None = None


# -- state dicts -------------------------------------------------------------------------------
def saved(state: Any) -> Any:
    """What a reader finds who trusts nobody."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("flatten", [True, False])
def test_the_older_form_keeps_values_per_row(flatten: bool) -> None:
    nested = TensorDict({"t": [["u", "v"], ["w", "x"]]}, [2, 2])
    td = TensorDict({"s": ["a", None], "n": nested, "x": torch.ones(2)}, [2])
    td.set_non_tensor("one", ["as", "it is"])
    state = saved(td.state_dict(flatten=flatten, legacy=True))
    other = td.clone().zero_()
    other["s"], other["n", "t"] = ["-", "-"], [["-", "-"], ["-", "-"]]
    other.set_non_tensor("one", "-")
    other.load_state_dict(state)
    assert list(other["s"]) == ["a", None] and other[1]["s"] is None
    assert other["n", "t"] == [["u", "v"], ["w", "x"]] and other["n"][1, 0]["t"] == "w"
    assert other["one"] == ["as", "it is"] and other[0]["one"] == ["as", "it is"]
    fresh = TensorDict({}, [2]).load_state_dict(state, strict=False)
    assert fresh[1]["s"] is None and fresh[0]["s"] == "a"


@pytest.mark.parametrize("flatten", [True, False])
def test_the_older_form_keeps_lazy_stacks(flatten: bool) -> None:
    td = TensorDict({"l": lazy_stack([TensorDict({"a": torch.ones(2)}), TensorDict({"a": torch.ones(3), "b": 1})])})
    other = td.clone()
    for element in other["l"].tensordicts:
        element.zero_()
    other.load_state_dict(saved(td.state_dict(flatten=flatten, legacy=True)))
    assert [e["a"].sum() for e in other["l"].tensordicts] == [2, 3]


@pytest.mark.parametrize("package", [peer, tdstore], ids=["peer", "ours"])
def test_fields_that_are_none_on_one_side(package: Any) -> None:
    @package.tensorclass
    class Text:
        x: torch.Tensor
        s: str | None = None

    full, empty = (Text(x=torch.full((2,), i), s=s, batch_size=[2]) for i, s in ((1, "a"), (2, None)))
    assert full.clone().load_state_dict(empty.state_dict()) is not None
    target = full.clone()
    target.load_state_dict(empty.state_dict())
    assert target.s is None and target.x.tolist() == [2, 2]
    target.load_state_dict(full.state_dict())
    assert target.s == "a" and target.x.tolist() == [1, 1]


@pytest.mark.parametrize("place", ["note", "note.h5"])
def test_a_stored_field_becomes_none_and_a_value_again(place: str, tmp_path: Path) -> None:
    full, empty = (Note(x=torch.full((2,), i), text=s, batch_size=[2]) for i, s in ((1, "a"), (2, None)))
    full.save(tmp_path / place).close()
    with tdstore.open(tmp_path / place, "r+") as stored:
        stored.load_state_dict(empty.state_dict())
    with tdstore.open(tmp_path / place, "r+") as stored:
        assert type(stored) is Note and stored.text is None and stored.x.tolist() == [2, 2]
        stored.load_state_dict(full.state_dict())
    with tdstore.open(tmp_path / place) as stored:
        assert stored.text == "a" and stored.x.tolist() == [1, 1]


def test_tensors_that_are_none_on_one_side_are_mismatches() -> None:
    full, empty = Note(x=torch.ones(2), more=torch.ones(2)), Note(x=torch.zeros(2))
    for source, target in ((full, empty), (empty, full)):
        with pytest.raises(StateDictError, match="'more'"):
            target.load_state_dict(source.state_dict())
    locked = Note(x=torch.zeros(2), text="a").lock_()
    with pytest.raises(LockedError, match="'text'"):
        locked.load_state_dict(Note(x=torch.ones(2)).state_dict())
    assert locked.text == "a" and locked.x.sum() == 0


# -- the other package -------------------------------------------------------------------------
def test_jagged_tensors_come_from_the_other_package() -> None:
    jagged = torch.nested.nested_tensor([torch.zeros(2), torch.ones(3)], layout=torch.jagged)
    assert from_tensordict(peer.TensorDict({"j": jagged}, [2]))["j"] is jagged


@pytest.mark.parametrize("shape", [[0], [0, 2], [2, 0]])
def test_values_of_no_rows_go_to_the_other_package(shape: list[int]) -> None:
    td = TensorDict({"x": torch.zeros(2, 2), "s": [["a", "b"], ["c", "d"]]}, [2, 2])
    td = td[:0, 0] if shape == [0] else td[:0] if shape[0] == 0 else td[:, :0]
    theirs = to_tensordict(td)
    assert theirs.get("s").batch_size == theirs.batch_size == torch.Size(shape)
    assert from_tensordict(theirs).batch_size == td.batch_size


@pytest.mark.parametrize("location", ["run.h5", "run"])
def test_a_buffer_dumps_the_rows_that_are_stored(location: str, tmp_path: Path) -> None:
    rows = TensorDict({"x": torch.arange(6)}, [6])
    rows["text"] = NonTensorStack(*(NonTensorData(f"t{i}") for i in range(6)))
    rows.save(tmp_path / location).close()
    stored = tdstore.open(tmp_path / location, "r+")
    buffer = rl.TensorDictReplayBuffer(storage=torchrl_storage(stored), batch_size=2)
    buffer.dumps(tmp_path / "dump")
    theirs = rl.TensorDictReplayBuffer(storage=rl.LazyMemmapStorage(6), batch_size=2)
    theirs.loads(tmp_path / "dump")
    assert theirs[:]["x"].tolist() == list(range(6))  # and not the first row six times
    stored[:] = TensorDict({"x": torch.zeros(6, dtype=torch.int64), "text": ["-"] * 6}, [6])
    buffer.loads(tmp_path / "dump")
    stored.close()
    with tdstore.open(tmp_path / location) as back:
        assert back["x"].tolist() == list(range(6)) and back["text"] == [f"t{i}" for i in range(6)]
