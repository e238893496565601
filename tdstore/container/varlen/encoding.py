"""Values per row as bytes behind one another, and where each lies: see `packed`. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import numpy as np
from torch import Tensor

from tdstore.container.values.codecs import from_plain, to_plain
from tdstore.errors import InvalidArgumentError

Ints = np.ndarray[Any, np.dtype[np.int64]]
Bytes = np.ndarray[Any, np.dtype[np.uint8]]

_GAP = 4096


def encode_rows(values: Sequence[Any], start: int) -> tuple[Ints, bytes]:
    """Encode values that are to lie from `start` on as offsets `[n, 2]` and bytes.

    Neighbours that are one object may share theirs.

    Raises:
        TypeError: a value that is not plain data. ValueError: a string with a lone surrogate.
    """
    if len(values) > 1 and set(map(type, values)) == {str}:
        return _encode_strings(values, start)
    parts: list[bytes] = []
    begins: list[int] = []
    ends: list[int] = []
    at = start
    before: Any = parts  # equal to nothing that may come
    for value in values:
        if value is before:
            begins.append(begins[-1])
            ends.append(ends[-1])
            continue
        before = value
        if type(value) is str:
            data = _utf8(value)
            begins.append(at)
            at += len(data)
            ends.append(at)
        elif value is None:
            begins.append(-1)
            ends.append(-1)
            continue
        else:
            data = msgspec.json.encode(to_plain(value))
            begins.append(~at)
            at += len(data)
            ends.append(~at)
        parts.append(data)
    offsets = np.empty((len(begins), 2), np.int64)
    offsets[:, 0], offsets[:, 1] = begins, ends
    return offsets, b"".join(parts)


def _encode_strings(values: Sequence[str], start: int) -> tuple[Ints, bytes]:
    parts = list(map(_utf8, values))
    ends = np.cumsum(np.fromiter(map(len, parts), np.int64, len(parts))) + start
    return np.stack([np.concatenate(([start], ends[:-1])), ends], 1), b"".join(parts)


def _utf8(value: str) -> bytes:
    try:
        return value.encode()
    except UnicodeEncodeError:
        raise InvalidArgumentError(
            f"the string {value!r} has a lone surrogate and cannot be written as UTF-8"
        ) from None


def decode_rows(pairs: Ints, text: Bytes, base: int = 0) -> list[Any]:
    """Decode the values of offsets `[n, 2]`. `text[0]` is the byte number `base`.

    Raises:
        InvalidArgumentError: an offset outside of the text, values that overlap, or bytes that are no value.
    """
    if not len(pairs):
        return []
    if (found := _strings(pairs, text, base)) is not None:
        return found
    first, last = bounds(pairs)
    low, high = int(first.min()), int(last.max())
    inside = np.flatnonzero(last)
    lowest = int(first[inside].min()) if len(inside) else base
    if low < 0 or lowest < base or high - base > len(text) or (first > last).any():
        raise InvalidArgumentError(f"an offset reaches beyond the {len(text)} bytes of its data")
    used, room = int((last - first).sum()), max(0, high - lowest)
    begins, ends = pairs[:, 0].tolist(), pairs[:, 1].tolist()
    if used > room:  # else all values together are no larger than the text
        return _decode_shared(begins, ends, text, base, room)
    if room > 4 * used + _GAP:
        return _decode(begins, ends, memoryview(text), base)  # type: ignore[arg-type]
    return _decode(begins, ends, text[lowest - base : high - base].tobytes(), lowest)


def _strings(pairs: Ints, text: Bytes, base: int) -> list[str] | None:
    """Decode strings that lie in the data, none twice, quickly: the usual column. Return None for others."""
    begins, ends = pairs[:, 0], pairs[:, 1]
    sizes = ends - begins
    if np.minimum.reduce(sizes) < 0:
        return None
    low, high, used = int(np.minimum.reduce(begins)), int(np.maximum.reduce(ends)), int(np.add.reduce(sizes))
    if low < base or high - base > len(text) or used > high - low:
        return None
    if high - low > 4 * used + _GAP:
        data: Any = memoryview(text)  # type: ignore[arg-type]
        return [data[a:b].tobytes().decode() for a, b in _both(begins - base, ends - base)]
    whole = text[low - base : high - base].tobytes()
    inside = _both(begins - low, ends - low)
    if whole.isascii():
        letters = whole.decode("ascii")
        return [letters[a:b] for a, b in inside]
    return [whole[a:b].decode() for a, b in inside]


def _both(begins: Ints, ends: Ints) -> Iterable[tuple[int, int]]:
    return zip(begins.tolist(), ends.tolist(), strict=True)


def _decode(begins: list[int], ends: list[int], data: Any, shift: int) -> list[Any]:
    out: list[Any] = []
    for begin, end in zip(begins, ends, strict=True):
        if begin >= 0:
            out.append(str(data[begin - shift : end - shift], "utf-8") if end > begin else "")
        elif begin == end == -1:
            out.append(None)
        else:
            out.append(from_plain(msgspec.json.decode(data[~begin - shift : ~end - shift])))
    return out


def _decode_shared(begins: list[int], ends: list[int], text: Bytes, base: int, room: int) -> list[Any]:
    """Decode values of which some are one, each once. Else a small file could ask for any amount of memory."""
    made: dict[tuple[int, int], Any] = {}
    data: Any = memoryview(text)  # type: ignore[arg-type]
    for pair in zip(begins, ends, strict=True):
        if pair in made:
            continue
        room -= abs(pair[1] - pair[0])
        if room < 0:
            raise InvalidArgumentError("its values overlap")
        made[pair] = _decode([pair[0]], [pair[1]], data, base)[0]
    return [made[pair] for pair in zip(begins, ends, strict=True)]


def bounds(pairs: Ints) -> tuple[Ints, Ints]:
    """Compute where the bytes of each value begin and end, of whatever kind it is; 0 and 0 where it has none.

    Raises:
        InvalidArgumentError: the two offsets of a value are of different kinds.
    """
    begins, ends = pairs[:, 0], pairs[:, 1]
    if len(pairs) and np.minimum.reduce(pairs, None) >= 0 and (ends != begins).all():
        return begins, ends
    if ((begins < 0) != (ends < 0)).any():
        raise InvalidArgumentError("only one offset of a value is negative")
    first, last = np.where(begins < 0, ~begins, begins), np.where(ends < 0, ~ends, ends)
    return np.where(first == last, 0, first), np.where(first == last, 0, last)


def in_order(first: Ints, last: Ints) -> tuple[Ints, Ints]:
    """Sort bounds by begin, with how far the bytes of each and those before it reach. Empty ones are left out."""
    some = np.flatnonzero(last > first)
    order = some[np.argsort(first[some], kind="stable")]
    return first[order], np.maximum.accumulate(last[order])


def pieces(begin: Ints, end: Ints, gap: int = 0) -> tuple[Ints, Ints]:
    """Merge bytes `in_order` that are at most `gap` bytes apart, and return where each piece begins and ends."""
    if not len(begin):
        return begin, end
    cuts = np.flatnonzero(begin[1:] > end[:-1] + gap) + 1
    return begin[np.concatenate(([0], cuts))], end[np.concatenate((cuts - 1, [len(end) - 1]))]


def moved(offsets: Tensor, found: tuple[Ints, Ints], starts: Ints, stops: Ints) -> Tensor:
    """Move offsets `[*B, 2]` and their bounds to where their bytes are once those pieces lie back to back."""
    offsets = offsets.clone()
    if len(starts):
        flat = offsets.reshape(-1, 2).numpy()
        first, last = found
        to = np.cumsum(stops - starts) - stops
        shift = to[np.maximum(starts.searchsorted(first, side="right") - 1, 0)]
        shift[first == last] = 0
        shift[flat[:, 0] < 0] *= -1
        flat += shift[:, None]
    return offsets
