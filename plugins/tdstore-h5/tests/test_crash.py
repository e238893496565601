"""Killed writers, full disks, flipped bytes, short files: old, new, or an error that says so. Never silently wrong."""

from __future__ import annotations

import os
import resource
from pathlib import Path as FsPath
from typing import Any, ClassVar

import h5py
import pytest
import torch
from h5help import OLD, fill, header_of, load, same, save
from h5py import h5d
from tdstore_h5.file.journal import journal_path
from tdstore_h5.store import H5Store, open_h5

from tdstore.errors import CorruptStoreError, DirtyStoreError, StoreIOError
from tdstore.testing import CrashTests
from tdstore.testing.crash import in_child
from tdstore.types import LeafSpec, Read, Write


class TestCrash(CrashTests):
    durable = {"durable": "commit"}
    open = staticmethod(open_h5)
    caps = H5Store.caps
    layouts = {"contiguous": {}}
    full_disk_layouts = {"default": {}, "chunks": {"chunks": 1000}, "gzip": {"chunks": 1000, "compression": "gzip"}}
    reading = {"verify": "full", "lock_timeout": 0}
    points = [
        (os, "pwrite"), (os, "fsync"), (os, "replace"), (os, "ftruncate"), (os, "unlink"), (os, "fchmod"),
        (h5py.File, "flush"), (h5py.File, "close"),
        (h5py.AttributeManager, "create"), (h5py.AttributeManager, "__delitem__"),
        (h5py.Group, "__delitem__"), (h5py.Group, "create_dataset"), (h5py.Group, "move"),
        (h5py.Dataset, "__setitem__"), (h5py.Dataset, "resize"), (h5d, "create"),
    ]  # fmt: skip
    outcomes = {"rows": {"old", "dirty", "new"}}
    least = 12
    copied = True
    random_kills = 12
    flips = 250

    @pytest.fixture
    def location(self, file: FsPath) -> FsPath:
        return file

    def is_marked(self, location: FsPath) -> bool:
        return os.path.exists(journal_path(str(location)))

    def test_full_disk_in_place(self, disk: FsPath) -> None:
        """In place: an error, and afterwards old, new or dirty, and reading holes of a full tmpfs harms nobody."""
        file = disk / "t.h5"
        with open_h5(file, mode="w") as store:
            store.create({("x",): LeafSpec((400_000,), "float64")})
            store.save_header(header_of({("x",): torch.zeros(1)}))
        with open_h5(file, mode="r+") as store:
            with pytest.raises(StoreIOError) as caught:
                for i in range(0, 400_000, 10_000):
                    store.write([Write(("x",), (slice(i, i + 10_000, 1),), torch.ones(10_000, dtype=torch.float64))])
            assert caught.value.errno == 28
            (value,) = store.read([Read(("x",), (torch.tensor([0, 399_999]),))])
            assert value.tolist() == [1, 0]
            try:
                store.close()
            except StoreIOError:
                with pytest.raises(DirtyStoreError):
                    open_h5(file)
                return
        assert load(file, verify="full")[("x",)][0] == 1


class TestCrashCompressed(TestCrash):
    """Chunks are never written in place: a commit is whole or not there."""

    layouts = {"compressed": {"chunks": 8, "compression": "gzip"}}
    full_disk_layouts: ClassVar[dict[str, Any]] = {}
    outcomes = {}


# -- damage --------------------------------------------------------------------------------
@pytest.mark.parametrize("layout", [{}, {"chunks": 8, "compression": "gzip"}])
def test_short_files(file: FsPath, layout: dict[str, Any]) -> None:
    save(file, OLD, **layout)
    good = file.read_bytes()
    for size in [0, 1, 7, 8, 100, *range(0, len(good), len(good) // 40)]:
        file.write_bytes(good[:size])
        with pytest.raises(CorruptStoreError) as caught:
            load(file)
        assert str(file) in str(caught.value)
        assert file.stat().st_size == size


def test_faults_name_the_leaf(file: FsPath) -> None:
    save(file, OLD)
    with open_h5(file) as store:
        offset = store._session.contents.leaves[("n", "b")].offset
    assert offset
    with open(file, "r+b") as f:
        f.seek(offset + 5)
        f.write(b"\x55")
    with open_h5(file) as store:
        assert [fault.path for fault in store.verify()] == [("n", "b")]
        assert store.verify([("a",)]) == []
    with pytest.raises(CorruptStoreError, match="'n' / 'b'"):
        open_h5(file, verify="full")


def test_save_beyond_a_file_size_limit(file: FsPath) -> None:
    save(file, OLD)

    def work() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        store = open_h5(file, mode="w")
        with pytest.raises(StoreIOError):
            fill(store, {("x",): torch.ones(100_000)})
            store.save_header(header_of({}))
        store.close()

    assert in_child(work) == 0
    assert same(load(file, verify="full"), OLD)
    assert os.listdir(file.parent) == [file.name]
