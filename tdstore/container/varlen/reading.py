"""Reading columns of a store that gives no live tensors: one round for the offsets, one for the bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tdstore.container.values.nontensor import NonTensor
from tdstore.container.varlen.columns import PackedStack, Text, column_leaves
from tdstore.container.varlen.encoding import Ints, bounds, in_order, moved, pieces
from tdstore.container.varlen.rounds import Rounds
from tdstore.errors import CorruptStoreError, InvalidArgumentError
from tdstore.store import Cap, Store
from tdstore.storekit.foreign_strings import HEAD, TEXT, mark_of
from tdstore.types import Path, Read, path_text

_GAP = 4096
"""Values closer than this in the text are read as one range."""
_FEW = 8
"""So many ranges are a read each ..."""
_LONG, _MOST = 2048, 4 << 20
"""... and those longer than this on the average, or together: the numbers of their bytes take eight times as many."""


class _Wanted(NamedTuple):
    """The bytes of some values: the mark first, then pieces of the data back to back."""

    reads: list[Read]
    bounds: tuple[Ints, Ints]
    starts: Ints
    stops: Ints


def _text_reads(offsets: Tensor, path: Path, length: int, *, whole: bool) -> _Wanted:
    """Build the requests for the bytes of some values. Neighbours are merged; no bytes need no request.

    Raises:
        InvalidArgumentError: an offset reaches beyond a text of that length.
    """
    found = bounds(offsets.reshape(-1, 2).numpy())
    first, last = found
    if len(first) and (np.maximum.reduce(last) > length or np.minimum.reduce(last - first) < 0):
        raise InvalidArgumentError(f"an offset reaches beyond the {length} bytes of its data")
    order = in_order(first, last)
    starts, stops = pieces(*order, _GAP)
    if not len(starts):
        return _Wanted([], found, starts, stops)
    if whole:
        return _Wanted([Read(path)], found, np.zeros(1, np.int64), np.full(1, length))
    if len(starts) > _FEW:
        exact = pieces(*order)
        if int(np.add.reduce(exact[1] - exact[0])) < min(_LONG * len(starts), _MOST):
            starts, stops = _with_head(*exact)
            return _Wanted([Read(path, (_numbers(starts, stops),))], found, starts, stops)
    starts, stops = _with_head(starts, stops)
    cuts = zip(starts.tolist(), stops.tolist(), strict=True)
    return _Wanted([Read(path, (slice(a, b, 1),)) for a, b in cuts], found, starts, stops)


def _with_head(starts: Ints, stops: Ints) -> tuple[Ints, Ints]:
    return np.concatenate(([0], starts)), np.concatenate(([HEAD], stops))


def _numbers(starts: Ints, stops: Ints) -> Tensor:
    """List the numbers of all bytes of some pieces as one row index, which stores split faster than many slices."""
    sizes = stops - starts
    ends = np.cumsum(sizes)
    return torch.from_numpy(np.arange(ends[-1]) + np.repeat(starts - (ends - sizes), sizes))


def _stack(offsets: Tensor, wanted: _Wanted, values: Sequence[Tensor], what: str, url: str) -> PackedStack:
    """Build the stack of offsets whose bytes were read."""
    if len(values) == 1 and len(wanted.starts) == 1:
        return PackedStack.over(offsets, Text(values[0], 0, what, url))
    if len(values) == 2:
        return PackedStack.over(offsets, Text(values[1], int(wanted.starts[1]), what, url))
    text = (
        values[0]
        if len(values) == 1
        else torch.cat(list(values))
        if values
        else torch.zeros(0, dtype=torch.uint8, device="cpu")
    )
    return PackedStack.over(moved(offsets, wanted.bounds, wanted.starts, wanted.stops), Text(text, 0, what, url))


def column_rounds(handle: Any, path: Path, offsets: Rounds[Tensor]) -> Rounds[NonTensor]:
    """Read values of a column: a round for their offsets, and one for their bytes if there are any.

    Args:
        path: the entry.
        offsets: the read of the offsets `[*B, 2]` that are wanted.

    Raises:
        CorruptStoreError: the offsets are malformed, or not those of the text that is there.
    """
    store: Store = handle.store
    text = (*path, TEXT)
    places = (yield from offsets).cpu()
    whole = Cap.PARTIAL_READ not in store.caps
    try:
        wanted = _text_reads(places, text, handle.specs[text].shape[0], whole=whole)
    except ValueError:
        try:  # others over the same store may have made the text longer
            wanted = _text_reads(places, text, store.specs([text])[0].shape[0], whole=whole)
        except ValueError as error:
            raise CorruptStoreError(
                f"the values {path_text(path)} of {store.url} are damaged: {error}", url=store.url
            ) from error
    values = (yield wanted.reads) if wanted.reads else []
    if values:
        check_mark(values[0], handle, path)
    stack = _stack(places.reshape(-1, 2), wanted, values, f"the values {path_text(path)} of {store.url}", store.url)
    stack._pool.trusted = handle.trusted
    entry: NonTensor = stack.reshape(places.shape[:-1])
    return entry


def check_mark(head: Tensor, handle: Any, path: Path) -> None:
    """Refuse a text that is another one than that which the header was written with; `head`: its first bytes.

    Raises:
        CorruptStoreError: so it is.
    """
    if mark_of(head.as_subclass(Tensor).numpy()) != handle.groups[path[:-1]].values[path[-1]]["column"]:
        url = handle.store.url
        raise CorruptStoreError(
            f"the data of the values {path_text(path)} of {url} changed since it was opened",
            url=url,
            hint="if another process writes there, it has compacted the column: open the store again",
        )


def check_column(path: Path, record: Any, specs: Any, batch: Sequence[int], url: str) -> None:
    """Refuse values per row whose leaves are not those that their group needs.

    Raises:
        CorruptStoreError: one is missing, or has another dtype or shape.
    """
    offsets, text = (specs.get(leaf) for leaf in column_leaves(path))
    sound = (
        offsets is not None
        and text is not None
        and (offsets.dtype, text.dtype) == (torch.int64, torch.uint8)
        and len(text.shape) == 1
        and text.shape[0] >= HEAD
        and offsets.shape[-1:] == (2,)
        and offsets.shape[: len(batch)] == tuple(batch)
        and len(offsets.shape) > len(batch)
        and type(record["column"]) is int
    )
    if not sound:
        raise CorruptStoreError(
            f"the values {path_text(path)} of {url} are missing: {offsets!r} and {text!r} do not hold values "
            f"of a batch of {list(batch)}",
            url=url,
        )
