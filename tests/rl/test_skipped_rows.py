"""Rows that a write skips as the storage becomes longer: zeros, whatever was there before `empty()`."""

from __future__ import annotations

import pytest
import torch

from tdstore import TensorDict
from tdstore.rl.storages import LazyMemmapStorage, LazyStorage, LazyTensorStorage, TensorStorage
from tests.rl.places import KINDS, kinds, maker, rows

GAPS = {
    "int": (4, 1, [4]),
    "list": ([4], 1, [4]),
    "slice": (slice(3, 5), 2, [3, 4]),
    "several": ([4, 1, 6], 3, [4, 1, 6]),
    "with a visible row": ([0, 5], 2, [0, 5]),
}


@pytest.mark.parametrize("visible", [0, 1])
@pytest.mark.parametrize("case", GAPS)
@kinds([k for k in KINDS if k != "s3"])
def test_rows_of_before_empty_do_not_come_back(kind, case, visible, request):
    def texts(numbers):
        return TensorDict({"a": torch.tensor(numbers), "t": [f"row {n}" for n in numbers]}, [len(numbers)])

    storage = maker(kind, request)(10)
    storage.set(range(8), texts(list(range(20, 28))))
    storage.empty()
    if visible:
        storage.append(texts([50]))
    index, count, written = GAPS[case]
    data = texts(list(range(70, 70 + count)))
    storage.set(index, data[0] if isinstance(index, int) else data)
    expected = [0] * (max(written) + 1)
    if visible:
        expected[0] = 50
    for row, number in zip(written, range(70, 80), strict=False):
        expected[row] = number
    assert storage[:]["a"].tolist() == expected
    assert list(storage[:]["t"]) == [f"row {n}" if n else None for n in expected]
    if kind not in ("memory", "shared"):
        storage.close()
        storage = LazyStorage.open(storage.place, storage=storage.storage_name)
        assert storage[:]["a"].tolist() == expected
        storage.empty()
        storage.close()
        storage = LazyStorage.open(storage.place, storage=storage.storage_name)
        storage.set([2], texts([9]))
        assert storage[:]["a"].tolist() == [0, 0, 9]


def test_a_cursor_beyond_the_length_shows_no_former_rows():
    storage = LazyTensorStorage(10)
    storage.set(range(8), rows(*range(20, 28)))
    storage.empty()
    storage.set_counters(4, 4)
    storage.append(rows(7))
    assert storage[:]["a"].tolist() == [0, 0, 0, 0, 7]


def test_rows_of_a_place_that_was_taken_over_do_not_come_back(tmp_path):
    first = LazyMemmapStorage(10, scratch_dir=tmp_path / "rows")
    first.set(range(8), rows(*range(20, 28)))
    first.close()
    storage = LazyMemmapStorage(10, scratch_dir=tmp_path / "rows", existsok=True)
    storage.set([2], rows(7))
    assert storage[:]["a"].tolist() == [0, 0, 7]


def test_tensors_of_the_caller_and_rows_that_wait_show_no_former_rows(tmp_path):
    storage = TensorStorage(TensorDict({"a": torch.arange(5) + 1}, [5]))
    storage.empty()
    storage.set([2], rows(7))
    assert storage[:]["a"].tolist() == [0, 0, 7]
    storage = LazyStorage(10, "zarr", path=tmp_path / "rows.zarr", write_buffer=3)
    storage.set(range(8), rows(*range(20, 28)))
    storage.empty()
    storage.set([5], rows(7))
    assert storage[:]["a"].tolist() == [0] * 5 + [7]
    storage.close()
    assert LazyStorage.open(tmp_path / "rows.zarr")[:]["a"].tolist() == [0] * 5 + [7]


def test_a_row_far_beyond_the_length_uses_no_memory(monkeypatch):
    storage = LazyTensorStorage(1000)
    storage.set(0, rows(1)[0])
    written = []
    real = type(storage._table).write
    monkeypatch.setattr(
        type(storage._table), "write", lambda self, at, values: written.append(at) or real(self, at, values)
    )
    storage.set([900], rows(2))
    assert written == [slice(900, 901)] and storage[:]["a"].sum() == 3
