"""A stored TensorDict that moves to files or to shared memory in place, as one in memory does."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tdstore
from tdstore import TensorDict
from tdstore.errors import UnsupportedError


@pytest.fixture(params=["x.h5", "x.zarr"])
def stored(request: pytest.FixtureRequest, tmp_path: Any) -> Any:
    data = TensorDict(a=torch.arange(8.0).view(4, 2), n={"b": torch.arange(4)}, s="text", batch_size=[4])
    data.save(tmp_path / request.param).close()
    with tdstore.open(tmp_path / request.param, "r+") as td:
        yield td


@pytest.mark.parametrize("rows", [slice(None), slice(1, 3)])
def test_it_moves_to_files(stored: Any, rows: slice, tmp_path: Any) -> None:
    td = stored[rows]
    want = td.to_tensordict()
    assert td.memmap_(tmp_path / "files") is td
    assert td.is_memmap()
    assert td.is_locked
    assert (td.to_tensordict() == want).all()
    td.set_("a", td["a"] + 1)
    td.close()
    assert torch.equal(TensorDict.load(tmp_path / "files")["a"], want["a"] + 1)
    assert torch.equal(stored["a"][rows], want["a"])  # what it was over stays as it was


def test_it_moves_to_shared_memory(stored: Any) -> None:
    want = stored.to_tensordict()
    assert stored.share_memory_() is stored
    assert stored.is_shared()
    assert stored.is_locked
    assert (stored.to_tensordict() == want).all()
    stored[0] = {"a": torch.full((2,), 9.0)}
    assert stored["a"][0].tolist() == [9, 9]


def test_it_takes_over_another_dataset(stored: Any, tmp_path: Any) -> None:
    TensorDict(z=torch.ones(3), batch_size=[3]).save(tmp_path / "other").close()
    assert stored.load_memmap_(tmp_path / "other") is stored
    assert list(stored.keys()) == ["z"]
    assert stored.batch_size == (3,)


def test_a_window_forgets_what_is_popped(stored: Any) -> None:
    window = stored[1:3]
    key, value = window.popitem()
    assert (key, value.data) == ("s", "text")
    key, value = window.popitem()
    assert key == "n"
    assert value["b"].tolist() == [1, 2]
    assert list(window.keys()) == ["a"]
    assert list(stored.keys()) == ["a", "n", "s"]


def test_what_has_no_place_is_refused(stored: Any) -> None:
    with pytest.raises(UnsupportedError, match="stays where it is stored"):
        stored.roll(1, 0, inplace=True)
