"""Compact string columns: drop the bytes of overwritten values.

Users see it as the size of a dataset: without it, a ring of rows with strings, as a replay buffer is, grows for ever
(`test_a_ring_of_rows_stays_small`; docs/reference/values.md has the bound).

Both leaves are made afresh and committed in one step, and the text gets another epoch (see `columns`): who opened the
column before, and finds one of the new leaves, sees that and says so.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
import numpy as np

from tdstore.container.varlen.columns import column_record, end_of, specs_of
from tdstore.container.varlen.encoding import bounds, in_order, moved, pieces
from tdstore.storekit.foreign_strings import HEAD, SPANS, TEXT, mark_of, text_of
from tdstore.types import Path, Read, Write

AT_ONCE = 2 << 30
"""Longer texts stay as they are until the whole entry is set: compaction takes them into memory."""
_FEW = 1 << 16
"""Less garbage is not worth a commit."""


def compact_columns(handle: Any, paths: Iterable[Path]) -> None:
    """Compact those columns at `paths` of whose text more than half is unused."""
    for path in paths:
        if handle.column(path):
            _pack_one(handle, path)


def _pack_one(handle: Any, path: Path) -> None:
    store, offsets_path, text_path = handle.store, (*path, SPANS), (*path, TEXT)
    if not _FEW < handle.specs[text_path].shape[0] <= AT_ONCE:
        return
    offsets = store.read([Read(offsets_path)])[0]
    flat = offsets.reshape(-1, 2).numpy()
    try:
        first, last = bounds(flat)
    except ValueError:
        return  # damaged: who reads it is told, and it is left as it was found
    starts, stops = pieces(*in_order(first, last))
    live = int((stops - starts).sum())
    text = store.read([Read(text_path)])[0].numpy()
    end = end_of(text)
    damaged = (first > last).any() or (len(stops) and (starts[0] < HEAD or stops[-1] > min(end, len(text))))
    if damaged or end - HEAD < 2 * live + _FEW:
        return
    data = b"".join(text[a:b].tobytes() for a, b in zip(starts.tolist(), stops.tolist(), strict=True))
    head = np.zeros(1, np.int64)
    offsets = moved(offsets, (first, last), np.concatenate((head, starts)), np.concatenate((head + HEAD, stops)))
    leaves = {TEXT: text_of(data, unlike=mark_of(text)), SPANS: offsets}
    specs = specs_of(leaves, path)
    group = handle.groups[path[:-1]]
    values = {**group.values, path[-1]: column_record(leaves[TEXT])}
    groups = {**handle.groups, path[:-1]: msgspec.structs.replace(group, values=values)}
    with handle.changing():
        store.create(specs)
        store.write([Write((*path, name), (), leaf) for name, leaf in leaves.items()])  # the text, with its mark, first
        handle.commit(groups, {**handle.specs, **specs})
