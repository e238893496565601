"""Many values as two leaves: the place of each, and the bytes of all.

A header with a million captions takes seconds to open, and is written anew for every row. So from `COLUMN_FROM`
values on, a store keeps them below their key as two leaves: `spans`, int64 `[*B, 2]`, where each value begins and
ends; and `text`, uint8, which begins with two numbers (int64, little-endian): where the next value goes, and a mark,
which the value record in the header has, too. Another mark means that the column was compacted since (`compaction`).

* `0 <= begin <= end`: the value is the string `text[begin:end]`, in UTF-8.
* `(-1, -1)`: None; so rows that nobody wrote read as None.
* both negative: any other value, as JSON (`encode_value`) at `text[~begin:~end]`.

A row is written by adding its bytes and then its offsets: what was read before stays as it was.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from tdstore.container.entries.unbatched import LEAF, UnbatchedTensor
from tdstore.container.values.codecs import pickling, to_plain, trusting
from tdstore.container.values.elements import spread_over
from tdstore.container.values.nested_lists import nested
from tdstore.container.values.nontensor import NonTensor, NonTensorStack
from tdstore.container.varlen.encoding import Ints, decode_rows, encode_rows
from tdstore.errors import CorruptStoreError, UntrustedDataError
from tdstore.index.index_terms import as_terms
from tdstore.pickling import rebuild
from tdstore.store import Cap
from tdstore.storekit.foreign_strings import COLUMN_FROM, HEAD, SPANS, TEXT, mark_of, text_of
from tdstore.storekit.pages import HOLES, reserve
from tdstore.threads import without_interrupts
from tdstore.types import LeafSpec, Path, Write, path_text

_SPARE = 1 << 16

# A pair of offsets is one element of this dtype in memory, so that shape operations see the batch and nothing else.
# Only its 16 bytes are moved around; no arithmetic ever sees it.
_PAIR = torch.complex128


def stored_leaves(value: NonTensor) -> tuple[dict[str, Any], dict[str, Tensor]] | None:
    """Build the record and the leaves of a value that leaves are to hold.

    Raises:
        TypeError, ValueError: as `encode_rows`.
    """
    if isinstance(value, UnbatchedTensor):
        return {"unbatched": 1}, {LEAF: value.wrapped}
    if isinstance(value, NonTensorStack) and value.numel() >= COLUMN_FROM:
        leaves = pack(value.flat(), value.batch_size)
        return column_record(leaves[TEXT]), leaves
    return None


def is_column(record: Any) -> bool:
    """Return whether the record of a value says that it lies in two leaves."""
    return isinstance(record, dict) and "column" in record


def column_record(text: Tensor) -> dict[str, Any]:
    """Build the record of a column with that data leaf."""
    return {"column": mark_of(text.numpy())}


def column_leaves(path: Path) -> tuple[Path, Path]:
    """Return the paths of the offsets and of the data of a column."""
    return (*path, SPANS), (*path, TEXT)


def as_pairs(offsets: Tensor) -> Tensor:
    """View offsets `[*B, 2]` as one element each, sharing memory."""
    return torch.view_as_complex(offsets.as_subclass(Tensor).view(torch.float64))


def as_offsets(pairs: Tensor) -> Tensor:
    """View pairs as offsets again: the inverse of `as_pairs`."""
    return torch.view_as_real(pairs).view(torch.int64)


def as_ints(pairs: Tensor) -> Ints:
    """View what `as_pairs` made as an array `[n, 2]`, sharing memory where it is contiguous."""
    return pairs.contiguous().reshape(-1).numpy().view(np.int64).reshape(-1, 2)


# -- the text -------------------------------------------------------------------------------------
def end_of(text: np.ndarray[Any, Any]) -> int:
    """Read where the next value goes from the first bytes of a data leaf."""
    return int.from_bytes(text[:8].tobytes(), "little", signed=True)


def pack(values: Sequence[Any], shape: torch.Size) -> dict[str, Tensor]:
    """Encode values in C order into two leaves.

    Raises:
        TypeError, ValueError: as `encode_rows`.
    """
    offsets, data = encode_rows(values, HEAD)
    return {SPANS: torch.from_numpy(offsets).reshape(*shape, 2), TEXT: text_of(data)}


def specs_of(leaves: dict[str, Tensor], path: Path) -> dict[Path, LeafSpec]:
    """Build specs for the leaves of a value at a path."""
    return {
        (*path, name): LeafSpec(leaf.shape, leaf.dtype, fill_value=-1 if name == SPANS else 0)
        for name, leaf in leaves.items()
    }


# -- the bytes -------------------------------------------------------------------------------
class Text:
    """The bytes of the values of a stack, in memory."""

    __slots__ = ("_base", "_bytes", "_url", "_what", "trusted")

    def __init__(
        self,
        data: Tensor,
        base: int = 0,
        what: str = "the values of a stack",
        url: str | None = None,
        trusted: bool = False,
    ) -> None:
        self._bytes, self._base, self._what, self._url = data, base, what, url
        self.trusted = trusted
        """Whether values may be unpickled."""

    def value(self, begin: int, end: int) -> Any:
        """Decode the value of one pair of offsets.

        Raises:
            CorruptStoreError: as `values`.
        """
        base, data = self._base, self._bytes
        if base <= begin <= end <= base + len(data):
            with contextlib.suppress(UnicodeDecodeError):  # which `values` tells
                return memoryview(data.as_subclass(Tensor).numpy())[begin - base : end - base].tobytes().decode()  # type: ignore[arg-type]
        return self.values(np.array([[begin, end]]))[0]

    def values(self, pairs: Ints) -> list[Any]:
        """Decode the values of offsets `[n, 2]`.

        Raises:
            CorruptStoreError: they are not what was written.
        """
        try:
            with trusting(self.trusted):
                return decode_rows(pairs, self._bytes.as_subclass(Tensor).numpy(), self._base)
        except UntrustedDataError as error:
            raise UntrustedDataError(f"{self._what}: {error.message}", url=self._url, hint=error.hint) from error
        except (ValueError, TypeError, msgspec.DecodeError) as error:
            raise CorruptStoreError(f"{self._what} are damaged: {error}", url=self._url, hint=self._hint()) from error

    def _hint(self) -> str | None:
        return None

    def gathered(self, pairs: Ints) -> Text:
        """Return the data for a copy of some offsets."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return rebuild, ("Text", self._bytes.as_subclass(Tensor), self._base, self._what, self._url, self.trusted)


class LiveText(Text):
    """The text leaf of a store whose leaves are live tensors; it grows when rows are written."""

    __slots__ = ("_handle", "_path")

    def __init__(self, handle: Any, path: Path) -> None:
        url = handle.store.url
        what = f"the values {path_text(path)} of {url}"
        super().__init__(handle.store.view((*path, TEXT)), 0, what, url, handle.trusted)
        self._handle, self._path = handle, path

    def is_at(self, handle: Any, path: Path) -> bool:
        """Return whether this is the data of that column."""
        return self._handle is handle and self._path == path

    def values(self, pairs: Ints) -> list[Any]:
        self._follow(pairs)
        return super().values(pairs)

    def _follow(self, pairs: Ints) -> None:
        """Look at the text again where others over the same store have made it longer."""
        if len(pairs) and np.maximum.reduce(pairs, None) > len(self._bytes):
            self._bytes = self._handle.store.view((*self._path, TEXT))

    def _hint(self) -> str | None:
        shared = Cap.SHARED in self._handle.store.caps
        return "if another process added values, open the store again to see them" if shared else None

    def gathered(self, pairs: Ints) -> Text:
        # Bytes are only ever added, so a mapping of now serves a copy for good: files that a text has outgrown
        # are let go of, and stay as they are. Shared memory is used for something else, so there a copy takes its
        # bytes along.
        caps = self._handle.store.caps
        if Cap.SHARED in caps and Cap.PERSISTENT not in caps:
            with pickling(self.trusted):
                leaves = pack(self.values(pairs), torch.Size(pairs.shape[:1]))
            pairs[:] = leaves[SPANS].numpy()
            return Text(leaves[TEXT], trusted=self.trusted)
        self._follow(pairs)
        return Text(self._bytes, 0, self._what, self._url, self.trusted)

    @without_interrupts
    def add(self, values: list[Any]) -> Tensor:
        """Write values behind the others: their offsets `[n, 2]`."""
        self._handle.check_writable()
        store = self._handle.store
        path = (*self._path, TEXT)
        self._bytes = store.view(path)  # others over the same store may have made it longer
        end = checked_end(self._bytes, len(self._bytes), self._what, self._url)
        with pickling(self.trusted):
            offsets, data = encode_rows(values, end)
        if end + len(data) > len(self._bytes):
            grow(self._handle, path, end + len(data))
            self._handle.needs_compaction.add(self._path)
            # At once: a store of files takes a leaf of another length than it committed for the trace of a crash.
            self._handle.commit(self._handle.groups)
            self._bytes = store.view(path)
        store.write(text_writes(path, end, data))
        return torch.from_numpy(offsets)

    def __reduce__(self) -> tuple[Any, ...]:
        return rebuild, ("Text", self._bytes.as_subclass(Tensor).clone(), 0, self._what, self._url, self.trusted)


def checked_end(head: Tensor, length: int, what: str, url: str | None) -> int:
    """Check and return where the next value goes in a data leaf of that length, from its first bytes.

    A crash may have left a number beyond the length that was committed: nothing that counts lies there.

    Raises:
        CorruptStoreError: the number is none.
    """
    end = end_of(head.as_subclass(Tensor).numpy())
    if end < HEAD:
        raise CorruptStoreError(f"{what} are damaged: their data should end at {end}", url=url)
    return min(end, length)


def grow(handle: Any, path: Path, needed: int) -> None:
    """Make a text longer, with room for what comes next: a store may have to copy it each time."""
    spec = handle.specs[path]
    length = max(needed, min(spec.shape[0] + spec.shape[0] // 4, needed + (64 << 20))) + _SPARE
    handle.store.resize({path: length})
    handle.specs[path] = spec.replace(shape=(length,))


def text_writes(path: Path, end: int, data: bytes) -> list[Write]:
    """Build the writes that add bytes behind `end`."""
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
    def over(cls, offsets: Tensor, text: Text) -> PackedStack:
        """Build a stack over offsets `[*B, 2]`, sharing their memory."""
        return cls._make(text, as_pairs(offsets))

    def flat(self) -> list[Any]:
        return self._pool.values(as_ints(self._at))

    def positions(self) -> Tensor:
        offsets = as_offsets(self._at)
        begin, end = offsets[..., 0], offsets[..., 1]
        return 2 * begin + (begin != end)  # an empty value may begin where another does

    def _one(self, at: Tensor) -> Any:
        return self._pool.value(*as_ints(at).tolist()[0])

    def _copied(self, at: Tensor) -> NonTensor:
        at = at.contiguous()
        return PackedStack._make(self._pool.gathered(as_ints(at)), at)

    def put(self, index: Any, part: NonTensor) -> bool:
        if not isinstance(self._pool, LiveText):
            return False
        shape = self._at[index].shape
        one = not isinstance(part, NonTensorStack)
        offsets = self._pool.add([part.plain()] if one else spread_over(part, shape))
        pairs = as_pairs(offsets)
        if HOLES:
            reserve(self._at, as_terms(index))
        self._at[index] = pairs[0] if one else pairs.reshape(shape)
        return True

    def way_back(self, index: Any) -> Callable[[], None] | None:
        if not isinstance(self._pool, LiveText):
            return None
        at, before = self._at, self._at[index].clone()  # the bytes that they point at stay where they are

        def restore() -> None:
            at[index] = before

        return restore

    def lies_in(self, handle: Any, path: Path) -> bool:
        text = self._pool
        return isinstance(text, LiveText) and text.is_at(handle, path)

    def __reduce__(self) -> tuple[Any, ...]:
        with pickling(self._pool.trusted):
            leaves = pack(self.flat(), self.batch_size)
        return rebuild, ("PackedStack", leaves[SPANS], leaves[TEXT], self._pool.trusted)

    def to_json(self) -> dict[str, Any]:
        values = nested([to_plain(v) for v in self.flat()], self.batch_size)
        return {"stack": values, "dim": 0, "ndim": self.ndim}


def rebuilt(offsets: Tensor, text: Tensor, trusted: bool = False) -> PackedStack:
    """Rebuild a stack from its pickle."""
    return PackedStack.over(offsets, Text(text, trusted=trusted))
