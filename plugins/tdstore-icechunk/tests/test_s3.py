"""Repositories in a bucket: found by the suffix of their URL, with versions, conflicts and removal."""

from __future__ import annotations

import pickle
import uuid
from typing import Any

import pytest
import torch
from tdstore_icechunk.store import open_icechunk

import tdstore
from tdstore import TensorDict
from tdstore.errors import (
    ConflictError,
    OptionError,
    StoreError,
    StoreExistsError,
    StoreNotFoundError,
    UnsupportedError,
)
from tdstore.header import Group, Header
from tdstore.types import LeafSpec, Write
from tests.servers import S3Server


class Bucket:
    """A place for one repository."""

    def __init__(self, server: S3Server) -> None:
        self.server = server
        self.url = f"{server.url}/{uuid.uuid4().hex[:12]}/t.icechunk"
        self.options: dict[str, Any] = {"storage_options": server.fsspec_options}

    def keys(self) -> list[str]:
        prefix = self.url.removeprefix(f"{self.server.url}/") + "/"
        found = self.server.client().list_objects_v2(Bucket=self.server.bucket, Prefix=prefix).get("Contents", [])
        return sorted(item["Key"].removeprefix(prefix) for item in found)


@pytest.fixture
def bucket(s3: S3Server) -> Bucket:
    return Bucket(s3)


def test_a_repository_in_a_bucket(bucket: Bucket) -> None:
    """Saved, changed and read by its URL alone; `storage=` need not be named."""
    rows = {"x": torch.arange(40.0).reshape(10, 4), "s": [f"row {i}" for i in range(10)]}
    td = TensorDict(rows, [10]).save(bucket.url, **bucket.options)
    td.commit(message="first")
    td[3:5] = {"x": torch.zeros(2, 4), "s": ["a", "b"]}
    td.extend({"x": torch.ones(2, 4), "s": ["c", "d"]})
    td.commit(message="second").close()
    assert {key.partition("/")[0] for key in bucket.keys()} <= {
        "refs",
        "snapshots",
        "manifests",
        "chunks",
        "transactions",
    }
    with tdstore.open(bucket.url, **bucket.options) as td:
        assert td.batch_size == (12,)
        assert td[[11, 3, 0]]["x"].sum(1).tolist() == [4, 0, 6]
        assert td["s"][3:5] == ["a", "b"]
    first, _ = tdstore.versions(bucket.url, **bucket.options)
    tdstore.tag(bucket.url, "begin", first.id, **bucket.options)
    old = tdstore.open(bucket.url, tag="begin", **bucket.options)
    assert old.batch_size == (10,)
    assert old["s"][3:5] == ["row 3", "row 4"]
    assert tdstore.open(bucket.url, at=first.time, **bucket.options).batch_size == (10,)
    assert tdstore.prune(bucket.url, keep=0, grace=0, **bucket.options)[0].message == "second"
    assert tdstore.open(bucket.url, **bucket.options).batch_size == (12,)


def test_two_writers(bucket: Bucket) -> None:
    TensorDict({"x": torch.zeros(10)}, [10]).save(bucket.url, **bucket.options).close()
    with (
        tdstore.open(bucket.url, mode="r+", **bucket.options) as one,
        tdstore.open(bucket.url, mode="r+", **bucket.options) as two,
    ):
        one[0] = {"x": torch.tensor(1.0)}
        two[1] = {"x": torch.tensor(2.0)}
        one.commit()
        with pytest.raises(ConflictError, match=r"t\.icechunk"):
            two.commit()
    assert tdstore.open(bucket.url, **bucket.options)["x"].tolist() == [1] + [0] * 9


def test_what_is_not_committed_leaves_nothing(bucket: Bucket) -> None:
    opened = open_icechunk(bucket.url, mode="w", **bucket.options)
    opened.create({("x",): LeafSpec((1000, 100), "float32")})
    opened.write([Write(("x",), (), torch.rand(1000, 100))])
    opened.flush()
    assert any(key.startswith("chunks/") for key in bucket.keys())
    assert not tdstore.exists(bucket.url, **bucket.options)
    opened.close()
    assert bucket.keys() == []


def test_a_save_that_was_given_up_takes_nothing_from_another(bucket: Bucket) -> None:
    """The repository was made by the first of two new writers: it stays when the other one has committed."""
    first = open_icechunk(bucket.url, mode="w", **bucket.options)
    TensorDict({"x": torch.ones(3)}, [3]).save(bucket.url, **bucket.options).close()
    first.close()
    assert tdstore.open(bucket.url, **bucket.options)["x"].tolist() == [1, 1, 1]


def test_a_writer_of_a_repository_that_was_given_up_is_told(bucket: Bucket) -> None:
    """Its maker removes it: what the other one commits afterwards would have no history, and perhaps no chunks."""
    first, second = (open_icechunk(bucket.url, mode="w", **bucket.options) for _ in range(2))
    second.create({("x",): LeafSpec((3,), "float32")})
    first.close()
    with pytest.raises(StoreError, match=r"t\.icechunk"):
        second.save_header(Header({(): Group(batch_size=(3,))}))
    second.close()
    assert not tdstore.exists(bucket.url, **bucket.options)
    TensorDict({"x": torch.ones(3)}, [3]).save(bucket.url, **bucket.options).close()
    assert tdstore.open(bucket.url, **bucket.options)["x"].tolist() == [1, 1, 1]


def test_secrets_are_not_pickled(bucket: Bucket) -> None:
    TensorDict({"x": torch.zeros(3)}, [3]).save(bucket.url, **bucket.options).close()
    for storage in (None, "icechunk"):
        options = {**bucket.options["storage_options"], "secret": "not-to-be-seen"}
        td = tdstore.open(bucket.url, storage=storage, storage_options=options)
        assert b"not-to-be-seen" not in pickle.dumps(td)


def test_exists_and_delete(bucket: Bucket) -> None:
    assert not tdstore.exists(bucket.url, **bucket.options)
    TensorDict({"x": torch.zeros(10)}, [10]).save(bucket.url, **bucket.options).close()
    assert tdstore.exists(bucket.url, **bucket.options)
    above = bucket.url.rpartition("/")[0]
    for place in (above, bucket.url):
        assert list(tdstore.list_datasets(place, **bucket.options)) == [bucket.url]
    key = bucket.url.removeprefix(f"{bucket.server.url}/") + "/notes.txt"
    bucket.server.client().put_object(Bucket=bucket.server.bucket, Key=key, Body=b"mine")
    with pytest.raises(StoreExistsError, match=r"notes\.txt"):
        tdstore.delete(bucket.url, **bucket.options)
    bucket.server.client().delete_object(Bucket=bucket.server.bucket, Key=key)
    tdstore.delete(bucket.url, **bucket.options)
    assert bucket.keys() == []
    with pytest.raises(StoreNotFoundError):
        tdstore.open(bucket.url, **bucket.options)


def test_options_that_icechunk_has_not(bucket: Bucket) -> None:
    with pytest.raises(OptionError, match="profile"):
        tdstore.open(bucket.url, storage_options={**bucket.server.fsspec_options, "profile": "work"})
    with pytest.raises(UnsupportedError, match="gs"):
        tdstore.open("gs://bucket/x.icechunk")
