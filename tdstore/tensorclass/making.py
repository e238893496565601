"""`@tensorclass` and its kin."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar, dataclass_transform, overload

from tdstore.arguments import refuse_type
from tdstore.container.core.tensorclasses import Typed
from tdstore.convert.objects import python as converting
from tdstore.errors import InvalidTypeError
from tdstore.tensorclass.base import TensorClass
from tdstore.tensorclass.typeddict import TypedTensorDict
from tdstore.tensordicts.resident.tensordict import TensorDict
from tdstore.types import DeviceLike, SizeLike

T = TypeVar("T")


@overload
def tensorclass(cls: type[T], /) -> type[T]: ...
@overload
def tensorclass(
    *,
    autocast: bool = False,
    frozen: bool = False,
    nocast: bool = False,
    shadow: bool = False,
    tensor_only: bool = False,
) -> Callable[[type[T]], type[T]]: ...
@dataclass_transform(field_specifiers=(dataclasses.field,))
def tensorclass(cls: Any = None, /, **flags: bool) -> Any:
    """Make a tensorclass of a class body: see `TensorClass`, which explains the flags.

    Type checkers see the fields of a decorated class, and with `class Step(TensorClass)` the methods as well.

    Raises:
        AttributeError: a field would hide an attribute that every tensorclass has.

    Example:
        >>> @tensorclass
        ... class Point:
        ...     xy: torch.Tensor
        ...     label: str = ""
        ...     def norm(self):
        ...         return self.xy.norm(dim=-1)
        >>> Point(xy=torch.tensor([[3.0, 4.0]]), batch_size=[1])[0].norm()
        tensor(5.)
    """
    if cls is None:
        return lambda body: tensorclass(body, **flags)
    if not isinstance(cls, type):
        raise InvalidTypeError(f"tensorclass decorates a class, not a {type(cls).__name__}")
    if issubclass(cls, TensorClass):
        options = {**dataclasses.asdict(cls._flags), **flags}
        cls._setup(type(cls._flags)(**options))
        return cls
    own: dict[str, Any] = inspect.get_annotations(cls)
    body = {name: cls.__dict__[name] for name in own if name in cls.__dict__}
    body.update(_of_a_dataclass(cls))
    copied = ("__module__", "__qualname__", "__doc__")
    body.update({name: cls.__dict__[name] for name in copied if cls.__dict__.get(name) is not None})
    body["__annotations__"] = own
    body["__qualname__"] = cls.__qualname__
    # The class body stays a base: its methods come first, and their super() finds what every tensorclass has.
    meta: Any = type(cls)
    return meta(cls.__name__, (cls, TensorClass), body, **flags)


def _of_a_dataclass(cls: type) -> dict[str, Any]:
    """Replace the parts of a class body that `dataclasses.dataclass` wrote: none if it is no dataclass."""
    if "__dataclass_fields__" not in vars(cls):
        return {}
    fields: dict[str, dataclasses.Field[Any]] = cls.__dataclass_fields__  # type: ignore[attr-defined]
    body: dict[str, Any] = {
        name: dataclasses.field(default_factory=field.default_factory)
        for name, field in fields.items()
        if field.default_factory is not dataclasses.MISSING
    }
    for name in ("__init__", "__repr__", "__eq__"):
        made = vars(cls).get(name)
        code = getattr(getattr(made, "__wrapped__", made), "__code__", None)
        if code is not None and code.co_filename == "<string>":  # made from text, not by the user
            body[name] = getattr(TensorClass, name)
    return body


def is_tensorclass(value: object) -> bool:
    """Check whether a value, or a class, is a tensorclass; a `TypedTensorDict` is a TensorDict instead."""
    kind = value if isinstance(value, type) else type(value)
    return issubclass(kind, Typed) and not issubclass(kind, TypedTensorDict)


def from_dataclass(
    obj: Any,
    *,
    dest_cls: type | None = None,
    auto_batch_size: bool = False,
    batch_dims: int | None = None,
    batch_size: SizeLike | None = None,
    device: DeviceLike | None = None,
    frozen: bool = False,
    autocast: bool = False,
    nocast: bool = False,
    inplace: bool = False,
    shadow: bool = False,
    tensor_only: bool = False,
) -> Any:
    """Convert a dataclass to a tensorclass: a class from a class, an object from an object, nested ones too.

    Args:
        obj: a dataclass, or an object of one.
        dest_cls: make an object of this tensorclass, nested ones of the classes that its fields are annotated with;
            default: one with the fields of the dataclass.
        auto_batch_size: give it the largest batch size that its fields share.
        **flags: of the class that is made; see `TensorClass`.

    Raises:
        InvalidTypeError: neither a dataclass nor an object of one.
    """
    if not dataclasses.is_dataclass(obj):
        raise InvalidTypeError(f"from_dataclass takes a dataclass or an object of one, not a {type(obj).__name__}")
    if isinstance(obj, Typed) or (isinstance(obj, type) and issubclass(obj, Typed)):
        return obj
    if dest_cls is not None and not (isinstance(dest_cls, type) and issubclass(dest_cls, Typed)):
        raise refuse_type("dest_cls", "a tensorclass", dest_cls)
    flags = {"autocast": autocast, "frozen": frozen, "nocast": nocast, "shadow": shadow, "tensor_only": tensor_only}
    kind: Any = obj if isinstance(obj, type) else type(obj)
    cls: Any = dest_cls if dest_cls is not None else _class_like(kind, tuple(flags.items()))
    if isinstance(obj, type):
        return cls
    more: dict[str, Any] = {"auto_batch_size": auto_batch_size, "batch_dims": batch_dims, "device": device, **flags}
    values = {}
    for field in dataclasses.fields(obj):
        value = getattr(obj, field.name)
        if dataclasses.is_dataclass(value) and not isinstance(value, (type, Typed)):
            hint = cls._plan.hint(field.name)
            dest = hint if dest_cls is not None and hint is not None and issubclass(hint, TensorClass) else None
            value = from_dataclass(value, **{**more, "dest_cls": dest, "batch_size": batch_size})
        values[field.name] = value
    made = cls._wrap(TensorDict({}, batch_size, device))
    for name, value in values.items():
        made._put(name, value)
    if auto_batch_size:
        made.auto_batch_size_(batch_dims)
    made._settle(False)
    return made


converting.as_tensorclass_of = from_dataclass
_made: dict[tuple[type, Any], Any] = {}


def _class_like(kind: Any, flags: tuple[tuple[str, bool], ...]) -> Any:
    """Return the tensorclass of a dataclass: the same one each time."""
    if (kind, flags) not in _made:
        body: dict[str, Any] = {
            "__annotations__": {},
            "__module__": kind.__module__,
            "__qualname__": f"{kind.__qualname__}_tc",
        }
        for field in dataclasses.fields(kind):
            body["__annotations__"][field.name] = field.type
            if field.default is not dataclasses.MISSING:
                body[field.name] = field.default
            elif field.default_factory is not dataclasses.MISSING:
                body[field.name] = dataclasses.field(default_factory=field.default_factory)
        # Its methods are inherited; a frozen dataclass can only have frozen ones below it.
        bases = (TensorClass,) if kind.__dataclass_params__.frozen else (TensorClass, kind)
        body["_made_by"] = functools.partial(_class_like, kind, flags)
        _made[kind, flags] = type(kind)(f"{kind.__name__}_tc", bases, body, **{k: v for k, v in flags if v})
    return _made[kind, flags]
