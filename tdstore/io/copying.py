"""Stream leaves to a store in blocks: the next block is read while the current one is written and checked."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tdstore.errors import CorruptStoreError
from tdstore.io.blocks import Batch, index_shape, padded
from tdstore.io.mapped import drop_behind
from tdstore.io.partial import bits
from tdstore.io.progress import Progress
from tdstore.store import Cap, Store
from tdstore.storekit.checksums import crc32c
from tdstore.threads import ThreadPool
from tdstore.types import LeafSpec, Path, Read, StoreIndex, Write, path_text

Outs = Sequence[Tensor] | None
ReadBatch = Callable[[Batch, Outs], list[Tensor]]
_CHECKPOINT_SHARE = 10
"""Smallest ratio of the time between checkpoints to the time that a checkpoint takes."""


@dataclass
class Checkpoints:
    """Checkpoints of a copy: commits that record its progress, at intervals."""

    save: Callable[[int], None]
    """Commits with the number of copied batches."""
    every: float
    """Seconds between two checkpoints; 0: after each batch."""
    saved: int = -1
    """The number of batches of the last checkpoint; -1 before the first."""
    _due: float = field(init=False)

    def __post_init__(self) -> None:
        self._due = time.monotonic() + self.every

    def reach(self, done: int) -> None:
        """Record the number of copied batches, and commit if a checkpoint is due."""
        if time.monotonic() >= self._due:
            self.commit(done)

    def commit(self, done: int) -> None:
        """Commit now."""
        began = time.monotonic()
        self.save(done)
        self.saved = done
        now = time.monotonic()
        self._due = now + (max(self.every, _CHECKPOINT_SHARE * (now - began)) if self.every else 0)


class StoreReader:
    """A reader of batches of an open store. A leaf is compared with its checksums before its first batch is read."""

    def __init__(self, store: Store, *, verify: bool) -> None:
        self._store = store
        self._unverified = verify
        self._verified: set[Path] = set()

    def __call__(self, batch: Batch, outs: Outs) -> list[Tensor]:
        """Read a batch, into `outs` if given."""
        if self._unverified:
            self._verify([path for path, _ in batch if path not in self._verified])
        targets = [None] * len(batch) if outs is None else outs
        values = self._store.read([Read(path, index, out) for (path, index), out in zip(batch, targets, strict=True)])
        for path, index in batch:
            drop_behind(self._store, path, index)
        return values

    def _verify(self, paths: list[Path]) -> None:
        for fault in self._store.verify(paths) if paths else ():
            raise CorruptStoreError(
                f"{self._store.url}: {path_text(fault.path)} cannot be copied: {fault.reason}",
                url=self._store.url,
                hint="restore it from a copy, or leave it out with keys=; verify='target' copies it as it is",
            )
        self._verified.update(paths)


class Buffers:
    """Reusable memory for one batch."""

    def __init__(self, specs: Mapping[Path, LeafSpec], nbytes: int) -> None:
        self._specs = specs
        self._flat = torch.empty(nbytes, dtype=torch.uint8, device="cpu")

    def views(self, batch: Batch) -> list[Tensor]:
        """Return contiguous tensors of the shapes and dtypes of a batch."""
        found, at = [], 0
        for path, index in batch:
            spec = self._specs[path]
            shape = index_shape(spec.shape, index)
            nbytes = batch_bytes(self._specs, [(path, index)])
            part = self._flat[at : at + nbytes]
            found.append(
                part.view(spec.dtype).view(shape) if nbytes else torch.empty(shape, dtype=spec.dtype, device="cpu")
            )
            at += padded(nbytes)
        return found


def batch_bytes(specs: Mapping[Path, LeafSpec], batch: Batch, *, pad: bool = False) -> int:
    """Return the bytes of a batch, or of the buffer that it needs."""
    total = 0
    for path, index in batch:
        nbytes = specs[path].dtype.itemsize
        for n in index_shape(specs[path].shape, index):
            nbytes *= n
        total += padded(nbytes) if pad else nbytes
    return total


def stream(
    read: ReadBatch,
    target: Store,
    specs: Mapping[Path, LeafSpec],
    batches: Sequence[Batch],
    *,
    bar: Progress,
    own_buffers: bool,
    start: int = 0,
    verify: bool = True,
    checkpoints: Checkpoints | None = None,
) -> None:
    """Copy batches from number `start` on into leaves that `target` has created. The caller commits.

    It needs memory for two batches, and with `verify` for a third.

    Args:
        read: reads a batch; called in a separate thread, one batch after another.
        target: the store to write to.
        specs: the leaves of `target`.
        batches: the batches of the whole copy.
        bar: counts the copied bytes.
        own_buffers: whether `read` fills the buffers that are passed to it.
        start: the number of the first batch to copy.
        verify: whether to read each batch back and compare it.
        checkpoints: commits with the progress, at intervals.

    Raises:
        CorruptStoreError: the bytes read back differ from the written ones.
    """
    todo = batches[start:]
    size = max((batch_bytes(specs, batch, pad=True) for batch in todo), default=0)
    slots = [Buffers(specs, size) for _ in range(min(2, len(todo)))] if own_buffers else []
    back = Buffers(specs, size) if verify else None

    def fetch(number: int) -> list[Tensor]:
        batch = todo[number]
        return read(batch, slots[number % 2].views(batch) if slots else None)

    done = start
    with (
        _commit_on_failure(checkpoints, lambda: done),
        ThreadPool(1, thread_name_prefix="tdstore-copy") as reader,
    ):
        coming = reader.submit(fetch, 0) if todo else None
        for number, batch in enumerate(todo):
            assert coming is not None
            values = coming.result()
            coming = reader.submit(fetch, number + 1) if number + 1 < len(todo) else None
            target.write([Write(path, index, value) for (path, index), value in zip(batch, values, strict=True)])
            if back is not None:
                _compare(target, batch, values, back.views(batch))
                for path, index in batch:
                    drop_behind(target, path, index)
            done += 1
            bar.advance(batch_bytes(specs, batch))
            if checkpoints is not None and number + 1 < len(todo):
                checkpoints.reach(done)


@contextmanager
def _commit_on_failure(checkpoints: Checkpoints | None, done: Callable[[], int]) -> Iterator[None]:
    """Commit the batches after the last checkpoint if the body fails."""
    try:
        yield
    except BaseException as error:
        if checkpoints is not None and 0 <= checkpoints.saved < done():
            try:
                checkpoints.commit(done())
            except Exception as second:  # the target itself failed: the last checkpoint still exists
                error.add_note(f"(and committing what was copied so far failed: {second})")
        raise


def _compare(target: Store, batch: Batch, values: Sequence[Tensor], outs: Sequence[Tensor]) -> None:
    found = target.read([Read(path, index, out) for (path, index), out in zip(batch, outs, strict=True)])
    for (path, index), value, back in zip(batch, values, found, strict=True):
        written, there = bits(value), bits(back)
        if torch.equal(written, there) or (value.dtype is torch.bool and torch.equal(written.ne(0), there.ne(0))):
            continue
        raise CorruptStoreError(
            f"{target.url}: {path_text(path)}{_place(value, back, index)} reads back other than it was written: "
            f"crc32c {crc32c(there.numpy()):08x}, expected {crc32c(written.numpy()):08x}",
            url=target.url,
            hint="the storage or its server is at fault; the copy was not finished: copy to another location",
        )


def _place(value: Tensor, back: Tensor, index: StoreIndex) -> str:
    """Describe the rows of the leaf that differ."""
    if not value.ndim:
        return ""
    rows = (bits(value) != bits(back)).view(len(value), -1).any(1).nonzero().reshape(-1)
    first = index[0].start if index and isinstance(index[0], slice) else 0
    return f" rows {first + int(rows[0])} to {first + int(rows[-1])}"


def pieces_work(source: Cap, target: Cap, *, verify: bool) -> bool:
    """Check whether leaves can be copied in pieces; without these abilities they are copied as a whole."""
    return Cap.PARTIAL_READ in source and Cap.PARTIAL_WRITE in target and (not verify or Cap.PARTIAL_READ in target)
