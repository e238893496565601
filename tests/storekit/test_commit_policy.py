"""The commit policy: which steps of a writer its end takes, in which order, and what a dead writer left."""

from __future__ import annotations

import gc
import itertools
import os
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from tdstore import TensorDict, lifetime
from tdstore.errors import DirtyStoreError, StoreIOError
from tdstore.storekit import WriterState, WriterSteps, accept_dirty, commit_for_readers, end_writer, session

HERE = os.getpid()


@dataclass
class Recorded(WriterSteps):
    """A writer whose steps are recorded; those in `refused` raise."""

    now: WriterState
    refused: tuple[str, ...] = ()
    calls: list[str] = field(default_factory=list)

    def step(self, name: str) -> None:
        self.calls.append(name)
        if name in self.refused:
            raise StoreIOError(f"{name} was refused")

    def state(self) -> WriterState:
        return self.now

    def drop_structure(self) -> None:
        self.step("drop_structure")
        self.now = self.now._replace(structure=False)

    def commit_rows(self) -> None:
        self.step("commit_rows")
        self.now = self.now._replace(rows=False)

    def unmark(self) -> None:
        self.step("unmark")

    def take_back(self) -> None:
        self.step("take_back")

    def remove_uncommitted(self) -> None:
        self.step("remove_uncommitted")

    def release(self) -> None:
        self.step("release")


def writer(*refused: str, pid: int = HERE, writable: bool = True, published: bool = True, **more: bool) -> Recorded:
    return Recorded(WriterState(pid, writable, published, **more), refused)


def ended(steps: Recorded, **options: bool) -> list[str]:
    end_writer(steps, **options)
    return steps.calls


def test_rows_are_committed():
    assert ended(writer(rows=True)) == ["commit_rows", "remove_uncommitted", "release"]


def test_structure_is_dropped_before_rows_are_committed():
    assert ended(writer(rows=True, structure=True)) == [
        "drop_structure",
        "commit_rows",
        "remove_uncommitted",
        "release",
    ]


def test_structure_alone_is_dropped():
    assert ended(writer(structure=True)) == ["drop_structure", "unmark", "remove_uncommitted", "release"]


def test_rows_that_went_with_the_structure_are_not_committed():
    steps = writer(rows=True, structure=True)
    steps.drop_structure = lambda: setattr(steps, "now", steps.now._replace(rows=False, structure=False))
    assert ended(steps) == ["unmark", "remove_uncommitted", "release"]


def test_without_changes_others_may_write():
    assert ended(writer()) == ["unmark", "remove_uncommitted", "release"]


@pytest.mark.parametrize(
    "unwanted",
    [{"published": False}, {"lost": True}],
    ids=["never committed", "lost its place"],
)
def test_nothing_is_committed(unwanted):
    assert ended(writer(rows=True, structure=True, **unwanted)) == ["remove_uncommitted", "release"]


def test_dropped_changes_are_not_committed():
    assert ended(writer(rows=True), keep=False) == ["remove_uncommitted", "release"]


def test_a_reader_is_released():
    assert ended(writer(rows=True, structure=True, writable=False)) == ["release"]


def test_a_forked_child_releases_and_removes_nothing():
    every = itertools.product([False, True], repeat=5)
    for writable, published, structure, rows, lost in every:
        state = WriterState(HERE + 1, writable, published, structure, rows, lost)
        assert ended(Recorded(state)) == ["release"], state


def test_a_refused_commit_is_taken_back_and_raised():
    steps = writer("commit_rows", rows=True)
    with pytest.raises(StoreIOError, match="commit_rows"):
        end_writer(steps)
    assert steps.calls == ["commit_rows", "take_back", "remove_uncommitted", "release"]


def test_a_refused_removal_of_structure_commits_nothing():
    steps = writer("drop_structure", rows=True, structure=True)
    with pytest.raises(StoreIOError, match="drop_structure"):
        end_writer(steps)
    assert steps.calls == ["drop_structure", "take_back", "remove_uncommitted", "release"]


def test_the_error_of_the_commit_is_the_one_raised():
    steps = writer("commit_rows", "take_back", rows=True)
    with pytest.raises(StoreIOError, match="commit_rows"):
        end_writer(steps)
    assert steps.calls == ["commit_rows", "take_back", "remove_uncommitted", "release"]


def test_all_is_released_where_nothing_can_be_removed():
    steps = writer("remove_uncommitted", published=False)
    with pytest.raises(StoreIOError, match="remove_uncommitted"):
        end_writer(steps)
    assert steps.calls == ["remove_uncommitted", "release"]


# -- for others that are about to open the place ---------------------------------------------
def test_readers_see_rows():
    steps = writer(rows=True)
    assert commit_for_readers(steps)
    assert steps.calls == ["commit_rows"]


def test_readers_see_no_half_of_a_structure():
    steps = writer(rows=True, structure=True)
    assert not commit_for_readers(steps)
    assert steps.calls == []


def test_a_new_store_has_nothing_for_readers():
    steps = writer(rows=True, published=False)
    assert commit_for_readers(steps)
    assert steps.calls == []


# -- what a dead writer left ------------------------------------------------------------------
def test_leaves_of_a_dead_writer_are_refused_by_name():
    with pytest.raises(DirtyStoreError, match="pid 7 ended in the middle of writing 'b'") as raised:
        accept_dirty("place", [("a",), ("b",)], accept=False, damaged=lambda: [("b",)], writer="pid 7")
    assert raised.value.leaves == (("b",),)


def test_without_a_comparison_all_named_leaves_are_refused():
    with pytest.raises(DirtyStoreError) as raised:
        accept_dirty("place", [("a",), ("b",)], accept=False, hint="restore it")
    assert raised.value.leaves == (("a",), ("b",))
    assert raised.value.hint == "restore it"


def test_whole_leaves_are_as_committed():
    assert not accept_dirty("place", [("a",)], accept=False, damaged=list)
    assert not accept_dirty("place", [], accept=False)


def test_accepted_leaves_are_not_compared():
    def compare() -> list[tuple[str, ...]]:
        raise AssertionError("a comparison reads every byte")

    assert accept_dirty("place", [("a",)], accept=True, damaged=compare)


@pytest.mark.parametrize("key", ["a", "ä", "a\nb", "lone \udc80"])
def test_the_log_of_sessions_names_leaves_of_any_name(tmp_path: Path, key: str) -> None:
    root = os.open(tmp_path, os.O_RDONLY)
    try:
        own = session.Session(root, sync=False)
        own.begin(timeout=1.0, url="here")
        own.note([(key,)], [])
        found = session.read_log(root)
        assert found is not None and found.files == [(key,)] and found.own == {own.id} and not found.torn
        own.drop()
    finally:
        os.close(root)


def test_ended_sessions_leave_nothing(tmp_path: Path) -> None:
    """Each folder that a process wrote would be remembered until its end."""
    gc.collect()
    lifetime.settle()
    known = len(session._SESSIONS)
    for number in range(3):
        TensorDict({"a": torch.zeros(3)}, [3]).save(tmp_path / str(number)).close()
    dropped = TensorDict({"a": torch.zeros(3)}, [3]).save(tmp_path / "dropped")
    assert len(session._SESSIONS) == known + 1
    del dropped
    lifetime.settle()
    assert len(session._SESSIONS) == known
