"""The two leaves of values per row (docs/reference/values.md), for backends that find strings in files of others.

A backend that meets an array of strings, of a kind that tensors do not have, puts them behind one another with
`Strings`, and gives the leaves `spans` and `text` and the envelope that names them. Pure.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

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
"""Bytes of strings that are taken into memory when a file of another program is opened."""

Ints = np.ndarray[Any, np.dtype[np.int64]]


def leaves_of_values(leaves: Mapping[Path, LeafSpec]) -> set[Path]:
    """Those of some leaves that hold values per row: what suits rows of tensors does not suit them.

    Both are there, and what nobody wrote reads as None: `spans` and `text` of a user are other leaves.
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
    """The leaf for the bytes of values, whose mark depends on them, and is another one than `unlike`."""
    mark = (len(data) & 0x3FFFFFFF) << 32 | zlib.crc32(data)
    head = (HEAD + len(data)).to_bytes(8, "little") + (mark + (mark == unlike)).to_bytes(8, "little")
    return torch.frombuffer(bytearray(head + data), dtype=torch.uint8)


def mark_of(text: np.ndarray[Any, Any]) -> int:
    """The mark of a text, from its first bytes."""
    return int.from_bytes(text[8:HEAD].tobytes(), "little", signed=True)


class Strings:
    """Strings as bytes behind one another, and where each lies.

    Example:
        >>> strings = Strings()
        >>> strings.add([b"a", b"", b"bcd"]).tolist()
        [[16, 17], [17, 17], [17, 20]]
    """

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._end = HEAD

    def add(self, values: Sequence[bytes]) -> Ints:
        """The spans `[n, 2]` of more strings; those that are not UTF-8 stay bytes.

        Raises:
            ValueError: all together they take more than `MOST` bytes.
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
        spans = np.stack([ends - sizes, ends], 1)
        spans[strange] = ~spans[strange]
        self._parts.append(joined)
        self._end += len(joined)
        return spans

    def leaves(self, path: Path, spans: Ints) -> tuple[dict[Path, Tensor], dict[str, Any]]:
        """The leaves of an entry with spans `[*shape, 2]`, and its envelope."""
        text = text_of(b"".join(self._parts))
        self._parts.clear()
        return {(*path, SPANS): torch.from_numpy(spans), (*path, TEXT): text}, {"column": mark_of(text.numpy())}

    def values(self, spans: Ints) -> Any:
        """The values of spans `[*shape, 2]` as lists in lists.

        Raises:
            ValueError: as for `add`, where some share their bytes: a header has those of each.
        """
        pairs = spans.reshape(-1, 2)
        if int(np.abs(pairs[:, 1] - pairs[:, 0]).sum()) > MOST:
            raise _too_many()
        text = b"".join(self._parts)
        made = {
            (a, b): text[a - HEAD : b - HEAD].decode() if a >= 0 else msgspec.json.decode(text[~a - HEAD : ~b - HEAD])
            for a, b in set(map(tuple, pairs.tolist()))
        }
        return _nested([made[a, b] for a, b in pairs.tolist()], spans.shape[:-1])


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


def entry(path: Path, strings: Strings, spans: Ints, *, leaves: bool) -> tuple[dict[str, Any], dict[Path, Tensor]]:
    """The envelope of an entry, and its leaves where there are enough values for that (and `leaves` allows it)."""
    if not leaves or math.prod(spans.shape[:-1]) < COLUMN_FROM:
        levels = {"ndim": spans.ndim - 1} if spans.ndim > 2 else {}
        return {"stack": strings.values(spans), "dim": 0, **levels}, {}
    found, envelope = strings.leaves(path, spans)
    return envelope, found


class Refusal(dict[str, Any]):
    """The envelope of an entry that a store could not read. Made by stores: no file has one."""


def refused(message: str, hint: str | None = None) -> Refusal:
    """The envelope of an entry that cannot be read: the caller is told when it asks, and the others stay readable."""
    return Refusal(refused=message, hint=hint)


def blocks(total: int, rows: int) -> Iterable[tuple[int, int]]:
    """`[start, stop)` of so many rows at a time."""
    return ((start, min(start + rows, total)) for start in range(0, total, rows))
