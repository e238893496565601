"""Safetensors files of tensordict 0.15: what it keeps in their metadata, read and written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import tdstore
from tdstore import (
    LazyStackedTensorDict,
    NonTensorData,
    NonTensorStack,
    TensorDict,
    UnbatchedTensor,
    from_safetensors,
    lazy_stack,
    to_safetensors,
)
from tdstore.errors import CorruptStoreError, InvalidTypeError

# As to_safetensors of tensordict 0.15.3 wrote them, of this structure.
NOTE: dict[str, Any] = {
    "version": 1,
    "root": {
        "batch_size": [2],
        "names": ["q"],
        "keys": {
            "a": {"tensor": "a"},
            "n": {"td": {"batch_size": [2, 3], "names": ["q", "w"], "keys": {"x": {"tensor": "n.x"}}}},
            "u": {"tensor": "u", "unbatched": True},
            "d": {"non_tensor": {"k": [1, None]}},
            "e": {"td": {"batch_size": [2], "names": ["q"], "keys": {}}},
            "lz": {"td": {"batch_size": [2], "names": None, "stack_dim": 0, "keys": {"y": {"tensor": "lz.y"}}}},
        },
    },
}
TENSORS = {"a": torch.arange(2), "n.x": torch.rand(2, 3), "u": torch.ones(4), "lz.y": torch.ones(2, 1)}


@tdstore.tensorclass
class NotedPoint:
    a: torch.Tensor


def theirs(path: Path, note: object, tensors: dict[str, torch.Tensor] = TENSORS) -> Path:
    save_file(tensors, path, {"tensordict": note if isinstance(note, str) else json.dumps(note)})
    return path


def note_of(path: Path) -> Any:
    with safe_open(path, "pt") as file:
        return file.metadata().get("tensordict")


def test_what_the_other_package_wrote(tmp_path: Path) -> None:
    td = from_safetensors(theirs(tmp_path / "t.safetensors", NOTE))
    assert td.batch_size == torch.Size([2]) and td.names == ["q"] and list(td.keys()) == list("anude") + ["lz"]
    assert td["n"].batch_size == torch.Size([2, 3]) and td["n"].names == ["q", "w"]
    assert torch.equal(td["n", "x"], TENSORS["n.x"]) and td["d"] == {"k": [1, None]}
    assert type(td.get("u")) is UnbatchedTensor and td["u"].tolist() == [1] * 4 and td["e"].is_empty()
    assert type(td["lz"]) is LazyStackedTensorDict and td["lz"].stack_dim == 0 and td["lz", "y"].shape == (2, 1)
    assert from_safetensors(tmp_path / "t.safetensors", batch_size=[]).names == []
    assert from_safetensors(tmp_path / "t.safetensors", device="cpu").device == torch.device("cpu")


@pytest.mark.parametrize("known", [True, False])
def test_tensorclasses_that_this_process_declares(known: bool, tmp_path: Path) -> None:
    name = f"{NotedPoint.__module__}.{NotedPoint.__qualname__}" if known else "os.system"
    root = {"batch_size": [2], "names": None, "class": f"<class '{name}'>", "keys": {"a": {"tensor": "a"}}}
    path = theirs(tmp_path / "t.safetensors", {"version": 1, "root": root}, {"a": torch.arange(2)})
    found = from_safetensors(path)
    assert type(found) is (NotedPoint if known else TensorDict) and found.get("a").tolist() == [0, 1]


def without(*at: str) -> dict[str, Any]:
    note: Any = json.loads(json.dumps(NOTE))
    node = note
    for key in at[:-1]:
        node = node[key]
    del node[at[-1]]
    return note  # type: ignore[no-any-return]


WRONG: dict[str, object] = {
    "no JSON": "{",
    "a list": [],
    "another version": {**NOTE, "version": 2},
    "no batch size": without("root", "batch_size"),
    "no keys": without("root", "keys"),
    "no tensor": without("root", "keys", "a", "tensor"),
    "a wrong batch size": {"version": 1, "root": {**NOTE["root"], "batch_size": [7]}},
    "a wrong tensor": {"version": 1, "root": {**NOTE["root"], "keys": {"a": {"tensor": "zz"}}}},
    "a wrong dimension": {"version": 1, "root": {**NOTE["root"], "stack_dim": 5}},
    "a class of a number": {"version": 1, "root": {**NOTE["root"], "class": 1}},
}


@pytest.mark.parametrize("case", WRONG)
def test_descriptions_that_do_not_fit(case: str, tmp_path: Path) -> None:
    with pytest.raises(CorruptStoreError, match="description by tensordict"):
        from_safetensors(theirs(tmp_path / "t.safetensors", WRONG[case]))


def test_what_is_written_for_the_other_package(tmp_path: Path) -> None:
    td = TensorDict(
        {
            "a": torch.arange(2),
            "n": TensorDict({"x": torch.rand(2, 3)}, [2, 3], names=["q", "w"]),
            "u": UnbatchedTensor(torch.ones(4)),
            "d": NonTensorData("text", [2]),
            "p": NotedPoint(torch.ones(2), batch_size=[2]),
            "s": NonTensorStack("x", "y"),
        },
        [2],
    )
    to_safetensors(td, tmp_path / "t.safetensors")
    root = json.loads(note_of(tmp_path / "t.safetensors"))["root"]  # which 0.15.3 loads
    assert root["batch_size"] == [2] and root["names"] == ["q"] and list(root["keys"]) == ["a", "n", "u", "d", "p"]
    assert root["keys"]["n"]["td"] == NOTE["root"]["keys"]["n"]["td"] and root["keys"]["d"] == {"non_tensor": "text"}
    assert root["keys"]["u"]["unbatched"] is True and "class" not in root["keys"]["p"]["td"]
    back = from_safetensors(tmp_path / "t.safetensors")
    assert type(back.get("p")) is NotedPoint and list(back["s"]) == ["x", "y"]
    to_safetensors(lazy_stack([td, td]), tmp_path / "l.safetensors")
    assert note_of(tmp_path / "l.safetensors") is None


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "t.safetensors"
    to_safetensors(TensorDict({"a": torch.arange(2)}, [2]), path)

    def half(tensors: object, place: Any, notes: object) -> None:
        Path(place).write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr("safetensors.torch.save_file", half)
    with pytest.raises(OSError, match="disk full"):
        to_safetensors(TensorDict({"a": torch.ones(2)}, [2]), path)
    assert from_safetensors(path)["a"].tolist() == [0, 1] and [p.name for p in tmp_path.iterdir()] == [path.name]
    with pytest.raises(InvalidTypeError, match="TensorDict"):
        to_safetensors({"a": torch.ones(2)}, path)  # type: ignore[arg-type]
