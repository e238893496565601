"""Pickles and `torch.save` files that the `tensordict` package wrote, without that package and without running code."""

from __future__ import annotations

import io
import json
import os
import pickle
from collections.abc import Callable, Iterable, Mapping
from pathlib import PurePosixPath
from types import ModuleType
from typing import TYPE_CHECKING, Any, BinaryIO

import torch
from torch import Tensor

from tdstore.builtin.memmap.tensor import MemoryMappedTensor
from tdstore.container.core.tensorclasses import full_name, lookup
from tdstore.container.entries.unbatched import UnbatchedTensor
from tdstore.container.persistence.consolidate import over_buffer
from tdstore.container.values.nontensor import MetaData, NonTensor, NonTensorData, NonTensorStack
from tdstore.errors import CorruptStoreError, StoreError, UntrustedDataError
from tdstore.index.shapes import as_size
from tdstore.io.consolidated import layout
from tdstore.tensordicts.lazystack.stack import LazyStackedTensorDict
from tdstore.tensordicts.params import TensorDictParams
from tdstore.tensordicts.resident.tensordict import TensorDict

if TYPE_CHECKING:
    from tdstore.tensordicts.base import TensorDictBase

_ZIP = b"PK\x03\x04"
_LEGACY = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
"""How files of `torch.save` begin: the zip archive, and the format before it (its magic number, pickled)."""


def load_pickle(
    source: str | os.PathLike[str] | BinaryIO,
    *,
    classes: Iterable[type] = (),
    map_location: str | torch.device | None = None,
) -> Any:
    """Load what `pickle.dump` or `torch.save` wrote of containers of the `tensordict` package, as ours.

    Releases 0.10 to 0.15 are supported. That package need not be installed. Nothing of the file is imported or
    called: the names in it stand for a fixed set of containers, tensors and plain Python values. A memory-mapped
    tensor is mapped again, for reading.

    Args:
        source: path, or a binary file opened for reading.
        classes: tensorclasses of tdstore that objects in the file may become, found by their names. Those that were
            declared in this process under the module and name that the file has need not be given.
        map_location: device for the tensors. Default: the one that they were saved from.

    Returns:
        The container, or the dict, list or tuple of containers that was saved.

    Raises:
        UntrustedDataError: the file needs a class or a function that is none of these.
        CorruptStoreError: it is no pickle, or a damaged one.

    Example:
        >>> import pickle, tensordict
        >>> with open("old.pkl", "wb") as file:
        ...     pickle.dump(tensordict.TensorDict(a=torch.zeros(3), batch_size=[3]), file)
        >>> load_pickle("old.pkl")["a"]
        tensor([0., 0., 0.])
    """
    if isinstance(source, (str, os.PathLike)):
        with open(source, "rb") as file:
            return load_pickle(file, classes=classes, map_location=map_location)
    name = str(getattr(source, "name", "the file"))
    known = {full_name(cls): cls for cls in classes}
    try:
        found = _read(source, known, map_location)
        return _Builder(known, map_location, name).build(found)
    except (StoreError, OSError):
        raise
    except MemoryError as error:
        raise CorruptStoreError(f"{name} asks for more memory than there is: it is damaged, or too large") from error
    except RecursionError as error:
        raise CorruptStoreError(f"{name}: its values are nested too deeply, or contain themselves") from error
    except Exception as error:  # whatever a damaged pickle makes pickle, torch and the containers raise
        raise CorruptStoreError(f"{name} is not a readable pickle of containers: {error!r:.300}") from error


def _read(source: BinaryIO, known: dict[str, type], map_location: Any) -> Any:
    class Unpickler(_Unpickler):  # torch makes a class of it, and calls that with a file alone
        tensorclasses = known

    start = source.tell()
    head = source.read(len(_LEGACY))
    source.seek(start)
    if not head.startswith((_ZIP, _LEGACY)):
        return Unpickler(source).load()
    module = ModuleType(__name__)
    module.Unpickler = Unpickler  # type: ignore[attr-defined]
    module.load = lambda file, **options: Unpickler(file, **options).load()  # type: ignore[attr-defined]
    return torch.load(source, map_location=map_location, pickle_module=module, weights_only=False)


# -- reading: names become records, and only records -------------------------------------------
class _Sealed(type):
    def __setattr__(cls, name: str, value: object) -> None:
        raise UntrustedDataError(f"the pickle sets {name[:100]!r} of a class")


class _Record(metaclass=_Sealed):
    """What a name of the pickle was called with, and the state that it was given."""

    __slots__ = ("args", "state")
    name = ""
    args: tuple[Any, ...]
    state: Any

    def __new__(cls, *args: Any) -> _Record:
        made = object.__new__(cls)
        made.args, made.state = args, None
        return made

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Call:
    """A function of the pickle that is called while it is read: it makes what can be filled."""

    __slots__ = ("_function",)

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *args: Any) -> Any:
        return self._function(*args)

    def __setstate__(self, state: Any) -> None:
        raise UntrustedDataError("the pickle changes a function")


def _attribute(owner: Any, name: Any) -> Any:
    if isinstance(owner, type) and issubclass(owner, _Record) and f"{owner.name}.{name}" in _BUILDERS:
        return _record(f"{owner.name}.{name}")
    raise UntrustedDataError(f"the pickle asks for the attribute {str(name)[:100]!r} of something")


def _record(name: str) -> type[_Record]:
    made: type[_Record] = _Sealed(name, (_Record,), {"__slots__": (), "name": name})  # type: ignore[assignment]
    return made


def _filled(kind: Callable[..., Any]) -> _Call:
    """Build a collection of what the file holds: never of a range or a number, which may be of any size."""

    def make(items: Any = (), *_: Any) -> Any:
        if not isinstance(items, (list, tuple, dict, bytes)):
            raise UntrustedDataError(f"the pickle makes a collection of a {type(items).__name__}")
        return kind(items)

    return _Call(make)


_CALLS = {
    "collections.OrderedDict": _filled(dict),
    "collections.deque": _filled(list),
    "builtins.set": _filled(set),
    "builtins.frozenset": _filled(frozenset),
    "builtins.bytearray": _filled(bytearray),
    "builtins.complex": _Call(complex),
    "builtins.slice": _Call(slice),
    "builtins.range": _Call(range),
    "builtins.getattr": _Call(_attribute),
}


class _Unpickler(pickle.Unpickler):
    tensorclasses: Mapping[str, type]

    def find_class(self, module: str, name: str) -> Any:
        module = {"__builtin__": "builtins"}.get(module, module)
        full = f"{module}.{name}"
        if full in _CALLS:
            return _CALLS[full]
        if module == "torch" and isinstance(found := getattr(torch, name, None), (torch.dtype, torch.layout)):
            return found
        if full in _BUILDERS or _tensorclass(full, self.tensorclasses) is not None:
            return _record(full)
        raise UntrustedDataError(
            f"the pickle needs {full[:200]}, which is no container, tensor or plain value",
            hint="give a tensorclass of tdstore that has this name by classes=[...]; convert other objects with the "
            "package that wrote them",
        )


def _tensorclass(name: str, known: Mapping[str, type]) -> Any:
    """Return our class for a name: one that the caller gave, also by its own name, or one declared before."""
    if name in known:
        return known[name]
    same = [cls for cls in known.values() if name.endswith(f".{cls.__qualname__}")]
    return same[0] if len(same) == 1 else lookup(name)


# -- building: records become containers -------------------------------------------------------
class _Builder:
    """Makes containers of records; what occurs twice in the file is made once."""

    def __init__(self, known: dict[str, type], map_location: Any, place: str) -> None:
        self._known = known
        self._made: dict[int, Any] = {}
        self.map_location = map_location
        self.place = place

    def build(self, found: Any) -> Any:
        if not isinstance(found, (_Record, dict, list, tuple, set, frozenset)):
            if isinstance(found, (_Call, type)):
                raise CorruptStoreError(f"{self.place}: a function or a class stands where a value should")
            return found
        if id(found) not in self._made:
            self._made[id(found)] = self._build(found)
        return self._made[id(found)]

    def _build(self, found: Any) -> Any:
        if isinstance(found, dict):
            return {self.build(key): self.build(value) for key, value in found.items()}
        if not isinstance(found, _Record):
            return type(found)([self.build(value) for value in found])
        if (make := _BUILDERS.get(found.name)) is not None:
            return make(self, found)
        return self._typed(found)

    def _typed(self, found: _Record) -> Any:
        cls = _tensorclass(found.name, self._known)
        parts = {key: self.build(found.state[key]) for key in ("tensordict", "non_tensordict")}
        return cls._from_tensordict(parts["tensordict"], parts["non_tensordict"])

    def container(self, found: _Record) -> TensorDictBase:
        cls, state = found.args
        kind = getattr(cls, "name", "")
        if kind == "tensordict._lazy.LazyStackedTensorDict":
            return self.lazy(state)
        if kind != "tensordict._td.TensorDict":
            raise UntrustedDataError(f"{self.place}: a pickle of {kind or cls!r} cannot be read without its package")
        entries = self.build(state["_tensordict"])
        device = self.build(state.get("_device")) if self.map_location is None else None
        names = state.get("_td_dim_names")
        made = TensorDict(entries, batch_size=as_size(self.build(state["_batch_size"])), device=device, names=names)
        return made.lock_() if state.get("_is_locked") else made

    def lazy(self, state: dict[str, Any]) -> LazyStackedTensorDict:
        elements = self.build(state["tensordicts"])
        made = LazyStackedTensorDict(*elements, stack_dim=state["stack_dim"])
        if (name := state.get("_td_dim_name")) is not None:
            made.names = [name if dim == made.stack_dim else other for dim, other in enumerate(made.names)]
        return made.lock_() if state.get("_is_locked") else made

    def parameters(self, found: _Record) -> TensorDictParams:
        made = TensorDictParams(self.build(found.state["_param_td"]), no_convert=True)
        made.no_convert = bool(found.state.get("no_convert", True))
        made.training = bool(found.state.get("training", True))
        return made

    def consolidated(self, found: _Record) -> TensorDictBase:
        """Rebuild what was pickled as one buffer, with what a consolidated file records of itself."""
        description, buffer = (self.build(arg) for arg in found.args[:2])
        contents = layout.decode(json.dumps(description).encode(), buffer.numel(), self.place)
        return over_buffer(self.place, contents, buffer)

    def value(self, found: _Record) -> NonTensor:
        data = self.build(found.state["non_tensordict"]["data"])
        batch = self.build(found.state["tensordict"]).batch_size
        return MetaData(data, batch) if found.name.endswith(".MetaData") else NonTensorData(data, batch)

    def stack(self, found: _Record) -> NonTensor:
        rows = self.build(found.state["tensordicts"])
        return NonTensorStack(*rows, stack_dim=found.state["stack_dim"])

    def unbatched(self, found: _Record) -> UnbatchedTensor:
        if found.args:
            return UnbatchedTensor(self.build(found.args[0]))
        return UnbatchedTensor(self.build(found.state["tensordict"])["data"])

    # Tensors: as torch rebuilds them, without hooks and without the attributes that its compiler left on them.
    def storage(self, found: _Record) -> torch.TypedStorage | torch.UntypedStorage:
        made: torch.TypedStorage | torch.UntypedStorage = torch.load(
            io.BytesIO(found.args[0]), map_location=self.map_location, weights_only=True
        )
        return made

    def tensor(self, found: _Record) -> Tensor:
        storage, offset, size, stride, requires_grad = (self.build(arg) for arg in found.args[:5])
        made: Tensor = torch._utils._rebuild_tensor_v2(storage, offset, size, stride, requires_grad, {})
        return made

    def parameter(self, found: _Record) -> Tensor:
        kind = torch.nn.Buffer if found.name.endswith("Buffer") else torch.nn.Parameter
        return kind(self.build(found.args[0]), bool(found.args[1]))

    def subclass(self, found: _Record) -> Tensor:
        function, _kind, args, _state = found.args
        made: Tensor = self.build(function(*args))
        return made

    def nested(self, found: _Record) -> Tensor:
        parts = found.args[0]
        values, offsets, lengths = (self.build(parts[key]) for key in ("values", "offsets", "lengths"))
        return torch.nested.nested_tensor_from_jagged(values, offsets, lengths, jagged_dim=int(parts["_ragged_idx"]))

    def mapped(self, found: _Record) -> Tensor:
        filename, dtype, shape, index = (self.build(arg) for arg in found.args)
        made = MemoryMappedTensor.from_filename(str(filename), dtype, shape)
        return made if index is None else made[index]


def _size(builder: _Builder, found: _Record) -> torch.Size:
    return as_size(builder.build(found.args[0]))


_BUILDERS: dict[str, Callable[[_Builder, _Record], Any]] = {
    "tensordict._reductions._make_td": _Builder.container,
    "tensordict._reductions._rebuild_tensordict_files_consolidated": _Builder.consolidated,
    "tensordict._td.TensorDict": _Builder.container,
    "tensordict._lazy.LazyStackedTensorDict": _Builder.container,
    "tensordict.nn.params.TensorDictParams": _Builder.parameters,
    "tensordict.tensorclass.NonTensorData": _Builder.value,
    "tensordict.tensorclass.MetaData": _Builder.value,
    "tensordict.tensorclass.NonTensorStack": _Builder.stack,
    "tensordict._unbatched.UnbatchedTensor": _Builder.unbatched,
    "tensordict.utils._LockedSchema": lambda builder, found: None,
    "tensordict.memmap.MemoryMappedTensor": _Builder.mapped,
    "tensordict.memmap.MemoryMappedTensor.from_filename": _Builder.mapped,
    "torch.storage._load_from_bytes": _Builder.storage,
    "torch._utils._rebuild_tensor_v2": _Builder.tensor,
    "torch._utils._rebuild_tensor_v3": _Builder.tensor,
    "torch._utils._rebuild_parameter": _Builder.parameter,
    "torch._tensor._rebuild_from_type_v2": _Builder.subclass,
    "torch.nested._internal.nested_tensor._rebuild_njt": _Builder.nested,
    "torch.nested._internal.nested_tensor.NestedTensor": lambda builder, found: None,
    "torch._dynamo.decorators._DimRange": lambda builder, found: None,
    "torch.Tensor": lambda builder, found: None,
    "torch.Size": _size,
    "torch.device": lambda builder, found: torch.device(*found.args),
    "pathlib.PosixPath": lambda builder, found: str(PurePosixPath(*found.args)),
}
"""By the names in pickles, what is made of them. Names that make None are only mentioned in what is read."""
