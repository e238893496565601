"""Versions as users see them: `commit(message=)`, `versions`, `open(version=|tag=|at=)`, `tag` and `prune`."""

from __future__ import annotations

import pickle
import uuid
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import torch

import tdstore
from tdstore import TensorDict
from tdstore.errors import (
    InvalidArgumentError,
    InvalidStateError,
    InvalidTypeError,
    OptionError,
    ReadOnlyError,
    StoreNotFoundError,
    UnsupportedError,
)


@pytest.fixture
def place(tmp_path):
    """A dataset of the object layout with three versions; `a[0]` is 0, 1 and 2 in them."""
    location = f"file://{tmp_path}/run"
    with TensorDict({"a": torch.zeros(3), "text": ["x", "y", "z"]}, [3]).save(location) as td:
        for value in range(3):
            td[0:1] = TensorDict({"a": torch.tensor([float(value)]), "text": [f"row {value}"]}, [1])
            assert td.commit(message=f"step {value}") is td
        td.append({"a": torch.tensor(9.0), "text": "last"})
    return location


def test_versions_are_listed_and_opened(place):
    found = tdstore.versions(place)
    assert [(v.message, v.rows, v.tags) for v in found] == [(f"step {i}", 3, ()) for i in range(3)]
    for value, version in enumerate(found):
        with tdstore.open(place, version=version.id) as td:
            assert td["a"].tolist() == [value, 0, 0]
            assert td["text"][0] == f"row {value}"
        assert tdstore.open(place, at=version.time)["a"][0] == value
    assert tdstore.open(place, at=datetime.now())["a"][0] == 2  # noqa: DTZ005  # naive times are local ones
    assert len(tdstore.open(place)) == 4
    assert TensorDict.load(place, version=found[1].id)["a"][0] == 1


def test_tags_name_versions(place):
    first = tdstore.versions(place)[0]
    tdstore.tag(place, "first", first.id)
    tdstore.tag(place, "newest")
    assert [v.tags for v in tdstore.versions(place)] == [("first",), (), ("newest",)]
    assert tdstore.open(place, tag="first")["a"][0] == 0
    tdstore.untag(place, "first")
    with pytest.raises(StoreNotFoundError, match=r"no version with the tag 'first'\n.*its tags are 'newest'"):
        tdstore.open(place, tag="first")
    for name, error in (("", InvalidArgumentError), (7, InvalidTypeError)):
        with pytest.raises(error, match="a tag"):
            tdstore.tag(place, name)


def test_a_pickled_handle_and_refresh_stay_at_the_version(place):
    version = tdstore.versions(place)[1]
    td = tdstore.open(place, version=version.id)
    assert pickle.loads(pickle.dumps(td))["a"][0] == 1
    assert td.refresh_()["a"][0] == 1


def test_prune_spares_what_it_is_told_to(place):
    ids = [v.id for v in tdstore.versions(place)]
    assert tdstore.prune(place) == []
    assert tdstore.prune(place, older_than=timedelta(hours=1)) == []
    assert tdstore.prune(place, keep=3) == []
    tdstore.tag(place, "first", ids[0])
    assert [v.id for v in tdstore.prune(place, keep=1, older_than=0, grace=0)] == ids[1:2]
    assert [v.id for v in tdstore.versions(place)] == [ids[0], ids[2]]
    with pytest.raises(StoreNotFoundError, match="has no version"):
        tdstore.open(place, version=ids[1])
    for options in ({"keep": -1}, {"older_than": -1.0}, {"keep": 1, "grace": -1}):
        with pytest.raises(InvalidArgumentError, match="must not be negative"):
            tdstore.prune(place, **options)


def test_what_cannot_be_opened_is_refused(place):
    version = tdstore.versions(place)[0]
    with pytest.raises(ReadOnlyError, match=r"never changes\n.*tdstore.copy"):
        tdstore.open(place, mode="r+", version=version.id)
    with pytest.raises(OptionError, match="not by several"):
        tdstore.open(place, version=version.id, tag="x")
    with pytest.raises(StoreNotFoundError, match="no version as old as"):
        tdstore.open(place, at=datetime(2000, 1, 1, tzinfo=UTC))
    for options in ({"at": "yesterday"}, {"version": 3}):
        with pytest.raises(InvalidTypeError):
            tdstore.open(place, **options)


def test_commit_refuses_messages_that_are_none(place):
    with tdstore.open(place, mode="r+") as td:
        with pytest.raises(InvalidTypeError, match="message"):
            td.commit(message=7)
        with pytest.raises(InvalidArgumentError, match="message"):
            td.commit(message="x" * 100_000)
        with pytest.raises(InvalidStateError, match="transaction"), td.transaction():
            td.commit(message="in the middle")
    assert len(tdstore.versions(place)) == 3


def test_a_deleted_dataset_leaves_nothing_of_its_versions(place, tmp_path):
    tdstore.delete(place)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("where", "named"),
    [
        ("{}/run", "'memmap' backend has none"),
        ("{}/run.tdz", "'tdz' backend has none"),
        ("{}/run.h5", "'h5' backend has none"),
        ("{}/run.zarr", "'zarr' backend has none"),
        ("file://{}/run.zarr", r"zarr(.|\n)*'remote' backend (has none there|reads it as zarr)"),
        ("shm://versions-{}", "'shared' backend has none"),
    ],
)
def test_backends_without_versions_say_what_to_do(tmp_path, where, named):
    """The error names backend and remedy, and the dataset stays as it is and can be used."""
    place = where.format(uuid.uuid4().hex if where.startswith("shm") else tmp_path)
    remedy = rf"{named}(.|\n)*tdstore.copy"
    with TensorDict({"a": torch.zeros(3)}, [3]).save(place) as td:
        td.set_at_("a", torch.ones(1), slice(1))
        with pytest.raises(UnsupportedError, match=remedy):
            td.commit(message="a version")
        td.commit()
    for attempt in (
        lambda: tdstore.versions(place),
        lambda: tdstore.prune(place, keep=1),
        lambda: tdstore.tag(place, "x"),
        lambda: tdstore.open(place, version="x"),
        lambda: tdstore.open(place, tag="x"),
        lambda: tdstore.open(place, at=datetime.now(UTC)),
    ):
        with pytest.raises(UnsupportedError, match=remedy):
            attempt()
    assert tdstore.open(place)["a"].tolist() == [1, 0, 0]
    tdstore.delete(place)


def test_a_version_of_the_list_names_itself(tmp_path: Path) -> None:
    place = f"file://{tmp_path}/x"
    with TensorDict({"a": torch.zeros(3)}, [3]).save(place) as td:
        td.commit(message="zeros")
        td.set_at_("a", torch.ones(3), slice(None))
        td.commit(message="ones")
    first, _ = tdstore.versions(place)
    tdstore.tag(place, "start", first)
    for opened in (tdstore.open(place, version=first), tdstore.open(place, tag="start")):
        assert opened["a"].tolist() == [0, 0, 0]
    with pytest.raises(InvalidTypeError, match="not a int") as caught:
        tdstore.open(place, version=0)
    assert "tdstore.versions" in str(caught.value.hint)
