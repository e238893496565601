"""An interrupted copy is refused by readers and finished by the same call; one of something else is not touched."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tdstore
from tdstore import TensorDict
from tdstore.errors import DirtyStoreError, OptionError, StoreExistsError
from tdstore.io import partial
from tdstore.io.copying import Checkpoints, StoreReader
from tdstore.types import Path as Key
from tests.conftest import assert_same

FORMS = ["memmap", "h5", "chunked h5"]


class Unplugged(Exception):
    pass


class Wire:
    """Counts the pieces of each leaf that were read, and fails after so many batches."""

    def __init__(self) -> None:
        self.left: int | None = None
        self.read: list[Key] = []

    def fail_after(self, batches: int | None) -> None:
        self.left = batches
        self.read = []


@pytest.fixture
def wire(monkeypatch: pytest.MonkeyPatch) -> Iterator[Wire]:
    wire = Wire()
    real = StoreReader.__call__

    def counted(self: StoreReader, batch: Any, outs: Any) -> Any:
        if wire.left is not None:
            if not wire.left:
                raise Unplugged("the source is gone")
            wire.left -= 1
        wire.read += [path for path, _ in batch]
        return real(self, batch, outs)

    monkeypatch.setattr(StoreReader, "__call__", counted)
    return wire


def data(seed: int = 0) -> TensorDict:
    torch.manual_seed(seed)
    td = TensorDict({"a": torch.randn(40, 100), "n": {"b": torch.arange(400).reshape(40, 10)}}, [40], names=["time"])
    td["n", "why"] = "because"
    td["rows"] = [str(i) for i in range(40)]
    return td


def options(form: str) -> dict[str, Any]:
    if form == "memmap":
        return {"storage": "memmap"}
    return {"storage": "h5"} if form == "h5" else {"storage": "h5", "chunks": 3, "compression": "lzf"}


def begin(src: Path, dst: Path, wire: Wire, after: int = 5, **more: Any) -> int:
    """Copy until the source fails; the number of batches that a copy takes in all."""
    wire.fail_after(after)
    with pytest.raises(Unplugged):
        tdstore.copy(src, dst, block_bytes=1200, checkpoint=0, **more)
    wire.fail_after(None)
    with tdstore.open(dst, recover="accept") as td:
        mark = partial.mark_of(
            td._binding[0].store.load_header() if hasattr(td, "_binding") else td.store.load_header(), ""
        )
    assert mark is not None
    assert mark.done == after
    return mark.of


@pytest.mark.parametrize("source", FORMS)
@pytest.mark.parametrize("target", FORMS)
def test_the_same_call_goes_on_where_it_stopped(tmp_path, wire, source, target):
    td = data()
    td.save(tmp_path / "a", **options(source)).close()
    of = begin(tmp_path / "a", tmp_path / "b", wire, **options(target))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tdstore.copy(tmp_path / "a", tmp_path / "b", block_bytes=1200, **options(target))
    assert of > 8
    assert len(wire.read) == of - 5
    with TensorDict.load(tmp_path / "b", verify="full") as copied:
        assert_same(copied, td)
        assert copied["n", "why"] == "because"
    assert partial.KEY not in tdstore.StoreHandle.open(tmp_path / "b").groups[()].extra
    with pytest.raises(StoreExistsError):
        tdstore.copy(tmp_path / "a", tmp_path / "b", **options(target))


@pytest.mark.parametrize("target", FORMS)
@pytest.mark.parametrize("mode", ["r", "r+", "a"])
def test_readers_and_writers_refuse_it_and_say_what_to_do(tmp_path, wire, target, mode):
    data().save(tmp_path / "a").close()
    begin(tmp_path / "a", tmp_path / "b", wire, **options(target))
    for how in (tdstore.open, tdstore.load):
        with pytest.raises(DirtyStoreError, match=r"incomplete copy of .*: 5 of \d+ blocks") as caught:
            how(tmp_path / "b", mode=mode)
        assert caught.value.leaves == (("a",),)
        assert "tdstore.copy(" in str(caught.value.hint)
    with pytest.raises(DirtyStoreError):
        tdstore.copy(tmp_path / "b", tmp_path / "c")
    with pytest.raises(StoreExistsError):
        data().save(tmp_path / "b", mode="x", **options(target))
    data(7).save(tmp_path / "b", **options(target)).close()
    with TensorDict.load(tmp_path / "b") as replaced:
        assert_same(replaced, data(7))


def test_interrupted_again_and_again(tmp_path, wire):
    td = data()
    td.save(tmp_path / "a").close()
    of = begin(tmp_path / "a", tmp_path / "b.h5", wire, after=1)
    for _ in range(of):
        wire.fail_after(2)
        try:
            tdstore.copy(tmp_path / "a", tmp_path / "b.h5", block_bytes=1200, checkpoint=0)
            break
        except Unplugged:
            assert len(wire.read) == 2
    with TensorDict.load(tmp_path / "b.h5", verify="full") as copied:
        assert_same(copied, td)


def test_what_came_after_the_last_checkpoint_is_kept_when_the_copy_fails(tmp_path, wire, monkeypatch):
    data().save(tmp_path / "a").close()
    # a checkpoint after the first batch, and none that is due later
    monkeypatch.setattr(Checkpoints, "reach", lambda self, done: self.commit(done) if self.saved < 0 else None)
    begin(tmp_path / "a", tmp_path / "b", wire, after=6)


# -- when it is not the same ---------------------------------------------------------------
@pytest.mark.parametrize("form", ["memmap", "h5"])
@pytest.mark.parametrize("change", ["rows", "replaced", "key"])
def test_a_changed_source_is_copied_anew_with_a_warning(tmp_path, wire, form, change):
    data().save(tmp_path / "a", **options(form)).close()
    begin(tmp_path / "a", tmp_path / "b", wire)
    if change == "replaced":
        data(1).save(tmp_path / "a", **options(form)).close()
    else:
        with tdstore.open(tmp_path / "a", mode="r+") as td:
            if change == "rows":
                td[3:5] = td[7:9].to_tensordict()
            else:
                td["new"] = torch.ones(40)
    with pytest.warns(UserWarning, match="cannot be finished: .* was changed since; all is copied anew"):
        tdstore.copy(tmp_path / "a", tmp_path / "b", block_bytes=1200)
    with TensorDict.load(tmp_path / "a") as source, TensorDict.load(tmp_path / "b", verify="full") as copied:
        assert_same(copied, source)


@pytest.mark.parametrize("more", [{"keys": "a"}, {"rules": {"a": {"chunks": 2}}}, {"compression": "gzip"}])
def test_other_options_copy_anew_with_a_warning(tmp_path, wire, more):
    td = data()
    td.save(tmp_path / "a").close()
    begin(tmp_path / "a", tmp_path / "b.h5", wire)
    with pytest.warns(UserWarning, match="begun with other options"):
        tdstore.copy(tmp_path / "a", tmp_path / "b.h5", block_bytes=1200, **more)
    with TensorDict.load(tmp_path / "b.h5", verify="full") as copied:
        assert_same(copied, td.select("a") if "keys" in more else td)


def test_the_block_size_is_that_of_the_first_run(tmp_path, wire):
    data().save(tmp_path / "a").close()
    of = begin(tmp_path / "a", tmp_path / "b", wire)
    tdstore.copy(tmp_path / "a", tmp_path / "b")
    assert len(wire.read) == of - 5


def test_a_partial_copy_of_another_source_is_not_touched(tmp_path, wire):
    data().save(tmp_path / "a").close()
    data(3).save(tmp_path / "other").close()
    of = begin(tmp_path / "a", tmp_path / "b", wire)
    with pytest.raises(StoreExistsError, match="an incomplete copy of .*a\n.*finish it by"):
        tdstore.copy(tmp_path / "other", tmp_path / "b")
    with pytest.raises(StoreExistsError, match="an incomplete copy"):
        tdstore.copy(data(), tmp_path / "b")
    tdstore.copy(tmp_path / "a", tmp_path / "b", mode="w")
    assert len(wire.read) == of - 5, "mode 'w' finishes a copy of the same source"
    begin(tmp_path / "a", tmp_path / "c", wire)
    tdstore.copy(tmp_path / "other", tmp_path / "c", mode="w")
    with TensorDict.load(tmp_path / "c", verify="full") as copied:
        assert_same(copied, data(3))


def test_without_resume_all_is_copied_and_nothing_partial_is_made(tmp_path, wire):
    data().save(tmp_path / "a").close()
    of = begin(tmp_path / "a", tmp_path / "b", wire)
    tdstore.copy(tmp_path / "a", tmp_path / "b", resume=False, block_bytes=1200)
    assert len(wire.read) == of
    wire.fail_after(5)
    with pytest.raises(Unplugged):
        tdstore.copy(tmp_path / "a", tmp_path / "c", resume=False, block_bytes=1200, checkpoint=0)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b"]


@pytest.mark.parametrize("target", FORMS)
def test_a_copy_that_fails_before_its_first_checkpoint_leaves_no_trace(tmp_path, wire, target):
    data().save(tmp_path / "a").close()
    wire.fail_after(5)
    with pytest.raises(Unplugged):
        tdstore.copy(tmp_path / "a", tmp_path / "b", block_bytes=1200, **options(target))
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_an_open_container_is_copied_whole_or_not_at_all(tmp_path, monkeypatch):
    td = data()

    def gone(batch: Any) -> Any:
        raise Unplugged("gone")

    calls = []
    real = type(td)._read_pieces

    def some(self: Any, batch: Any) -> Any:
        calls.append(batch)
        return gone(batch) if len(calls) > 5 else real(self, batch)

    monkeypatch.setattr(type(td), "_read_pieces", some)
    with pytest.raises(Unplugged):
        tdstore.copy(td, tmp_path / "b", block_bytes=1200, checkpoint=0)
    assert not list(tmp_path.iterdir())


def test_a_dataset_that_a_writer_left_dirty_is_never_taken_for_a_partial_copy(tmp_path, wire):
    data().save(tmp_path / "a").close()
    data().save(tmp_path / "b").close()
    (tmp_path / "b" / "tdstore.json").write_bytes(b"TDS1 00000000\n{}")
    with pytest.raises(StoreExistsError):
        tdstore.copy(tmp_path / "a", tmp_path / "b")


def test_checkpoints_take_a_tenth_of_the_time_at_most(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("tdstore.io.copying.time.monotonic", lambda: now[0])
    saved = []

    def save(done: int) -> None:
        saved.append((now[0], done))
        now[0] += 3

    points = Checkpoints(save, 5.0)
    for done in range(100):
        now[0] += 1
        points.reach(done)
    assert [at for at, _ in saved] == [5, 38, 71, 104]
    with pytest.raises(OptionError):
        tdstore.copy("a", "b", checkpoint=-1)
