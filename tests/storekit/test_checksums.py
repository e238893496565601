"""Checksums of data with holes, beside those of the same bytes without."""

from __future__ import annotations

import zlib

import pytest

from tdstore.storekit.checksums import crc32_and_zeros


@pytest.mark.parametrize("nbytes", [0, 1, 2, 3, 7, 8, 255, 4096, 65_537, 3 << 20])
@pytest.mark.parametrize("data", [b"", b"\0", b"data", bytes(range(256))])
def test_a_crc_of_zeros_is_that_of_the_bytes(data: bytes, nbytes: int) -> None:
    assert crc32_and_zeros(zlib.crc32(data), nbytes) == zlib.crc32(data + bytes(nbytes))


def test_zeros_that_nobody_could_read_are_two_steps_or_one() -> None:
    crc = zlib.crc32(b"data")
    assert crc32_and_zeros(crc32_and_zeros(crc, 3 << 40), 5 << 50) == crc32_and_zeros(crc, (3 << 40) + (5 << 50))
