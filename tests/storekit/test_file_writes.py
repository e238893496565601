"""Writes of memory to a file: all of it arrives, however little each call of the system takes. And open folders."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from tdstore.storekit import files

ARRAYS = [
    np.arange(12.0).reshape(3, 4),
    np.arange(20, dtype=np.uint8),
    np.arange(10, dtype=np.uint8).reshape(2, 5),
    np.array(3.5),
    np.ones((2, 2), np.complex64),
    np.array([True, False]),
    np.zeros((0, 3)),
]


@pytest.mark.parametrize("array", ARRAYS, ids=lambda array: f"{array.dtype}-{array.shape}")
@pytest.mark.parametrize("most", [1, 3, 1 << 20])
def test_short_writes_are_finished(
    array: np.ndarray, most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: whole(fd, memoryview(data).tobytes()[:most], at))
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    try:
        files.write_at(fd, array.data, 5)
    finally:
        os.close(fd)
    assert (tmp_path / "file").read_bytes()[5:] == array.tobytes()


def test_a_failure_in_the_middle_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = os.pwrite

    def fills_up(fd: int, data: memoryview, at: int) -> int:
        if at:
            raise OSError(28, "No space left on device")
        return whole(fd, memoryview(data).tobytes()[:7], at)

    monkeypatch.setattr(os, "pwrite", fills_up)
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    try:
        with pytest.raises(OSError, match="No space left"):
            files.write_at(fd, np.arange(12.0).reshape(3, 4).data, 0)
    finally:
        os.close(fd)


def test_a_new_file_that_did_not_fit_can_be_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def is_full(fd: int, data: memoryview, at: int) -> int:
        raise OSError(28, "No space left on device")

    root = files.open_dir(str(tmp_path))
    try:
        with monkeypatch.context() as full, pytest.raises(OSError, match="No space left"):
            full.setattr(os, "pwrite", is_full)
            files.create_file("meta.json", root, b"{}")
        assert os.listdir(tmp_path) == []
        files.create_file("meta.json", root, b"{}")
        with pytest.raises(FileExistsError):
            files.create_file("meta.json", root, b"[]")
        assert (tmp_path / "meta.json").read_bytes() == b"{}"
    finally:
        os.close(root)


@pytest.mark.parametrize("keep", [1, 2, 16])
def test_a_tree_of_many_folders_needs_few_descriptors(tmp_path: Path, keep: int) -> None:
    root, before = files.open_dir(str(tmp_path)), len(os.listdir("/proc/self/fd"))
    with files.Tree(root, keep) as tree:
        for number in range(200):
            parent = tree.folder(("a", str(number % 100), "c", "d"), create=True)
            files.rename(*_new_file(tree, number), str(number), parent)  # a folder is valid until the next but one
            assert len(os.listdir("/proc/self/fd")) - before <= keep + 4
        assert len(tree.descriptors()) == len(os.listdir("/proc/self/fd")) - before
    assert len(os.listdir("/proc/self/fd")) == before
    assert sorted(int(p.name) for p in tmp_path.glob("a/*/c/d/*")) == list(range(200))
    os.close(root)


def _new_file(tree: files.Tree, number: int) -> tuple[str, int]:
    folder = tree.folder(("b", str(number)), create=True)
    files.create_file("new", folder, b"")
    return "new", folder


def test_a_tree_opens_a_folder_beside_the_last_one_by_one_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(50):
        (tmp_path / "a" / "b" / "c" / "d" / "e" / "f" / str(number)).mkdir(parents=True)
    opened: list[str] = []
    whole = os.open
    root = files.open_dir(str(tmp_path))
    with files.Tree(root) as tree:
        tree.folder(("a", "b", "c", "d", "e", "f", "0"))
        monkeypatch.setattr(os, "open", lambda name, *args, **kw: (opened.append(name), whole(name, *args, **kw))[1])
        for number in range(1, 50):
            tree.folder(("a", "b", "c", "d", "e", "f", str(number)))
        monkeypatch.undo()
    os.close(root)
    assert opened == list(map(str, range(1, 50)))


def test_a_tree_follows_no_link_and_makes_no_folder_unasked(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "link").symlink_to("a")
    (tmp_path / "file").touch()
    root = files.open_dir(str(tmp_path))
    with files.Tree(root) as tree:
        for create in (False, True):
            for name in ("link", "file"):
                with pytest.raises(NotADirectoryError):
                    tree.folder((name,), create=create)
        with pytest.raises(FileNotFoundError):
            tree.folder(("a", "b"))
        assert not tree.descriptors()[1:]
        assert os.path.samestat(os.fstat(tree.folder(())), os.fstat(root))
    os.close(root)
