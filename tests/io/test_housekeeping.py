"""`exists`, `info`, `list_datasets`, `delete` and `move`: what they find, what they refuse, and what a kill leaves."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import tdstore
from tdstore import TensorDict
from tdstore.errors import (
    InvalidArgumentError,
    PluginError,
    ReadOnlyError,
    StoreBusyError,
    StoreError,
    StoreExistsError,
    StoreNotFoundError,
    UnsupportedError,
)
from tdstore.hookspecs import Backend
from tdstore.registry import registry
from tdstore.storekit import files
from tdstore.testing.crash import deaths, die_at
from tests.data_loading.places import LOCAL, SERVERS, numbered, stored


@pytest.mark.parametrize("kind", LOCAL + SERVERS)
def test_the_life_of_a_place(kind: str, request: Any) -> None:
    with stored(kind, 20, request) as (place, options):
        assert tdstore.exists(place, **options)
        found = tdstore.info(place, **options)
        assert found.backend == {"s3": "remote", "file": "remote"}.get(kind, kind)
        assert found.kind == "TensorDict"
        assert found.batch_size == (20,)
        assert found.leaves[("row",)].shape == (20,)
        assert found.leaves["next", "x"].dtype is torch.float32
        assert found.nbytes >= 20 * (8 + 12)
        assert place.split("@")[-1] in str(found)
        tdstore.delete(place, **options)
        assert not tdstore.exists(place, **options)
        for gone in (tdstore.delete, tdstore.info, tdstore.open):
            with pytest.raises(StoreNotFoundError):
                gone(place, **options)
        numbered(3).save(place, **options).close()
        assert tdstore.open(place, **options)["row"].tolist() == [0, 1, 2]


@pytest.mark.parametrize("kind", ["redis", "s3"])
def test_the_places_of_a_server(kind: str, request: Any, tmp_path: Path) -> None:
    server = request.getfixturevalue(kind)
    base = f"{server.url}/list-{tmp_path.name}"
    options: dict[str, Any] = {"storage_options": server.fsspec_options} if kind == "s3" else {}
    for name in ("b", "a/1"):
        numbered(2).save(f"{base}/{name}", **options).close()
    assert tdstore.list_datasets(base, **options) == [f"{base}/a/1", f"{base}/b"]
    tdstore.move(f"{base}/b", tmp_path / "here", src_options=options)
    assert tdstore.list_datasets(base, **options) == [f"{base}/a/1"]
    assert tdstore.load(tmp_path / "here")["row"].tolist() == [0, 1]


def test_the_places_of_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("memmap", "deep/er/one.h5", "deep/two.tdz", "three.zarr"):
        numbered(2).save(name).close()
    Path("deep/notes.txt").write_text("not a dataset")
    Path("deep/broken.h5").write_bytes(b"\x89HDF\r\n\x1a\n" + bytes(20))
    os.symlink("memmap", "link")
    assert tdstore.list_datasets() == ["deep/er/one.h5", "deep/two.tdz", "link", "memmap", "three.zarr"]
    assert tdstore.list_datasets("deep", storage="h5") == ["deep/er/one.h5"]
    assert tdstore.list_datasets("deep/two.tdz") == ["deep/two.tdz"]
    with pytest.raises(StoreNotFoundError, match="nowhere"):
        tdstore.list_datasets("nowhere")
    with pytest.raises(UnsupportedError, match="'h5' cannot list"):
        tdstore.list_datasets("h5://deep")


def test_what_is_no_dataset(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "thesis.tex").write_text("years of work")
    (tmp_path / "notes.txt").write_text("text")
    for name in ("folder", "notes.txt", "nothing"):
        assert not tdstore.exists(tmp_path / name)
        with pytest.raises(StoreError):
            tdstore.delete(tmp_path / name)
    assert (tmp_path / "folder" / "thesis.tex").read_text() == "years of work"
    with pytest.raises(UnsupportedError, match="'memory'"):
        tdstore.delete(None, storage="memory")


@pytest.mark.parametrize("suffix", ["", ".zarr"])
def test_files_of_others_are_not_deleted(tmp_path: Path, suffix: str) -> None:
    place = tmp_path / f"run{suffix}"
    numbered(5).save(place).close()
    (place / "thesis.tex").write_text("years of work")
    for act in (tdstore.delete, lambda p: tdstore.move(p, tmp_path / "there")):
        with pytest.raises(StoreExistsError, match="thesis.tex"):
            act(place)
    assert (place / "thesis.tex").read_text() == "years of work"
    assert tdstore.load(place)["row"].tolist() == [*range(5)]
    assert not (tmp_path / "there").exists()


def test_files_of_other_programs_are_not_deleted(tmp_path: Path) -> None:
    import h5py

    with h5py.File(tmp_path / "theirs.h5", "w") as file:
        file["x"] = [1, 2]
    assert tdstore.exists(tmp_path / "theirs.h5")
    with pytest.raises(StoreExistsError, match=r"theirs\.h5"):
        tdstore.delete(tmp_path / "theirs.h5")
    with pytest.raises(ReadOnlyError):
        tdstore.delete("http://127.0.0.1:9/run")


@pytest.mark.parametrize("kind", ["memmap", "h5", "zarr", "tdz"])
def test_a_delete_that_is_killed(kind: str, tmp_path: Path) -> None:
    place = tmp_path / f"run{'' if kind == 'memmap' else '.' + kind}"

    def begin() -> None:
        if tdstore.exists(place):
            tdstore.delete(place)
        numbered(5).save(place).close()

    seen = set()
    points = [(os, "rename"), (os, "unlink"), (os, "rmdir"), (files, "rename"), (files, "unlink")]
    for died in deaths(begin, lambda: tdstore.delete(place), lambda k: die_at(points, k), least=1):
        there = tdstore.exists(place)
        seen.add(there)
        assert died or not there
        if there:
            assert tdstore.load(place, verify="full")["row"].tolist() == [*range(5)]
    assert False in seen
    begin()
    tdstore.delete(place)
    assert [name for name in os.listdir(tmp_path) if not name.endswith(".lock")] == []


def test_a_rename_and_a_copy(tmp_path: Path) -> None:
    numbered(4).save(tmp_path / "a.h5").close()
    inode = (tmp_path / "a.h5").stat().st_ino
    tdstore.move(tmp_path / "a.h5", tmp_path / "deep" / "b.h5")
    assert (tmp_path / "deep" / "b.h5").stat().st_ino == inode
    tdstore.move(tmp_path / "deep" / "b.h5", tmp_path / "c.zarr")
    assert not tdstore.exists(tmp_path / "deep" / "b.h5")
    tdstore.move(tmp_path / "c.zarr", tmp_path / "d", storage="memmap")
    tdstore.move(tmp_path / "d", tmp_path / "e")
    assert tdstore.load(tmp_path / "e")["row"].tolist() == [0, 1, 2, 3]
    assert [name for name in sorted(os.listdir(tmp_path)) if not name.endswith(".lock")] == ["deep", "e"]


def test_moves_that_are_refused(tmp_path: Path) -> None:
    numbered(4).save(tmp_path / "a").close()
    numbered(5).save(tmp_path / "b").close()
    with pytest.raises(StoreExistsError, match="b"):
        tdstore.move(tmp_path / "a", tmp_path / "b")
    with pytest.raises(StoreExistsError, match="b"):
        tdstore.move(tmp_path / "a", tmp_path / "b", pack=False)
    with pytest.raises(InvalidArgumentError, match="own location"):
        tdstore.move(tmp_path / "a", tmp_path / "a")
    with pytest.raises(StoreNotFoundError):
        tdstore.move(tmp_path / "c", tmp_path / "d")
    with pytest.raises(UnsupportedError, match="running processes"):
        tdstore.move(tmp_path / "a", "shm://test-moved")
    assert tdstore.load(tmp_path / "a")["row"].tolist() == [0, 1, 2, 3]
    assert tdstore.load(tmp_path / "b")["row"].tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("suffix", [".h5", ".zarr"])
def test_a_place_that_is_being_written(suffix: str, tmp_path: Path) -> None:
    place = tmp_path / f"run{suffix}"
    TensorDict({"row": torch.arange(5)}, [5]).save(place).close()
    with tdstore.open(place, mode="r+") as td:
        td[:1] = TensorDict({"row": torch.tensor([9])}, [1])
        failed: list[BaseException] = []

        def act() -> None:
            try:
                tdstore.delete(place)
            except BaseException as error:
                failed.append(error)

        thread = threading.Thread(target=act)
        thread.start()
        thread.join()
        assert [type(error) for error in failed] == [StoreBusyError]
    assert tdstore.load(place)["row"][0] == 9
    tdstore.delete(place)


@pytest.mark.parametrize("field", ["exists", "remove", "list"])
def test_a_function_that_a_backend_declares(field: str) -> None:
    with pytest.raises(PluginError, match=f"(?s){field}=.*package.module:function"):
        Backend(name="b", opener="m:f", summary="x", **{field: "no colon"})
    declared = Backend(name="b", opener="m:f", summary="x", **{field: "tests.io.nothing_here:f"})
    with pytest.raises(PluginError, match="nothing_here|'b'"):
        registry().call(declared, field, "b://x", {})


def test_a_location_of_many_values(tmp_path: Path) -> None:
    """Strings, lazy stacks and empty datasets are described too."""
    TensorDict({}, [7]).save(tmp_path / "empty").close()
    assert tdstore.info(tmp_path / "empty").batch_size == (7,)
    assert tdstore.info(tmp_path / "empty").leaves == {}
    tdstore.lazy_stack([numbered(2), numbered(2)]).save(tmp_path / "lazy").close()
    assert tdstore.info(tmp_path / "lazy").kind == "LazyStackedTensorDict"
