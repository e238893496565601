"""Notebook display of containers: a tree that folds, as HTML without external resources.

Keys, values, locations and options may come from anywhere: all of them are escaped. No leaf is read.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterator, Mapping
from html import escape
from itertools import islice
from typing import Any

import torch

from tdstore.container.core.container import GROUP, LEAF, Container
from tdstore.container.values.nontensor import NonTensor, NonTensorStack
from tdstore.dtypes import dtype_name
from tdstore.errors import StoreClosedError, TDStoreError
from tdstore.types import Path

ROWS_OF_A_LEVEL = 60
ROWS_IN_ALL = 600
LEVELS = 12
LIMIT = 120
"""Characters of a key, a value or a location."""

_STYLE = """<style>
.tdstore{font:13px/1.5 system-ui,sans-serif;color:inherit}
.tdstore details{margin:0 0 0 .2em;padding-left:.9em;border-left:1px solid rgba(128,128,128,.35)}
.tdstore summary{cursor:pointer;margin-left:-.9em;padding:.1em .3em}
.tdstore summary:hover{background:rgba(128,128,128,.15)}
.tdstore table{border-collapse:collapse;margin:.1em 0 .4em;font:12px/1.5 ui-monospace,monospace}
.tdstore td,.tdstore th{padding:.1em .9em .1em 0;text-align:left;vertical-align:top}
.tdstore td,.tdstore th{border:0;background:none;color:inherit}
.tdstore th{font-weight:normal;opacity:.6}
.tdstore .key{font-weight:600}
.tdstore .num{text-align:right}
.tdstore .dim{opacity:.65}
</style>"""


class _Options(reprlib.Repr):
    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = LIMIT
        self.maxlist = self.maxtuple = self.maxset = self.maxdict = 8


_short = _Options()


def html(td: Any) -> str:
    """Render the whole tree."""
    budget = [ROWS_IN_ALL]
    try:
        body = _group(type(td).__name__, td, budget, 0)
    except StoreClosedError as error:
        body = f"<b>{escape(type(td).__name__)}</b> closed: {_text(error.url)}"
    return f'{_STYLE}<div class="tdstore">{body}</div>'


def _group(title: str, td: Any, budget: list[int], level: int, above: Any = None) -> str:
    facts = list(_facts(td, level))
    if level and type(td) is not type(above):
        facts.insert(0, escape(type(td).__name__))
    head = f'<b class="key">{_text(title)}</b> <span class="dim">{" &middot; ".join(facts)}</span>'
    opened = " open" if level < 2 else ""
    return f"<details{opened}><summary>{head}</summary>{_entries(td, budget, level)}</details>"


def _facts(td: Any, level: int) -> Iterator[str]:
    yield f"batch {_shape(td.batch_size)}"
    if any(name is not None for name in td.names):
        yield f"names {_text(', '.join(map(str, td.names)))}"
    if td.device is not None and td.device.type != "cpu":
        yield _text(str(td.device))
    if isinstance(td, Container._stack_class):
        yield f"a stack of {len(td._tds)} along {td._stack_dim}"
    if (size := _bytes_below(td)) is not None:
        yield _size(size)
    for flag in ("is_memmap", "is_shared"):
        if getattr(td, flag)():
            yield {"is_memmap": "memory-mapped", "is_shared": "shared"}[flag]
    if td.is_locked:
        yield "locked"
    place = place_of(td)
    if place is not None and not level:
        yield _text(place[0].store.group_location(place[1]))


def _entries(td: Any, budget: list[int], level: int) -> str:
    keys = list(td._first_keys())
    room = min(ROWS_OF_A_LEVEL, budget[0])
    shown = keys[:room]
    budget[0] -= len(shown)
    leaves = [key for key in shown if not _is_group(td, key)]
    rows = "".join(_row(td, key) for key in leaves)
    parts = [f"<table>{_HEAD}{rows}</table>"] if rows else []
    for key in shown:
        if _is_group(td, key):
            parts.append(
                _group(key, td._raw(key), budget, level + 1, td) if level < LEVELS else _line(key, "nested deeper")
            )
    if len(keys) > len(shown):
        parts.append(f'<div class="dim">and {len(keys) - len(shown)} more entries</div>')
    if isinstance(td, Container._stack_class):
        parts += islice(_only_in_some(td, set(keys)), 8)
    return "".join(parts) or '<div class="dim">no entries</div>'


_HEAD = "<tr><th>key</th><th>dtype</th><th>shape</th><th>device</th><th>bytes</th><th>layout</th></tr>"


def _is_group(td: Any, key: str) -> bool:
    """Check whether an entry is a TensorDict: `tree_map` may have put anything else there."""
    return td._kind(key) == GROUP and isinstance(td._raw(key), Container)


def _row(td: Any, key: str) -> str:
    name = f'<td class="key">{_text(key)}</td>'
    if td._kind(key) != LEAF:
        return f'<tr>{name}<td class="dim">value</td><td colspan="4">{_value(td, key)}</td></tr>'
    shape, device, dtype, _, kind = td._leaf_facts(key)
    size = _leaf_bytes(shape, dtype)
    layout = [] if kind == "Tensor" else [kind]
    layout += [f"{k}={_short.repr(v)}" for k, v in _options(td, key).items() if v is not None]
    cells = (
        _dtype(dtype),
        _shape(shape),
        escape(str(device)),
        "" if size is None else _size(size),
        _text(" ".join(layout)),
    )
    return f"<tr>{name}<td>{'</td><td>'.join(cells)}</td></tr>"


def _value(td: Any, key: str) -> str:
    """Format a value; a column of values in a store is not read for it."""
    place = place_of(td)
    if place is not None and place[0].column((*place[1], key)):
        return f'<span class="dim">one value per row, {_shape(td.batch_size)}</span>'
    try:
        value = td._raw(key)
    except TDStoreError as error:
        return f'<span class="dim">{_text(error.message)}</span>'
    if isinstance(value, NonTensorStack):
        first: list[Any] = value.move(lambda t: t.flatten()[:4]).tolist()
        more = ", ..." if value.numel() > len(first) else ""
        return _text(f"{', '.join(map(_short.repr, first))}{more}") + f' <span class="dim">{_shape(value.shape)}</span>'
    return _text(_short.repr(value.plain() if isinstance(value, NonTensor) else value))


def _only_in_some(td: Any, common: set[str]) -> Iterator[str]:
    for i, element in enumerate(td._tds):
        own = [key for key in element._first_keys() if key not in common]
        if own:
            yield _line(f"only in {i}", ", ".join(own[:8]) + (", ..." if len(own) > 8 else ""))


def _line(name: str, what: str) -> str:
    return f'<div><span class="key">{_text(name)}</span> <span class="dim">{_text(what)}</span></div>'


def place_of(td: Any) -> tuple[Any, Path] | None:
    """Return the handle and the path of a stored container."""
    if isinstance(td, Container._stored_class):
        return td._handle, td._path
    binding: tuple[Any, Path] | None = td._binding
    return binding


def _options(td: Any, key: str) -> Mapping[str, Any]:
    place = place_of(td)
    if place is None or isinstance(td, Container._stack_class):
        return {}
    path = (*place[1], key)
    if path not in place[0].specs:
        return {}
    return {**place[0].specs[path].options, **place[0].store.layout(path)}


def _bytes_below(td: Any) -> int | None:
    """Return the bytes of all leaves, by their shapes; None where one has none."""
    if isinstance(td, Container._stack_class):
        parts = [_bytes_below(element) for element in td._tds[:ROWS_IN_ALL]]
        return None if len(td._tds) > ROWS_IN_ALL or None in parts else sum(p for p in parts if p is not None)
    total = 0
    for key in td._first_keys():
        if td._kind(key) == LEAF:
            shape, _, dtype, *_ = td._leaf_facts(key)
            size = _leaf_bytes(shape, dtype)
        elif _is_group(td, key):
            size = _bytes_below(td._raw(key))
        else:
            continue
        if size is None:
            return None
        total += size
    return total


def _leaf_bytes(shape: Any, dtype: torch.dtype | None) -> int | None:
    known = dtype is not None and all(isinstance(n, int) and n >= 0 for n in shape)
    return torch.Size(shape).numel() * dtype.itemsize if known and dtype is not None else None


def _dtype(dtype: torch.dtype | None) -> str:
    return "" if dtype is None else escape(dtype_name(dtype))


def _shape(shape: Any) -> str:
    return escape("[" + ", ".join(map(str, shape)) + "]")


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def _text(value: object) -> str:
    shown = str(value)
    return escape(shown if len(shown) <= LIMIT else shown[: LIMIT - 1] + "…")
