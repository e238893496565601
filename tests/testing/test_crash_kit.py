"""`CrashTests` on the memmap store, and on stores that break what it asks: each must be caught, by what it says."""

from __future__ import annotations

import faulthandler
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import fsspec
import pytest

from tdstore.builtin.mapping import map_fd
from tdstore.builtin.memmap.store import MemmapStore, open_memmap
from tdstore.builtin.memmap.writing import LeafWriter
from tdstore.dtypes import to_numpy
from tdstore.errors import StoreNotFoundError
from tdstore.store import Cap, Store
from tdstore.storekit import documents, io_errors
from tdstore.storekit.files import write_at
from tdstore.testing import CountingStore, CrashTests, crash
from tdstore.testing.crash import in_child, small_disk
from tdstore.testing.processes import syncs
from tdstore.testing.processes.points import find_points, point_name
from tdstore.testing.processes.syscalls import needs_strace, traced, unsynced
from tdstore.testing.setup import save as save_leaves
from tests.testing import wrong_bytestore, wrong_files, wrong_modes


class Memmap(CrashTests):
    open = staticmethod(open_memmap)
    caps = MemmapStore.caps
    options = {"durable": "none"}
    reading = {"verify": "full"}
    points = [(os, name) for name in ("pwrite", "write", "ftruncate", "posix_fallocate", "rename", "unlink", "rmdir")]
    points.append((MemmapStore, "write"))  # which goes through a mapping: no call of the system is made
    steps = {"save": 5, "rows": 2}
    outcomes = {"rows": {"old", "dirty", "new"}}


def open_hasty(location: str, *, mode: Any = "r", **options: Any) -> Store:
    """What is there goes before there is something new."""
    if mode == "w":
        shutil.rmtree(location, ignore_errors=True)
    return open_memmap(location, mode=mode, **options)


def open_deaf(location: str, *, mode: Any = "r", **options: Any) -> Store:
    """Half of an update is shown as if it were a whole one."""
    return open_memmap(location, mode=mode, **({"recover": "accept"} | options if mode == "r" else options))


def open_littering(location: str, *, mode: Any = "r", **options: Any) -> Store:
    """A temporary file of each writer, which nobody removes."""
    if mode == "w":
        Path(f"{location}.{os.getpid()}.tmp").touch()
    return open_memmap(location, mode=mode, **options)


def open_in_two_steps(location: str, *, mode: Any = "r", **options: Any) -> Store:
    """An empty file marks the place before there is a store."""
    if mode == "w" and not os.path.exists(location):
        os.mkdir(location)
        Path(location, documents.NAME).touch()
    return open_memmap(location, mode=mode, **options)


def wrong(opener: Any, **fields: Any) -> CrashTests:
    return type("Wrong", (Memmap,), {"open": staticmethod(opener), **fields})()


either = pytest.mark.parametrize("copied", [False, True], ids=["killed", "copied"])


@either
@pytest.mark.parametrize("work", ["save", "rows"])
def test_a_right_store_passes(tmp_path: Path, work: str, copied: bool) -> None:
    wrong(open_memmap, copied=copied).test_kill_at_every_call(tmp_path / "d", work, "default")


@either
def test_what_is_promised_must_be_seen(tmp_path: Path, copied: bool) -> None:
    with pytest.raises(AssertionError, match="'dirty': "):
        wrong(open_memmap, outcomes={}, copied=copied).test_kill_at_every_call(tmp_path / "d", "rows", "default")


@either
def test_an_old_store_that_goes_too_soon(tmp_path: Path, copied: bool) -> None:
    with pytest.raises(StoreNotFoundError):
        wrong(open_hasty, copied=copied).test_kill_at_every_call(tmp_path / "d", "save", "default")


@either
def test_half_an_update(tmp_path: Path, copied: bool) -> None:
    with pytest.raises(AssertionError, match="neither old nor new"):
        wrong(open_deaf, reading={}, copied=copied).test_kill_at_every_call(tmp_path / "d", "rows", "default")


@either
def test_what_the_dead_leave(tmp_path: Path, copied: bool) -> None:
    with pytest.raises(AssertionError, match="what a dead writer left stays"):
        wrong(open_littering, copied=copied).test_kill_at_every_call(tmp_path / "d", "save", "default")


@either
def test_a_first_save_that_is_no_single_step(tmp_path: Path, copied: bool) -> None:
    with pytest.raises(AssertionError, match="no store is there, or a whole one"):
        wrong(open_in_two_steps, copied=copied).test_kill_a_first_save(tmp_path / "d")


class Objects(CrashTests):
    """A folder of objects, which a save changes and does not replace."""

    caps = wrong_bytestore.ByteStore.caps
    steps = {"rows": 3, "save": 3}
    open = staticmethod(wrong_bytestore.open_bytes)


class LeavesObjects(wrong_bytestore.ByteStore):
    """Removes what it put itself, and nothing of those that died."""

    def _tidy(self) -> None:
        gone = self._mine - {blob.key for blob in self._blobs.values()}
        gone |= {blob.key for blob in self._saved.values() if blob not in self._blobs.values()} - {None}
        for key in gone:
            self._fs.rm_file(f"{self._root}/{key}")


def open_leaving(location: str, *, mode: Any = "r") -> Store:
    fs, root = fsspec.core.url_to_fs(location)
    there = fs.exists(f"{root}/MANIFEST")
    store = LeavesObjects(location, fs, root, writable=mode != "r", load=there)
    store._blobs = {} if mode == "w" else store._blobs
    return store


def test_what_the_dead_leave_inside(tmp_path: Path) -> None:
    Objects().test_kill_at_every_call(tmp_path / "right" / "d", "save", "default")
    with pytest.raises(
        AssertionError, match=r"stays when the next one has saved, inside of it: \d+ files instead of 1"
    ):
        type("Wrong", (Objects,), {"open": staticmethod(open_leaving)})().test_kill_at_every_call(
            tmp_path / "wrong" / "d", "save", "default"
        )


class Files(CrashTests):
    open = staticmethod(wrong_files.OPENERS["SqliteStore"])
    caps = wrong_files.SqliteStore.caps
    durable = {}
    traced_kills = 30

    def strays(self, location: Path) -> list[str]:
        return []


def wrong_file(name: str) -> CrashTests:
    return type("Wrong", (Files,), {"open": staticmethod({**wrong_files.OPENERS, **wrong_modes.OPENERS}[name])})()


@pytest.mark.parametrize("work", ["rows", "structure"])
def test_a_right_file_passes(tmp_path: Path, work: str) -> None:
    Files().test_kill_at_every_call(tmp_path / "d", work, "default")
    Files().test_kill_at_system_calls(tmp_path / "d", work)
    Files().test_syncs(tmp_path / "d", "save")
    Files().test_syncs(tmp_path / "d", "structure")


def test_data_and_header_in_two_commits(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="the leaves are the new ones and the header is the old one"):
        wrong_file("TwoCommits").test_kill_at_every_call(tmp_path / "d", "structure", "default")


@pytest.mark.parametrize("work", ["rows"])
def test_each_write_is_a_commit(tmp_path: Path, work: str) -> None:
    with pytest.raises(AssertionError, match="neither old nor new: not the old ones: leaf 'a': "):
        wrong_file("WriteCommits").test_kill_at_every_call(tmp_path / "d", work, "default")


def test_published_by_a_copy_at_every_call(tmp_path: Path) -> None:
    """Nobody named the function that copies: it is found."""
    with pytest.raises(AssertionError, match=r"'corrupt': \d+.*and `outcomes` says \['new', 'old'\]"):
        wrong_file("CopiesToPublish").test_kill_at_every_call(tmp_path / "d", "save", "default")


def test_functions_are_found_by_tracing(tmp_path: Path) -> None:
    """In C and in Python, in a thread of Python, and by the name that wrapping needs."""

    def work() -> None:
        os.mkdir(tmp_path / "folder")
        (tmp_path / "file").write_text("x")
        thread = threading.Thread(target=os.rename, args=(tmp_path / "file", tmp_path / "other"))
        thread.start()
        thread.join()

    needs_strace()
    found = find_points(work)
    assert {name: len(calls) for name, calls in found.items()} == {
        "posix.mkdir": 1,
        "io.open": 1,
        "_io.TextIOWrapper.__exit__": 1,
        "posix.rename": 1,
    }
    assert point_name(os.mkdir) == "posix.mkdir"


def test_published_by_a_copy(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"killed at call \d+ of \d+, \w+: (the store is 'corrupt'|neither)"):
        wrong_file("CopiesToPublish").test_kill_at_system_calls(tmp_path / "d", "save")


def test_no_rollback_journal(tmp_path: Path) -> None:
    with pytest.raises(
        AssertionError, match=r"killed at call \d+ of \d+, \w+: (the store is 'corrupt'|neither old nor new)"
    ):
        wrong_file("NoJournal").test_kill_at_system_calls(tmp_path / "d", "rows")


@pytest.mark.parametrize("work", ["save", "structure"])
def test_no_sync(tmp_path: Path, work: str) -> None:
    with pytest.raises(AssertionError, match="nothing is synced: the power may take a commit"):
        wrong_file("NoSync").test_syncs(tmp_path / "d", work)


@pytest.mark.parametrize("name", ["IgnoresFailedSync", "SyncsAgain"])
@pytest.mark.parametrize("traceable", [True, False])
def test_an_error_of_a_sync_is_swallowed(
    tmp_path: Path, name: str, traceable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if traceable:
        needs_strace()
    for module in (crash, syncs):
        monkeypatch.setattr(module, "is_traceable", lambda: traceable)
    with pytest.raises(AssertionError, match=r"fsync number \d+, of '.*d.*', failed with EIO, and no error was raised"):
        wrong_file(name).test_failing_syncs(tmp_path / "d", "structure")


def test_errors_of_syncs_of_a_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SQLite reports them. Without strace they are not seen, which one line says."""
    needs_strace()
    Files().test_failing_syncs(tmp_path / "d", "structure")
    for module in (crash, syncs):
        monkeypatch.setattr(module, "is_traceable", lambda: False)
    with pytest.raises(pytest.skip.Exception, match="no sync is made from Python, and strace is not installed"):
        Files().test_failing_syncs(tmp_path / "e", "structure")


def test_a_sync_that_comes_too_late(tmp_path: Path) -> None:
    file = tmp_path / "x"

    def work() -> None:
        with open(file, "wb") as opened:
            opened.write(b"x" * 10)
            opened.flush()
            os.rename(file, tmp_path / "y")
            os.fsync(opened.fileno())

    needs_strace()
    _, calls = traced(work)
    (fault,) = unsynced(calls, tmp_path)
    assert fault == f"{file} is published as {tmp_path / 'y'} after 1 writes, and no sync between them"


def test_points_that_are_never_reached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without strace, the functions that the class names are all that there are."""
    monkeypatch.setattr(crash, "is_traceable", lambda: False)
    with pytest.raises(AssertionError, match="does not see this storage"):
        wrong(open_memmap, points=[(os, "getcwd")]).test_kill_at_every_call(tmp_path / "d", "save", "default")


def test_a_writer_that_fails_by_itself(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The reason is shown, and no death."""
    assert in_child(lambda: 1 / 0) == 1
    assert "ZeroDivisionError" in capfd.readouterr().err


class Recording(CountingStore):
    """A store that notes the indices of writes."""

    def write(self, writes):
        self.indices = [*getattr(self, "indices", []), *(w.index for w in writes)]
        super().write(writes)


@pytest.mark.parametrize("whole", [True, False])
def test_works_use_declared_abilities_only(tmp_path, whole):
    """A backend that writes whole leaves, and cannot resize, is killed too."""
    kit = Memmap()
    kit.caps = MemmapStore.caps & ~(Cap.PARTIAL_WRITE | Cap.RESIZE) if whole else MemmapStore.caps
    save_leaves(open_memmap, str(tmp_path / "store"), crash.OLD)
    with Recording(open_memmap(str(tmp_path / "store"), mode="r+")) as store:
        kit.rows(store)
        assert (() in store.indices) == whole
        assert (len(store.indices) == len(crash.NEW)) == whole
        kit.structure(store)
        assert store.calls["resize"] == (0 if whole else 1)


# -- full disks ------------------------------------------------------------------------------
def test_a_write_through_a_mapping_that_finds_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process is ended by a signal, and the kit goes on."""

    def through_a_mapping(self: LeafWriter, leaf: Any, value: Any) -> None:
        faulthandler.disable()  # nobody wants to see it
        map_fd(self.fd(leaf), leaf.shape, leaf.dtype, shared=True).copy_(value)

    monkeypatch.setattr(LeafWriter, "reserve", lambda *_: None)
    monkeypatch.setattr(LeafWriter, "_write_whole", through_a_mapping)
    with small_disk(tmp_path / "disk", 2) as disk:
        with pytest.raises(AssertionError, match="ended by SIGBUS: a write through a mapping found no room"):
            Memmap().test_full_disk_in_place(disk, tmp_path / "d", "default")


class KeepsHalf(wrong_files.SqliteStore):
    """Spills one value of a `write` after the other, and leaves those before a refusal."""

    def write(self, writes: Any) -> None:
        with open(f"{self.url}.spill", "wb", buffering=0) as file, io_errors(self.url, "writing"):
            for w in writes:
                write_at(file.fileno(), memoryview(to_numpy(w.value).tobytes()), 0)
                super().write([w])


def test_half_of_a_write_on_a_full_disk(tmp_path: Path) -> None:
    class Wrong(Files):
        open = staticmethod(lambda location, *, mode="r": wrong_files.opening(KeepsHalf, location, mode))

    with small_disk(tmp_path / "disk", 2) as disk:
        with pytest.raises(AssertionError, match="(?s)a write of three leaves on a full disk .*: leaf 'a': 4000 of"):
            Wrong().test_full_disk_in_place(disk, tmp_path / "d", "default")
