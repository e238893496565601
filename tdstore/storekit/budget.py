"""Memory limits of reads: a file can declare any size.

A few bytes can describe a terabyte of fill value, or one piece that is read again and again. A read that would
allocate far more than the storage holds is refused, and so is one that is larger than the memory of this machine.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from errno import ENOMEM

import torch

from tdstore.errors import CorruptStoreError, StoreIOError
from tdstore.types import Path, path_text

SUSPECT_BYTES = 1 << 30
"""Bytes that one read may allocate beyond those on the storage ..."""
SUSPECT_RATIO = 100
"""... unless so many hundredths of the whole are there."""


def check_declared(total: int, max_bytes: int | None, url: str) -> None:
    """Refuse a store that declares more data than the caller allows.

    Args:
        total: bytes of all leaves together.
        max_bytes: the limit of the caller; None for no limit.
        url: the location, for messages.

    Raises:
        CorruptStoreError: more than `max_bytes`.

    Example:
        >>> check_declared(4096, None, "runs/1")
        >>> check_declared(4096, 1024, "runs/1")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        tdstore.errors.CorruptStoreError: runs/1 declares 4096 bytes of data, more than max_bytes=1024
        ...
    """
    if max_bytes is not None and total > max_bytes:
        raise CorruptStoreError(
            f"{url} declares {total} bytes of data, more than max_bytes={max_bytes}",
            url=url,
            hint="pass a larger max_bytes= if that is meant",
        )


def is_suspect(wanted: int, stored: int) -> bool:
    """Check whether a read of `wanted` bytes would allocate far more than the `stored` bytes on the storage.

    Args:
        wanted: bytes that the read allocates.
        stored: those of them that the storage holds.

    Example:
        >>> is_suspect(4 << 30, 1 << 20), is_suspect(4 << 30, 1 << 30), is_suspect(1 << 20, 0)
        (True, False, False)
    """
    return wanted - stored > SUSPECT_BYTES and wanted > SUSPECT_RATIO * stored


def refuse_absent(path: Path, wanted: int, stored: int, url: str) -> CorruptStoreError:
    """Build the error for a read for which `is_suspect` is true.

    Args:
        path: the leaf that takes the most.
        wanted: bytes that the read allocates.
        stored: those of them that the storage holds.
        url: the location, for messages.
    """
    return CorruptStoreError(
        f"{url}: reading {path_text(path)} would take {wanted} bytes of memory, of which {stored} are stored; "
        "the rest is fill value, or the same bytes repeated",
        url=url,
        hint="read some of its rows, or pass max_bytes= when opening it to allow so many",
    )


def check_holes(path: Path, wanted: int, stored: Callable[[], int], url: str) -> None:
    """Refuse to copy elements of a leaf that take far more memory than is stored.

    Args:
        path: the leaf.
        wanted: bytes that are copied.
        stored: returns the bytes on the storage. It is called for large reads only.
        url: the location, for messages.

    Raises:
        CorruptStoreError: `is_suspect` is true for the read.
    """
    if wanted > SUSPECT_BYTES and is_suspect(wanted, there := stored()):
        raise refuse_absent(path, wanted, there, url)


@contextmanager
def allocating(path: Path, shape: tuple[int, ...], dtype: torch.dtype, url: str) -> Iterator[None]:
    """Turn a failed allocation for the values of a leaf into an error that names the leaf.

    Args:
        path: the leaf.
        shape: of the values.
        dtype: of the values.
        url: the location, for messages.

    Raises:
        StoreIOError: there is no memory; `errno` is ENOMEM.

    Example:
        >>> with allocating(("obs",), (3,), torch.float32, "runs/1"):
        ...     torch.zeros(3)
        tensor([0., 0., 0.])
    """
    error: Exception | None = None
    if math.prod(shape) * dtype.itemsize <= memory_bytes():
        try:
            yield
            return
        except (RuntimeError, MemoryError) as raised:
            error = raised
    raise StoreIOError(
        f"{url}: no memory for {path_text(path)} of shape {list(shape)} and dtype {dtype}",
        url=url,
        hint="read some of its rows",
        errno=ENOMEM,
    ) from error


def no_room(nbytes: int) -> OSError:
    """Build the error for a mapping of a file that does not fit into the address space of this process.

    Args:
        nbytes: bytes of the mapping.

    Example:
        >>> no_room(4096).strerror
        'this process may not map 4096 bytes more'
    """
    return OSError(ENOMEM, f"this process may not map {nbytes} bytes more")


@functools.cache
def memory_bytes() -> int:
    """Return the size of this machine's memory in bytes."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
