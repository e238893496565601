"""The engine for local files."""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path

import pytest

from tdstore.engine import EngineCap
from tdstore.errors import (
    ConflictError,
    CorruptStoreError,
    MissingDependencyError,
    StoreIOError,
    StoreNotFoundError,
    UnknownBackendError,
    UnsupportedError,
)
from tdstore.index.ranges import Range, RangeInto
from tdstore.registry import Registry
from tdstore.storekit.local_engine import LocalEngine


@pytest.fixture
def engine(tmp_path: Path) -> LocalEngine:
    return LocalEngine(tmp_path / "root", durable=False)


def test_ranges_of_several_objects_in_order(engine: LocalEngine) -> None:
    engine.put("a/b.bin", b"0123456789")
    engine.put("c", b"abc")
    asked = [Range("a/b.bin", 2, 4), Range("c", 0, None), Range("a/b.bin", -3, None), Range("c", 1, 1)]
    assert [bytes(data) for data in engine.get_ranges(asked)] == [b"23", b"abc", b"789", b""]
    assert engine.get_ranges([]) == []
    assert engine.size("a/b.bin") == 10
    assert sorted((e.key, e.size) for e in engine.list()) == [("a/b.bin", 10), ("c", 3)]
    assert [e.key for e in engine.list("a/")] == ["a/b.bin"]


def test_what_is_not_there_is_an_error_never_zeros(engine: LocalEngine) -> None:
    with pytest.raises(StoreNotFoundError):
        engine.get("nothing")
    engine.put("short", b"123")
    with pytest.raises(StoreNotFoundError, match="gone"):
        engine.get_ranges([Range("short", 0, 2), Range("gone", 0, 2)])
    with pytest.raises(CorruptStoreError, match="short ends at byte 3, and bytes up to 8"):
        engine.get_ranges([Range("short", 1, 8)])
    with pytest.raises(CorruptStoreError, match="more than the 2"):
        engine.get("short", limit=2)
    engine.delete(["nothing", "short"])
    assert list(engine.list()) == []


@pytest.mark.parametrize("key", ["../out", "/etc/passwd", "a/../../b", "", "a//b", "a\0b", "."])
def test_no_key_leaves_the_folder(engine: LocalEngine, key: str) -> None:
    engine.put("here", b"")
    with pytest.raises(StoreNotFoundError):
        engine.put(key, b"x")
    with pytest.raises(StoreNotFoundError):
        engine.get(key)


def test_links_are_not_followed(engine: LocalEngine, tmp_path: Path) -> None:
    engine.put("here", b"x")
    (tmp_path / "secret").write_bytes(b"secret")
    os.symlink(tmp_path / "secret", tmp_path / "root" / "link")
    with pytest.raises(CorruptStoreError):
        engine.get("link")


def test_conditions(engine: LocalEngine) -> None:
    assert EngineCap.CONDITIONAL in engine.can
    first = engine.put("m", b"1", if_absent=True)
    assert engine.get("m").tag == first
    with pytest.raises(ConflictError):
        engine.put("m", b"2", if_absent=True)
    second = engine.put("m", b"2", if_match=first)
    with pytest.raises(ConflictError):
        engine.put("m", b"3", if_match=first)
    assert engine.get("m") == (b"2", second)
    engine.delete(["m"])
    with pytest.raises(ConflictError, match="gone"):
        engine.put("m", b"3", if_match=second)


def test_of_many_that_put_on_the_same_condition_one_wins(engine: LocalEngine) -> None:
    tag = engine.put("m", b"0")
    won: list[int] = []

    def rival(number: int) -> None:
        try:
            engine.put("m", b"%d" % number, if_match=tag)
        except ConflictError:
            return
        won.append(number)

    threads = [threading.Thread(target=rival, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    assert engine.get("m").data == b"%d" % won[0]


def test_a_read_only_engine_refuses(tmp_path: Path) -> None:
    engine = LocalEngine(tmp_path, writable=False)
    for change in (lambda: engine.put("a", b""), lambda: engine.delete(["a"])):
        with pytest.raises(UnsupportedError, match="cannot be written to"):
            change()


def test_the_registry_knows_local_urls(tmp_path: Path) -> None:
    engine = Registry().engine(f"file://{tmp_path}")
    engine.put("a", b"1")
    assert (tmp_path / "a").read_bytes() == b"1"
    with pytest.raises((MissingDependencyError, UnknownBackendError)):
        Registry().engine("nosuch://x")


def test_a_folder_that_was_removed_is_not_made_again(tmp_path: Path) -> None:
    engine = LocalEngine(tmp_path / "store")
    engine.put("a", b"1")
    shutil.rmtree(tmp_path / "store")
    with pytest.raises(StoreNotFoundError, match="store"):
        engine.put("a", b"2")
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("durable", [False, True])
def test_objects_are_written_from_parts(tmp_path: Path, durable: bool) -> None:
    engine = LocalEngine(tmp_path / "root", durable=durable)
    many = [bytes([number % 251]) * (number % 3) for number in range(3000)]
    engine.put_parts([("d/a", many), ("e", [memoryview(b"12"), bytearray(b"3")]), ("d/b", [])])
    engine.put_many([("e", b"456"), ("d/c", b"7")])
    assert bytes(engine.get("d/a").data) == b"".join(many)
    assert [bytes(engine.get(key).data) for key in ("e", "d/b", "d/c")] == [b"456", b"", b"7"]
    assert {entry.key for entry in engine.list()} == {"d/a", "d/b", "d/c", "e"}
    assert sum(len(names) for _, _, names in os.walk(engine.root)) == 4, "no file is left over"


def test_a_failed_write_of_several_objects_leaves_whole_ones_only(
    engine: LocalEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.put_many([("d/a", b"old"), ("d/b", b"old")])
    rename, calls = os.rename, iter([False, True])

    def full(*args: object, **kwargs: object) -> None:
        if next(calls):
            raise OSError(28, "No space left on device")
        rename(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "rename", full)
    with pytest.raises(StoreIOError, match="cannot write"):
        engine.put_many([("d/a", b"new"), ("d/b", b"new")])
    monkeypatch.undo()
    assert [bytes(engine.get(key).data) for key in ("d/a", "d/b")] == [b"new", b"old"]
    assert sorted(os.listdir(os.path.join(engine.root, "d"))) == ["a", "b"]


def test_a_range_is_read_into_memory(engine: LocalEngine) -> None:
    engine.put("a", b"0123456789")
    into = bytearray(4)
    asked = [Range("a", 0, 2), RangeInto.make("a", 3, memoryview(into))]
    assert [bytes(data) for data in engine.get_ranges(asked)] == [b"01", b"3456"]
    assert into == b"3456"
    with pytest.raises(CorruptStoreError, match="ends at byte 10, and bytes up to 12"):
        engine.get_ranges([RangeInto.make("a", 8, memoryview(into))])
