"""Leaves that grow row by row from nothing, or from little, have few files, and the chunks that were asked for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import zarr

import tdstore
from tdstore import TensorDict


def rows_of(count: int, first: int = 0) -> TensorDict:
    numbers = torch.arange(first, first + count)
    return TensorDict({"a": numbers[:, None].expand(-1, 4).float(), "n": {"b": numbers}}, [count])


def files_below(place: Path) -> int:
    return sum(path.is_file() for path in place.rglob("*"))


@pytest.mark.parametrize("begin", [0, 1, 10])
@pytest.mark.parametrize("options", [{}, {"compressors": "none", "checksum": False}, {"layout": "scan"}])
def test_rows_that_are_added_one_by_one_share_files(tmp_path, begin, options):
    place = tmp_path / "x.zarr"
    td = rows_of(begin).save(place, durable="none", **options)
    for row in range(begin, 60):
        td.append(rows_of(1, row)[0])
    assert (td.to_tensordict() == rows_of(60)).all()
    td.close()
    assert files_below(place) <= 2 * 2 + 2, "a shard and the metadata of each leaf, of the group and of the root"
    with tdstore.open(place, verify="full") as found:
        assert (found.to_tensordict() == rows_of(60)).all()
    assert zarr.open_array(place / "a", mode="r")[:, 0].tolist() == list(range(60))


@pytest.mark.parametrize("closed", [False, True])
@pytest.mark.parametrize(
    ("options", "chunks", "shards"),
    [
        ({"chunks": 16}, (16, 4), None),
        ({"chunks": 10}, (10, 4), None),
        ({"chunks": (16, 2), "shards": (32, 4)}, (16, 2), (32, 4)),
        ({"chunks": 16, "shards": True}, (16, 4), (1 << 16, 4)),
    ],
)
def test_the_chunks_that_were_asked_for_are_made_when_there_are_rows(tmp_path, options, chunks, shards, closed):
    place = tmp_path / "x.zarr"
    td = rows_of(10).save(place, durable="none", **options)
    assert zarr.open_array(place / "a", mode="r").shape == (10, 4)
    for row in range(10, 70):
        if closed:
            td.close()
            td = tdstore.open(place, mode="r+", durable="none")
        td.append(rows_of(1, row)[0])
    td.close()
    array = zarr.open_array(place / "a", mode="r")
    assert (array.chunks, array.shards) == (chunks, shards)
    with tdstore.open(place, verify="full") as found:
        assert (found.to_tensordict() == rows_of(70)).all()


def test_texts_and_ragged_rows_share_files(tmp_path):
    place = tmp_path / "x.zarr"
    schema = {"tokens": ((-1,), "int64"), "text": str}
    td = TensorDict.from_schema(schema, batch_size=[0], storage="zarr", location=place, durable="none")
    for i in range(60):
        td.append({"tokens": list(range(i % 7)), "text": "x" * (i % 5)})
    td.close()
    assert files_below(place) <= 20
    with tdstore.open(place, verify="full") as found:
        assert [row.tolist() for row in found["tokens"].unbind()] == [list(range(i % 7)) for i in range(60)]
        assert list(found["text"]) == ["x" * (i % 5) for i in range(60)]


def test_an_array_of_another_program_keeps_what_it_says(tmp_path):
    group = zarr.open_group(tmp_path / "x.zarr", mode="w")
    array = group.create_array(
        "a", shape=(4, 4), dtype="float32", chunks=(4, 4), fill_value=7,
        compressors=zarr.codecs.ZstdCodec(level=3), attributes={"unit": "m"},
    )  # fmt: skip
    array[:] = 1
    with tdstore.open(tmp_path / "x.zarr", mode="r+") as td:
        td.batch_size = [4]
        td.append({"a": torch.zeros(4)})
    array = zarr.open_array(tmp_path / "x.zarr" / "a", mode="r")
    assert array[:, 0].tolist() == [1, 1, 1, 1, 0]
    assert array.fill_value == 7 and array.attrs["unit"] == "m"
    assert [codec.to_dict()["name"] for codec in array.compressors] == ["zstd"]
