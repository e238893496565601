"""One object of an engine as a file for h5py, with cached blocks and prefetched batches."""

from __future__ import annotations

import bisect
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import numpy as np

from tdstore.engine import Engine
from tdstore.errors import CorruptStoreError, StoreIOError, TDStoreError
from tdstore.index.ranges import Batch, Ints, Range
from tdstore_h5.file.seekable import SeekableBytes
from tdstore_h5.remote.chunk_tree import children

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
        self._held: tuple[Batch[str], list[Ints]] | None = None
        self._nodes: dict[int, memoryview] = {}
        self._missing: dict[int, int] | None = None
        self._collected: dict[int, int] = {}
        self._rank = 0
        self.size = 0
        self._read_ends()

    def _read_ends(self) -> None:
        """Fetch size, start and end of the object."""
        self.size, first, last = self.engine.pin_ends(self.key, ENDS)
        pieces = {0: memoryview(first).cast("B"), self.size - len(last): memoryview(last).cast("B")}
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
        found = self._cached(start, stop)
        if self._missing is not None:
            if found is None:
                self._missing[start] = stop
                raise StoreIOError(f"{self.url}: bytes {start} to {stop} were not fetched yet", url=self.url)
            for child in children(found, self._rank):
                end = child + stop - start
                if end <= self.size and self._cached(child, end) is None:
                    self._missing[child] = end
        if found is not None:
            return found
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

    def _cached(self, start: int, stop: int) -> memoryview | None:
        """Return bytes that are in memory and no block."""
        node = self._nodes.get(start)
        if node is not None and len(node) >= stop - start:
            return node[: stop - start]
        if self._held is not None:
            self._pieces, self._held = self._sorted_pieces(*self._held), None
        for starts, pieces in (self._pieces, self._own):
            i = bisect.bisect_right(starts, start) - 1
            if i >= 0 and starts[i] + len(pieces[i]) >= stop:
                return pieces[i][start - starts[i] : stop - starts[i]]
        return None

    @contextmanager
    def collecting(self, rank: int) -> Iterator[None]:
        """Fetch nothing meanwhile: a read of bytes that are not in memory fails, and is noted for `fetch_missing`.

        Args:
            rank: the number of dimensions of the dataset whose index is read.
        """
        self._missing, self._rank = {}, rank
        try:
            yield
        finally:
            self._collected.update(self._missing)
            self._missing = self.failure = None

    @property
    def is_missing_some(self) -> bool:
        """Check whether a read failed because its bytes are not in memory."""
        return bool(self._collected)

    def fetch_missing(self) -> bool:
        """Fetch what was missing, in one round; return whether there was anything."""
        wanted = sorted(self._collected.items())
        self._collected.clear()
        if not wanted:
            return False
        batch = self.fetch([np.array(wanted, np.int64)])
        self._nodes.update((a, batch.take(self.key, a, b)) for a, b in wanted)
        return True

    def forget_nodes(self) -> None:
        """Drop the nodes of indices that were read."""
        self._nodes.clear()

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
        self._pieces, self._held = ([], []), (batch, ranges) if ranges else None

    def _sorted_pieces(self, batch: Batch[str], ranges: list[Ints]) -> tuple[list[int], list[memoryview]]:
        every = np.unique(np.concatenate(ranges), axis=0).tolist()
        return [a for a, _ in every], [batch.take(self.key, a, b) for a, b in every]

    def close(self) -> None:
        if not self.closed:
            self.engine.close()
            self._blocks.clear()
            self._nodes.clear()
            self._pieces = self._own = ([], [])
            self._held = None
        super().close()
