"""Ctrl-C within a change, in a program that goes on: it is done or not done, in memory and in the store."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import tdstore
from tdstore import TensorDict
from tdstore.errors import DirtyStoreError, StoreNotFoundError
from tests import interrupts

COMMITS = {"_catch_up", "_commit", "_commit_root", "_follow", "_put_root", "_record", "_save", "_settle", "_settle_log"}
COMMITS |= {"append_step", "apply", "commit", "put_attribute", "put_root"}


@pytest.fixture(autouse=True)
def _interrupts() -> Iterator[None]:
    with interrupts.python_handler():
        yield


def remade(kind: str, folder: Path, **options: Any) -> Callable[[], str]:
    """Return what makes the dataset anew; "objects" are an object layout."""
    before, place = folder / f"before.{kind}", folder / f"now.{kind}"
    url = "file://" if kind == "objects" else ""
    interrupts.dataset().save(f"{url}{before}", **options).close()

    def make() -> str:
        if place.is_dir():
            shutil.rmtree(place)
        (shutil.copytree if before.is_dir() else shutil.copy)(before, place)
        return f"{url}{place}"

    return make


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("memmap", interrupts.add),
        ("memmap", interrupts.append),
        ("memmap", interrupts.rename),
        ("memmap", interrupts.replace),
        ("h5", interrupts.append),
        ("h5", interrupts.replace),
        ("zarr", interrupts.append),
        ("zarr", interrupts.replace),
    ],
)
def test_an_interrupted_change_happened_or_did_not(kind: str, change: Callable[[Any], None], tmp_path: Path) -> None:
    assert interrupts.sweep(remade(kind, tmp_path), change, COMMITS) > 20


ROWS = COMMITS | {
    "_assign",
    "_make_room",
    "_run",
    "_set_rows",
    "_take_back",
    "begin",
    "finish",
    "put",
    "run",
    "take_back",
}


@pytest.mark.parametrize("kind", ["memmap", "h5", "zarr", "objects"])
@pytest.mark.parametrize("change", [interrupts.write_rows, interrupts.write_new_rows])
def test_an_interrupted_write_of_rows_happened_or_did_not(
    kind: str, change: Callable[[Any], None], tmp_path: Path
) -> None:
    """Rows that are written must keep the entry that was made for them, and others must not get it."""
    assert interrupts.sweep(remade(kind, tmp_path), change, ROWS) > 5


@pytest.mark.parametrize("change", [interrupts.add, interrupts.append, interrupts.write_new_rows])
def test_an_interrupted_change_of_shared_memory_happened_or_did_not(change: Callable[[Any], None]) -> None:
    """A store that does not know its own commit would take it for one of another writer."""

    def make() -> str:
        interrupts.dataset().save("shm://interrupts", mode="w").close()
        return "shm://interrupts"

    assert interrupts.sweep(make, change, ROWS | {"_publish"}) > 20


def test_an_interrupted_version_is_made_or_not(tmp_path: Path) -> None:
    interrupts.sweep_version(remade("objects", tmp_path), OBJECTS)


def test_an_interrupted_copy_is_finished_by_the_next(tmp_path: Path) -> None:
    place, within = tmp_path / "copy.h5", {"_checkpoints", "_open", "_stream", "commit", "run", "save", "stream"}
    interrupts.dataset().save(tmp_path / "source").close()
    copy = partial(tdstore.copy, tmp_path / "source", place, block_bytes=16, checkpoint=0)
    places = interrupts.interrupted(copy, sys.maxsize, within)
    assert places > 10
    for number in range(1, places + 1, -(-places // 8)):
        place.unlink(missing_ok=True)
        assert interrupts.interrupted(copy, number, within) == number
        try:
            with tdstore.open(place) as found:
                interrupts.shown(found)
        except (DirtyStoreError, StoreNotFoundError):
            copy()
        with tdstore.open(place, verify="full") as found:
            assert interrupts.shown(found) == interrupts.shown(interrupts.dataset()), number


def test_an_interrupted_make_memmap_happened_or_did_not(tmp_path: Path) -> None:
    """An entry that the TensorDict does not know of would keep its length, and the dataset could not be opened."""
    within = {"_add_leaf", "_commit", "_record", "_save", "_show_leaf", "create", "create_empty", "make"}
    assert interrupts.sweep(remade("memmap", tmp_path), interrupts.make, within) > 20


def test_an_interrupted_save_leaves_a_dataset_and_no_folder(tmp_path: Path) -> None:
    """A folder that is locked until the process ends is not removed by the next save."""
    place, within = tmp_path / "now.memmap", {"_make_temp", "_start", "build_site", "open_memmap"}

    def save(value: float) -> None:
        TensorDict({"a": torch.full((3,), value)}, [3]).save(place, mode="w").close()

    save(0.0)
    places = interrupts.interrupted(partial(save, 1.0), sys.maxsize, within)
    assert places > 10
    for number in range(1, places + 1):
        assert interrupts.interrupted(partial(save, 2.0), number, within) == number
        with tdstore.open(place) as td:
            assert td["a"].tolist() in ([1.0] * 3, [2.0] * 3), number
        save(1.0)
        assert [path.name for path in tmp_path.iterdir()] == [place.name], number


OBJECTS = {"_adopt", "_attempt", "_commit", "_confirm", "_look_for", "_put", "compacted", "publish", "put"}


@pytest.mark.parametrize("change", [interrupts.add, interrupts.append, interrupts.delete, interrupts.shrink])
def test_an_interrupted_change_of_objects_happened_or_did_not(change: Callable[[Any], None], tmp_path: Path) -> None:
    """An object that a manifest names must not count as one that was never committed: closing removes these."""
    assert interrupts.sweep(remade("objects", tmp_path), change, OBJECTS) > 20


ARCHIVES = {
    "_adopt",
    "_delete",
    "_make",
    "_place_locked",
    "_publish",
    "_rename",
    "_settle",
    "_swap_in",
    "drop_unfinished",
}


@pytest.mark.parametrize("change", [interrupts.add, interrupts.delete, interrupts.rename, interrupts.replace])
def test_an_interrupted_change_of_an_archive_happened_or_did_not(change: Callable[[Any], None], tmp_path: Path) -> None:
    """The archive that was swapped in must be the one that the program goes on with."""
    assert interrupts.sweep(remade("tdz", tmp_path), change, ARCHIVES) > 20
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_interrupted_writes_of_several_entries_happened_or_did_not(tmp_path: Path) -> None:
    """Rows that come back must not have the checksums of those that were to replace them."""
    assert interrupts.sweep(remade("h5", tmp_path), interrupts.update, {"_put", "know", "write_rows"}) > 20


def test_an_interrupted_write_of_compressed_chunks_happened_or_did_not(tmp_path: Path) -> None:
    """The file is opened anew for the first one; a session without it would take it for replaced."""
    make = remade("h5", tmp_path, chunks=2, compression="gzip")
    within = {"become_alone", "close_file", "lock", "open_overlaid", "overlaid"}
    assert interrupts.sweep(make, interrupts.fill, within) > 10


def test_an_interrupted_rename_and_reordering_keep_all_entries() -> None:
    def change(td: TensorDict) -> None:
        td.rename_key_("a", "z")
        td.select("c", "z", "b", inplace=True)

    def entries() -> TensorDict:
        return TensorDict({"a": torch.tensor(0), "b": torch.tensor(1), "c": torch.tensor(2)})

    places = interrupts.interrupted(partial(change, entries()), sys.maxsize, {"_rename", "_reorder"})
    assert places > 4
    for number in range(1, places + 1):
        td = entries()
        assert interrupts.interrupted(partial(change, td), number, {"_rename", "_reorder"}) == number
        assert sorted(value.item() for value in td.values()) == [0, 1, 2], number


def test_an_interrupted_write_of_chunks_happened_or_did_not(tmp_path: Path) -> None:
    within = {"end", "write"}
    assert interrupts.sweep(remade("zarr", tmp_path), interrupts.fill, within) > 20


ENDS = {"_close", "_close_store", "_seal", "close", "commit_rows", "end", "end_writer", "leave", "release", "unmark"}


@pytest.mark.parametrize("kind", ["memmap", "h5", "zarr", "tdz"])
def test_an_interrupted_close_keeps_nothing_locked(kind: str, tmp_path: Path) -> None:
    """A store that counts as closed, and holds its file, would keep this program from opening it again."""
    make = remade(kind, tmp_path)

    def written(place: str) -> Any:
        td = tdstore.open(place, "r+")
        td.set_at_("a", torch.full((3,), 9.0), 1)
        return td

    places = interrupts.interrupted(written(make()).close, sys.maxsize, ENDS)
    assert places > 5
    for number in range(1, places + 1, -(-places // 40)):
        place = make()
        td = written(place)
        assert interrupts.interrupted(td.close, number, ENDS) == number
        td.close()  # again: it may have been interrupted before it began
        with tdstore.open(place, "r+") as found:
            assert found["a"][1].tolist() == [9, 9, 9], number
        assert tdstore.verify(place) == []
