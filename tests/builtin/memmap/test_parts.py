"""Parts of memory-mapped tensors and TensorDicts: sent by the name of the file, whatever made them."""

from __future__ import annotations

import copy
import io
import multiprocessing
import pickle
from collections.abc import Callable
from pathlib import Path as FsPath
from typing import Any

import pytest
import tensordict
import torch

from tdstore import MemoryMappedTensor, TensorDict
from tdstore.builtin.memmap.tensor import reopened_part
from tdstore.errors import CorruptStoreError, StoreNotFoundError

SLICES: dict[str, Callable[[Any], Any]] = {
    "a row": lambda t: t[3],
    "rows": lambda t: t[100:500],
    "every second": lambda t: t[::2],
    "a column": lambda t: t[:, 7],
    "a corner": lambda t: t[:10, 2:9:3],
    "a slice of a slice": lambda t: t[100:][5],
    "an element": lambda t: t[3, 4],
    "a new dimension": lambda t: t[3, None],
    "nothing": lambda t: t[5:5],
    "all": lambda t: t[:],
    "a piece of a split": lambda t: t.split(300)[1],
    "a piece of a split by sizes": lambda t: t.split([40, 60], 1)[1],
    "a chunk": lambda t: t.chunk(3)[2],
    "a row of many": lambda t: t.unbind(0)[3],
    "a column of many": lambda t: t.unbind(1)[3],
}


@pytest.mark.parametrize("name", SLICES)
def test_a_slice_of_a_mapped_tensor_is_one(tmp_path: FsPath, name: str) -> None:
    take = SLICES[name]
    plain = torch.arange(100_000.0).reshape(1000, 100)
    mapped = MemoryMappedTensor.from_tensor(plain, filename=tmp_path / "x")
    theirs = tensordict.MemoryMappedTensor.from_tensor(plain, filename=tmp_path / "y")
    part = take(mapped)
    assert isinstance(part, MemoryMappedTensor) and isinstance(take(theirs), tensordict.MemoryMappedTensor)
    assert part.filename == str(tmp_path / "x")
    data = pickle.dumps(part)
    assert len(data) < 500
    again = pickle.loads(data)
    assert torch.equal(again, take(plain)) and again.dtype == part.dtype and again.stride() == part.stride()
    mapped.add_(1)
    assert torch.equal(again, take(plain + 1)), "the receiver does not see later writes"
    again.fill_(-5)
    assert torch.equal(take(mapped), torch.full_like(take(plain), -5))


def test_a_slice_outlives_the_tensor(tmp_path: FsPath) -> None:
    part = MemoryMappedTensor.from_tensor(torch.arange(10.0), filename=tmp_path / "x")[3:5]
    assert part.tolist() == [3, 4] and pickle.loads(pickle.dumps(part)).tolist() == [3, 4]
    assert copy.deepcopy(part).tolist() == [3, 4] and type(copy.deepcopy(part)) is torch.Tensor
    anonymous = MemoryMappedTensor.from_tensor(torch.arange(100_000.0))[3:5]
    assert pickle.loads(pickle.dumps(anonymous)).tolist() == [3, 4] and len(pickle.dumps(anonymous)) < 1000
    with pytest.raises(RuntimeError, match="copy_existing"):
        MemoryMappedTensor.from_tensor(part, filename=tmp_path / "y")
    with pytest.raises(RuntimeError, match="copy_existing"):
        MemoryMappedTensor.from_tensor(part, filename=tmp_path / "x", existsok=True)


def test_a_part_of_a_file_that_changed(tmp_path: FsPath) -> None:
    data = pickle.dumps(MemoryMappedTensor.from_tensor(torch.arange(10.0), filename=tmp_path / "x")[7:9])
    with open(tmp_path / "x", "ab") as file:
        file.write(bytes(40))  # rows were added
    assert pickle.loads(data).tolist() == [7, 8]
    with open(tmp_path / "x", "ab") as file:
        file.truncate(32)
    with pytest.raises(CorruptStoreError, match="32 bytes, expected 36"):
        pickle.loads(data)
    (tmp_path / "x").unlink()
    with pytest.raises(StoreNotFoundError, match="gone"):
        pickle.loads(data)


@pytest.mark.parametrize(
    ("offset", "shape", "stride"),
    [(-1, (2,), (1,)), (0, (2,), (-1,)), (0, (2, 2), (1,)), (0, (-2,), (1,)), (9, (2,), (1,))],
)
def test_a_part_that_is_none(tmp_path: FsPath, offset: int, shape: tuple[int, ...], stride: tuple[int, ...]) -> None:
    MemoryMappedTensor.from_tensor(torch.arange(10.0), filename=tmp_path / "x")
    with pytest.raises(CorruptStoreError):
        reopened_part(str(tmp_path / "x"), torch.float32, offset, shape, stride, True)


# -- TensorDicts ------------------------------------------------------------------------------------
PARTS: dict[str, Callable[[Any], Any]] = {
    "a row": lambda td: td[3],
    "rows": lambda td: td[:500],
    "every third": lambda td: td[::3],
    "split": lambda td: td.split(10, 0)[2],
    "unbind": lambda td: td.unbind(0)[3],
    "view": lambda td: td.view(10, 100),
    "permute": lambda td: td.unsqueeze(0),
    "some entries": lambda td: td.select("a")[3],
    "a nested one": lambda td: td["n"][7],
}


@pytest.mark.parametrize("name", PARTS)
@pytest.mark.parametrize("mode", ["memmap_", "r", "r+"])
def test_parts_of_a_tensordict_are_sent_by_name(tmp_path: FsPath, mode: str, name: str) -> None:
    take = PARTS[name]
    plain = TensorDict({"a": torch.arange(100_000.0).reshape(1000, 100), "n": {"b": torch.arange(1000)}}, [1000])
    td = plain.clone().memmap_(tmp_path / "d")
    if mode != "memmap_":
        td.close()
        td = TensorDict.load(tmp_path / "d", mode=mode)
    part = take(td)
    data = pickle.dumps(part)
    assert len(data) < 1500
    again = pickle.loads(data)
    assert (again == take(plain)).all() and again.batch_size == part.batch_size
    if mode != "r":
        td.unlock_().get("n").apply_(lambda b: b + 5)
        assert (again == take(plain.apply(lambda t: t if t.is_floating_point() else t + 5))).all()


def test_parts_of_temporary_files_are_sent_by_value() -> None:
    td = TensorDict({"a": torch.arange(100_000.0).reshape(1000, 100)}, [1000]).memmap_()
    data = pickle.dumps(td[3])
    assert len(data) < 2500
    assert pickle.loads(data)["a"].tolist() == list(range(300, 400))


def test_leaves_of_parts_of_a_mapped_tensordict(tmp_path: FsPath) -> None:
    td = TensorDict({"a": torch.arange(100_000.0).reshape(1000, 100)}, [1000]).memmap_(tmp_path / "d")
    for part in (td[300:600], td.split(300)[1], td.chunk(4)[1], td.unbind(0)[3]):
        assert isinstance(part["a"], MemoryMappedTensor)
        assert len(data := pickle.dumps(part["a"])) < 500
        assert torch.equal(pickle.loads(data), part["a"])


def test_a_checkpoint_of_a_part(tmp_path: FsPath) -> None:
    td = TensorDict({"a": torch.arange(1000.0)}, [1000]).memmap_(tmp_path / "d")
    torch.save(td[5:7], file := io.BytesIO())
    file.seek(0)
    again = torch.load(file, weights_only=True)
    assert again["a"].tolist() == [5, 6]
    again["a"].zero_()  # a file that was loaded so changes nothing
    assert td["a"][5:7].tolist() == [5, 6]


def test_a_process_writes_through(tmp_path: FsPath) -> None:
    td = TensorDict({"a": torch.zeros(1000, 100)}, [1000]).memmap_(tmp_path / "d")
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=TensorDict.add_, args=(td[3:5], 1))
    process.start()
    process.join()
    assert process.exitcode == 0
    assert td["a"].sum() == 200 and td["a"][3:5].sum() == 200
