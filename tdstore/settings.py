"""Switches that change what lists and stacks of values become, each a setter, a context and a decorator."""

from __future__ import annotations

import os
from contextlib import ContextDecorator
from typing import ClassVar

from tdstore.errors import InvalidArgumentError

_TRUE = ("1", "true", "yes", "on")


def strtobool(text: str) -> int:
    """Read a truth value: 1 of "1", "y", "yes", "t", "true" and "on", 0 of "0", "n", "no", "f", "false" and "off".

    Raises:
        InvalidArgumentError: another text.
    """
    if text.lower() in (*_TRUE, "y", "t"):
        return 1
    if text.lower() in ("0", "n", "no", "f", "false", "off"):
        return 0
    raise InvalidArgumentError(f"invalid truth value {text!r}")


def _from_environment(name: str, default: bool) -> bool:
    text = os.environ.get(name)
    return default if text is None else text.lower() in _TRUE


class Switch(ContextDecorator):
    """One switch: `with kind(False): ...` for a while, `kind(False).set()` for good, `@kind(False)` for a function."""

    on: ClassVar[bool]

    def __init__(self, mode: bool) -> None:
        self._mode = bool(mode)
        self._before: list[bool] = []
        self._at_set = type(self).on

    def set(self) -> None:
        """Leave the switch so. A call of `__exit__` takes it back."""
        self._at_set = type(self).on
        type(self).on = self._mode

    def __enter__(self) -> Switch:
        self._before.append(type(self).on)
        type(self).on = self._mode
        return self

    def __exit__(self, *exc: object) -> None:
        type(self).on = self._before.pop() if self._before else self._at_set


class set_list_to_stack(Switch):  # noqa: N801 - the name that users know
    """Whether a list that is set as an entry is one value per row (True, the default) or one value for the batch.

    Example:
        >>> with set_list_to_stack(False):
        ...     td = TensorDict({"s": ["a", "b", "c"]}, [2])
        >>> td["s"]
        ['a', 'b', 'c']
    """

    on = _from_environment("LIST_TO_STACK", True)


class set_capture_non_tensor_stack(Switch):  # noqa: N801 - the name that users know
    """Whether stacking equal values returns one `NonTensorData` (True) or one value per row (False, the default).

    Example:
        >>> with set_capture_non_tensor_stack(True):
        ...     torch.stack([TensorDict({"s": "x"}), TensorDict({"s": "x"})])["s"]
        'x'
    """

    on = _from_environment("CAPTURE_NONTENSOR_STACK", False)


def list_to_stack(allow_none: bool = False) -> bool:
    """Return whether lists become one value per row; see `set_list_to_stack`."""
    return set_list_to_stack.on


def capture_non_tensor_stack(allow_none: bool = False) -> bool:
    """Return whether stacks of equal values become one value; see `set_capture_non_tensor_stack`."""
    return set_capture_non_tensor_stack.on
