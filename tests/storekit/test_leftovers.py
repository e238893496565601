"""What killed processes left in a folder is removed by later saves there, which take no longer as it fills."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import tdstore
from tdstore import TensorDict, errors
from tdstore.storekit import files

SUFFIXES = {
    "": (".x.tdstore-{:016x}", True),
    ".tdz": (".tdstore-tdz-{:016x}", False),
    ".zarr": (".x.zarr.tdstore-{:016x}", True),
}
SUFFIXES[".h5"] = (".y.h5.tdstore-{:012x}", False)  # of another dataset


def save(place: Path, value: int = 1, **options: object) -> None:
    TensorDict({"a": torch.full((3,), value)}, [3]).save(place, **options).close()


class Killed(BaseException):
    """The end of a process between two renames."""


def interrupt(rename: Callable[..., None], old: str, new: str, **folders: int) -> None:
    rename(old, new, **folders)
    if new.endswith("-old"):
        raise Killed


def fill(folder: Path, many: int) -> None:
    for i in range(many):
        (folder / f"other{i}").touch()


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_saves_look_at_few_entries_of_a_full_folder(tmp_path, suffix, monkeypatch):
    fill(tmp_path, 640)
    looked, listdir, scandir = [0], os.listdir, os.scandir

    def listing(place: int | str) -> list[str]:
        names = listdir(place)
        looked[0] += sum(name.startswith("other") for name in names)
        return names

    def scanning(place: int | str) -> Iterator[os.DirEntry[str]]:
        looked[0] += sum(name.startswith("other") for name in listdir(place))
        return scandir(place)

    monkeypatch.setattr(os, "listdir", listing)
    monkeypatch.setattr(os, "scandir", scanning)
    for i in range(22):
        save(tmp_path / f"x{i}{suffix}")
    assert looked[0] <= 3 * 640, "the first save, and two after ten more each"


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("many", [0, 640])
def test_what_was_left_goes(tmp_path, suffix, many):
    fill(tmp_path, many)
    save(tmp_path / f"first{suffix}")
    name, is_folder = SUFFIXES[suffix]
    left = tmp_path / name.format(7)
    left.mkdir() if is_folder else left.touch()
    for i in range(1 + many // 60):
        save(tmp_path / f"x{i}{suffix}")
    assert not left.exists()


@pytest.mark.parametrize("suffix", ["", ".zarr"])
@pytest.mark.parametrize("many", [0, 640])
def test_a_swap_that_was_interrupted_is_undone_by_the_next_save_there(tmp_path, suffix, many, monkeypatch):
    place = tmp_path / f"x{suffix}"
    fill(tmp_path, many)
    save(place, 1)

    rename = os.rename
    with monkeypatch.context() as patched:
        patched.setattr(files, "_renameat2", None)
        patched.setattr(files.os, "rename", lambda old, new, **folders: interrupt(rename, old, new, **folders))
        with pytest.raises(Killed):
            save(place, 2)
    assert not place.exists()
    with pytest.raises(errors.StoreExistsError):
        save(place, 3, mode="x")
    with tdstore.open(place) as found:
        assert found["a"].tolist() == [1, 1, 1]
    assert not [name for name in os.listdir(tmp_path) if re.search(r"\.tdstore-.*-old", name)]


def test_a_swap_whose_remains_are_there_is_no_hindrance(tmp_path, monkeypatch):
    place = tmp_path / "x"
    monkeypatch.setattr(files, "_renameat2", None)
    save(place, 1)
    (tmp_path / f".x.tdstore-{7:016x}-old").mkdir()
    save(place, 2)
    with tdstore.open(place) as found:
        assert found["a"].tolist() == [2, 2, 2]
    assert os.listdir(tmp_path) == ["x"]


def test_targets_whose_long_names_begin_alike_are_not_taken_for_each_other(tmp_path, monkeypatch):
    """A temporary name has no room for all of a long name, and says by a checksum which one it is of."""
    first, second = tmp_path / ("x" * 220 + "1"), tmp_path / ("x" * 220 + "2")
    save(first, 1)
    rename = os.rename
    with monkeypatch.context() as patched:
        patched.setattr(files, "_renameat2", None)
        patched.setattr(files.os, "rename", lambda old, new, **folders: interrupt(rename, old, new, **folders))
        with pytest.raises(Killed):
            save(first, 2)
    assert not first.exists()
    save(second, 3, mode="x")
    with tdstore.open(second) as found:
        assert found["a"].tolist() == [3, 3, 3]
    with pytest.raises(errors.StoreExistsError):
        save(first, 4, mode="x")
    with tdstore.open(first) as found:
        assert found["a"].tolist() == [1, 1, 1]


def test_a_file_of_another_program_is_no_old_folder(tmp_path):
    other = tmp_path / f".y.tdstore-{7:016x}-old"
    other.write_text("mine")
    save(tmp_path / "x")
    assert sorted(os.listdir(tmp_path)) == [other.name, "x"]
