"""Parquet as input: files, folders and URLs, columns and filters, row groups, tensors, and what is refused."""

from __future__ import annotations

import io
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import tdstore
from tdstore import TensorDict, from_parquet
from tdstore.convert.tables import engine_files, streaming
from tdstore.errors import (
    BatchSizeError,
    CorruptStoreError,
    InvalidArgumentError,
    MismatchError,
    OptionError,
    StoreNotFoundError,
    UnknownBackendError,
)
from tests.servers import S3Server

from .conftest import rows, same


def files_in(folder: Path, parts: int = 3, each: int = 40) -> TensorDict:
    """Write `parts` files of `each` rows, in row groups of 16; return all rows."""
    folder.mkdir(parents=True, exist_ok=True)
    for i in range(parts):
        part = rows(each, i * each).to_arrow(separator=".", tensors=True)
        pq.write_table(part, folder / f"part-{i}.parquet", row_group_size=16)
    return rows(parts * each)


def upload(folder: Path) -> str:
    """Copy a folder to a fresh one of fsspec's file system in memory; return its URL."""
    url = f"memory://{uuid.uuid4().hex}/rows"
    fs = fsspec.filesystem("memory")
    for file in folder.rglob("*.parquet"):
        fs.pipe(f"{url}/{file.relative_to(folder)}", file.read_bytes())
    return url


@pytest.fixture(params=["local", "memory"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The folder of `files_in`, as a path and as a URL."""
    files_in(tmp_path / "rows")
    return str(tmp_path / "rows") if request.param == "local" else upload(tmp_path / "rows")


def test_a_folder_a_list_and_a_file(place: str, tmp_path: Path) -> None:
    same(from_parquet(place, separator="."), rows(120))
    names = [f"{place}/part-{i}.parquet" for i in (2, 0)]
    same(from_parquet(names, separator="."), torch.cat([rows(40, 80), rows(40)]))
    same(from_parquet(names[1], separator="."), rows(40))
    with from_parquet(place, separator=".", location=tmp_path / "x.h5") as stored:
        same(stored, rows(120))


def test_columns_and_filters(place: str, tmp_path: Path) -> None:
    asked: dict[str, Any] = {"separator": ".", "columns": ["n.b", "a"], "filters": [("a", ">=", 70)]}
    found = from_parquet(place, **asked)
    assert set(found.keys(True, True)) == {("n", "b"), "a"}
    assert found["a"].tolist() == list(range(70, 120))
    with from_parquet(place, **asked, location=tmp_path / "x") as stored:
        same(stored, found)


def test_a_bucket(s3: S3Server, tmp_path: Path) -> None:
    bucket = s3.make_bucket()
    files_in(tmp_path / "rows")
    for file in (tmp_path / "rows").iterdir():
        bucket.client().put_object(Bucket=bucket.bucket, Key=f"rows/{file.name}", Body=file.read_bytes())
    reading: dict[str, Any] = {"separator": ".", "storage_options": bucket.obstore_options}
    same(from_parquet(f"{bucket.url}/rows", **reading), rows(120))
    same(from_parquet(f"{bucket.url}/rows/part-1.parquet", **reading), rows(40, 40))
    with pytest.raises(StoreNotFoundError, match="rows/nothing"):
        from_parquet(f"{bucket.url}/rows/nothing.parquet", **reading)


def test_only_the_bytes_of_the_columns_are_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rows").mkdir()
    big = TensorDict({"a": torch.arange(1000), "big": torch.rand(1000, 500)}, [1000])
    pq.write_table(big.to_arrow(), tmp_path / "rows" / "x.parquet", row_group_size=100)
    url = upload(tmp_path / "rows")
    fetched: list[int] = []
    read = engine_files.EngineFile.read

    def counting(self: engine_files.EngineFile, size: int | None = -1) -> bytes:
        data = read(self, size)
        fetched.append(len(data))
        return data

    monkeypatch.setattr(engine_files.EngineFile, "read", counting)
    assert from_parquet(url, columns=["a"])["a"].tolist() == list(range(1000))
    # pyarrow begins with the last 64 KiB, in which the footer is.
    assert sum(fetched) < 200_000 < (tmp_path / "rows" / "x.parquet").stat().st_size / 5


def test_row_groups_are_read_one_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    td = TensorDict({"x": torch.rand(4000, 250)}, [4000])
    pq.write_table(td.to_arrow(), tmp_path / "x.parquet", 50, use_dictionary=False, compression="none")
    before, most = pa.total_allocated_bytes(), 0
    write = streaming.into_store

    def watching(blocks: streaming.Blocks, *rest: Any) -> Any:
        def watched() -> Iterator[Any]:
            nonlocal most
            for block in blocks():
                most = max(most, pa.total_allocated_bytes() - before)
                yield block

        return write(watched, *rest)

    monkeypatch.setattr(streaming, "into_store", watching)
    with from_parquet(tmp_path / "x.parquet", location=tmp_path / "m") as stored:
        same(stored, td)
    # Of 80 groups: three to six are held, and Arrow adds buffers of its own.
    assert most < td["x"].nbytes / 4


def test_tensors_keep_their_shape(tmp_path: Path) -> None:
    images = torch.arange(5 * 2 * 3 * 4, dtype=torch.uint8).reshape(5, 2, 3, 4)
    TensorDict({"image": images}, [5]).to_parquet(tmp_path / "x.parquet", tensors=True)
    kind = pq.read_schema(tmp_path / "x.parquet").field("image").type
    assert isinstance(kind, pa.FixedShapeTensorType)
    assert kind.shape == [2, 3, 4]
    assert torch.equal(from_parquet(tmp_path / "x.parquet")["image"], images)
    with from_parquet(tmp_path / "x.parquet", location=tmp_path / "x.zarr") as stored:
        assert torch.equal(stored["image"], images)


def test_names_of_folders_are_a_column(tmp_path: Path) -> None:
    for split, start in (("test", 0), ("train", 4)):
        files_in(tmp_path / f"split={split}", 1)
        rows(4, start).to_parquet(tmp_path / f"split={split}" / "part-0.parquet", separator=".")
    found = from_parquet(tmp_path, separator=".")
    assert found["split"] == ["test"] * 4 + ["train"] * 4
    assert found["a"].tolist() == list(range(8))
    stored = from_parquet(tmp_path, separator=".", location=tmp_path / "x.h5", filters=[("split", "=", "train")])
    with stored:
        same(stored, found[4:])


def test_file_objects_and_an_index_of_pandas(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    frame = rows(4).to_pandas(separator=".")
    frame.iloc[[2, 0, 3, 1]].set_index("a").to_parquet(buffer)
    found = from_parquet(buffer, separator=".")
    assert set(found.keys()) == {"v", "n", "one"}
    with from_parquet(buffer, separator=".", location=tmp_path / "x.h5") as stored:
        same(stored, found)
    assert from_parquet(buffer, columns=["a"])["a"].tolist() == [2, 0, 3, 1]


def test_what_is_refused(place: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match=r"no column 'nope'.*'n\.b'"):
        from_parquet(place, columns=["a", "nope"])
    with pytest.raises(StoreNotFoundError, match="nothing"):
        from_parquet(f"{place}/nothing.parquet")
    with pytest.raises(StoreNotFoundError, match="nothing"):
        from_parquet(f"{place}/nothing")
    with pytest.raises(InvalidArgumentError, match="empty list"):
        from_parquet([])
    with pytest.raises(OptionError, match="storage_options"):
        from_parquet(str(tmp_path), storage_options={"key": "x"})
    with pytest.raises(UnknownBackendError, match="nope"):
        from_parquet("nope://bucket/x.parquet")
    with pytest.raises(OptionError, match="no folder in common"):
        from_parquet(["memory://a/x.parquet", "memory://b/x.parquet"])
    (tmp_path / "none").mkdir()
    with pytest.raises(StoreNotFoundError, match="no parquet file in"):
        from_parquet(tmp_path / "none")


def test_damaged_files_leave_no_dataset(tmp_path: Path) -> None:
    files_in(tmp_path / "rows", 2)
    second = tmp_path / "rows" / "part-1.parquet"
    whole = second.read_bytes()
    for damaged in (whole[: len(whole) // 2], b"text", whole[:60] + b"\xff" * 400 + whole[460:]):
        second.write_bytes(damaged)
        for location in (None, tmp_path / "x.h5"):
            for path in (str(tmp_path / "rows"), upload(tmp_path / "rows")):
                with pytest.raises(CorruptStoreError, match="rows"):
                    from_parquet(path, location=location)
    assert not tdstore.exists(tmp_path / "x.h5")


def test_files_whose_columns_differ(place: str, tmp_path: Path) -> None:
    folder = tmp_path / "rows"
    TensorDict({"a": torch.arange(3), "more": torch.arange(3)}, [3]).to_parquet(folder / "part-9.parquet")
    with pytest.raises(MismatchError, match=r"part-9\.parquet.*'more'|part-9\.parquet.*"):
        from_parquet(folder)
    assert from_parquet(folder, columns=["a"])["a"].tolist() == [*range(120), 0, 1, 2]
    schema = pa.schema([("a", pa.int64()), ("more", pa.int64())])
    assert from_parquet(folder, schema=schema)["more"][-3:].tolist() == [0.0, 1.0, 2.0]


def test_rows_of_different_lengths_are_lists(tmp_path: Path) -> None:
    rows = torch.nested.nested_tensor([torch.arange(2), torch.arange(5), torch.arange(0)], layout=torch.jagged)
    td = TensorDict({"ids": rows, "label": torch.arange(3)}, [3])
    td.save(tmp_path / "x.h5").close()
    stack = tdstore.lazy_stack([TensorDict({"ids": torch.arange(n)}) for n in (2, 5, 0)])
    for given in (td, tdstore.open(tmp_path / "x.h5"), stack):
        given.to_parquet(tmp_path / "x.parquet", row_group_size=2)
        assert tdstore.from_parquet(tmp_path / "x.parquet")["ids"] == [[0, 1], [0, 1, 2, 3, 4], []]
        back = tdstore.from_parquet(tmp_path / "x.parquet", nested=True)["ids"]
        assert [row.tolist() for row in back.unbind()] == [[0, 1], [0, 1, 2, 3, 4], []]
    assert pq.ParquetFile(tmp_path / "x.parquet").num_row_groups == 2
    with pytest.raises(OptionError, match="nested=True") as caught:
        tdstore.from_parquet(tmp_path / "x.parquet", nested=True, location=tmp_path / "y")
    assert "extend" in str(caught.value.hint)
    uneven = tdstore.lazy_stack([TensorDict({"a": torch.zeros(2, n)}) for n in (1, 2)])
    with pytest.raises(BatchSizeError, match="differ in more than their length"):
        uneven.to_parquet(tmp_path / "z.parquet")
    assert not (tmp_path / "z.parquet").exists()
