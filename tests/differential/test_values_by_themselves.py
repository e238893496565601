"""A value that no TensorDict holds is saved and found again, as by `tensordict`; what that one loses is kept."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import tdstore
from tdstore import MetaData, NonTensorData, NonTensorStack, TensorDict
from tdstore.errors import (
    CorruptStoreError,
    DifferentKeysError,
    InvalidTypeError,
    KeyNotFoundError,
    UntrustedDataError,
)
from tdstore.header import VALUE_KIND, Group, Header
from tdstore.interop import to_tensordict

peer = pytest.importorskip("tensordict")

MANY = [f"text {i} ü" for i in range(5000)]
VALUES: dict[str, Callable[[], Any]] = {
    "text": lambda: NonTensorData("text", batch_size=[4, 3]),
    "no batch": lambda: NonTensorData({"a": [1, 2.5, None]}),
    "meta": lambda: MetaData("v1", batch_size=[2]),
    "rows": lambda: NonTensorStack("a", "b"),
    "two dimensions": lambda: NonTensorStack(NonTensorStack("a", "b"), NonTensorStack("c", "d")),
    "many": lambda: NonTensorStack(*MANY),  # leaves of their own, not the header
}
WAYS: dict[str, tuple[str, str]] = {
    "save": ("v.save(p)", "T.load(p)"),
    "memmap": ("v.memmap(p)", "T.load_memmap(p)"),
    "tdz": ("v.save(p + '.tdz')", "tdstore.open(p + '.tdz')"),
    "h5": ("v.to_h5(p)", "T.from_h5(p)"),
    "zarr": ("v.save(p, storage='zarr')", "tdstore.load(p, storage='zarr')"),
    "one file": ("v.consolidate(p)", "T.from_consolidated(p)"),
    "class": ("v.save(p)", "type(v).load_memmap(p)"),
    "future": ("v.save(p, return_early=True).result()", "type(v).load(p, mode='r+')"),
    "in place": ("v.memmap_(p)", "type(v).load(p, device='cpu')"),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", VALUES)
def test_is_found_as_it_was(kind: str, way: str, tmp_path: Path) -> None:
    value, (save, load) = VALUES[kind](), WAYS[way]
    names = {"v": value, "p": str(tmp_path / "p"), "T": TensorDict, "tdstore": tdstore}
    for found in (eval(save, names), eval(load, names)):
        assert isinstance(found, type(value))
        assert found.batch_size == value.batch_size
        assert found.tolist() == value.tolist()


@pytest.mark.parametrize("kind", ["text", "no batch", "rows", "two dimensions"])
def test_each_package_reads_the_folder_of_the_other(kind: str, tmp_path: Path) -> None:
    ours = VALUES[kind]()
    theirs = to_tensordict(ours)
    theirs.memmap(str(tmp_path / "theirs"))
    found = TensorDict.load_memmap(str(tmp_path / "theirs"))
    back = peer.TensorDict.load_memmap(str(tmp_path / "theirs"))
    assert type(found).__name__ == type(back).__name__
    assert (found.tolist(), found.batch_size) == (back.tolist(), back.batch_size)
    ours.memmap(str(tmp_path / "ours"))
    assert peer.TensorDict.load_memmap(str(tmp_path / "ours")).tolist() == back.tolist()


def test_another_value_takes_it_over(tmp_path: Path) -> None:
    NonTensorData("new").save(tmp_path / "p")
    assert NonTensorData("old").load_memmap_(tmp_path / "p").data == "new"
    NonTensorStack("c", "d").save(tmp_path / "q")
    stack = NonTensorStack("a", "b")
    assert stack.load_(tmp_path / "q") is stack
    assert stack.tolist() == ["c", "d"]


def test_a_tensordict_and_a_value_do_not_take_each_other_over(tmp_path: Path) -> None:
    NonTensorData("x").save(tmp_path / "value")
    td = TensorDict({"a": torch.ones(2)}, [2])
    td.save(tmp_path / "td")
    stored = td.to_h5(tmp_path / "td.h5")
    for refused in (
        lambda: td.load_memmap_(tmp_path / "value"),
        lambda: stored.load_(tmp_path / "value"),
        lambda: TensorDict.load(tmp_path / "value", out=td),
    ):
        with pytest.raises(InvalidTypeError, match="'x'"):
            refused()
    assert td["a"].tolist() == stored["a"].tolist() == [1, 1]
    for wrong in (lambda: NonTensorData("x").load_(tmp_path / "td"), lambda: NonTensorStack.load(tmp_path / "td")):
        with pytest.raises(DifferentKeysError, match=r"\['a'\]"):
            wrong()


def test_what_is_not_plain_data_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    for save in ("save", "memmap", "consolidate", "to_h5"):
        with pytest.raises(UntrustedDataError):
            getattr(NonTensorData(object()), save)(tmp_path / "p")
    assert not list(tmp_path.iterdir())
    NonTensorData({1, 2}).save(tmp_path / "q", trust=True)
    assert TensorDict.load(tmp_path / "q", allow_pickle=True).data == {1, 2}


def test_a_pickled_value_of_the_peer_is_not_unpickled(tmp_path: Path) -> None:
    peer.NonTensorData(print).memmap(str(tmp_path / "p"))
    with pytest.raises(UntrustedDataError):
        TensorDict.load_memmap(tmp_path / "p")


def test_a_header_that_promises_a_value_and_has_none_is_corrupt(tmp_path: Path) -> None:
    with tdstore.open(tmp_path / "p", mode="w", storage="memmap") as td:
        td._binding[0].store.save_header(Header({(): Group(kind=VALUE_KIND)}))
    with pytest.raises(CorruptStoreError, match="one value"):
        tdstore.open(tmp_path / "p")


@pytest.mark.parametrize("kind", ["text", "rows"])
@pytest.mark.parametrize("package", ["tensordict", "tdstore"])
def test_state_dict_brings_a_value_back(kind: str, package: str) -> None:
    made = VALUES[kind]()
    value, other = (v if package == "tdstore" else to_tensordict(v) for v in (made, made.clone()))
    state = other.state_dict()
    assert list(state) == []
    if package == "tdstore":  # a stack of theirs is not written
        value.update(NonTensorData("changed", batch_size=value.batch_size))
        assert value.load_state_dict(state) is value
    assert value.load_state_dict({}).tolist() == other.tolist()
    with pytest.raises((KeyError, RuntimeError)):
        value.load_state_dict({"a": torch.ones(2)})


def test_assert_close_takes_values() -> None:
    value = VALUES["rows"]()
    assert tdstore.assert_close(value, value.clone())
    with pytest.raises(AssertionError):
        tdstore.assert_close(value, NonTensorStack("a", "c"))
    with pytest.raises(KeyNotFoundError):
        tdstore.assert_close(value, TensorDict({"a": torch.ones(2)}, [2]))


def test_from_dict_gives_the_value(tmp_path: Path) -> None:
    value = VALUES["rows"]()
    assert TensorDict.from_dict(value) is value
    stored = tdstore.PersistentTensorDict.from_dict(value, filename=tmp_path / "a.h5")
    assert stored["data"] == ["a", "b"]
    stored.close()
    assert tdstore.open(tmp_path / "a.h5").tolist() == ["a", "b"]
