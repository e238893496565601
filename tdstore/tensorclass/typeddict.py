"""`TypedTensorDict`: a TensorDict with annotated fields, over a container of any kind."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NotRequired, Self, get_origin, overload

from tdstore.container.core.container import Container
from tdstore.container.core.tensorclasses import unwrap
from tdstore.errors import InvalidTypeError
from tdstore.tensorclass.base import TensorClass
from tdstore.tensorclass.fields import FieldAccess, Flags, names_argument
from tdstore.tensorclass.protocols import DeclaredFields
from tdstore.tensorclass.static import FieldsByName
from tdstore.tensorclass.surface import again, forwarded, forwarded_unwrapped
from tdstore.tensordicts.base import TensorDictBase
from tdstore.tensordicts.lazystack.stack import LazyStackedTensorDict
from tdstore.tensordicts.resident.tensordict import TensorDict
from tdstore.types import DeviceLike, NamesLike, SizeLike, is_key

_OPTIONAL = re.compile(r"(\w+\.)*NotRequired\[")


class _EntryAccess(FieldAccess):
    """Field as an attribute: the value of `td[name]`, AttributeError where it is not set."""

    __slots__ = ()

    def __get__(self, obj: Any, owner: Any = None) -> Any:
        td = None if obj is None else obj._tensordict
        if td is None or td._kind(self.name) is None:
            lacks = "a field of its objects" if td is None else "not set"
            raise AttributeError(f"{self.name!r} of {(owner or type(obj)).__name__} is {lacks}")
        return td[self.name]


class PresentFields(DeclaredFields):
    """The fields of a class; of an object, those that it has: `asdict` and `replace` leave out the others."""

    def of(self, obj: Any, owner: Any) -> dict[str, Any]:
        """Return the fields that an object has."""
        td, names = obj._tensordict, owner._field_names
        return {name: f for name, f in self._passed.items() if name not in names or td._kind(name) is not None}


class TypedTensorDict(TensorClass, TensorDictBase, metaclass=FieldsByName):
    """A TensorDict some of whose keys are declared: subclass it, and annotate the fields.

    An object is made of its fields, by name or as a dict, and of `batch_size`, `device`, `names`, `non_blocking` and
    `lock`. It is a TensorDict in all else, keys that are not declared included, and so `OtherClass(**obj)` works.
    Fields are attributes too. `from_tensordict` puts the class around any container, of which nothing is copied.
    Where it is saved, the class is kept, as a tensorclass is.

    Fields that are annotated `NotRequired[...]`, or have a default, may be left out. Flags are those of `TensorClass`
    that concern names and locks: `shadow` and `frozen`.

    Raises:
        InvalidTypeError: a required field is missing, or a keyword is no field.

    Example:
        >>> class Step(TypedTensorDict):
        ...     obs: torch.Tensor
        ...     reward: NotRequired[torch.Tensor]
        >>> class Played(Step):
        ...     action: torch.Tensor
        >>> step = Step(obs=torch.zeros(3, 4), batch_size=[3])
        >>> played = Played(**step, action=torch.ones(3), batch_size=[3])
        >>> played[0].obs.shape, played["action"].shape, "reward" in played
        (torch.Size([4]), torch.Size([3]), False)
    """

    __slots__ = ()

    __required_keys__: ClassVar[frozenset[str]] = frozenset()
    __optional_keys__: ClassVar[frozenset[str]] = frozenset()
    __expected_keys__: ClassVar[frozenset[str]] = frozenset()
    _access = _EntryAccess
    _fields_of = PresentFields
    _by_name = True
    _open = True

    @classmethod
    def _setup(cls, flags: Flags) -> None:
        super()._setup(flags)
        optional: set[str] = set().union(*(getattr(base, "__optional_keys__", ()) for base in cls.__bases__))
        marker: Any = NotRequired
        for name, hint in inspect.get_annotations(cls).items():
            may_lack = _OPTIONAL.match(hint) if isinstance(hint, str) else get_origin(hint) is marker
            (optional.add if may_lack or not cls._plan.requires(name) else optional.discard)(name)
        cls.__expected_keys__ = cls._field_names
        cls.__optional_keys__ = cls._field_names & optional
        cls.__required_keys__ = cls._field_names - optional

    if not TYPE_CHECKING:

        def __init__(
            self,
            source: Mapping[str, Any] | None = None,
            *,
            batch_size: SizeLike | None = None,
            device: DeviceLike | None = None,
            names: NamesLike = None,
            non_blocking: bool | None = None,
            lock: bool = False,
            **kwargs: Any,
        ) -> None:
            cls = type(self)
            if unknown := [name for name in kwargs if name not in cls._field_names]:
                raise InvalidTypeError(f"{cls.__name__}() has no field {', '.join(map(repr, sorted(unknown)))}")
            if source is not None and not isinstance(source, (Mapping, Container)):
                raise InvalidTypeError(
                    f"{cls.__name__}() takes a dict, or fields by name, not a {type(source).__name__}"
                )
            entries = {**({} if source is None else source), **kwargs}
            for name, value in cls._plan.defaults.items():
                if value is not None:
                    entries.setdefault(name, value)
            for name, factory in cls._plan.factories.items():
                if name not in entries:
                    entries[name] = factory()
            cls._check(entries)
            td = TensorDict(entries, batch_size, device, names_argument(names), non_blocking)
            object.__setattr__(self, "_tensordict", td)
            td._tensorclass = cls
            cls._type_nested(td)
            self._settle(lock)

    @classmethod
    def _check(cls, keys: Any) -> None:
        if lost := cls.__required_keys__ - set(keys):
            raise InvalidTypeError(f"{cls.__name__}() is missing {', '.join(map(repr, sorted(lost)))}")

    @classmethod
    def from_tensordict(cls, td: Container, *, check: bool = True) -> Self:  # type: ignore[override]
        """Build an object around a TensorDict of any kind, which it shares: nothing is copied.

        Args:
            check: whether all fields must be there; else they may be set later, in a store that starts empty.

        Raises:
            TypeError: a required field is missing.
        """
        if check:
            cls._check(unwrap(td).keys())
        obj = cls._from_tensordict(td)
        obj._settle(False)
        return obj

    @classmethod
    def from_schema(cls, schema: Mapping[Any, Any], **kwargs: Any) -> Self:
        """Build as `TensorDict.from_schema`; the schema may lack fields and have other names."""
        made = TensorDict.from_schema(schema, **kwargs)
        cls._stamp(made)
        return cls._from_tensordict(made)

    # -- keys beside the fields --------------------------------------------------------------
    def _put(self, name: str, value: Any) -> None:
        self._tensordict.set(name, value)

    def __delattr__(self, name: str) -> None:
        if name not in self._field_names:
            raise self._no_field(name)
        self._tensordict.del_(name)

    @overload
    def __getitem__(self, index: str | tuple[str, ...]) -> Any: ...
    @overload
    def __getitem__(self, index: Any) -> Self: ...
    def __getitem__(self, index: Any) -> Any:
        found = self._tensordict[index]
        return found if is_key(index) else again(type(self), found)

    def __setitem__(self, index: Any, value: Any) -> None:
        self._tensordict[index] = value if is_key(index) else unwrap(value)

    def to_tensordict(self, *, retain_none: bool | None = None) -> TensorDict:
        """Return a TensorDict with copies of all entries; nested classes become TensorDicts."""
        made: TensorDict = self._tensordict.to_tensordict(retain_none=retain_none)
        return made

    def to_lazystack(self, dim: int = 0) -> LazyStackedTensorDict:
        """Return a lazy stack of objects of this class, along a batch dimension, sharing memory."""
        made = self._tensordict.to_lazystack(dim)
        elements = [again(type(self), td) for td in made.tensordicts]
        return LazyStackedTensorDict(*elements, stack_dim=made.stack_dim) if elements else made

    @classmethod
    def lazy_stack(cls, input: Sequence[Any], dim: int = 0, *, out: Any = None, **kwargs: Any) -> LazyStackedTensorDict:
        """Return a lazy stack of objects, along a new batch dimension, as `TensorDict.lazy_stack` of TensorDicts."""
        return TensorDict.lazy_stack(input, dim, out=out, **kwargs)

    @classmethod
    def _received(cls, made: Any) -> Any:
        """Wrap the result of a class method of TensorDict, in which fields may lack: they are set later."""
        return cls._from_tensordict(made) if isinstance(made, TensorDict) else super()._received(made)

    @property
    def _non_tensordict(self) -> dict[str, None]:
        """Nothing: a field that is not set is no None."""
        return {}

    def __repr__(self) -> str:
        text = repr(self._tensordict)
        return type(self).__name__ + text[text.index("(") :]


MutableMapping.register(TypedTensorDict)
# Where a tensorclass has a way of its own, since its fields are all there is to it, this is a TensorDict.
for _name in ("get", "set", "update", "replace", "select", "to_dict", "_assign"):
    setattr(TypedTensorDict, _name, forwarded(_name, inspect.getattr_static(TensorDict, _name), TensorDict))
# The results of comparisons and reductions no longer hold values of the fields.
_COMPARISONS = "__eq__ __ne__ __lt__ __le__ __gt__ __ge__ __or__ __xor__".split()
_REDUCTIONS = "all any sum mean prod nansum nanmean std var max min amax amin cummax cummin quantile".split()
for _name in _COMPARISONS + _REDUCTIONS:
    setattr(TypedTensorDict, _name, forwarded_unwrapped(_name, inspect.getattr_static(TensorDict, _name)))
