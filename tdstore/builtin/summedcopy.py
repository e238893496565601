"""A copy of bytes that computes checksums in the same pass: each piece while it is in the cache of the processor."""

from __future__ import annotations

import google_crc32c
import torch

from tdstore.storekit.checksums import Memory, crcs_of
from tdstore.storekit.pages import map_whole_pages
from tdstore.threads import ThreadPool

PIECE = 448 << 10
"""Bytes that are copied and then summed. They stay in the cache in between, and are too few for torch to share their
copy among threads, which costs more than the copy where others need the processor."""
SHARE = 4 << 20
"""Least bytes that are worth a thread."""
_WIDE = torch.complex128


def is_aligned(*memories: Memory) -> bool:
    """Check whether `copy_summed` can copy from, or to, memory."""
    return not any(memory.ctypes.data % _WIDE.itemsize for memory in memories)


def copy_summed(source: Memory, target: Memory, size: int, *, fresh: bool) -> list[int]:
    """Copy bytes, and return the crc32c of each `size` bytes of the copy; the last ones may be fewer.

    Uses as many threads as torch may.

    Args:
        source, target: contiguous uint8 arrays of one length, aligned to 16 bytes.
        size: a multiple of 64 KiB.
        fresh: `target` was allocated for this; its pages are then allocated a piece at a time, not one by one.

    Example:
        >>> import numpy as np
        >>> source, target = np.zeros(70000, np.uint8), np.ones(70000, np.uint8)
        >>> crcs = copy_summed(source, target, 65536, fresh=True)
        >>> len(crcs), int(target.sum())
        (2, 0)
    """
    threads = min(torch.get_num_threads(), len(source) // max(SHARE, size))
    if threads < 2:
        return _copy(source, target, size, fresh=fresh)
    share = -(-len(source) // threads // size) * size
    with ThreadPool(threads) as pool:
        shares = [
            pool.submit(_copy, source[at : at + share], target[at : at + share], size, fresh=fresh)
            for at in range(0, len(source), share)
        ]
    return [crc for part in shares for crc in part.result()]


def _copy(source: Memory, target: Memory, size: int, *, fresh: bool) -> list[int]:
    """Copy as `copy_summed` does, in this thread."""
    length, address = len(source), target.ctypes.data
    even = length // _WIDE.itemsize * _WIDE.itemsize
    target[even:] = source[even:]
    here, there = (torch.from_numpy(memory[:even]).view(_WIDE) for memory in (source, target))

    def move(start: int, stop: int) -> Memory:
        if fresh:
            map_whole_pages(address + start, stop - start)
        wide = slice(start // _WIDE.itemsize, stop // _WIDE.itemsize)
        there[wide].copy_(here[wide])
        return target[start:stop]

    crcs: list[int] = []
    step = PIECE // size * size
    for start in range(0, length, step or size):
        stop = min(start + (step or size), length)
        if step:
            crcs += crcs_of(move(start, stop), size)
            continue
        crc = 0
        for at in range(start, stop, PIECE):
            crc = google_crc32c.extend(crc, move(at, min(at + PIECE, stop)))
        crcs.append(crc)
    return crcs
