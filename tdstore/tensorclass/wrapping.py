"""Unwrapping and wrapping of tensorclasses, for structures that hold the containers of their callers.

Nothing is copied, and `__post_init__` does not run: it is for what users construct.
"""

from __future__ import annotations

from typing import Any

from tdstore.container.core.container import Container
from tdstore.container.core.tensorclasses import Typed, full_name, lookup, rewrap, unwrap
from tdstore.errors import InvalidTypeError


def unwrap_tensorclass(value: object) -> Any:
    """Return the container that a tensorclass has, the same object each time; anything else as it is.

    Example:
        >>> @tensorclass
        ... class Step:
        ...     obs: torch.Tensor
        >>> step = Step(obs=torch.zeros(3), batch_size=[3])
        >>> type(unwrap_tensorclass(step)).__name__
        'TensorDict'
    """
    return unwrap(value)


def wrap_tensorclass(cls: type, container: Container) -> Any:
    """Return a container as an object of a tensorclass, without copying it and without `__post_init__`.

    Args:
        cls: the tensorclass.
        container: a TensorDict of any kind.

    Returns:
        The object; the container itself, if it has entries that are no fields of the class.

    Raises:
        InvalidTypeError: `cls` is no tensorclass.

    Example:
        >>> @tensorclass
        ... class Step:
        ...     obs: torch.Tensor
        >>> wrap_tensorclass(Step, TensorDict({"obs": torch.zeros(3)}, [3])).obs.shape
        torch.Size([3])
    """
    if not (isinstance(cls, type) and issubclass(cls, Typed)):
        raise InvalidTypeError(f"cls is a tensorclass, not {cls!r}")
    return rewrap(cls, container)


def tensorclass_name(cls: type) -> str:
    """Return the name of a tensorclass in a header: "module.Class", of which "tensorclass:module.Class" is the kind."""
    return full_name(cls)


def find_tensorclass(name: str) -> type | None:
    """Return the tensorclass of a name that this process has declared, None for none. Nothing is imported.

    Args:
        name: what `tensorclass_name` gives.
    """
    return lookup(name)
