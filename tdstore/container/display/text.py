"""Text form of containers, in the layout that users of `tensordict` know."""

from __future__ import annotations

from typing import Any

from tdstore.container.core.container import LEAF, VALUE
from tdstore.container.display.compact import compact_text
from tdstore.container.display.options import leaf_parts, level_lines, ordered_lines, shows

_LONG = 500
"""Characters of a value that are shown."""


def text(td: Any) -> str:
    """Format the tree with shapes, devices and dtypes; keys sorted."""
    if shows("compact"):
        return compact_text(td)
    fields = indent(",\n".join(ordered_lines(f"{key}: {entry_text(td, key)}" for key in td._first_keys())))
    lines = [
        f"fields={{\n{fields}}}" if fields else "fields={\n}",
        *level_lines(td),
        *td._dataset_lines(),
    ]
    return f"{type(td).__name__}(\n" + ",\n".join(indent(line) for line in lines) + ")"


def class_text(obj: Any) -> str:
    """Format an object of a tensorclass; fields that are None come last."""
    if shows("compact"):
        return compact_text(obj)
    td = obj._tensordict
    keys = sorted(td._first_keys())
    lines = ordered_lines(f"{key}={entry_text(td, key)}" for key in keys)
    lines += [*(f"{name}=None" for name in obj._plan.names if name not in keys), *level_lines(td)]
    return f"{type(obj).__name__}(\n" + ",\n".join(indent(line) for line in lines) + ")"


def entry_text(td: Any, key: str) -> str:
    """Format one entry."""
    if td._kind(key) != LEAF:
        if td._kind(key) != VALUE:
            return repr(td._raw(key))
        if td._is_unbatched(key):
            name, parts = leaf_parts(td, key)
            return f"{name}({', '.join(parts)})"
        text: str = td._value_text(key)
        # A prompt, or a page of text, must not push all else off the screen.
        return text if len(text) <= _LONG else f"{text[: _LONG - 100]} ... {text[-80:]}"
    name, parts = leaf_parts(td, key)
    return f"{name}({', '.join(parts)})"


def indent(block: str) -> str:
    """Indent a block of lines by four spaces."""
    return "\n".join("    " + line for line in block.split("\n")) if block else ""
