"""The conversions as methods: each a line over a function of this folder."""

from __future__ import annotations

from tdstore.container.core import Container


class ConvertMixin(Container):
    """from_any, to_pandas and their kin."""

    __slots__ = ()
