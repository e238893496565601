"""Checksums of consolidated files: flipped bytes, writers that live, die and fork, and files made to hurt."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
from pathlib import Path

import pytest
import tensordict
import torch

import tdstore
from tdstore import TensorDict, from_consolidated, lifetime
from tdstore.builtin import readcheck
from tdstore.errors import CorruptStoreError, OptionError
from tdstore.io.consolidated import file as consolidated_file
from tdstore.io.consolidated import sums
from tests import scripts

ROWS = 3000


def example() -> TensorDict:
    below = {"c": torch.arange(6, dtype=torch.int32).view(3, 2), "d": torch.ones(3) > 0}
    return TensorDict({"a": torch.arange(3.0), "b": below, "s": "hi"}, [3])


def small(place: Path) -> TensorDict:
    example().consolidate(place)
    lifetime.settle()
    return example()


def large(place: Path) -> TensorDict:
    """12 MB: rows of 4,096 bytes, 16 in a block."""
    noise = torch.Generator().manual_seed(0)
    x = torch.randint(0, 255, (ROWS, 4096), dtype=torch.uint8, generator=noise)
    td = TensorDict({"n": {"y": torch.arange(float(ROWS))}, "x": x}, [ROWS])
    td.consolidate(place)
    lifetime.settle()
    return td


def flip(place: Path, at: int, bit: int = 4) -> None:
    with open(place, "r+b") as file:
        file.seek(at)
        old = file.read(1)[0]
        file.seek(at)
        file.write(bytes([old ^ bit]))


def flip_row(place: Path, td: TensorDict, row: int) -> None:
    flip(place, place.read_bytes().find(td["x"][row].numpy().tobytes()) + 7)


def state(place: Path) -> str:
    data = place.read_bytes()
    length = int.from_bytes(data[-8:], "little")
    return str(json.loads(data[-8 - length : -8])["size"]["sums"]["state"])


# -- reading ---------------------------------------------------------------------------------
def test_each_byte_of_a_file_is_compared(tmp_path: Path) -> None:
    place = tmp_path / "x.td"
    small(place)
    assert state(place) == "known"
    bits = random.Random(0)
    for at in range(place.stat().st_size):
        bit = 1 << bits.randrange(8)
        flip(place, at, bit)
        with pytest.raises(CorruptStoreError, match=r"x\.td"):
            from_consolidated(place)
        flip(place, at, bit)
    assert from_consolidated(place)["b", "c"].sum() == 15


@pytest.mark.parametrize(("at", "key"), [(3, "'a'"), (17, "'b' / 'c'"), (40, "'b' / 'd'"), (13, "between")])
def test_the_error_names_place_and_key(tmp_path: Path, at: int, key: str) -> None:
    place = tmp_path / "x.td"
    small(place)
    flip(place, at)
    for mode in ("r", "r+"):
        with pytest.raises(CorruptStoreError, match=key) as caught:
            from_consolidated(place, mode=mode)
        assert str(place) in str(caught.value)
    td = from_consolidated(place, verify="none")
    assert len(tdstore.verify(place)) == 1
    faults = td.verify()
    assert len(faults) == (0 if key == "between" else 1)
    assert not faults or key.replace("'", "").split(" / ") == list(faults[0].path)


def test_rows_of_a_large_file_are_compared_when_they_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "x.td"
    td = large(place)
    flip_row(place, td, 1700)  # in a block of 64 KiB, rows 1696 to 1711
    with pytest.raises(CorruptStoreError, match=r"'x'.*64 KiB from byte 6946816"):
        from_consolidated(place)
    monkeypatch.setattr(consolidated_file, "OPENED", 1 << 20)
    monkeypatch.setattr(readcheck, "SMALL", 1 << 20)
    with pytest.raises(CorruptStoreError, match="'x'"):
        from_consolidated(place, verify="full")
    opened = from_consolidated(place)
    for sound in (slice(0, 1696), [1, 1712, -1], torch.arange(1712, ROWS)):
        assert torch.equal(opened.read(sound)["x"], td["x"][sound])
    assert torch.equal(opened[10:20].read()["x"], td["x"][10:20])
    assert opened.read([1700], keys=[("n", "y")])["n", "y"].tolist() == [1700]
    assert opened["n"].read()["y"].shape == (ROWS,)
    reads = [lambda rows=rows: opened.read(rows) for rows in ([1700], [5, 1696], 1711, slice(1690, 1697), None)]
    for read in (*reads, lambda: opened[1699:1701].read(), lambda: opened.select("x").read([1700])):
        with pytest.raises(CorruptStoreError, match=r"'x'.*byte 6946816") as caught:
            read()
        assert str(place) in str(caught.value)
    assert [fault.path for fault in opened.verify()] == [("x",)]
    assert opened["n"].verify() == []


def test_private_writes_are_not_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "x.td"
    large(place)
    monkeypatch.setattr(consolidated_file, "OPENED", 1 << 20)
    opened = from_consolidated(place)
    opened["x"].numpy()[7] = 3
    assert opened.read([7])["x"].unique().tolist() == [3]
    assert opened.verify() == []


def test_the_peer_reads_a_file_with_checksums(tmp_path: Path) -> None:
    place = tmp_path / "x.td"
    td = small(place)
    found = tensordict.from_consolidated(place)
    assert set(found.keys(True, True)) == set(td.keys(True, True))
    assert found["b", "c"].tolist() == td["b", "c"].tolist()


def test_a_file_of_the_peer_has_no_checksums(tmp_path: Path) -> None:
    place = tmp_path / "x.td"
    tensordict.TensorDict({"a": torch.ones(3)}).consolidate(place)
    flip(place, 0)
    td = from_consolidated(place)
    assert (td.verify(), tdstore.verify(place)) == ([], [])
    with pytest.raises(OptionError):
        from_consolidated(place, verify="most")


# -- writing ---------------------------------------------------------------------------------
@pytest.mark.parametrize("how", ["torch", "numpy", "nothing"])
def test_checksums_are_renewed_when_the_last_writer_ends(tmp_path: Path, how: str) -> None:
    place = tmp_path / "x.td"
    small(place)
    before = place.read_bytes()
    first, second = from_consolidated(place, mode="r+"), from_consolidated(place, mode="r+")
    assert state(place) == "stale"
    leaf = first["b", "c"]
    if how == "torch":
        leaf.fill_(7)
    elif how == "numpy":
        leaf.numpy()[1] = 7
    del leaf
    assert from_consolidated(place)["b", "c"].tolist() == first["b", "c"].tolist()
    del first
    lifetime.settle()
    assert state(place) == "stale", "the second one still writes"
    del second
    lifetime.settle()
    assert state(place) == "known"
    assert (place.read_bytes() == before) == (how == "nothing")
    assert tdstore.verify(place) == []
    flip(place, 17)
    with pytest.raises(CorruptStoreError):
        from_consolidated(place)


def test_a_writer_that_wrote_nothing_reads_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "x.td"
    small(place)
    before = place.read_bytes()
    td = from_consolidated(place, mode="r+", verify="none")
    monkeypatch.setattr(consolidated_file, "is_store_noticed", lambda *_: True)
    monkeypatch.setattr(sums, "crcs_of", lambda *_: pytest.fail("read"))
    del td
    lifetime.settle()
    assert place.read_bytes() == before


def test_one_view_keeps_the_writer(tmp_path: Path) -> None:
    place = tmp_path / "x.td"
    view = example().consolidate(place)["b", "c"][1:]
    lifetime.settle()
    assert state(place) == "stale"
    view.fill_(9)
    del view
    lifetime.settle()
    assert from_consolidated(place)["b", "c"].tolist() == [[0, 1], [9, 9], [9, 9]]
    assert state(place) == "known"


SCRIPT = """
import sys, os, signal, torch
from tdstore import TensorDict, from_consolidated
place, what = sys.argv[1:]
new = TensorDict({"a": torch.ones(3)})
td = new.consolidate(place) if what == "new" else from_consolidated(place, mode="r+")
td["a"].numpy()[1] = 5
if what == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_end_of_a_process_renews_and_a_kill_does_not(tmp_path: Path) -> None:
    place = tmp_path / "x.td"
    assert scripts.run(SCRIPT, place, "new").status == 0
    assert state(place) == "known"
    killed = scripts.run(SCRIPT, place, "kill")
    assert (killed.status, state(place)) == (-signal.SIGKILL, "stale")
    assert from_consolidated(place)["a"].tolist() == [1, 5, 1]
    assert scripts.run(SCRIPT, place, "end").status == 0
    assert (state(place), tdstore.verify(place)) == ("known", [])


def write_in_child(td: TensorDict, go: object, done: object) -> None:
    go.wait(200)
    td["a"].numpy()[0] = 77
    done.set()


def test_a_forked_writer_leaves_them_stale(tmp_path: Path) -> None:
    place = tmp_path / "x.td"
    td = example().consolidate(place)
    context = multiprocessing.get_context("fork")
    go, done = context.Event(), context.Event()
    child = context.Process(target=write_in_child, args=(td, go, done))
    child.start()
    del td
    lifetime.settle()
    go.set()
    child.join(200)
    assert (done.is_set(), state(place)) == (True, "stale")
    assert from_consolidated(place)["a"][0] == 77


def test_what_came_in_its_place_is_left_alone(tmp_path: Path) -> None:
    place = tmp_path / "x.td"
    for replace in (lambda: place.write_bytes(b"other"), place.unlink, lambda: os.truncate(place, 30)):
        td = example().consolidate(place)
        replace()
        after = place.read_bytes() if place.exists() else None
        del td
        lifetime.settle()
        assert (place.read_bytes() if place.exists() else None) == after


# -- made to hurt ----------------------------------------------------------------------------
def test_a_leaf_of_holes_is_not_allocated(tmp_path: Path) -> None:
    place = tmp_path / "x.td"
    size = 1 << 42
    facts = {"device": None, "names": [None], "batch_size": [1 << 22], "is_locked": False}
    leaves = {"huge": ["torch.float32", [1 << 22, 1 << 18], 0, size, 0]}
    text = json.dumps({"cls": "TensorDict", "non_tensors": {}, "leaves": leaves, "cls_metadata": facts}).encode()
    with open(place, "wb") as file:
        os.truncate(place, size)
        file.seek(size)
        file.write(text + len(text).to_bytes(8, "little"))
    td = from_consolidated(place)
    for read in (lambda: td.read(), lambda: td.read(slice(0, 1 << 20)), lambda: td[: 1 << 20].read()):
        with pytest.raises(CorruptStoreError, match=r"'huge'(.|\n)*max_bytes") as caught:
            read()
        assert str(place) in str(caught.value)
    assert td.read([5, 1 << 21])["huge"].shape == (2, 1 << 18)
    with pytest.raises(CorruptStoreError, match="max_bytes=1000"):
        from_consolidated(place, max_bytes=1000)
    assert from_consolidated(place, max_bytes=size).read([5])["huge"].sum() == 0


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text.replace(b'"crc":"', b'"crc":"AAAA'),
        lambda text: text.replace(b'"state":"known"', b'"state":"sound"'),
        lambda text: text.replace(b'"sums":', b'"summ":'),
        lambda text: text.replace(b'"tdstore":1', b'"tdstore":2'),
        lambda text: text.replace(b'"size":{', b'"size":{"x":1,'),
        lambda text: text.replace(b'"crc":"', b'"crc":3,"d":"'),
    ],
)
def test_crafted_checksums(tmp_path: Path, change: object) -> None:
    place = tmp_path / "x.td"
    small(place)
    data = place.read_bytes()
    length = int.from_bytes(data[-8:], "little")
    text = change(data[-8 - length : -8])
    assert text != data[-8 - length : -8]
    place.write_bytes(data[: -8 - length] + text + len(text).to_bytes(8, "little"))
    with pytest.raises(CorruptStoreError, match=r"x\.td"):
        from_consolidated(place)
