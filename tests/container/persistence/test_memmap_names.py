"""The names that users of memory-mapped TensorDicts know."""

from __future__ import annotations

import os
import pickle
import time

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import tdstore
from tdstore import MemoryMappedTensor, TensorDict, errors
from tests.conftest import assert_same

ON_DISK = True  # files with large holes


@pytest.fixture
def td():
    return TensorDict({"a": torch.arange(6.0).reshape(3, 2), "n": {"b": torch.arange(3)}, "s": "x"}, [3], names=["t"])


def test_memmap_leaves_the_source_alone(td, tmp_path):
    mm = td.memmap(tmp_path / "x")
    assert not td.is_memmap() and not td.is_locked
    assert mm.is_memmap() and mm.is_locked and mm.device == torch.device("cpu")
    assert mm.saved_path == str(tmp_path / "x")
    assert isinstance(mm["a"], MemoryMappedTensor)
    assert mm["a"].filename == str(tmp_path / "x" / "a.memmap")
    assert mm["n"].saved_path == str(tmp_path / "x" / "n")
    mm["a"][0] = 9  # writes through
    mm.close()
    assert TensorDict.load_memmap(tmp_path / "x")["a"][0].tolist() == [9, 9]
    with pytest.raises(AttributeError):
        td.saved_path  # noqa: B018


def test_memmap_in_place_keeps_identities(td, tmp_path):
    nested = td["n"]
    assert td.memmap_(tmp_path / "x") is td
    assert td["n"] is nested and nested.is_memmap() and td.is_locked
    with pytest.raises(errors.LockedError):
        td["new"] = torch.zeros(3)
    td.unlock_()
    td["new"] = torch.zeros(3)
    assert not td.is_memmap()


def test_without_a_prefix_it_is_temporary(td):
    mm = td.memmap()
    assert mm.is_memmap() and isinstance(mm["a"], MemoryMappedTensor)
    assert_same(mm, td)
    mm["a"].zero_()
    assert td["a"].sum() == 15
    back = pickle.loads(pickle.dumps(mm))  # by value: no other process could open the files
    mm["a"].fill_(1)
    assert back["a"].sum() == 0


def test_memmap_like_of_a_million_expanded_rows(tmp_path):
    row = TensorDict({"obs": torch.ones(84, 84, 3, dtype=torch.uint8), "n": {"r": torch.ones(1)}, "s": "kept"})
    start = time.process_time()
    like = row.expand(1_000_000).memmap_like(tmp_path / "big")
    assert time.process_time() - start < 20  # copying 21 GB would take minutes; this is no benchmark
    assert like.batch_size == (1_000_000,)
    assert sum(p.stat().st_blocks for p in (tmp_path / "big").rglob("*")) * 512 < 16 << 20  # of 21 GB
    assert not like[999_999]["obs"].any()
    assert like["s"] == "kept"
    like[3] = row
    assert like[3]["obs"].sum() == 84 * 84 * 3


def test_memmap_like_never_keeps_old_bytes(tmp_path):
    ones = TensorDict({"a": torch.ones(4)}, [4])
    ones.memmap(tmp_path / "x").close()
    assert ones.memmap_like(tmp_path / "x")["a"].sum() == 0


def test_make_memmap(td, tmp_path):
    mm = td.memmap(tmp_path / "x")
    assert mm.make_memmap("z", (3, 2), dtype=torch.int64).sum() == 0
    mm.make_memmap_from_tensor(("n", "deep", "t"), torch.arange(3.0))
    mm.make_memmap_from_storage("u", torch.arange(3).untyped_storage(), (3,), dtype=torch.int64)
    mm["z"].fill_(4)
    other = TensorDict.load_memmap(tmp_path / "x")
    assert torch.equal(other["n", "deep", "t"], torch.arange(3.0))
    assert torch.equal(other["u"], torch.arange(3))
    assert list(other.keys()) == list(mm.keys())
    mm.close()
    assert TensorDict.load_memmap(tmp_path / "x")["z"].sum() == 24
    with pytest.raises(errors.ReadOnlyError):
        TensorDict.load_memmap(tmp_path / "x").make_memmap("q", (3,))
    with pytest.raises(errors.StoreError):
        td.make_memmap("q", (3,))


def test_refresh_sees_what_others_added(td, tmp_path):
    mm = td.memmap(tmp_path / "x")
    reader = TensorDict.load_memmap(tmp_path / "x")
    mm.make_memmap_from_tensor("late", torch.ones(3))
    assert "late" not in reader
    reader.memmap_refresh_()
    assert torch.equal(reader["late"], torch.ones(3))
    with pytest.raises(RuntimeError):
        td.memmap_refresh_()


def test_load_to_meta_fake_and_out(td, tmp_path):
    td.memmap(tmp_path / "x").close()
    meta = TensorDict.load_memmap(tmp_path / "x", device="meta")
    assert meta["a"].device.type == "meta" and meta["a"].shape == (3, 2)
    with FakeTensorMode():
        fake = TensorDict.load_memmap(tmp_path / "x")
        assert isinstance(fake["a"], FakeTensor)
        assert isinstance(fake["n", "b"], FakeTensor)
    out = TensorDict({"a": torch.zeros(3, 2), "stale": torch.zeros(3)}, [3])
    assert TensorDict.load_memmap(tmp_path / "x", out=out) is out
    assert_same(out, td)
    assert TensorDict.load_memmap(tmp_path / "x", subpath="n")["b"].tolist() == [0, 1, 2]
    fresh = TensorDict({"a": torch.zeros(1)}, [1]).load_memmap_(tmp_path / "x")
    assert_same(fresh, td)


def test_return_early_gives_a_future(td, tmp_path):
    future = td.memmap(tmp_path / "x", num_threads=2, return_early=True)
    assert_same(future.result(timeout=200), td)


def test_pickle_of_missing_files_is_an_error(td, tmp_path):
    data = pickle.dumps(td.memmap(tmp_path / "x"))
    os.rename(tmp_path / "x", tmp_path / "y")
    with pytest.raises(errors.StoreNotFoundError):
        pickle.loads(data)
    assert not (tmp_path / "x").exists()


def test_writes_that_torch_sees_are_sealed_without_close(td, tmp_path):
    mm = td.memmap(tmp_path / "x")
    mm["a"].add_(1)
    mm[1:]["n", "b"].zero_()
    del mm
    again = TensorDict.load_memmap(tmp_path / "x", verify="full")
    assert again["n", "b"].tolist() == [0, 0, 0]


def test_open_is_a_context_manager(td, tmp_path):
    td.save(tmp_path / "x").close()
    with tdstore.open(tmp_path / "x", "r+") as opened:
        opened["a"].zero_()
    assert TensorDict.load(tmp_path / "x")["a"].sum() == 0
    with tdstore.open(tmp_path / "y.h5", "w") as fresh:
        fresh.batch_size = [2]
        fresh["a"] = torch.ones(2)
    assert TensorDict.load(tmp_path / "y.h5")["a"].sum() == 2


def test_a_write_to_a_tensor_opened_for_reading_is_told(td, tmp_path):
    td.memmap(tmp_path / "x").close()
    loaded = TensorDict.load_memmap(tmp_path / "x")
    loaded["n", "b"][0] = 9  # torch has no read-only tensors: this one is private memory
    with pytest.warns(UserWarning, match=r"'n' / 'b'.*mode='r\+'"):
        loaded.close()
    assert TensorDict.load_memmap(tmp_path / "x")["n", "b"].tolist() == [0, 1, 2]


def test_a_tensor_of_a_name_that_is_taken(tmp_path):
    td = TensorDict({"a": torch.ones(4)}, [4]).memmap(tmp_path / "x")
    with pytest.raises(errors.StoreExistsError, match="already"):
        td.make_memmap_from_tensor("a", torch.zeros(4), existsok=True)
    assert td["a"].sum() == 4
