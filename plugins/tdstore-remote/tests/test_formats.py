"""What is behind a URL: told by its suffix, else by what is there, in two rounds at most."""

from __future__ import annotations

import pickle
import zipfile
from pathlib import Path as FsPath
from typing import Any

import pytest
import torch
from remotehelp import name, open_remote, same, sample

import tdstore
from tdstore import TensorDict
from tdstore.errors import (
    CorruptStoreError,
    OptionError,
    ReadOnlyError,
    StoreExistsError,
    StoreNotFoundError,
    TDStoreError,
    UnknownBackendError,
    UnsupportedError,
    UntrustedDataError,
)
from tdstore.registry import registry
from tdstore.types import Mode
from tests.servers import FaultProxy, S3Server

h5py = pytest.importorskip("h5py")


def upload(s3: S3Server, local: FsPath, key: str) -> str:
    client = s3.client()
    if local.is_file():
        client.upload_file(str(local), s3.bucket, key)
    for file in local.rglob("*") if local.is_dir() else ():
        if file.is_file():
            client.upload_file(str(file), s3.bucket, f"{key}/{file.relative_to(local)}")
    return f"{s3.url}/{key}"


@pytest.mark.parametrize("url", ["s3", "memory", "file"])
def test_raw(url: str, s3: S3Server, tmp_path: FsPath) -> None:
    where = {"s3": f"{s3.url}/{name()}", "memory": f"memory://{name()}", "file": f"file://{tmp_path}/x"}[url]
    options = {"storage_options": s3.fsspec_options} if url == "s3" else {}
    sample().save(where, **options)
    with tdstore.open(where, **options) as td:
        assert same(td, sample())
        assert same(td[10:20], sample()[10:20])
    with tdstore.open(where, mode="r+", **options) as td:
        td[5] = sample()[6]
    with tdstore.open(where, **options) as td:
        assert td[5]["action"].item() == 6


@pytest.mark.parametrize("mode", ["w", "x", "a"])
def test_a_folder_with_other_files_is_refused(mode: Mode, tmp_path: FsPath) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(StoreExistsError, match="notes.txt"):
        tdstore.open(f"file://{tmp_path}", mode=mode)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize("layout", [{}, {"chunks": 32, "compression": "gzip", "shuffle": True}], ids=["plain", "gzip"])
@pytest.mark.parametrize("suffix", [".h5", ""])
def test_h5(layout: dict[str, Any], suffix: str, s3: S3Server, slow: FaultProxy, tmp_path: FsPath) -> None:
    sample().save(tmp_path / "x.h5", **layout)
    upload(s3, tmp_path / "x.h5", (key := name()) + suffix)
    faulty = s3.through(slow.port)
    slow.forget()
    with tdstore.open(f"{s3.url}/{key}{suffix}", storage_options=faulty.fsspec_options) as td:
        # without a suffix: the manifest, what else is there, its first bytes; new connections count as rounds too
        assert slow.rounds() <= (3 if suffix else 7)
        if layout:
            assert td[0]["action"].item() == 0  # the index of chunks is read once
        slow.forget()
        rows = torch.tensor([290, 3, 3, 150, 7])
        assert same(td[rows], sample()[rows])
        assert slow.rounds() == 1
        assert same(td, sample())
        assert same(td[100:140], sample()[100:140])
        with pytest.raises(ReadOnlyError):
            td.set_("action", torch.zeros(300, dtype=torch.int64))
    with tdstore.open(f"{s3.url}/{key}{suffix}", storage_options=faulty.fsspec_options, verify="full") as td:
        assert same(td, sample())
    if suffix:
        with pytest.raises(ReadOnlyError, match="HDF5 files behind a URL"):
            open_remote(f"{s3.url}/{key}{suffix}", mode="r+", storage_options=faulty.fsspec_options)
    slow.forget()


def test_h5_of_others(s3: S3Server, tmp_path: FsPath) -> None:
    """Big-endian, scalars, empty, and only partly written datasets, in another program's file."""
    import numpy as np

    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["be"] = np.arange(5000, dtype=">i4").reshape(50, 100)
        file["zero"] = np.zeros((50, 0))
        file["scalar"] = 3.5
        some = file.create_dataset("some", (50, 100), "f4", chunks=(7, 30), fillvalue=2.5)
        some[10:20] = 1
        file.create_dataset("unwritten", (50, 3), "i8")
    where = upload(s3, tmp_path / "x.h5", f"{name()}.h5")
    with tdstore.open(where, storage_options=s3.fsspec_options) as there, tdstore.open(tmp_path / "x.h5") as here:
        assert same(there, here)
    with open_remote(where, storage_options=s3.fsspec_options) as store:
        from tdstore.types import Read

        rows = torch.tensor([49, 12, 0, 12])
        index = (rows, slice(20, 70, 3))
        found = store.read([Read(("be",), index), Read(("some",), index), Read(("unwritten",), (rows,))])
        assert torch.equal(found[0], (torch.arange(5000, dtype=torch.int32).view(50, 100))[rows][:, 20:70:3])
        expected = torch.full((50, 100), 2.5)
        expected[10:20] = 1
        assert torch.equal(found[1], expected[rows][:, 20:70:3])
        assert torch.equal(found[2], torch.zeros(4, 3, dtype=torch.int64))


def test_hostile_h5(s3: S3Server, tmp_path: FsPath) -> None:
    (tmp_path / "secret").write_bytes(bytes(800))
    cases: dict[str, Any] = {
        "external": lambda f: f.create_dataset("a", (100,), "f8", external=[(str(tmp_path / "secret"), 0, 800)]),
        "link": lambda f: f.__setitem__("a", h5py.ExternalLink(str(tmp_path / "other.h5"), "/x")),
        "soft": lambda f: f.__setitem__("a", h5py.SoftLink("/b")),
    }
    for case, make in cases.items():
        with h5py.File(tmp_path / f"{case}.h5", "w") as file:
            make(file)
        where = upload(s3, tmp_path / f"{case}.h5", f"{name()}.h5")
        for trust in ({}, {"trust": "h5"}):
            with pytest.raises(UntrustedDataError, match="'a'"):
                tdstore.open(where, storage_options=s3.fsspec_options, **trust)
    with h5py.File(tmp_path / "bomb.h5", "w") as file:
        file.create_dataset("a", (1 << 40,), "f8", chunks=(1 << 16,), compression="gzip")
    with pytest.raises(CorruptStoreError, match="declares"):
        tdstore.open(upload(s3, tmp_path / "bomb.h5", f"{name()}.h5"), storage_options=s3.fsspec_options)


def test_damaged_h5(s3: S3Server, tmp_path: FsPath) -> None:
    """Truncated and flipped files are an error, or the flip is found by verify="full"."""
    sample(3000).save(tmp_path / "x.h5")
    data = (tmp_path / "x.h5").read_bytes()
    for cut in (0, 7, 100, 3000, len(data) // 2, len(data) - 1):
        (tmp_path / "y.h5").write_bytes(data[:cut])
        with pytest.raises(TDStoreError):
            tdstore.open(upload(s3, tmp_path / "y.h5", f"{name()}.h5"), storage_options=s3.fsspec_options)
    middle = len(data) // 2
    (tmp_path / "y.h5").write_bytes(data[:middle] + bytes([data[middle] ^ 4]) + data[middle + 1 :])
    where = upload(s3, tmp_path / "y.h5", f"{name()}.h5")
    with pytest.raises(CorruptStoreError, match="checksum"):
        tdstore.open(where, storage_options=s3.fsspec_options, verify="full")


@pytest.mark.parametrize("layout", [{}, {"chunks": 32, "compression": "lzf"}], ids=["plain", "lzf"])
def test_what_is_read_of_h5_is_compared(
    layout: dict[str, Any], s3: S3Server, slow: FaultProxy, tmp_path: FsPath
) -> None:
    sample().save(tmp_path / "x.h5", **layout)
    with h5py.File(tmp_path / "x.h5") as file:
        found = file["obs"].id
        start = found.get_chunk_info(5).byte_offset if layout else found.get_offset() + 5 * 32 * 8000
    with open(tmp_path / "x.h5", "r+b") as medium:
        medium.seek(start + 9)
        byte = medium.read(1)[0]
        medium.seek(start + 9)
        medium.write(bytes([byte ^ 4]))
    where = upload(s3, tmp_path / "x.h5", f"{name()}.h5")
    options = s3.through(slow.port).fsspec_options
    for rows in (torch.tensor([160]), torch.tensor([160, 3, 161]), slice(100, 200), slice(None)):
        with (
            tdstore.open(where, storage_options=options) as td,
            pytest.raises(CorruptStoreError, match=r"\.h5.*'obs'") as caught,
        ):
            td[rows].read()
        assert "row" in str(caught.value)
    with tdstore.open(where, storage_options=options) as td:
        td[0].read()
        slow.forget()
        assert same(td[torch.tensor([3, 250])].read(), sample()[[3, 250]])
        assert slow.rounds() == 1
        with pytest.raises(CorruptStoreError):
            td.read()
    with tdstore.open(where, storage_options=options, max_bytes=300 * 8012) as td:
        assert td[0]["action"].item() == 0
    with pytest.raises(CorruptStoreError, match="max_bytes=1000"):
        tdstore.open(where, storage_options=options, max_bytes=1000)
    slow.forget()


def test_h5_replaced_while_open(s3: S3Server, tmp_path: FsPath) -> None:
    sample(3000).save(tmp_path / "x.h5")
    where = upload(s3, tmp_path / "x.h5", key := f"{name()}.h5")
    with tdstore.open(where, storage_options=s3.fsspec_options) as td:
        assert td[2000]["action"].item() == 2000
        s3.client().put_object(Bucket=s3.bucket, Key=key, Body=(tmp_path / "x.h5").read_bytes()[::-1])
        with pytest.raises(CorruptStoreError, match="was replaced"):
            td[1500].to_tensordict()


def test_zarr(s3: S3Server) -> None:
    if "zarr" not in registry().backends():
        pytest.skip("tdstore-zarr is not installed")
    where = f"{s3.url}/{name()}.zarr"
    sample().save(where, storage_options=s3.fsspec_options)
    with tdstore.open(where, storage_options=s3.fsspec_options) as td:
        assert same(td[40:50], sample()[40:50])


@pytest.mark.parametrize("storage, suffix", [("zarr", ".zarr"), ("zarr", ""), ("h5", ".h5")])
def test_a_handle_of_another_format_travels(
    storage: str, suffix: str, s3: S3Server, tmp_path: FsPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a process is sent names the backend that made the store, not the one that handed over to it."""
    if storage not in registry().backends():
        pytest.skip(f"tdstore-{storage} is not installed")
    places = [(f"file://{tmp_path}/x{suffix}", {})]
    if storage == "zarr":
        places.append((f"{s3.url}/{name()}{suffix}", {"storage_options": s3.fsspec_options}))
    for variable, value in s3.env.items():  # a pickle carries no secrets
        monkeypatch.setenv(variable, value)
    for where, options in places:
        to = where.removeprefix("file://")
        sample().save(to, storage=storage, **options).close()
        with tdstore.open(where, **options) as td:
            received = pickle.loads(pickle.dumps(td))
            assert same(received[40:50], sample()[40:50])
            received.close()


def test_a_directory_of_ours(s3: S3Server, tmp_path: FsPath) -> None:
    sample().memmap(tmp_path / "d")
    where = upload(s3, tmp_path / "d", name())
    with tdstore.open(where, storage_options=s3.fsspec_options) as td:
        assert same(td[[7, 280]], sample()[[7, 280]])
    with pytest.raises(ReadOnlyError):
        tdstore.open(where, mode="r+", storage_options=s3.fsspec_options)


def test_a_directory_of_the_peer(s3: S3Server, slow: FaultProxy, tmp_path: FsPath) -> None:
    peer = pytest.importorskip("tensordict")
    numbers = torch.arange(300)
    peer.TensorDict({"a": numbers, "n": {"b": numbers * 2}}, [300]).memmap(str(tmp_path / "d"))
    where = upload(s3, tmp_path / "d", name())
    slow.forget()
    with tdstore.open(where, storage_options=s3.through(slow.port).fsspec_options) as td:
        # one for each level of groups below the root
        assert slow.rounds() <= 3
        assert td[[7, 299]]["n", "b"].tolist() == [14, 598]


def test_chains(s3: S3Server, tmp_path: FsPath) -> None:
    pytest.importorskip("s3fs")
    where = f"{s3.url}/{name()}"
    sample().save(where, storage_options=s3.fsspec_options)
    options = {**s3.fsspec_options, "simplecache": {"cache_storage": str(tmp_path / "cache")}}
    with tdstore.open(f"simplecache::{where}", storage_options=options) as td:
        assert same(td[[3, 200]], sample()[[3, 200]])
    assert list((tmp_path / "cache").iterdir())
    with pytest.raises(ReadOnlyError):
        sample().save(f"simplecache::{where}", storage_options=options)
    sample().save(f"file://{tmp_path}/d")
    with zipfile.ZipFile(tmp_path / "d.zip", "w") as archive:
        for file in (tmp_path / "d").rglob("*"):
            if file.is_file():
                archive.write(file, f"run/{file.relative_to(tmp_path / 'd')}")
    with tdstore.open(f"zip://run::file://{tmp_path}/d.zip") as td:
        assert same(td[[3, 200]], sample()[[3, 200]])


def test_what_is_not_there_or_not_for_us(s3: S3Server, tmp_path: FsPath) -> None:
    options = {"storage_options": s3.fsspec_options}
    with pytest.raises(StoreNotFoundError, match=r"no tdstore\.json"):
        tdstore.open(f"{s3.url}/{name()}", **options)
    with pytest.raises(StoreNotFoundError):
        tdstore.open(f"{s3.url}/{name()}.h5", **options)
    with pytest.raises(OptionError, match="did you mean 'single_writer'"):
        open_remote(f"{s3.url}/x", single_writter=True, **options)
    with pytest.raises(OptionError, match="format"):
        open_remote(f"{s3.url}/x", format="csv", **options)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="needs a location"):
        open_remote(None)
    with pytest.raises(UnknownBackendError):
        tdstore.open("nobody-knows-this://x")


def test_other_formats_are_for_local_files(s3: S3Server) -> None:
    from tdstore.hookspecs import Backend

    registry().register(Backend(name="tests-other", opener="x:y", summary="x", suffixes=(".other",)))
    try:
        with pytest.raises(UnsupportedError, match="'tests-other' backend, which reads local files"):
            tdstore.open(f"{s3.url}/x.other", storage_options=s3.fsspec_options)
    finally:
        registry().unregister("tests-other")


def test_values_and_schemas(s3: S3Server) -> None:
    where = f"{s3.url}/{name()}"
    sample().save(where, storage_options=s3.fsspec_options)
    assert TensorDict.load(where, storage_options=s3.fsspec_options)["about"] == "a run"
    made = TensorDict.from_schema(
        {"a": tdstore.LeafSpec((3,), "float32")},
        batch_size=[5],
        storage=f"{where}/new",
        storage_options=s3.fsspec_options,
    )
    made.close()
    assert tdstore.open(f"{where}/new", storage_options=s3.fsspec_options)["a"].tolist() == [[0.0] * 3] * 5
