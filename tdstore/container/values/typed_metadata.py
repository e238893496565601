"""`MetaData[kind]`: subclasses of `MetaData` whose values are of one kind."""

from __future__ import annotations

import types
import typing
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tdstore import pickling
from tdstore.errors import InvalidTypeError

if TYPE_CHECKING:
    from tdstore.container.values.nontensor import NonTensorData

_BY_NAME: dict[str, Any] = {
    kind.__name__: kind
    for kind in (bool, int, float, complex, str, bytes, bytearray, list, tuple, dict, set, frozenset, types.NoneType)
}
"""Kinds that are pickled by name, so that `torch.load(weights_only=True)` takes them."""

_MADE: dict[tuple[type, Any], Any] = {}


def class_for(base: Any, kind: Any) -> type[Any]:
    """Return the subclass of `base` for values of a kind: the same class each time.

    Args:
        kind: anything that an annotation may be: a class, a union, `list[int]` (whose elements are not checked).

    Raises:
        InvalidTypeError: `base` is such a subclass already.
    """
    if base._kind is not None:
        raise InvalidTypeError(f"{base.__name__} has a type already")
    found = _MADE.get((base, kind))
    if found is None:
        name = f"{base.__name__}[{getattr(kind, '__name__', kind)}]"
        found = type(name, (base,), {"__slots__": (), "__module__": base.__module__, "_kind": (kind,)})
        _MADE[base, kind] = found
    return found


def check(cls: Any, value: Any) -> None:
    """Refuse a value that is not of the kind of a class.

    Raises:
        InvalidTypeError: it is of another type.
    """
    (kind,) = cls._kind
    if not _fits(kind, value):
        raise InvalidTypeError(
            f"{cls.__name__} takes a {getattr(kind, '__name__', kind)}, not a {type(value).__name__}"
        )


def _fits(kind: Any, value: Any) -> bool:
    """Check whether a value is of a kind, as far as the value itself shows."""
    origin = typing.get_origin(kind)
    if origin is typing.Annotated:
        return _fits(typing.get_args(kind)[0], value)
    if origin is typing.Literal:
        return value in typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return any(_fits(part, value) for part in typing.get_args(kind))
    if kind is None:
        return value is None
    known = kind if origin is None else origin
    return isinstance(value, known) if isinstance(known, (type, tuple)) and known is not Any else True


def reduced(value: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return the pickled form of an object of such a class, which no module has by name."""
    cls = type(value)
    (kind,) = cls._kind
    name = getattr(kind, "__name__", "")
    of = name if _BY_NAME.get(name) is kind else (kind,)
    return pickling.rebuild, ("MetaData.of", pickling.reference(cls.__mro__[1]), of, value.data, value.batch_size)


def rebuilt(base: Any, kind: Any, data: Any, batch_size: Any) -> NonTensorData:
    """Rebuild a value of such a class from its pickle."""
    made: NonTensorData = class_for(
        pickling.referred(base), _BY_NAME[kind] if isinstance(kind, str) else kind[0]
    )._unchecked(data, batch_size)
    return made
