"""Compact text of containers: each entry as its dtype and the dimensions behind the batch, as in `f32[3]`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tdstore.container.core.container import LEAF, VALUE, Container
from tdstore.container.core.tensorclasses import Typed
from tdstore.container.display.html import place_of
from tdstore.container.display.options import facts_of, line_order, shows
from tdstore.container.values.nontensor import NonTensorData, NonTensorStack
from tdstore.dtypes import dtype_name
from tdstore.errors import TDStoreError

WIDTH = 80
_SHORT = {"float": "f", "bfloat": "bf", "int": "i", "uint": "u", "complex": "c"}
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class _Group:
    """Entries in braces, behind what the group is."""

    head: str
    entries: Sequence[tuple[str, str | _Group]]

    def __str__(self) -> str:
        return f"{self.head}{{{', '.join(f'{label}: {entry}' for label, entry in self.entries)}}}"


def compact_text(td: Any) -> str:
    """Format a container, on one line where that is no longer than WIDTH."""
    source = td._tensordict if isinstance(td, Typed) else td
    stacked = isinstance(td, Container._stack_class)
    facts = [*facts_of(source), *([f"stack_dim={td._stack_dim}"] if stacked else [])]
    text = f"{type(td).__name__}({''.join(f'{fact}, ' for fact in facts)}fields="
    fields, alone = _Group("", _entries(td)), _Group("", _exclusive_entries(td) if stacked else ())
    if not alone.entries:
        return f"{text}{_lay_out(fields, 0, len(text), 1)})"
    begin = ", exclusive_fields="
    text += _lay_out(fields, 0, len(text), len(begin) + 1) + begin
    return f"{text}{_lay_out(alone, 0, len(text.splitlines()[-1]), 1)})"


def _lay_out(entry: str | _Group, indent: int, column: int, after: int) -> str:
    """Lay out what begins at a column and has `after` characters behind it: on one line, or a line for each entry."""
    flat = str(entry)
    if isinstance(entry, str) or not entry.entries or column + len(flat) + after <= WIDTH:
        return flat
    inner, last = indent + 4, len(entry.entries) - 1
    lines = [
        f"{' ' * inner}{label}: {_lay_out(part, inner, inner + len(label) + 2, 1 + after if i == last else 1)}"
        for i, (label, part) in enumerate(entry.entries)
    ]
    return f"{entry.head}{{\n" + ",\n".join(lines) + "}"


def _entries(td: Any) -> list[tuple[str, str | _Group]]:
    typed = isinstance(td, Typed)
    source, unset = (td._tensordict, td._non_tensordict) if typed else (td, ())
    return [*_in_order((key, _entry(source, key)) for key in source._first_keys()), *((name, "None") for name in unset)]


def _in_order(entries: Iterable[tuple[str, str | _Group]]) -> list[tuple[str, str | _Group]]:
    order = line_order()
    return list(entries) if order is None else sorted(entries, key=lambda pair: order(f"{pair[0]}: {pair[1]}"))


def _exclusive_entries(td: Any) -> list[tuple[str, _Group]]:
    """Return the entries that some elements of a stack have only, by the number of the element."""
    common = set(td._first_keys())
    found = [
        (str(i), _Group("", _in_order((key, _entry(part, key)) for key in part._first_keys() if key not in common)))
        for i, part in enumerate(td._tds)
    ]
    return [(label, group) for label, group in found if group.entries]


def _entry(td: Any, key: str) -> str | _Group:
    kind = td._kind(key)
    if kind == LEAF or (kind == VALUE and td._is_unbatched(key)):
        return _leaf(td, key, 0 if kind == VALUE else len(td.batch_size))
    if kind == VALUE:
        return _value_type(td, key)
    group = td._raw(key)
    if not isinstance(group, Container):  # `tree_map` may have put anything there
        return type(group).__name__
    name = _class_name(td, key)
    return _Group(
        ("" if name == "TensorDict" else name) + _dims(group.batch_size[len(td.batch_size) :]), _entries(group)
    )


def _value_type(td: Any, key: str) -> str:
    """Return the type of a value. A column of values in a store is not read for it."""
    if isinstance(td, Container._stack_class):
        types = {_value_type(part, key) for part in td._tds}
        return types.pop() if len(types) == 1 else NonTensorStack.__name__
    place = place_of(td)
    if place is not None and place[0].column((*place[1], key)):
        return NonTensorStack.__name__
    try:
        value = td._raw(key)
    except TDStoreError:
        return "unreadable"
    return type(value.data if type(value) is NonTensorData else value).__name__


def _class_name(td: Any, key: str) -> str:
    """Return the class of an entry; that of the elements' entries for a stack, whose own is always a stack."""
    while isinstance(td, Container._stack_class):
        td = td._tds[0]
    return type(td._raw(key)).__name__


def _leaf(td: Any, key: str, batch_dims: int) -> str:
    shape, device, dtype, *_ = td._leaf_facts(key)
    text = _dtype(dtype) if shows("show_dtype") and dtype is not None else ""
    uneven = len(shape) < batch_dims  # elements of a stack with tensors of several ranks
    text += _dims(shape if uneven else shape[batch_dims:]) or "[]"
    return text if device in (None, td.device or _CPU) else f"{text}@{device}"


def _dtype(dtype: torch.dtype) -> str:
    return re.sub("^[a-z]+(?=[0-9])", lambda word: _SHORT.get(word[0], word[0]), dtype_name(dtype))


def _dims(shape: Sequence[Any]) -> str:
    return f"[{','.join(map(str, shape))}]" if len(shape) else ""
