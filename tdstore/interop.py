"""To and from the containers of the `tensordict` package, without copying tensors; storages for torchrl."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
from torch import Tensor

from tdstore.container.core.container import Container
from tdstore.container.core.preallocation import is_blank
from tdstore.container.core.tensorclasses import Typed, full_name, lookup, register
from tdstore.container.entries.unbatched import UnbatchedTensor, is_batched
from tdstore.container.values.nontensor import MetaData, NonTensor, NonTensorData, NonTensorStack
from tdstore.errors import InvalidArgumentError, InvalidTypeError, MissingDependencyError, OptionError
from tdstore.tensorclass.making import tensorclass
from tdstore.tensordicts.base import TensorDictBase
from tdstore.tensordicts.lazystack.stack import LazyStackedTensorDict
from tdstore.tensordicts.params import TensorDictParams
from tdstore.tensordicts.resident.tensordict import TensorDict
from tdstore.tensordicts.tensordict_pickles import load_pickle as load_pickle


def _tensordict() -> Any:
    try:
        import tensordict
    except ImportError as error:
        raise MissingDependencyError(
            "this needs the package 'tensordict', which is not installed", hint="pip install tensordict"
        ) from error
    return tensordict


def to_tensordict(td: TensorDictBase) -> Any:
    """Convert to a container of the `tensordict` package, around the same tensors.

    Lazy stacks, `TensorDictParams`, values that are no tensors, names and locks are kept; tensors over files are
    still over the files. What is stored elsewhere (HDF5, zarr, a bucket) is read into memory in one batch: index
    it first to read rows only. A tensorclass comes as the one of theirs that `register_tensorclass` paired it with;
    without a pair, as a class of theirs that is made with the same name and fields, and no methods.

    Raises:
        MissingDependencyError: `tensordict` is not installed. InvalidTypeError: not one of our containers.

    Example:
        >>> ours = TensorDict({"a": torch.zeros(3)}, [3])
        >>> theirs = to_tensordict(ours)
        >>> theirs["a"] is ours["a"], type(theirs).__module__.split(".")[0]
        (True, 'tensordict')
    """
    package = _tensordict()
    if isinstance(td, NonTensor):
        return _value_to(package, td)
    if not isinstance(td, Container):
        raise InvalidTypeError(f"to_tensordict takes a container of tdstore, not a {type(td).__name__}")
    if isinstance(td, Typed):
        return _theirs_of(package, type(td)).from_tensordict(to_tensordict(td._tensordict))
    if isinstance(td, LazyStackedTensorDict):
        made = package.LazyStackedTensorDict(
            *map(to_tensordict, td.tensordicts), stack_dim=td.stack_dim, stack_dim_name=td.names[td.stack_dim]
        )
        return made.lock_() if td.is_locked else made
    source = td._resident()
    entries = {k: v if is_batched(v) else to_tensordict(v) for k, v in source.items()}
    names = source.names if any(source.names) else None
    made = package.TensorDict(entries, batch_size=source.batch_size, device=source.device, names=names)
    if isinstance(td, TensorDictParams):
        made = package.TensorDictParams(made, no_convert=True)
    return made.lock_() if td.is_locked else made


def _value_to(package: Any, value: NonTensor) -> Any:
    if isinstance(value, UnbatchedTensor):
        return package.UnbatchedTensor(value.wrapped)
    if isinstance(value, NonTensorData):
        cls = package.MetaData if isinstance(value, MetaData) else package.NonTensorData
        return cls(value.data, batch_size=value.batch_size)
    if not value.numel():  # no TensorDict of theirs can be made with a stack that has no elements
        return package.NonTensorData(None, batch_size=value.batch_size)
    rows = [_value_to(package, value[i]) for i in range(len(value))]
    return package.NonTensorStack(*rows, stack_dim=0)


def from_tensordict(td: Any) -> Any:
    """Convert a container of the `tensordict` package to one of ours, around the same tensors.

    Lazy stacks, `TensorDictParams`, values that are no tensors, names and locks are kept. Memory-mapped tensors
    still share their files, as plain tensors. A `PersistentTensorDict` or a store of theirs is read into memory:
    `tdstore.open` opens its file as it is. A tensorclass comes as the one of ours that it was made from, that
    `register_tensorclass` paired it with, or that has its name and fields; else as a class that is made so.

    Raises:
        MissingDependencyError: `tensordict` is not installed. InvalidTypeError: not one of its containers.

    Example:
        >>> import tensordict
        >>> theirs = tensordict.TensorDict({"a": torch.zeros(3), "s": "text"}, [3])
        >>> ours = from_tensordict(theirs)
        >>> ours["a"] is theirs["a"], ours["s"]
        (True, 'text')
    """
    package = _tensordict()
    if isinstance(td, Tensor) and not isinstance(td, package.UnbatchedTensor):
        # Their mapped tensors are a class of their own, whose operations ours need not go through.
        return td.as_subclass(Tensor) if isinstance(td, package.MemoryMappedTensor) else td
    if package.is_non_tensor(td) or isinstance(td, package.UnbatchedTensor):
        return _value_from(package, td)
    if not package.is_tensor_collection(td):
        raise InvalidTypeError(f"from_tensordict takes a container of tensordict, not a {type(td).__name__}")
    if isinstance(td, package.LazyStackedTensorDict):
        name = td.names[td.stack_dim]
        made: Any = LazyStackedTensorDict(
            *map(from_tensordict, td.tensordicts), stack_dim=td.stack_dim, stack_dim_name=name
        )
        return made.lock_() if td.is_locked else made
    if package.is_tensorclass(td):
        return _ours_of(type(td))._from_tensordict(from_tensordict(td._tensordict), td._non_tensordict)
    if not isinstance(td, (package.TensorDict, package.TensorDictParams)):
        td = td.to_tensordict()
    entries = {key: from_tensordict(value) for key, value in td.items()}
    names = td.names if any(td.names) else None
    made = TensorDict(entries, batch_size=td.batch_size, device=td.device, names=names)
    if isinstance(td, package.TensorDictParams):
        made = TensorDictParams(made, no_convert=True)
    return made.lock_() if td.is_locked else made


def _value_from(package: Any, value: Any) -> NonTensor:
    if isinstance(value, package.UnbatchedTensor):
        found = torch.empty(0, dtype=value.dtype, device=value.device)
        place = value.untyped_storage(), value.storage_offset(), value.shape, value.stride()
        return UnbatchedTensor(found.set_(*place))
    if isinstance(value, package.NonTensorStack):
        return NonTensorStack.from_list(_plain_lists(value.tolist()), len(value.batch_size))
    cls = MetaData if isinstance(value, package.MetaData) else NonTensorData
    return cls(value.data, value.batch_size)


def _plain_lists(values: Any) -> Any:
    return [_plain_lists(v) for v in values] if isinstance(values, list) else values


# -- tensorclasses -----------------------------------------------------------------------------
_twins: dict[Any, Any] = {}
"""By a tensorclass, the one of the other package that stands for it."""


def register_tensorclass(ours: type, theirs: type) -> None:
    """Let a tensorclass of ours and one of the `tensordict` package stand for each other, with their methods.

    Raises:
        MissingDependencyError: `tensordict` is not installed. InvalidTypeError: not two such classes.
        InvalidArgumentError: their fields differ.

    Example:
        >>> import tensordict
        >>> class Step(TensorClass):
        ...     obs: torch.Tensor
        >>> class TheirStep(tensordict.TensorClass):
        ...     obs: torch.Tensor
        ...     def mean(self):
        ...         return self.obs.mean()
        >>> register_tensorclass(Step, TheirStep)
        >>> to_tensordict(Step(obs=torch.ones(2), batch_size=[2])).mean()
        tensor(1.)
    """
    package = _tensordict()
    if not (isinstance(ours, type) and issubclass(ours, Typed)):
        raise InvalidTypeError(f"{ours!r} is not a tensorclass of tdstore")
    if not (isinstance(theirs, type) and package.is_tensorclass(theirs)):
        raise InvalidTypeError(f"{theirs!r} is not a tensorclass of tensordict")
    if mismatched := ours._field_names ^ _fields_of(theirs):
        raise InvalidArgumentError(
            f"{ours.__name__} and {theirs.__name__} differ in the fields {', '.join(sorted(mismatched))}"
        )
    _twins[ours], _twins[theirs] = theirs, ours


def _fields_of(cls: Any) -> set[str]:
    return {field.name for field in dataclasses.fields(cls)}


def _theirs_of(package: Any, ours: Any) -> Any:
    if ours not in _twins:
        body = _body_of(ours, by_name=False)
        body["__reduce__"] = lambda self: (to_tensordict, (from_tensordict(self),))  # no module has the class
        flags = {"nocast": ours._flags.nocast, "frozen": ours._flags.frozen, "shadow": True}
        made = package.tensorclass(**flags)(type(ours.__name__, (), body))
        _twins[ours], _twins[made] = made, ours
    return _twins[ours]


def _ours_of(theirs: Any) -> Any:
    if theirs not in _twins:
        made = known = lookup(full_name(theirs))
        if known is None or known._field_names != _fields_of(theirs):
            flags = {"nocast": theirs._nocast, "frozen": theirs._frozen, "shadow": True}
            made = tensorclass(**flags)(type(theirs.__name__, (), _body_of(theirs)))
            made._made_by = functools.partial(_ours_of, theirs)  # type: ignore[attr-defined]
            if known is not None:
                register(known)  # what the user declared goes on being what data is loaded as
        _twins[theirs] = made
        _twins.setdefault(made, theirs)
    return _twins[theirs]


def _body_of(cls: Any, *, by_name: bool = True) -> dict[str, Any]:
    """Return a class body with the fields of a tensorclass, and nothing else.

    `by_name=False` is for their constructors, which take all fields by position and warn of fields taken by name only.
    """
    body: dict[str, Any] = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    fields = list(dataclasses.fields(cls))
    if not by_name:  # what has a default follows what has none
        fields.sort(key=lambda field: not field.default is field.default_factory is dataclasses.MISSING)
    body["__annotations__"] = {field.name: field.type for field in fields}
    for field in fields:
        # What the constructor does not take is not set by a __post_init__ here: it is taken by name.
        kw_only = by_name and (field.kw_only or not field.init)
        body[field.name] = dataclasses.field(
            default=field.default, default_factory=field.default_factory, kw_only=kw_only
        )
    return body


# -- torchrl -----------------------------------------------------------------------------------
def torchrl_storage(td: TensorDictBase, *, length: int | None = None) -> Any:
    """Build a storage for torchrl's replay buffers over a TensorDict, wherever that is: rows are read as they are
    sampled.

    What the buffer is extended with is written in place, where the TensorDict takes writes. Its length is the number
    of rows that hold data, and grows up to the batch size as rows after these are written. Only such rows are sampled.

    Args:
        td: the rows, and room for more.
        length: how many rows, from the first on, hold data. By default 0 for a TensorDict that `from_schema` allocated
            in this process and that was not written since, and all rows for any other.

    Raises:
        OptionError: `td` was allocated by `from_schema` and written since, and `length` does not say how far; or
            `length` is not between 0 and the number of rows.
        MissingDependencyError: `torchrl` is not installed.

    Example:
        >>> td = tdstore.open("replay.h5")  # doctest: +SKIP
        >>> buffer = torchrl.data.TensorDictReplayBuffer(storage=torchrl_storage(td), batch_size=32)  # doctest: +SKIP
        >>> batch = buffer.sample()  # doctest: +SKIP
    """
    if length is None:
        blank = is_blank(td)
        if blank is False:
            raise OptionError(
                "some rows of this TensorDict were written since from_schema allocated it, and how many is not known",
                hint=f"pass length=, the number of rows that hold data: {len(td)} if all do",
            )
        length = 0 if blank else len(td)
    if isinstance(length, bool) or not isinstance(length, int) or not 0 <= length <= len(td):
        raise OptionError(f"length is a number of rows from 0 to {len(td)}, not {length!r}")
    return _storage_class()(td, length)


@functools.cache
def _storage_class() -> Any:
    """Return the class, which cannot be made before torchrl is imported."""
    try:
        from torchrl.data import LazyTensorStorage, TensorStorage  # type: ignore[import-untyped,import-not-found,unused-ignore]
    except ImportError as error:
        raise MissingDependencyError(
            "this needs the package 'torchrl', which is not installed", hint="pip install torchrl"
        ) from error

    class StoredRows(TensorStorage):  # type: ignore[misc,unused-ignore]
        """Rows of a TensorDict, wherever it is."""

        def __init__(self, td: Any, length: int) -> None:
            # One row, expanded, is what the buffer sees of shapes and keys; batches come through `get`.
            super().__init__(to_tensordict(td[:1]._resident().expand(td.batch_size)))
            self.td = td
            self._filled = length

        def get(self, index: Any) -> Any:
            """Read rows, as a TensorDict of torchrl's."""
            rows = self.td[index]
            return to_tensordict(rows._resident() if isinstance(rows, Container) else rows)

        def set(self, cursor: Any, data: Any, *, set_cursor: bool = True) -> None:
            """Write rows in place."""
            rows = from_tensordict(data)
            if isinstance(rows, Container) and "index" not in set(self.td.keys()):
                rows = rows.exclude("index")  # where the buffer puts the rows: its samples get it anew
            self.td[cursor] = rows
            self._filled = max(self._filled, _rows_up_to(cursor, len(self.td)))

        def __len__(self) -> int:
            return self._filled

        def state_dict(self) -> dict[str, Any]:
            """Return the rows, as a state dict."""
            return {"_storage": self.td.state_dict(), "_len": self._filled}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            """Write rows back."""
            self.td.load_state_dict(state_dict["_storage"])
            self._filled = state_dict.get("_len", len(self.td))

        def dumps(self, path: Any) -> None:
            """Write the rows as a folder that any storage of torchrl's loads. All of them are read into memory."""
            whole = LazyTensorStorage(self._filled)
            whole.set(slice(0, self._filled), self.get(slice(0, self._filled)))
            whole.dumps(path)

        def loads(self, path: Any) -> None:
            """Write back the rows of such a folder."""
            rows = TensorDict.load(path)
            self.td[: len(rows)] = rows
            self._filled = len(rows)

        dump, save, load = dumps, dumps, loads

        def _empty(self) -> None:
            self._filled = 0

    return StoredRows


def _rows_up_to(cursor: Any, rows: int) -> int:
    """Return how many rows there are up to the last one that an index of rows names."""
    if isinstance(cursor, slice):
        cursor = range(*cursor.indices(rows))
    found = torch.as_tensor([*cursor[:1], *cursor[-1:]] if isinstance(cursor, range) else cursor)
    if found.dtype is torch.bool:
        found = found.nonzero()
    return int((found + rows * (found < 0)).max()) + 1 if found.numel() else 0
