"""Forwarding of every container method to tensorclasses, by one rule.

What `TensorDict` and its bases define, and `TensorClass` does not define itself, is there under the same name,
signature and docstring. A call is passed on to the container inside, and of what comes back

- the container inside is the object itself: methods that change in place return `self`;
- what was given as `out=` is returned as it was given;
- a container, or a tuple of containers (plain, or `torch.return_types.max`), is of the same kind: it gets the class
  again, unless it has entries that are not fields of the class, as after `flatten_keys`: then it stays a TensorDict;
- a future is one of what its result becomes by these rules;
- all else is returned as it is, and so is what a method with a parameter `key` gives: that is an entry.

A class method is passed on to `TensorDict`; what comes back gets the class. No list of names is kept: a method
that a container has today is here today.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from concurrent.futures import Future
from types import FunctionType, MemberDescriptorType
from typing import Any

from torch import Size, device, dtype

from tdstore.container.core.container import Container
from tdstore.container.core.tensorclasses import Typed, unwrap
from tdstore.container.persistence.saving import later

_OWN = {
    "__new__", "__init__", "__init_subclass__", "__class_getitem__", "__getattr__", "__setattr__", "__delattr__",
    "__reduce_ex__",
}  # fmt: skip
_FACTS = frozenset(
    {Size, int, bool, float, str, type(None), device, dtype, list, type({}.keys()), type({}.values()), type({}.items())}
)
"""What is never wrapped: results of these types are returned as they are."""


def install(target: type[Typed], source: type) -> None:
    """Define on `target` what `source` and its bases define, forwarded."""
    found: dict[str, Any] = {}
    for base in reversed(source.__mro__[:-1]):
        found.update(vars(base))
    for name, value in found.items():
        if name in vars(target) or name in _OWN:
            continue
        made = forwarded(name, value, source)
        if made is not None:
            setattr(target, name, made)


def forwarded(name: str, value: object, source: type) -> Any:
    """Return an attribute that forwards to the wrapped container; None for what is not the instance's."""
    if isinstance(value, FunctionType):
        return _method(name, value)
    if isinstance(value, classmethod):
        return _class_method(name, value.__func__, source)
    if isinstance(value, (property, MemberDescriptorType)):
        return _attribute(name, value.__doc__ if isinstance(value, property) else None)
    return value if isinstance(value, staticmethod) else None


def again(cls: type[Typed], made: object) -> Any:
    """Wrap a result of the container again where it is of the same kind."""
    if isinstance(made, Container):
        return cls._wrap_if_fits(made)
    if type(made) is Size or not isinstance(made, tuple) or not made:
        return made
    for part in made:
        if not isinstance(part, Container):
            return made
    parts = tuple([cls._wrap_if_fits(part) for part in made])
    kind: Any = type(made)  # of `max` and its kin: torch.return_types.max
    return parts if kind is tuple else kind(parts)


@functools.cache
def gives_entries(fn: Callable[..., Any]) -> bool:
    """Check whether a method is about one entry, by its key."""
    code = inspect.unwrap(fn).__code__  # a signature takes 50 us, and there are 300 methods
    return "key" in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]


def _method(name: str, fn: Callable[..., Any]) -> Callable[..., Any]:
    if gives_entries(fn):

        def entry(self: Any, *args: Any, **kwargs: Any) -> Any:
            td = self._tensordict
            made = getattr(td, name)(*args, **kwargs)
            return self if made is td else made

        return functools.wraps(fn)(entry)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        td = self._tensordict
        made = getattr(td, name)(*map(bare, args), **kwargs) if args or kwargs else getattr(td, name)()
        return made if type(made) in _FACTS else _result(self, made, kwargs)

    def alone(self: Any) -> Any:
        made = getattr(self._tensordict, name)()
        return made if type(made) in _FACTS else _result(self, made, {})

    return functools.wraps(fn)(alone if _takes_nothing(fn) else call)


def _takes_nothing(fn: Callable[..., Any]) -> bool:
    """Check whether a method has no parameters, so that none need be passed on."""
    code = inspect.unwrap(fn).__code__
    variable = code.co_flags & (inspect.CO_VARARGS | inspect.CO_VARKEYWORDS)
    return code.co_argcount == 1 and not code.co_kwonlyargcount and not variable


def forwarded_unwrapped(name: str, fn: Callable[..., Any]) -> Callable[..., Any]:
    """Forward a method whose results are plain containers, not wrapped in the class."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        made = getattr(self._tensordict, name)(*map(bare, args), **kwargs)
        out = kwargs.get("out")
        return out if out is not None and made is unwrap(out) else made

    return functools.wraps(fn)(call)


def _result(obj: Any, made: Any, kwargs: dict[str, Any]) -> Any:
    """Convert the result of a call on the container of `obj` for the caller."""
    td = obj._tensordict
    if made is td:
        return obj
    if isinstance(made, Future):
        return later(lambda: _result(obj, made.result(), kwargs))
    if kwargs and (out := kwargs.get("out")) is not None and made is unwrap(out):
        return out
    if type(made) is tuple:
        for part in made:
            if part is td:
                return tuple([obj if part is td else again(type(obj), part) for part in made])
    return again(type(obj), made)


def bare(value: object) -> Any:
    """Unwrap the container of an argument, or those of a list."""
    if isinstance(value, Typed):
        return value._tensordict
    if isinstance(value, list):
        for part in value:
            if isinstance(part, Typed):
                return [unwrap(part) for part in value]
    return value


def _class_method(name: str, fn: Callable[..., Any], source: type) -> Any:
    @functools.wraps(fn)
    def call(cls: Any, *args: Any, **kwargs: Any) -> Any:
        made = getattr(source, name)(*args, **kwargs)
        return again(cls, made) if name.startswith("_") else cls._received(made)  # one of ours is no new object

    return classmethod(call)


def _attribute(name: str, doc: str | None) -> property:
    def get(self: Any) -> Any:
        made = getattr(self._tensordict, name)
        return made if type(made) in _FACTS else again(type(self), made)

    def put(self: Any, value: Any) -> None:
        setattr(self._tensordict, name, value)

    return property(get, put, doc=doc)


def late(owner: Any, name: str) -> Any:
    """Return an attribute that only some containers have, such as `append` of a lazy stack."""
    td = owner._tensordict
    found = getattr(td, name)
    if not inspect.ismethod(found):
        return found
    entries = gives_entries(found.__func__)

    @functools.wraps(found)
    def call(*args: Any, **kwargs: Any) -> Any:
        made = found(*map(bare, args), **kwargs)
        return owner if made is td else made if entries else again(type(owner), made)

    return call


class OnClass:
    """A function of objects of a class as one of their containers; it travels to workers."""

    __slots__ = ("cls", "fn")

    def __init__(self, fn: Callable[..., Any], cls: type[Typed]) -> None:
        self.fn, self.cls = fn, cls

    def __call__(self, td: Any, *args: Any, **kwargs: Any) -> Any:
        """Call the function with an object around `td`."""
        return self.fn(again(self.cls, td), *args, **kwargs)


def flatten(obj: Typed) -> tuple[list[Any], Any]:
    """Flatten an object as a node of torch's pytrees."""
    return [obj._tensordict], type(obj)


def unflatten(children: Any, cls: Any) -> Any:
    """Rebuild what `flatten` took apart; other objects in the places of the container stay unwrapped."""
    (td,) = children
    return again(cls, td) if isinstance(td, Container) else td
