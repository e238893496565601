"""Default of `get` for a missing key."""

from __future__ import annotations

import os

_none = os.environ.get("TD_GET_DEFAULTS_TO_NONE", "1").lower() not in ("0", "false", "no", "off")


def get_defaults_to_none(set_to_none: bool = True) -> bool:
    """Return whether `td.get(missing)` is None; see `set_get_defaults_to_none`. The argument is ignored."""
    return _none


def set_get_defaults_to_none(set_to_none: bool = True) -> None:
    """Make `td.get(missing)` return None (the initial setting), or raise a `KeyError`.

    Example:
        >>> set_get_defaults_to_none(False)
        >>> "x" if "a" in TensorDict() else "no a"
        'no a'
        >>> set_get_defaults_to_none(True)
        >>> TensorDict().get("a") is None
        True
    """
    global _none
    _none = bool(set_to_none)
