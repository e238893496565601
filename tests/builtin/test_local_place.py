"""Locations of local files: one absolute name, whatever links lead there."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from tdstore import TensorDict
from tdstore.builtin.localplace import local_place


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "file").write_bytes(b"x")
    (tmp_path / "was (deleted)").mkdir()
    (tmp_path / "link").symlink_to("a/b")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "nowhere").symlink_to("missing/x")
    return tmp_path


@pytest.mark.parametrize(
    "name",
    ["a/b", "a/b/", "./a/../a/b", "a/file", "link", "link/", "link/new", "nowhere", "loop", "new/x", ".", "/",
     "was (deleted)"],
)  # fmt: skip
def test_a_place_is_named_as_realpath_names_it(folder: Path, name: str) -> None:
    assert local_place(name, "memmap", "folder") == os.path.realpath(name)
    full = os.path.join(folder, name)
    assert local_place(f"memmap://{full}", "memmap", "folder") == os.path.realpath(full)


def test_a_pipe_is_named_without_waiting_for_its_writer(folder: Path) -> None:
    os.mkfifo("pipe")
    assert local_place("pipe", "tdz", "file") == str(folder.resolve() / "pipe")


def test_what_cannot_be_opened_by_name_is_named_all_the_same(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_proc(name: str) -> str:
        raise FileNotFoundError(2, "no /proc", name)

    expected = os.path.realpath("link")
    monkeypatch.setattr(os, "readlink", no_proc)
    monkeypatch.setattr(os.path, "realpath", lambda text: expected)
    before = os.listdir("/proc/self/fd")
    assert local_place("link", "memmap", "folder") == expected
    assert len(os.listdir("/proc/self/fd")) == len(before)


def test_a_folder_that_is_replaced_meanwhile_keeps_its_name(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A save swaps its folder in, and gives a temporary name to the one that a reader has just found."""
    readlink = os.readlink

    def swapping(name: str) -> str:
        if name.startswith("/proc/self/fd/") and not os.path.exists("a/.b.tdstore-old"):
            os.rename("a/b", "a/.b.tdstore-old")
            os.mkdir("a/b")
        return readlink(name)

    monkeypatch.setattr(os, "readlink", swapping)
    assert local_place("a/b", "memmap", "folder") == str(folder.resolve() / "a" / "b")
    assert os.path.exists("a/.b.tdstore-old")


@pytest.mark.parametrize("name", ["link/new", "nowhere", "a/../link/new", "new/x", "link"])
def test_a_new_dataset_is_made_where_its_links_lead(folder: Path, name: str) -> None:
    place = os.path.realpath(name)
    with TensorDict({"x": torch.ones(3)}, [3]).save(name, storage="memmap") as td:
        assert td._binding[0].store.leaf_file(("x",)) == os.path.join(place, "x.memmap")
    assert not os.path.islink(place) and TensorDict.load(name)["x"].sum() == 3


def test_a_dataset_that_was_saved_holds_one_descriptor(folder: Path) -> None:
    def held() -> int:
        return sum(os.path.isdir(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd"))

    before = held()
    with TensorDict({"x": torch.ones(3)}, [3]).save("a/new", storage="memmap"):
        assert held() == before + 1
    assert held() == before
