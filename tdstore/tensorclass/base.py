"""`TensorClass`: an object with named fields over a container of any kind."""

from __future__ import annotations

import builtins
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from types import NoneType
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from tdstore import errors, pickling
from tdstore.arguments import refuse_type
from tdstore.container.core.container import GROUP, Container
from tdstore.container.core.locks import LOCKED
from tdstore.container.core.paths import entry_path
from tdstore.container.core.tensorclasses import Typed, maker_of, register, resolve_class, stamp, unwrap
from tdstore.container.display.text import class_text
from tdstore.container.functions import torch_functions
from tdstore.container.methods.access import AS_SET
from tdstore.tensorclass.below import UPDATING, check_schema, guard, unmark
from tdstore.tensorclass.casting import as_field, cast_of
from tdstore.tensorclass.checks import check, check_rows
from tdstore.tensorclass.fields import (
    Arguments,
    FieldAccess,
    Flags,
    Plan,
    declare,
    entries_by_key,
    entry_of,
    looked_up,
    names_argument,
    of_same_class,
    refuse_frozen,
    unset,
    unwrapped,
)
from tdstore.tensorclass.protocols import DeclaredFields, cast_back, set_dataclass_attributes
from tdstore.tensorclass.static import Fields, Surface
from tdstore.tensorclass.surface import OnClass, again, flatten, install, late, unflatten
from tdstore.tensordicts.base import TensorDictBase
from tdstore.tensordicts.resident.tensordict import TensorDict
from tdstore.types import DeviceLike, Entry, IndexType, NamesLike, NestedKey, SizeLike, is_key

if TYPE_CHECKING:
    from typing import Never

    from tdstore.tensorclass.static import NOT_GIVEN, ConstructorArgument


_CONTAINERS: Any = TensorDictBase
_OPTIONS = UPDATING - {"self", "input_dict_or_td", "kwargs"}


class TensorClass(Surface, metaclass=Fields):
    """Base of classes with named fields over a container: subclass it, and annotate the fields.

    An object takes its fields, positional or by name, then `batch_size`, `device`, `names` and `lock`. It has
    every method of a TensorDict; what comes back has the class again. Wherever the data is (in memory, in
    files, in an HDF5 file, in a lazy stack) the class is the same, and loading gives it back.

    Flags, as keywords of the class statement or as `TensorClass["nocast", ...]`; subclasses inherit them:

    - `autocast`: what is set is converted to the annotation: an int field takes `tensor(3)`, a nested class a dict.
    - `nocast`: numbers and arrays stay as they are; without it they become tensors.
    - `tensor_only`: fields are tensors, TensorDicts, None, or entries such as `MetaData`, which are not unwrapped.
    - `frozen`: fields cannot be assigned, and the object is locked.
    - `shadow`: fields may have the names of attributes that every tensorclass has; `shape` is the batch size, too.

    Strings and other objects are values of the whole batch. None is no entry at all: `keys()` does not have it.

    Example:
        >>> class Step(TensorClass):
        ...     obs: torch.Tensor
        ...     reward: torch.Tensor | None = None
        ...     env: str = "pong"
        >>> steps = Step(obs=torch.zeros(3, 4), batch_size=[3])
        >>> steps[1:].obs.shape, steps.env, steps.reward
        (torch.Size([2, 4]), 'pong', None)
    """

    __slots__ = ()

    _plan: ClassVar[Plan]
    _cast: ClassVar[Any]  # a `Cast`, as a static method
    _flags: ClassVar[Flags] = Flags()
    _field_names: ClassVar[frozenset[str]] = frozenset()
    _settable: ClassVar[frozenset[str]] = frozenset()
    """Names that are set as attributes: properties and slots."""
    _post: ClassVar[bool] = False
    _access: ClassVar[builtins.type[FieldAccess]] = FieldAccess  # how a field is read as an attribute
    _fields_of: ClassVar[builtins.type[DeclaredFields]] = DeclaredFields  # what `__dataclass_fields__` is
    _own_setter: ClassVar[bool] = False  # whether the user wrote a `__setattr__`
    _by_name: ClassVar[bool] = False  # whether the constructor takes fields by name only
    _made_by: ClassVar[Callable[[], Any]]
    """Gives a class that no module has by its name."""

    if TYPE_CHECKING:
        batch_size: ConstructorArgument[torch.Size, Any] = dataclasses.field(default=NOT_GIVEN, kw_only=True)
        device: ConstructorArgument[torch.device | None, Any] = dataclasses.field(default=NOT_GIVEN, kw_only=True)
        names: ConstructorArgument[list[str | None], Any] = dataclasses.field(default=NOT_GIVEN, kw_only=True)  # type: ignore[override]
        lock: ConstructorArgument[Never, bool] = dataclasses.field(default=NOT_GIVEN, kw_only=True)

        def __init_subclass__(
            cls,
            *,
            autocast: bool = ...,
            frozen: bool = ...,
            nocast: bool = ...,
            shadow: bool = ...,
            tensor_only: bool = ...,
        ) -> None: ...

    else:

        def __init_subclass__(cls, **flags: bool) -> None:
            super().__init_subclass__()
            options = {**dataclasses.asdict(cls._flags), **flags}
            if unknown := options.keys() - dataclasses.asdict(Flags()).keys():
                raise errors.OptionError(
                    f"no flag {sorted(unknown)[0]!r} of tensorclasses: {', '.join(Flags.__slots__)}"
                )
            cls._setup(Flags(**options))

    def __class_getitem__(cls, flags: Any) -> Any:
        """Return a base with flags, as in `TensorClass["frozen", "nocast"]`; a generic class also takes types."""
        names = tuple(flags) if isinstance(flags, (tuple, list)) else (flags,)
        if not all(isinstance(name, str) for name in names):
            generic = getattr(super(), "__class_getitem__", None)
            if generic is None:
                known = ", ".join(Flags.__slots__)
                raise errors.InvalidTypeError(f"{cls.__name__}[...] takes names of flags ({known}), not {flags!r}")
            return generic(flags)
        return type(cls.__name__, (cls,), {"__module__": cls.__module__}, **dict.fromkeys(names, True))

    @classmethod
    def _setup(cls, flags: Flags) -> None:
        cls._flags, cls._converts = flags, flags.autocast
        cls._plan = declare(cls, flags, TensorClass)
        cls._field_names = frozenset(cls._plan.names)
        cls._cast = staticmethod(cast_of(flags))
        cls._settable = TensorClass._settable.union(
            *({n for n, v in vars(base).items() if hasattr(v, "__set__")} for base in _above(cls))
        )
        cls._post = hasattr(cls, "__post_init__")
        set_dataclass_attributes(cls, TensorClass)
        register(cls)
        if cls not in pytree.SUPPORTED_NODES:
            pytree._private_register_pytree_node(cls, flatten, unflatten)

    # -- making ------------------------------------------------------------------------------
    if not TYPE_CHECKING:

        def __init__(
            self,
            *args: Any,
            batch_size: SizeLike | None = None,
            device: DeviceLike | None = None,
            names: NamesLike = None,
            lock: bool = False,
            **kwargs: Any,
        ) -> None:
            plan = self._plan
            if plan.shadowed:
                batch_size, device, names = plan.shadow(kwargs, batch_size=batch_size, device=device, names=names)
            td = TensorDict(None, batch_size, device, names_argument(names))
            object.__setattr__(self, "_tensordict", td)
            td._tensorclass = type(self)
            if args:
                plan.take(args, kwargs)
            passed = []
            put = self.__setattr__ if self._own_setter and not self._flags.frozen else self._set_field
            for name in plan.order:
                if name in kwargs and name not in plan.unasked:
                    value = kwargs.pop(name)
                elif name in plan.defaults:
                    value = plan.defaults[name]
                elif name in plan.factories:
                    value = plan.factories[name]()
                else:
                    raise plan.missing(name, kwargs)
                if name in plan.passed:
                    passed.append(value)
                elif value is not None:
                    put(name, value)
            if kwargs:
                raise self._no_field(next(iter(kwargs)))
            self._settle(lock, *passed)

    def _settle(self, lock: bool, *passed: Any) -> None:
        """Finish an object that the user constructed."""
        if self._post:
            self.__post_init__(*passed)  # type: ignore[attr-defined]
        if lock or self._flags.frozen:
            self._tensordict.lock_()

    @classmethod
    def _wrap(cls, td: Any) -> Self:
        """Build an object around a container whose entries are fields, without running user code."""
        obj: Self = object.__new__(cls)
        object.__setattr__(obj, "_tensordict", td)
        td._tensorclass = cls
        if cls._flags.frozen and not td._state & LOCKED:
            td.lock_()
        return obj

    @classmethod
    def _wrap_if_fits(cls, td: Any) -> Any:
        return td if isinstance(td, Typed) or cls._extra_keys(td) else cls._wrap(td)

    @classmethod
    def _from_tensordict(cls, tensordict: Any, non_tensordict: Mapping[str, Any] | None = None) -> Self:
        """Build as `from_tensordict`, without `__post_init__`."""
        td: Any = unwrap(tensordict)
        if not isinstance(td, _CONTAINERS):
            raise errors.InvalidStateError(f"expected a TensorDict, not a {type(td).__name__}")
        names, nested = cls._field_names, type(td) is not TensorDict
        if unknown := cls._extra_keys(td):
            raise cls._foreign(unknown[0])
        for key in td._first_keys():
            if not nested and type(found := td._data[key]) is not Tensor:
                nested = isinstance(found, Container) and not isinstance(found, Typed)
        if nested:
            cls._type_nested(td)
        obj = cls._wrap(td)
        if not isinstance(non_tensordict, (Mapping, NoneType)):
            raise refuse_type("non_tensordict", "a dict", non_tensordict)
        for key, value in (non_tensordict or {}).items():
            if key not in names:
                raise cls._foreign(key)
            if value is not None:
                if td._kind(key) is not None:
                    raise errors.KeyExistsError(f"{key!r} is in the TensorDict and in non_tensordict")
                td.set_non_tensor(key, value)
        return obj

    @classmethod
    def _foreign(cls, key: str) -> ValueError:
        return ValueError(
            f"{cls.__name__} has no field {key!r}, which the TensorDict has; "
            f"its fields are {', '.join(cls._plan.names)}"
        )

    @classmethod
    def _type_nested(cls, td: Any) -> None:
        """Wrap nested containers in the classes that their fields are annotated with."""
        for key in [k for k in td._first_keys() if td._kind(k) == GROUP]:
            hint, value = cls._plan.hint(key), td._raw(key)
            if type(td) is not TensorDict or isinstance(value, Typed):
                continue
            if hint is not None and issubclass(hint, Typed) and not hint._extra_keys(value):
                hint._type_nested(value)
                td._data[key] = hint._wrap_if_fits(value)

    @classmethod
    def from_tensordict(
        cls, tensordict: Container, non_tensordict: Mapping[str, Any] | None = None, safe: bool = True
    ) -> Self:
        """Build an object around a TensorDict of any kind, which it shares: nothing is copied.

        Fields that the TensorDict lacks are None; nested TensorDicts get the classes of their fields.

        Args:
            non_tensordict: further values, by field.

        Raises:
            ValueError: an entry is no field. KeyError: a field is in both. RuntimeError: not a TensorDict.
        """
        obj = cls._from_tensordict(tensordict, non_tensordict)
        obj._settle(False)
        return obj

    @classmethod
    def _received(cls, made: Any) -> Any:
        """Wrap the result of a class method of TensorDict; opened data is not constructed anew."""
        if not isinstance(made, Container) or isinstance(made, Typed):
            return made
        opened = not isinstance(made, TensorDict) or made._binding is not None
        return cls._from_tensordict(made) if opened else cls.from_tensordict(made)

    @classmethod
    def from_schema(cls, schema: Mapping[Any, Any], **kwargs: Any) -> Self:
        """Build as `TensorDict.from_schema`, for fields of the class; those that the schema lacks are None.

        Raises:
            ValueError: the schema has a name that is no field, at any level.
        """
        check_schema(cls, schema)
        made = TensorDict.from_schema(schema, **kwargs)
        obj = cls._from_tensordict(made)
        cls._stamp(made)
        return obj

    @classmethod
    def from_pytree(cls, pytree: Any, **kwargs: Any) -> Self:
        """Build as `TensorDict.from_pytree`, from a dict of fields: the class records the form, not an entry."""
        return cls._received(unmark(cls, TensorDict.from_pytree(pytree, **kwargs)))  # type: ignore[no-any-return]

    @classmethod
    def _stamp(cls, td: Any) -> None:
        """Write the class of a new container, and of those below it, to its store."""
        stamp(td, cls)
        for key in [k for k in td._first_keys() if td._kind(k) == GROUP]:
            hint = cls._plan.hint(key)
            if hint is not None and issubclass(hint, TensorClass):
                hint._stamp(unwrap(td._raw(key)))

    @classmethod
    def fields(cls) -> tuple[dataclasses.Field[Any], ...]:
        """Return the fields, as `dataclasses.fields` does."""
        return dataclasses.fields(cls)

    # -- fields ------------------------------------------------------------------------------
    def _no_field(self, name: Any) -> AttributeError:
        return AttributeError(
            f"{type(self).__name__} has no field {name!r} to set; its fields are {', '.join(self._plan.names)}"
        )

    def _set_field(self, name: str, value: Any) -> None:
        td = self._tensordict
        if type(value) is not Tensor or self._flags.autocast:
            value = self._cast(self._plan, name, value, td._batch_size)
        td.set(name, value)

    def _put(self, name: str, value: Any) -> None:
        if value is not None:
            self._set_field(name, value)
        else:
            unset(self, name)

    def _assign(self, entries: Mapping[str, Any]) -> None:
        if unknown := [name for name in entries if name not in self._field_names]:
            raise self._no_field(unknown[0])
        self._tensordict._assign(entries)

    def __setattr__(self, name: str, value: Any) -> None:
        cls = type(self)
        if name in cls._field_names:
            if cls._flags.frozen:
                raise refuse_frozen(self, name)
            self._put(name, value)
        elif name in cls._settable:
            object.__setattr__(self, name, value)
        elif name.startswith("_") and hasattr(type(self._tensordict), name):
            setattr(self._tensordict, name, value)
        else:
            raise self._no_field(name)

    def __delattr__(self, name: str) -> None:
        if name not in self._field_names:
            raise self._no_field(name)
        if self._flags.frozen:
            raise refuse_frozen(self, name)
        unset(self, name)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if name == "_tensordict":
                raise AttributeError(f"this {type(self).__name__} was not made: its __init__ was not called")
            if name in self._field_names and self._tensordict._kind(name) is None:  # asked after its own AttributeError
                raise AttributeError(f"{name!r} of {type(self).__name__} is not set")
            found = looked_up(type(self), name)
            if isinstance(found, property):  # it raised an AttributeError: the same again, which says more
                return found.__get__(self)
            if name.startswith("__") or not hasattr(type(self._tensordict), name):
                raise AttributeError(
                    f"{type(self).__name__} has no field or attribute {name!r}; its fields are "
                    f"{', '.join(self._plan.names)}"
                )
            return late(self, name)

    def get(self, key: NestedKey, default: object = AS_SET, **kwargs: Any) -> Entry:
        """Return a field, or an entry below it, unwrapped; None for a field that is None, else `default`.

        Args:
            **kwargs: for a lazy stack, how to join what differs: see `LazyStackedTensorDict.get`.
        """
        first, *below = entry_path(key)
        if first not in self._field_names:
            return self._tensordict._default(key, default)
        if not kwargs and not below:
            return getattr(self, first) if self._flags.tensor_only else entry_of(self._tensordict, first)
        inner = entry_of(self._tensordict, first) if below else None
        if isinstance(inner, Typed):  # what it has is for it to say: its fields may be None
            found = inner.get(tuple(below), default, **kwargs)
        else:
            found = self._tensordict.get(key, default if below else None, **kwargs)
        return unwrapped(found, self._flags)

    def get_at(self, key: NestedKey, index: IndexType, default: object = AS_SET) -> Entry:
        """Call `TensorDict.get_at`, and unwrap the result."""
        found = self._tensordict.get_at(key, index, default)
        return unwrapped(found, self._flags)

    def set(
        self, key: NestedKey, item: Any, inplace: bool = False, *, non_blocking: bool = False, **kwargs: Any
    ) -> Self:
        """Set a field, or an entry below it.

        Raises:
            AttributeError: no such field; of a locked object LockedError. FrozenInstanceError.
        """
        first, *below = entry_path(key)
        if first not in self._field_names:
            locked = self._tensordict.is_locked and not self._flags.frozen
            raise self._tensordict._refuse_locked(f"set {first!r}") if locked else self._no_field(first)
        if self._flags.frozen:
            raise refuse_frozen(self, first)
        if below and (inner := entry_of(self._tensordict, first)) is not None:
            inner.set(tuple(below), item, inplace)
        elif not below and (not inplace or item is None):
            self._put(first, item)
        else:
            self._tensordict.set(key, item, inplace)
        return self

    def update(self, input_dict_or_td: Any = None, *args: Any, **kwargs: Any) -> Self:
        """Update as `TensorDict.update`; None clears a field.

        Raises:
            ValueError: a key is no field. FrozenInstanceError.
        """
        if (other := of_same_class(self, input_dict_or_td, kwargs, _OPTIONS)) is not None:
            self._tensordict.update(other, *args, **kwargs)
            return self
        source = self._by_field(input_dict_or_td, kwargs, bool(kwargs.get("inplace", args[1:2] and args[1])))
        if self._flags.frozen and source:
            raise refuse_frozen(self, str(next(iter(source))))
        cleared = [k for k, v in source.items() if v is None]
        self._tensordict.update({k: as_field(self, k, v) for k, v in source.items() if v is not None}, *args, **kwargs)
        for key in cleared:
            self.set(key, None)
        return self

    def _plan_update(self, changes: Any, source: Any, wanted: Any, how: Any) -> None:
        """Plan an update as part of the containing object's."""
        found = self._by_field(source, {})
        if self._flags.frozen and found:
            raise refuse_frozen(self, str(next(iter(found))))
        entries = {k: as_field(self, k, v) for k, v in found.items() if v is not None}
        self._tensordict._plan_update(changes, entries, wanted, how)
        for key in [k for k, v in found.items() if v is None and (wanted is None or (k,) in wanted)]:
            changes.then(functools.partial(self.set, key, None))

    def replace(self, input_dict_or_td: Container | Mapping[Any, Any] | None = None, *args: Any, **kwargs: Any) -> Self:
        """Replace as `TensorDict.replace`; None clears a field.

        Raises:
            ValueError: a key is no field.
        """
        source = self._by_field(input_dict_or_td, kwargs)
        if not source:
            return self
        td = self._tensordict._own_copy()
        for key in [k for k, v in source.items() if v is None]:
            td.pop(key, source.pop(key))
        return self._wrap(td.update({k: as_field(self, k, v) for k, v in source.items()}, *args, **kwargs))

    def _by_field(self, updates: Any, kwargs: dict[str, Any], inplace: bool = False) -> dict[Any, Any]:
        """Return the values for fields; other keywords stay in `kwargs`."""
        source = entries_by_key(self, updates, kwargs, UPDATING, inplace)
        fields = self._field_names
        if unknown := [k for k in source if k not in fields and entry_path(k)[0] not in fields]:
            raise errors.InvalidArgumentError(
                f"{type(self).__name__} has no field {unknown[0]!r}; its fields are {', '.join(self._plan.names)}"
            )
        return source

    check = check

    def from_dict_instance(self, input_dict: Mapping[Any, Any], **options: Any) -> Self:
        """Build as `TensorDict.from_dict_instance`; the fields of an autocast class get their types again."""
        td = self._tensordict.from_dict_instance(cast_back(self, input_dict), **options)
        return again(type(self), td)  # type: ignore[no-any-return]

    # -- rows --------------------------------------------------------------------------------
    def __getitem__(self, index: Any) -> Self:
        if is_key(index):
            raise errors.InvalidArgumentError(f"a {type(self).__name__} is indexed by rows, not by {index!r}")
        return again(type(self), self._tensordict[index])  # type: ignore[no-any-return]

    def __setitem__(self, index: Any, value: Any) -> None:
        check_rows(self, index, value)
        self._tensordict[index] = unwrap(value)

    def __iter__(self) -> Iterator[Self]:
        for row in iter(self._tensordict):
            yield again(type(self), row)

    # -- as others ---------------------------------------------------------------------------
    def select(self, *keys: Any, inplace: bool = False, strict: bool = True, as_tensordict: bool = False) -> Self:
        """Select as `TensorDict.select`: the other fields are None. `as_tensordict` returns a TensorDict.

        Raises:
            KeyNotFoundError: `strict`, and one is no field.
        """
        td = self._tensordict
        if len(keys) == 1 and isinstance(keys[0], (list, set)):
            keys = tuple(keys[0])
        if strict and (unknown := [k for k in keys if entry_path(k)[0] not in self._field_names]):
            raise errors.UnknownFieldError(f"{type(self).__name__} has no field {unknown[0]!r}")
        there = [k for k in keys if td._kind(entry_path(k)[0]) is not None]
        made: Self = td.select(*there, inplace=inplace, strict=strict)
        return made if as_tensordict else self if made is td else self._wrap_if_fits(made)

    def to_tensordict(self, *, retain_none: bool | None = None) -> TensorDict:
        """Return a TensorDict with copies of all entries; nested classes become TensorDicts.

        Args:
            retain_none: fields that are None become values that are None.
        """
        td: TensorDict = self._tensordict.to_tensordict(retain_none=retain_none)
        for name in self._non_tensordict if retain_none else ():
            td.set_non_tensor(name, None)
        return td

    def to_dict(
        self, *, retain_none: bool = True, convert_tensors: Any = False, tolist_first: bool = False
    ) -> dict[str, Any]:
        """Return nested plain dicts; fields that are None are there unless `retain_none=False`."""
        out: dict[str, Any] = self._tensordict.to_dict(
            retain_none=retain_none, convert_tensors=convert_tensors, tolist_first=tolist_first
        )
        if retain_none:
            out.update({name: None for name in self._plan.names if name not in out})
        return out

    def unlock_(self) -> Self:
        """Unlock as `TensorDict.unlock_`.

        Raises:
            LockedError: the class is frozen.
        """
        if self._flags.frozen:
            kind, hint = type(self).__name__, "dataclasses.replace(obj, field=value) makes another"
            raise errors.LockedError(f"a frozen {kind} stays locked", hint=hint)
        self._tensordict.unlock_()
        return self

    def map(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Map as `TensorDict.map`; `fn` gets objects of the class."""
        return again(type(self), self._tensordict.map(OnClass(fn, type(self)), *args, **kwargs))

    def map_iter(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Map as `TensorDict.map_iter`; `fn` gets objects of the class."""
        return self._tensordict.map_iter(OnClass(fn, type(self)), *args, **kwargs)

    def __repr__(self) -> str:
        try:
            return class_text(self)
        except errors.StoreClosedError as error:
            return f"{type(self).__name__}(closed: {error.url})"

    def __reduce__(self) -> tuple[Any, ...]:
        return pickling.rebuild, ("TensorClass", maker_of(type(self)), self._tensordict)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return torch_functions.dispatch(func, types, args, kwargs)

    @property
    def _tensorclass(self) -> Any:
        return type(self)

    @property
    def _non_tensordict(self) -> dict[str, None]:
        """The fields that are None."""
        return {name: None for name in self._plan.names if self._tensordict._kind(name) is None}


TensorClass.__dataclass_fields__ = dict(Arguments.__dataclass_fields__)
TensorClass.__dataclass_params__ = Arguments.__dataclass_params__  # type: ignore[attr-defined]
install(TensorClass, TensorDict)
guard(TensorClass)
TensorClass._settable = frozenset(n for n in dir(TensorClass) if hasattr(getattr(TensorClass, n, None), "__set__"))


def _above(cls: type) -> tuple[type, ...]:
    return cls.__mro__[: cls.__mro__.index(TensorClass)]


def _rebuilt(found: Any, td: Any) -> Any:
    """Rebuild a pickled object; `found` is its class, or returns it."""
    return resolve_class(found)._wrap(td._tensordict if isinstance(td, Typed) else td)


pickling.register("TensorClass", _rebuilt, safe=_rebuilt)  # `torch.load` may name declared classes; see `register`
