"""What the semantics that users know say of every container, sentence by sentence: what nothing else here holds."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import tdstore
from tdstore import MemoryMappedTensor, NonTensorStack, PersistentTensorDict, TensorDict
from tdstore.errors import BatchSizeError, OptionError, ReadOnlyError, StoreError

from .containers import KINDS, Place

peer = pytest.importorskip("tensordict")
MASK = torch.tensor([[True, False], [True, True], [False, False], [False, True]])
WORDS = [["a", "b"], ["c", "d"], ["e", "f"], ["g", "h"]]


@pytest.fixture
def build(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[str, Any], Place]:
    def make(kind: str, td: Any) -> Place:
        server = request.getfixturevalue("redis") if kind == "redis" else None
        return KINDS[kind](td, tmp_path, server)

    return make


def numbers() -> TensorDict:
    b = torch.arange(8).view(4, 2)
    return TensorDict({"b": b, "n": {"c": b * 2.0, "m": {"d": b}}}, [4, 2])


# -- values ------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", KINDS)
def test_the_list_of_a_stack_of_values_writes_through(kind: str, build: Any) -> None:
    """`td["w"][1][0] = "x"` is a write to the TensorDict, wherever that is."""
    place = build(kind, TensorDict({"w": WORDS, "b": torch.zeros(4, 2)}, [4, 2]))
    words = place.td["w"]
    words[1][0] = "x"
    words[0] = ["u", "v"]  # a list of the row's length: a value each
    words[2] = "y"
    words[-1][1] = "z"
    wanted = [["u", "v"], ["x", "d"], ["y", "y"], ["g", "z"]]
    assert words == wanted
    assert place.td["w"] == wanted
    words[0][0] = "again"  # the lists are those of the TensorDict still
    assert place.seen_by_others()["w"] == [["again", "v"], *wanted[1:]]


def test_the_list_of_rows_that_are_lists_writes_through(tmp_path: Path) -> None:
    TensorDict({"s": NonTensorStack.from_list(WORDS), "b": torch.zeros(4)}, [4]).save(tmp_path / "a.h5")
    with tdstore.open(tmp_path / "a.h5", "r+") as td:
        td["s"][3][1] = "x"
        td["s"][0:1] = [["u", "v"]]
    with tdstore.open(tmp_path / "a.h5") as td:
        assert td["s"] == [["u", "v"], *WORDS[1:3], ["g", "x"]]


@pytest.mark.parametrize("name", ["a.h5", "a.zarr", "a"])
def test_the_list_of_what_is_read_only_says_so(name: str, tmp_path: Path) -> None:
    TensorDict({"s": WORDS}, [4, 2]).save(tmp_path / name)
    td = tdstore.open(tmp_path / name)
    with pytest.raises(ReadOnlyError):
        td["s"][0][0] = "x"
    assert td["s"] == WORDS


# -- names -------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", KINDS)
def test_names_follow_the_dimensions(kind: str, build: Any) -> None:
    td = build(kind, numbers()).td
    td.names = ["x", "y"]
    rows = torch.tensor([[0, 1]])
    for made, names in [
        (td.view(-1), [None]),
        (td.view(2, 4), [None, None]),
        (td[MASK], [None]),
        (td.masked_select(MASK), [None]),
        (td[rows], [None, None, "y"]),
        (td[:, rows], ["x", None, None]),
        (td[[0, 1], [1, 0]], [None]),
        (td[[2, 2]], ["x", "y"]),
        (td.permute(1, 0), ["y", "x"]),
    ]:
        assert made.names == names
        assert made["n"].names == names
    assert td.names == ["x", "y"]


# -- batch sizes -------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", [k for k in KINDS if k not in ("TensorDict", "lazy 0", "lazy 1", "window")])
def test_a_nested_batch_size_starts_with_the_outer_one(kind: str, build: Any) -> None:
    place = build(kind, numbers())
    for size in ([], [4]):
        with pytest.raises(BatchSizeError, match=r"has the batch size \[4, 2\]"):
            place.td["n"].batch_size = size
    assert place.td["n"].batch_size == (4, 2)
    assert place.seen_by_others()["n"].batch_size == (4, 2)


@pytest.mark.parametrize(
    "use",
    [
        lambda td, folder: td[0],
        lambda td, folder: td[[0, 1]],
        lambda td, folder: td.view(-1),
        lambda td, folder: td.unbind(1)[0],
        lambda td, folder: td.memmap(folder / "a"),
        lambda td, folder: tdstore.open(td.save(folder / "a.h5").filename),
    ],
    ids=["int", "rows", "view", "unbind", "memmap", "h5"],
)
def test_a_nested_batch_size_that_was_made_smaller_is_put_right(use: Any, tmp_path: Path) -> None:
    """An entry of an unlocked TensorDict does not know where it is; what is made of the whole is sound."""
    td = numbers()
    td["n"].batch_size = []
    made = use(td, tmp_path)
    assert made["n"].batch_size == made["n", "m"].batch_size == made.batch_size


def test_a_nested_batch_size_that_cannot_be_put_right(tmp_path: Path) -> None:
    td = numbers()
    td["n"].batch_size = []
    td["n"]["c"] = torch.zeros(3)
    with pytest.raises(BatchSizeError, match="'c'"):
        td.save(tmp_path / "a")
    assert not (tmp_path / "a").exists()


# -- files -------------------------------------------------------------------------------------
def test_mapped_entries_stay_in_their_files(tmp_path: Path) -> None:
    """`memmap_()` without a place is no reason to leave the files: writes would go nowhere."""
    numbers().memmap(tmp_path / "a")
    td = TensorDict.load_memmap(tmp_path / "a", mode="r+")
    assert td.memmap_() is td
    assert td.is_locked and str(td.saved_path) == str(tmp_path / "a")
    same = td.memmap()
    assert same is not td and same["b"].data_ptr() == td["b"].data_ptr()
    td["b"].fill_(7)
    td.close()
    assert TensorDict.load_memmap(tmp_path / "a")["b"].eq(7).all()


def test_mapped_entries_are_copied_when_that_is_asked_for(tmp_path: Path) -> None:
    td = numbers().memmap(tmp_path / "a")
    loaded = TensorDict.load_memmap(tmp_path / "a")
    for mapped in (td, td[:2], loaded):
        with pytest.raises(RuntimeError, match="copy_existing=True"):
            mapped.memmap(tmp_path / "b")
        assert not (tmp_path / "b").exists()
    with pytest.raises(RuntimeError, match="copy_existing=True"):
        td.memmap_(tmp_path / "b")
    assert td.memmap(tmp_path / "b", copy_existing=True)["b"].equal(td["b"])
    assert td.memmap(tmp_path / "a")["b"].equal(loaded["b"])  # where it is already
    assert td[[0, 1]].memmap(tmp_path / "c").batch_size == (2, 2)  # rows in memory
    assert numbers().memmap().memmap(tmp_path / "d").is_memmap()  # temporary files are nobody's
    assert td.save(tmp_path / "e")["b"].equal(td["b"])  # save() copies from anywhere to anywhere
    assert td.memmap(tmp_path / "f.tdz")["b"].equal(td["b"])


# -- schemas -----------------------------------------------------------------------------------
def test_temporary_files_of_a_schema_are_files() -> None:
    td = TensorDict.from_schema({"a": ((3,), torch.float32)}, batch_size=[2], storage="memmap")
    assert td.is_memmap() and not td.is_shared() and td.is_locked
    assert td.device == torch.device("cpu")
    assert isinstance(td["a"], MemoryMappedTensor)


@pytest.mark.parametrize("storage", ["memmap", "shared", "memory", "tdz"])
def test_a_schema_for_a_device_where_the_storage_is_not(storage: str, tmp_path: Path) -> None:
    """No device is ignored; and nothing is left behind."""
    place = {} if storage in ("shared", "memory") else {"location": tmp_path / "a"}
    with pytest.raises(OptionError, match="not on meta"):
        TensorDict.from_schema({"a": ((3,), torch.float32)}, batch_size=[2], storage=storage, device="meta", **place)
    assert not list(tmp_path.iterdir())


def test_a_schema_with_half_a_dimension() -> None:
    with pytest.raises(TypeError, match="'a'.*float"):
        TensorDict.from_schema({"a": ((1.5,), torch.float32)}, batch_size=[2])


# -- many writers ------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["h5", "zarr", "memmap", "redis", "remote"])
def test_threads_write_rows_beside_one_another(kind: str, build: Any) -> None:
    place = build(kind, TensorDict({"a": torch.zeros(64, 2, 3)}, [64, 2]))
    failed: list[StoreError] = []

    def fill(first: int) -> None:
        for row in range(first, 64, 4):
            try:
                place.td[row] = TensorDict({"a": torch.full((2, 3), row + 1.0)}, [2])
            except StoreError as error:
                failed.append(error)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=fill, args=(first,)) for first in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert not failed
    assert place.seen_by_others()["a"][:, 0, 0].tolist() == list(range(1, 65))


# -- the peer's zarr ---------------------------------------------------------------------------
def test_names_in_zarr_go_both_ways(tmp_path: Path) -> None:
    nested = peer.TensorDict({"c": torch.zeros(4, 2)}, [4, 2])
    theirs = peer.TensorDict({"a": torch.zeros(4, 2), "n": nested}, [4, 2], names=["x", "y"])
    theirs.to_zarr(str(tmp_path / "theirs.zarr"))
    with tdstore.open(tmp_path / "theirs.zarr") as td:
        assert isinstance(td, PersistentTensorDict)
        assert td.names == td["n"].names == ["x", "y"]
    ours = numbers()
    ours.names = ["x", "y"]
    ours.save(tmp_path / "ours.zarr")
    td = peer.TensorDict.from_zarr(str(tmp_path / "ours.zarr"))
    assert td.names == td["n"].names == ["x", "y"]


@pytest.mark.parametrize("names", [["x"], ["x", "x"], ["x", 3], "xy", None])
def test_names_in_zarr_that_are_none(names: Any, tmp_path: Path) -> None:
    peer.TensorDict({"a": torch.zeros(4, 2)}, [4, 2], names=["x", "y"]).to_zarr(str(tmp_path / "a.zarr"))
    node = tmp_path / "a.zarr" / "zarr.json"
    document = json.loads(node.read_text())
    document["attributes"]["__tensordict__"]["names"] = names
    node.write_text(json.dumps(document))
    with tdstore.open(tmp_path / "a.zarr") as td:
        assert td.names == [None, None]
        assert td.batch_size == (4, 2)


def test_a_typing_error_in_the_constructor_is_no_entry():
    with pytest.raises(ValueError, match="'batchsize' is neither"):
        TensorDict({"a": torch.zeros(2)}, batchsize=[2])
    assert TensorDict(a=torch.zeros(2), batch_size=[2])["a"].shape == (2,)


@pytest.mark.parametrize("join", [torch.stack, torch.cat])
def test_tensors_are_not_joined_with_tensordicts(join):
    with pytest.raises(TypeError, match="not with a Tensor"):
        join([TensorDict({"a": torch.zeros(2)}, [2]), torch.zeros(2)])


def test_long_values_are_cut_when_printed():
    td = TensorDict({"prompt": "word " * 10_000, "n": {"rows": ["x" * 5000] * 3}}, [3])
    assert len(repr(td)) < 2000 and "batch_size=torch.Size([3]), device=None)" in repr(td)


@pytest.mark.parametrize("name", ["m", "x.h5", "x.zarr"])
def test_a_row_with_a_value_that_cannot_be_stored_leaves_nothing(tmp_path, name):
    TensorDict({"a": torch.zeros(4), "n": {"b": torch.zeros(4)}}, [4]).save(tmp_path / name).close()
    with tdstore.open(tmp_path / name, mode="r+") as td:
        row = {"a": torch.ones(()), "bad": object(), "n": {"b": torch.ones(()), "worse": object()}, "z": torch.ones(())}
        with pytest.raises(tdstore.errors.UntrustedDataError, match="'bad'"):
            td[1] = TensorDict(row, [])
        assert set(td.keys(True, True)) == {"a", ("n", "b")} and not td["a"].any() and not td["n", "b"].any()
    with tdstore.open(tmp_path / name) as td:
        assert set(td.keys(True, True)) == {"a", ("n", "b")} and not td["a"].any()
