"""A folder to which the tensordict package has added rows since tdstore committed it last."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import tdstore
from tdstore import TensorDict
from tdstore.errors import CorruptStoreError


@pytest.fixture
def place(tmp_path: Path) -> Path:
    data = TensorDict({"a": torch.arange(3), "n": {"b": torch.zeros(3, 2)}, "name": "run"}, [3], names=["time"])
    data.save(tmp_path / "d").close()
    with tdstore.open(tmp_path / "d", "r+") as td:
        td.append({"a": 9, "n": {"b": torch.ones(2)}, "name": "run"})
    return tmp_path / "d"


def append_there(place: Path, rows: dict[str, Any], folder: str = "") -> None:
    """Add rows as `append_memmap` of tensordict 0.15.3 does: to the files, then to the shapes in `meta.json`."""
    meta = json.loads((place / folder / "meta.json").read_text())
    count = 0
    for key, value in rows.items():
        if isinstance(value, dict):
            append_there(place, value, key)
            continue
        with (place / folder / f"{key}.memmap").open("ab") as file:
            file.write(value.numpy().tobytes())
        count = len(value)
        meta[key]["shape"][0] += count
    meta["shape"][0] += count
    (place / folder / "meta.json").write_text(json.dumps(meta))


NEW = {"a": torch.tensor([7, 8]), "n": {"b": torch.full((2, 2), 5.0)}}


def test_the_error_says_what_happened(place: Path) -> None:
    append_there(place, NEW)
    match = r"tensordict package has added rows .* says \[6\] .* says \[4\]"
    for mode in ("r", "r+"):
        with pytest.raises(CorruptStoreError, match=match) as e:
            tdstore.open(place, mode)  # type: ignore[arg-type]
        assert e.value.hint is not None and "mode='r+', recover='accept'" in e.value.hint


def test_rows_are_read_and_taken_over(place: Path) -> None:
    append_there(place, NEW)
    before = (place / "tdstore.json").read_bytes()
    for mode in ("r", "r+"):
        with tdstore.open(place, mode, recover="accept") as td:  # type: ignore[arg-type]
            assert td.batch_size == td["n"].batch_size == (6,) and td.names == ["time"]
            assert td["a"].tolist() == [0, 1, 2, 9, 7, 8] and td["n", "b"].sum() == 22 and td["name"] == "run"
        assert ((place / "tdstore.json").read_bytes() == before) is (mode == "r")
    with tdstore.open(place, "r+", verify="full") as td:
        td.append({"a": 5, "n": {"b": torch.zeros(2)}, "name": "run"})
    assert tdstore.open(place, verify="full")["a"].tolist() == [0, 1, 2, 9, 7, 8, 5]


def test_rows_that_were_added_in_part_are_refused(place: Path) -> None:
    append_there(place, NEW)
    with (place / "a.memmap").open("ab") as file:
        file.write(bytes(8))
    for options in ({}, {"recover": "accept"}):
        with pytest.raises(CorruptStoreError, match="'a' has 56 bytes, expected 32\n") as e:
            tdstore.open(place, "r+", **options)
        assert e.value.hint == "restore it from a copy"


def test_damage_is_no_growth(place: Path) -> None:
    (place / "a.memmap").write_bytes(bytes(32))
    with pytest.raises(CorruptStoreError, match="damaged") as e:
        tdstore.open(place)
    assert "added rows" not in str(e.value) and e.value.hint is not None and "recover='accept'" in e.value.hint
