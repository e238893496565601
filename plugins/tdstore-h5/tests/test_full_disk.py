"""Changes of a file in place on a disk that is full: an error, and the file is as it was."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path as FsPath
from typing import Any

import pytest
import torch
from tdstore_h5.file.journal import Journal
from tdstore_h5.rows import overlay
from tdstore_h5.rows.contiguous import RawFile

import tdstore
from tdstore import TensorDict
from tdstore.errors import StoreIOError
from tdstore.testing.crash import in_child, small_disk

ROWS = 1000
LAYOUTS: dict[str, dict[str, Any]] = {"contiguous": {}, "compressed": {"chunks": 100, "compression": "gzip"}}
BIG = torch.randint(0, 255, (ROWS, 20_000), dtype=torch.uint8)
CHANGES = {
    "new": lambda td: td.set("c", BIG),
    "replaced": lambda td: td.set("b", BIG),
    "many": lambda td: td.update({"a": torch.ones(ROWS, 7), "b": BIG}),
    "append": lambda td: [td.append(td[:500].to_tensordict()) for _ in range(40)],
}


@pytest.fixture
def larger_disk(tmp_path: FsPath) -> Iterator[FsPath]:
    with small_disk(tmp_path / "larger", 24) as folder:
        yield folder


@pytest.fixture
def disk(tmp_path: FsPath) -> Iterator[FsPath]:
    with small_disk(tmp_path / "disk", 6) as folder:
        yield folder


def _content(td: Any) -> dict[Any, Any]:
    return {key: td[key].tolist() for key in sorted(td.keys(True, True), key=str)}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_that_does_not_fit(disk: FsPath, layout: str, change: str) -> None:
    file = disk / "t.h5"
    small = TensorDict(
        {"a": torch.randint(0, 255, (ROWS, 300), dtype=torch.uint8), "b": torch.arange(ROWS), "n": {"x": BIG[:, 0]}},
        batch_size=[ROWS],
    )
    small.save(file, **LAYOUTS[layout]).close()
    td = tdstore.open(file, "r+", **LAYOUTS[layout])
    td.set_at_("b", torch.tensor(-5), 3)
    before = {} if change == "append" else _content(td)
    with pytest.raises(StoreIOError) as caught:
        CHANGES[change](td)
    assert caught.value.errno == 28
    if change == "append":  # those that fitted are there
        before = _content(td)
        assert len(td) % 500 == 0
    assert _content(td) == before
    td.set_at_("b", torch.tensor(-6), 4)
    before["b"][4] = -6
    td.close()
    assert os.listdir(disk) == ["t.h5"]
    with tdstore.open(file, verify="full") as again:
        assert _content(again) == before
    with tdstore.open(file, "r+") as again:
        again["small"] = torch.ones(again.batch_size[0])
        assert again["small"].sum() == len(again)


def _fill(disk: FsPath) -> None:
    """Leave no room at all."""
    with pytest.raises(OSError, match="space"), (disk / "filler").open("wb", buffering=0) as file:
        while file.write(bytes(4096)):
            pass


def _rows(td: Any) -> dict[str, torch.Tensor]:
    return {key: td[key].clone() for key in ("a", "b")}


def _saved(file: FsPath, rows: int, layout: str) -> Any:
    made = TensorDict({"a": torch.randint(0, 255, (rows, 2000), dtype=torch.uint8), "b": torch.arange(rows)}, [rows])
    made.save(file, **LAYOUTS[layout]).close()
    return tdstore.open(file, "r+")


def test_rows_in_place_need_no_room(disk: FsPath) -> None:
    """What they replace, more than a MiB, is remembered in memory where the disk has no room for it."""
    td = _saved(disk / "t.h5", ROWS, "contiguous")
    td.set_at_("b", torch.tensor(-5), 3)  # the journal names the leaves
    td.set_at_("a", torch.zeros(2000, dtype=torch.uint8), 3)
    _fill(disk)
    before = _rows(td)
    td["a"] = torch.full((ROWS, 2000), 7, dtype=torch.uint8)
    assert (td["a"] == 7).all()
    td._handle.store.discard()
    assert td["b"].tolist() == list(range(ROWS))
    assert torch.equal(td["a"][4:], before["a"][4:])
    td.close()


def test_rows_in_holes_that_find_no_room(disk: FsPath) -> None:
    """Rows of several leaves, of which the second has no room any more."""
    file = disk / "t.h5"
    td = TensorDict.from_schema(
        {"b": "int64", "a": ((100_000,), "uint8")}, batch_size=[100], storage="h5", location=str(file)
    )
    td["b"] = torch.arange(100)
    td[:4] = TensorDict({"a": torch.full((4, 100_000), 3, dtype=torch.uint8), "b": -torch.ones(4).long()}, [4])
    _fill(disk)
    before = td.to_dict()
    for rows in (slice(0, 90), slice(2, 99, 3), [90, 3, 7]):
        n = len(range(100)[rows]) if isinstance(rows, slice) else len(rows)
        with pytest.raises(StoreIOError) as caught:
            td[rows] = TensorDict({"a": torch.ones(n, 100_000, dtype=torch.uint8), "b": torch.zeros(n).long()}, [n])
        assert caught.value.errno == 28 and "'a'" in str(caught.value) or "old rows" in str(caught.value)
        assert all(torch.equal(td[key], before[key]) for key in before)
    (disk / "filler").unlink()
    td.close()
    with tdstore.open(file, verify="full") as again:
        assert all(torch.equal(again[key], before[key]) for key in before)


@pytest.mark.parametrize("earlier", [False, True])
def test_compressed_rows_that_find_no_room(larger_disk: FsPath, earlier: bool) -> None:
    """They are taken while there is memory for them, or refused with no row changed; the commit is whole or not."""
    disk = larger_disk
    file = disk / "t.h5"
    td = _saved(file, 8000, "compressed")
    committed = _rows(td)
    if earlier:
        td["b"] = -torch.arange(8000)
    _fill(disk)
    refused = 0
    for k in range(12):
        before = _rows(td)
        value = torch.randint(0, 255, (1000, 2000), dtype=torch.uint8)
        at = slice(k * 900 % 7000, k * 900 % 7000 + 1000)
        try:
            td[at] = TensorDict({"a": value, "b": torch.full((1000,), 1000 + k)}, [1000])
        except StoreIOError as error:
            assert error.errno == 28
            refused += 1
        else:
            before["a"][at], before["b"][at] = value, 1000 + k
        after = _rows(td)
        assert all(torch.equal(after[key], before[key]) for key in before), k
    assert refused
    with pytest.raises(StoreIOError):
        td.commit()
    assert all(torch.equal(td[key], before[key]) for key in before)
    with tdstore.open(file, verify="full", locking=False) as reader:
        assert all(torch.equal(reader[key], committed[key]) for key in before)
    (disk / "filler").unlink()
    td.close()
    with tdstore.open(file, verify="full") as again:
        assert all(torch.equal(again[key], before[key]) for key in before)
    assert os.listdir(disk) == ["t.h5"]


def test_rows_whose_commit_finds_no_room_are_taken_back(disk: FsPath) -> None:
    """`close()` cannot be tried again: it raises, and the file is as of the last commit, not dirty."""
    file = disk / "t.h5"
    rows = 4000
    saved = TensorDict({"a": torch.rand(rows, 8), "s": [f"row {i}" for i in range(rows)]}, [rows])
    saved.save(file).close()
    td = tdstore.open(file, "r+")
    _fill(disk)
    os.truncate(disk / "filler", os.path.getsize(disk / "filler") - (64 << 10))
    half = rows // 2
    td[:half] = TensorDict({"a": torch.rand(half, 8), "s": [f"other row {i}" for i in range(half)]}, [half])
    with pytest.raises(StoreIOError) as caught:
        td.close()
    assert caught.value.errno == 28
    (disk / "filler").unlink()
    assert os.listdir(disk) == ["t.h5"]
    with tdstore.open(file, verify="full") as again:
        assert torch.equal(again["a"], saved["a"])
        assert list(again["s"]) == list(saved["s"])


def _fill(disk: FsPath) -> FsPath:
    """Take all that is left of a disk."""
    info = os.statvfs(disk)
    filler = disk / "filler"
    with filler.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, info.f_bavail * info.f_frsize)
    return filler


def test_a_journal_that_was_not_begun_is_removed(disk: FsPath) -> None:
    file = disk / "t.h5"
    TensorDict({"a": torch.zeros(ROWS)}, [ROWS]).save(file).close()
    with tdstore.open(file, "r+") as td:
        filler = _fill(disk)
        with pytest.raises(StoreIOError, match="No space left"):
            td.set_at_("a", torch.tensor(5.0), 0)
        assert sorted(os.listdir(disk)) == ["filler", "t.h5"]
        filler.unlink()
        td.set_at_("a", torch.tensor(6.0), 0)
    with tdstore.open(file) as td:
        assert td["a"][:2].tolist() == [6, 0]
    assert os.listdir(disk) == ["t.h5"]


def test_a_commit_after_a_refused_one_can_be_finished_by_the_next_opener(
    disk: FsPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The journal of the second commit is a whole one: a writer that dies while it applies it leaves no torn file."""

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def torn(fd: int, start: int, count: int, read: Any) -> None:
        os.pwrite(fd, read(0, count // 2 + 1).data, start)
        os._exit(7)

    file, layout = disk / "t.h5", LAYOUTS["compressed"]
    noise = torch.randint(0, 255, (ROWS, 300), dtype=torch.uint8)
    TensorDict({"a": torch.zeros_like(noise)}, [ROWS]).save(file, **layout).close()

    def work() -> None:
        td = tdstore.open(file, "r+", **layout)
        td.set_("a", noise)
        with monkeypatch.context() as patch, pytest.raises(StoreIOError, match="No space left"):
            patch.setattr(Journal, "done", full)
            td.commit()
        monkeypatch.setattr(overlay, "apply", torn)
        td.commit()

    assert in_child(work) == 7
    with tdstore.open(file) as td:
        assert torch.equal(td["a"], noise)


def test_rows_of_a_file_without_holes_are_read_without_a_search(disk: FsPath, monkeypatch: pytest.MonkeyPatch) -> None:
    """To find that no hole follows, a tmpfs looks at each page: a row would take as long as the leaf."""
    td = TensorDict({"x": torch.rand(ROWS, 300), "b": torch.arange(ROWS)}, [ROWS])
    td.save(disk / "t.h5").close()
    with tdstore.open(disk / "t.h5") as opened:
        monkeypatch.setattr(RawFile, "next_hole", lambda *args: pytest.fail("searched"))
        for index in (7, slice(3, 9), torch.tensor([5, 999, 5])):
            assert (opened[index].to_tensordict() == td[index]).all()
    with tdstore.open(disk / "t.h5", "r+") as opened:
        for index in (7, slice(None, None, 50), torch.tensor([5, 999, 700])):
            td[index] = opened[index] = td[index].apply(lambda x: x + 1)
        assert (opened.to_tensordict() == td).all()


def test_holes_are_searched_once_for_many_rows(disk: FsPath, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows up to the next hole have none, also where they are far from each other."""
    td = TensorDict({"x": torch.rand(ROWS, 300)}, [ROWS])
    with tdstore.from_schema({"x": ((300,), "float32")}, batch_size=[4 * ROWS], location=disk / "t.h5") as opened:
        opened[:ROWS] = td
        opened.commit()
        searched: list[int] = []
        search = RawFile.next_hole

        def counted(self: RawFile, offset: int) -> int:
            searched.append(offset)
            return search(self, offset)

        monkeypatch.setattr(RawFile, "next_hole", counted)
        rows = torch.arange(0, ROWS - 50, 40)
        td[rows] = opened[rows] = td[rows].apply(lambda x: x + 1)
        assert 0 < len(searched) < 5
        late = torch.tensor([3, ROWS + 700, 2 * ROWS, 3 * ROWS + 5])  # in holes, and not
        opened[late] = td[late - late + 3]
        assert (opened[:ROWS].to_tensordict() == td).all() and (opened[late].to_tensordict() == td[3]).all()
        assert (opened[ROWS + 100 : ROWS + 600]["x"] == 0).all()


def test_rows_that_were_never_written_take_no_memory(disk: FsPath) -> None:
    """Each page of a hole that is read through a mapping takes memory on a tmpfs."""
    with tdstore.from_schema({"x": ((4096,), "uint8")}, batch_size=[ROWS], location=disk / "t.h5") as td:
        td[:2] = TensorDict({"x": torch.ones(2, 4096, dtype=torch.uint8)}, [2])
    before = os.stat(disk / "t.h5").st_blocks
    with tdstore.open(disk / "t.h5") as td:
        for index in (600, slice(300, 309), torch.tensor([5, 999, 1])):
            assert td[index]["x"].sum() == (4096 if isinstance(index, torch.Tensor) else 0)
    assert os.stat(disk / "t.h5").st_blocks == before < ROWS * 4096 // 512
