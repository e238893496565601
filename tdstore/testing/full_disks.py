"""`FullDiskTests`: saves, rows and growth that find no room."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path as FsPath
from typing import Any, ClassVar

import pytest
import torch

from tdstore.errors import StoreError, StoreIOError
from tdstore.store import Cap, Store
from tdstore.testing.comparing import check_equal, check_header, check_leaves, failure, raises
from tdstore.testing.processes.deaths import check_in_child, small_disk
from tdstore.testing.setup import (
    Leaves,
    Location,
    StoreSetup,
    fill,
    header_for,
    load,
    local_path,
    read_all,
    same_leaves,
)
from tdstore.testing.setup import save as save_leaves
from tdstore.types import LeafSpec, Write

OLD: Leaves = {
    ("a",): torch.arange(4000.0).view(100, 40),
    ("n", "b"): torch.arange(100),
    ("c",): torch.zeros(100, dtype=torch.bool),
}
NEW: Leaves = {path: ~value if value.dtype == torch.bool else value + 1 for path, value in OLD.items()}


class FullDiskTests(StoreSetup):
    """Tests that what finds no room on a disk is an error that leaves the old store whole."""

    reading: ClassVar[Mapping[str, Any]] = {}
    """Options of the opener to look with after a death: `{"verify": "full"}`."""
    full_disk_layouts: ClassVar[Mapping[str, Mapping[str, Any]]] = {"default": {}}
    """Options of the opener to save with on a full disk, by name."""
    disk_mib: ClassVar[int] = 2
    """Size of the disk that is filled."""

    @pytest.fixture
    def disk(self, tmp_path: FsPath) -> Iterator[FsPath]:
        """Mount a small disk."""
        with small_disk(tmp_path / "disk", self.disk_mib) as folder:
            yield folder

    def strays(self, location: Location) -> list[str]:
        """List files beside the store that should not exist. The default lists the folder of a local one."""
        path = local_path(location)
        assert path is not None, f"{location} is not local: override strays()"
        return sorted(entry.name for entry in path.parent.iterdir() if entry != path)

    def test_full_disk(self, disk: FsPath, location: Location, disk_layout: str) -> None:
        """Check that a save that does not fit is an error that leaves the old store whole, and no remains."""
        path = local_path(location)
        assert path is not None, f"{location} is not local: override test_full_disk"
        place = disk / path.name
        save_leaves(self.made, place, OLD)
        store = self.made(place, "w", **self.full_disk_layouts[disk_layout])
        with raises(StoreIOError, doing="a save that does not fit") as caught:
            _fill_up(store)
        check_equal(caught.value.errno, errno.ENOSPC, "errno of the error on a full disk")
        store.close()
        del store
        check_equal(self.strays(place), [], "files beside the store after a save that did not fit")
        check_leaves(load(self.made, place, **self.reading), OLD, "after a save that did not fit")
        save_leaves(self.made, place, NEW)
        check_leaves(load(self.made, place, **self.reading), NEW, "after a save that fits")

    def test_nearly_full_disk(self, disk: FsPath, location: Location, disk_layout: str) -> None:
        """Check that a save that finds room for a part of it is an error that leaves the old store, for any part."""
        path = local_path(location)
        assert path is not None, f"{location} is not local: override test_nearly_full_disk"
        place, layout = disk / path.name, self.full_disk_layouts[disk_layout]
        save_leaves(self.made, place, OLD, values={"text": "old"}, **layout)

        def work(say: Callable[[str], object]) -> None:
            for pages in PAGES:
                filler = _use_up(disk, pages << 12)
                say(what := f"a save where {pages << 12} bytes of the disk were free")
                done = "which raised nothing"
                try:
                    save_leaves(self.made, place, NEW, values={"text": TEXT}, **layout)
                    want, text = NEW, TEXT
                except StoreError as error:
                    want, text, done = OLD, "old", f"which raised {type(error).__name__}"
                filler.unlink()
                say(what := f"reading after {what}, {done}")
                try:
                    with self.made(place, **self.reading) as store:
                        check_leaves(read_all(store), want, what)
                        check_header(store.load_header(), header_for(want, {"text": text}), f"{what}: the header")
                except StoreError as error:
                    raise failure(f"{what}: {type(error).__name__}: {error}") from error
                if want is NEW:
                    return

        check_in_child(work, "a save on a nearly full disk", "a write through a mapping found no room")

    def test_full_disk_in_place(self, disk: FsPath, location: Location, disk_layout: str) -> None:
        """Check that rows and growth which find no room are errors that leave no half, also of live tensors (VIEW)."""
        path = local_path(location)
        assert path is not None, f"{location} is not local: override test_full_disk_in_place"
        place, big = disk / path.name, torch.randint(0, 255, (600, 1000), dtype=torch.uint8)
        layout = self.full_disk_layouts[disk_layout]
        before = {**OLD, ("big",): torch.zeros_like(big)}
        values = {("a",): NEW[("a",)], ("big",): big, ("n", "b"): NEW["n", "b"]}
        with self.made(place, "w", **layout) as store:
            fill(store, OLD)
            store.create({("big",): LeafSpec(big.shape, big.dtype)})
            store.save_header(header_for(before))

        def work(_: object) -> None:
            store = self.made(place, "r+", **layout)
            now = {**before, ("c",): NEW[("c",)]}
            store.write([Write(("c",), (), now[("c",)])])
            filler = _use_up(disk)
            try:
                store.write([Write(path, (), value) for path, value in values.items()])
                now |= values
            except StoreError as error:
                _check_either(read_all(store), before, now, f"a write of three leaves on a full disk ({error})")
            self._grow_without_room(store, before, now)
            with suppress(StoreError):
                store.close()
            filler.unlink()
            after = load(self.made, place, **self.reading)
            _check_either(after, before, now, "opened again after changes that found no room")
            with self.made(place, "r+") as store:
                store.write([Write(path, (), value) for path, value in values.items()])
                store.save_header(header_for(before))
            check_leaves(load(self.made, place, **self.reading), {**after, **values}, "written when there was room")

        check_in_child(work, "rows and growth on a full disk", "a write through a mapping found no room")

    def _grow_without_room(self, store: Store, before: Leaves, now: Leaves) -> None:
        """Check that growth on a full disk is an error, and that `discard` brings the leaves back."""
        for name, change in GROWTH.items():
            if name == "resize" and Cap.RESIZE not in self.caps:
                continue
            with raises(StoreIOError, doing=f"{name} on a full disk") as caught:
                change(store)
                store.save_header(header_for(before))
            check_equal(caught.value.errno, errno.ENOSPC, f"errno of the error of {name} on a full disk")
            if Cap.DISCARD not in self.caps:
                return
            try:
                store.discard()
            except StoreError as error:
                raise failure(f"discard() after {name} on a full disk, which needs room: {error}") from error
            _check_either(read_all(store), before, now, f"after {name} on a full disk, and discard()")


def _check_either(got: Leaves, before: Leaves, now: Leaves, what: str) -> None:
    """Check that leaves are those of the last commit, or those that the store had before it was refused."""
    if not same_leaves(got, before):
        check_leaves(got, now, what)


def _grow(store: Store) -> None:
    store.resize({("a",): 100_000})
    store.write([Write(("a",), (), torch.ones(100_000, 40))])


def _create(store: Store) -> None:
    fill(store, {("new",): torch.randint(0, 255, (4000, 1000), dtype=torch.uint8)})


def _replace(store: Store) -> None:
    fill(store, {("a",): torch.randint(0, 255, (4000, 1000), dtype=torch.uint8), ("c",): torch.zeros(3)})


GROWTH: Mapping[str, Callable[[Store], object]] = {"resize": _grow, "create": _create, "replace": _replace}
"""Changes of structure that take more room than a small disk has."""


PAGES = (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 15, 18, 22, 28, 36, 50, 80, 140)
"""Room on a nearly full disk, in pages of 4 KiB."""
TEXT = "new" * 7000
"""A value of the header that takes several pages, so that it may be written in part."""


def _use_up(disk: FsPath, room: int = 1 << 14) -> FsPath:
    """Leave no room on a disk but so many bytes, and return the file that has it."""
    filler = disk / "filler"
    with open(filler, "wb", buffering=0) as file, suppress(OSError):
        while file.write(bytes(1 << 14)):
            pass
    with open(filler, "rb+") as file:
        file.truncate(max(0, filler.stat().st_size - room))
    return filler


def _fill_up(store: Store) -> None:
    """Save 40 MB that cannot be compressed."""
    big = torch.randint(0, 255, (4 << 20,), dtype=torch.uint8)
    for i in range(100):
        # Rows of 1,000 bytes: a store that keeps each row by itself would need a minute for rows of one byte.
        store.create({(f"x{i}",): LeafSpec((400, 1000), "uint8")})
        store.write([Write((f"x{i}",), (), big[i * 1000 : i * 1000 + 400_000].view(400, 1000))])
        store.flush()
    store.save_header(header_for({}))
