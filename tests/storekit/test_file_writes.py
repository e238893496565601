"""Writes of memory to a file: all of it arrives, however little each call of the system takes."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from tdstore.storekit import files

ARRAYS = [
    np.arange(12.0).reshape(3, 4),
    np.arange(20, dtype=np.uint8),
    np.arange(10, dtype=np.uint8).reshape(2, 5),
    np.array(3.5),
    np.ones((2, 2), np.complex64),
    np.array([True, False]),
    np.zeros((0, 3)),
]


@pytest.mark.parametrize("array", ARRAYS, ids=lambda array: f"{array.dtype}-{array.shape}")
@pytest.mark.parametrize("most", [1, 3, 1 << 20])
def test_short_writes_are_finished(
    array: np.ndarray, most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: whole(fd, memoryview(data).tobytes()[:most], at))
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    try:
        files.write_at(fd, array.data, 5)
    finally:
        os.close(fd)
    assert (tmp_path / "file").read_bytes()[5:] == array.tobytes()


def test_a_failure_in_the_middle_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = os.pwrite

    def fills_up(fd: int, data: memoryview, at: int) -> int:
        if at:
            raise OSError(28, "No space left on device")
        return whole(fd, memoryview(data).tobytes()[:7], at)

    monkeypatch.setattr(os, "pwrite", fills_up)
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    try:
        with pytest.raises(OSError, match="No space left"):
            files.write_at(fd, np.arange(12.0).reshape(3, 4).data, 0)
    finally:
        os.close(fd)
