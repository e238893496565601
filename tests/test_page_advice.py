"""Advice about pages: it changes how many faults there are, and no byte."""

from __future__ import annotations

import mmap
import resource

import numpy as np
import pytest
import torch

from tdstore.index.rows import gather
from tdstore.storekit.pages import copy_rows, drop_whole_pages, empty, map_pages, map_whole_pages

ON_DISK = True  # pages of the page cache
PAGES = 256


def faults() -> int:
    """Page faults of this thread."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt


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


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float64, torch.bfloat16, torch.complex64, torch.bool])
@pytest.mark.parametrize("shape", [(), (0, 3), (5,), (2100, 2048)])
def test_new_memory_is_writable_and_its_own(dtype, shape):
    made = empty(shape, dtype)
    assert (made.shape, made.dtype) == (torch.Size(shape), dtype)
    other = empty(shape, dtype).fill_(1)
    made.fill_(0)
    assert (other == 1).all() and (made == 0).all()


@pytest.mark.parametrize(
    "index",
    [(), (slice(3, 1400, 1),), (slice(0, 1400, 3),), (torch.randperm(1400),), (slice(0, 1400, 1), slice(5, 900, 2))],
)
@pytest.mark.parametrize("transposed", [False, True])
def test_rows_are_copied_as_by_gather(index, transposed):
    leaf = torch.arange(1400 * 1400, dtype=torch.int32).reshape(1400, 1400)  # 7.5 MiB
    leaf = leaf.T if transposed else leaf
    copy = copy_rows(leaf, index)
    assert torch.equal(copy, gather(leaf, index)) and copy.is_contiguous()
    out = torch.zeros_like(copy)
    assert copy_rows(leaf, index, out) is out and torch.equal(out, copy)
    copy.zero_()
    assert leaf.any()


def test_copies_of_parameters_keep_their_gradients():
    leaf = torch.rand(1024, 1100, requires_grad=True)
    copy_rows(leaf, (slice(0, 1000, 1),)).sum().backward()
    assert leaf.grad is not None and leaf.grad[:1000].eq(1).all() and not leaf.grad[1000:].any()
