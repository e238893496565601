"""Archives are written whole: killed writers, writers at once, full disks, files that were moved meanwhile."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import subprocess
import textwrap
import zipfile

import pytest
import torch

import tdstore
from tdstore import TensorDict, lifetime
from tdstore.builtin.tdz import store
from tdstore.builtin.tdz.store import open_tdz
from tdstore.errors import ConflictError, StoreIOError
from tdstore.header import Header
from tdstore.store import Cap
from tdstore.storekit import files
from tdstore.testing.crash import CrashTests, in_child, killed_after, small_disk
from tdstore.testing.processes import warm
from tdstore.types import LeafSpec, Write

ON_DISK = True  # numbers of files are used again


class TestTdzCrashes(CrashTests):
    open = staticmethod(open_tdz)
    caps = Cap.WRITE | Cap.PARTIAL_WRITE | Cap.RESIZE | Cap.PERSISTENT
    points = (
        (files, "create_empty"),
        (files, "truncate"),
        (files, "write_at"),
        (files, "fsync"),
        (files, "rename"),
        (zipfile.ZipFile, "close"),
    )
    layouts = {"stored": {}}  # noqa: RUF012
    reading = {"verify": "full"}  # noqa: RUF012
    copied = True
    random_kills = 12

    @pytest.fixture
    def location(self, tmp_path):
        return tmp_path / "store.tdz"


def saved(path, rows: int = 100):
    TensorDict({"x": torch.zeros(rows, 64), "y": torch.zeros(rows)}, [rows]).save(path).close()


# -- kills -----------------------------------------------------------------------------------
def test_killed_updates_are_there_or_not(tmp_path):
    """By the clock, in the middle of writing rows through live tensors, of commits and of `close`."""
    path = tmp_path / "x.tdz"
    saved(path)

    def work() -> None:
        td = tdstore.open(path, mode="r+")
        for i in range(1, 200):
            td["x"].fill_(i)
            td["y"].fill_(i)
            td.commit()

    last, i = 0.0, 0
    while i < 30 or last <= 2:  # a busy machine needs later kills
        killed_after(work, 0.005 + 0.002 * i)
        i += 1
        found = tdstore.open(path, verify="full")
        values = torch.cat([found["x"].unique(), found["y"].unique()]).unique()
        assert len(values) == 1, "rows of two commits"
        last = max(last, float(values))
    saved(path)
    assert os.listdir(tmp_path) == ["x.tdz"], "the next save removes what killed writers left"


def test_a_killed_writer_of_a_new_archive_leaves_no_trace(tmp_path):
    def work() -> None:
        store = open_tdz(str(tmp_path / "x.tdz"), mode="w")
        store.create({("x",): LeafSpec((1000,), "float32")})
        os.kill(os.getpid(), signal.SIGKILL)

    assert in_child(work) == -signal.SIGKILL
    assert not (tmp_path / "x.tdz").exists()
    saved(tmp_path / "y.tdz")
    assert os.listdir(tmp_path) == ["y.tdz"]


def test_a_file_that_is_being_built_is_not_taken_for_a_remainder(tmp_path):
    store = open_tdz(str(tmp_path / "x.tdz"), mode="w")
    store.create({("x",): LeafSpec((3,), "float32", fill_value=2)})
    saved(tmp_path / "y.tdz")
    store.save_header(Header())
    store.close()
    assert tdstore.open(tmp_path / "x.tdz")["x"].tolist() == [2, 2, 2]
    assert sorted(os.listdir(tmp_path)) == ["x.tdz", "y.tdz"]


# -- writers at once -------------------------------------------------------------------------
ADDER = """
    import sys
    import torch, tdstore
    from tdstore.errors import ConflictError
    path, name = sys.argv[1:]
    sys.stdin.readline()
    for i in range(12):
        try:
            with tdstore.open(path, mode="r+") as td:
                td[f"{name}{i}"] = torch.full((100,), float(i))
        except ConflictError:
            continue
        print(f"{name}{i}", flush=True)
"""


def test_writers_that_add_entries_at_once_lose_none_that_was_acknowledged(tmp_path):
    path = tmp_path / "x.tdz"
    saved(path)
    command = [*warm.python(), "-c", textwrap.dedent(ADDER), str(path)]
    pipe = subprocess.PIPE
    children = [subprocess.Popen([*command, name], stdin=pipe, stdout=pipe, text=True) for name in "abc"]
    for child in children:
        child.stdin.write("go\n")
        child.stdin.flush()
    told = [name for child in children for name in child.communicate(timeout=120)[0].split()]
    found = tdstore.open(path, verify="full")
    assert set(found.keys()) == {"x", "y", *told}
    assert len(told) >= 12
    assert all(found[name].unique().tolist() == [float(name[1:])] for name in told)
    assert os.listdir(tmp_path) == ["x.tdz"]


def test_the_second_of_two_commits_is_a_conflict(tmp_path):
    path = tmp_path / "x.tdz"
    saved(path)
    first, second = tdstore.open(path, mode="r+"), tdstore.open(path, mode="r+")
    first["x"].fill_(1)
    second["x"].fill_(2)
    assert tdstore.open(path)["x"].sum() == 0, "nothing is seen before a commit"
    first.close()
    with pytest.raises(ConflictError, match="replaced"):
        second.commit()
    with pytest.raises(ConflictError, match="replaced"):
        second.close()
    assert tdstore.open(path, verify="full")["x"].unique().tolist() == [1]
    assert os.listdir(tmp_path) == ["x.tdz"]


@pytest.mark.parametrize("commits", [True, False])
def test_a_conflict_is_an_error_of_the_commit_or_a_line_in_the_log(tmp_path, capsys, commits):
    path = tmp_path / "x.tdz"
    saved(path)
    first, second = tdstore.open(path, mode="r+"), tdstore.open(path, mode="r+")
    first["x"].fill_(1)
    second["x"].fill_(2)
    first.close()
    if commits:
        with pytest.raises(ConflictError):
            second.commit()
    del second
    gc.collect()
    lifetime.settle()
    assert capsys.readouterr().err.count("uncommitted changes") == (not commits)


def test_a_writer_whose_file_was_moved_says_so_and_one_whose_file_was_removed_does_not(tmp_path):
    path = tmp_path / "x.tdz"
    saved(path)
    moved = tdstore.open(path, mode="r+")
    moved["x"].fill_(1)
    path.rename(tmp_path / "z.tdz")
    saved(path)
    with pytest.raises(ConflictError):
        moved.close()
    removed = tdstore.open(path, mode="r+")
    removed["x"].fill_(1)
    path.unlink()
    removed.close()
    assert os.listdir(tmp_path) == ["z.tdz"]


def test_writes_that_torch_does_not_see(tmp_path):
    path = tmp_path / "x.tdz"
    saved(path)
    with tdstore.open(path, mode="r+") as td:
        td["x"].numpy()[7] = 3
    before = path.stat().st_ino
    with tdstore.open(path, mode="r+") as td:
        assert td["x"].sum() == 3 * 64
        assert td.read([7])["x"].sum() == 3 * 64
    assert path.stat().st_ino == before, "nothing was written, so nothing was replaced"
    assert tdstore.open(path, verify="full")["x"][7].unique().tolist() == [3]


def test_only_pages_that_were_written_are_compared(tmp_path, monkeypatch):
    """64 GiB of holes, of which one row is read and another written, are neither read nor compared whole."""
    path = tmp_path / "x.tdz"
    TensorDict.from_schema({"x": ((1 << 20,), torch.float32)}, batch_size=[1 << 14], location=path).close()
    compared = []
    differs = store.differs
    monkeypatch.setattr(store, "differs", lambda memory, *a: compared.append(len(memory)) or differs(memory, *a))
    with tdstore.open(path, mode="r+") as td:
        assert td["x"][5].sum() == 0
        td["x"][7] += 1
    assert 4 << 20 <= sum(compared) < 64 << 20
    assert path.stat().st_blocks * 512 < 64 << 20
    with tdstore.open(path) as td:
        assert td.read([6, 7])["x"].sum(1).tolist() == [0, 1 << 20]


def test_a_system_without_a_page_table_to_look_at(tmp_path, monkeypatch):
    monkeypatch.setattr("tdstore.builtin.window.Window.changed_ranges", lambda *_: None)
    test_writes_that_torch_does_not_see(tmp_path)


def test_a_forked_child_commits_nothing_of_its_parent(tmp_path):
    path = tmp_path / "x.tdz"
    saved(path)
    td = tdstore.open(path, mode="r+")
    td["x"].fill_(1)
    td["new"] = torch.ones(100)
    td["x"].fill_(2)

    def work() -> None:
        td["x"].fill_(3)
        td.close()

    assert in_child(work) == 0
    assert tdstore.open(path, verify="full")["x"].unique().tolist() == [1]
    td.close()
    assert tdstore.open(path, verify="full")["x"].unique().tolist() == [2]


def test_structure_is_taken_back(tmp_path):
    path = tmp_path / "x.tdz"
    saved(path)
    with open_tdz(str(path), mode="r+") as store:
        store.write([Write(("y",), (), torch.ones(100))])
        store.create({("new",): LeafSpec((5,), "int8")})
        fresh = store.view(("new",))
        store.rename({("x",): ("z",)})
        store.resize({("y",): 7})
        store.discard()
        assert sorted(store.paths()) == [("x",), ("y",)]
        assert store.view(("y",)).sum() == 100
        fresh.fill_(1)  # its memory outlives it
        store.create({("other",): LeafSpec((5,), "int8", fill_value=4)})
        store.save_header(Header())
        store.create({("dropped",): LeafSpec((5,), "int8")})
        store.delete([("other",)])
    back = tdstore.open(path, verify="full")
    assert sorted(back.keys()) == ["other", "x", "y"]
    assert back["other"].tolist() == [4] * 5
    assert os.listdir(tmp_path) == ["x.tdz"]


# -- full disks ------------------------------------------------------------------------------
def test_rows_that_do_not_fit_on_the_disk(tmp_path):
    """What is written into a sparse archive is an error where there is no room for it, and never a signal."""
    with small_disk(tmp_path / "disk", 8) as folder:
        path = folder / "x.tdz"
        script = """
            import sys, torch, tdstore
            from tdstore import TensorDict
            from tdstore.errors import StoreIOError
            td = TensorDict.from_schema({"x": ((64,), torch.float32)}, location=sys.argv[1], batch_size=[1 << 16])
            td.set_at_("x", torch.ones(1 << 16, 64), slice(None))
            try:
                td.close()
            except StoreIOError as error:
                print(error.errno)
        """
        done = subprocess.run(
            [*warm.python(), "-c", textwrap.dedent(script), str(path)], capture_output=True, text=True, check=False
        )
        assert (done.returncode, done.stdout) == (0, "28\n"), done.stderr
        assert os.listdir(folder) == ["x.tdz"]
        assert tdstore.open(path, verify="full")["x"].sum() == 0


def test_a_full_disk_keeps_what_was_committed(tmp_path):
    with small_disk(tmp_path / "disk", 2) as folder:
        path = folder / "x.tdz"
        saved(path)
        td = tdstore.open(path, mode="r+")
        td["y"].fill_(1)
        (folder / "ballast").write_bytes(bytes(shutil.disk_usage(folder).free - 8192))
        with pytest.raises(StoreIOError) as caught:
            td.commit()
        assert caught.value.errno == 28
        assert tdstore.open(path, verify="full")["y"].sum() == 0
        with pytest.raises(StoreIOError):
            td.close()
        (folder / "ballast").unlink()
        td.close()
        assert tdstore.open(path, verify="full")["y"].sum() == 100
        assert os.listdir(folder) == ["x.tdz"]
