"""The log of a folder's sessions: it stays short where they come and go beside one that stays, and forgets nothing."""

from __future__ import annotations

import errno
import os
import pickle
import time
from pathlib import Path as FsPath
from typing import Any

import pytest
import torch

import tdstore
from tdstore import TensorDict
from tdstore.errors import DirtyStoreError
from tdstore.lifetime import settle
from tdstore.storekit import files, session
from tests.builtin.memmap.support import in_child


def dataset(place: FsPath) -> TensorDict:
    return TensorDict({"x": torch.arange(6.0), "n": {"y": torch.zeros(6, 2)}}, [6]).memmap(place)


def log_of(place: FsPath) -> FsPath:
    return place / "tdstore.session"


def come_and_go(sent: bytes, times: int) -> None:
    for _ in range(times):
        pickle.loads(sent)
        settle()


def test_stays_short(tmp_path: FsPath) -> None:
    td = dataset(tmp_path / "d")
    sent, sizes = pickle.dumps(td), []
    for _ in range(200):
        come_and_go(sent, 1)
        sizes.append(log_of(tmp_path / "d").stat().st_size)
    assert max(sizes) < 6000 and min(sizes[100:]) < 1000
    found = session.read_log(files.open_dir(tmp_path / "d"))
    assert found is not None and len(found.opened) == 1 and not found.torn
    td.close()
    assert not log_of(tmp_path / "d").exists()


def test_names_who_is_open(tmp_path: FsPath) -> None:
    """A log full of sessions that are open is not rewritten; a rewritten one names each of them."""
    td = dataset(tmp_path / "d")
    sent = pickle.dumps(td)
    beside = [pickle.loads(sent) for _ in range(90)]
    before = log_of(tmp_path / "d").read_bytes()
    assert len(before) > session._LONG_LOG
    come_and_go(sent, 2)
    assert log_of(tmp_path / "d").read_bytes().startswith(before)
    come_and_go(sent, 200)
    found = session.read_log(files.open_dir(tmp_path / "d"))
    assert found is not None and len(found.opened) == 91
    for one in beside:
        one.close()
    td.close()
    assert not log_of(tmp_path / "d").exists()


def test_remembers_a_killed_writer(tmp_path: FsPath) -> None:
    """A session whose process was killed stays in the log, so that the next opening compares what it left."""
    td = dataset(tmp_path / "d")
    sent = pickle.dumps(td)

    def killed() -> None:
        pickle.loads(sent)["x"].fill_(7)
        os._exit(0)

    in_child(killed)
    come_and_go(sent, 200)
    assert log_of(tmp_path / "d").stat().st_size < 6000
    td.close()
    found = session.read_log(files.open_dir(tmp_path / "d"))
    assert found is not None and len(found.opened) == 1
    with pytest.raises(DirtyStoreError, match="x"):
        tdstore.open(tmp_path / "d")
    with tdstore.open(tmp_path / "d", "r+", recover="accept") as opened:
        assert opened["x"].tolist() == [7] * 6


def test_remembers_what_was_written(tmp_path: FsPath) -> None:
    td = dataset(tmp_path / "d")
    sent = pickle.dumps(td)

    def writes() -> None:
        opened = pickle.loads(sent)
        opened["n", "y"].fill_(3)
        opened.close()

    in_child(writes)
    come_and_go(sent, 200)
    td.close()
    assert tdstore.verify(tmp_path / "d") == []
    with tdstore.open(tmp_path / "d", verify="full") as opened:
        assert opened["n", "y"].sum() == 36


def test_remembers_files_of_a_commit(tmp_path: FsPath) -> None:
    """What an interrupted commit added is removed by the next writer, also where the log was rewritten after it."""
    td = dataset(tmp_path / "d")
    sent, root = pickle.dumps(td), files.open_dir(tmp_path / "d")
    (own,) = session.own_sessions((os.fstat(root).st_dev, os.fstat(root).st_ino))
    own.note([("n", "z.memmap")], [])
    (tmp_path / "d/n/z.memmap").write_bytes(b"remains")
    come_and_go(sent, 200)
    own._append({"open": "killed", "pid": 1, "host": "elsewhere"})
    td.close()
    tdstore.open(tmp_path / "d", "r+").close()
    assert not (tmp_path / "d/n/z.memmap").exists()


def test_event_that_comes_between(tmp_path: FsPath, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a process cannot open the parent, its events may come while the log is rewritten: they are not lost."""
    td = dataset(tmp_path / "d")
    sent, log = pickle.dumps(td), log_of(tmp_path / "d")
    replace = files.replace_file

    def beside(name: str, parent: int, data: Any, **options: Any) -> None:
        if name == session.NAME:
            with log.open("ab") as file:
                file.write(b'{"open":"beside","pid":1,"host":"elsewhere"}\n')
        replace(name, parent, data, **options)

    monkeypatch.setattr(files, "replace_file", beside)
    come_and_go(sent, 60)
    found = session.read_log(files.open_dir(tmp_path / "d"))
    assert found is not None and "beside" in found.opened
    td.close()


def test_no_room_for_a_shorter_log(tmp_path: FsPath, monkeypatch: pytest.MonkeyPatch) -> None:
    """The long one stays, and a session ends in order all the same."""
    td = dataset(tmp_path / "d")
    sent, replace = pickle.dumps(td), files.replace_file
    full: list[str] = []

    def refused(name: str, parent: int, data: Any, **options: Any) -> None:
        if name == session.NAME:
            full.append(name)
            raise OSError(errno.ENOSPC, "no space left")
        replace(name, parent, data, **options)

    monkeypatch.setattr(files, "replace_file", refused)
    for _ in range(60):
        pickle.loads(sent).close()
    assert full
    td.close()
    assert not log_of(tmp_path / "d").exists()


def test_begins_while_the_log_is_replaced(tmp_path: FsPath, monkeypatch: pytest.MonkeyPatch) -> None:
    """A session that wrote to a log that was replaced meanwhile writes to the new one."""
    td = dataset(tmp_path / "d")
    sent, log, append, times = pickle.dumps(td), log_of(tmp_path / "d"), files.append, []

    def late(fd: int, data: bytes) -> None:
        if not times:
            lines = log.read_bytes()
            log.unlink()
            log.write_bytes(lines)
        times.append(data)
        append(fd, data)

    monkeypatch.setattr(files, "append", late)
    opened = pickle.loads(sent)
    assert times[0] == times[1] and log.read_bytes().endswith(times[0])
    opened.close()
    td.close()
    assert not log.exists()


def test_commit_waits_for_the_log_of_now(tmp_path: FsPath, monkeypatch: pytest.MonkeyPatch) -> None:
    """A commit that waited for the lock of a log that was replaced takes that of the new one."""
    td, log, lock, waited = dataset(tmp_path / "d"), log_of(tmp_path / "d"), files.lock, []

    def late(fd: int, **options: Any) -> None:
        if options.get("what") == "the log" and not waited:
            lines = log.read_bytes()
            log.unlink()
            log.write_bytes(lines)
            waited.append(os.fstat(fd).st_ino)
        lock(fd, **options)

    monkeypatch.setattr(files, "lock", late)
    with tdstore.open(tmp_path / "d", "r+") as opened:
        opened["z"] = torch.ones(6)
        opened.commit()
    assert waited
    td.close()
    assert tdstore.verify(tmp_path / "d") == []


def test_end_beside_another_session_does_not_wait(tmp_path: FsPath, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that ends waits for readers, which hold the folder for a moment; not for sessions."""
    td = dataset(tmp_path / "d")
    sent, waits = pickle.dumps(td), []
    monkeypatch.setattr(time, "sleep", waits.append)
    come_and_go(sent, 3)

    def ends() -> None:
        pickle.loads(sent).close()
        assert waits == []

    in_child(ends)
    assert waits == []
    probe = os.open(tmp_path / "d", os.O_RDONLY)
    assert files.try_lock(probe, exclusive=False)
    monkeypatch.setattr(time, "sleep", lambda seconds: files.unlock(probe))
    td.close()
    assert not log_of(tmp_path / "d").exists()
    os.close(probe)
