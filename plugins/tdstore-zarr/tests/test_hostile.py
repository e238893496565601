"""Stores made to harm: an error that says what, quickly, and nothing outside of the store is touched."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path as FsPath
from typing import Any

import numpy as np
import pytest
import torch
import zarr
from numcodecs import blosc, zstd
from tdstore_zarr.codec.codecs import ChunkError, Pipeline, parse_pipeline
from tdstore_zarr.codec.metadata import parse_array
from tdstore_zarr.layout.document import decode_root, encode_root
from tdstore_zarr.layout.leaf import Stored
from tdstore_zarr.store import open_zarr
from zarrhelp import everything, header_of, load, save

from tdstore.errors import (
    CorruptStoreError,
    OptionError,
    StoreError,
    StoreExistsError,
    StoreIOError,
    StoreNotFoundError,
    UnsupportedError,
    UntrustedDataError,
)
from tdstore.storekit.checksums import crc32c
from tdstore.types import LeafSpec, Read

GOOD: dict[str, Any] = {
    "zarr_format": 3, "node_type": "array", "shape": [4, 2], "data_type": "float32", "fill_value": 0.0,
    "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [2, 2]}},
    "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
    "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}], "attributes": {},
}  # fmt: skip


def sharding(**settings: Any) -> list[dict[str, Any]]:
    given = {"chunk_shape": [1, 2], "codecs": GOOD["codecs"], "index_codecs": [*GOOD["codecs"], {"name": "crc32c"}]}
    return [{"name": "sharding_indexed", "configuration": {**given, **settings}}]


def grid(*shape: Any) -> dict[str, Any]:
    return {"name": "regular", "configuration": {"chunk_shape": list(shape)}}


LIES: dict[str, dict[str, Any]] = {
    "shape bomb": {"shape": [1 << 50, 2], "chunk_grid": grid(1 << 30, 2)},
    "shape overflow": {"shape": [1 << 62, 1 << 62]},
    "many chunks": {"shape": [1 << 48, 2], "chunk_grid": grid(1, 1)},
    "chunk bomb": {"chunk_grid": grid(1 << 40, 2)},
    "negative": {"shape": [-1, 2]},
    "floats": {"shape": [4.0, 2]},
    "bools": {"shape": [True, 2]},
    "no shape": {"shape": None},
    "zero chunk": {"chunk_grid": grid(0, 2)},
    "other rank": {"chunk_grid": grid(2)},
    "grid kind": {"chunk_grid": {"name": "rectangular", "configuration": {}}},
    "grid type": {"chunk_grid": []},
    "keys": {"chunk_key_encoding": {"name": "default", "configuration": {"separator": ".."}}},
    "keys type": {"chunk_key_encoding": "x"},
    "dtype": {"data_type": "r128"},
    "dtype type": {"data_type": 7},
    "fill": {"fill_value": "zero"},
    "fill type": {"fill_value": {}},
    "no codecs": {"codecs": []},
    "codecs type": {"codecs": {"name": "bytes"}},
    "codec type": {"codecs": [7]},
    "unknown codec": {"codecs": [{"name": "evil.module.Codec"}]},
    "pickle codec": {"codecs": [{"name": "numcodecs.pickle", "configuration": {}}]},
    "endian": {"codecs": [{"name": "bytes", "configuration": {"endian": "middle"}}]},
    "blosc": {"codecs": [*GOOD["codecs"], {"name": "blosc", "configuration": {"cname": "x"}}]},
    "odd shards": {"codecs": sharding(chunk_shape=[3, 2])},
    "many inner": {"chunk_grid": grid(1 << 30, 2), "codecs": sharding(chunk_shape=[1, 1])},
    "index place": {"codecs": sharding(index_location="middle")},
    "evil inner": {"codecs": sharding(codecs=[{"name": "evil"}])},
    "shards type": {"codecs": [{"name": "sharding_indexed", "configuration": 3}]},
    "transformers": {"storage_transformers": [{"name": "x"}]},
    "names": {"dimension_names": ["a"]},
    "attributes": {"attributes": []},
    "false dtype": {"attributes": {"tdstore_dtype": "bfloat16"}},
}


def make(place: FsPath, changes: dict[str, Any], chunk: bytes | None = None) -> None:
    (place / "bad" / "c" / "0").mkdir(parents=True)
    (place / "zarr.json").write_text(json.dumps({"zarr_format": 3, "node_type": "group", "attributes": {}}))
    (place / "bad" / "zarr.json").write_text(json.dumps({**GOOD, **changes}))
    (place / "bad" / "c" / "0" / "0").write_bytes(np.arange(4.0, dtype="f4").tobytes() if chunk is None else chunk)


@pytest.mark.parametrize("lie", LIES)
def test_metadata_that_lies(place: FsPath, lie: str) -> None:
    make(place, LIES[lie])
    start = time.process_time()
    with pytest.raises((CorruptStoreError, UnsupportedError), match="'bad'"), open_zarr(place) as store:
        everything(store)
    assert time.process_time() - start < 10
    assert "evil" not in sys.modules


@pytest.mark.parametrize("missing", [key for key in GOOD if key not in ("attributes", "zarr_format", "node_type")])
def test_metadata_that_lacks_a_field(missing: str) -> None:
    with pytest.raises(CorruptStoreError, match=missing):
        parse_array({k: v for k, v in GOOD.items() if k != missing}, "x", "u")


LEVELS = sys.getrecursionlimit() + 5000
DEEP = b'{"a":' * LEVELS + b"1" + b"}" * LEVELS
ROOTS: dict[str, bytes] = {
    "empty": b"", "list": b"[]", "not utf-8": b"\xff\xfe{}", "deep": b"[" * 100_000,
    "deep attributes": b'{"zarr_format":3,"node_type":"group","attributes":' + DEEP + b"}",
    "attributes": b'{"zarr_format":3,"node_type":"group","attributes":[]}',
    "consolidated": b'{"zarr_format":3,"node_type":"group","consolidated_metadata":[1]}',
    "node": b'{"zarr_format":3,"node_type":"group","attributes":{},"consolidated_metadata":{"metadata":{"a":1}}}',
    "manifest": b'{"zarr_format":3,"node_type":"group","attributes":{"tdstore":[]}}',
    "seal": b'{"zarr_format":3,"node_type":"group","attributes":{"tdstore":"TDS1 00000000\\n{}"}}',
    "mark": b'{"zarr_format":3,"node_type":"group","attributes":{"tdstore_dirty":{"leaves":3}}}',
    "format": b'{"zarr_format":9,"node_type":"group"}',
}  # fmt: skip


def test_a_root_of_a_newer_version() -> None:
    root = b'{"zarr_format":3,"node_type":"group","attributes":{"tdstore":"TDS2 00000000\\n{}"}}'
    with pytest.raises(UnsupportedError, match="version 2, this tdstore reads 1") as caught:
        decode_root(root, url="u")
    assert "upgrade" in str(caught.value)


@pytest.mark.parametrize("root", ROOTS)
def test_roots_that_lie(place: FsPath, root: str) -> None:
    place.mkdir()
    (place / "zarr.json").write_bytes(ROOTS[root])
    if root == "node":  # a folder is looked at; only where that is dear is the consolidated metadata believed
        assert load(place) == {}
        return
    with pytest.raises(CorruptStoreError, match="t.zarr"):
        open_zarr(place)


# -- chunks ----------------------------------------------------------------------------------
LZ4 = {"name": "blosc", "configuration": {"cname": "lz4", "clevel": 5, "shuffle": "noshuffle", "blocksize": 0}}
BOMB = np.zeros(1 << 26, np.uint8)
CODECS: dict[str, tuple[dict[str, Any] | None, Callable[[Any], bytes]]] = {
    "raw": (None, bytes),
    "blosc": (LZ4, lambda a: bytes(blosc.compress(a, b"lz4", 5, 0))),
    "zstd": ({"name": "zstd", "configuration": {"level": 1}}, lambda a: bytes(zstd.compress(a, 1))),
    "gzip": ({"name": "gzip", "configuration": {"level": 5}}, lambda a: zlib.compress(a, wbits=31)),
}


@pytest.mark.parametrize("codec", CODECS)
def test_chunks_that_lie(codec: str) -> None:
    """Larger, shorter, cut, flipped: an error, before more than the chunk's size is allocated."""
    metadata, compress = CODECS[codec]
    pipeline = Pipeline(compressor=metadata)
    decode, out = pipeline.decoder(1000), np.empty(1000, np.uint8)
    value = np.random.default_rng(0).integers(0, 9, 1000).astype(np.uint8)
    decode(compress(value), out)
    assert np.array_equal(out, value)
    good = compress(value)
    for bad in (compress(BOMB), compress(value[:999]), good[:-5], good[:3], b"", b"\0" * 40, good + b"xx" * 600):
        with pytest.raises(ChunkError):
            decode(bad, out)
    sealed = Pipeline(compressor=metadata, crc=True)
    data = bytearray(sealed.encoder()(value))
    sealed.decoder(1000)(bytes(data), out)
    data[len(data) // 2] ^= 4
    with pytest.raises(ChunkError, match="checksum"):
        sealed.decoder(1000)(bytes(data), out)
    assert parse_pipeline(sealed.codecs(4)) == sealed


@pytest.mark.parametrize("place_in_chunk", range(0, 100, 7))
def test_shard_indices_that_lie(place: FsPath, place_in_chunk: int) -> None:
    """A shard whose index points anywhere, with a checksum that fits."""
    save(place, {("a",): torch.arange(64).view(32, 2)}, chunks=4, shards=16)
    (place / "zarr.json").write_text(json.dumps({"zarr_format": 3, "node_type": "group", "attributes": {}}))
    file = place / "a" / "c" / "0" / "0"
    data = bytearray(file.read_bytes())
    at = len(data) - 68 + place_in_chunk % 64
    data[at] ^= 0xFF
    data[-4:] = crc32c(bytes(data[-68:-4])).to_bytes(4, "little")
    file.write_bytes(bytes(data))
    with pytest.raises(CorruptStoreError, match="'a'"):
        load(place)


# -- out of the store -------------------------------------------------------------------------
def test_links_are_not_followed(place: FsPath, tmp_path: FsPath) -> None:
    secret = tmp_path / "secret"
    secret.mkdir()
    zarr.create_array(str(secret / "s"), data=np.arange(8))
    before = sorted((p, p.read_bytes()) for p in secret.rglob("*") if p.is_file())
    save(place, {("a",): torch.arange(64)})
    chunk = place / "a" / "c" / "0"
    chunk.unlink()
    chunk.symlink_to(secret / "s" / "c" / "0")
    with pytest.raises(CorruptStoreError, match="not a plain file|instead of|missing"):
        load(place)
    foreign = tmp_path / "f.zarr"
    make(foreign, {})
    for target in (secret / "s", FsPath("../secret/s")):
        (foreign / "link").symlink_to(target)
        with pytest.raises(UntrustedDataError, match="link"):
            open_zarr(foreign)
        (foreign / "link").unlink()
    (foreign / "bad" / "c" / "0" / "0").unlink()
    os.mkfifo(foreign / "bad" / "c" / "0" / "0")
    with pytest.raises(StoreError, match="bad"), open_zarr(foreign) as store:
        store.read([Read(("bad",))])
    assert before == sorted((p, p.read_bytes()) for p in secret.rglob("*") if p.is_file())


def test_a_manifest_that_names_nodes_outside(place: FsPath) -> None:
    save(place, {("a",): torch.arange(64)})
    document = decode_root((place / "zarr.json").read_bytes(), url="u")
    (leaf,) = document.leaves.values()
    document.metadata = {"../out": document.metadata["a"]}
    leaf.node = "../out"
    (place / "zarr.json").write_bytes(encode_root(document, document.header, [leaf], url="u"))
    with pytest.raises((CorruptStoreError, StoreNotFoundError), match=r"out"):
        load(place)


def test_other_folders_and_files_are_not_replaced(place: FsPath, tmp_path: FsPath) -> None:
    place.mkdir()
    (place / "thesis.tex").write_text("mine")
    with pytest.raises(StoreExistsError, match=r"thesis\.tex"):
        open_zarr(place, mode="w")
    (place / "thesis.tex").unlink()
    save(place, {("a",): torch.arange(64)})
    (place / "a" / "notes.txt").write_text("mine")
    with pytest.raises(StoreExistsError, match=r"notes\.txt"):
        open_zarr(place, mode="w")
    assert (place / "a" / "notes.txt").read_text() == "mine"
    file = tmp_path / "x.zarr"
    file.write_text("mine")
    with pytest.raises(StoreExistsError):
        open_zarr(file, mode="w")
    assert sorted(os.listdir(tmp_path)) == ["t.zarr", "x.zarr"]


# -- zip ----------------------------------------------------------------------------------------
def test_zip_files_that_lie(tmp_path: FsPath) -> None:
    file = tmp_path / "t.zarr.zip"
    save(file, {("a",): torch.arange(5000.0)})
    good = file.read_bytes()
    for size in (0, 10, len(good) // 2, len(good) - 3):
        file.write_bytes(good[:size])
        with pytest.raises(CorruptStoreError, match="zip"):
            load(file)
    file.write_bytes(good.replace(b"PK\x03\x04", b"PK\x09\x09", 1))
    with pytest.raises(CorruptStoreError):
        load(file, verify="full")
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as bomb:
        bomb.writestr("zarr.json", b" " * (300 << 20))
    with pytest.raises(CorruptStoreError, match="more than"):
        load(file)


def test_zip_files_of_zarr_python(tmp_path: FsPath) -> None:
    file = tmp_path / "t.zarr.zip"
    store = zarr.storage.ZipStore(file, mode="w")
    group = zarr.open_group(store, mode="w")
    group.create_array("x", shape=(10, 3), dtype="f4", chunks=(2, 3))[...] = np.arange(30).reshape(10, 3)
    store.close()
    assert load(file)[("x",)].tolist() == np.arange(30.0).reshape(10, 3).tolist()
    ours = tmp_path / "o.zarr.zip"
    save(ours, {("x",): torch.arange(30.0)})
    assert zarr.open_group(zarr.storage.ZipStore(ours, mode="r"), mode="r")["x"][...].sum() == 435


# -- more than is there --------------------------------------------------------------------------
def test_a_store_that_declares_more_than_is_allowed(place: FsPath) -> None:
    save(place, {("a",): torch.arange(100), ("b",): torch.zeros(100, 8)})
    with pytest.raises(CorruptStoreError, match=r"t\.zarr declares 4000 bytes of data, more than max_bytes=3999"):
        open_zarr(place, max_bytes=3999)
    with open_zarr(place, max_bytes=4000) as store:
        assert store.read([Read(("a",))])[0].sum() == 4950
    with pytest.raises(OptionError, match="max_bytes"):
        open_zarr(place, max_bytes=-1)


def test_reading_what_was_never_written_is_bounded(place: FsPath) -> None:
    """Rows of it are read, all of it is not: neither from our stores nor from those of other programs."""
    huge = {("x",): LeafSpec((1 << 20, 1 << 12), "float32"), ("y",): LeafSpec((10,), "int8")}
    with open_zarr(place, mode="w") as store:
        store.create(huge)
        store.save_header(header_of({}))
    with open_zarr(place) as store:
        assert store.read([Read(("x",), (slice(7, 9, 1),))])[0].sum() == 0
        with pytest.raises(
            CorruptStoreError, match=r"t\.zarr: reading 'x' would take 17179869194 bytes .* 0 are stored"
        ):
            store.read([Read(("y",)), Read(("x",))])
    with open_zarr(place, max_bytes=1 << 60) as store:
        assert store.read([Read(("x",), (slice(0, 80_000, 1), slice(0, 4, 1)))])[0].shape == (80_000, 4)


def test_a_read_larger_than_memory_names_the_leaf(place: FsPath) -> None:
    with open_zarr(place, mode="w") as store:
        store.create({("x",): LeafSpec((1 << 36, 1 << 10), "float64")})
        store.save_header(header_of({}))
    with open_zarr(place, max_bytes=1 << 60) as store, pytest.raises(StoreIOError, match=r"t\.zarr: no memory for 'x'"):
        store.read([Read(("x",))])


def test_pieces_that_are_repeated_are_bounded(place: FsPath) -> None:
    """A shard whose index names one chunk a million times."""
    save(place, {("a",): torch.zeros(16, 1 << 20, dtype=torch.uint8)}, chunks=1, shards=16, compressors="none")
    document = decode_root((place / "zarr.json").read_bytes(), url="u")
    (leaf,) = document.leaves.values()
    rows = 1 << 20
    file = place / "a" / "c" / "0" / "0"
    piece = file.read_bytes()[: (1 << 20) + 4]
    index = np.tile(np.array([0, len(piece)], "<u8"), rows).tobytes()
    mark = zlib.crc32(piece)
    file.write_bytes(piece + mark.to_bytes(4, "little") + index + crc32c(index).to_bytes(4, "little"))
    metadata = document.metadata["a"]
    metadata["shape"][0] = metadata["chunk_grid"]["configuration"]["chunk_shape"][0] = rows
    leaf.objects = {0: Stored(file.stat().st_size, mark)}
    (place / "zarr.json").write_bytes(encode_root(document, document.header, [leaf], url="u"))
    with open_zarr(place) as store:
        assert store.read([Read(("a",), (torch.tensor([5, rows - 1]),))])[0].sum() == 0
        with pytest.raises((CorruptStoreError, StoreIOError), match=r"t\.zarr: .*'a'"):
            store.read([Read(("a",))])


@pytest.mark.parametrize("levels", [300, 900, 990])
def test_metadata_nested_deep(place: FsPath, levels: int) -> None:
    """Also where it is ours, and what decodes it may stand deeper than what encodes it."""
    save(place, {("a",): torch.arange(64)})
    document = decode_root((place / "zarr.json").read_bytes(), url="u")
    deep: Any = 1
    for _ in range(levels):
        deep = {"x": deep}
    try:
        document.metadata["a"]["attributes"]["deep"] = deep
        (place / "zarr.json").write_bytes(encode_root(document, document.header, document.leaves.values(), url="u"))
    except RecursionError:
        (place / "zarr.json").write_text("{" + '"a":{' * 2000)

    def look(depth: int) -> None:
        if depth:
            look(depth - 1)
            return
        try:
            assert load(place)[("a",)].sum() == 2016
        except StoreError as error:
            assert "t.zarr" in str(error)  # noqa: PT017

    look(0)
    look(sys.getrecursionlimit() // 2)


def test_texts_of_a_file_are_cut_in_messages(place: FsPath) -> None:
    for changes in (
        {"fill_value": "x" * 100_000},
        {"data_type": "x" * 100_000},
        {"chunk_grid": {"name": "x" * 100_000}},
    ):
        make(place, changes)
        with pytest.raises(StoreError, match="'bad'") as caught, open_zarr(place) as store:
            everything(store)
        assert len(str(caught.value)) < 1000
        shutil.rmtree(place)
