"""Datasets behind URLs: listed by the names of objects, moved, and deleted with their own objects only."""

from __future__ import annotations

from collections.abc import Hashable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path as FsPath
from typing import Any

import pytest
import torch
from remotehelp import name, same, sample
from tdstore_remote.engines import conditional_puts
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


def test_a_build_probes_the_bucket_once_and_removes_what_killed_probes_left(
    s3: S3Server, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    known: dict[Hashable, conditional_puts.Conditions] = {}
    probes: list[int] = []
    probe = conditional_puts.probe

    def counted(*requests: Any) -> conditional_puts.Conditions:
        probes.append(1)
        return probe(*requests)

    def killed_in_a_probe(numbers: list[int]) -> tdstore.TensorDict:
        left = f"{prefix}/{conditional_puts.FOLDER}{numbers[0]}"
        s3.client().put_object(Bucket=s3.bucket, Key=left, Body=b"1")
        return tdstore.TensorDict({"x": torch.tensor(numbers)}, [len(numbers)])

    monkeypatch.setattr(conditional_puts, "_found", known)
    monkeypatch.setattr(conditional_puts, "probe", counted)
    base = f"{s3.url}/{(prefix := name())}"
    # A thread that knows nothing yet stands for a new process.
    with ThreadPoolExecutor(1, initializer=known.clear) as executor:
        td = tdstore.build(base, killed_in_a_probe, range(6), rows_per_task=2, executor=executor, **options)
    assert td["x"].tolist() == list(range(6))
    assert probes == [1]
    assert {key.partition("/")[0] for key in keys(s3, f"{prefix}/")} == {"data", "tdstore.json"}
    td.close()

    s3.client().put_object(Bucket=s3.bucket, Key=f"{prefix}/{conditional_puts.FOLDER}left", Body=b"1")
    tdstore.delete(base, **options)
    assert keys(s3, f"{prefix}/") == set()
