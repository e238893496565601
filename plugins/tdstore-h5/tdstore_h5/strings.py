"""Datasets of strings of other programs: all of variable length (h5py's own), or all of one length."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import h5py
import numpy as np
from h5py import h5d
from torch import Tensor

from tdstore.errors import InvalidArgumentError
from tdstore.storekit.foreign_strings import MOST, Strings, blocks, entry, refused
from tdstore.types import Path, path_text
from tdstore_h5.faults import is_system_error
from tdstore_h5.file.tree import FREE, RATIO
from tdstore_h5.rows.contiguous import Bytes

Raw = Callable[[int, int], "bytes | memoryview | Bytes"]
BLOCK = 1 << 16
"""Strings per batch."""
_DEFLATE = 1
_READ = "read it with h5py; td.exclude(...) has the other keys"


def read(
    dataset: h5py.Dataset, path: Path, url: str, raw: Raw, *, leaves: bool
) -> tuple[dict[str, Any], dict[Path, Tensor]]:
    """Return the value record of a dataset of strings, and its leaves if there are many and `leaves` allows them.

    An unreadable dataset, or one that declares more than it holds, becomes an entry that raises an error when read.
    """
    try:
        check(dataset, raw)
        strings, offsets = Strings(), np.empty((math.prod(dataset.shape), 2), np.int64)
        row = math.prod(dataset.shape[1:])
        for first, last in blocks(dataset.shape[0], max(1, BLOCK // max(1, row))):
            offsets[first * row : last * row] = strings.add(dataset[first:last].reshape(-1).tolist())
        return entry(path, strings, offsets.reshape(*dataset.shape, 2), leaves=leaves)
    except OSError as error:
        if is_system_error(error):
            raise
        return refuse(path, url, ValueError(f"is damaged: {' '.join(str(error).split())}")), {}
    except ValueError as error:
        return refuse(path, url, error), {}


def refuse(path: Path, url: str, error: ValueError) -> dict[str, Any]:
    """Return the value record of a dataset of strings that cannot be read."""
    return refused(f"{url}: the dataset {path_text(path)} {error}", _READ)


def check(dataset: h5py.Dataset, raw: Raw) -> None:
    """Compute the size of all strings before any is read: a small file could name one of them many times.

    Raises:
        InvalidArgumentError: the size is larger than the dataset can hold.
    """
    count, kind, stored = math.prod(dataset.shape), dataset.id.get_type(), dataset.id.get_storage_size()
    if not kind.is_variable_str():
        declared = count * dataset.dtype.itemsize
        if declared > max(FREE, RATIO * stored) or declared > MOST:
            raise InvalidArgumentError(f"declares {declared} bytes of strings, of which {stored} are stored")
        return
    record = 8 + dataset.file.id.get_create_plist().get_sizes()[0]  # length, address of a heap, number in it
    if count * record > max(FREE, RATIO * stored):
        raise InvalidArgumentError(f"declares {count} strings in {stored} bytes")
    total, size = 0, int(dataset.file.id.get_filesize())
    for records in _records(dataset, record, raw):
        total += int(records[:, :4].copy().view("<u4").sum(dtype=np.int64))
        if total > min(size, MOST):
            raise InvalidArgumentError(f"declares more than {min(size, MOST)} bytes of strings, in a file of {size}")


def _records(dataset: h5py.Dataset, record: int, raw: Raw) -> Iterator[Bytes]:
    """Yield the record of each string, `[n, record]`; its length is first."""
    found, plist = dataset.id, dataset.id.get_create_plist()
    filters = [plist.get_filter(i)[0] for i in range(plist.get_nfilters())]
    if plist.get_layout() not in (h5d.CONTIGUOUS, h5d.CHUNKED):
        raise InvalidArgumentError("has strings in a layout that is not known here")
    if plist.get_layout() == h5d.CONTIGUOUS:
        if (offset := found.get_offset()) is not None:
            for first, last in blocks(found.get_storage_size(), BLOCK * record):
                yield np.frombuffer(raw(offset + first, offset + last), np.uint8).reshape(-1, record)
        return
    for number in range(found.get_num_chunks()):
        mask, data = found.read_direct_chunk(found.get_chunk_info(number).chunk_offset)
        used = [name for i, name in enumerate(filters) if not mask >> i & 1]
        if used not in ([], [_DEFLATE]):
            raise InvalidArgumentError("has strings with a filter that is not known here")
        size = math.prod(plist.get_chunk()) * record
        if used:
            try:
                data = zlib.decompressobj().decompress(data, size + 1)
            except zlib.error as error:
                raise InvalidArgumentError(f"has a chunk that cannot be decompressed: {error}") from None
        if len(data) != size:
            raise InvalidArgumentError(f"has a chunk of {len(data)} bytes instead of {size}")
        yield np.frombuffer(data, np.uint8).reshape(-1, record)
