"""Datasets found, described, deleted and moved by their locations: what is not a dataset is never touched."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tdstore
from tdstore import Backend, Cap, PersistentTensorDict, TensorDict
from tdstore.container.persistence import moving
from tdstore.container.storage.copy_dataset import copy_dataset
from tdstore.errors import (
    BrokenPluginError,
    ConflictError,
    CorruptStoreError,
    InvalidArgumentError,
    InvalidTypeError,
    OptionError,
    PluginError,
    StoreBusyError,
    StoreExistsError,
    StoreIOError,
    StoreNotFoundError,
    TDStoreError,
    UnsupportedError,
)
from tdstore.testing.processes import warm

NAMES = ["run", "run.h5", "run.zarr", "run.zarr.zip", "run.tdz"]
FOLDERS = ["run", "run.zarr"]


def data() -> TensorDict:
    return TensorDict(
        {"a": torch.arange(12).reshape(4, 3), "n": {"b": torch.ones(4)}, "text": ["x", "y", "z", "w"]}, [4]
    )


def save(place: Path) -> None:
    data().save(place).close()


def check_whole(place: Path) -> None:
    with tdstore.open(place) as stored:
        assert (stored == data()).all()


def tree(folder: Path) -> dict[str, bytes | None]:
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None for p in folder.rglob("*")}


@pytest.fixture(params=NAMES)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    found: Path = tmp_path / request.param
    save(found)
    return found


# -- describing ---------------------------------------------------------------------------------
def test_info_says_what_a_dataset_holds(place: Path) -> None:
    found = tdstore.info(place)
    names = {"run": "memmap", "run.h5": "h5", "run.tdz": "tdz"}
    assert (found.backend, found.kind, found.batch_size) == (names.get(place.name, "zarr"), "TensorDict", (4,))
    assert found.leaves["a",].shape == (4, 3)
    assert found.leaves["a",].dtype == torch.int64
    assert found.nbytes >= 4 * 3 * 8 + 4 * 4
    assert Cap.PERSISTENT in found.caps
    assert str(found).startswith(f"{place}: TensorDict of batch size [4]")
    assert "'a'  int64 [4, 3]" in str(found)


def test_info_refuses_what_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(StoreNotFoundError, match="nothing"):
        tdstore.info(tmp_path / "nothing")


def test_exists_where_a_writer_ended(tmp_path: Path) -> None:
    save(tmp_path / "run")
    code = f"import os, tdstore; t = tdstore.open({str(tmp_path / 'run')!r}, mode='r+'); t['a'].fill_(7); os._exit(0)"
    subprocess.run([*warm.python(), "-W", "ignore", "-c", code], check=True)
    with pytest.raises(TDStoreError):
        tdstore.open(tmp_path / "run")
    assert tdstore.exists(tmp_path / "run")
    tdstore.delete(tmp_path / "run")  # damaged, and ours
    assert not tdstore.exists(tmp_path / "run")


@pytest.mark.parametrize("function", [tdstore.exists, tdstore.info, tdstore.delete, tdstore.list_datasets])
@pytest.mark.parametrize("location", [3, b"run"])
def test_locations_are_text_or_paths(function: Callable[[object], object], location: object) -> None:
    with pytest.raises(InvalidTypeError, match=type(location).__name__):
        function(location)


# -- listing ------------------------------------------------------------------------------------
def test_list_finds_all_backends_and_nothing_else(tmp_path: Path) -> None:
    for name in NAMES:
        save(tmp_path / "deep" / name)
    save(tmp_path / ".hidden")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("mine")
    (tmp_path / "false.h5").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "deep" / "run")
    (tmp_path / "up").symlink_to(tmp_path)
    found = [str(tmp_path / "deep" / name) for name in NAMES]
    assert tdstore.list_datasets(tmp_path) == sorted([*found, str(tmp_path / "link")])
    assert tdstore.list_datasets(tmp_path, storage="h5") == [str(tmp_path / "deep" / "run.h5")]
    assert tdstore.list_datasets(tmp_path / "deep" / "run") == [str(tmp_path / "deep" / "run")]
    with pytest.raises(StoreNotFoundError, match="no folder"):
        tdstore.list_datasets(tmp_path / "nothing")


# -- deleting -----------------------------------------------------------------------------------
def foreign_folder(folder: Path) -> Path:
    (folder / "mine").mkdir()
    (folder / "mine" / "notes.txt").write_text("mine")
    return folder / "mine"


def empty_folder(folder: Path) -> Path:
    (folder / "mine").mkdir()
    return folder / "mine"


def false_suffix(folder: Path) -> Path:
    (folder / "mine.h5").write_text("mine")
    return folder / "mine.h5"


def foreign_hdf5(folder: Path) -> Path:
    h5py = pytest.importorskip("h5py")
    with h5py.File(folder / "mine.h5", "w") as file:
        file["x"] = [1, 2]
    return folder / "mine.h5"


def foreign_zarr(folder: Path) -> Path:
    zarr = pytest.importorskip("zarr")
    zarr.open_group(str(folder / "mine.zarr"), mode="w").create_array("x", shape=(3,), dtype="i4")
    return folder / "mine.zarr"


def foreign_metadata(folder: Path) -> Path:
    (folder / "mine").mkdir()
    (folder / "mine" / "meta.json").write_text('{"name": "a project"}')
    return folder / "mine"


def one_leaf(folder: Path) -> Path:
    save(folder / "run")
    return folder / "run" / "a.memmap"


def group(folder: Path) -> Path:
    save(folder / "run")
    return folder / "run" / "n"


def zarr_group(folder: Path) -> Path:
    save(folder / "run.zarr")
    return folder / "run.zarr" / "n"


@pytest.mark.parametrize("verb", ["delete", "move"])
@pytest.mark.parametrize(
    "make",
    [
        foreign_folder,
        empty_folder,
        false_suffix,
        foreign_hdf5,
        foreign_zarr,
        foreign_metadata,
        one_leaf,
        group,
        zarr_group,
    ],
)
def test_what_is_not_a_dataset_stays(make: Callable[[Path], Path], verb: str, tmp_path: Path) -> None:
    place = make(tmp_path)
    before = tree(tmp_path)
    with pytest.raises((StoreExistsError, StoreNotFoundError, UnsupportedError, CorruptStoreError), match=place.name):
        tdstore.delete(place) if verb == "delete" else tdstore.move(place, tmp_path / "new")
    assert tree(tmp_path) == before


@pytest.mark.parametrize(("verb", "new"), [("delete", ""), ("move", "new"), ("move", "new.zarr"), ("move", "new.h5")])
@pytest.mark.parametrize("name", FOLDERS)
def test_files_of_others_in_the_folder_stay(name: str, verb: str, new: str, tmp_path: Path) -> None:
    place = tmp_path / name
    save(place)
    (place / "notes.txt").write_text("mine")
    before = tree(tmp_path)
    with pytest.raises(StoreExistsError, match=r"notes\.txt"):
        tdstore.delete(place) if verb == "delete" else tdstore.move(place, tmp_path / new)
    assert tree(tmp_path) == before
    check_whole(place)


HOLD = """
import sys, torch, tdstore
stored = tdstore.open(sys.argv[1], mode="r+")
stored.set_at_("a", torch.full((3,), 9), 0)
print("ready", flush=True)
sys.stdin.read()
stored.close()
"""


@pytest.mark.parametrize("name", ["run", "run.h5", "run.zarr"])
def test_a_place_that_another_process_writes_stays(name: str, tmp_path: Path) -> None:
    place = tmp_path / name
    save(place)
    with subprocess.Popen(
        [*warm.python(), "-W", "ignore", "-c", HOLD, str(place)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        with pytest.raises(StoreBusyError, match=name):
            tdstore.delete(place)
        with pytest.raises(StoreBusyError, match=name):
            tdstore.move(place, tmp_path / f"new{place.suffix}")
        assert tdstore.exists(place)
        child.communicate("")
    with tdstore.open(place) as stored:
        assert stored["a"][0].tolist() == [9, 9, 9]  # the row of the other process
    tdstore.delete(place)
    assert list(tmp_path.iterdir()) == []


def test_a_reader_goes_on(tmp_path: Path) -> None:
    save(tmp_path / "run")
    with tdstore.open(tmp_path / "run") as reader:
        tdstore.delete(tmp_path / "run")
        assert (reader == data()).all()


def test_a_link_is_not_deleted(tmp_path: Path) -> None:
    save(tmp_path / "run")
    (tmp_path / "link").symlink_to(tmp_path / "run")
    with pytest.raises(UnsupportedError, match="link"):
        tdstore.delete(tmp_path / "link")
    check_whole(tmp_path / "link")


def test_an_unknown_option_deletes_nothing(place: Path) -> None:
    with pytest.raises(OptionError, match="nonsense"):
        tdstore.delete(place, nonsense=1)
    check_whole(place)


@pytest.mark.parametrize("name", FOLDERS)
def test_a_killed_delete_leaves_all_or_nothing(name: str, tmp_path: Path) -> None:
    """The process ends before its n-th call that removes or renames."""
    place, outcomes = tmp_path / name, set()
    for calls in range(60):
        if not place.exists():
            save(place)
        child = os.fork()
        if not child:
            killed_delete(place, calls)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if tdstore.exists(place):
            check_whole(place)
        else:
            assert not place.exists(), f"killed at call {calls}: a part is left under its name"
        outcomes.add((status, place.exists()))
        if status == 0:
            break
    assert outcomes == {(9, True), (9, False), (0, False)}
    save(place)  # the next save beside them removes what was left
    assert list(tmp_path.iterdir()) == [place]


def killed_delete(place: Path, calls: int) -> None:
    """Delete in this process, which ends before so many calls of the system."""
    left = calls

    def counted(real: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object, **options: object) -> object:
            nonlocal left
            if not left:
                os._exit(9)
            left -= 1
            return real(*args, **options)

        return call

    for name in ("unlink", "rmdir", "rename", "remove"):
        setattr(os, name, counted(getattr(os, name)))
    try:
        tdstore.delete(place)
    except BaseException:
        os._exit(1)
    os._exit(0)


# -- moving -------------------------------------------------------------------------------------
def test_move_within_one_backend_is_a_rename(place: Path, tmp_path: Path) -> None:
    inode = place.stat().st_ino
    target = tmp_path / "below" / f"new{''.join(place.suffixes)}"
    tdstore.move(place, target)
    assert not place.exists()
    assert target.stat().st_ino == inode
    check_whole(target)


@pytest.mark.parametrize("target", NAMES)
def test_move_to_another_backend_copies(place: Path, target: str, tmp_path: Path) -> None:
    tdstore.move(place, tmp_path / "new" / target)
    check_whole(tmp_path / "new" / target)
    assert not place.exists()


def test_options_make_a_move_a_copy(tmp_path: Path) -> None:
    save(tmp_path / "a.h5")
    tdstore.move(tmp_path / "a.h5", tmp_path / "b.h5", compression="gzip")
    with tdstore.open(tmp_path / "b.h5") as stored:
        assert isinstance(stored, PersistentTensorDict)
        assert stored.file["a"].compression == "gzip"


def test_move_replaces_nothing(place: Path, tmp_path: Path) -> None:
    for target in (tmp_path / "other.h5", tmp_path / f"other{''.join(place.suffixes)}"):
        save(target)
        before = tree(tmp_path)
        with pytest.raises(StoreExistsError, match="other"):
            tdstore.move(place, target)
        assert tree(tmp_path) == before


def test_move_to_its_own_place(place: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="own location"):
        tdstore.move(place, place)
    check_whole(place)


def test_stores_of_a_process_do_not_move(tmp_path: Path) -> None:
    save(tmp_path / "run")
    with pytest.raises(UnsupportedError, match="shared"):
        tdstore.move(tmp_path / "run", "shm://moved")
    check_whole(tmp_path / "run")


@pytest.mark.parametrize("how", ["rows", "structure", "the same again"])
def test_a_place_that_changes_while_it_moves_stays(
    place: Path, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A commit between the copy and the deletion: both places are there, and the error says so."""
    if how != "the same again" and place.name in ("run.zarr.zip", "run.tdz"):
        how = "the same again"  # archives are written whole

    def copy_and_commit(*args: Any, **options: Any) -> None:
        copy_dataset(*args, **options)
        if how == "the same again":
            save(place)
            return
        with tdstore.open(place, mode="r+") as td:
            if how == "rows":
                td[1] = td[0].to_tensordict()
            else:
                td["new"] = torch.ones(4)

    monkeypatch.setattr(moving, "copy_dataset", copy_and_commit)
    with pytest.raises(
        ConflictError, match=r"(?s)run.*was changed while it was copied to.*moved\.h5.*not deleted"
    ) as told:
        tdstore.move(place, tmp_path / "moved.h5", compression="gzip")
    assert "moved.h5" in str(told.value.hint)
    check_whole(tmp_path / "moved.h5")
    with tdstore.open(place) as stored:
        assert ("new" in stored.keys()) == (how == "structure")
        assert bool((stored["a"][1] == stored["a"][0]).all()) == (how == "rows")
    monkeypatch.undo()
    tdstore.delete(tmp_path / "moved.h5")
    tdstore.move(place, tmp_path / "moved.h5")
    assert not place.exists()


def test_a_failed_copy_keeps_the_source(tmp_path: Path) -> None:
    save(tmp_path / "run")
    (tmp_path / "full").mkdir(mode=0o500)
    if os.access(tmp_path / "full", os.W_OK):  # root may write everywhere
        (tmp_path / "full").rmdir()
        (tmp_path / "full").write_text("a file")
    with pytest.raises(TDStoreError):
        tdstore.move(tmp_path / "run", tmp_path / "full" / "new.h5")
    check_whole(tmp_path / "run")


# -- backends of others -------------------------------------------------------------------------
PLACES: set[str] = set()


def exists_here(location: str, *, tenant: str = "") -> bool:
    return f"{tenant}{location}" in PLACES


def remove_here(location: str) -> None:
    if location.endswith("disk"):
        raise OSError(5, "Input/output error")
    if location.endswith("bug"):
        raise KeyError("table")
    PLACES.remove(location)


def list_here(location: str) -> Iterable[str]:
    if location.endswith("bug"):
        raise KeyError("table")
    yield from (name for name in PLACES if name.startswith(location))


def list_nothing(location: str) -> None:
    """Lacks its `return`."""


def opener(location: str, *, mode: str = "r") -> None:
    raise AssertionError("a function of its own was declared")


def declare(*, exists: str = "", remove: str = "", list: str = "") -> Backend:
    return Backend(
        name="tables",
        opener=f"{__name__}:opener",
        summary="tables of a server",
        caps=Cap.PERSISTENT,
        schemes=("tables",),
        exists=exists,
        remove=remove,
        list=list,
    )


@pytest.fixture
def tables() -> Iterator[Backend]:
    backend = declare(exists=f"{__name__}:exists_here", remove=f"{__name__}:remove_here", list=f"{__name__}:list_here")
    PLACES.clear()
    PLACES.update({"tables://a/1", "tables://a/2", "tables://b"})
    yield backend


def test_functions_of_a_backend_are_called(tables: Backend) -> None:
    assert tdstore.exists("tables://b", storage=tables)
    assert not tdstore.exists("tables://b", storage=tables, tenant="me")
    assert tdstore.list_datasets("tables://a", storage=tables) == ["tables://a/1", "tables://a/2"]
    tdstore.delete("tables://b", storage=tables)
    assert not tdstore.exists("tables://b", storage=tables)


def test_errors_of_these_functions_name_the_backend(tables: Backend) -> None:
    with pytest.raises(OptionError, match="'tables' backend has no option 'tennant'") as caught:
        tdstore.exists("tables://b", storage=tables, tennant="me")
    assert "'tenant'" in str(caught.value)
    with pytest.raises(BrokenPluginError, match=r"'tables' .* failed to remove tables://bug: KeyError: 'table'"):
        tdstore.delete("tables://bug", storage=tables)
    with pytest.raises(StoreIOError, match=r"'tables' .* failed to remove tables://disk: OSError"):
        tdstore.delete("tables://disk", storage=tables)
    with pytest.raises(BrokenPluginError, match=r"'tables' .* failed to list tables://bug: KeyError"):
        tdstore.list_datasets("tables://bug", storage=tables)
    with pytest.raises(BrokenPluginError, match=r"'tables' .* failed to list tables://a: TypeError"):
        tdstore.list_datasets("tables://a", storage=declare(list=f"{__name__}:list_nothing"))
    with pytest.raises(BrokenPluginError, match="names a function 'remove' that is not there"):
        tdstore.delete("tables://b", storage=declare(remove=f"{__name__}:remove_there"))


def test_without_functions_the_error_says_which_is_missing() -> None:
    with pytest.raises(UnsupportedError, match="'tables' declares no `remove`"):
        tdstore.delete("tables://b", storage=declare())
    with pytest.raises(UnsupportedError, match="'tables' cannot list"):
        tdstore.list_datasets("tables://b", storage=declare())


def test_a_declaration_names_functions_with_their_module() -> None:
    with pytest.raises(PluginError, match="'package.module:function'"):
        declare(remove="remove_here")
