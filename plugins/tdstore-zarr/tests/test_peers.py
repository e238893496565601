"""Stores of other programs open here, and ours open there: tensordict, zarr-python, xarray."""

from __future__ import annotations

import os
from pathlib import Path as FsPath
from typing import Any

import numpy as np
import pytest
import tensordict
import torch
import xarray
import zarr
from tdstore_zarr.store import open_zarr
from zarr.metadata.migrate_v3 import migrate_v2_to_v3
from zarrhelp import everything, fill, load, same, save

import tdstore
from tdstore.errors import StoreExistsError, StoreNotFoundError, UnsupportedError, UntrustedDataError
from tdstore.header import Group, Header
from tdstore.types import LeafSpec, Read, Write

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")

ROWS = torch.tensor([7, 3, 3, 0, 9])


def data() -> dict[str, Any]:
    return {"obs": torch.arange(40.0).view(10, 4), "n": {"a": torch.arange(10), "b": torch.rand(10, 3) > 0.5}}


# -- theirs here ---------------------------------------------------------------------------
def test_the_peers_store_opens_here(place: FsPath) -> None:
    tensordict.TensorDict({**data(), "s": "hello", "l": tensordict.NonTensorData({"a": [1, 2]})}, [10]).to_zarr(
        str(place)
    )
    td = tdstore.open(place)
    assert td.batch_size == (10,)
    assert sorted(td.keys()) == ["l", "n", "obs", "s"]
    assert td["s"] == "hello"
    assert td["l"] == {"a": [1, 2]}
    assert torch.equal(td[ROWS]["obs"], data()["obs"][ROWS])
    assert torch.equal(td["n", "a"], torch.arange(10))
    before = sorted(p for p in place.rglob("*"))
    td.close()
    assert sorted(p for p in place.rglob("*")) == before


def test_the_peers_store_is_changed_in_place(place: FsPath) -> None:
    tensordict.TensorDict(data(), [10]).to_zarr(str(place))
    with open_zarr(place, mode="r+") as store:
        store.write([Write(("obs",), (ROWS[:1],), torch.full((1, 4), -1.0))])
    assert (place / "zarr.json").read_bytes().count(b"tdstore") == 0
    theirs = tensordict.PersistentTensorDict.from_zarr(str(place))
    assert theirs["obs"][7].tolist() == [-1.0] * 4
    assert theirs["obs"][6].tolist() == data()["obs"][6].tolist()


def test_pickled_values_are_loaded_on_request_only(place: FsPath) -> None:
    td = tensordict.TensorDict({"a": torch.ones(3), "bad": tensordict.NonTensorData({1, 2}, batch_size=[3])}, [3])
    td.to_zarr(str(place))
    with open_zarr(place) as store:
        assert list(store.paths()) == [("a",)]
        store.load_header()
    with tdstore.open(place) as stored, pytest.raises(UntrustedDataError, match="'bad'.*it is pickled"):
        stored["bad"]
    with tdstore.open(place, trust=True) as stored:
        assert stored["bad"] == {1, 2}


@pytest.mark.parametrize("consolidated", [False, True])
def test_stores_of_zarr_python_open_here(place: FsPath, consolidated: bool) -> None:
    group = zarr.open_group(str(place), mode="w")
    rng = np.random.default_rng(0)
    made: dict[tuple[str, ...], Any] = {}

    def put(name: str, value: Any, **options: Any) -> None:
        made[tuple(name.split("/"))] = value
        group.create_array(name, shape=value.shape, dtype=value.dtype, **options)[...] = value

    put("plain", rng.random((10, 6)), chunks=(3, 4))
    put("zstd", rng.integers(0, 9, (10, 6)), chunks=(4, 6), compressors=zarr.codecs.ZstdCodec())
    put("g/gzip", rng.integers(0, 9, (10,)).astype("i2"), chunks=(4,), compressors=zarr.codecs.GzipCodec())
    put("g/big", rng.random((10, 2)), chunks=(4, 2), serializer=zarr.codecs.BytesCodec(endian="big"))
    put(
        "bigz",
        rng.integers(0, 99, (10, 2)).astype("u4"),
        chunks=(4, 1),
        serializer=zarr.codecs.BytesCodec(endian="big"),
    )
    put("shards", rng.random((20, 5)).astype("f4"), chunks=(2, 5), shards=(6, 5))
    put("turned", rng.random((10, 6)), chunks=(4, 3), filters=[zarr.codecs.TransposeCodec(order=(1, 0))])
    put("complex", rng.random((10,)) + 1j * rng.random(10), chunks=(4,))
    put("flag", rng.random((10,)) > 0.5)
    put("crc", rng.random((10, 2)), chunks=(4, 2), compressors=[zarr.codecs.BloscCodec(), zarr.codecs.Crc32cCodec()])
    group.create_array("filled", shape=(10, 2), dtype="f4", chunks=(4, 2), fill_value=np.nan)[3:5] = 1
    group.create_array("scalar", shape=(), dtype="i8")[...] = 5
    if consolidated:
        zarr.consolidate_metadata(str(place))
    found = load(place)
    assert found[("scalar",)].item() == 5
    assert torch.isnan(found[("filled",)]).sum() == 16
    for path, value in made.items():
        assert np.array_equal(found[path].numpy(), value), path
    with open_zarr(place) as store:
        rows = store.read([Read(path, (ROWS,)) for path in made])
        assert store.load_header().groups[("g",)].keys == ("big", "gzip")
    for got, (path, value) in zip(rows, made.items(), strict=True):
        assert np.array_equal(got.numpy(), value[ROWS.numpy()]), path
    with open_zarr(place, mode="r+") as store:
        store.write([Write(path, (ROWS[:2],), found[path][:2]) for path in made])
        store.save_header(store.load_header())
    with open_zarr(place, verify="full") as store:
        after = everything(store)
    for path, value in made.items():
        expected = np.array(value)
        expected[ROWS[:2].numpy()] = value[:2]
        assert np.array_equal(after[path].numpy(), expected), path
        assert np.array_equal(zarr.open_array(str(place), path="/".join(path), mode="r")[...], expected), path


@pytest.mark.parametrize("suffix", ["", ".zarr"])
def test_zarr_v2_is_named_and_opens_after_a_migration(tmp_path: FsPath, suffix: str) -> None:
    place = tmp_path / f"old{suffix}"
    group = zarr.open_group(str(place), mode="w", zarr_format=2)
    group.create_array("obs", data=np.arange(12.0).reshape(4, 3), chunks=(2, 3))
    group.create_group("next").create_array("obs", data=np.ones((4, 3), "f4"), chunks=(3, 3), order="F")
    with pytest.raises(StoreNotFoundError, match="but that of zarr v2") as caught:
        tdstore.open(place)
    assert "zarr migrate v3" in str(caught.value)
    with pytest.raises(StoreExistsError):
        tdstore.TensorDict({"a": torch.zeros(2)}, [2]).save(place)
    migrate_v2_to_v3(input_store=zarr.storage.LocalStore(str(place)))
    with tdstore.open(place) as td:
        assert td[1:]["obs"].tolist() == np.arange(12.0).reshape(4, 3)[1:].tolist()
        assert td["next", "obs"].tolist() == [[1.0] * 3] * 4


def test_zarr_v2_behind_a_url_is_named() -> None:
    store = zarr.storage.FsspecStore.from_url("memory://old-zarr.zarr")
    zarr.open_group(store, mode="w", zarr_format=2)
    with pytest.raises(StoreNotFoundError, match="but that of zarr v2"):
        tdstore.open("memory://old-zarr.zarr")


def test_strings_are_values(place: FsPath) -> None:
    """More of them in tests/container/varlen/test_strings_of_others.py."""
    group = zarr.open_group(str(place), mode="w")
    group.create_array("text", shape=(3,), dtype="str")[:2] = np.array(["a", "bé"], object)
    group.create_array("times", shape=(3,), dtype="i4")
    with open_zarr(place) as store:
        assert store.load_header().groups[()].values == {"text": {"stack": ["a", "bé", ""], "dim": 0}}


@pytest.mark.filterwarnings("ignore")
def test_what_no_tensor_has_is_refused_by_name(place: FsPath) -> None:
    group = zarr.open_group(str(place), mode="w")
    group.create_array("when", shape=(3,), dtype="datetime64[s]")
    with pytest.raises(UnsupportedError, match="'when'"):
        open_zarr(place)


CUTS: dict[str, dict[str, Any]] = {
    "shards": {"chunks": 8, "shards": 64}, "plain": {"chunks": 8, "compressors": "none", "shards": 64},
    "chunks": {"chunks": 8}, "without checksums": {"chunks": 8, "checksum": False},
}  # fmt: skip


@pytest.mark.parametrize("cut", CUTS)
def test_scattered_rows_of_small_chunks(place: FsPath, cut: str) -> None:
    """Rows in any order, repeated, waiting to be written, never written, in the last chunk, of every width."""
    rng = np.random.default_rng(0)
    values = {
        ("bytes",): torch.from_numpy(rng.integers(0, 255, 203, dtype=np.uint8)),
        ("wide",): torch.from_numpy(rng.integers(0, 9, (203, 3, 2))),
        ("flags",): torch.from_numpy(rng.integers(0, 2, (203, 5)).astype(bool)),
        ("half",): torch.from_numpy(rng.random((203, 2))).to(torch.bfloat16),
    }
    fills = {path: (7 if path == ("wide",) else 0) for path in values}
    rows = torch.from_numpy(rng.integers(0, 203, 60))
    with open_zarr(place, mode="w", **CUTS[cut]) as store:
        store.create({p: LeafSpec(v.shape, v.dtype, fill_value=fills[p]) for p, v in values.items()})
        store.write([Write(p, (slice(0, 100, 1),), v[:100]) for p, v in values.items()])
        expected = {p: torch.cat([v[:100], torch.full_like(v[100:], fills[p])]) for p, v in values.items()}
        for p, got in zip(values, store.read([Read(p, (rows,)) for p in values]), strict=True):
            assert torch.equal(got, expected[p][rows]), p
        store.save_header(Header())
    with open_zarr(place) as store:
        for p, got in zip(values, store.read([Read(p, (rows,)) for p in values]), strict=True):
            assert torch.equal(got, expected[p][rows]), p
        outs = [torch.empty(60, *v.shape[1:], dtype=v.dtype) for v in values.values()]
        store.read([Read(p, (rows,), out) for p, out in zip(values, outs, strict=True)])
        assert all(torch.equal(out, expected[p][rows]) for p, out in zip(values, outs, strict=True))
        assert store.read([Read(("wide",), (rows, slice(1, 3, 1)))])[0].equal(expected[("wide",)][rows, 1:3])
        assert not store.read([Read(("bytes",), (rows[:0],))])[0].numel()


def test_a_lone_array_is_refused(place: FsPath) -> None:
    zarr.create_array(str(place), shape=(3,), dtype="i4")
    with pytest.raises(UnsupportedError, match="an array, not a group"):
        open_zarr(place)


# -- ours there ----------------------------------------------------------------------------
LAYOUTS: dict[str, dict[str, Any]] = {
    "default": {}, "shards": {"chunks": 2, "shards": 4}, "plain": {"chunks": 3, "compressors": "none"},
    "zstd": {"compressors": "zstd", "layout": "scan"}, "gzip": {"compressors": "gzip"},
    "theirs": {"compressors": [{"name": "numcodecs.zlib", "configuration": {"level": 1}}]},
}  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ours_open_with_zarr_python_and_xarray(place: FsPath, layout: str) -> None:
    td = tdstore.TensorDict({**data(), "s": "hello"}, [10], names=["time"])
    td.save(place, storage="zarr", **LAYOUTS[layout])
    group = zarr.open_group(str(place), mode="r")
    assert group.metadata.consolidated_metadata is not None
    for name, value in (("obs", data()["obs"]), ("n/a", torch.arange(10)), ("n/b", td["n", "b"])):
        assert np.array_equal(group[name][...], value.numpy())
        assert np.array_equal(zarr.open_array(str(place), path=name, mode="r")[2:5], value[2:5].numpy())
    found = xarray.open_zarr(str(place))
    assert found["obs"].dims == ("time", "obs_dim_1")
    assert np.array_equal(found["obs"].values, data()["obs"].numpy())
    tree = xarray.open_datatree(str(place), engine="zarr")
    assert np.array_equal(tree["n/a"].values, np.arange(10))


@pytest.mark.parametrize("layout", ["default", "shards", "plain"])
def test_ours_open_with_the_peer(place: FsPath, layout: str) -> None:
    td = tdstore.TensorDict({**data(), "s": "hello"}, [10])
    td.save(place, storage="zarr", **LAYOUTS[layout])
    theirs = tensordict.PersistentTensorDict.from_zarr(str(place))
    assert theirs.batch_size == (10,)
    assert torch.equal(theirs["obs"], data()["obs"])
    assert torch.equal(theirs["n", "a"], torch.arange(10))
    assert theirs["s"] == "hello"


def test_dtypes_that_zarr_lacks_are_their_bits(place: FsPath) -> None:
    value = torch.randn(6, 3).to(torch.bfloat16)
    save(place, {("b",): value})
    array = zarr.open_array(str(place), path="b", mode="r")
    assert array.dtype == np.uint16
    assert array.attrs["tdstore_dtype"] == "bfloat16"
    assert np.array_equal(array[...], value.view(torch.uint16).numpy())


def test_an_array_that_zarr_python_adds_or_changes(place: FsPath) -> None:
    """Our manifest does not know of it: what it vouches for, it still does."""
    save(place, {("a",): torch.arange(10)}, chunks=5, shards=False, checksum=False, compressors="none")
    zarr.open_array(str(place), path="a", mode="r+")[3] = 77
    with open_zarr(place) as store, pytest.raises(tdstore.errors.CorruptStoreError, match="'a'.*not the one"):
        store.read([Read(("a",))])
    with open_zarr(place, recover="accept", mode="r+", verify="none") as store:
        assert [fault.path for fault in store.verify()] == [("a",)]


def test_unwritten_rows_read_as_fill_everywhere(place: FsPath) -> None:
    with open_zarr(place, mode="w") as store:
        store.create({("x",): LeafSpec((100_000, 3), "float32", fill_value=float("nan"))})
        store.write([Write(("x",), (slice(5, 6, 1),), torch.ones(1, 3))])
        store.save_header(Header({(): Group(batch_size=(100_000,), keys=("x",))}))
    array = zarr.open_array(str(place), path="x", mode="r")
    assert np.isnan(array[:5]).all()
    assert array[5].tolist() == [1, 1, 1]
    assert np.isnan(array[99_000:]).all()
    assert sum(os.path.getsize(p) for p in place.rglob("*") if p.is_file()) < 20_000


def test_odd_keys_are_found_again(place: FsPath) -> None:
    keys = ["a/b", "", "..", "Obs", "obs", "zarr.json", "__x", "c", "é" * 60, "k" * 300, ".zattrs", "a\\b", "%41"]
    leaves = {(key, "x"): torch.tensor([i]) for i, key in enumerate(keys)} | {
        ("leaf/" + k,): torch.ones(1) for k in keys
    }
    with open_zarr(place, mode="w") as store:
        fill(store, leaves)
        store.save_header(Header({(): Group(batch_size=(1,))}))
    assert same(load(place, verify="full"), leaves)
    assert len(list(zarr.open_group(str(place), mode="r").members())) == 2 * len(keys)
