"""The methods by which Python and notebooks display a container."""

from __future__ import annotations

from tdstore.container.core.container import Container
from tdstore.container.display.html import html
from tdstore.container.display.options import shows
from tdstore.container.display.text import text
from tdstore.errors import StoreClosedError


class ReprMixin(Container):
    """`repr(td)`."""

    __slots__ = ()

    def _dataset_lines(self) -> list[str]:
        """Return the lines that a class adds about its dataset, below the other lines of a level."""
        return []

    def __repr__(self) -> str:
        try:
            return text(self)
        except StoreClosedError as error:
            return f"{type(self).__name__}(closed: {error.url})"

    def _repr_html_(self) -> str | None:
        """Render for notebooks: a tree that folds; None, for the text, where `set_printoptions` says so."""
        return html(self) if shows("html") else None
