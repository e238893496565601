"""state_dict and load_state_dict."""

from __future__ import annotations

from tdstore.container.core import Container


class StateDictMixin(Container):
    """state_dict, load_state_dict."""

    __slots__ = ()
