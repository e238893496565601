"""Rows flipped, rolled, repeated, padded; dimensions under other names."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import tdstore

from .oracle import OURS, PEER, differences, outcome

CALLS = """
movedim(0, 1); movedim(0, -1); movedim((0, 1), (1, 0)); movedim((2, 0), (0, 1)); movedim(0, 5); moveaxis(0, 2)
swapaxes(0, 2); swapdims(1, -1); atleast_1d(); atleast_2d(); atleast_3d(); unsqueeze(0).atleast_3d()
select("a")[0, 0, 0].atleast_3d(); select("a")[0, 0].atleast_2d()
narrow(0, 1, 1); narrow(2, -3, 2); narrow(-1, 0, 4); narrow(1, 2, 5)
flip(0); flip((0, 2)); flip(-1); flip(3); fliplr(); flipud()
roll(1); roll(1, 0); roll((1, 2), (0, 2)); roll(-1, 2); roll(1, 7)
rot90(); rot90(1, (0, 2)); rot90(2, (1, 2)); rot90(-1); rot90(0)
repeat(2, 1, 1); repeat(1, 2, 3); repeat(2); repeat_interleave(2, dim=0); repeat_interleave(3, dim=-1)
repeat_interleave(2); repeat_interleave(torch.tensor([1, 2]), dim=0); repeat_interleave(2, dim=4)
tensor_split(2); tensor_split(3, 2); tensor_split([1], dim=1); tensor_split((1, 2), 2); tensor_split(2, 5)

tensor_split([], 0)
pad([0, 1, 0, 0, 0, 0]); pad([1, 1, 2, 0, 0, 0], value=3.0)
""".replace("\n", ";").split(";")


@pytest.mark.parametrize("call", [c.strip() for c in CALLS if c.strip()])
@pytest.mark.parametrize("sample", ["cube"])
def test_as_the_peer(call: str, sample: str, tmp_path: Path) -> None:
    scope = {"torch": torch}
    want = outcome(lambda: eval(f"td.{call}", {**scope, "td": PEER.sample(sample)}), forgive=True)
    td = OURS.sample(sample)
    got = outcome(lambda: eval(f"td.{call}", {**scope, "td": td}))
    found = list(differences(want, got))
    assert not found, "\n".join(found[:5])
    kept = td.to_h5(tmp_path / "a.h5")
    if "select" not in call:  # keeps the order of keys in ours, and reads nothing: a window
        again = outcome(lambda: in_memory(eval(f"kept.{call}", {**scope, "kept": kept})))
        found = list(differences(got, again))
        assert not found, "\n".join(found[:5])


def in_memory(result: object) -> object:
    if isinstance(result, tuple):
        return tuple(map(in_memory, result))
    return result.to_tensordict() if isinstance(result, tdstore.TensorDictBase) else result


def test_tile_moves_with_the_batch() -> None:
    # The peer turns to the last dimensions of each leaf, features included.
    td = tdstore.TensorDict({"a": torch.arange(6).reshape(2, 3), "b": torch.arange(2)}, [2])
    assert td.tile((3,))["a"].tolist() == td["a"].repeat(3, 1).tolist()
    assert td.tile((2, 3)).batch_size == torch.Size([2, 6])
    assert td.tile(2, 3)["a"].shape == (2, 6, 3)
    assert torch.equal(torch.stack([td, td]).tile((2,))["b"], torch.stack([td, td])["b"].repeat(1, 2))


def test_a_negative_dimension_is_one_of_the_batch() -> None:
    # The peer counts it from the end of each leaf, features included.
    td = OURS.sample("cube")
    assert torch.equal(td.roll(-1, -1)["n", "b"], td["n", "b"].roll(-1, 2))
    places = torch.tensor([1])
    assert [tuple(part.batch_size) for part in td.tensor_split(places, 1)] == [(2, 1, 4), (2, 2, 4)]


def test_names_and_values_move_along() -> None:
    td = tdstore.TensorDict({"a": torch.arange(6).reshape(2, 3), "s": ["x", "y"], "one": "v"}, [2], names=["t"])
    assert td.flip(0)["s"] == ["y", "x"]
    assert td.repeat_interleave(2, dim=0)["s"] == ["x", "x", "y", "y"]
    assert td.roll(1, 0)["s"] == ["y", "x"]
    assert td.roll(1, 0).names == ["t"]
    assert td.flip(0)["one"] == "v"
    assert td.pad([1, 0])["s"] == [None, "x", "y"] and td.pad([1, 0])["one"] == "v"


def test_bad_numbers() -> None:
    td = tdstore.TensorDict({"a": torch.arange(6).reshape(2, 3)}, [2])
    for call in ("pad([1])", "pad([0, 0, 0, 0])", "repeat(1, 2)", "repeat()"):
        with pytest.raises(ValueError, match="needs"):
            eval(f"td.{call}", {"td": td})
