"""Hooks of tensorclasses in containers: registration, wrapping and unwrapping.

A typed container *has* a container, in `_tensordict`, and a class that names its entries. It is an entry like
any other: whatever is asked of it is asked of what it has, and a result that still fits the class is given it
again. The class itself is in `tdstore.tensorclass`, above this folder.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, MutableMapping
from typing import Any, ClassVar

import msgspec
from torch.serialization import add_safe_globals

from tdstore.container.core.container import Container
from tdstore.container.values.nontensor import NonTensor
from tdstore.errors import InvalidTypeError
from tdstore.header import VALUE_KEY, VALUE_KIND
from tdstore.types import Path

PREFIX = "tensorclass:"
"""A group of a header is a tensorclass when its kind starts like this; the qualified name follows."""


class Typed(Container):
    """Base of every tensorclass; `is_tensorclass` asks for it."""

    __slots__ = ("_tensordict",)

    _tensordict: Any
    _field_names: ClassVar[frozenset[str]]
    _open: ClassVar[bool] = False
    """Whether it may have entries beside its fields."""
    _converts: ClassVar[bool] = False
    """Whether tensors that are set are converted, by the annotations of the fields."""

    @classmethod
    def _wrap_if_fits(cls, td: Any) -> Any:
        """Wrap a container in this class; return the container itself if it has other entries."""
        raise NotImplementedError

    def __opened__(self) -> Any:
        """Return the container for stored data of this class after opening; default: the object.

        A class that is only the stored form of another one overrides this.
        """
        return self

    @classmethod
    def _extra_keys(cls, td: Any) -> list[str]:
        """Return the entries that a container of this class cannot have."""
        keys = td._first_keys()
        if cls._open or cls._field_names.issuperset(keys):
            return []
        return [key for key in keys if key not in cls._field_names]


class StoredValue(Typed):
    """Mark of a TensorDict that is the stored form of a value by itself. There are no objects of it."""

    _field_names = frozenset({VALUE_KEY})


def stored_form(value: NonTensor) -> Container:
    """Return the TensorDict that is saved where a value by itself is: its only entry is the value."""
    new: Any = Container._resident_class
    td: Container = new({VALUE_KEY: value}, batch_size=value.batch_size)
    td._tensorclass = StoredValue
    return td


NonTensor._stored_form = stored_form


# -- the classes of this process -------------------------------------------------------------
_known: dict[str, Any] = {}


def full_name(cls: type) -> str:
    """Return the name of a class in a store."""
    return f"{cls.__module__}.{cls.__qualname__}"


def register(cls: type[Typed]) -> None:
    """Make a class known to `load`; the newest of a name counts, as in a notebook where a cell is run again."""
    name = full_name(cls)
    if name not in _known:
        # To torch.load(weights_only=True) the name means what gives the class to `_rebuilt`, and not the class itself:
        # a file from a stranger cannot call its constructor.
        add_safe_globals([(functools.partial(_known.__getitem__, name), name)])
    _known[name] = cls


def maker_of(cls: type[Typed]) -> type[Typed] | Callable[[], type[Typed]]:
    """Return what a pickle refers to for a class: the class, or a factory for one that no module has by its name."""
    made: type[Typed] | Callable[[], type[Typed]] = vars(cls).get("_made_by", cls)
    return made


def resolve_class(found: Any) -> type[Any]:
    """Return the class that a pickle refers to: `found`, or the result of calling it."""
    cls: type[Any] = found if isinstance(found, type) else found()
    return cls


def known() -> list[type[Typed]]:
    """Return the classes that this process has declared."""
    return list(_known.values())


def lookup(name: str) -> type[Typed] | None:
    """Return the class of a stored name. Nothing is imported.

    What a script calls `__main__.Step` is `train.Step` where the script is imported: then the rest of the name
    is enough, if only one class has it.
    """
    found: type[Typed] | None = _known.get(name)
    if found is not None:
        return found
    generated: type[Typed] | None = _known.get(
        f"{name}_tc"
    )  # files of earlier releases name the dataclass, not its tensorclass
    if generated is not None and "_made_by" in vars(generated):
        return generated
    same = []
    for other, cls in list(_known.items()):
        module, own = cls.__module__, cls.__qualname__
        if name == own or (name.endswith(f".{own}") and "__main__" in (module, name[: -len(own) - 1])):
            same.append((other, cls))
    return same[0][1] if len(same) == 1 else None


# -- to and from a store ---------------------------------------------------------------------
def kind_of(tensorclass: type[Typed] | None) -> str:
    """Return the header's kind for a container of a class, or of none."""
    if tensorclass is StoredValue:
        return VALUE_KIND
    return "TensorDict" if tensorclass is None else PREFIX + full_name(tensorclass)


def class_of(td: Any) -> type[Typed] | None:
    """Return the tensorclass of a container that is part of one; None for all others."""
    return getattr(td, "_tensorclass", None)


def wrap(handle: Any, path: Path, td: Any) -> Any:
    """Wrap the container of a stored group in its class; warn and return it as it is where that is impossible."""
    kind = handle.groups[path].kind
    if not kind.startswith(PREFIX):
        return td
    name = kind[len(PREFIX) :]
    cls = lookup(name)
    if cls is None:
        _warn_unknown(handle, name)
        return td
    if unknown := cls._extra_keys(td):
        if name not in handle.warned_classes:
            handle.warned_classes.add(name)
            warnings.warn(
                f"the data of tensorclass {name!r} has the entry {unknown[0]!r}, which the class lacks: "
                f"it comes as a {type(td).__name__}",
                stacklevel=3,
            )
        return td
    return cls._wrap_if_fits(td).__opened__()


def _warn_unknown(handle: Any, first: str) -> None:
    """Warn once of all classes of a dataset that this process has not declared."""
    if first in handle.warned_classes:
        return
    kinds = (group.kind[len(PREFIX) :] for group in handle.groups.values() if group.kind.startswith(PREFIX))
    names = [first, *sorted({name for name in kinds if lookup(name) is None} - {first})]
    handle.warned_classes.update(names)
    listed = ", ".join(map(repr, names))
    several = len(names) > 1
    warnings.warn(
        f"the tensorclass{'es' if several else ''} {listed} {'are' if several else 'is'} not declared in this process: "
        "such data comes as a plain container. Import what declares it before loading",
        stacklevel=4,
    )


def takes(td: Any, key: str) -> bool:
    """Check whether a container accepts an entry of that name: an entry of a tensorclass is a field."""
    cls = class_of(unwrap(td))
    return cls is None or cls._open or key in cls._field_names


# -- several at once -------------------------------------------------------------------------
def unwrap_all(tds: list[Any]) -> tuple[type[Typed] | None, list[Any]]:
    """Unwrap containers, and return the class that they share; return None and the same list if none has one.

    Beside TensorDicts, and for a TypedTensorDict beside others of any class, the class is that of the first.

    Raises:
        InvalidTypeError: of different classes.
    """
    if not any(issubclass(kind, Typed) for kind in set(map(type, tds))):
        return None, tds
    kinds = list(dict.fromkeys(type(td) for td in tds))
    if len(kinds) > 1:
        classes = [kind for kind in kinds if issubclass(kind, Typed)]
        if len(classes) == 1 or all(issubclass(kind, MutableMapping) for kind in kinds):
            return kinds[0] if issubclass(kinds[0], Typed) else None, [unwrap(td) for td in tds]
        raise InvalidTypeError(f"cannot join {' and '.join(kind.__name__ for kind in kinds)}: all must be of one class")
    return kinds[0], [td._tensordict for td in tds]


def rewrap(cls: type[Typed] | None, made: Any, out: Any = None) -> Any:
    """Wrap the result of joined containers in their class again; return `out` if the result was made there."""
    return out if out is not None else made if cls is None else cls._wrap_if_fits(made)


def unwrap(td: Any) -> Any:
    """Return the container of a tensorclass object; return any other container as it is."""
    return td._tensordict if isinstance(td, Typed) else td


def without_classes(td: Any, retain_none: bool | None = None) -> Any:
    """Replace the tensorclasses of an in-memory tree by plain containers, in place; the caller owns the tree."""
    found = unwrap(td)
    if found is not td:
        found._tensorclass = None
        for name in td._non_tensordict if retain_none else ():
            found.set_non_tensor(name, None)
    for key, value in getattr(found, "_data", {}).items():
        if isinstance(value, Container):
            found._data[key] = without_classes(value, retain_none)
    for number, element in enumerate(getattr(found, "_tds", ())):
        found._tds[number] = without_classes(element, retain_none)
    return found


def stamp(td: Any, cls: type[Typed]) -> None:
    """Write the class into the header of the store that a new container is over; nothing where it is over none."""
    handle, path = getattr(td, "_binding", None) or (getattr(td, "_handle", None), getattr(td, "_path", ()))
    if handle is not None:
        groups = dict(handle.groups)
        groups[path] = msgspec.structs.replace(groups[path], kind=kind_of(cls))
        handle.commit(groups)
