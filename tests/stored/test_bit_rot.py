"""What a read copies is compared with checksums, once, with default options."""

from __future__ import annotations

import os
from pathlib import Path as FsPath

import numpy as np
import pytest
import torch

import tdstore
from tdstore import TensorDict
from tdstore.builtin import readcheck
from tdstore.errors import CorruptStoreError
from tdstore.types import Read

ROWS = 3000


def saved(path: FsPath) -> TensorDict:
    noise = torch.Generator().manual_seed(0)
    x = torch.randint(0, 255, (ROWS, 4096), dtype=torch.uint8, generator=noise)
    td = TensorDict({"x": x, "n": {"y": torch.arange(float(ROWS))}}, [ROWS])
    td.save(path).close()
    return td


def flip(path: FsPath, td: TensorDict, row: int) -> None:
    file = path / "x.memmap" if path.is_dir() else path
    data = file.read_bytes()
    at = data.find(td["x"][row].numpy().tobytes())
    assert at >= 0
    with open(file, "r+b") as medium:
        medium.seek(at + 100)
        medium.write(bytes([data[at + 100] ^ 4]))


@pytest.mark.parametrize("name", ["d", "x.tdz"])
@pytest.mark.parametrize("how", ["all", "slice", "rows", "one", "keys", "out", "store"])
def test_a_flipped_byte_is_noticed_by_a_read(tmp_path: FsPath, name: str, how: str) -> None:
    path = tmp_path / name
    td = saved(path)
    flip(path, td, 1700)
    opened = tdstore.open(path)
    reads = {
        "all": lambda: opened.read(),
        "slice": lambda: opened.read(slice(0, 10)),
        "rows": lambda: opened.read([1, 5, 2000]),
        "one": lambda: opened.read(1700),
        "keys": lambda: opened.read([1, 2], keys="x"),
        "out": lambda: opened.read(slice(0, 10), out=td[:10].clone()),
        "store": lambda: opened._home[0].store.read([Read(("x",))]),
    }
    with pytest.raises(CorruptStoreError, match=r"'x'.*block 1"):
        reads[how]()
    assert opened.read(keys=[("n", "y")])["n", "y"].sum() == sum(range(ROWS))
    assert tdstore.open(path, verify="none").read([1700])["x"].shape == (1, 4096)


@pytest.mark.parametrize("name", ["d", "x.tdz"])
def test_a_large_leaf_is_compared_by_the_blocks_that_are_read_whole(
    tmp_path: FsPath, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readcheck, "SMALL", 1 << 20)
    path = tmp_path / name
    td = saved(path)
    flip(path, td, 1700)  # in the second block of 4 MiB, rows 1024 to 2047
    opened = tdstore.open(path)
    assert torch.equal(opened.read(slice(0, 1024))["x"], td["x"][:1024])
    assert opened.read([1700])["x"].shape == (1, 4096)  # as the table says
    for rows in (slice(1000, 2100), slice(1024, 2048), slice(None), None):
        with pytest.raises(CorruptStoreError, match="block 1"):
            opened.read(rows)


@pytest.mark.parametrize("name", ["d", "x.tdz"])
def test_each_block_is_compared_once(tmp_path: FsPath, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / name
    td = saved(path)
    opened = tdstore.open(path)
    assert torch.equal(opened.read([5, 1700])["x"], td["x"][[5, 1700]])
    monkeypatch.setattr(readcheck, "crc32c", lambda _: pytest.fail("compared twice"))
    assert torch.equal(opened.read(slice(5, 1700), keys="x")["x"], td["x"][5:1700])


@pytest.mark.parametrize("name", ["d", "x.tdz"])
def test_private_writes_of_a_reader_are_not_damage(tmp_path: FsPath, name: str) -> None:
    path = tmp_path / name
    saved(path)
    opened = tdstore.open(path)
    opened["x"].numpy()[7] = 3  # in private memory
    assert opened.read([7])["x"].unique().tolist() == [3]


@pytest.mark.filterwarnings("ignore:.*were changed")
def test_rows_of_a_writer_beside_a_reader_are_not_damage(tmp_path: FsPath) -> None:
    path = tmp_path / "d"
    saved(path)
    before, during = tdstore.open(path), tdstore.open(path)
    writer = tdstore.open(path, mode="r+")
    writer["x"][1700] = 0
    writer["x"].numpy()[1701] = 0
    assert writer.read([1700])["x"].sum() == 0
    assert during.read([1700])["x"].sum() == 0
    writer.close()
    assert before.read([1701])["x"].sum() == 0
    os.rename(path, tmp_path / "e")
    assert tdstore.open(tmp_path / "e").read([1701])["x"].sum() == 0


def test_the_sums_are_those_of_the_medium(tmp_path: FsPath) -> None:
    """A replaced dataset leaves old readers what they mapped."""
    path = tmp_path / "d"
    td = saved(path)
    old = tdstore.open(path)
    TensorDict({"x": torch.zeros(4)}, [4]).save(path).close()
    assert np.array_equal(old.read()["x"].numpy(), td["x"].numpy())


def test_a_read_of_holes_is_refused_with_place_and_leaf(tmp_path: FsPath) -> None:
    """A terabyte that was declared and never written is opened, sliced and read by rows; not copied whole."""
    path = tmp_path / "d"
    td = TensorDict.from_schema({"huge": ((1 << 20,), torch.float32)}, batch_size=[1 << 18], location=path)
    td.set_at_("huge", torch.ones(1 << 20), 5)
    td.close()
    opened = tdstore.open(path)
    for read in (
        lambda: opened.read(),
        lambda: opened.read(slice(0, 1 << 17)),
        lambda: opened._home[0].store.read([Read(("huge",))]),
    ):
        with pytest.raises(CorruptStoreError, match=r"'huge'(.|\n)*max_bytes") as caught:
            read()
        assert str(path) in str(caught.value)
    assert opened.read([5, 6])["huge"].sum() == 1 << 20
