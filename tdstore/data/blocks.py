"""Blocks of neighbouring rows, read whole and kept for the batches that need rows of them."""

import threading
from collections import OrderedDict
from concurrent.futures import Future

import numpy as np
import torch

import tdstore
from tdstore import TensorDictBase

from .source import Rows, Source


class BlockReader:
    """Read rows of a source by its blocks. The last blocks that were needed stay in memory.

    The blocks that a batch lacks are one read of the store. A block that another thread is reading is waited for.

    Args:
        source: where rows come from.
        block: the number of rows of a block.
        keep: how many blocks stay in memory.
    """

    def __init__(self, source: Source, block: int, keep: int) -> None:
        self._source, self._block, self._keep = source, block, keep
        self._blocks: OrderedDict[int, Future[TensorDictBase]] = OrderedDict()
        self._lock = threading.Lock()

    def read(self, rows: Rows) -> TensorDictBase:
        """Read rows of all columns into fresh memory.

        Args:
            rows: int64 row numbers of any shape, which becomes the batch size.
        """
        flat = rows.reshape(-1)
        numbers, part_of = np.unique(flat // self._block, return_inverse=True)
        parts: list[Future[TensorDictBase]] = []
        missing: dict[int, Future[TensorDictBase]] = {}
        with self._lock:
            for number in numbers.tolist():
                if number not in self._blocks:
                    self._blocks[number] = missing[number] = Future()
                self._blocks.move_to_end(number)
                parts.append(self._blocks[number])
            while len(self._blocks) > max(self._keep, len(parts)):
                self._blocks.popitem(last=False)
        if missing:
            self._load(missing)
        offsets = flat % self._block
        pieces = [part.result()[torch.from_numpy(offsets[part_of == i])] for i, part in enumerate(parts)]
        # Pieces are in the order of their blocks: back to that of the rows.
        order = np.argsort(np.argsort(part_of, kind="stable"), kind="stable").reshape(rows.shape)
        return tdstore.cat(pieces)[torch.from_numpy(order)]

    def _load(self, missing: dict[int, "Future[TensorDictBase]"]) -> None:
        """Read blocks; where that fails, those that wait for them fail too, and the next batch reads them anew."""
        try:
            bounds = [
                (start, min(start + self._block, self._source.size)) for start in (n * self._block for n in missing)
            ]
            read = self._source.read(np.concatenate([np.arange(start, stop) for start, stop in bounds]))
            ends = np.cumsum([stop - start for start, stop in bounds]).tolist()
            for future, start, end in zip(missing.values(), [0, *ends], ends, strict=False):
                future.set_result(read[start:end])
        except BaseException as error:
            with self._lock:
                for number, future in missing.items():
                    if self._blocks.get(number) is future:
                        del self._blocks[number]
            for future in missing.values():
                if not future.done():
                    future.set_exception(error)
            raise
