"""Text form of containers, in the layout that users of `tensordict` know."""

from __future__ import annotations

from typing import Any

from tdstore.container.core.container import LEAF, VALUE, Container
from tdstore.container.display.html import html
from tdstore.container.display.options import leaf_parts, level_lines, ordered, ordered_lines
from tdstore.errors import StoreClosedError

_LONG = 500
"""Characters of a value that are shown."""


def text(td: Any) -> str:
    """Format the tree with shapes, devices and dtypes; keys sorted."""
    fields = indent(",\n".join(ordered_lines(f"{key}: {entry_text(td, key)}" for key in ordered(td._first_keys()))))
    lines = [
        f"fields={{\n{fields}}}" if fields else "fields={\n}",
        *level_lines(td),
        *td._dataset_lines(),
    ]
    return f"{type(td).__name__}(\n" + ",\n".join(indent(line) for line in lines) + ")"


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


class ReprMixin(Container):
    """`repr(td)`."""

    __slots__ = ()

    def is_shared(self) -> bool:
        """Check whether other processes of this machine see writes to the leaves."""
        raise NotImplementedError

    def _leaf_facts(self, key: str) -> tuple[Any, ...]:
        """Return shape, device, dtype, shared flag and class name of a leaf, without reading it."""
        raise NotImplementedError

    def _dataset_lines(self) -> list[str]:
        """Return the lines that a class adds about its dataset, below the other lines of a level."""
        return []

    def __repr__(self) -> str:
        try:
            return text(self)
        except StoreClosedError as error:
            return f"{type(self).__name__}(closed: {error.url})"

    def _repr_html_(self) -> str:
        """Render for notebooks: a tree that folds."""
        return html(self)
