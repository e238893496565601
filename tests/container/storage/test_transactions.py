"""`with td.transaction()`: one commit at the end, or nothing; and `Store.generation`, by which a refresh is cheap."""

from __future__ import annotations

import contextlib
import pickle

import pytest
import torch

import tdstore
from tdstore import TensorDict
from tdstore.container.storage.growth import place_of
from tdstore.errors import InvalidStateError, ReadOnlyError, UnsupportedError
from tdstore.testing import CountingStore


def handle_of(td):
    return place_of(td)[0]


PLACES = ["t.h5", "t.zarr"]


@pytest.fixture(params=PLACES)
def place(request, tmp_path):
    td = TensorDict({"a": torch.zeros(4, 2), "g": {"b": torch.arange(4)}, "text": "old"}, [4])
    td.save(tmp_path / request.param).close()
    return tmp_path / request.param


def seen(place):
    with tdstore.open(place) as td:
        return td.to_tensordict()


def change(td):
    td[1:3] = td[1:3].to_tensordict().apply(lambda t: t + 1)
    td["new"] = torch.ones(4)
    del td["g", "b"]
    td["a"] = torch.ones(4, 2, dtype=torch.int64)


def test_one_commit_at_the_end(place, monkeypatch):
    before = seen(place)
    with tdstore.open(place, mode="r+") as td:
        handle = handle_of(td)
        handle.store = counting = CountingStore(handle.store)
        with td.transaction() as inside:
            assert inside is td
            change(td)
            assert counting.calls["save_header"] == 0
            assert td["new"].sum() == 4
        assert counting.calls["save_header"] == 1
        assert td["a"].dtype is torch.int64
    after = seen(place)
    assert set(after.keys()) == {"a", "g", "new", "text"}
    assert list(after["g"].keys()) == []
    assert after["a"].tolist() == [[1, 1]] * 4
    assert before["a"].sum() == 0


def test_nothing_where_the_block_raises(place):
    before = seen(place)
    with tdstore.open(place, mode="r+") as td:
        with pytest.raises(ZeroDivisionError), td.transaction():
            change(td)
            raise ZeroDivisionError
        assert sorted(td.keys(True, True), key=str) == sorted(before.keys(True, True), key=str)
        assert (td.to_tensordict() == before).all()
        td["later"] = torch.ones(4)
    assert sorted(seen(place).keys()) == ["a", "g", "later", "text"]


def test_growth_is_taken_back(place):
    before = seen(place)
    with tdstore.open(place, mode="r+") as td:
        with pytest.raises(ZeroDivisionError), td.transaction():
            td.extend(before)
            assert len(td) == 8
            raise ZeroDivisionError
        assert td.batch_size == (4,)
        assert (td.to_tensordict() == before).all()
        with td.transaction():
            td.extend(before)
    assert len(seen(place)) == 8


def test_rows_that_were_written_before_stay(place):
    with tdstore.open(place, mode="r+") as td:
        td[0:1] = td[0:1].to_tensordict().apply(lambda t: t + 5)
        with pytest.raises(ZeroDivisionError), td.transaction():
            td[1:2] = td[1:2].to_tensordict().apply(lambda t: t + 7)
            raise ZeroDivisionError
    assert seen(place)["a"].tolist() == [[5, 5], [0, 0], [0, 0], [0, 0]]


def test_a_failure_that_was_caught_takes_all_back(place):
    before = seen(place)
    with tdstore.open(place, mode="r+") as td:
        with pytest.raises(InvalidStateError, match="all of them are taken back"), td.transaction():
            td["new"] = torch.ones(4)
            handle = handle_of(td)
            with pytest.raises(ZeroDivisionError), handle.changing():
                raise ZeroDivisionError
        assert (td.to_tensordict() == before).all()


def test_one_in_another_is_refused(place):
    with tdstore.open(place, mode="r+") as td, td.transaction():
        with pytest.raises(InvalidStateError, match="open already"), td.transaction():
            raise AssertionError("not reached")
        td["new"] = torch.ones(4)
    assert "new" in seen(place).keys()


CALLS = {
    "td.commit()": lambda td: td.commit(),
    "td.refresh_()": lambda td: td.refresh_(),
    "td.close()": lambda td: td.close(),
    "pickling": pickle.dumps,
    "td.transaction()": lambda td: td["g"].transaction().__enter__(),
    "td[:2].transaction()": lambda td: td[:2].transaction().__enter__(),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("caught", [True, False])
def test_calls_that_would_commit_a_part_are_refused(place, call, caught):
    """Refused, they change nothing: the block goes on, or is taken back whole."""
    with tdstore.open(place, mode="r+") as td:
        with contextlib.suppress(InvalidStateError), td.transaction():
            td["a"] = torch.ones(4, 2)
            td["new"] = torch.ones(4)
            with pytest.raises(InvalidStateError, match="transaction on .* is open") as told:
                CALLS[call](td)
            assert str(place) in str(told.value)
            if not caught:
                raise told.value
            td["a"][0] = 5
        assert ("new" in td.keys()) == caught
    after = seen(place)
    assert ("new" in after.keys()) == caught
    assert after["a"].sum() == (8 if caught else 0)


def test_a_version_inside_is_refused(tmp_path):
    place = f"file://{tmp_path}/t"
    TensorDict({"a": torch.zeros(3)}, [3]).save(place).close()
    before = tdstore.versions(place)
    with tdstore.open(place, mode="r+") as td:
        with td.transaction():
            td["a"] = torch.ones(3)
            with pytest.raises(InvalidStateError, match=r"(?s)td\.commit\(message.* is open.*after the block"):
                td.commit(message="half")
            assert tdstore.versions(place) == before
        td.commit(message="whole")
    assert [version.message for version in tdstore.versions(place)][len(before) :] == ["whole"]


def test_the_file_of_a_library_is_refused_inside(tmp_path):
    TensorDict({"a": torch.zeros(3)}, [3]).save(tmp_path / "t.h5").close()
    with tdstore.open(tmp_path / "t.h5", mode="r+") as td:
        with pytest.raises(ZeroDivisionError), td.transaction():
            td["a"] = torch.ones(3)
            with pytest.raises(InvalidStateError, match=r"td\.file: a transaction on .* is open"):
                td.file  # noqa: B018
            raise ZeroDivisionError
        assert td.file["a"][:].tolist() == [0, 0, 0]


def test_others_see_nothing_until_the_end(place):
    if place.suffix == ".h5":
        pytest.skip("HDF5 keeps readers out while a writer has changed something")
    with tdstore.open(place, mode="r+") as td:
        with td.transaction():
            td["new"] = torch.ones(4)
            assert "new" not in seen(place).keys()
        assert "new" in seen(place).keys()


def test_where_there_are_none(tmp_path):
    td = TensorDict({"a": torch.zeros(3)}, [3])
    with pytest.raises(UnsupportedError, match="not the one over a dataset"), td.transaction():
        raise AssertionError("not reached")
    td.save(tmp_path / "m").close()
    with (
        tdstore.open(tmp_path / "m", mode="r+") as stored,
        pytest.raises(UnsupportedError, match="others see rows as soon as they are written"),
        stored.transaction(),
    ):
        raise AssertionError("not reached")
    td.save(tmp_path / "t.h5").close()
    with tdstore.open(tmp_path / "t.h5") as stored, pytest.raises(ReadOnlyError), stored.transaction():
        raise AssertionError("not reached")


class Numbered(CountingStore):
    """A store that tells its generation."""

    number = 0

    def generation(self):
        return self.number


def test_a_refresh_opens_nothing_where_nobody_committed(place):
    with tdstore.open(place) as td:
        handle = handle_of(td)
        handle.store = store = Numbered(handle.store)
        handle._generation = store.generation()  # as of an earlier refresh
        td.refresh_()
        assert handle.store is store
        store.number = 1
        td.refresh_()
        assert handle.store is not store
        assert td["a"].sum() == 0


def test_a_bucket_is_asked_once(tmp_path):
    """The object layout names its generations in the manifest."""
    place = f"file://{tmp_path}/t"
    TensorDict({"a": torch.zeros(3)}, [3]).save(place).close()
    with tdstore.open(place) as td:
        td.refresh_()
        store = handle_of(td).store
        assert store.generation() is not None
        td.refresh_()
        assert handle_of(td).store is store
        with tdstore.open(place, mode="r+") as other:
            other["a"] = torch.ones(3)
        td.refresh_()
        assert handle_of(td).store is not store
        assert td["a"].sum() == 3
