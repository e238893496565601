"""`MemoryMappedTensor`: constructors, file names, pickling, and that operations are plain torch."""

from __future__ import annotations

import copy
import pickle
import tempfile
from pathlib import Path as FsPath

import pytest
import tensordict
import torch

from tdstore.builtin.memmap.store import open_memmap
from tdstore.builtin.memmap.tensor import MemoryMappedTensor as MMT
from tdstore.errors import BatchSizeError, CorruptStoreError, StoreExistsError, StoreNotFoundError
from tests.builtin.memmap.support import OLD, load, save

ON_DISK = True  # pages of the page cache


def test_operations_give_plain_tensors(tmp_path: FsPath) -> None:
    t = MMT.from_tensor(torch.arange(4.0), filename=tmp_path / "x")
    for result in (t + 1, t[[1, 2]], t[t > 1], t[:2] + 1, t.clone(), t.view(2, 2), torch.stack([t, t])):
        assert type(result) is torch.Tensor
    t[1:].mul_(2)
    assert torch.equal(torch.from_file(str(tmp_path / "x"), size=4), torch.tensor([0.0, 2, 4, 6]))


def test_constructors(tmp_path: FsPath) -> None:
    assert MMT.zeros(2, 3).tolist() == [[0] * 3] * 2 and MMT.ones((2,), dtype=torch.int16).tolist() == [1, 1]
    assert MMT.full((2,), 2.5).tolist() == [2.5, 2.5] and MMT.full(2, fill_value=3).dtype == torch.float32
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
    for size, more, kind, text in (
        ((2,), {"fill_value": "x"}, TypeError, "'x' is no tensor or number for fill_value"),
        ((2,), {"fill_value": ""}, TypeError, "is no tensor or number for fill_value"),
        ((2,), {"dtype": "x"}, TypeError, "unknown dtype 'x'"),
        ((-2,), {}, BatchSizeError, "not the shape of a tensor"),
        ((1 << 61, 2), {}, BatchSizeError, "not the shape of a tensor"),
        ((10**30,), {}, BatchSizeError, "not the shape of a tensor"),
    ):
        with pytest.raises(kind, match=text):
            MMT.full(size, **{"fill_value": 0, **more})
    with pytest.raises(TypeError, match="a number, not None"):
        MMT.full((2,), None)


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


# -- from what is open or mapped already -----------------------------------------------------------
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:TypedStorage is deprecated")
def test_from_storage(tmp_path: FsPath) -> None:
    name = tmp_path / "x"
    MMT.from_tensor(torch.arange(6.0), filename=name)
    storage = torch.UntypedStorage.from_file(str(name), True, 24)
    made = MMT.from_storage(storage, shape=[2, 3], dtype=torch.float32)
    assert isinstance(made, MMT) and made.filename == str(name) and made.tolist() == [[0, 1, 2], [3, 4, 5]]
    made[0, 0] = 9
    assert torch.from_file(str(name), size=6)[0] == 9 and pickle.loads(pickle.dumps(made))[0, 0] == 9
    assert MMT.from_storage(storage, shape=[2, 3], dtype=torch.float32, filename=name, index=1).tolist() == [3, 4, 5]
    assert MMT.from_storage(storage, dtype=torch.uint8, device="cpu").shape == (24,)
    memory = torch.arange(3)
    typed = MMT.from_storage(memory.storage())
    typed[0] = 5
    assert typed.dtype == torch.int64 and memory[0] == 5
    with pytest.raises(RuntimeError, match="anonymous"):
        _ = typed.filename
    rows = MMT.from_storage(memory.untyped_storage(), dtype=torch.int64, shape=torch.tensor([[1], [2]]))
    assert [row.tolist() for row in rows.unbind()] == [[5], [1, 2]]


def test_what_is_no_storage_for_it(tmp_path: FsPath) -> None:
    storage = torch.arange(6.0).untyped_storage()
    with pytest.raises(TypeError, match="dtype="):
        MMT.from_storage(storage, shape=[6])
    with pytest.raises(TypeError, match="from_handler"):
        MMT.from_storage(storage, dtype=torch.float32, handler=object())
    with pytest.raises(ValueError, match="cuda"):
        MMT.from_storage(storage, dtype=torch.float32, device="cuda")
    with pytest.raises(RuntimeError, match="memory"):
        MMT.from_storage(storage, dtype=torch.float32, filename=tmp_path / "x")
    for shape in ([5], [7]):
        with pytest.raises(RuntimeError, match="6 elements"):
            MMT.from_storage(storage, dtype=torch.float32, shape=shape)
    with pytest.raises(RuntimeError, match="3 bytes"):
        MMT.from_storage(torch.zeros(3, dtype=torch.uint8).untyped_storage(), dtype=torch.int64)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:TypedStorage is deprecated")
def test_from_handler(tmp_path: FsPath) -> None:
    name = tmp_path / "x"
    MMT.from_tensor(torch.arange(6.0), filename=name)
    with open(name, "r+b") as file:
        made = MMT.from_handler(file, torch.float32, (2, 3))
        assert MMT.from_handler(file, torch.float32, (2, 3), 1).tolist() == [3, 4, 5]
        assert MMT.from_handler(file.fileno(), torch.float32, torch.tensor([[2, 2], [1, 2]])).unbind()[1].tolist() == [
            [4, 5]
        ]
        for shape in ((5,), (7,)):
            with pytest.raises(CorruptStoreError, match="24 bytes"):
                MMT.from_handler(file, torch.float32, shape)
    made.fill_(3)  # it outlives the file
    assert isinstance(made, MMT) and made.filename == str(name)
    assert torch.from_file(str(name), size=6).tolist() == [3] * 6 and pickle.loads(pickle.dumps(made))[0, 0] == 3
    with tempfile.TemporaryFile() as file:
        file.write(bytes(8))
        file.flush()
        anonymous = MMT.from_handler(file, torch.int64, [1])
    anonymous += 1
    assert pickle.loads(pickle.dumps(anonymous)).tolist() == [1]
    with pytest.raises(RuntimeError, match="anonymous"):
        _ = anonymous.filename
    with pytest.raises(TypeError, match="from_filename"):
        MMT.from_handler(str(name), torch.float32, (6,))  # type: ignore[arg-type]
    with open("/dev/zero", "r+b") as device, pytest.raises(CorruptStoreError, match="plain file"):
        MMT.from_handler(device, torch.float32, (6,))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested(tmp_path: FsPath) -> None:
    sizes = torch.tensor([[1, 2], [3, 2], [0, 2]])
    made = MMT.empty_nested(sizes, dtype=torch.int64, filename=tmp_path / "x")
    assert isinstance(made, MMT) and made.filename == str(tmp_path / "x") and made.is_nested
    made[1].fill_(4)
    assert [row.tolist() for row in MMT.from_filename(tmp_path / "x", torch.int64, sizes).unbind()] == [
        [[0, 0]],
        [[4, 4]] * 3,
        [],
    ]
    assert [row.sum().item() for row in pickle.loads(pickle.dumps(made)).unbind()] == [0, 24, 0]
    assert MMT.empty_nested([[2], [1]]).unbind()[0].tolist() == [0, 0] and not MMT.empty_nested(sizes[:0]).size(0)
    with pytest.raises(StoreExistsError):
        MMT.empty_nested(sizes, filename=tmp_path / "x")
    with pytest.raises(ValueError, match="none negative"):
        MMT.empty_nested([[-1, 2]])
    with pytest.raises(CorruptStoreError, match="64 bytes"):
        MMT.from_filename(tmp_path / "x", torch.int64, sizes[:1])
    copied = MMT.from_tensor(torch.nested.nested_tensor([torch.ones(2), torch.zeros(1)]), filename=tmp_path / "y")
    assert [row.tolist() for row in copied.unbind()] == [[1, 1], [0]] and (tmp_path / "y").stat().st_size == 12
    with pytest.raises(TypeError, match="jagged"):
        MMT.from_tensor(torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged))


def test_every_name_of_the_peer() -> None:
    public = {name for name in set(dir(tensordict.MemoryMappedTensor)) - set(dir(torch.Tensor)) if name[0] != "_"}
    public -= {"parent_shape"}  # deprecated there; before 0.15 an attribute of objects alone
    assert public <= set(dir(MMT))
