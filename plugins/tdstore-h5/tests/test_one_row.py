"""Single rows: copied from the mapping once they were compared, with the checks of other reads."""

from __future__ import annotations

from pathlib import Path as FsPath
from typing import Any

import h5py
import pytest
import torch
from h5help import bits
from tdstore_h5.store import H5Store

import tdstore
from tdstore import TensorDict
from tdstore.dtypes import NAME_TO_DTYPE
from tdstore.errors import CorruptStoreError

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf")
ROWS = 4_000


def _dataset() -> TensorDict:
    leaves: dict[str, Any] = {
        name: torch.arange(ROWS * dtype.itemsize).view(torch.uint8)[: ROWS * dtype.itemsize].view(dtype)
        for name, dtype in NAME_TO_DTYPE.items()
        if name != "bool"
    }
    leaves |= {
        "bool": torch.arange(ROWS) % 3 == 0,
        "frames": torch.randint(0, 255, (ROWS, 20, 10), dtype=torch.uint8),
        "halves": torch.rand(ROWS, 3, dtype=torch.bfloat16),
        "nothing": torch.zeros(ROWS, 0),
        "long": torch.rand(ROWS, 1).expand(ROWS, 40),
        "below": {"x": torch.rand(ROWS)},
    }
    return TensorDict(leaves, [ROWS])


def _same_row(got: Any, expected: Any) -> None:
    pairs = zip(got.items(True, True), expected.items(True, True), strict=True)
    for (key, value), (other, good) in pairs:
        assert key == other and value.shape == good.shape and value.dtype is good.dtype
        assert bits(value) == bits(good), key


def test_a_row_is_what_it_is_in_memory(file: FsPath) -> None:
    td = _dataset()
    td.save(file).close()
    with tdstore.open(file) as opened:
        for _ in range(2):  # the second time all were compared
            for row in (0, 7, ROWS - 1, -1, -ROWS):
                _same_row(opened[row].contiguous(), td[row])
        for row in (ROWS, -ROWS - 1):
            with pytest.raises(IndexError, match="out of range"):
                opened[row]


def test_what_was_compared_takes_the_short_way(file: FsPath, monkeypatch: pytest.MonkeyPatch) -> None:
    td = _dataset().exclude("nothing")
    td.save(file).close()
    with tdstore.open(file) as opened:
        opened[5].contiguous()
        monkeypatch.delattr(H5Store, "_read_one")
        _same_row(opened[5].contiguous(), td[5])


def test_written_rows_are_read_as_written(file: FsPath) -> None:
    td = _dataset()
    td.save(file).close()
    with tdstore.open(file, "r+") as opened:
        opened[5].contiguous()
        opened[5] = td[6]
        _same_row(opened[5].contiguous(), td[6])
        opened.append(td[9])
        _same_row(opened[ROWS].contiguous(), td[9])
        _same_row(opened[5].contiguous(), td[6])
    with tdstore.open(file) as opened:
        _same_row(opened[5].contiguous(), td[6])


def _offset(file: FsPath, key: str) -> int:
    with h5py.File(file) as f:
        return int(f[key].id.get_offset())


def test_rows_that_were_not_compared_yet_are_compared(file: FsPath) -> None:
    td = TensorDict({"frames": torch.randint(0, 255, (ROWS, 20, 10), dtype=torch.uint8)}, [ROWS])
    td.save(file).close()
    at = _offset(file, "frames")
    with tdstore.open(file) as opened:
        for _ in range(2):
            _same_row(opened[0].contiguous(), td[0])
        with open(file, "r+b") as f:
            f.seek(at + ROWS * 200 - 1)
            f.write(bytes([int(td["frames"].view(-1)[-1]) ^ 1]))
        with pytest.raises(CorruptStoreError, match="'frames' is damaged"):
            opened[ROWS - 1].contiguous()
        _same_row(opened[0].contiguous(), td[0])
    with tdstore.open(file, verify="none") as opened:
        assert int(opened[-1].contiguous()["frames"][-1, -1]) == int(td["frames"].view(-1)[-1]) ^ 1


def test_a_bool_of_another_byte_is_true(file: FsPath) -> None:
    TensorDict({"flag": torch.zeros(ROWS, dtype=torch.bool)}, [ROWS]).save(file).close()
    with open(file, "r+b") as f:
        f.seek(_offset(file, "flag") + 3)
        f.write(b"\x07")
    with tdstore.open(file, verify="none") as opened:
        for _ in range(2):
            assert opened[3].contiguous()["flag"].view(torch.uint8).item() == 1
