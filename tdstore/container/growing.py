"""Growing along the first batch dimension."""

from __future__ import annotations

from tdstore.container.core import Container


class GrowingMixin(Container):
    """append, extend, resize_."""

    __slots__ = ()
