"""The names that methods have in messages: of the class that users know, not of the mixin that defines them."""

from __future__ import annotations

import sys
from types import FunctionType
from typing import Any

PACKAGE = __name__.partition(".")[0]


def name_methods(*classes: type) -> None:
    """Let Python say `TensorDict.map() got an unexpected keyword argument`, and not `MappingMixin.map()`.

    Of several classes that share a function, it is called after the first.
    """
    seen: set[int] = set()
    for cls in classes:
        found: dict[str, Any] = {}
        for base in reversed(cls.__mro__[:-1]):
            found.update(vars(base))
        for name, value in found.items():
            fn = value.__func__ if isinstance(value, (classmethod, staticmethod)) else value
            if not isinstance(fn, FunctionType) or name[0] == "_" or id(fn) in seen:
                continue
            alias = fn.__name__ != name and found.get(fn.__name__) is value
            if fn.__module__.partition(".")[0] == PACKAGE and not alias:
                seen.add(id(fn))
                fn.__name__, fn.__qualname__ = name, f"{cls.__name__}.{name}"
                # pickle looks for the class where the function was defined, and doctest for the function there
                vars(sys.modules[fn.__module__]).setdefault(cls.__name__, cls)
