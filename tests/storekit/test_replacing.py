"""A small file is replaced whole, whatever has its name, and nothing is left beside it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tdstore.storekit import files


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[int]:
    fd = files.open_dir(str(tmp_path))
    yield fd
    os.close(fd)


@pytest.mark.parametrize("sync", [False, True])
def test_a_file_is_new_or_takes_the_place_of_another(tmp_path: Path, folder: int, sync: bool) -> None:
    for data in (b"first", b"second"):
        files.replace_file("a", folder, data, sync=sync)
        assert (tmp_path / "a").read_bytes() == data
        assert os.listdir(tmp_path) == ["a"]


def test_without_a_sync_no_rename_over_a_file_waits_for_the_disk(
    tmp_path: Path, folder: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    files.replace_file("a", folder, b"first")
    monkeypatch.setattr(os, "rename", None)
    files.replace_file("a", folder, b"second")
    assert (tmp_path / "a").read_bytes() == b"second"


def test_where_the_system_cannot_exchange(tmp_path: Path, folder: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_renameat2", None)
    for data in (b"first", b"second"):
        files.replace_file("a", folder, data)
    assert (tmp_path / "a").read_bytes() == b"second"
    assert os.listdir(tmp_path) == ["a"]


def test_a_folder_of_that_name_stays(tmp_path: Path, folder: int) -> None:
    (tmp_path / "a").mkdir()
    with pytest.raises(IsADirectoryError):
        files.replace_file("a", folder, b"first")
    assert (tmp_path / "a").is_dir()
    assert os.listdir(tmp_path) == ["a"]


def test_a_link_of_that_name_is_replaced_and_not_followed(tmp_path: Path, folder: int) -> None:
    (tmp_path / "target").write_bytes(b"old")
    (tmp_path / "a").symlink_to("target")
    files.replace_file("a", folder, b"new")
    assert not (tmp_path / "a").is_symlink()
    assert (tmp_path / "target").read_bytes() == b"old"
