"""Bytes that changed on the medium: noticed when they are read, with the options that users do not choose."""

from __future__ import annotations

import base64
import json
import random
from pathlib import Path as FsPath
from typing import Any

import google_crc32c
import h5py
import pytest
import torch
from tdstore_h5.file.document import DIRTY, MANIFEST
from tdstore_h5.rows import checksums
from tdstore_h5.rows import contiguous as raw
from tdstore_h5.store import open_h5

import tdstore
from tdstore import TensorDict
from tdstore.errors import CorruptStoreError, StoreError
from tdstore.storekit.checksums import BLOCK, crc32c
from tdstore.storekit.documents import seal
from tdstore.types import Read, Write

ROWS = 2000
LAYOUTS: dict[str, dict[str, Any]] = {
    "contiguous": {},
    "chunked": {"chunks": 100},
    "lzf": {"chunks": 100, "compression": "lzf"},
    "gzip": {"chunks": 100, "compression": "gzip"},
}
WAYS = {
    "whole": lambda td, key: td[key],
    "rows": lambda td, key: torch.cat([td[i]["x" if key == "x" else key][None] for i in range(0, ROWS, 20)]),
    "slices": lambda td, key: torch.cat([td[i : i + 70][key] for i in range(0, ROWS, 70)]),
    "shuffled": lambda td, key: td[torch.randperm(ROWS, generator=torch.Generator().manual_seed(0))][key],
    "steps": lambda td, key: td[::3][key],
    "columns": lambda td, key: td.get(key)[:, 1:2] if key != "y" else td[key],
}


def _dataset() -> TensorDict:
    x = torch.arange(ROWS * 30.0).view(ROWS, 30) % 1000
    return TensorDict({"x": x, "y": torch.arange(ROWS), "wide": torch.rand(ROWS, 500)}, batch_size=[ROWS])


def _spans(file: FsPath, key: str) -> list[tuple[int, int]]:
    with h5py.File(file) as f:
        found = f[key].id
        if f[key].chunks is None:
            return [(found.get_offset(), found.get_storage_size())]
        infos = [found.get_chunk_info(i) for i in range(found.get_num_chunks())]
        return [(info.byte_offset, info.size) for info in infos]


def _flip(file: FsPath, at: int, bits: int = 1) -> None:
    with open(file, "r+b") as f:
        f.seek(at)
        byte = f.read(1)[0]
        f.seek(at)
        f.write(bytes([byte ^ bits]))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("way", WAYS)
def test_a_flipped_byte_is_noticed(file: FsPath, layout: str, way: str) -> None:
    td = _dataset()
    td.save(file, **LAYOUTS[layout]).close()
    chance = random.Random(way)
    for key in ("x", "y", "wide"):
        good = WAYS[way](td, key)
        with tdstore.open(file) as opened:
            for _ in range(2):
                assert torch.equal(WAYS[way](opened, key), good)
        spans = _spans(file, key)
        for _ in range(4):
            start, size = chance.choice(spans)
            at = start + chance.randrange(size)
            bits = 1 << chance.randrange(8)
            _flip(file, at, bits)
            with tdstore.open(file) as opened:
                try:
                    assert torch.equal(WAYS[way](opened, key), good)
                except CorruptStoreError as error:
                    assert repr(key) in str(error) and "row" in str(error) and str(file) in str(error)
            with tdstore.open(file) as opened:
                found = [fault.path for fault in opened._handle.store.verify()]
                # A compressed byte may be turned without any effect.
                assert found == [(key,)] or ("compression" in LAYOUTS[layout] and not found)
            _flip(file, at, bits)


def test_rows_of_other_chunks_can_be_read(file: FsPath) -> None:
    """Also after the file was taken as it is, and written on."""
    td = _dataset().select("x", "y")
    td.save(file, chunks=100, compression="gzip").close()
    start, size = _spans(file, "x")[3]
    with open(file, "r+b") as f:
        f.seek(start)
        f.write(bytes(size))
    for options in ({}, {"recover": "accept"}, {"verify": "none"}):
        with tdstore.open(file, **options) as opened:
            assert torch.equal(opened[:300]["x"], td[:300]["x"])
            assert torch.equal(opened[400:]["x"], td[400:]["x"])
            with pytest.raises(CorruptStoreError, match=r"(?s)'x' is damaged in rows 300 to 399.*accept"):
                opened["x"]
            with pytest.raises(CorruptStoreError, match=r"'x' is damaged in rows 300 to 399"):
                opened[torch.tensor([5, 350])]["x"]
    with tdstore.open(file, "r+", recover="accept") as opened:
        opened.set_at_("x", torch.zeros(30), 0)
        opened["z"] = torch.ones(ROWS)
    with tdstore.open(file) as opened:
        assert opened[0]["x"].sum() == 0
        assert opened["z"].sum() == ROWS
        assert torch.equal(opened[400:]["x"], td[400:]["x"])
        assert [fault.path for fault in opened._handle.store.verify()] == [("x",)]
        with pytest.raises(CorruptStoreError, match="rows 300 to 399"):
            opened["x"]


def test_rows_written_since_are_not_compared(file: FsPath) -> None:
    for layout in LAYOUTS.values():
        td = _dataset()
        td.save(file, **layout).close()
        with tdstore.open(file, "r+") as opened:
            rows = torch.randperm(ROWS)[:500]
            for part in rows.split(50):
                opened.set_at_("x", torch.full((50, 30), -1.0), part)
                td["x"][part] = -1.0
                assert torch.equal(opened["x"], td["x"])
            opened.commit()
            assert torch.equal(opened["x"], td["x"])
            opened.append(td[0])
            assert torch.equal(opened["x"][:-1], td["x"])
        with tdstore.open(file, verify="full") as opened:
            assert torch.equal(opened["x"][:-1], td["x"])


def test_files_with_sums_of_4_mib(file: FsPath) -> None:
    """The manifest of earlier versions, without `grain`."""
    td = _dataset()
    td.save(file).close()
    with h5py.File(file, "r+") as f:
        document = json.loads(bytes(f.attrs[MANIFEST]).split(b"\n", 1)[1])
        for record in document["leaves"]:
            raw = td[tuple(record["path"])].numpy().tobytes()
            crcs = b"".join(crc32c(raw[i : i + BLOCK]).to_bytes(4, "little") for i in range(0, len(raw), BLOCK))
            record["crc"] = base64.b64encode(crcs).decode()
            record.pop("grain", None)
        f.attrs[MANIFEST] = seal(json.dumps(document).encode()).decode()
    with tdstore.open(file, verify="full") as opened:
        assert torch.equal(opened[5:7]["wide"], td["wide"][5:7])
    with tdstore.open(file, "r+") as opened:
        opened.set_at_("y", torch.tensor(-1), 0)
    assert tdstore.open(file, verify="full")[0]["y"] == -1
    with open(file, "r+b") as f:
        f.seek(_spans(file, "wide")[0][0] + 99)
        f.write(b"\x55\x55")
    with tdstore.open(file) as opened, pytest.raises(CorruptStoreError, match="'wide' is damaged"):
        opened[torch.tensor([0, 1])]["wide"]


@pytest.mark.parametrize("value", [3.5, [1, 2], b"\xff\xfe", '{"a": 1}', "[[1]]"])
def test_a_mark_that_is_not_one(file: FsPath, value: Any) -> None:
    TensorDict({"x": torch.zeros(3)}, [3]).save(file).close()
    with h5py.File(file, "r+") as f:
        f.attrs[DIRTY] = value
    with pytest.raises(StoreError, match="mark|text") as caught:
        open_h5(file)
    assert str(file) in str(caught.value)


def test_nothing_is_compared_twice(file: FsPath, monkeypatch: pytest.MonkeyPatch) -> None:
    """A grain is compared once after the opening; with verify="none" never."""
    td = _dataset()
    td.save(file).close()
    hashed: list[int] = []
    real = google_crc32c.value
    monkeypatch.setattr(google_crc32c, "value", lambda data: hashed.append(len(data)) or real(data))
    with open_h5(file) as store:
        hashed.clear()  # the manifest's own
        store.read([Read(("wide",), (torch.arange(0, ROWS, 7),))])
        assert 0 < sum(hashed) <= td["wide"].nbytes
        hashed.clear()
        store.read([Read(("wide",), (torch.arange(0, ROWS, 7),))])
        assert not hashed
    with open_h5(file, verify="none") as store:
        hashed.clear()
        store.read([Read(("wide",))])
        assert not hashed


@pytest.mark.parametrize("lane", ["mapped", "by calls"])
def test_damage_beside_scattered_rows_is_noticed(file: FsPath, lane: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Grains of 9 rows, compared in the mapping of the file, or by reads where they are many."""
    if lane == "by calls":
        monkeypatch.setattr(checksums, "LOOKED_AT", 0)
    td = _dataset()
    td.save(file).close()
    start, _ = _spans(file, "wide")[-1]
    _flip(file, start + 1002 * 2000 + 8)
    fine = torch.tensor([1900, 3, 3, 998, 1008])
    for rows in ([1900, 1003, 3], [1002], [5, 999], [1007, 1900]):
        with open_h5(file) as store:
            for _ in range(2):
                with pytest.raises(CorruptStoreError, match="rows 999 to 1007"):
                    store.read([Read(("wide",), (torch.tensor(rows),))])
            assert torch.equal(store.read([Read(("wide",), (fine,))])[0], td["wide"][fine])
            for row in (7, 998, 1008):
                assert torch.equal(
                    store.read([Read(("wide",), (slice(row, row + 1, 1),))])[0], td["wide"][row : row + 1]
                )
            with pytest.raises(CorruptStoreError, match="rows 999 to 1007"):
                store.read([Read(("wide",), (slice(1001, 1002, 1),))])


@pytest.mark.parametrize("piece", [1000, 18_000, 50_000, 1 << 20])
@pytest.mark.parametrize("span", [(0, ROWS), (0, 1005), (3, 1600), (9, ROWS), (999, 1008)])
def test_a_long_read_is_compared_while_it_arrives(
    file: FsPath, span: tuple[int, int], piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Grains of 9 rows of 2,000 bytes, in pieces that end anywhere."""
    monkeypatch.setattr(raw, "LONG", 10_000)
    monkeypatch.setattr(raw, "PIECE", piece)
    td = _dataset()
    td.save(file).close()
    index = (slice(*span, 1),)
    wanted = td["wide"][slice(*span)]
    out = torch.empty_like(wanted)
    hashed: list[int] = []
    real = google_crc32c.value
    with monkeypatch.context() as counting, open_h5(file) as store:
        counting.setattr(google_crc32c, "value", lambda data: hashed.append(len(data)) or real(data))
        assert torch.equal(store.read([Read(("wide",), index)])[0], wanted)
        first, last = span[0] // 9, -(-span[1] // 9)
        assert sum(hashed) == min(last * 9, ROWS) * 2000 - first * 9 * 2000  # each byte once
        assert store.read([Read(("wide",), index, out)])[0] is out and torch.equal(out, wanted)
    start, _ = _spans(file, "wide")[-1]
    _flip(file, start + 1002 * 2000 + 8)
    with open_h5(file) as store:
        for _ in range(2):
            with pytest.raises(CorruptStoreError, match="rows 999 to 1007"):
                store.read([Read(("wide",), index)])
        assert torch.equal(store.read([Read(("wide",), (slice(0, 900, 1),))])[0], td["wide"][:900])


@pytest.mark.parametrize("layout", ["contiguous", "chunked"])
@pytest.mark.parametrize("how", ["row", "rows", "column", "append", "shorten", "far", "whole"])
def test_damage_beside_rows_that_are_written_gets_no_new_checksum(file: FsPath, layout: str, how: str) -> None:
    """A grain of `wide` is 9 rows of 2,000 bytes: 1,998 to 1,999 are the last one."""
    td = _dataset()
    td.save(file, **LAYOUTS[layout]).close()
    start, size = _spans(file, "wide")[-1]
    row = 1998 if layout == "contiguous" else 98  # of the last chunk
    _flip(file, start + row * 2000 + 8)
    column = Write(("wide",), (slice(1980, 2000, 1), slice(3, 4, 1)), torch.ones(20, 1))
    changes: dict[str, Any] = {
        "row": lambda opened: opened.set_at_("wide", torch.ones(500), 1999),
        "rows": lambda opened: opened.set_at_("wide", torch.ones(3, 500), [1, 1999, 5]),
        "column": lambda opened: opened._handle.store.write([column]),
        "append": lambda opened: opened.append(td[:1]),
        "shorten": lambda opened: opened.resize_(1999),
    }
    with tdstore.open(file, mode="r+") as opened:
        if how in changes:
            with pytest.raises(CorruptStoreError, match=r"'wide'.*row"):
                changes[how](opened)
        elif how == "far":
            opened.set_at_("wide", torch.ones(2, 500), [3, 1000])
        else:
            opened.set_at_("wide", torch.ones(2, 500), slice(1998, 2000))
    with tdstore.open(file) as opened:
        assert opened.shape == (ROWS,)
        assert [fault.path for fault in opened.verify()] == ([] if how == "whole" else [("wide",)])
        assert opened[3]["wide"].sum() == 500 or how != "far"
    with tdstore.open(file, mode="r+", verify="none") as opened:
        opened.set_at_("wide", torch.ones(500), 1999)
    assert tdstore.verify(file) == []
