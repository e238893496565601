"""Values as JSON, with the codecs that plugins and users declared for what is not plain data."""

from __future__ import annotations

import enum
import functools
import operator
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from tdstore.errors import InvalidArgumentError, InvalidTypeError, PluginError, StoreError, UntrustedDataError
from tdstore.hookspecs import Codec
from tdstore.registry import registry
from tdstore.values import PICKLE, decode_value, encode_value

if TYPE_CHECKING:
    from tdstore.values import JSON

AnyEnum = TypeVar("AnyEnum", bound=type[enum.Enum])
_pickling: ContextVar[bool] = ContextVar("pickling", default=False)
_trusting: ContextVar[bool] = ContextVar("trusting", default=False)


class _Within:
    """Set a context variable within a `with` block."""

    __slots__ = ("_before", "_yes")
    _variable: ClassVar[ContextVar[bool]]

    def __init__(self, yes: bool) -> None:
        self._yes = yes

    def __enter__(self) -> None:
        self._before = self._variable.set(self._yes)

    def __exit__(self, *error: object) -> None:
        self._variable.reset(self._before)


class pickling(_Within):  # noqa: N801 - reads as a statement: `with pickling(True):`
    """Allow or refuse the pickling of values within a `with` block; saved data is not unpickled."""

    __slots__ = ()
    _variable = _pickling


class trusting(_Within):  # noqa: N801
    """Allow or refuse the unpickling of values within a `with` block, which runs code; the caller of `open` decides."""

    __slots__ = ()
    _variable = _trusting


def to_plain(value: object) -> JSON:
    """Return the JSON form of a value.

    Raises:
        TypeError: neither plain data nor the kind of a codec; names the class.
    """
    return encode_value(value, 0, _encoded)


def from_plain(data: Any) -> Any:
    """Return the value that was passed to `to_plain`.

    Raises:
        ValueError: malformed. UntrustedDataError: a codec that nobody declared.
    """
    return decode_value(data, 0, codec_value)


def _encoded(value: object) -> tuple[str, Any] | None:
    codec = next((c for c in registry().codecs() if c.kind is type(value)), None)
    if codec is None:
        return (PICKLE, _pickled(value)) if _pickling.get() else None
    with _by(codec):
        return codec.name, codec.encode(value)


def _pickled(value: object) -> bytes:
    try:
        return pickle.dumps(value)
    except Exception as error:  # whatever the methods of its class raise
        raise InvalidTypeError(f"it cannot be pickled: {error}") from error


def codec_value(name: str, data: Any) -> Any:
    """Rebuild the object that a codec took apart.

    Raises:
        UntrustedDataError: nobody declared the codec, or it is pickled and the caller did not say `trust=True`.
    """
    if name == PICKLE:
        if not _trusting.get():
            raise UntrustedDataError(
                "it is pickled, and reading it may run any code",
                hint="open it with trust=True if you trust whoever wrote it",
            )
        return pickle.loads(data[0])[data[1]] if isinstance(data, tuple) else pickle.loads(data)
    codec = next((c for c in registry().codecs() if c.name == name), None)
    if codec is None:
        raise UntrustedDataError(
            f"the codec {name[:80]!r} is not installed",
            hint="install the plugin that wrote this value, or declare it with tdstore.register_codec",
        )
    with _by(codec):
        return codec.decode(data)


@contextmanager
def _by(codec: Codec) -> Iterator[None]:
    """Name the codec in the error of its functions; the caller adds the key."""
    try:
        yield
    except (StoreError, PluginError):
        raise
    except Exception as error:
        raise InvalidArgumentError(f"its codec {codec.name!r} failed: {type(error).__name__}: {error}") from error


def _refuse_another(name: str, kind: type) -> None:
    """Raise if a codec of that name is for another class, whose values could then be neither saved nor read."""
    known = next((c for c in registry().codecs() if c.name == name), None)
    if known is not None and known.kind is not kind and known.kind.__qualname__ != kind.__qualname__:
        raise InvalidArgumentError(f"{known.kind.__qualname__} is registered as {name!r} already; give another name=")


def register_codec(codec: Codec) -> None:
    """Teach stores of this process to keep a kind of object; plugins do so by the hook `tdstore_codecs`.

    A codec of the same name and class takes the place of the one that was there.

    Raises:
        InvalidTypeError: its kind is no class. ValueError: another class was registered by that name.

    Example:
        >>> from fractions import Fraction
        >>> from tdstore import Codec, register_codec
        >>> register_codec(
        ...     Codec(
        ...         name="fraction",
        ...         kind=Fraction,
        ...         encode=lambda f: (f.numerator, f.denominator),
        ...         decode=lambda pair: Fraction(*pair),
        ...     )
        ... )
    """
    if not isinstance(codec.kind, type):
        raise InvalidTypeError(f"the kind of the codec {codec.name!r} is a class, not {codec.kind!r}")
    _refuse_another(codec.name, codec.kind)
    registry().register_codec(codec)


def register_enum(cls: AnyEnum, *, name: str | None = None) -> AnyEnum:
    """Let the members of an enum be stored, by their names. A function or a decorator; returns the class.

    Flags that are set together are stored by the names of each.

    Args:
        name: written beside the data; the class's name if not given. It is never imported: a reader must have
            registered the enum, too.

    Raises:
        ValueError: another class was registered by that name.
    """
    name = name or cls.__name__
    _refuse_another(f"enum:{name}", cls)
    registry().register_codec(
        Codec(name=f"enum:{name}", kind=cls, encode=_member_name, decode=lambda data: _member(cls, data))
    )
    return cls


def _member_name(member: Any) -> Any:
    """Return the name of a member, the names of combined flags, or a number where bits have no name."""
    if member.name in type(member).__members__:
        return member.name
    names = [flag.name for flag in member]
    return names if _member(type(member), names) == member else member.value


def _member(cls: Any, data: Any) -> Any:
    if isinstance(data, list):
        return functools.reduce(operator.or_, (cls[name] for name in data), cls(0))
    return cls[data] if isinstance(data, str) else cls(data)
