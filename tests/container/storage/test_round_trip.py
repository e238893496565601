"""What goes into a backend comes out of it, on every one, and again after opening it anew."""

from __future__ import annotations

import copy
import pickle
import subprocess

import pytest
import torch

import tdstore
from tdstore import PersistentTensorDict, TensorDict
from tdstore.testing.processes.warm import python
from tests.conftest import assert_same


def test_save_gives_an_equal_container(backend, place, rich):
    saved = rich.save(**place(backend))
    assert_same(saved, rich)
    assert_same(saved.to_tensordict(), rich)
    saved.close()


def test_load_gives_it_back(reopened, place, rich):
    where = place(reopened)
    owner = rich.save(**where)
    loaded = TensorDict.load(where["location"])
    assert_same(loaded, rich)
    assert loaded["hello"] == "world"
    assert loaded["none"] is None
    assert loaded["plain"] == {"lr": 1e-3, "tags": ("a", 1)}
    assert loaded["rows"] == ["p", "q", "r", "s"]
    assert loaded[2]["rows"] == "r"
    assert loaded[1:3]["rows"] == ["q", "r"]
    loaded.close()
    owner.close()


def test_device_comes_back(reopened, place):
    for device in (None, "cpu"):
        where = place(reopened)
        owner = TensorDict({"a": torch.zeros(2)}, [2], device=device).save(**where)
        mapped = reopened == "memmap"  # what is mapped is on the CPU
        expected = torch.device("cpu") if mapped or device is not None else None
        assert TensorDict.load(where["location"]).device == expected
        owner.close()


@pytest.mark.parametrize("target", ["memmap", "h5"])
def test_copy_between_backends(reopened, target, place, rich, tmp_path):
    where = place(reopened)
    owner = rich.save(**where)
    tdstore.copy(where["location"], tmp_path / "copy", storage=target, progress=False)
    assert_same(TensorDict.load(tmp_path / "copy"), rich)
    with pytest.raises(tdstore.errors.StoreExistsError):
        tdstore.copy(where["location"], tmp_path / "copy", storage=target, progress=False)
    owner.close()


def test_a_window_saves_its_rows(reopened, place, rich, tmp_path):
    where = place(reopened)
    owner = rich.save(**where)
    part = TensorDict.load(where["location"])[[3, 1]]
    assert_same(part.save(tmp_path / "part"), rich[[3, 1]])
    owner.close()


def test_another_process_reads_it(reopened, place, rich):
    where = place(reopened)
    owner = rich.save(**where)
    code = f"from tdstore import TensorDict; td = TensorDict.load({where['location']!r}); print(float(td['a'].sum()))"
    out = subprocess.run([*python(), "-c", code], capture_output=True, text=True, check=True).stdout
    assert float(out) == pytest.approx(float(rich["a"].sum()), rel=1e-6)
    owner.close()


def test_pickle_ships_the_way_not_the_data(reopened, place, rich):
    where = place(reopened)
    big = TensorDict({"x": torch.zeros(1000, 100), "n": {"y": torch.ones(1000)}}, [1000]).save(**where)
    data = pickle.dumps(big)
    assert len(data) < 3000
    again = pickle.loads(data)
    assert_same(again, big)
    if isinstance(big, PersistentTensorDict):
        window = pickle.loads(pickle.dumps(big[5:10]["n"]))
        assert window.batch_size == (5,)
        assert torch.equal(window["y"], torch.ones(5))
    big.close()


def test_copies_are_independent(backend, place, rich):
    saved = rich.save(**place(backend))
    for copied in (saved.clone(), copy.deepcopy(saved), saved.to_tensordict()):
        copied["a"].zero_()
        assert not torch.equal(saved["a"], torch.zeros(4, 3))
    saved.close()


def test_save_over_its_own_source(reopened, place, rich):
    where = place(reopened)
    rich.save(**where).close()
    for mode in ("r", "r+"):
        source = tdstore.open(where["location"], mode)
        expected = source[1:].to_tensordict()
        source[1:].save(**where).close()
        again = TensorDict.load(where["location"])
        assert_same(again, expected)
        again.close()
        rich.save(**where).close()


def test_reading_into_buffers(backend, place):
    td = TensorDict({"x": torch.arange(40.0).reshape(10, 4), "n": {"y": torch.arange(10)}}, [10])
    saved = td.save(**place(backend))
    out = TensorDict({"x": torch.zeros(3, 4), "n": {"y": torch.zeros(3, dtype=torch.int64)}}, [3])
    pointer = out["x"].data_ptr()
    for index in ([7, 0, 7], torch.tensor([9, 1, 4]), slice(2, 5)):
        assert saved.read(index, out=out) is out
        assert out["x"].data_ptr() == pointer
        assert torch.equal(out["x"], td[index]["x"])
        assert torch.equal(out["n", "y"], td[index]["n", "y"])
    assert list(saved.read(2, keys=[("n", "y")]).keys(True, True)) == [("n", "y")]
    with pytest.raises((ValueError, KeyError)):
        saved.read([1, 2], keys="x", out=TensorDict({"x": torch.zeros(2, 5)}, [2]))
    saved.close()


def test_in_place_writes_reach_the_store(reopened, place):
    where = place(reopened)
    td = TensorDict({"x": torch.zeros(6, 2), "n": {"y": torch.zeros(6, dtype=torch.int64)}, "s": "old"}, [6])
    saved = td.save(**where)
    twin = td.clone()
    for step in (
        lambda t: t.set_("x", torch.ones(6, 2)),
        lambda t: t.set_at_(("n", "y"), 4, [5, 0]),
        lambda t: t.__setitem__(
            slice(1, 3), TensorDict({"x": torch.full((2, 2), 7.0), "n": {"y": torch.ones(2)}}, [2])
        ),
        lambda t: t.__setitem__([4, 4, 3], t[[0, 1, 2]].clone()),
        lambda t: t.update_({"n": {"y": torch.arange(6)}}),
        lambda t: t.update_at_({"x": torch.full((2,), -1.0)}, 5),
        lambda t: t.add_(1),
        lambda t: t.mul_(t.clone()),
        lambda t: t["n"].zero_(),
        lambda t: t.apply_(lambda v: v + 2),
        lambda t: t.fill_("x", 3),
        lambda t: t.masked_fill_(torch.tensor([True, False, False, False, False, True]), 0),
    ):
        step(saved)
        step(twin)
        assert_same(saved.to_tensordict(), twin)
    saved.close() if reopened != "named shared" else None
    again = TensorDict.load(where["location"])
    assert_same(again, twin)
    again.close()


def test_structure_changes_of_a_stored_one_are_stored(tmp_path):
    where = tmp_path / "x.h5"
    td = TensorDict({"b": torch.zeros(3), "a": torch.ones(3, 2), "n": {"y": torch.arange(3)}}, [3]).to_h5(where)
    td["new"] = torch.full((3, 4), 5.0)
    td["n", "deep", "z"] = torch.arange(3)
    td["text"] = "hi"
    td["b"] = torch.ones(3, 7)
    td.rename_key_("a", "first")
    td.rename_key_(("n", "y"), ("n", "w"))
    del td["n", "deep", "z"]
    td["group"] = TensorDict({"u": torch.zeros(3), "v": "w"}, [3])
    expected = td.to_tensordict()
    td.close()
    again = TensorDict.load(where)
    assert_same(again, expected)
    assert list(again.keys()) == ["b", "n", "new", "text", "first", "group"]
    again.close()
