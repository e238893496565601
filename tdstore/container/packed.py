"""Many values as two leaves: the place of each, and the bytes of all.

A header with a million captions takes seconds to open, and is written anew for every row. So from `COLUMN_FROM`
values on, a store keeps them below their key as two leaves: `spans`, int64 `[*B, 2]`, where each value begins and
ends; and `text`, uint8, which begins with two numbers (int64, little-endian): where the next value goes, and a mark,
which the envelope in the header has, too. Another mark means that the column was packed anew by somebody (`packing`).

* `0 <= begin <= end`: the value is the string `text[begin:end]`, in UTF-8.
* `(-1, -1)`: None; so rows that nobody wrote read as None.
* both negative: any other value, as JSON (`encode_value`) at `text[~begin:~end]`.

A row is written by adding its bytes and then its span: what others took before stays as it was.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from tdstore.container.nontensor import NonTensor, NonTensorStack, nested, spread_over
from tdstore.container.plain import from_plain, to_plain
from tdstore.container.terms import as_terms
from tdstore.container.unbatched import LEAF, UnbatchedTensor
from tdstore.errors import CorruptStoreError, UntrustedDataError
from tdstore.holes import HOLES, reserve
from tdstore.store import Cap, Store
from tdstore.types import LeafSpec, Path, Read, StoreIndex, Write, path_text

COLUMN_FROM = 256
"""So many values are leaves; fewer are in the header."""
SPANS, TEXT = "spans", "text"
HEAD = 16
_GAP = 4096
"""Values closer than this in the text are read by one request."""
_SPARE = 1 << 16

# A span is one element of this dtype in memory, so that shape operations see the batch and nothing else.
# Only its 16 bytes are moved around; no arithmetic ever sees it.
_PAIR = torch.complex128


def value_leaves(path: Path, envelope: Any) -> tuple[Path, ...]:
    """The paths of the leaves that hold a value; none if its envelope does."""
    if is_column(envelope):
        return column_leaves(path)
    return ((*path, LEAF),) if isinstance(envelope, dict) and envelope.get("unbatched") == 1 else ()


def stored_leaves(value: NonTensor) -> tuple[dict[str, Any], dict[str, Tensor]] | None:
    """The envelope and the leaves of a value that leaves are to hold.

    Raises:
        TypeError, ValueError: as `encode_rows`.
    """
    if isinstance(value, UnbatchedTensor):
        return {"unbatched": 1}, {LEAF: value.data}
    if isinstance(value, NonTensorStack) and value.numel() >= COLUMN_FROM:
        leaves = pack(value.flat(), value.batch_size)
        return as_envelope(leaves[TEXT]), leaves
    return None


def is_column(envelope: Any) -> bool:
    """Whether the envelope of a value says that it lies in two leaves."""
    return isinstance(envelope, dict) and "column" in envelope


def as_envelope(text: Tensor) -> dict[str, Any]:
    """The envelope of a column with that text."""
    return {"column": mark_of(text.numpy())}


def column_leaves(path: Path) -> tuple[Path, Path]:
    """The paths of the spans and of the text of a column."""
    return (*path, SPANS), (*path, TEXT)


def as_pairs(spans: Tensor) -> Tensor:
    """Spans `[*B, 2]` as one element each, sharing memory."""
    return torch.view_as_complex(spans.as_subclass(Tensor).view(torch.float64))


def as_spans(pairs: Tensor) -> Tensor:
    """The contrary of `as_pairs`."""
    return torch.view_as_real(pairs).view(torch.int64)


# -- values as bytes -------------------------------------------------------------------------
def encode_rows(values: Sequence[Any], start: int) -> tuple[np.ndarray[Any, Any], bytes]:
    """Spans `[n, 2]` and the bytes of values that are to lie from `start` on.

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
    spans = np.empty((len(begins), 2), np.int64)
    spans[:, 0], spans[:, 1] = begins, ends
    return spans, b"".join(parts)


def _encode_strings(values: Sequence[str], start: int) -> tuple[np.ndarray[Any, Any], bytes]:
    parts = list(map(_utf8, values))
    ends = np.cumsum(np.fromiter(map(len, parts), np.int64, len(parts))) + start
    return np.stack([np.concatenate(([start], ends[:-1])), ends], 1), b"".join(parts)


def _utf8(value: str) -> bytes:
    try:
        return value.encode()
    except UnicodeEncodeError:
        raise ValueError(f"the string {value!r} has a lone surrogate and cannot be written as UTF-8") from None


def decode_rows(spans: Tensor, text: np.ndarray[Any, Any], base: int = 0) -> list[Any]:
    """The values of spans `[n, 2]`; `text[0]` is the byte number `base`.

    Raises:
        ValueError: a span outside of the text, or bytes that are no value.
    """
    pairs = spans.reshape(-1, 2).numpy()
    if not len(pairs):
        return []
    first, last = bounds(pairs)
    low, high = int(first.min()), int(last.max())
    inside = np.flatnonzero(last)
    lowest = int(first[inside].min()) if len(inside) else base
    if low < 0 or lowest < base or high - base > len(text) or (first > last).any():
        raise ValueError(f"a span reaches beyond the {len(text)} bytes of its text")
    used = int((last - first).sum())
    dense = high - lowest <= 4 * used + _GAP
    begins, ends = pairs[:, 0].tolist(), pairs[:, 1].tolist()
    if dense:
        data: Any = text[lowest - base : high - base].tobytes()
        shift = lowest
    else:
        data, shift = memoryview(text), base  # type: ignore[arg-type]
    out: list[Any] = []
    for begin, end in zip(begins, ends, strict=True):
        if begin >= 0:
            out.append(str(data[begin - shift : end - shift], "utf-8") if end > begin else "")
        elif begin == end == -1:
            out.append(None)
        else:
            out.append(from_plain(msgspec.json.decode(data[~begin - shift : ~end - shift])))
    return out


def bounds(pairs: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Where the bytes of each span begin and end, of whatever kind it is; 0 and 0 where there are none.

    Raises:
        ValueError: one end of a span is of another kind than the other.
    """
    begins, ends = pairs[:, 0], pairs[:, 1]
    if ((begins < 0) != (ends < 0)).any():
        raise ValueError("a span has one negative end")
    first, last = np.where(begins < 0, ~begins, begins), np.where(ends < 0, ~ends, ends)
    return np.where(first == last, 0, first), np.where(first == last, 0, last)


def end_of(text: np.ndarray[Any, Any]) -> int:
    """Where the next value goes, from the first bytes of a text."""
    return int.from_bytes(text[:8].tobytes(), "little", signed=True)


def mark_of(text: np.ndarray[Any, Any]) -> int:
    """The mark of a text, from its first bytes."""
    return int.from_bytes(text[8:HEAD].tobytes(), "little", signed=True)


def text_of(data: bytes, unlike: int = 0) -> Tensor:
    """The leaf for the bytes of values, whose mark depends on them, and is another one than `unlike`."""
    mark = (len(data) & 0x3FFFFFFF) << 32 | zlib.crc32(data)
    head = (HEAD + len(data)).to_bytes(8, "little") + (mark + (mark == unlike)).to_bytes(8, "little")
    return torch.frombuffer(bytearray(head + data), dtype=torch.uint8)


def pack(values: Sequence[Any], shape: torch.Size) -> dict[str, Tensor]:
    """The two leaves of values in C order.

    Raises:
        TypeError, ValueError: as `encode_rows`.
    """
    spans, data = encode_rows(values, HEAD)
    return {SPANS: torch.from_numpy(spans).reshape(*shape, 2), TEXT: text_of(data)}


def specs_of(leaves: dict[str, Tensor], path: Path) -> dict[Path, LeafSpec]:
    """Specs for the leaves of a value at a path."""
    return {
        (*path, name): LeafSpec(leaf.shape, leaf.dtype, fill_value=-1 if name == SPANS else 0)
        for name, leaf in leaves.items()
    }


# -- the bytes -------------------------------------------------------------------------------
class Text:
    """The bytes of the values of a stack, in memory."""

    __slots__ = ("_base", "_bytes", "_url", "_what")

    def __init__(
        self, data: Tensor, base: int = 0, what: str = "the values of a stack", url: str | None = None
    ) -> None:
        self._bytes, self._base, self._what, self._url = data, base, what, url

    def values(self, spans: Tensor) -> list[Any]:
        """The values of spans `[n, 2]`.

        Raises:
            CorruptStoreError: they are not what was written.
        """
        try:
            return decode_rows(spans, self._bytes.as_subclass(Tensor).numpy(), self._base)
        except UntrustedDataError as error:
            raise UntrustedDataError(f"{self._what}: {error.message}", url=self._url, hint=error.hint) from error
        except (ValueError, TypeError, msgspec.DecodeError) as error:
            raise CorruptStoreError(f"{self._what} are damaged: {error}", url=self._url, hint=self._hint()) from error

    def _hint(self) -> str | None:
        return None

    def taken(self, spans: Tensor) -> Text:
        """The text for a copy of some spans."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return Text, (self._bytes.as_subclass(Tensor), self._base, self._what, self._url)


class LiveText(Text):
    """The text leaf of a store whose leaves are live tensors; it grows when rows are written."""

    __slots__ = ("_handle", "_path")

    def __init__(self, handle: Any, path: Path) -> None:
        url = handle.store.url
        super().__init__(handle.store.view((*path, TEXT)), 0, f"the values {path_text(path)} of {url}", url)
        self._handle, self._path = handle, path

    def is_at(self, handle: Any, path: Path) -> bool:
        """Whether this is the text of that column."""
        return self._handle is handle and self._path == path

    def values(self, spans: Tensor) -> list[Any]:
        if len(spans) and int(spans.max()) > len(self._bytes):
            self._bytes = self._handle.store.view((*self._path, TEXT))
        return super().values(spans)

    def _hint(self) -> str | None:
        shared = Cap.SHARED in self._handle.store.caps
        return "if another process added values, open the store again to see them" if shared else None

    def taken(self, spans: Tensor) -> Text:
        # Bytes are only ever added, so a mapping of now serves a copy for good. Shared memory that a text has
        # outgrown is used for something else, so there a copy takes its bytes along.
        if Cap.SHARED in self._handle.store.caps:
            leaves = pack(self.values(spans.reshape(-1, 2)), spans.shape[:-1])
            spans.copy_(leaves[SPANS])
            return Text(leaves[TEXT])
        return Text(self._bytes, 0, self._what, self._url)

    def add(self, values: list[Any]) -> Tensor:
        """Write values behind the others: their spans `[n, 2]`."""
        self._handle.check_writable()
        store = self._handle.store
        path = (*self._path, TEXT)
        self._bytes = store.view(path)  # others over the same store may have made it longer
        end = checked_end(self._bytes, len(self._bytes), self._what, self._url)
        spans, data = encode_rows(values, end)
        if end + len(data) > len(self._bytes):
            grow(self._handle, path, end + len(data))
            self._handle.crowded.add(self._path)
            # At once: a store of files takes a leaf of another length than it committed for the trace of a crash.
            self._handle.commit(self._handle.groups)
            self._bytes = store.view(path)
        store.write(text_writes(path, end, data))
        return torch.from_numpy(spans)

    def __reduce__(self) -> tuple[Any, ...]:
        return Text, (self._bytes.as_subclass(Tensor).clone(), 0, self._what, self._url)


def checked_end(head: Tensor, length: int, what: str, url: str | None) -> int:
    """Where the next value goes in a text of that length, from its first bytes.

    A crash may have left a number beyond the length that was committed: nothing that counts lies there.

    Raises:
        CorruptStoreError: the number is none.
    """
    end = end_of(head.as_subclass(Tensor).numpy())
    if end < HEAD:
        raise CorruptStoreError(f"{what} are damaged: their text is said to end at {end}", url=url)
    return min(end, length)


def grow(handle: Any, path: Path, needed: int) -> None:
    """Make a text longer, with room for what comes next: a store may have to copy it each time."""
    spec = handle.specs[path]
    length = max(needed, min(spec.shape[0] + spec.shape[0] // 4, needed + (64 << 20))) + _SPARE
    handle.store.resize({path: length})
    handle.specs[path] = spec.replace(shape=(length,))


def text_writes(path: Path, end: int, data: bytes) -> list[Write]:
    """The writes that add bytes behind `end`."""
    if not data:
        return []
    new = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    next_end = torch.frombuffer(bytearray((end + len(data)).to_bytes(8, "little")), dtype=torch.uint8)
    return [Write(path, (slice(end, end + len(data), 1),), new), Write(path, (slice(0, 8, 1),), next_end)]


# -- the entry -------------------------------------------------------------------------------
class PackedStack(NonTensorStack):
    """A stack whose values lie as bytes in one buffer: rows are taken like those of a tensor, and decoded when read."""

    __slots__ = ()
    _pool: Text

    @classmethod
    def over(cls, spans: Tensor, text: Text) -> PackedStack:
        """Over spans `[*B, 2]`, sharing their memory."""
        return cls._make(text, as_pairs(spans))

    def flat(self) -> list[Any]:
        return self._pool.values(as_spans(self._at.contiguous()).reshape(-1, 2))

    def positions(self) -> Tensor:
        spans = as_spans(self._at)
        begin, end = spans[..., 0], spans[..., 1]
        return 2 * begin + (begin != end)  # an empty value may begin where another does

    def _one(self, at: Tensor) -> Any:
        return self._pool.values(as_spans(at.reshape(1)))[0]

    def _copied(self, at: Tensor) -> NonTensor:
        at = at.contiguous()
        return PackedStack._make(self._pool.taken(as_spans(at)), at)

    def put(self, index: Any, part: NonTensor) -> bool:
        if not isinstance(self._pool, LiveText):
            return False
        shape = self._at[index].shape
        one = not isinstance(part, NonTensorStack)
        spans = self._pool.add([part.plain()] if one else spread_over(part, shape))
        pairs = as_pairs(spans)
        if HOLES:
            reserve(self._at, as_terms(index))
        self._at[index] = pairs[0] if one else pairs.reshape(shape)
        return True

    def lies_in(self, handle: Any, path: Path) -> bool:
        text = self._pool
        return isinstance(text, LiveText) and text.is_at(handle, path)

    def __reduce__(self) -> tuple[Any, ...]:
        leaves = pack(self.flat(), self.batch_size)
        return _packed, (leaves[SPANS], leaves[TEXT])

    def to_json(self) -> dict[str, Any]:
        values = nested([to_plain(v) for v in self.flat()], self.batch_size)
        return {"stack": values, "dim": 0, "ndim": self.ndim}


def _packed(spans: Tensor, text: Tensor) -> PackedStack:
    return PackedStack.over(spans, Text(text))


# -- reading from a store that gives no live tensors --------------------------------------------
def text_reads(spans: Tensor, path: Path, length: int, *, whole: bool) -> list[Read]:
    """The requests for the bytes of some spans: neighbours together, so that few are left.

    Raises:
        ValueError: a span reaches beyond a text of that length.
    """
    first, last = bounds(spans.reshape(-1, 2).numpy())
    if (last > length).any() or (first > last).any():
        raise ValueError(f"a span reaches beyond the {length} bytes of its text")
    some = np.flatnonzero(last > first)
    if not len(some):
        return []
    if whole:
        return [Read(path)]
    order = some[np.argsort(first[some], kind="stable")]
    begin, end = first[order], np.maximum.accumulate(last[order])
    cuts = np.flatnonzero(begin[1:] > end[:-1] + _GAP) + 1
    starts = begin[np.concatenate(([0], cuts))].tolist()
    stops = end[np.concatenate((cuts - 1, [len(end) - 1]))].tolist()
    return [Read(path, (slice(a, b, 1),)) for a, b in zip(starts, stops, strict=True)]


def from_reads(spans: Tensor, reads: Sequence[Read], values: Sequence[Tensor], what: str, url: str) -> PackedStack:
    """The stack of spans whose bytes were read by `text_reads`."""
    if len(reads) == 1:
        return PackedStack.over(spans, Text(values[0], _start(reads[0].index), what, url))
    spans = spans.clone()
    flat = spans.reshape(-1, 2).numpy()
    first, last = bounds(flat)
    starts = np.array([_start(read.index) for read in reads], np.int64)
    sizes = np.array([len(v) for v in values], np.int64)
    if reads:
        group = np.maximum(np.searchsorted(starts, first, side="right") - 1, 0)
        shift = np.where(last > first, (np.cumsum(sizes) - sizes)[group] - starts[group], 0)
        flat[:, 0] += np.where(flat[:, 0] < 0, -shift, shift)
        flat[:, 1] += np.where(flat[:, 1] < 0, -shift, shift)
    text = torch.cat(list(values)) if reads else torch.zeros(0, dtype=torch.uint8)
    return PackedStack.over(spans, Text(text, 0, what, url))


def _start(index: StoreIndex) -> int:
    return index[0].start if index and isinstance(index[0], slice) else 0


def check_leaves(path: Path, envelope: Any, specs: Any, batch: Sequence[int], url: str) -> None:
    """Refuse a value whose leaves are not those that its group needs.

    Raises:
        CorruptStoreError: one is missing, or has another dtype or shape.
    """
    if is_column(envelope):
        _check_column(path, envelope, specs, batch, url)
    elif any(leaf not in specs for leaf in value_leaves(path, envelope)):
        raise CorruptStoreError(f"the tensor {path_text(path)} of {url} is not there", url=url)


def _check_column(path: Path, envelope: Any, specs: Any, batch: Sequence[int], url: str) -> None:
    spans, text = (specs.get(leaf) for leaf in column_leaves(path))
    sound = (
        spans is not None
        and text is not None
        and (spans.dtype, text.dtype) == (torch.int64, torch.uint8)
        and len(text.shape) == 1
        and text.shape[0] >= HEAD
        and spans.shape[-1:] == (2,)
        and spans.shape[: len(batch)] == tuple(batch)
        and len(spans.shape) > len(batch)
        and type(envelope["column"]) is int
    )
    if not sound:
        raise CorruptStoreError(
            f"the values {path_text(path)} of {url} are not there: {spans!r} and {text!r} do not hold values "
            f"of a batch of {list(batch)}",
            url=url,
        )


def read_columns(handle: Any, wanted: Sequence[tuple[Path, Tensor]]) -> list[NonTensor]:
    """The entries of columns whose spans were read, by one more batched read.

    Raises:
        CorruptStoreError: the spans are none, or not those of the text that is there.
    """
    store: Store = handle.store
    whole = Cap.PARTIAL_READ not in store.caps
    asked = []
    for path, spans in wanted:
        text = (*path, TEXT)
        try:
            reads = text_reads(spans, text, store.specs([text])[0].shape[0], whole=whole)
        except ValueError as error:
            raise CorruptStoreError(
                f"the values {path_text(path)} of {store.url} are damaged: {error}", url=store.url
            ) from error
        asked.append(reads if whole or not reads else [Read(text, (slice(0, HEAD, 1),)), *reads])
    found = iter(store.read([read for reads in asked for read in reads]))
    out: list[NonTensor] = []
    for (path, spans), reads in zip(wanted, asked, strict=True):
        what = f"the values {path_text(path)} of {store.url}"
        values = [next(found) for _ in reads]
        if reads:
            check_mark(values[0], handle, path)
        if not whole:
            reads, values = reads[1:], values[1:]
        stack = from_reads(spans.reshape(-1, 2), reads, values, what, store.url)
        out.append(stack.reshape(spans.shape[:-1]))
    return out


def check_mark(head: Tensor, handle: Any, path: Path) -> None:
    """Refuse a text that is another one than that which the header was written with; `head`: its first bytes.

    Raises:
        CorruptStoreError: so it is.
    """
    if mark_of(head.as_subclass(Tensor).numpy()) != handle.groups[path[:-1]].values[path[-1]]["column"]:
        url = handle.store.url
        raise CorruptStoreError(
            f"the text of the values {path_text(path)} of {url} is not the one that was there when it was opened",
            url=url,
            hint="if another process writes there, it has packed the column anew: open the store again",
        )
