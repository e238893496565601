"""Datasets behind URLs: listed by the names of objects, moved, and deleted with their own objects only."""

from __future__ import annotations

from pathlib import Path as FsPath
from typing import Any

import pytest
from remotehelp import name, same, sample
from test_formats import upload

import tdstore
from tdstore.errors import ReadOnlyError, StoreExistsError, StoreNotFoundError, UnsupportedError
from tests.servers import S3Server


def keys(s3: S3Server, prefix: str) -> set[str]:
    found = s3.client().list_objects_v2(Bucket=s3.bucket, Prefix=prefix)
    return {entry["Key"][len(prefix) :] for entry in found.get("Contents", [])}


@pytest.fixture
def options(s3: S3Server) -> dict[str, Any]:
    return {"storage_options": s3.fsspec_options}


def test_list_delete_and_move_in_a_bucket(s3: S3Server, options: dict[str, Any], tmp_path: FsPath) -> None:
    base = f"{s3.url}/{(prefix := name())}"
    sample().save(f"{base}/raw", **options).close()
    sample().save(f"{base}/deep/g.zarr", **options).close()
    sample().save(tmp_path / "x.h5").close()
    upload(s3, tmp_path / "x.h5", f"{prefix}/x.h5")
    s3.client().put_object(Bucket=s3.bucket, Key=f"{prefix}/raw.txt", Body=b"mine")
    assert tdstore.list_datasets(base, **options) == [f"{base}/deep/g.zarr", f"{base}/raw", f"{base}/x.h5"]
    assert tdstore.info(f"{base}/raw", **options).batch_size == tuple(sample().batch_size)

    tdstore.delete(f"{base}/deep/g.zarr", **options)
    tdstore.move(f"{base}/raw", tmp_path / "run", src_options=options)
    with pytest.raises(UnsupportedError, match="file behind a URL"):
        tdstore.delete(f"{base}/x.h5", **options)
    assert keys(s3, f"{prefix}/") == {"x.h5", "raw.txt"}
    assert same(tdstore.load(tmp_path / "run"), sample())
    with pytest.raises(StoreNotFoundError):
        tdstore.delete(f"{base}/raw", **options)


def test_a_group_and_objects_of_others_stay(s3: S3Server, options: dict[str, Any]) -> None:
    base = f"{s3.url}/{(prefix := name())}"
    td = tdstore.TensorDict({"n": {"b": sample()}}, [])
    td.save(f"{base}/g.zarr", **options).close()
    before = keys(s3, f"{prefix}/")
    with pytest.raises(UnsupportedError, match="part of what is stored"):
        tdstore.delete(f"{base}/g.zarr/n", storage="zarr", **options)
    s3.client().put_object(Bucket=s3.bucket, Key=f"{prefix}/g.zarr/notes.txt", Body=b"mine")
    with pytest.raises(StoreExistsError, match=r"notes\.txt"):
        tdstore.delete(f"{base}/g.zarr", **options)
    assert keys(s3, f"{prefix}/") == before | {"g.zarr/notes.txt"}
    assert tdstore.exists(f"{base}/g.zarr", **options)


def test_read_only_urls() -> None:
    with pytest.raises(ReadOnlyError, match="read only"):
        tdstore.delete("http://127.0.0.1:9/x")
