"""What waits to be written is bounded by `buffer_bytes`, and is the same in the end whatever the bound."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path as FsPath
from typing import Any

import numpy as np
import pytest
import torch
import zarr
from tdstore_zarr.codec.buffers import LIMIT
from tdstore_zarr.layout.grid import full_index, rows_of
from tdstore_zarr.place.folder_engine import FolderEngine
from tdstore_zarr.store import open_zarr
from zarrhelp import header_of, load

from tdstore import TensorDict
from tdstore.engine import Blob
from tdstore.errors import CorruptStoreError, OptionError
from tdstore.threads import ThreadPool
from tdstore.types import LeafSpec, Read, Write

ROWS, SHARD = 64, 8
VALUE = torch.arange(ROWS * 16, dtype=torch.int32).view(ROWS, 16)


def written_by(place: FsPath, limit: int) -> int:
    """Write one row of every shard, then the others; how many shards were written before anyone said flush."""
    with open_zarr(place, mode="w", durable="none", chunks=2, shards=SHARD, buffer_bytes=limit) as store:
        store.create({("a",): LeafSpec(VALUE.shape, "int32")})
        first = torch.arange(0, ROWS, SHARD)
        others = torch.tensor([row for row in range(ROWS) if row % SHARD])
        store.write([Write(("a",), (first,), VALUE[first])])
        waiting = store._session.buffers._bytes
        assert waiting <= max(limit, 0)
        written = len(store._session.leaves[("a",)].objects)
        store.write([Write(("a",), (others,), VALUE[others])])
        store.save_header(header_of({("a",): VALUE}))
    return written


@pytest.mark.parametrize(("shards", "written"), [(0, 8), (3, 8), (7, 8), (8, 0)])
def test_shards_wait_for_the_rest_of_their_rows(tmp_path: FsPath, shards: int, written: int) -> None:
    place = tmp_path / "t.zarr"
    nbytes = SHARD * 16 * 4
    found = written_by(place, shards * nbytes)
    assert (found >= written // 2) if written else found == 0
    assert torch.equal(load(place, verify="full")[("a",)], VALUE)


def test_the_default_and_what_cannot_be(tmp_path: FsPath) -> None:
    with open_zarr(tmp_path / "t.zarr", mode="w", durable="none") as store:
        assert store._session.buffers.limit == LIMIT
    for wrong in (-1, 1.5, "64 MiB", True):
        with pytest.raises(OptionError, match="buffer_bytes must be a number of bytes"):
            open_zarr(tmp_path / "t.zarr", buffer_bytes=wrong)


def test_a_row_of_a_written_shard_reads_the_shard_once_and_starts_no_thread(
    tmp_path: FsPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    value = torch.arange(64 * 64, dtype=torch.int32).view(64, 64)
    with open_zarr(tmp_path / "t.zarr", mode="w", durable="none", chunks=2, shards=32) as store:
        store.create({("a",): LeafSpec(value.shape, "int32"), ("b",): LeafSpec(value.shape, "int32")})
        store.write([Write(("a",), (), value), Write(("b",), (), value)])
        store.save_header(header_of({("a",): value, ("b",): value}))
    read: list[str] = []
    get = FolderEngine.get

    def counted(engine: FolderEngine, key: str, limit: int | None = None) -> Blob:
        read.append(key)
        return get(engine, key, limit)

    def refused(*_: object) -> None:
        raise AssertionError("a thread was started")

    row = torch.full((1, 64), 7, dtype=torch.int32)
    with open_zarr(tmp_path / "t.zarr", mode="r+", durable="none") as store:
        monkeypatch.setattr(FolderEngine, "get", counted)
        monkeypatch.setattr(ThreadPool, "submit", refused)
        store.write([Write((name,), (slice(41, 42, 1),), row) for name in "ab"])
        store.save_header(store.load_header())
        monkeypatch.undo()
    assert sorted(key for key in read if "/c/" in key) == ["a/c/1/0", "b/c/1/0"]
    value[41] = 7
    for name in "ab":
        assert torch.equal(load(tmp_path / "t.zarr", verify="full")[(name,)], value)


def test_a_shard_that_was_cut_is_refused_by_a_write_to_one_of_its_rows(tmp_path: FsPath) -> None:
    value = torch.arange(64 * 64, dtype=torch.int32).view(64, 64)
    with open_zarr(tmp_path / "t.zarr", mode="w", durable="none", chunks=2, shards=32) as store:
        store.create({("a",): LeafSpec(value.shape, "int32")})
        store.write([Write(("a",), (), value)])
        store.save_header(header_of({("a",): value}))
    with open_zarr(tmp_path / "t.zarr", mode="r+", durable="none") as store:
        shard = tmp_path / "t.zarr" / "a" / "c" / "0" / "0"
        store.read([Read(("a",), (slice(0, 1, 1),))])  # its index is known now
        shard.write_bytes(shard.read_bytes()[:16])
        with pytest.raises(CorruptStoreError, match="'a'"):
            store.write([Write(("a",), (slice(5, 6, 1),), value[:1])])
            store.save_header(store.load_header())


def some_index(shape: tuple[int, ...], rng: random.Random) -> tuple[slice | torch.Tensor, ...]:
    terms: list[slice | torch.Tensor] = []
    for size in shape[: rng.randint(0, len(shape))]:
        start, stop = sorted((rng.randrange(size + 1), rng.randrange(size + 1)))
        kinds: list[slice | torch.Tensor] = [slice(start, stop, 1), slice(start, stop, rng.randint(1, 3))]
        if not any(isinstance(term, torch.Tensor) for term in terms):
            kinds.append(torch.tensor(rng.sample(range(size), rng.randint(1, size))))
        terms.append(rng.choice(kinds))
    return tuple(terms)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("shape", "layout"),
    [
        ((), {}),
        ((23,), {"chunks": 3, "shards": 9}),
        ((23,), {"chunks": 4, "shards": False}),
        ((13, 7), {"chunks": (2, 3), "shards": (4, 6)}),
        ((13, 7), {"chunks": (3, 7), "shards": (9, 7)}),
        ((9, 5, 4), {"chunks": (1, 5, 2), "shards": (3, 5, 4)}),
    ],
)
def test_blocks_and_rows_of_chunks_are_as_in_memory(
    tmp_path: FsPath, shape: tuple[int, ...], layout: dict[str, Any], seed: int
) -> None:
    rng = random.Random(seed)
    model = torch.full(shape, -5, dtype=torch.int32)
    with open_zarr(tmp_path / "t.zarr", mode="w", durable="none", **layout) as store:
        store.create({("a",): LeafSpec(shape, "int32", fill_value=-5)})
        store.save_header(header_of({("a",): model}))
    with open_zarr(tmp_path / "t.zarr", mode="r+", durable="none") as store:
        for number in range(25):
            index = some_index(shape, rng)
            at = np.ix_(*map(rows_of, full_index(shape, index)))
            value = torch.as_tensor(model.numpy()[at] * 0 + number)
            store.write([Write(("a",), index, value)])
            model.numpy()[at] = number
            if rng.random() < 0.5:
                store.save_header(store.load_header())
            if rng.random() < 0.3:
                assert torch.equal(store.read([Read(("a",))])[0], model)
    assert torch.equal(load(tmp_path / "t.zarr", verify="full")[("a",)], model)


def test_shards_of_zarr_python_in_an_order_of_its_own_and_with_holes(tmp_path: FsPath) -> None:
    place = tmp_path / "t.zarr"
    group = zarr.open_group(str(place), mode="w")
    array = group.create_array("a", shape=(16, 16), dtype="int32", chunks=(2, 2), shards=(8, 16), fill_value=3)
    array[0:5, 2:9] = value = np.arange(35, dtype=np.int32).reshape(5, 7)
    model = np.full((16, 16), 3, np.int32)
    model[0:5, 2:9] = value
    with open_zarr(place, mode="r+", durable="none") as store:
        for number, row in enumerate((1, 7, 4, 1)):
            model[row, 3:5] = 100 + number
            part = torch.full((1, 2), 100 + number, dtype=torch.int32)
            store.write([Write(("a",), (slice(row, row + 1, 1), slice(3, 5, 1)), part)])
            store.save_header(store.load_header())
    assert np.array_equal(zarr.open_group(str(place))["a"][:], model)
    assert np.array_equal(load(place, verify="full")[("a",)].numpy(), model)


def grown(place: FsPath) -> Any:
    """Save a shard and a row, and append a row."""
    td: Any = TensorDict({"a": torch.arange(18).view(9, 2), "n": {"b": torch.zeros(9)}}, [9])
    td = td.save(place, storage="zarr", durable="none", chunks=2, shards=SHARD)
    td.append({"a": torch.ones(2).long(), "n": {"b": torch.ones(())}})
    return td


def test_another_shard_in_the_place_of_that_of_the_last_append_is_refused(tmp_path: FsPath) -> None:
    td = grown(tmp_path / "t")
    file = tmp_path / "t" / "a" / "c" / "1" / "0"
    data = bytearray(file.read_bytes())
    data[-(16 * SHARD // 2 + 4 + 4)] ^= 1  # the checksum of all chunks, which is before their index
    file.write_bytes(data)
    with pytest.raises(CorruptStoreError, match="shard 'a/c/1/0' .* is not the one that was committed"):
        td.append({"a": torch.ones(2).long(), "n": {"b": torch.ones(())}})
    assert len(td) == 10


def test_rows_are_appended_to_folders_that_were_copied_and_put_back(tmp_path: FsPath) -> None:
    td = grown(tmp_path / "t")
    for name in ("a", "n"):  # what a program that replaces whole arrays does
        shutil.copytree(tmp_path / "t" / name, tmp_path / name)
        shutil.rmtree(tmp_path / "t" / name)
        shutil.move(tmp_path / name, tmp_path / "t" / name)
    td.append({"a": torch.full((2,), 9), "n": {"b": torch.ones(())}})
    td.close()
    found = TensorDict.load(tmp_path / "t", verify="full")
    assert found["a"].tolist() == [*torch.arange(18).view(9, 2).tolist(), [1, 1], [9, 9]]
    assert found["n", "b"].tolist() == [*[0] * 9, 1, 1]


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="counts descriptors")
def test_neither_an_idle_writer_nor_a_reader_leaves_folders_open(tmp_path: FsPath) -> None:
    leaves = {f"leaf {number}": {"a": {"b": torch.zeros(4)}} for number in range(30)}
    before = len(os.listdir("/proc/self/fd"))
    td: Any = TensorDict(leaves, [4]).save(tmp_path / "t", storage="zarr", durable="none")
    td.append({name: {"a": {"b": torch.ones(())}} for name in leaves})
    td.append({name: {"a": {"b": torch.ones(())}} for name in leaves})
    assert len(os.listdir("/proc/self/fd")) - before <= 2
    with TensorDict.load(tmp_path / "t"):
        assert len(os.listdir("/proc/self/fd")) - before <= 2 + 2 + 4 + 4
    td.close()


@pytest.mark.parametrize("checksum", [True, False])
def test_damage_of_chunks_that_an_append_copies_is_found(tmp_path: FsPath, checksum: bool) -> None:
    values = torch.arange(3 * SHARD).view(-1, 1).expand(-1, 1000)
    td: Any = TensorDict({"a": values[: SHARD + 5]}, [SHARD + 5])
    td = td.save(tmp_path / "t", storage="zarr", durable="none", chunks=2, shards=SHARD, checksum=checksum)
    for number in range(SHARD + 5, 2 * SHARD - 1):
        td.append({"a": values[number]})
    assert not td._handle.store.verify()
    file = tmp_path / "t" / "a" / "c" / "1" / "0"
    data = bytearray(file.read_bytes())
    data[40] ^= 1
    file.write_bytes(data)
    td.append({"a": values[2 * SHARD - 1]})
    assert [fault.path for fault in td._handle.store.verify()] == [("a",)]
    td.close()
    with pytest.raises(CorruptStoreError, match="shard 'a/c/1/0'"):
        TensorDict.load(tmp_path / "t", verify="full")


@pytest.mark.parametrize("seed", range(5))
def test_shards_that_begin_alike_have_the_checksums_of_their_bytes(tmp_path: FsPath, seed: int) -> None:
    rng = random.Random(seed)
    model = torch.arange(40, dtype=torch.int32)
    with open_zarr(tmp_path / "t.zarr", mode="w", durable="none", chunks=2, shards=16, compressors="none") as store:
        store.create({("a",): LeafSpec((40,), "int32")})
        store.write([Write(("a",), (slice(0, 20, 1),), model[:20])])
        store.save_header(header_of({("a",): model}))
    model[20:] = 0
    committed, end = model.clone(), 20
    with open_zarr(tmp_path / "t.zarr", mode="r+", durable="none") as store:
        for number in range(60):
            row = end if end < 40 and rng.random() < 0.6 else rng.randrange(40)
            end += row == end
            model[row] = number
            store.write([Write(("a",), (slice(row, row + 1, 1),), model[row : row + 1].clone())])
            way = rng.random()
            if way < 0.7:
                store.save_header(store.load_header())
                committed = model.clone()
            elif way < 0.8:
                store.discard()
                model = committed.clone()
            elif way < 0.9:
                store.flush()
            assert not store.verify()
    assert torch.equal(load(tmp_path / "t.zarr", verify="full")[("a",)], model)
