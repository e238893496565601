"""One object of an engine as a file for h5py, with cached blocks and prefetched batches."""

from __future__ import annotations

import bisect
from collections import OrderedDict
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from tdstore.engine import Engine
from tdstore.errors import CorruptStoreError, TDStoreError
from tdstore.index.ranges import Batch, Ints, Range
from tdstore_h5.file.seekable import SeekableBytes

BLOCK = 256 << 10
"""Structure that is not at the ends comes in blocks of this size."""
ENDS = 512 << 10
"""The first and the last bytes are fetched at once: most files keep their structure there."""
KEPT = 64 << 20
"""Bytes of cached blocks."""


class EngineFile(SeekableBytes):
    """A read-only, seekable file. Errors of the engine are recorded in `failure`: HDF5 reports only a failed read.

    Args:
        engine: closed with the file.
        key: the object.
    """

    def __init__(self, engine: Engine, key: str) -> None:
        super().__init__()
        self.engine = engine
        self.key = key
        self.url = engine.where(key)
        self.failure: TDStoreError | None = None
        self._blocks: OrderedDict[int, memoryview] = OrderedDict()
        self._pieces: tuple[list[int], list[memoryview]] = ([], [])
        self._own: tuple[list[int], list[memoryview]] = ([], [])
        self.size = 0
        self._read_ends()

    def _read_ends(self) -> None:
        """Fetch size, start and end of the object, in two rounds; in one if it is small."""
        with ThreadPoolExecutor(2) as pool:
            size = pool.submit(self.engine.pin, [self.key])
            tail = pool.submit(self.engine.get_ranges, [Range(self.key, -ENDS, None)])
            self.size = size.result()[0]
            end = memoryview(tail.result()[0]).cast("B")
        if len(end) != min(ENDS, self.size):
            raise CorruptStoreError(f"{self.url} was replaced while it was opened", url=self.url, hint="try again")
        pieces = {self.size - len(end): end}
        if self.size > len(end):
            stop = min(ENDS, self.size - len(end))
            pieces[0] = memoryview(self.engine.get_ranges([Range(self.key, 0, stop)])[0]).cast("B")
        starts = sorted(pieces)
        self._own = (starts, [pieces[start] for start in starts])

    # -- for h5py ------------------------------------------------------------------------
    def _length(self) -> int:
        return self.size

    def readinto(self, buffer: object) -> int:
        target = memoryview(buffer).cast("B")  # type: ignore[arg-type]
        count = max(0, min(len(target), self.size - self._at))
        try:
            target[:count] = self.read_at(self._at, self._at + count)
        except TDStoreError as error:
            self.failure = error
            raise
        self._at += count
        return count

    # -- bytes ---------------------------------------------------------------------------
    def read_at(self, start: int, stop: int) -> memoryview:
        """Read bytes of the file, from memory where cached."""
        if stop > self.size:
            raise CorruptStoreError(
                f"{self.url} has {self.size} bytes, its structure needs {stop}",
                url=self.url,
                hint="the file was cut short",
            )
        for starts, pieces in (self._pieces, self._own):
            i = bisect.bisect_right(starts, start) - 1
            if i >= 0 and starts[i] + len(pieces[i]) >= stop:
                return pieces[i][start - starts[i] : stop - starts[i]]
        if stop - start > 4 * BLOCK:
            return memoryview(self.engine.get_ranges([Range(self.key, start, stop)])[0]).cast("B")
        numbers = range(start // BLOCK, -(-stop // BLOCK))
        self._fetch_blocks(numbers)
        views = [self._blocks[n] for n in numbers]
        whole = views[0] if len(views) == 1 else memoryview(b"".join(views))
        first = numbers[0] * BLOCK if numbers else 0
        result = whole[start - first : stop - first] if numbers else memoryview(b"")
        while len(self._blocks) * BLOCK > KEPT:
            self._blocks.popitem(last=False)
        return result

    def _fetch_blocks(self, numbers: Iterable[int]) -> None:
        missing = []
        for n in numbers:
            if n in self._blocks:
                self._blocks.move_to_end(n)
            else:
                missing.append(n)
        if missing:
            asked = [Range(self.key, n * BLOCK, min((n + 1) * BLOCK, self.size)) for n in missing]
            for n, data in zip(missing, self.engine.get_ranges(asked), strict=True):
                self._blocks[n] = memoryview(data).cast("B")

    def fetch(self, ranges: Iterable[Ints]) -> Batch[str]:
        """Fetch all ranges of a read, in one round."""
        batch: Batch[str] = Batch()
        for some in ranges:
            if len(some):
                if int(some[:, 1].max()) > self.size:
                    self.read_at(0, int(some[:, 1].max()))  # raises the error for a truncated file
                batch.want(self.key, some)
        batch.fetch(lambda asked: self.engine.get_ranges([Range(*r) for r in asked]))
        return batch

    def hold(self, batch: Batch[str], ranges: list[Ints]) -> None:
        """Serve h5py these ranges of a batch from memory, until the next call."""
        if not ranges:
            self._pieces = ([], [])
            return
        every = np.unique(np.concatenate(ranges), axis=0).tolist()
        self._pieces = ([a for a, _ in every], [batch.take(self.key, a, b) for a, b in every])

    def close(self) -> None:
        if not self.closed:
            self.engine.close()
            self._blocks.clear()
            self._pieces = self._own = ([], [])
        super().close()
