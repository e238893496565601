"""Fields of a tensorclass: their plan, and how one is read and written."""

from __future__ import annotations

import dataclasses
import inspect
import sys
import typing
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, InitVar
from types import NoneType, UnionType
from typing import Any, Union

import torch
from torch import Tensor

from tdstore.arguments import refuse_type
from tdstore.container.core.container import Container
from tdstore.container.core.tensorclasses import Typed, known
from tdstore.container.values.nontensor import NonTensor
from tdstore.errors import FrozenError, InvalidArgumentError, InvalidTypeError
from tdstore.tensordicts.resident.tensordict import TensorDict
from tdstore.types import Entry, Names


@dataclasses.dataclass(frozen=True, slots=True)
class Flags:
    """Treatment of values that are set; see `tensorclass`."""

    autocast: bool = False
    frozen: bool = False
    nocast: bool = False
    shadow: bool = False
    tensor_only: bool = False

    def __post_init__(self) -> None:
        if self.nocast and (self.autocast or self.tensor_only):
            other = "autocast" if self.autocast else "tensor_only"
            raise InvalidTypeError(f"a tensorclass is nocast or {other}, not both")
        if self.autocast and self.tensor_only:
            raise InvalidTypeError("a tensorclass is autocast or tensor_only, not both")


@dataclasses.dataclass(init=False, repr=False, eq=False)
class Arguments:
    """Arguments of a constructor beside the fields; `dataclasses.replace` passes them on."""

    batch_size: InitVar[Any] = dataclasses.field(default=None, kw_only=True)
    device: InitVar[Any] = dataclasses.field(default=None, kw_only=True)
    names: InitVar[Any] = dataclasses.field(default=None, kw_only=True)


_TENSORS = (Tensor, Container, NonTensor)
"""What the fields of a `tensor_only` class may be annotated with."""

ARGUMENTS = frozenset(("batch_size", "device", "names", "lock"))


MAY_HIDE = frozenset(
    """append check close commit data extend fields from_arrow from_optimizer from_safetensors read refresh_ resize_
    to_arrow to_arrow_reader to_optimizer to_safetensors verify""".split()
)
"""Names that a field may have: it hides the attribute, which the container inside still has."""


class Plan:
    """The fields of one class, sorted for its constructor."""

    def __init__(self, owner: type, flags: Flags) -> None:
        self.owner, self.flags = owner, flags
        self.names: tuple[str, ...] = tuple(f.name for f in dataclasses.fields(owner))
        self.order: list[str] = []
        self.positional: list[str] = []
        self.defaults: dict[str, Any] = {}
        self.factories: dict[str, Any] = {}
        self.passed: list[str] = []
        """InitVars of the class, which go to `__post_init__`."""
        self.unasked: list[str] = []
        """Fields with `init=False`, which the constructor does not take."""
        self._hints: dict[str, Any] | None = None
        for name, field in owner.__dataclass_fields__.items():  # type: ignore[attr-defined]
            kind = field._field_type.name
            if kind != "_FIELD_CLASSVAR" and not (name in ARGUMENTS and kind == "_FIELD_INITVAR"):
                self._sort(name, field, kind)
        self.shadowed: list[str] = [name for name in self.order if name in ARGUMENTS]
        """Fields that have the names of arguments of the constructor, which it takes no more."""

    def _sort(self, name: str, field: Field[Any], kind: str) -> None:
        if kind == "_FIELD_INITVAR":
            self.passed.append(name)
        if field.default is not MISSING:
            self.defaults[name] = field.default
        elif field.default_factory is not MISSING:
            self.factories[name] = field.default_factory
        elif not field.init:
            self.defaults[name] = None  # until __post_init__ sets it
        elif not field.kw_only and (early := [n for n in self.positional if not self.requires(n)]):
            raise InvalidTypeError(f"the field {name!r} has no default, but follows {early[0]!r}, which has one")
        self.order.append(name)
        if not field.init:
            self.unasked.append(name)
        if field.init and not field.kw_only:
            self.positional.append(name)

    def requires(self, name: str) -> bool:
        """Check whether the constructor requires a field."""
        return name not in self.defaults and name not in self.factories

    def take(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Put positional arguments among those by name."""
        if len(args) > len(self.positional):
            raise InvalidTypeError(
                f"{self.owner.__name__}() takes {len(self.positional)} fields, and {len(args)} were given"
            )
        for name, value in zip(self.positional, args, strict=False):
            if name in kwargs:
                raise InvalidArgumentError(f"the field {name!r} was given twice")
            kwargs[name] = value

    def shadow(self, fields: dict[str, Any], **arguments: Any) -> Iterator[Any]:
        """Return arguments of the constructor, None for those that are fields and are put among the fields."""
        fields.update({name: arguments[name] for name in self.shadowed if arguments[name] is not None})
        return (None if name in self.shadowed else value for name, value in arguments.items())

    def missing(self, first: str, arguments: dict[str, Any]) -> TypeError:
        """Create the error for missing fields, from `first` on; `arguments` are those not yet consumed."""
        rest = self.order[self.order.index(first) :]
        lost = ", ".join(repr(n) for n in rest if n not in arguments and self.requires(n))
        unknown = ", ".join(repr(n) for n in arguments if n not in self.order)
        return TypeError(
            f"{self.owner.__name__}() is missing {lost}" + (f", and has no field {unknown}" if unknown else "")
        )

    # -- annotations -------------------------------------------------------------------------
    def hint(self, name: str) -> Any:
        """Return the class that a field is annotated with, without `Optional`; None where that is unknown."""
        if self._hints is None:
            self._hints = resolved(self.owner)
        return _single(self._hints.get(name))

    def allowed(self, name: str) -> list[Any]:
        """Return all that a field may be by its annotation, as far as that is known."""
        self.hint(name)
        return _members(self._hints[name]) if self._hints and name in self._hints else []

    def forget(self) -> None:
        """Look at the annotations anew when they are needed."""
        self._hints = None


def resolved(owner: type, *, extras: bool = False) -> dict[str, Any]:
    """Resolve annotations to types; those that cannot be resolved are left out, and never break a class.

    Args:
        extras: keep `Annotated[...]` as it is.
    """
    try:
        return typing.get_type_hints(owner, include_extras=extras)
    except (NameError, TypeError, SyntaxError, AttributeError):
        pass  # one by one, then
    out: dict[str, Any] = {}
    # Classes of a function's body are in no module: they are looked for among those that were declared.
    declared = {cls.__name__: cls for cls in known()}
    for base in reversed(owner.__mro__):
        names = {**declared, **vars(sys.modules.get(base.__module__, typing))}
        for name, hint in inspect.get_annotations(base).items():
            holder = type("holder", (), {"__annotations__": {name: hint}})
            try:
                out[name] = typing.get_type_hints(holder, globalns=names, include_extras=extras)[name]
            except (NameError, TypeError, SyntaxError, AttributeError):
                out.pop(name, None)
    return out


def _single(hint: Any) -> Any:
    """Extract a class from `Optional[class]`, `Annotated[class, ...]` and `class[...]`."""
    if typing.get_origin(hint) in (Union, UnionType):
        left = [h for h in typing.get_args(hint) if h is not NoneType]
        hint = left[0] if len(left) == 1 else None
    origin = typing.get_origin(hint)
    if origin is typing.Annotated:
        return _single(typing.get_args(hint)[0])
    hint = hint if origin is None else origin
    return hint if isinstance(hint, type) and hint not in (Any, object) else None


def _members(hint: Any) -> list[Any]:
    """Return what a field may be by its annotation, without None: classes, `Any`, and forms that are no class."""
    origin = typing.get_origin(hint)
    if origin in (Union, UnionType):
        return [part for arg in typing.get_args(hint) for part in _members(arg)]
    if origin is typing.Annotated:
        return _members(typing.get_args(hint)[0])
    return [] if hint is NoneType else [hint if origin is None else origin]


def names_argument(names: Any) -> Names:
    """Return the argument `names`, None if it names nothing: `dataclasses.replace` passes it on to a new batch."""
    return None if isinstance(names, list) and not any(name is not None for name in names) else names


# -- access ----------------------------------------------------------------------------------
class FieldAccess:
    """A field on its class: `obj.f` reads the entry `f`, None where there is none; setting None removes it."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, obj: Any, owner: Any = None) -> Any:
        if obj is None:
            raise AttributeError(f"{self.name!r} is a field of {owner.__name__}'s objects")
        td = obj._tensordict
        if type(td) is not TensorDict:
            return entry_of(td, self.name)
        found = td._data.get(self.name)
        if type(found) is Tensor or not isinstance(found, NonTensor):
            return found
        return found.plain()

    def __set__(self, obj: Any, value: Any) -> None:
        obj._put(self.name, value)


class EntryAccess(FieldAccess):
    """A field of a class whose fields are not unwrapped: a value reads as the entry, a `NonTensorData`."""

    __slots__ = ()

    def __get__(self, obj: Any, owner: Any = None) -> Any:
        if obj is None:
            return super().__get__(obj, owner)
        td = obj._tensordict
        return None if td._kind(self.name) is None else td.get(self.name)


def entry_of(td: Any, name: str) -> Entry:
    """Return a first-level entry of any container, unwrapped; None where there is none."""
    return None if td._kind(name) is None else td[name]


def unwrapped(found: Any, flags: Flags) -> Entry:
    """Return the value of a field: that of a non-tensor entry, unless all fields of the class are entries."""
    return found.plain() if isinstance(found, NonTensor) and not flags.tensor_only else found


def of_same_class(obj: Typed, source: object, kwargs: dict[str, object], options: frozenset[str]) -> TensorDict | None:
    """Return the TensorDict in an object of the same class: its entries are fields, and need no conversion.

    None for other sources, where `kwargs` has more than `options`, and where no field can be assigned.
    """
    cls: Any = type(obj)
    if cls._converts or cls._flags.frozen or type(obj._tensordict) is not TensorDict:
        return None
    if kwargs and not (options.issuperset(kwargs) and cls._field_names.isdisjoint(kwargs)):
        return None
    if not isinstance(source, Typed) or type(source) is not type(obj):
        return None
    found = source._tensordict
    return found if type(found) is TensorDict else None


def entries_by_key(
    obj: Any, updates: Any, kwargs: dict[str, Any], options: frozenset[str], inplace: bool
) -> dict[Any, Any]:
    """Return the contents of an update, as a dict; batch sizes are taken over before, where that is requested.

    Args:
        kwargs: lose what is there for fields; the `options` of `update` stay.
    """
    td, wanted = obj._tensordict, bool(kwargs.get("update_batch_size"))
    if isinstance(updates, Container) and (wanted or td.is_empty()):
        some_keys, ignore_lock = kwargs.get("keys_to_update") is not None, bool(kwargs.get("ignore_lock"))
        td._take_batches(updates, wanted, inplace, some_keys, ignore_lock)
    try:
        entries = {} if updates is None else dict(updates.items())
    except (AttributeError, TypeError):
        if not isinstance(updates, (Container, Mapping, Typed)):
            raise refuse_type(
                "the entries of an update", "a TensorDict, an object of a class or a dict", updates
            ) from None
        raise
    return entries | {k: kwargs.pop(k) for k in list(kwargs) if k in obj._field_names or k not in options}


def unset(obj: Any, name: str) -> None:
    """Implement `obj.field = None` and `del obj.field`: the field has no entry, and reads as None."""
    if obj._tensordict._kind(name) is not None:
        obj._tensordict.del_(name)


def refuse_frozen(obj: Any, name: str) -> FrozenError:
    """Create the error for a change of a frozen object."""
    return FrozenError(f"cannot assign to field {name!r} of a frozen {type(obj).__name__}")


# -- declaring -------------------------------------------------------------------------------
def declare(cls: Any, flags: Flags, root: type) -> Plan:
    """Make a dataclass of a class body: fields, their access, and the plan for the constructor.

    Raises:
        AttributeError: a field has the name of something that `root` has. InvalidTypeError: a field without default
            after one with, or not a tensor with `tensor_only`.
    """
    own = inspect.get_annotations(cls)
    for name in own:
        if name in ARGUMENTS and not (flags.shadow and name != "lock"):
            raise AttributeError(f"a field cannot be called {name!r}: every tensorclass has an attribute of that name")
        if name not in cls.__dict__ and name in dir(root):
            setattr(cls, name, dataclasses.field())  # or the container's method would be its default
    if "__dataclass_fields__" not in vars(cls):  # else it was declared before, with other flags
        dataclasses.dataclass(init=False, repr=False, eq=False, kw_only=cls._by_name)(cls)
    names = [f.name for f in dataclasses.fields(cls)]
    for name in names:
        if name not in own and isinstance(looked_up(cls, name), FieldAccess):
            continue
        # A TypedTensorDict is a TensorDict to its users, whose `data` are its tensors.
        may_hide = name in MAY_HIDE and not (cls._by_name and name == "data")
        if hasattr(root, name) and not may_hide and not flags.shadow:
            raise AttributeError(
                f"the field {name!r} of {cls.__name__} would hide the attribute {name!r} that every tensorclass has: "
                "choose another name, or pass shadow=True"
            )
        access = EntryAccess if flags.tensor_only and cls._access is FieldAccess else cls._access
        setattr(cls, name, access(name))
    plan = Plan(cls, flags)
    if flags.tensor_only:
        for name in names:
            for part in plan.allowed(name):
                typed = part in torch._tensor_classes  # `torch.LongTensor` and its kin
                if part is Any or (isinstance(part, type) and not typed and not issubclass(part, _TENSORS)):
                    raise InvalidTypeError(
                        f"the field {name!r} of a tensor_only class is annotated {part.__name__}, not Tensor"
                    )
        plan.forget()  # a class that names itself is not there yet
    return plan


def looked_up(cls: type, name: str) -> object:
    """Return what the body of a class, or of a base of it, has under a name; None if none has it."""
    return next((vars(base)[name] for base in cls.__mro__ if name in vars(base)), None)
