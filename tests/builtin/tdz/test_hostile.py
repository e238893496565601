"""Archives and consolidated files that lie: each is refused in words, before it costs memory or room on the disk."""

from __future__ import annotations

import json
import os
import struct
import tracemalloc
import zipfile

import numpy as np
import pytest
import torch

import tdstore
from tdstore import TensorDict
from tdstore.errors import CorruptStoreError
from tdstore.types import Read
from tests.builtin.tdz.test_archives import META, crafted, directory, refused, refused_to_open

ROWS = META.replace('"shape":[3],"device"', '"shape":[],"device"')


def meta_of(rows):
    return ROWS.replace('[3],"dtype"', f'[{rows}],"dtype"')


def patched(path, *changes):
    """Overwrite bytes; each change is a place, a format and numbers."""
    data = bytearray(path.read_bytes())
    for at, form, *numbers in changes:
        struct.pack_into(form, data, at if at >= 0 else len(data) + at, *numbers)
    path.write_bytes(data)


# -- the directory of the zip ----------------------------------------------------------------
def test_a_directory_that_is_a_hole_is_not_read(tmp_path):
    """A sparse file of 8 TiB costs nothing to make; reading what it says is its directory would."""
    size = 1 << 43
    with open(tmp_path / "x.tdz", "wb") as file:
        file.write(b"PK\x03\x04")
        file.truncate(size)
        file.seek(size)
        file.write(struct.pack("<4sQ2H2L4Q", b"PK\x06\x06", 44, 45, 45, 0, 0, 1, 1, size, 0))
        file.write(struct.pack("<4sLQL", b"PK\x06\x07", 0, size, 1))
        file.write(struct.pack("<4s4H2LH", b"PK\x05\x06", 0, 0, 1, 1, 0xFFFFFFFF, 0xFFFFFFFF, 0))
    for read in (tdstore.open, lambda path: tdstore.unpack_memmap(path, tmp_path / "out")):
        with pytest.raises(CorruptStoreError, match="claims 8796093022208 bytes"):
            read(tmp_path / "x.tdz")
    assert os.listdir(tmp_path) == ["x.tdz"]


@pytest.mark.parametrize("at", [-6, -10], ids=["offset", "size"])
@pytest.mark.parametrize("number", [2**31, 0xFFFFFFFF, 0])
def test_another_place_or_size_of_the_directory(tmp_path, at, number):
    crafted(tmp_path / "x.tdz")
    patched(tmp_path / "x.tdz", (at, "<I", number))
    refused(tmp_path / "x.tdz")


@pytest.mark.parametrize("number", [2**60, 2**63, 2**64 - 1])
@pytest.mark.parametrize("field", ["size", "packed", "offset"])
def test_huge_numbers_in_zip64_fields(tmp_path, field, number):
    """Also those that are negative to who reads them as signed."""
    info = zipfile.ZipInfo("a.memmap")
    info.extra = struct.pack("<2HQ", 0x7077, 8, number)  # becomes a zip64 field below: sizes go by it
    with zipfile.ZipFile(tmp_path / "x.tdz", "w") as archive:
        archive.writestr("meta.json", META)
        archive.writestr(info, bytes(12))
    data = (tmp_path / "x.tdz").read_bytes()
    at = directory(bytearray(data), b"a.memmap")
    place = {"packed": 20, "size": 24, "offset": 42}[field]
    patched(tmp_path / "x.tdz", (at + place, "<I", 0xFFFFFFFF), (at + 46 + 8, "<H", 1))
    refused(tmp_path / "x.tdz")


def test_two_names_of_the_same_bytes(tmp_path):
    """What is a quine to unzip: entries within one another."""
    crafted(tmp_path / "x.tdz", ("b.memmap", bytes(12)))
    data = bytearray((tmp_path / "x.tdz").read_bytes())
    (there,) = struct.unpack_from("<I", data, directory(data, b"a.memmap") + 42)
    patched(tmp_path / "x.tdz", (directory(data, b"b.memmap") + 42, "<I", there))
    refused(tmp_path / "x.tdz")


def test_a_local_header_that_says_otherwise(tmp_path):
    crafted(tmp_path / "x.tdz")
    data = bytearray((tmp_path / "x.tdz").read_bytes())
    (there,) = struct.unpack_from("<I", data, directory(data, b"a.memmap") + 42)
    for at, form, number in ((28, "<H", 60_000), (26, "<H", 7), (8, "<H", 8), (30, "<B", 98)):
        (tmp_path / "x.tdz").write_bytes(data)
        patched(tmp_path / "x.tdz", (there + at, form, number))
        refused(tmp_path / "x.tdz")


def test_a_folder_and_a_file_of_one_name(tmp_path):
    crafted(tmp_path / "x.tdz", ("n/deeper/file", b""), ("o", b""), ("n", b""))
    refused(tmp_path / "x.tdz")


def test_deep_names_cost_no_memory(tmp_path):
    """A table of all folders would take 600 times the memory of what it lists."""
    crafted(tmp_path / "x.tdz", *((f"{number}/" + "a/" * 550 + "b", b"") for number in range(300)))
    tracemalloc.start()
    try:
        assert tdstore.open(tmp_path / "x.tdz")["a"].tolist() == [0, 0, 0]
        assert tracemalloc.get_traced_memory()[1] < 20 << 20
    finally:
        tracemalloc.stop()


# -- what is in it ---------------------------------------------------------------------------
@pytest.mark.parametrize(
    "meta",
    [
        META.replace("torch.float32", "torch.load"),
        META.replace("torch.float32", "os.system"),
        META.replace("torch.float32", "float32; import os"),
        META.replace("[3]", "[-3]"),
        META.replace('[3],"dtype"', '[3.0],"dtype"'),
        META.replace('[3],"dtype"', f'[{2**60}],"dtype"'),
        META.replace('[3],"dtype"', f'[{2**32},{2**32},3],"dtype"'),
        META[:-1] + ',"a":{}}',
        "[" * 100_000,
        "{}[",
        "\ud800".encode("utf-8", "surrogatepass"),
    ],
    ids=range(11),
)
def test_descriptions(tmp_path, meta):
    crafted(tmp_path / "x.tdz", meta=meta)
    refused_to_open(tmp_path / "x.tdz")


@pytest.mark.parametrize("method", [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_damaged_streams(tmp_path, method):
    data = np.random.default_rng(0).bytes(4 * 3000)
    crafted(tmp_path / "x.tdz", meta=meta_of(3000), data=data, method=method)
    whole = bytearray((tmp_path / "x.tdz").read_bytes())
    (there,) = struct.unpack_from("<I", whole, directory(whole, b"a.memmap") + 42)
    for at in (there + 38, there + 60, there + 5000):
        damaged = whole.copy()
        damaged[at : at + 4] = bytes(byte ^ 0xFF for byte in damaged[at : at + 4])
        (tmp_path / "x.tdz").write_bytes(damaged)
        with pytest.raises(CorruptStoreError, match=r"x\.tdz"):
            tdstore.open(tmp_path / "x.tdz")["a"]
        with pytest.raises(CorruptStoreError, match=r"x\.tdz"):
            tdstore.unpack_memmap(tmp_path / "x.tdz", tmp_path / "out")
    assert os.listdir(tmp_path) == ["x.tdz"]


def test_an_lzma_dictionary_of_4_gib(tmp_path):
    crafted(tmp_path / "x.tdz", method=zipfile.ZIP_LZMA)
    data = bytearray((tmp_path / "x.tdz").read_bytes())
    (there,) = struct.unpack_from("<I", data, directory(data, b"a.memmap") + 42)
    patched(tmp_path / "x.tdz", (there + 38 + 5, "<I", 0xFFFFFFFF))
    refused_to_open(tmp_path / "x.tdz")


def test_a_bomb_that_is_no_leaf_is_not_unpacked(tmp_path):
    """512 PiB, said to be in a few bytes of bzip2, which has no largest ratio."""
    with zipfile.ZipFile(tmp_path / "x.tdz", "w") as archive:
        archive.writestr("meta.json", META)
        archive.writestr("a.memmap", bytes(12))
        archive.writestr("notes.txt", bytes(100), zipfile.ZIP_BZIP2)
    data = bytearray((tmp_path / "x.tdz").read_bytes())
    patched(tmp_path / "x.tdz", (directory(data, b"notes.txt") + 24, "<I", 0xFFFFFFF0))
    with pytest.raises(CorruptStoreError, match=r"notes\.txt' unpacks"):
        tdstore.unpack_memmap(tmp_path / "x.tdz", tmp_path / "out")
    assert os.listdir(tmp_path) == ["x.tdz"]


def test_a_compressed_manifest_bomb(tmp_path):
    TensorDict({"a": torch.ones(3)}, [3]).save(tmp_path / "whole.tdz")
    with zipfile.ZipFile(tmp_path / "whole.tdz") as archive, zipfile.ZipFile(tmp_path / "x.tdz", "w") as made:
        for name in archive.namelist():
            manifest = name == "tdstore.json"
            text = archive.read(name) + b" " * (65 << 20) * manifest
            made.writestr(name, text, zipfile.ZIP_DEFLATED if manifest else zipfile.ZIP_STORED)
    refused_to_open(tmp_path / "x.tdz")


@pytest.mark.parametrize("mode", ["r", "r+"])
def test_a_leaf_of_holes_is_not_allocated(tmp_path, mode):
    """64 GiB that were declared and never written are opened and read by rows; not copied whole."""
    path, rows = tmp_path / "x.tdz", 1 << 14
    TensorDict.from_schema({"huge": ((1 << 20,), torch.float32)}, batch_size=[rows], location=path).close()
    assert path.stat().st_blocks < 8192
    opened = tdstore.open(path, mode=mode)
    for read in (
        lambda: opened.read(),
        lambda: opened.read(slice(0, rows // 2)),
        lambda: opened.read(torch.arange(rows)),
        lambda: opened._binding[0].store.read([Read(("huge",))]),
    ):
        with pytest.raises(CorruptStoreError, match=r"'huge'(.|\n)*max_bytes") as caught:
            read()
        assert str(path) in str(caught.value)
    assert opened.read([5, 6], keys="huge")["huge"].shape == (2, 1 << 20)
    with pytest.raises(CorruptStoreError, match="max_bytes=1000"):
        tdstore.open(path, max_bytes=1000)
    assert tdstore.open(path, max_bytes=1 << 40).read(slice(0, 1 << 7))["huge"].sum() == 0


def test_a_manifest_whose_checksum_is_older(tmp_path):
    """Versions that wrote in place could be killed before they renewed it. The manifest checks itself."""
    TensorDict({"a": torch.ones(3)}, [3]).save(tmp_path / "x.tdz").close()
    data = bytearray((tmp_path / "x.tdz").read_bytes())
    at = directory(data, b"tdstore.json")
    patched(tmp_path / "x.tdz", (at + 16, "<I", 77))
    assert tdstore.open(tmp_path / "x.tdz")["a"].tolist() == [1, 1, 1]
    with zipfile.ZipFile(tmp_path / "x.tdz") as archive, pytest.raises(zipfile.BadZipFile):
        archive.read("tdstore.json")
    tdstore.refresh_archive_checksums(tmp_path / "x.tdz")
    with zipfile.ZipFile(tmp_path / "x.tdz") as archive:
        assert archive.testzip() is None
    assert tdstore.open(tmp_path / "x.tdz", verify="full")["a"].tolist() == [1, 1, 1]


# -- consolidated files ----------------------------------------------------------------------
def consolidated(path, size, leaves, **facts):
    told = {"device": None, "names": [None], "batch_size": [], "is_locked": False} | facts
    document = {"cls": "TensorDict", "non_tensors": {}, "leaves": leaves, "cls_metadata": told}
    text = json.dumps(document).encode()
    path.write_bytes(bytes(size) + text + len(text).to_bytes(8, "little"))


FLOATS = ["torch.float32", [4], 0, 16, 0]


@pytest.mark.parametrize(
    "leaves",
    [
        {"a": FLOATS, "b": ["torch.int8", [1], 15, 16, 0]},
        {"a": ["torch.float32", [2**31, 2**31, 4], 0, 16, 0]},
        {"a": ["torch.float32", [4], 0, 2**62, 2**62 - 16]},
        {"a": ["torch.float32", [3], 2, 14, 0]},
        {"a": ["builtins.eval", [4], 0, 16, 0]},
        {"a": [["torch.float32"], [4], 0, 16, 0]},
        {"a": "torch.float32"},
        {"<NJT_VALUES>a": FLOATS, "<NJT_OFFSETS>a": [*FLOATS, 2**61]},
        {"<NJT_VALUES>a": ["torch.float32", [1], 0, 4, 0], "<NJT_OFFSETS>a": ["torch.int32", [0], 4, 4, 0, 1]},
    ],
    ids=range(9),
)
def test_consolidated_leaves(tmp_path, leaves):
    """Beside those of tests/io/consolidated/test_consolidate.py."""
    consolidated(tmp_path / "x.td", 16, leaves)
    with pytest.raises(CorruptStoreError, match=r"x\.td"):
        TensorDict.from_consolidated(tmp_path / "x.td")


def test_a_consolidated_file_that_is_right_opens(tmp_path):
    consolidated(tmp_path / "x.td", 16, {"a": FLOATS})
    assert TensorDict.from_consolidated(tmp_path / "x.td")["a"].tolist() == [0, 0, 0, 0]


def test_a_consolidated_description_that_is_a_hole(tmp_path):
    """A terabyte of nothing, claimed to be JSON."""
    with open(tmp_path / "x.td", "wb") as file:
        file.truncate(1 << 40)
        file.seek(1 << 40)
        file.write(((1 << 40) - 8).to_bytes(8, "little"))
    with pytest.raises(CorruptStoreError, match=r"x\.td"):
        TensorDict.from_consolidated(tmp_path / "x.td")


@pytest.mark.parametrize("facts", [{"batch_size": [2**62]}, {"batch_size": [-1]}, {"device": 7}])
def test_consolidated_facts(tmp_path, facts):
    consolidated(tmp_path / "x.td", 16, {"a": FLOATS}, **facts)
    with pytest.raises(CorruptStoreError, match=r"x\.td"):
        TensorDict.from_consolidated(tmp_path / "x.td")
