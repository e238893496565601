"""Advice about pages: it changes how many faults there are, and no byte."""

from __future__ import annotations

import mmap
import resource

import numpy as np
import pytest

from tdstore.storekit.pageadvice import drop_whole_pages, map_pages, map_whole_pages

PAGES = 256


def faults() -> int:
    """Page faults of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


@pytest.mark.parametrize("advise", [map_pages, map_whole_pages])
def test_mapped_pages_cost_no_fault(advise):
    with mmap.mmap(-1, PAGES * mmap.PAGESIZE) as memory:
        room = np.frombuffer(memory, np.uint8)
        if not advise(room.ctypes.data, room.nbytes):
            pytest.skip("this system maps no pages on advice: Linux before 5.14, or another one")
        before = faults()
        room[:: mmap.PAGESIZE] = 1
        assert faults() - before < PAGES // 4
        assert room.sum() == PAGES
        del room


def test_whole_pages_are_those_inside_the_range():
    with mmap.mmap(-1, 2 * mmap.PAGESIZE) as memory:
        room = np.frombuffer(memory, np.uint8)
        assert not map_whole_pages(room.ctypes.data + 1, mmap.PAGESIZE)
        assert not drop_whole_pages(room.ctypes.data + 1, mmap.PAGESIZE)
        assert not map_whole_pages(room.ctypes.data, 0)
        del room


def test_dropped_pages_of_a_file_are_read_again(tmp_path):
    path = tmp_path / "rows"
    path.write_bytes(bytes(PAGES * mmap.PAGESIZE))
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        room = np.frombuffer(memory, np.uint8)
        writable = np.ndarray(room.shape, np.uint8, memory)
        writable[:] = 7
        drop_whole_pages(room.ctypes.data, room.nbytes)
        before = faults()
        assert (room == 7).all()
        assert faults() > before
        del room, writable
