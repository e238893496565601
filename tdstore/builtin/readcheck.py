"""Checksum comparison of mapped leaves when rows are copied: each block once, by its first read."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Generic, Protocol, TypeVar

import google_crc32c
import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from tdstore.builtin.summedcopy import copy_summed, is_aligned
from tdstore.builtin.tdz.reading import as_bytes
from tdstore.dtypes import to_numpy
from tdstore.errors import CorruptStoreError
from tdstore.index.tracing import traced
from tdstore.storekit.checksums import Sums, block_text
from tdstore.storekit.pages import copy_rows, empty
from tdstore.types import Path, StoreIndex, path_text

OPENED = 16 << 20
"""Datasets whose leaves take up to so many bytes together are compared whole when they are opened, so that what live
tensors show was compared."""
SMALL = 64 << 20
"""Leaves of up to so many bytes are compared whole by the first read of any of their rows; larger ones by the blocks
that hold the rows."""
COARSE = 1 << 20
"""Blocks longer than this are compared by reads that cover them whole: few rows are not worth one."""
LONG = 1 << 20
"""Runs of rows of so many bytes are compared while they are copied."""

Blocks = np.ndarray[tuple[int], np.dtype[np.int64]]
Rows = slice | Tensor | None
"""What a read copies of the first dimension: numbers of rows if a tensor; None for any."""


class SummedLeaf(Protocol):
    """A leaf with checksums, as a comparison needs it."""

    path: Path
    shape: torch.Size
    nbytes: int
    sums: Sums | None
    probe: Tensor | None
    """Its mapped memory."""


Leaf = TypeVar("Leaf", bound=SummedLeaf)


class _Pending:
    """The blocks of one leaf that are not compared yet."""

    __slots__ = ("expected", "leaf", "left", "sums")

    def __init__(self, leaf: SummedLeaf, sums: Sums) -> None:
        self.leaf = leaf
        self.sums = sums
        self.expected, self.left = _NO_SUMS, _NO_FLAGS

    def begin(self) -> None:
        """Make the arrays, when a part of the leaf is read for the first time."""
        if not len(self.left):
            self.expected = np.frombuffer(self.sums.crc, "<u4")
            self.left = np.ones(-(-self.leaf.nbytes // self.sums.block), np.bool_)


_NO_SUMS, _NO_FLAGS = np.empty(0, "<u4"), np.empty(0, np.bool_)


class ReadCheck(Generic[Leaf]):
    """The comparisons that one open store has not made yet.

    Args:
        leaves: those with checksums that must fit.
        stored_crc: computes the crc32c of a leaf's stored bytes from start to stop, or returns None if its
            checksums need not fit any more, since it was written.
    """

    def __init__(self, url: str, leaves: Iterable[Leaf], stored_crc: Callable[[Leaf, int, int], int | None]) -> None:
        self.url = url
        self._stored_crc = stored_crc
        self.pending: dict[Path, _Pending] = {
            leaf.path: _Pending(leaf, leaf.sums) for leaf in leaves if leaf.nbytes and leaf.sums is not None
        }

    def check(self, leaf: Leaf, rows: Rows) -> None:
        """Compare the blocks that a read of rows will copy.

        Raises:
            CorruptStoreError: the stored bytes differ from the committed ones.
        """
        if self._is_sound_block(leaf):
            self.pending.pop(leaf.path, None)
        elif (found := self._pending_of(leaf)) is not None:
            self._compare(leaf, found, self._touched(leaf, found.sums.block, rows))

    def _is_sound_block(self, leaf: Leaf) -> bool:
        """Check whether a leaf is one block, not compared yet, whose checksum fits: most leaves of many are."""
        found = self.pending.get(leaf.path)
        if found is None or leaf.probe is None or leaf.nbytes > min(SMALL, found.sums.block):
            return False
        if found.leaf is not leaf or found.sums is not leaf.sums:
            return False
        crc: int = google_crc32c.value(to_numpy(leaf.probe))
        return crc == int.from_bytes(found.sums.crc, "little")

    def gather(self, leaf: Leaf, tensor: Tensor, index: StoreIndex, out: Tensor | None = None) -> Tensor:
        """Run `rows.gather(tensor, index, out)`, and compare the copied blocks.

        A long run of rows is compared while it is copied, in pieces that stay in the cache of the processor: the
        copy itself is compared.

        Args:
            leaf: the leaf.
            tensor: its mapping.
            index: the rows.
            out: the target; None for a new tensor.

        Raises:
            CorruptStoreError: the stored bytes differ from the committed ones; `out` then holds some of them.
        """
        found = self._pending_of(leaf)
        if found is None:
            return copy_rows(tensor, index, out)
        size = found.sums.block
        touched = self._touched(leaf, size, index[0] if index else slice(None))
        start, stop = _run_of(tensor, index, out)
        first, last = -(-start // size), -(-stop // size) if stop == leaf.nbytes else stop // size
        if last <= first or not found.left[touched].all():
            self._compare(leaf, found, touched)
            return copy_rows(tensor, index, out)
        row = leaf.nbytes // len(tensor)
        value = out
        if value is None:
            value = empty(((stop - start) // row, *tensor.shape[1:]), tensor.dtype)
        source, target = as_bytes(tensor)[start:stop], as_bytes(value)
        head, tail = first * size - start, min(last * size, leaf.nbytes) - start
        if not is_aligned(source[head:], target[head:]):
            self._compare(leaf, found, touched)
            return copy_rows(tensor, index, out)
        self._compare(leaf, found, touched[(touched < first) | (touched >= last)])
        target[:head], target[tail:] = source[:head], source[tail:]
        crcs = copy_summed(source[head:tail], target[head:tail], size, fresh=out is None)
        if out is not None:
            increment_version(out)  # numpy wrote
        self._judge(leaf, found, np.arange(first, last), crcs)
        return value

    def _pending_of(self, leaf: Leaf) -> _Pending | None:
        """Return the pending comparisons of a leaf; None if there are none."""
        found = self.pending.get(leaf.path)
        if found is None or leaf.probe is None:
            return None
        if found.leaf is not leaf or found.sums is not leaf.sums:  # another leaf of that name, or written since
            self.pending.pop(leaf.path, None)
            return None
        found.begin()
        return found

    def _compare(self, leaf: Leaf, found: _Pending, blocks: Blocks) -> None:
        """Compare pending blocks among these, in any order and perhaps repeated."""
        wanted = np.zeros(len(found.left), np.bool_)
        wanted[blocks] = True
        blocks = np.flatnonzero(wanted & found.left)
        if len(blocks) and leaf.probe is not None:
            memory, size, value = as_bytes(leaf.probe), found.sums.block, google_crc32c.value
            self._judge(leaf, found, blocks, [value(memory[at : at + size]) for at in (blocks * size).tolist()])

    def _judge(self, leaf: Leaf, found: _Pending, blocks: Blocks, crcs: list[int]) -> None:
        """Compare the checksums of blocks with those of the commit."""
        wrong = blocks[np.array(crcs, np.uint32) != found.expected[blocks]]
        size = found.sums.block
        if all(self._is_sound(leaf, block, size, int(found.expected[block])) for block in wrong.tolist()):
            found.left[blocks] = False
            if not found.left.any():
                self.pending.pop(leaf.path, None)

    def _touched(self, leaf: Leaf, size: int, rows: Rows) -> Blocks:
        """Return the blocks to compare for rows, some perhaps more than once."""
        count = -(-leaf.nbytes // size)
        length = leaf.shape[0] if leaf.shape else 1
        if leaf.nbytes <= SMALL or not leaf.shape or (rows is None and size <= COARSE):
            return np.arange(count)
        row = leaf.nbytes // length
        if isinstance(rows, slice):
            start, stop, step = rows.indices(length)
            if step == 1 and size <= COARSE:
                return np.arange(start * row // size, -(-stop * row // size))
            if step == 1:
                return np.arange(-(-start * row // size), count if stop == length else stop * row // size)
            rows = (
                torch.arange(start, stop, step, device="cpu")
                if step > 0
                else torch.arange(stop + 1, start + 1, -step, device="cpu")
            )
        if rows is None or size > COARSE:
            return np.arange(0)
        at = to_numpy(rows.reshape(-1).to("cpu", torch.int64)) % length * row
        first, last = at // size, (at + (row - 1)) // size
        found = first[:, None] + np.arange(int((last - first).max()) + 1 if len(at) else 0)
        every: Blocks = np.minimum(found, last[:, None]).reshape(-1)
        return every

    def _is_sound(self, leaf: Leaf, block: int, size: int, expected: int) -> bool:
        """Judge a block that differs: written in private memory, written on the storage, or damaged.

        Returns:
            False if the checksums of the leaf are no longer those of its stored bytes.
        """
        found = self._stored_crc(leaf, block * size, min((block + 1) * size, leaf.nbytes))
        if found is None:
            self.pending.pop(leaf.path, None)
        elif found != expected:
            raise CorruptStoreError(
                f"{self.url}: leaf {path_text(leaf.path)} is damaged{block_text(block, size, leaf.nbytes)}: the crc32c "
                f"is {found:08x}, expected {expected:08x}",
                url=self.url,
                hint="restore it from a copy; verify='none' reads it as it is",
            )
        return found is not None


def _run_of(tensor: Tensor, index: StoreIndex, out: Tensor | None) -> tuple[int, int]:
    """Return the bytes of a long run of rows that an index selects, if it can be copied as bytes."""
    if not tensor.ndim or not tensor.is_contiguous() or tensor.requires_grad or traced():
        return 0, 0
    rows = index[0] if index else slice(0, len(tensor), 1)
    inner = zip(index[1:], tensor.shape[1:], strict=False)
    if isinstance(rows, Tensor) or rows.step != 1 or any(term != slice(0, n, 1) for term, n in inner):
        return 0, 0
    row = tensor.nbytes // max(1, len(tensor))
    start, stop = rows.start * row, rows.stop * row
    if stop - start < LONG:
        return 0, 0
    if out is not None and not (
        out.shape == (rows.stop - rows.start, *tensor.shape[1:])
        and out.dtype is tensor.dtype
        and out.is_contiguous()
        and out.device.type == "cpu"
        and not (out.is_conj() or out.is_neg() or out.requires_grad)
    ):
        return 0, 0
    return start, stop
