"""`MemoryMappedTensor`: constructors, file names, pickling, and that operations are plain torch."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path as FsPath

import pytest
import torch

from tdstore.builtin.memmap import open_memmap
from tdstore.builtin.mmtensor import MemoryMappedTensor as MMT
from tdstore.errors import CorruptStoreError, StoreExistsError, StoreNotFoundError

from .support import OLD, load, save


def test_operations_give_plain_tensors(tmp_path: FsPath) -> None:
    t = MMT.from_tensor(torch.arange(4.0), filename=tmp_path / "x")
    for result in (t + 1, t[1:], t.clone(), t.view(2, 2), torch.stack([t, t])):
        assert type(result) is torch.Tensor
    t[1:].mul_(2)
    assert torch.equal(torch.from_file(str(tmp_path / "x"), size=4), torch.tensor([0.0, 2, 4, 6]))


def test_constructors(tmp_path: FsPath) -> None:
    assert MMT.zeros(2, 3).tolist() == [[0] * 3] * 2 and MMT.ones((2,), dtype=torch.int16).tolist() == [1, 1]
    assert MMT.full((2,), 2.5).tolist() == [2.5, 2.5] and MMT.full(2, fill_value=3).dtype == torch.int64
    like = torch.empty(2, 2, dtype=torch.bfloat16)
    for made, value in ((MMT.empty_like(like), 0), (MMT.ones_like(like), 1), (MMT.full_like(like, 4), 4)):
        assert made.dtype == like.dtype and made.shape == like.shape and float(made[1, 1]) == value
    named = MMT.zeros(3, filename=tmp_path / "z")
    assert named.filename == str(tmp_path / "z") and (tmp_path / "z").stat().st_size == 12
    assert MMT.empty(0, 4).shape == (0, 4)
    with pytest.raises(RuntimeError, match="anonymous"):
        _ = MMT.zeros(3).filename
    with pytest.raises(ValueError, match="cuda"):
        MMT.zeros(3, device="cuda")
    with pytest.raises(ValueError, match="does not fit"):
        MMT.from_tensor(torch.zeros(3), shape=(4,))
    with pytest.raises(TypeError, match="sparse"):
        MMT.from_tensor(torch.eye(2).to_sparse())


def test_existing_files(tmp_path: FsPath) -> None:
    name = tmp_path / "x"
    first = MMT.from_tensor(torch.ones(3), filename=name)
    with pytest.raises(StoreExistsError, match="existsok"):
        MMT.from_tensor(torch.zeros(3), filename=name)
    second = MMT.from_tensor(torch.zeros(5), filename=name, existsok=True)
    assert first.tolist() == [1, 1, 1] and second.tolist() == [0] * 5
    with pytest.raises(RuntimeError, match="copy_existing"):
        MMT.from_tensor(second, filename=tmp_path / "y")
    assert MMT.from_tensor(second, filename=tmp_path / "y", copy_existing=True).filename == str(tmp_path / "y")
    assert MMT.from_tensor(second, filename=name) is second
    assert sorted(p.name for p in tmp_path.iterdir()) == ["x", "y"]


def test_from_filename(tmp_path: FsPath) -> None:
    MMT.from_tensor(torch.arange(6), filename=tmp_path / "x")
    t = MMT.from_filename(tmp_path / "x", torch.int64, (2, 3))
    t[0, 0] = 9
    assert MMT.from_filename(tmp_path / "x", torch.int64, (2, 3), index=0).tolist() == [9, 1, 2]
    with pytest.raises(CorruptStoreError, match="48 bytes, expected 56"):
        MMT.from_filename(tmp_path / "x", torch.int64, (7,))
    with pytest.raises(StoreNotFoundError):
        MMT.from_filename(tmp_path / "gone", torch.int64, (7,))
    (tmp_path / "link").symlink_to(tmp_path / "x")
    with pytest.raises(CorruptStoreError):
        MMT.from_filename(tmp_path / "link", torch.int64, (6,))


def test_pickle_by_name(tmp_path: FsPath) -> None:
    t = MMT.from_tensor(torch.arange(1000.0), filename=tmp_path / "x")
    data = pickle.dumps(t)
    assert len(data) < 500
    again = pickle.loads(data)
    again[0] = 5
    assert float(t[0]) == 5 and again.filename == t.filename
    (tmp_path / "x").unlink()
    with pytest.raises(StoreNotFoundError, match="gone"):
        pickle.loads(data)
    assert not (tmp_path / "x").exists()
    assert torch.equal(pickle.loads(pickle.dumps(MMT.from_tensor(torch.ones(3)))), torch.ones(3))


def test_copies_are_plain(tmp_path: FsPath) -> None:
    t = MMT.from_tensor(torch.ones(3), filename=tmp_path / "x")
    for made in (copy.deepcopy(t), t.clone()):
        made.zero_()
        assert type(made) is torch.Tensor and t.tolist() == [1, 1, 1]


def test_leaves_of_a_store(tmp_path: FsPath) -> None:
    """Pickled leaves of an open store write through, and the store is sealed all the same."""
    save(tmp_path / "d", OLD)
    with open_memmap(str(tmp_path / "d"), mode="r+", durable="none") as store:
        pickle.loads(pickle.dumps(store.view(("a",)))).fill_(4)
    assert torch.equal(load(tmp_path / "d")[("a",)], torch.full((2000,), 4.0))
    with open_memmap(str(tmp_path / "d")) as store:
        pickle.loads(pickle.dumps(store.view(("a",)))).fill_(5)
    assert torch.equal(load(tmp_path / "d")[("a",)], torch.full((2000,), 4.0))
