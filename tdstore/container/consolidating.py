"""One buffer for all leaves."""

from __future__ import annotations

from tdstore.container.core import Container


class ConsolidatingMixin(Container):
    """consolidate and its kin."""

    __slots__ = ()
