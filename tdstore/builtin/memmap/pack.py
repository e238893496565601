"""The file of packed leaves: the small leaves of a dataset in one file, each aligned, mapped together."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from tdstore.builtin.mapping import Buffer, make_private, map_memory
from tdstore.builtin.memmap.layout import LeafFile
from tdstore.storekit import files
from tdstore.storekit.documents import PACK, PACK_ALIGN

_PARTS = 1000
"""A system call takes 1,024 parts at most, and each leaf has two: its bytes, and zeros up to the next one."""


def arrange(leaves: Iterable[LeafFile]) -> int:
    """Assign leaves their places, one after the other; returns the length of the file."""
    end = 0
    for leaf in leaves:
        leaf.file, leaf.packed, leaf.offset = (PACK,), True, end
        end += -(-leaf.nbytes // PACK_ALIGN) * PACK_ALIGN
    return end


class Pack:
    """The file of the packed leaves of one open store.

    Args:
        root: descriptor of the folder.
        nbytes: bytes of the file up to the end of the last leaf.
        shared: whether others see what is written to its leaves.
    """

    __slots__ = ("_fd", "_memory", "nbytes", "root", "shared")

    def __init__(self, root: int, nbytes: int, *, shared: bool) -> None:
        self.root = root
        self.nbytes = nbytes
        self.shared = shared
        self._fd = -1
        self._memory: Buffer | None = None

    @property
    def fd(self) -> int:
        """A descriptor of the file, which belongs to this object."""
        if self._fd < 0:
            self._fd = files.open_plain(PACK, self.root, os.O_RDWR if self.shared else os.O_RDONLY)
        return self._fd

    def create(self) -> None:
        """Make the file, and reserve its disk space.

        Raises:
            OSError: the storage is full; the file was removed.
        """
        self._fd = files.create_empty(PACK, self.root)
        try:
            files.truncate(self._fd, self.nbytes)
            files.allocate(self._fd, 0, self.nbytes)
        except BaseException:
            self.close()
            files.unlink(PACK, self.root)
            raise

    def adopt(self, fd: int) -> None:
        """Take over a descriptor of the file."""
        self._fd = fd

    @property
    def is_mapped(self) -> bool:
        """Check whether leaves can be shown without a call of the system."""
        return self._memory is not None

    def map(self) -> None:
        """Map the file."""
        if self._memory is None:
            self._memory = map_memory(self.fd, self.nbytes, shared=self.shared)

    def tensor(self, leaf: LeafFile) -> Tensor:
        """Return the mapped leaf, with a count of versions of its own."""
        if self._memory is None:
            self.map()
        assert self._memory is not None
        flat = torch.frombuffer(self._memory, dtype=leaf.dtype, count=leaf.shape.numel(), offset=leaf.offset)
        # torch takes numbers in half the time of a `torch.Size`.
        return flat if len(leaf.shape) == 1 else flat.view(*leaf.shape) if leaf.shape else flat.view(())

    def write(self, parts: Sequence[tuple[LeafFile, memoryview]]) -> None:
        """Write whole leaves, in few system calls where they lie beside each other."""
        run: list[memoryview] = []
        start = end = 0
        for leaf, data in sorted(parts, key=lambda part: part[0].offset):
            gap = leaf.offset - end
            if run and (not 0 <= gap < PACK_ALIGN or len(run) >= _PARTS):
                files.write_parts(self.fd, run, start)
                run = []
            if not run:
                start = leaf.offset
            elif gap:
                run.append(memoryview(bytes(gap)))
            run.append(data)
            end = leaf.offset + leaf.nbytes
        if run:
            files.write_parts(self.fd, run, start)

    def make_private(self) -> None:
        """Have what is written to mapped leaves from now on stay in this process."""
        if self._memory is not None:
            make_private(torch.frombuffer(self._memory, dtype=torch.uint8), self.fd)

    def close(self) -> None:
        """Close the descriptor; what is mapped remains as long as its tensors."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        self._memory = None
