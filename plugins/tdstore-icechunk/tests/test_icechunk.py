"""What the kit cannot know: versions in a repository, other programs, conflicts, workers, garbage, damage."""

from __future__ import annotations

import subprocess
from datetime import UTC, datetime
from pathlib import Path as FsPath

import icechunk
import numpy as np
import pytest
import torch
import zarr
from tdstore_icechunk.store import IcechunkStore, open_icechunk

import tdstore
from tdstore import TensorDict
from tdstore.errors import (
    ConflictError,
    CorruptStoreError,
    InvalidArgumentError,
    StoreBusyError,
    StoreExistsError,
    StoreNotFoundError,
)
from tdstore.header import Group, Header
from tdstore.testing.processes import warm
from tdstore.types import LeafSpec, Read, Write


@pytest.fixture
def saved(place: FsPath) -> FsPath:
    rows = {"x": torch.arange(80.0).reshape(20, 4), "n": {"s": [f"row {i}" for i in range(20)]}}
    TensorDict(rows, [20]).save(place).close()
    return place


def repository(place: FsPath) -> icechunk.Repository:
    return icechunk.Repository.open(icechunk.local_filesystem_storage(str(place)))


def objects(place: FsPath, kind: str = "chunks") -> set[str]:
    return {path.name for path in (place / kind).glob("*")} if (place / kind).exists() else set()


def big(rows: int = 8) -> TensorDict:
    """Rows that icechunk puts into objects of their own: small ones are in its manifests."""
    return TensorDict({"x": torch.rand(rows, 1000)}, [rows])


# -- datasets ------------------------------------------------------------------------------
def test_save_open_append_write(saved: FsPath) -> None:
    with tdstore.open(saved, mode="r+") as td:
        td[3:5] = {"x": torch.zeros(2, 4), "n": {"s": ["a", "b"]}}
        td.append({"x": torch.ones(4), "n": {"s": "c"}})
        td.extend({"x": torch.ones(2, 4), "n": {"s": ["d", "e"]}})
        td["y"] = torch.arange(23)
    with tdstore.open(saved) as td:
        assert td.batch_size == (23,)
        assert td[[22, 3, 0]]["x"].sum(1).tolist() == [4, 0, 6]
        assert td["n", "s"][3:5] + td["n", "s"][19:] == ["a", "b", "row 19", "c", "d", "e"]
        assert td["y"].tolist() == list(range(23))


@pytest.mark.parametrize("old", ["value", TensorDict({"x": torch.ones(20)}, [20])])
@pytest.mark.parametrize("how", ["set", "rename"])
def test_a_group_replaces_a_value_and_a_value_a_group(place: FsPath, how: str, old: object) -> None:
    new = TensorDict({"x": torch.zeros(20)}, [20]) if old == "value" else "value"
    TensorDict({"d": old, "e": new}, [20]).save(place).close()
    with tdstore.open(place, mode="r+") as td:
        if how == "set":
            td["d"] = new
        else:
            td.rename_key_("e", "d")
    with tdstore.open(place) as td:
        assert td["d"] == "value" if new == "value" else not td["d", "x"].any()


def test_a_commit_is_one_snapshot(saved: FsPath) -> None:
    """Leaves and header are committed by one step of icechunk."""
    before = [s.id for s in repository(saved).ancestry(branch="main")]
    with open_icechunk(saved, mode="r+") as store:
        store.resize({("x",): 30})
        store.write([Write(("x",), (slice(20, 30, 1),), torch.ones(10, 4))])
        store.create({("y",): LeafSpec((3,), "int64")})
        store.save_header(store.load_header())
    after = [s.id for s in repository(saved).ancestry(branch="main")]
    assert after[1:] == before


def test_icechunk_and_zarr_read_it(saved: FsPath) -> None:
    session = repository(saved).readonly_session("main")
    group = zarr.open_group(session.store, mode="r")
    assert np.asarray(group["x"][5]).tolist() == [20, 21, 22, 23]
    assert tdstore.open(session.store, storage="zarr")[5]["n", "s"] == "row 5"


def test_a_repository_of_another_program(place: FsPath) -> None:
    repo = icechunk.Repository.create(icechunk.local_filesystem_storage(str(place)))
    session = repo.writable_session("main")
    group = zarr.create_group(session.store)
    group.create_array("t", data=np.arange(12.0).reshape(6, 2), chunks=(4, 2))
    session.commit("by zarr")
    assert tdstore.open(place)["t"].tolist() == [[2 * i, 2 * i + 1] for i in range(6)]
    with pytest.raises(StoreExistsError, match="not saved from a TensorDict"):
        big().save(place)


def test_an_empty_repository_is_no_dataset(place: FsPath) -> None:
    icechunk.Repository.create(icechunk.local_filesystem_storage(str(place)))
    with pytest.raises(StoreNotFoundError, match="no icechunk repository with a commit"):
        tdstore.open(place)
    assert not tdstore.exists(place)
    with open_icechunk(place, mode="x") as store:
        store.save_header(Header({(): Group(batch_size=(3,))}))
    assert tdstore.open(place).batch_size == (3,)


def test_declaring_imports_nothing() -> None:
    code = (
        "import sys, tdstore; tdstore.backends(); print('tdstore_icechunk' in sys.modules, 'icechunk' in sys.modules)"
    )
    done = subprocess.run([*warm.python(), "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "True False\n"


# -- versions ------------------------------------------------------------------------------
def test_versions(saved: FsPath) -> None:
    with tdstore.open(saved, mode="r+") as td:
        td.commit(message="first")
        td[0] = {"x": torch.full((4,), -1.0)}
        td.commit()  # no version
        td.append({"x": torch.zeros(4), "n": {"s": "new"}})
        td.commit(message="")
    first, second = tdstore.versions(saved)
    assert (first.message, first.rows, second.message, second.rows) == ("first", 20, "", 21)
    assert first.new_bytes is not None and second.new_bytes is not None and second.new_bytes > 0
    assert first.time < second.time <= datetime.now(UTC)
    assert tdstore.open(saved, version=first.id)[0]["x"].tolist() == [0, 1, 2, 3]
    assert tdstore.open(saved, at=first.time).batch_size == (20,)
    assert tdstore.open(saved, at=second.time)[0]["x"].tolist() == [-1] * 4
    assert repository(saved).lookup_snapshot(first.id).message == "first"
    with pytest.raises(StoreNotFoundError, match="1CECHNKREP0F1RSTCMT0"):
        tdstore.open(saved, version="1CECHNKREP0F1RSTCMT0")


def test_tags_move_and_those_of_icechunk_are_listed(saved: FsPath) -> None:
    with tdstore.open(saved, mode="r+") as td:
        td.commit(message="one")
        td[0] = {"x": torch.zeros(4)}
        td.commit(message="two")
    one, two = tdstore.versions(saved)
    repository(saved).create_tag("native", one.id)
    tdstore.tag(saved, "a/b =%é", one.id)
    assert [v.tags for v in tdstore.versions(saved)] == [("a/b =%é", "native"), ()]
    for name in ("native", "a/b =%é"):
        tdstore.tag(saved, name, two.id)
    assert [v.tags for v in tdstore.versions(saved)] == [(), ("a/b =%é", "native")]
    tdstore.untag(saved, "native")
    assert [v.tags for v in tdstore.versions(saved)] == [(), ("a/b =%é",)]
    with pytest.raises(InvalidArgumentError, match="too long"):
        tdstore.tag(saved, "x" * 300, one.id)


def test_prune_frees_what_only_dropped_versions_need(place: FsPath) -> None:
    with big().save(place) as td:
        for number in range(4):
            td["x"] = torch.rand(8, 1000)
            td.commit(message=str(number))
    values = [tdstore.open(place, version=v.id)["x"] for v in tdstore.versions(place)]
    before = objects(place)
    tdstore.tag(place, "keep", tdstore.versions(place)[0].id)
    assert [v.message for v in tdstore.prune(place, keep=1, grace=0)] == ["1", "2"]
    kept = tdstore.versions(place)
    assert [v.message for v in kept] == ["0", "3"]
    # Of five states (the save, and four versions) two are left.
    assert len(objects(place)) * 5 == len(before) * 2
    assert len(objects(place, "snapshots")) <= 4
    for version, value in zip(kept, (values[0], values[3]), strict=True):
        assert torch.equal(tdstore.open(place, version=version.id)["x"], value)
    tdstore.untag(place, "keep")
    tdstore.prune(place, keep=1, grace=0)
    with tdstore.open(place, mode="r+") as td:
        td["x"] = torch.rand(8, 1000)
        td.commit(message="last")
    tdstore.prune(place, keep=1, grace=0)
    assert len(objects(place)) * 5 == len(before)
    assert [v.message for v in tdstore.versions(place)] == ["last"]
    # What stays in the repository is what the present needs: no ref of a version that is gone.
    assert not [b for b in repository(place).list_branches() if "dropped" in b and not b.endswith(kept[1].id)]


def test_prune_spares_readers_and_writers(place: FsPath) -> None:
    with big().save(place) as td:
        td.commit(message="old")
        td["x"] = torch.zeros(8, 1000)
        td.commit(message="new")
    old, _ = tdstore.versions(place)
    reader = tdstore.open(place, version=old.id)
    with tdstore.open(place, mode="r+") as writer:
        writer[2] = {"x": torch.ones(1000)}
        tdstore.prune(place, keep=1)  # with an hour of grace
        tdstore.prune(place, grace=0)
        assert reader["x"][3].sum() > 0
        writer.commit()
    assert tdstore.open(place)["x"].sum(1).tolist() == [0, 0, 1000, 0, 0, 0, 0, 0]


# -- writers -------------------------------------------------------------------------------
def test_the_second_of_two_writers_is_told(saved: FsPath) -> None:
    with tdstore.open(saved, mode="r+") as one, tdstore.open(saved, mode="r+") as two:
        one[0] = {"x": torch.ones(4)}
        two[1] = {"x": torch.ones(4)}
        one.commit()
        with pytest.raises(ConflictError, match=r"t\.icechunk was changed by another writer"):
            two.commit()
    assert tdstore.open(saved)["x"][:2].tolist() == [[1, 1, 1, 1], [4, 5, 6, 7]]


def test_a_save_over_a_dataset_is_its_next_commit(saved: FsPath) -> None:
    with tdstore.open(saved, mode="r+") as td:
        td.commit(message="before")
    reader = tdstore.open(saved)
    big().save(saved).close()
    assert set(tdstore.open(saved).keys()) == {"x"}
    assert reader["n", "s"][0] == "row 0"
    assert [v.message for v in tdstore.versions(saved)] == ["before"]


def test_garbage_of_writers_that_gave_up(place: FsPath) -> None:
    """It goes with the writer, unless another one has objects that are not committed."""
    big().save(place).close()
    before = objects(place)
    first, second = (open_icechunk(place, mode="r+") for _ in range(2))
    for store in (first, second):
        store.create({("y",): LeafSpec((1000, 10), "float32")})
        store.write([Write(("y",), (), torch.rand(1000, 10))])
        store.flush()
    between = objects(place)
    assert between > before
    first.discard()
    assert objects(place) == between  # `second` may commit what it has
    second.save_header(Header({(): Group(batch_size=())}))
    first.close()
    second.close()
    assert open_icechunk(place).read([Read(("y",))])[0].shape == (1000, 10)
    with open_icechunk(place, mode="r+") as store:
        store.create({("z",): LeafSpec((1000, 10), "float32")})
        store.write([Write(("z",), (), torch.rand(1000, 10))])
        store.flush()
        committed = objects(place)
    assert before < objects(place) < committed


def test_delete_while_it_is_written(saved: FsPath) -> None:
    with tdstore.open(saved, mode="r+") as td:
        td[0] = {"x": torch.ones(4)}
        with pytest.raises(StoreBusyError, match="another writer"):
            tdstore.delete(saved)
    tdstore.delete(saved)
    assert not saved.exists()


def test_a_removed_folder_does_not_come_back(saved: FsPath, tmp_path: FsPath) -> None:
    td = tdstore.open(saved, mode="r+")
    td[0] = {"x": torch.ones(4)}
    saved.rename(tmp_path / "elsewhere")
    with pytest.raises(StoreBusyError, match="removed"):
        td.close()
    assert not saved.exists()


def test_rename_keeps_values_under_names_that_zarr_reads(place: FsPath) -> None:
    values = {("a",): torch.rand(50, 40), ("b",): torch.rand(7)}
    with open_icechunk(place, mode="w", chunks=8, shards=16) as store:
        store.create({path: LeafSpec(v.shape, v.dtype) for path, v in values.items()})
        store.write([Write(path, (), v) for path, v in values.items()])
        store.save_header(Header({(): Group(batch_size=())}))
        store.rename({("a",): ("b",), ("b",): ("g", "c")})
        store.save_header(Header({(): Group(batch_size=())}))
    with open_icechunk(place) as store:
        assert torch.equal(store.read([Read(("b",))])[0], values["a",])
        assert torch.equal(store.read([Read(("g", "c"))])[0], values["b",])
    group = zarr.open_group(repository(place).readonly_session("main").store, mode="r")
    assert np.array_equal(group["b"][:], values["a",].numpy())


# -- damage --------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["chunks", "manifests", "snapshots"])
def test_lost_objects_are_never_fill_values(place: FsPath, kind: str) -> None:
    """icechunk says the same of a chunk that was never written and of one that it cannot read."""
    big().save(place).close()
    tip = repository(place).lookup_branch("main")
    for path in (place / kind).iterdir():
        if kind != "snapshots" or path.name == tip:
            path.unlink()
    with pytest.raises(CorruptStoreError, match=r"t\.icechunk"):
        tdstore.open(place)["x"]


def test_verify_names_the_leaf(place: FsPath) -> None:
    big().save(place).close()
    for path in (place / "chunks").iterdir():
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 8
        path.write_bytes(data)
    assert [fault.path for fault in open_icechunk(place).verify()] == [("x",)]
    with pytest.raises(CorruptStoreError, match="'x'"):
        open_icechunk(place, verify="full")


# -- other processes -----------------------------------------------------------------------
LOADER = """
import copy, sys, torch, tdstore
from torch.utils.data import DataLoader
from tdstore.data import TensorDictDataset
data = TensorDictDataset(tdstore.open(sys.argv[1]))
loader = DataLoader(data, batch_size=100, num_workers=1, multiprocessing_context=sys.argv[2], collate_fn=copy.copy)
try:
    print([batch["x"].sum().item() for batch in loader])
except Exception as error:
    print("UnsupportedError" in str(error), "multiprocessing_context='forkserver'" in str(error))
"""


@pytest.mark.parametrize(("context", "printed"), [("spawn", "[100000.0, 100000.0]"), ("fork", "True True")])
def test_workers_of_a_loader(place: FsPath, context: str, printed: str) -> None:
    """A worker that is spawned opens the place again; one that is forked is told what to do, and does not hang."""
    # Not compressed: what is small is fetched when the place is opened, and can be read in a forked child.
    TensorDict({"x": torch.ones(200, 1000)}, [200]).save(place, compressors="none").close()
    command = [*warm.python(), "-c", LOADER, str(place), context]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.stdout.strip() == printed, done.stderr


def test_a_script_that_ends_commits(saved: FsPath) -> None:
    code = "import sys, torch, tdstore; td = tdstore.open(sys.argv[1], mode='r+'); td[0] = {'x': torch.full((4,), 9.0)}"
    done = subprocess.run([*warm.python(), "-c", code, str(saved)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert tdstore.open(saved)[0]["x"].tolist() == [9] * 4


def test_the_class_of_stores(saved: FsPath) -> None:
    with open_icechunk(saved) as store:
        assert isinstance(store, IcechunkStore)
        assert store.layout(("x",))["chunks"] == (20, 4)
