"""Var-length columns (docs/reference/values.md) made of the strings in files of other programs.

A backend that finds an array of strings, which no tensor can hold, concatenates them with `Strings`, and returns
the leaves `spans` (offsets) and `text` (data) and the value record that names them. Pure.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from torch import Tensor

from tdstore.types import LeafSpec, Path
from tdstore.values import encode_value

SPANS, TEXT = "spans", "text"
HEAD = 16
COLUMN_FROM = 256
"""So many values are leaves; fewer are in the header."""
MOST = 1 << 30
"""Bytes of strings that are read into memory when a file of another program is opened."""

Ints = np.ndarray[Any, np.dtype[np.int64]]


def leaves_of_values(leaves: Mapping[Path, LeafSpec]) -> set[Path]:
    """Return the leaves that belong to var-length columns: chunk options for rows of tensors do not suit them.

    A column has both leaves, with the fill values of None: a user's leaves called `spans` and `text` are not a column.
    """
    found: set[Path] = set()
    for path, spec in leaves.items():
        if path[-1] != SPANS or spec.dtype != torch.int64 or spec.shape[-1:] != (2,) or spec.fill_value != -1:
            continue
        text = leaves.get(beside := (*path[:-1], TEXT))
        if text is not None and text.dtype == torch.uint8 and len(text.shape) == 1:
            found |= {path, beside}
    return found


def text_of(data: bytes, unlike: int = 0) -> Tensor:
    """Build the data leaf, whose epoch depends on the bytes and differs from that of `unlike`.

    Args:
        data: the strings, concatenated.
        unlike: the epoch of the leaf that this one replaces.
    """
    mark = (len(data) & 0x3FFFFFFF) << 32 | zlib.crc32(data)
    head = (HEAD + len(data)).to_bytes(8, "little") + (mark + (mark == unlike)).to_bytes(8, "little")
    return torch.frombuffer(bytearray(head + data), dtype=torch.uint8)


def mark_of(text: np.ndarray[Any, Any]) -> int:
    """Read the epoch of a data leaf from its first bytes."""
    return int.from_bytes(text[8:HEAD].tobytes(), "little", signed=True)


class StringsLeaf(NamedTuple):
    """A leaf in memory, made of strings in the file of another program."""

    spec: LeafSpec
    data: Tensor

    @staticmethod
    def over(data: Tensor) -> StringsLeaf:
        """Create the leaf of some data."""
        return StringsLeaf(LeafSpec(data.shape, data.dtype), data)


class Strings:
    """Concatenated strings, and the offsets of each.

    Example:
        >>> strings = Strings()
        >>> strings.add([b"a", b"", b"bcd"]).tolist()
        [[16, 17], [17, 17], [17, 20]]
    """

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._end = HEAD

    def add(self, values: Sequence[bytes]) -> Ints:
        """Append strings and return their offsets `[n, 2]`; strings that are not UTF-8 stay bytes.

        Raises:
            ValueError: all strings together take more than `MOST` bytes.
        """
        sizes = np.fromiter(map(len, values), np.int64, len(values))
        joined = b"".join(values)
        if self._end + len(joined) > MOST:
            raise _too_many()
        strange = [] if joined.isascii() else [i for i, value in enumerate(values) if not _is_text(value)]
        if strange:
            values = list(values)
            for i in strange:
                values[i] = msgspec.json.encode(encode_value(values[i]))
            sizes = np.fromiter(map(len, values), np.int64, len(values))
            joined = b"".join(values)
        ends = np.cumsum(sizes) + self._end
        offsets = np.stack([ends - sizes, ends], 1)
        offsets[strange] = ~offsets[strange]
        self._parts.append(joined)
        self._end += len(joined)
        return offsets

    def leaves(self, path: Path, offsets: Ints) -> tuple[dict[Path, Tensor], dict[str, Any]]:
        """Return the leaves of a column with offsets `[*shape, 2]`, and its value record.

        Args:
            path: the entry.
            offsets: results of `add`, in the shape of the entry.
        """
        text = text_of(b"".join(self._parts))
        self._parts.clear()
        return {(*path, SPANS): torch.from_numpy(offsets), (*path, TEXT): text}, {"column": mark_of(text.numpy())}

    def values(self, offsets: Ints) -> Any:
        """Return the values at offsets `[*shape, 2]` as nested lists.

        Raises:
            ValueError: as in `add`, if values share their bytes: a header holds the bytes of each value.
        """
        pairs = offsets.reshape(-1, 2)
        if int(np.abs(pairs[:, 1] - pairs[:, 0]).sum()) > MOST:
            raise _too_many()
        text = b"".join(self._parts)
        made = {
            (a, b): text[a - HEAD : b - HEAD].decode() if a >= 0 else msgspec.json.decode(text[~a - HEAD : ~b - HEAD])
            for a, b in set(map(tuple, pairs.tolist()))
        }
        return _nested([made[a, b] for a, b in pairs.tolist()], offsets.shape[:-1])


def _too_many() -> ValueError:
    return ValueError(f"has strings of more than {MOST} bytes")


def _nested(values: list[Any], shape: Sequence[int]) -> Any:
    if len(shape) < 2:
        return values
    step = math.prod(shape[1:])
    return [_nested(values[i * step : (i + 1) * step], shape[1:]) for i in range(shape[0])]


def _is_text(value: bytes) -> bool:
    try:
        value.decode()
    except UnicodeDecodeError:
        return False
    return True


def entry(path: Path, strings: Strings, offsets: Ints, *, leaves: bool) -> tuple[dict[str, Any], dict[Path, Tensor]]:
    """Return the value record of an entry, and its leaves if it has enough values (and `leaves` allows it).

    Args:
        path: the entry.
        strings: the strings.
        offsets: of each value `[*shape, 2]`.
        leaves: whether the entry may have leaves; otherwise its values are in the record.
    """
    if not leaves or math.prod(offsets.shape[:-1]) < COLUMN_FROM:
        levels = {"ndim": offsets.ndim - 1} if offsets.ndim > 2 else {}
        return {"stack": strings.values(offsets), "dim": 0, **levels}, {}
    found, record = strings.leaves(path, offsets)
    return record, found


class Refusal(dict[str, Any]):
    """The value record of an entry that a store could not read. Stores create it; no file contains one."""


def refused(message: str, hint: str | None = None) -> Refusal:
    """Build the value record of an unreadable entry: reading it raises the error, the other entries stay readable.

    Args:
        message: the text of the error.
        hint: its remedy.

    Example:
        >>> refused("the column has no values")["refused"]
        'the column has no values'
    """
    return Refusal(refused=message, hint=hint)


def blocks(total: int, rows: int) -> Iterable[tuple[int, int]]:
    """Yield `[start, stop)` of `rows` rows at a time.

    Args:
        total: number of rows.
        rows: rows per block.

    Example:
        >>> list(blocks(5, 2))
        [(0, 2), (2, 4), (4, 5)]
    """
    return ((start, min(start + rows, total)) for start in range(0, total, rows))
