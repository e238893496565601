"""Texts of columns packed anew: the bytes of values that were overwritten are given back.

Both leaves are made afresh and committed in one step, and the text gets another mark (see `packed`): who opened the
column before, and finds one of the new leaves, sees that and says so.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
import numpy as np
import torch

from tdstore.container.packed import HEAD, SPANS, TEXT, as_envelope, bounds, end_of, mark_of, specs_of, text_of
from tdstore.types import Path, Read, Write

AT_ONCE = 2 << 30
"""Longer texts stay as they are until the whole entry is set: packing takes them into memory."""
_FEW = 1 << 16
"""Less garbage is not worth a commit."""


def pack_crowded(handle: Any, paths: Iterable[Path]) -> None:
    """Pack anew those columns at `paths` of whose text more than half is of no use any longer."""
    for path in paths:
        if handle.column(path):
            _pack_one(handle, path)


def _pack_one(handle: Any, path: Path) -> None:
    store, spans_path, text_path = handle.store, (*path, SPANS), (*path, TEXT)
    if not _FEW < handle.specs[text_path].shape[0] <= AT_ONCE:
        return
    spans = store.read([Read(spans_path)])[0]
    flat = spans.reshape(-1, 2).numpy()
    try:
        first, last = bounds(flat)
    except ValueError:
        return  # damaged: who reads it is told, and it is left as it was found
    starts, stops = _pieces(first, last)
    live = int((stops - starts).sum())
    text = store.read([Read(text_path)])[0].numpy()
    end = end_of(text)
    damaged = (first > last).any() or (len(stops) and (starts[0] < HEAD or stops[-1] > min(end, len(text))))
    if damaged or end - HEAD < 2 * live + _FEW:
        return
    moved = np.cumsum(stops - starts) - (stops - starts) + HEAD - starts
    if len(starts):
        shift = np.where(last > first, moved[np.searchsorted(starts, first, side="right") - 1], 0)
        flat[:, 0] += np.where(flat[:, 0] < 0, -shift, shift)
        flat[:, 1] += np.where(flat[:, 1] < 0, -shift, shift)
    data = b"".join(text[a:b].tobytes() for a, b in zip(starts.tolist(), stops.tolist(), strict=True))
    leaves = {TEXT: text_of(data, unlike=mark_of(text)), SPANS: torch.from_numpy(flat).reshape(spans.shape)}
    specs = specs_of(leaves, path)
    store.create(specs)
    store.write([Write((*path, name), (), leaf) for name, leaf in leaves.items()])  # the text, with its mark, first
    group = handle.groups[path[:-1]]
    values = {**group.values, path[-1]: as_envelope(leaves[TEXT])}
    groups = {**handle.groups, path[:-1]: msgspec.structs.replace(group, values=values)}
    handle.commit(groups, {**handle.specs, **specs})


def _pieces(first: Any, last: Any) -> tuple[Any, Any]:
    """Where the bytes that some span shows begin and end, pieces that touch or overlap as one."""
    some = np.flatnonzero(last > first)
    order = some[np.argsort(first[some], kind="stable")]
    begin, end = first[order], np.maximum.accumulate(last[order])
    cuts = np.flatnonzero(begin[1:] > end[:-1]) + 1
    if not len(begin):
        return begin, end
    return begin[np.concatenate(([0], cuts))], end[np.concatenate((cuts - 1, [len(end) - 1]))]
