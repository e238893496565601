"""Structure of the objects of a class, from its annotations."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from tdstore.container.core.container import GROUP, Container
from tdstore.container.core.paths import entry_path
from tdstore.container.core.tensorclasses import Typed
from tdstore.convert.objects.pytree import MARK
from tdstore.errors import InvalidArgumentError, UnknownFieldError
from tdstore.tensordicts.base import TensorDictBase
from tdstore.types import is_key


def _closed(hint: Any) -> bool:
    """Check whether a field is annotated with a class whose entries are its fields, and no others."""
    return hint is not None and issubclass(hint, Typed) and not hint._open


NAMING = {"create_nested": "key", "set_non_tensor": "key", "setdefault": "key", "rename_key_": "new_key"}
"""Methods of a TensorDict that may make an entry, and the argument that says how it is called."""


UPDATING = frozenset(inspect.signature(TensorDictBase.update).parameters)
"""What `update` takes beside entries."""


def guarded(fn: Callable[..., Any], parameter: str) -> Callable[..., Any]:
    """Guard a method of a tensorclass: it first checks whether the entry is a field, else raises AttributeError."""
    signature = inspect.signature(fn)
    place = list(signature.parameters).index(parameter) - 1

    @functools.wraps(fn)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if len(args) > place and args[place] in self._field_names:  # binding takes 2 us
            return fn(self, *args, **kwargs)
        arguments = signature.bind(self, *args, **kwargs).arguments
        first = entry_path(arguments[parameter])[0]
        if not self._open and first not in self._field_names:
            if self.is_locked:
                raise self._tensordict._refuse_locked(f"set {first!r}")
            if "old_key" in arguments:
                self._tensordict._existing(arguments["old_key"])  # a key that is missing is what is wrong first
            raise self._no_field(first)
        return fn(self, *args, **kwargs)

    return call


IN_PLACE = ("update_", "update_at_", "copy_", "copy_at_")
"""Methods of a TensorDict that write the entries of another one."""


def fields_only(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Guard a method of `IN_PLACE`: what it is given has fields only, else it raises UnknownFieldError."""

    @functools.wraps(fn)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        source = args[0] if args else kwargs.get("input_dict_or_td", kwargs.get("tensordict"))
        if type(source) is not type(self) and isinstance(source, Mapping) and not self._open:
            for key in source.keys():  # noqa: SIM118  # iterating over a TensorDict gives its rows
                if is_key(key) and entry_path(key)[0] not in self._field_names:
                    raise UnknownFieldError(f"{type(self).__name__} has no field {entry_path(key)[0]!r}")
        return fn(self, *args, **kwargs)

    return call


def renaming_fields(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Guard `rename_keys`: new keys are fields, else it raises AttributeError."""

    @functools.wraps(fn)
    def call(self: Any, mapping: Any, **kwargs: Any) -> Any:
        if isinstance(mapping, Mapping) and not self._open:
            for new in mapping.values():
                if (first := entry_path(new)[0]) not in self._field_names:
                    raise self._no_field(first)
        return fn(self, mapping, **kwargs)

    return call


def naming_layout_class(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Make `pack` name the class in its layout, so that `unpack` gives it back."""

    @functools.wraps(fn)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        flat, layout = fn(self, *args, **kwargs)
        return flat, dataclasses.replace(layout, cls=type(self))

    return call


def guard(cls: type) -> None:
    """Guard the methods of a class by which entries come in that are no fields."""
    for name, parameter in NAMING.items():
        setattr(cls, name, guarded(getattr(cls, name), parameter))
    for name in IN_PLACE:
        setattr(cls, name, fields_only(getattr(cls, name)))
    for name, adapted in (("rename_keys", renaming_fields), ("pack", naming_layout_class)):
        setattr(cls, name, adapted(getattr(cls, name)))


def check_schema(cls: Any, schema: Mapping[Any, Any]) -> None:
    """Look for names that are no fields of a class, or of the classes of its fields.

    Raises:
        InvalidArgumentError: there is one.
    """
    for key, spec in schema.items():
        first, *below = entry_path(key)
        if first not in cls._field_names:
            raise InvalidArgumentError(
                f"{cls.__name__} has no field {first!r}; its fields are {', '.join(cls._plan.names)}"
            )
        hint = cls._plan.hint(first)
        if _closed(hint) and (below or isinstance(spec, Mapping)):
            check_schema(hint, {tuple(below): spec} if below else spec)


def unmark(cls: Any, td: Container) -> Any:
    """Return the result of `from_pytree` without its marks on the dicts of fields."""
    if isinstance(td, Container) and not isinstance(td, Typed):
        made: Any = td
        if MARK not in cls._field_names and made._kind(MARK) is not None:
            made.del_(MARK)
        for hint, value in _nested(cls, td):
            unmark(hint, value)
    return td


def _nested(cls: Any, td: Any) -> Iterator[tuple[Any, Any]]:
    for key in [k for k in td._first_keys() if td._kind(k) == GROUP]:
        if _closed(hint := cls._plan.hint(key)):
            yield hint, td._raw(key)
