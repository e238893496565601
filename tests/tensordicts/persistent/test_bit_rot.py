"""What a read copies is compared with checksums, once, with default options."""

from __future__ import annotations

import os
from pathlib import Path as FsPath
from typing import Any

import numpy as np
import pytest
import torch

import tdstore
from tdstore import TensorDict
from tdstore.builtin import readcheck
from tdstore.builtin.memmap import opening
from tdstore.builtin.tdz import store as tdz_store
from tdstore.errors import CorruptStoreError
from tdstore.storekit import checksums
from tdstore.types import Read, Write

ROWS = 3000


@pytest.fixture(autouse=True)
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let datasets of some MiB be opened as large ones are."""
    monkeypatch.setattr(opening, "OPENED", 1 << 20)
    monkeypatch.setattr(tdz_store, "OPENED", 1 << 20)


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
        "store": lambda: opened._binding[0].store.read([Read(("x",))]),
    }
    with pytest.raises(CorruptStoreError, match=r"'x'.*byte 6946816"):
        reads[how]()
    assert opened.read(keys=[("n", "y")])["n", "y"].sum() == sum(range(ROWS))
    assert tdstore.open(path, verify="none").read([1700])["x"].shape == (1, 4096)


@pytest.mark.parametrize("name", ["d", "x.tdz"])
def test_a_large_leaf_is_compared_by_the_blocks_that_hold_the_rows(
    tmp_path: FsPath, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readcheck, "SMALL", 1 << 20)
    path = tmp_path / name
    td = saved(path)
    flip(path, td, 1700)  # in a block of 64 KiB, rows 1696 to 1711
    opened = tdstore.open(path)
    for sound in (slice(0, 1696), slice(1712, None), [1, 1712, 2999, -1], torch.arange(1696), slice(1680, 1720, 32)):
        assert torch.equal(opened.read(sound)["x"], td["x"][sound])
    mask = torch.zeros(ROWS, dtype=torch.bool)
    mask[1711] = True
    damaged: list[Any] = [[1700], [-1300], [5, 1696], 1700, (slice(1000, 1800), slice(0, 2)), slice(1711, 1712), mask]
    for rows in (*damaged, slice(0, None, 100), np.array([1700]), range(1690, 1700), slice(None), ..., None):
        with pytest.raises(CorruptStoreError, match="byte 6946816"):
            opened.read(rows)
    store = opened._binding[0].store
    with pytest.raises(CorruptStoreError, match="byte 6946816"):
        store.read([Read(("x",), (torch.tensor([3, 1700]),))])


@pytest.mark.parametrize("name", ["d", "x.tdz"])
def test_rows_longer_than_a_block(tmp_path: FsPath, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readcheck, "SMALL", 1 << 20)
    path = tmp_path / name
    x = torch.randint(0, 255, (20, 300_000), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    td = TensorDict({"x": x}, [20])
    td.save(path).close()
    flip(path, td, 7)
    opened = tdstore.open(path)
    assert torch.equal(opened.read([5, 9])["x"], x[[5, 9]])
    with pytest.raises(CorruptStoreError, match="'x'"):
        opened.read([5, 7])


@pytest.mark.parametrize("name", ["d", "x.tdz"])
def test_a_dataset_with_one_checksum_for_4_mib(tmp_path: FsPath, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As versions before this wrote: whole blocks are compared, few rows are not; appended rows keep the blocks."""
    path = tmp_path / name
    with monkeypatch.context() as before:
        before.setattr(checksums, "FINE", checksums.BLOCK)
        td = saved(path)
    if path.is_dir():
        assert '"block"' not in (path / "tdstore.json").read_text()
        with tdstore.open(path, mode="r+") as writer:
            writer.append(td[:10])
        assert '"block"' not in (path / "tdstore.json").read_text()
    assert tdstore.verify(path) == []
    flip(path, td, 1700)  # rows 1024 to 2047
    with pytest.raises(CorruptStoreError, match="byte 4194304"):
        tdstore.open(path).read([5])
    monkeypatch.setattr(readcheck, "SMALL", 1 << 20)
    opened = tdstore.open(path)
    assert torch.equal(opened.read(slice(0, 1024))["x"], td["x"][:1024])
    assert opened.read([1700])["x"].shape == (1, 4096)
    for rows in (slice(1000, 2100), slice(1024, 2048), slice(None), None):
        with pytest.raises(CorruptStoreError, match="byte 4194304"):
            opened.read(rows)
    assert [fault.path for fault in tdstore.verify(path)] == [("x",)]


@pytest.mark.parametrize("name", ["d", "x.tdz"])
def test_a_writer_compares_what_nobody_wrote(tmp_path: FsPath, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / name
    td = saved(path)
    flip(path, td, 1700)
    if path.is_dir():
        os.utime(path / "x.memmap", (1e9, 1e9))
        monkeypatch.setattr(opening, "is_store_noticed", lambda *_: True)  # also where the folder is in memory
    writer = tdstore.open(path, mode="r+")
    writer["n", "y"][5] = 7
    with pytest.raises(CorruptStoreError, match=r"'x'.*byte 6946816"):
        writer.read([5])
    assert writer.read([5], keys=[("n", "y")])["n", "y"].tolist() == [7]
    writer.close()
    assert tdstore.open(path)["n", "y"][5] == 7
    assert [fault.path for fault in tdstore.verify(path)] == [("x",)]


@pytest.mark.parametrize("name", ["d", "x.tdz"])
@pytest.mark.parametrize("how", ["torch", "numpy", "store", "other"])
def test_rows_that_a_writer_wrote_are_not_damage(tmp_path: FsPath, name: str, how: str) -> None:
    path = tmp_path / name
    saved(path)
    if path.is_dir():
        os.utime(path / "x.memmap", (1e9, 1e9))
    writer = tdstore.open(path, mode="r+")
    if how == "torch":
        writer["x"][1700] = 3
    elif how == "numpy":
        writer["x"].numpy()[1700] = 3
    elif how == "store":
        value = torch.full((1, 4096), 3, dtype=torch.uint8)
        writer._binding[0].store.write([Write(("x",), (slice(1700, 1701, 1), slice(0, 4096, 1)), value)])
    elif path.is_dir():
        other = tdstore.open(path, mode="r+")
        other["x"].numpy()[1700] = 3
    else:
        return  # of two writers of an archive the second one to commit is refused
    assert writer.read([1700])["x"].unique().tolist() == [3]
    writer.close()
    assert tdstore.open(path).read([1700])["x"].unique().tolist() == [3]


def test_an_archive_takes_no_new_sums_of_damage(tmp_path: FsPath) -> None:
    path = tmp_path / "x.tdz"
    td = saved(path)
    flip(path, td, 1700)
    writer = tdstore.open(path, mode="r+")
    writer["x"][5] = 3
    for end in (writer.commit, writer.close):
        with pytest.raises(CorruptStoreError, match=r"'x'(.|\n)*verify='none'"):
            end()
    assert [fault.path for fault in tdstore.verify(path)] == [("x",)]
    with tdstore.open(path, mode="r+", verify="none") as repairing:
        repairing["x"].copy_(td["x"])
    assert tdstore.verify(path) == []


@pytest.mark.parametrize("name", ["d", "x.tdz"])
@pytest.mark.parametrize("mode", ["r", "r+"])
def test_a_small_dataset_is_compared_whole_when_it_is_opened(
    tmp_path: FsPath, name: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    path = tmp_path / name
    td = saved(path)
    with tdstore.open(path, mode=mode) as opened, monkeypatch.context() as later:
        later.setattr(readcheck.ReadCheck, "_judge", lambda *_: pytest.fail("compared twice"))
        assert torch.equal(opened.read([5, 1700])["x"], td["x"][[5, 1700]])
    flip(path, td, 1700)
    with pytest.raises(CorruptStoreError, match=r"'x'.*byte 6946816"):
        tdstore.open(path, mode=mode)


@pytest.mark.parametrize("name", ["d", "x.tdz"])
def test_each_block_is_compared_once(tmp_path: FsPath, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / name
    td = saved(path)
    opened = tdstore.open(path)
    assert torch.equal(opened.read([5, 1700])["x"], td["x"][[5, 1700]])
    monkeypatch.setattr(readcheck.ReadCheck, "_judge", lambda *_: pytest.fail("compared twice"))
    assert torch.equal(opened.read(slice(5, 1700), keys="x")["x"], td["x"][5:1700])


@pytest.mark.parametrize("name", ["d", "x.tdz"])
@pytest.mark.parametrize("fine", [True, False])
@pytest.mark.parametrize("row", [1, 900, 1700, ROWS - 2])
def test_what_a_long_read_gives_is_what_was_compared(
    tmp_path: FsPath, name: str, fine: bool, row: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole blocks are compared in the copy; those of which a part is copied, where they are."""
    path = tmp_path / name
    with monkeypatch.context() as before:
        if not fine:
            before.setattr(checksums, "FINE", checksums.BLOCK)
        td = saved(path)
    monkeypatch.setattr(readcheck, "SMALL", 1 << 20)
    spans = [slice(0, ROWS), slice(0, 1701), slice(7, 2500), slice(1696, ROWS), slice(16, 1600), slice(890, 910)]
    for span in spans:
        store = tdstore.open(path)._binding[0].store
        out = torch.empty(len(range(ROWS)[span]), 4096, dtype=torch.uint8)
        index = (slice(span.start, span.stop, 1), slice(0, 4096, 1))
        version = out._version
        assert torch.equal(store.read([Read(("x",), index)])[0], td["x"][span])
        assert store.read([Read(("x",), index, out)])[0] is out and torch.equal(out, td["x"][span])
        store.close()
        again = tdstore.open(path)._binding[0].store
        assert torch.equal(again.read([Read(("x",), index, out.zero_())])[0], td["x"][span])
        assert out._version > version + 2
    flip(path, td, row)
    for span in spans:
        store = tdstore.open(path)._binding[0].store
        inside = span.start // 16 <= row // 16 <= (span.stop - 1) // 16
        if not fine:  # only blocks that are covered whole are compared
            first = row // 1024 * 1024
            inside = span.start <= first and min(first + 1024, ROWS) <= span.stop
        if inside:
            for _ in range(2):  # a damaged block is compared each time
                with pytest.raises(CorruptStoreError, match="'x'"):
                    store.read([Read(("x",), (slice(span.start, span.stop, 1),))])
        else:
            found = store.read([Read(("x",), (slice(span.start, span.stop, 1),))])[0]
            same = (found == td["x"][span]).all(1)
            assert same.sum() >= len(same) - 1


@pytest.mark.parametrize("name", ["d", "x.tdz"])
def test_bytes_that_change_between_copy_and_comparison_are_noticed(
    tmp_path: FsPath, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy is what is compared: damage of it alone shows, and is looked for on the medium."""
    path = tmp_path / name
    td = saved(path)
    asked: list[tuple[int, int]] = []
    opened = tdstore.open(path)
    reading = opened._binding[0].store._reading
    stored_crc = reading._stored_crc
    reading._stored_crc = lambda leaf, start, stop: asked.append((start, stop)) or stored_crc(leaf, start, stop)
    opened["x"].numpy()[100] = 1  # in private memory, as a copy that went wrong
    assert opened.read()["x"][100].unique().tolist() == [1]
    assert asked == [(96 * 4096, 112 * 4096)]
    assert torch.equal(opened.read()["x"][101:], td["x"][101:])


@pytest.mark.parametrize("name", ["d", "x.tdz"])
def test_a_whole_read_has_all_kinds_of_entries(tmp_path: FsPath, name: str) -> None:
    path = tmp_path / name
    td = saved(path).update({"s": "one", "names": [f"n{i}" for i in range(ROWS)], "n": {"z": torch.ones(ROWS, 1)}})
    td["jagged"] = torch.nested.nested_tensor([torch.ones(1 + i % 3) for i in range(ROWS)], layout=torch.jagged)
    td.save(path).close()
    opened = tdstore.open(path)
    for _ in range(2):
        found = opened.read()
        assert list(found.keys(True)) == list(opened.keys(True)) and not found.is_locked and not found.is_memmap()
        assert torch.equal(found["x"], td["x"]) and found["s"] == "one" and found["names"] == td["names"]
        assert torch.equal(found["jagged"].values(), td["jagged"].values())
        assert found["x"].data_ptr() != opened["x"].data_ptr() and type(found["x"]) is torch.Tensor
        some = opened.read(keys=["x", ("n", "z")])
        assert set(some.keys(True, True)) == {"x", ("n", "z")} and torch.equal(some["x"], td["x"])
    assert opened["n"].read()["y"].sum() == td["n", "y"].sum()


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
        lambda: opened._binding[0].store.read([Read(("huge",))]),
    ):
        with pytest.raises(CorruptStoreError, match=r"'huge'(.|\n)*max_bytes") as caught:
            read()
        assert str(path) in str(caught.value)
    assert opened.read([5, 6])["huge"].sum() == 1 << 20
