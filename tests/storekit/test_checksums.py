"""Checksums of data with holes, beside those of the same bytes without."""

from __future__ import annotations

import os
import zlib
from pathlib import Path as FsPath

import numpy as np
import pytest

from tdstore.storekit.checksums import FINE, TIP, crc32_and_zeros, sums_of_block, sums_of_file, sums_of_memory


@pytest.mark.parametrize("nbytes", [0, 1, 2, 3, 7, 8, 255, 4096, 65_537, 3 << 20])
@pytest.mark.parametrize("data", [b"", b"\0", b"data", bytes(range(256))])
def test_a_crc_of_zeros_is_that_of_the_bytes(data: bytes, nbytes: int) -> None:
    assert crc32_and_zeros(zlib.crc32(data), nbytes) == zlib.crc32(data + bytes(nbytes))


def test_zeros_that_nobody_could_read_are_two_steps_or_one() -> None:
    crc = zlib.crc32(b"data")
    assert crc32_and_zeros(crc32_and_zeros(crc, 3 << 40), 5 << 50) == crc32_and_zeros(crc, (3 << 40) + (5 << 50))


@pytest.mark.parametrize("nbytes", [1, TIP, 3 * TIP, 3 * TIP + 1, 4 * TIP + 7, FINE, FINE + 1])
def test_sums_of_a_short_leaf_are_those_of_its_memory(nbytes: int, tmp_path: FsPath) -> None:
    memory = np.random.default_rng(nbytes).integers(0, 255, nbytes, dtype=np.uint8)
    expected = sums_of_memory(memory)
    assert sums_of_block(memory) == sums_of_block(memory.tobytes()) == expected
    (tmp_path / "leaf").write_bytes(memory.tobytes() + b"more")
    fd = os.open(tmp_path / "leaf", os.O_RDONLY)
    try:
        assert sums_of_file(fd, nbytes) == expected
        with pytest.raises(EOFError):
            sums_of_file(fd, nbytes + 5)
    finally:
        os.close(fd)
