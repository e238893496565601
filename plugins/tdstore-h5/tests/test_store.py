"""What the h5 store does beyond the kit: options, modes, dtypes, keys, in-place sessions, forks, peers of its own."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path as FsPath
from typing import Any

import h5py
import pytest
import torch
from h5help import NEW, OLD, bits, everything, fill, header_of, load, same, save
from hypothesis import given, settings
from hypothesis import strategies as st
from tdstore_h5 import tdstore_backends
from tdstore_h5.file.names import MAX_NAME, decode_name, encode_key
from tdstore_h5.store import open_h5

import tdstore
from tdstore.dtypes import NAME_TO_DTYPE
from tdstore.errors import (
    OptionError,
    ReadOnlyError,
    StoreBusyError,
    StoreClosedError,
    StoreError,
    StoreExistsError,
    StoreIOError,
)
from tdstore.header import Header
from tdstore.testing.processes.warm import python
from tdstore.types import LeafSpec, Read, Write

X = ("x",)


def test_declaration() -> None:
    (backend,) = tdstore_backends()
    assert (backend.name, backend.opener, backend.schemes) == ("h5", "tdstore_h5.store:open_h5", ("h5",))
    assert backend.magic[0].startswith(b"\x89HDF")
    code = "import sys, tdstore_h5; list(tdstore_h5.tdstore_backends()); sys.exit('h5py' in sys.modules)"
    assert subprocess.run([*python(), "-c", code]).returncode == 0


# -- names ---------------------------------------------------------------------------------
@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=30))
@settings(max_examples=500)
def test_names_are_reversible(key: str) -> None:
    name = encode_key(key)
    assert decode_name(name) == key
    assert name
    assert "/" not in name
    assert "\0" not in name
    assert set(name) != {"."}


@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=30))
def test_foreign_names_stay_apart(name: str) -> None:
    """Whatever another program called a dataset, its key is its own: two names never share one key."""
    key = decode_name(name)
    assert key == name or encode_key(key) == name


def test_plain_names_stay() -> None:
    for key in ("obs", "a.b", "x y", "Ünï", "_", "-1", "..a"):
        assert encode_key(key) == key
    assert [encode_key(k) for k in ("", ".", "..", "a/b", "%")] == ["%", "%2E", "%2E%2E", "a%2Fb", "%25"]


KEYS = [
    "../x",
    "a/b",
    "a.b",
    "",
    ".",
    "..",
    "shape",
    "k" * 300,
    "Case",
    "case",
    "%",
    "%2F",
    "\0",
    "ключ",
    " ",
    "tdstore",
]


def test_keys_round_trip(file: FsPath) -> None:
    leaves = {(key,): torch.tensor(float(i)) for i, key in enumerate(KEYS)}
    leaves |= {("group", key): torch.tensor([i]) for i, key in enumerate(KEYS)}
    leaves |= {("deep", "/", "", ".."): torch.zeros(2)}
    save(file, leaves)
    assert same(load(file, verify="full"), leaves)


@pytest.mark.parametrize("key", ["\ud800", "x" * (MAX_NAME + 1)])
def test_keys_that_cannot_be_named(file: FsPath, key: str) -> None:
    with open_h5(file, mode="w") as store, pytest.raises(OptionError, match="key"):
        store.create({(key,): LeafSpec((), "int64")})
    assert not file.exists()


# -- dtypes and options --------------------------------------------------------------------
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("name", NAME_TO_DTYPE)
@pytest.mark.parametrize("chunks", [None, 2])
def test_dtypes(file: FsPath, name: str, chunks: int | None) -> None:
    dtype = NAME_TO_DTYPE[name]
    raw = torch.randint(0, 2 if name == "bool" else 256, (6, 3, dtype.itemsize), dtype=torch.uint8)
    leaves = {
        X: raw.view(dtype).reshape(6, 3),
        ("zero",): raw.view(dtype).reshape(6, 3)[:0],
        ("s",): raw.view(dtype)[0, 0, 0],
    }
    with open_h5(file, mode="w", chunks=chunks) as store:
        fill(store, leaves)
        store.create({("filled",): LeafSpec((5,), dtype, fill_value=1)})
        store.save_header(header_of(leaves))
    found = load(file, verify="full")
    filled = found.pop(("filled",))
    assert same(found, leaves)
    assert bits(filled) == bits(torch.ones(5).to(dtype))


def test_every_layout_option_applies(file: FsPath) -> None:
    options: dict[str, Any] = {"chunks": (4, 2), "maxshape": (None, 4), "compression": "gzip", "compression_opts": 9}
    options |= {"shuffle": True, "fletcher32": True, "track_times": True, "fillvalue": 7, "fill_time": "alloc"}
    options |= {"rdcc_nbytes": 1 << 20}
    with open_h5(file, mode="w") as store:
        store.create({X: LeafSpec((9, 4), "int32", **options), ("s",): LeafSpec((9,), "int64", scaleoffset=0)})
        store.save_header(Header())
    with h5py.File(file) as f:
        d = f["x"]
        assert (d.chunks, d.maxshape, d.compression, d.compression_opts) == ((4, 2), (None, 4), "gzip", 9)
        assert d.shuffle
        assert d.fletcher32
        assert d.fillvalue == 7
        assert f["s"].scaleoffset is not None
    assert (load(file)[X] == 7).all()


def test_options_are_fitted_not_dropped(file: FsPath) -> None:
    """A leaf that an option does not suit is kept: the option gives way."""
    leaves = {("long",): torch.arange(500.0), ("short",): torch.arange(5), ("scalar",): torch.tensor(3)}
    leaves |= {("wide",): torch.zeros(200, 3, 2), ("empty",): torch.zeros(0, 4)}
    save(file, leaves, chunks=(100,), compression="gzip", compression_opts=4, shuffle=True)
    assert same(load(file), leaves)
    with h5py.File(file) as f:
        assert {k: f[k].chunks for k in f} == {
            "long": (100,), "short": (5,), "scalar": None, "wide": (100, 3, 2), "empty": None
        }  # fmt: skip


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"chunk": 4}, "did you mean 'chunks'"),
        ({"external": "/etc/passwd"}, "outside the file"),
        ({"chunks": "many"}, "must be integers"),
        ({"chunks": -1}, "must be positive"),
        ({"maxshape": 2}, "smaller than its shape"),
        ({"compression": "zap"}, "zap"),
        ({"fill_value": "no"}, "not a fill value"),
    ],
)
def test_bad_leaf_options(file: FsPath, options: dict[str, Any], match: str) -> None:
    with open_h5(file, mode="w") as store, pytest.raises(OptionError, match=match):
        store.create({X: LeafSpec((4, 4), "int64", **options)})


@pytest.mark.parametrize(
    "options", [{"mode": "rw"}, {"durable": "batch"}, {"verify": "x"}, {"recover": "no"}, {"libver": "9"}]
)
def test_bad_open_options(file: FsPath, options: dict[str, Any]) -> None:
    with pytest.raises(OptionError):
        open_h5(file, **{"mode": "w", **options})


@pytest.mark.parametrize("location", [None, "", "h5://"])
def test_no_location(location: Any) -> None:
    with pytest.raises(OptionError, match="file"):
        open_h5(location, mode="w")
    with pytest.raises(ReadOnlyError, match="s3"):
        open_h5("s3://bucket/x.h5", mode="w")


def test_folders_are_made_and_other_files_are_kept(tmp_path: FsPath) -> None:
    save(tmp_path / "new" / "folder" / "x.h5", {X: torch.ones(2)})
    assert load(tmp_path / "new" / "folder" / "x.h5")[X].tolist() == [1, 1]
    (tmp_path / "notes.txt").write_text("years of work")
    with pytest.raises(StoreExistsError, match="another kind"):
        open_h5(tmp_path / "notes.txt", mode="w")
    assert (tmp_path / "notes.txt").read_text() == "years of work"


# -- size ----------------------------------------------------------------------------------
def test_huge_leaf_takes_no_room(file: FsPath) -> None:
    with open_h5(file, mode="w") as store:
        store.create({X: LeafSpec((1_000_000, 84, 84, 3), "uint8")})
        store.write([Write(X, (torch.tensor([999_999, 3]),), torch.ones(2, 84, 84, 3, dtype=torch.uint8))])
        store.save_header(header_of({X: torch.zeros(1)}))
        (rows,) = store.read([Read(X, (torch.tensor([3, 4, 999_999]), slice(0, 1, 1), slice(0, 1, 1), slice(0, 1, 1)))])
    assert rows.flatten().tolist() == [1, 0, 1]
    assert file.stat().st_blocks * 512 < 1 << 20
    assert file.stat().st_size > 21_000_000_000


def test_room_of_a_deleted_leaf_reads_as_zero(file: FsPath) -> None:
    with open_h5(file, mode="w", durable="none") as store:
        for size in (30_000, 10_000, 29_000, 500, 3):
            store.create({X: LeafSpec((size,), "uint8")})
            assert store.read([Read(X)])[0].sum() == 0
            store.write([Write(X, (), torch.full((size,), 255, dtype=torch.uint8))])
            store.delete([X])
        store.save_header(Header())
    assert file.stat().st_size < 100_000


def test_resize_keeps_rows_and_fill(file: FsPath) -> None:
    for layout in ({}, {"chunks": 2, "maxshape": True}, {"chunks": 2, "compression": "gzip"}):
        with open_h5(file, mode="w", **layout) as store:
            store.create({X: LeafSpec((4, 3), "float32", fill_value=2.5)})
            store.write([Write(X, (slice(0, 4, 1),), torch.arange(12.0).view(4, 3))])
            store.save_header(Header())
            for length in (6, 2, 5, 0, 3):
                store.resize({X: length})
            store.save_header(Header())
        value = load(file, verify="full")[X]
        assert value.shape == (3, 3)
        assert (value == 2.5).all(), layout


def test_rename_exchanges(file: FsPath) -> None:
    with open_h5(file, mode="w") as store:
        fill(store, {("a",): torch.zeros(2), ("n", "b"): torch.ones(3), ("c",): torch.tensor(7)})
        store.save_header(Header())
        store.rename({("a",): ("n", "b"), ("n", "b"): ("a",), ("c",): ("new", "deep", "c")})
        store.save_header(Header())
    found = load(file, verify="full")
    assert {p: v.tolist() for p, v in found.items()} == {
        ("a",): [1, 1, 1], ("n", "b"): [0, 0], ("new", "deep", "c"): 7
    }  # fmt: skip


def test_leaf_and_group_of_one_name(file: FsPath) -> None:
    with open_h5(file, mode="w") as store:
        fill(store, {("a",): torch.zeros(2), ("n", "b"): torch.ones(3)})
        with pytest.raises(StoreError, match="is a leaf"):
            store.create({("a", "b"): LeafSpec((), "int64")})
        with pytest.raises(StoreError, match="is a group"):
            store.create({("n",): LeafSpec((), "int64")})
        assert len(list(store.paths())) == 2


# -- modes ---------------------------------------------------------------------------------
def test_closed_before_the_header_leaves_no_trace(file: FsPath) -> None:
    old, new = OLD, NEW
    save(file, old)
    with open_h5(file, mode="w") as store:
        fill(store, new)
    assert os.listdir(file.parent) == [file.name]
    assert same(load(file), old)


def test_save_over_a_file_that_is_open(file: FsPath) -> None:
    """Readers, and a writer in this process that is the source, keep the old file."""
    old, new = OLD, NEW
    save(file, old)
    reader, source = open_h5(file), None
    save(file, dict(zip(old, reader.read([Read(p, (slice(10, 100, 1),)) for p in old]), strict=True)))
    assert same(everything(reader), old)
    reader.close()
    assert load(file)[("n", "b")].tolist() == list(range(10, 100))
    source = open_h5(file, mode="r+")
    source.write([Write(("n", "b"), (slice(0, 1, 1),), torch.tensor([-1]))])
    save(file, new)
    with pytest.raises(StoreError, match="was replaced"):
        source.write([Write(("n", "b"), (slice(0, 1, 1),), torch.tensor([-1]))])
    source.close()
    assert same(load(file, verify="full"), new)


def test_saved_store_goes_on_in_place(file: FsPath) -> None:
    old, new = OLD, NEW
    with open_h5(file, mode="w") as store:
        fill(store, old)
        store.save_header(header_of(old))
        assert same(everything(store), old)
        assert same(load(file), old)  # while the writer is still open
        assert store.reopen_token()[:2] == (str(file), "r")
        store.write([Write(p, (), t) for p, t in new.items()])
        with pytest.raises(StoreBusyError, match="this process"):
            open_h5(file, lock_timeout=0.05)
    assert same(load(file, verify="full"), new)
    with pytest.raises(StoreClosedError):
        store.read([])
    store.close()


def test_x_and_a(file: FsPath) -> None:
    first, second = open_h5(file, mode="x"), open_h5(file, mode="a")
    first.save_header(Header())
    with pytest.raises(StoreExistsError):
        second.save_header(Header())
    first.close()
    second.close()
    with open_h5(file, mode="a") as store:
        fill(store, {X: torch.ones(2)})
        store.save_header(Header())
    assert load(file, verify="full")[X].tolist() == [1, 1]
    assert os.listdir(file.parent) == [file.name]


def test_link_and_permissions_survive_a_save(file: FsPath) -> None:
    save(file, {X: torch.zeros(2)})
    file.chmod(0o640)
    link = file.parent / "link.h5"
    link.symlink_to(file.name)
    save(link, {X: torch.ones(2)})
    assert link.is_symlink()
    assert file.stat().st_mode & 0o777 == 0o640
    assert load(file)[X].tolist() == [1, 1]


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_not_a_file(file: FsPath, make: Any) -> None:
    make(file)
    with pytest.raises(StoreError):
        open_h5(file)


def test_reopen_token_opens_the_same(file: FsPath) -> None:
    save(file, {X: torch.arange(3)})
    with open_h5(f"h5://{file}", mode="r", verify="full", chunks=4) as store:
        location, mode, options = store.reopen_token()
    assert (mode, options["verify"], options["chunks"]) == ("r", "full", 4)
    with open_h5(location, mode=mode, **options) as again:
        assert everything(again)[X].tolist() == [0, 1, 2]


def test_small_and_large_manifest(file: FsPath) -> None:
    """More than the 64 KB that an HDF5 object header takes, in files of the oldest and the newest kind."""
    leaves = {(f"leaf{i:05}", "x"): torch.tensor(i) for i in range(1500)}
    save(file, leaves)
    assert same(load(file, verify="full"), leaves)
    with h5py.File(file) as f:
        assert len(f.attrs["tdstore"]) > 64 << 10
    with h5py.File(file, "w", libver="earliest") as f:
        for path, value in leaves.items():
            f["/".join(path)] = value.numpy()
    with open_h5(file, mode="r+") as store:
        store.save_header(header_of(leaves))
    assert same(load(file, verify="full"), leaves)


def test_commits_do_not_make_the_file_grow(file: FsPath) -> None:
    save(file, {X: torch.zeros(100)})
    sizes = set()
    with open_h5(file, mode="r+", durable="none") as store:
        for i in range(30):
            store.write([Write(X, (slice(0, 1, 1),), torch.tensor([float(i)]))])
            store.save_header(store.load_header())
            sizes.add(store.nbytes_stored())
    assert max(sizes) - min(sizes) < 4096


# -- forks ---------------------------------------------------------------------------------
@pytest.mark.parametrize("mode", ["r", "r+", "w"])
@pytest.mark.parametrize("layout", [{}, {"chunks": 10, "compression": "gzip"}])
def test_forked_child_reads_and_harms_nothing(file: FsPath, mode: Any, layout: dict[str, Any]) -> None:
    old = {path: value.clone() for path, value in OLD.items()}
    save(file, old, **layout)
    store = open_h5(file, mode=mode, **layout)
    if mode == "w":
        fill(store, old)
        store.save_header(header_of(old))
    if mode != "r":
        store.write([Write(("n", "b"), (slice(0, 1, 1),), torch.tensor([5]))])
        old[("n", "b")][0] = 5
    pids = []
    for _ in range(3):
        pid = os.fork()
        if not pid:
            try:
                ok = all(same(everything(store), old) for _ in range(20))
                if mode != "r":
                    try:
                        store.write([Write(("n", "b"), (slice(0, 1, 1),), torch.tensor([6]))])
                        ok = False
                    except StoreBusyError:
                        store.close()
                os._exit(0 if ok else 3)
            finally:
                os._exit(4)
        pids.append(pid)
    if mode != "r":
        store.create({("late",): LeafSpec((100_000,), "float64", fill_value=1)})
    assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids] == [0, 0, 0]
    store.close()
    found = load(file, verify="full")
    found.pop(("late",), None)
    assert same(found, old)


def test_lock_dies_with_the_parent_not_the_child(file: FsPath) -> None:
    """A forked child that lives on does not hold the parent's lock."""
    save(file, {X: torch.zeros(3)})
    store = open_h5(file, mode="r+")
    store.read([Read(X)])
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(write)
        os.read(read, 1)
        os._exit(0)
    os.close(read)
    store.close()
    open_h5(file, mode="r+", lock_timeout=0).close()
    os.close(write)
    os.waitpid(pid, 0)


def test_no_descriptor_is_left(file: FsPath) -> None:
    save(file, {X: torch.zeros(30)})
    before = len(os.listdir("/proc/self/fd"))
    for i in range(60):
        store = open_h5(file, mode=("r", "r+", "w")[i % 3])
        if i % 3 < 2:
            store.read([Read(X)])
        if i % 2:
            store.close()
        del store
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_failing_medium_is_told(file: FsPath, monkeypatch: pytest.MonkeyPatch) -> None:
    save(file, {X: torch.zeros(3)})

    def fail(*args: object) -> None:
        raise OSError(5, "Input/output error")

    store = open_h5(file, mode="w")
    fill(store, {X: torch.ones(3)})
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with pytest.raises(StoreIOError, match="Input/output") as caught:
            store.save_header(Header())
    assert caught.value.errno == 5
    store.close()
    assert load(file)[X].tolist() == [0, 0, 0]


def test_a_generation_needs_a_lock_and_a_manifest(file: FsPath) -> None:
    with open_h5(file, mode="w") as store:
        assert store.generation() is None, "nothing is committed"
    with h5py.File(file, "w") as f:
        f["x"] = [0, 1, 2]
    with open_h5(file) as store:
        assert store.generation() is None, "another program counts nothing"
    save(file, {("a",): torch.zeros(3)})
    with open_h5(file, locking=False) as store:
        assert store.generation() is None, "nothing keeps others from writing"


def test_a_file_that_was_replaced_has_another_generation(file: FsPath) -> None:
    save(file, {("a",): torch.zeros(3)})
    with open_h5(file) as reader:
        before = reader.generation()
        save(file, {("a",): torch.zeros(3)})
        assert before not in (reader.generation(), None) and reader.generation() != reader.generation()
        with open_h5(file) as other:
            assert other.generation() not in (before, None)


def test_a_refresh_of_an_unchanged_file_opens_nothing(file: FsPath) -> None:
    tdstore.TensorDict({"a": torch.zeros(3)}, [3]).save(file).close()
    with tdstore.open(file) as td:
        td.refresh_()
        store = td._handle.store
        td.refresh_()
        assert td._handle.store is store
        tdstore.TensorDict({"a": torch.ones(3)}, [3]).save(file).close()
        assert td.refresh_()["a"].sum() == 3
