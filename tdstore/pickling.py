"""Names in pickles: one function and a table of kinds, independent of the modules behind them.

A pickle names functions by their module. Pickles of tdstore name `rebuild` alone, with the name of a kind, so that
files open after code has moved. The modules that rebuild objects register themselves; kinds are never renamed.
"""

from __future__ import annotations

import copyreg
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from tdstore.errors import UnsupportedError, UntrustedDataError

Build = Callable[..., Any]
Reduced = tuple[Any, ...]
"""What `__reduce__` returns."""


class _Kind(NamedTuple):
    build: Build
    safe: Build | None


_kinds: dict[str, _Kind] = {}
_classes: dict[type, str] = {}
_named: dict[str, type] = {}


def register(kind: str, build: Build, *, safe: Build | None = None) -> None:
    """Declare how objects of a kind are rebuilt.

    Args:
        kind: its name in pickles.
        build: called with what the pickle holds.
        safe: the same for `torch.load(weights_only=True)`, where a stranger may have written the file.
            Default: such files cannot hold the kind.
    """
    _kinds[kind] = _Kind(build, safe)


def register_class(cls: type) -> None:
    """Pickle instances of exactly this class by its name alone, with the state that pickle takes by default."""
    _classes[cls] = cls.__name__
    _named[cls.__name__] = cls
    new = functools.partial(object.__new__, cls)
    register(cls.__name__, new, safe=new)
    torch.serialization.add_safe_globals([cls])  # the loader sets states of such classes only


def reference(cls: type) -> type | str:
    """Refer to a class in a pickle: by its name if it is registered, by itself if it is not."""
    return _classes.get(cls, cls)


def referred(cls: type | str) -> type:
    """Return the class that a pickle refers to."""
    return _named[cls] if isinstance(cls, str) else cls


def by_name(reduced: str | Reduced) -> str | Reduced:
    """Replace the class in what `object.__reduce_ex__` returns by its registered name, if it has one."""
    if isinstance(reduced, str):
        return reduced
    build, parts, *state = reduced
    if build is copyreg.__newobj__ and len(parts) == 1 and parts[0] in _classes:  # type: ignore[attr-defined]
        return rebuild, (_classes[parts[0]],), *state
    return reduced


def rebuild(kind: str, *parts: Any) -> Any:
    """Rebuild an object from a pickle.

    Raises:
        UnsupportedError: this version does not know the kind.
    """
    return _kind(kind).build(*parts)


def rebuild_safely(kind: Any, *parts: Any) -> Any:
    """Rebuild an object for `torch.load(weights_only=True)`.

    Raises:
        UnsupportedError: this version does not know the kind.
        UntrustedDataError: rebuilding such objects may run code.
    """
    safe = _kind(kind).safe
    if safe is None:
        raise UntrustedDataError(
            f"torch.load(weights_only=True) does not rebuild objects of kind {kind!r}",
            hint="weights_only=False does, if you trust the file",
        )
    return safe(*parts)


def _kind(kind: Any) -> _Kind:
    found = _kinds.get(kind) if isinstance(kind, str) else None
    if found is None:
        raise UnsupportedError(
            f"the pickle holds an object of kind {str(kind)[:80]!r}, which this version of tdstore does not know",
            hint="upgrade tdstore",
        )
    return found


torch.serialization.add_safe_globals([(rebuild_safely, f"{__name__}.{rebuild.__name__}")])
