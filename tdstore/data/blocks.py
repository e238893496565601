"""Blocks of neighbouring rows, read whole and kept for the batches that need rows of them."""

import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future

import numpy as np
import torch

import tdstore
from tdstore import TensorDictBase

from .source import Rows, Source


class Block:
    """A block that is in memory, or that will be. The thread that claims it reads it; the others wait for it."""

    def __init__(self) -> None:
        self.rows: Future[TensorDictBase] = Future()
        self._claimed = threading.Lock()

    def claim(self) -> bool:
        """Return whether the caller is the first to ask, and therefore reads the block."""
        return self._claimed.acquire(blocking=False)


class BlockReader:
    """Read rows of a source by its blocks. The last blocks that batches were planned with stay in memory.

    Batches are planned in their order, and may then be read in any order, by several threads: a planned batch holds its
    blocks until it is read. The blocks that a batch lacks are one read of the store. A block that another thread is
    reading is waited for.

    Args:
        source: where rows come from.
        block: the number of rows of a block.
        keep: how many blocks stay in memory, besides those of batches that are planned and not read.
    """

    def __init__(self, source: Source, block: int, keep: int) -> None:
        self._source, self._block, self._keep = source, block, keep
        self._blocks: OrderedDict[int, Block] = OrderedDict()
        self._lock = threading.Lock()

    def plan(self, rows: Rows) -> Callable[[], TensorDictBase]:
        """Keep the blocks of a batch, and return the function that reads it.

        Args:
            rows: int64 row numbers of any shape, which becomes the batch size.
        """
        numbers, part_of = np.unique(rows.reshape(-1) // self._block, return_inverse=True)
        blocks: dict[int, Block] = {}
        with self._lock:
            for number in numbers.tolist():
                blocks[number] = self._blocks.setdefault(number, Block())
                self._blocks.move_to_end(number)
            while len(self._blocks) > max(self._keep, len(blocks)):
                self._blocks.popitem(last=False)
        return lambda: self._read(rows, blocks, part_of)

    def _read(self, rows: Rows, blocks: dict[int, Block], part_of: Rows) -> TensorDictBase:
        """Read rows of all columns into fresh memory."""
        missing = {number: block for number, block in blocks.items() if block.claim()}
        futures = [block.rows for block in blocks.values()]
        try:
            if missing:
                self._load(missing)
            offsets = rows.reshape(-1) % self._block
            pieces = [
                futures[part].result()[torch.from_numpy(offsets[part_of == part])] for part in range(len(futures))
            ]
        except BaseException:
            blocks.clear()  # they hold the error, whose traceback holds this frame
            missing.clear()
            futures.clear()
            raise
        # Pieces are in the order of their blocks: back to that of the rows.
        order = np.argsort(np.argsort(part_of, kind="stable"), kind="stable").reshape(rows.shape)
        return tdstore.cat(pieces)[torch.from_numpy(order)]

    def _load(self, missing: dict[int, Block]) -> None:
        """Read blocks; if that fails, those that wait for them fail too, and the next batch reads them again."""
        try:
            bounds = [
                (start, min(start + self._block, self._source.size)) for start in (n * self._block for n in missing)
            ]
            read = self._source.read(np.concatenate([np.arange(start, stop) for start, stop in bounds]))
            ends = np.cumsum([stop - start for start, stop in bounds]).tolist()
            for block, start, end in zip(missing.values(), [0, *ends], ends, strict=False):
                block.rows.set_result(read[start:end])
        except BaseException as error:
            self._fail(missing, error)
            raise

    def _fail(self, missing: dict[int, Block], error: BaseException) -> None:
        with self._lock:
            for number, block in missing.items():
                if self._blocks.get(number) is block:
                    del self._blocks[number]
        for block in missing.values():
            if not block.rows.done():
                block.rows.set_exception(error)
