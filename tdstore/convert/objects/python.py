"""From and to Python's own containers: dicts, lists, tuples, named tuples, dataclasses, and any nesting of them."""

from __future__ import annotations

import dataclasses
from collections import namedtuple
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tdstore.arguments import as_list, check_batch_dims, check_callable, refuse_type
from tdstore.container.core.container import Container
from tdstore.container.core.tensorclasses import unwrap
from tdstore.container.functions.construct_and_join import from_container, lazy_stack, maybe_dense_stack, stack
from tdstore.container.functions.construct_and_join import from_dict as made_from_dict
from tdstore.container.values.nontensor import NonTensor
from tdstore.convert.objects.arrays import from_struct_array
from tdstore.convert.objects.foreign import from_foreign
from tdstore.errors import InvalidStateError, InvalidTypeError, OptionError, UnsupportedError
from tdstore.index.shapes import as_size
from tdstore.types import DeviceLike, NamesLike, SizeLike

if TYPE_CHECKING:
    from tdstore.tensordicts.base import TensorDictBase
    from tdstore.tensordicts.resident.tensordict import TensorDict

as_tensorclass_of: Callable[..., Any] | None = None
"""Makes a tensorclass from a dataclass instance, with the arguments of `from_dataclass`: set by `tdstore.tensorclass`,
which imports this module."""


def from_any(
    obj: Any,
    *,
    auto_batch_size: bool = False,
    batch_dims: int | None = None,
    device: DeviceLike | None = None,
    batch_size: SizeLike | None = None,
    strict: bool = False,
) -> Any:
    """Convert nearly any object to a TensorDict.

    A TensorDict is returned unchanged. Dicts, dataclasses and named tuples are converted by field, tuples by position
    ("0", "1", ...). A list of any of these becomes a lazy stack. Structured arrays, tables (of pandas, polars, Arrow,
    duckdb, Hugging Face datasets) and datasets of xarray are converted by column. Groups that zarr, or h5py for
    reading, has opened become TensorDicts over the same file.

    The entries are converted as well: numbers, arrays and lists of numbers to tensors, lists of strings to one value
    per row, other objects to values. At the top level, a list of numbers becomes a tensor, and arrays, numbers, strings
    and other objects are returned unchanged.

    Args:
        obj: the object.
        auto_batch_size: whether each level gets the largest batch size that its entries share.
        batch_dims: with `auto_batch_size`, the largest number of batch dimensions.
        device: the device of the tensors; default: that of the input.
        batch_size: the batch size; default: that of a stack or an array, else `[]`.
        strict: whether to raise an error if the result is not a TensorDict.

    Raises:
        InvalidArgumentError: both `batch_size` and `auto_batch_size`. InvalidTypeError: `strict`, and the result is
            not a TensorDict; or the object is a query or a stream of another library, which has no rows yet.

    Example:
        >>> from_any({"a": [1, 2], "n": ({"b": [3.0, 4.0]},)}, auto_batch_size=True)["n", "0"].batch_size
        torch.Size([2])
    """
    if batch_size is not None and auto_batch_size:
        raise OptionError("give batch_size or auto_batch_size=True, not both")
    if isinstance(obj, Container):
        return obj
    found = _converted(obj, as_size(batch_size))
    if type(found) is dict:
        return made_from_dict(Container._resident_class, found, batch_size, auto_batch_size, batch_dims, device, None)
    if isinstance(found, Container):
        if batch_size is not None and found.batch_size != as_size(batch_size):
            found.batch_size = as_size(batch_size)
        if auto_batch_size:
            found.auto_batch_size_(batch_dims)
        return found if device is None else found.to(device)  # type: ignore[attr-defined]
    if strict:
        raise InvalidTypeError(f"a {type(obj).__name__} cannot become a TensorDict")
    return Container._resident_class({"it": found}).get("it") if isinstance(found, list) else found


def _converted(obj: Any, batch: Sequence[int]) -> Any:
    """Convert an object for the constructor of a TensorDict: to dicts and containers if `obj` has entries."""
    obj = from_foreign(obj)
    if isinstance(obj, Container):
        return obj
    fields = _fields(obj)
    if fields is not None:
        return {key: _converted(value, batch) for key, value in fields.items()}
    if isinstance(obj, list):
        if _is_records(obj):
            below = batch[1:]
            return lazy_stack([_as_container(value, below) for value in obj])
        return obj
    if isinstance(obj, (np.ndarray, np.void)) and obj.dtype.names is not None:
        return from_struct_array(np.asarray(obj))
    return obj


def _fields(obj: Any) -> Mapping[Any, Any] | None:
    """Return the entries of a record, by key; None if the object is not a record."""
    if isinstance(obj, Mapping) and not isinstance(obj, Container):
        return obj
    if isinstance(obj, tuple):
        names = getattr(obj, "_fields", None)
        return dict(zip(names or map(str, range(len(obj))), obj, strict=True)) if type(obj).__name__ != "Size" else None
    if dataclasses.is_dataclass(obj) and not isinstance(obj, (type, Container, NonTensor)):
        return {field.name: getattr(obj, field.name) for field in dataclasses.fields(obj)}
    return None


def _is_records(values: list[Any]) -> bool:
    """Check whether all elements are dicts, dataclasses, named tuples or TensorDicts, or lists of them."""
    return bool(values) and all(
        (isinstance(v, list) and _is_records(v))
        or (isinstance(v, Container) and not isinstance(v, NonTensor))
        or hasattr(v, "_fields")
        or (not isinstance(v, tuple) and _fields(v) is not None)
        for v in values
    )


def _as_container(obj: Any, batch: Sequence[int]) -> Any:
    found = _converted(obj, batch)
    return found if isinstance(found, Container) else Container._resident_class(found, batch_size=batch)


def from_dict(
    input_dict: Mapping[Any, Any],
    *,
    auto_batch_size: bool | None = None,
    batch_dims: int | None = None,
    device: DeviceLike | None = None,
    batch_size: SizeLike | None = None,
    names: NamesLike = None,
) -> TensorDictBase:
    """Make a TensorDict from nested dicts: `TensorDict.from_dict`.

    Args:
        input_dict: a dict from keys to tensors, values, or dicts of them; or a TensorDict.
        auto_batch_size: whether each level gets the largest batch size that its entries share. Default: only with
            `batch_dims`.
        batch_dims: at most this many batch dimensions.
        device: the device of the tensors; default: that of the input.
        batch_size: the batch size of every level, whatever `auto_batch_size` says; default: `[]`.
        names: the names of the batch dimensions.

    Raises:
        InvalidArgumentError: both `batch_size` and `batch_dims`.
        BatchSizeError: an entry does not start with the batch size.

    Example:
        >>> from_dict({"a": torch.zeros(3, 2), "n": {"b": torch.zeros(3)}}, batch_size=[3])["n"].batch_size
        torch.Size([3])
    """
    cls = Container._resident_class
    if isinstance(input_dict, Container):
        made: TensorDictBase = from_container(input_dict, batch_size, device, names)
        return made
    return made_from_dict(cls, input_dict, batch_size, auto_batch_size, batch_dims, device, names)


def fromkeys(keys: Iterable[Any], value: object = 0) -> TensorDict:
    """Make a TensorDict without batch dimensions whose keys all hold one value.

    Args:
        keys: keys, which may be nested.
        value: the value of each of them.

    Example:
        >>> fromkeys(["a", ("n", "b")])["n", "b"]
        tensor(0)
    """
    return Container._resident_class.fromkeys(keys, value)


def make_tensordict(
    input_dict: Mapping[Any, Any] | Container | None = None,
    batch_size: SizeLike | None = None,
    device: DeviceLike | None = None,
    auto_batch_size: bool | None = None,
    **kwargs: Any,
) -> TensorDict:
    """Make a TensorDict from a dict or a TensorDict, from keyword arguments, or from both.

    Args:
        input_dict: a dict or a TensorDict, whose batch size and names are not used. Its entries replace keyword
            arguments of the same name.
        batch_size: the batch size; default: `[]`.
        device: the device of the tensors; default: that of the entries.
        auto_batch_size: whether each level gets the largest batch size that its entries share.
        **kwargs: entries by name.

    Example:
        >>> make_tensordict(a=torch.zeros(3, 4), b=torch.zeros(3), auto_batch_size=True).batch_size
        torch.Size([3])
    """
    source: Any = input_dict
    if source is not None and not isinstance(source, (Container, Mapping)):
        raise refuse_type("what make_tensordict() takes", "a dict or a TensorDict", source)
    if isinstance(input_dict, Container):
        source = unwrap(input_dict)._resident()._shallow()
        source.batch_size = ()
    entries = {**kwargs, **({} if source is None else dict(source.items()))}
    cls = Container._resident_class
    return made_from_dict(cls, entries, batch_size, bool(auto_batch_size), None, device, None)


def from_dataclass(
    dataclass: object,
    *,
    dest_cls: type | None = None,
    auto_batch_size: bool = False,
    batch_dims: int | None = None,
    as_tensorclass: bool = False,
    device: DeviceLike | None = None,
    batch_size: SizeLike | None = None,
) -> TensorDictBase:
    """Make a TensorDict from the fields of a dataclass instance. Nested dataclasses become nested TensorDicts.

    Args:
        dataclass: the instance.
        dest_cls: the tensorclass to make an instance of.
        auto_batch_size: whether each level gets the largest batch size that its entries share.
        batch_dims: with `auto_batch_size`, the largest number of batch dimensions.
        as_tensorclass: whether to make an instance of a new tensorclass with the same fields.
        device: the device of the tensors; default: that of the input.
        batch_size: the batch size; default: `[]`.

    Raises:
        InvalidTypeError: `dataclass` is not an instance of a dataclass.

    Example:
        >>> import dataclasses
        >>> @dataclasses.dataclass
        ... class Point:
        ...     x: torch.Tensor
        >>> TensorDict.from_dataclass(Point(torch.ones(2)), batch_size=[2])["x"]
        tensor([1., 1.])
    """
    options: dict[str, Any] = {
        "auto_batch_size": auto_batch_size,
        "batch_dims": batch_dims,
        "device": device,
        "batch_size": batch_size,
    }
    if as_tensorclass or dest_cls is not None:
        if as_tensorclass_of is None:
            raise UnsupportedError("tensorclasses are not loaded", hint="import tdstore.tensorclass")
        made: TensorDictBase = as_tensorclass_of(dataclass, dest_cls=dest_cls, **options)
        return made
    if isinstance(dataclass, type) or not dataclasses.is_dataclass(dataclass):
        raise InvalidTypeError(f"expected an instance of a dataclass, not {_what(dataclass)}")
    found: TensorDictBase = from_any(dataclass, **options)
    return found


def from_namedtuple(
    named_tuple: tuple[object, ...],
    *,
    auto_batch_size: bool = False,
    batch_dims: int | None = None,
    device: DeviceLike | None = None,
    batch_size: SizeLike | None = None,
) -> TensorDictBase:
    """Make a TensorDict from the fields of a named tuple. Nested named tuples become nested TensorDicts.

    Args:
        named_tuple: a named tuple, or a dict.
        auto_batch_size: whether each level gets the largest batch size that its entries share.
        batch_dims: with `auto_batch_size`, the largest number of batch dimensions.
        device: the device of the tensors; default: that of the input.
        batch_size: the batch size; default: `[]`.

    Raises:
        InvalidTypeError: `named_tuple` is neither a named tuple nor a dict.

    Example:
        >>> from collections import namedtuple
        >>> Point = namedtuple("Point", ["x", "y"])
        >>> from_namedtuple(Point(torch.zeros(2), torch.ones(2)), auto_batch_size=True)["y"]
        tensor([1., 1.])
    """
    if not hasattr(named_tuple, "_asdict") and not isinstance(named_tuple, Mapping):
        raise InvalidTypeError(f"expected a named tuple, not {_what(named_tuple)}")
    made: TensorDictBase = from_any(
        named_tuple, auto_batch_size=auto_batch_size, batch_dims=batch_dims, device=device, batch_size=batch_size
    )
    return made


def from_tuple(
    obj: Sequence[Any],
    *,
    auto_batch_size: bool = False,
    batch_dims: int | None = None,
    device: DeviceLike | None = None,
    batch_size: SizeLike | None = None,
) -> TensorDictBase:
    """Make a TensorDict from a tuple or list, with the keys "0", "1", ...

    Args:
        obj: the tuple or list.
        auto_batch_size: whether each level gets the largest batch size that its entries share.
        batch_dims: with `auto_batch_size`, the largest number of batch dimensions.
        device: the device of the tensors; default: that of the input.
        batch_size: the batch size; default: `[]`.

    Raises:
        InvalidTypeError: `obj` is neither a tuple nor a list.

    Example:
        >>> from_tuple((torch.zeros(2), torch.ones(2)), batch_size=[2])["1"]
        tensor([1., 1.])
    """
    if not isinstance(obj, (tuple, list)):
        raise InvalidTypeError(f"expected a tuple, not {_what(obj)}")
    made: TensorDictBase = from_any(
        {str(i): value for i, value in enumerate(obj)},
        auto_batch_size=auto_batch_size,
        batch_dims=batch_dims,
        device=device,
        batch_size=batch_size,
    )
    return made


def from_list(
    input: Sequence[Any],
    *,
    auto_batch_size: bool | None = None,
    batch_size: SizeLike | None = None,
    device: DeviceLike | None = None,
    batch_dims: int | None = None,
    names: NamesLike = None,
    lazy: bool | None = None,
) -> TensorDictBase:
    """Stack a list of dicts or TensorDicts (or of lists of them) along new first batch dimensions.

    Args:
        input: the list.
        auto_batch_size: whether each element gets the largest batch size that its entries share.
        batch_dims: with `auto_batch_size`, the largest number of batch dimensions.
        device: the device of the tensors; default: that of the input.
        batch_size: the batch size of the result; default: the length of the list.
        names: the names of the batch dimensions.
        lazy: True makes a lazy stack, False a dense one; None makes a dense one if shapes and keys are equal, else a
            lazy one.

    Raises:
        InvalidStateError: the list is empty, or elements differ with `lazy=False`. InvalidTypeError: an element has no
            entries.

    Example:
        >>> from_list([{"a": 1}, {"a": 2}])["a"]
        tensor([1, 2])
    """
    values = as_list(input, "what from_list() takes", "a list")
    if not values:
        raise InvalidStateError("from_list needs at least one element")
    if not _is_records(values):
        raise InvalidTypeError(
            "from_list takes a list of dicts, dataclasses, named tuples or TensorDicts, or of lists of them"
        )
    check_batch_dims(batch_dims)
    below = None if batch_size is None else as_size(batch_size)[1:]
    deeper = None if batch_dims is None else max(batch_dims - 1, 0)
    parts = [
        from_list(v, auto_batch_size=auto_batch_size, batch_size=below, batch_dims=deeper, lazy=lazy)
        if isinstance(v, list)
        else from_any(v, auto_batch_size=bool(auto_batch_size), batch_dims=deeper, batch_size=below)
        for v in values
    ]
    made: TensorDictBase = lazy_stack(parts) if lazy else stack(parts) if lazy is False else maybe_dense_stack(parts)
    if device is not None:
        made = made.to(device)
    if batch_size is not None and made.batch_size != as_size(batch_size):
        made.batch_size = as_size(batch_size)
    if names is not None:
        made.names = names
    return made


def _what(obj: Any) -> str:
    return f"the class {obj.__name__}" if isinstance(obj, type) else f"a {type(obj).__name__}"


# -- and back ----------------------------------------------------------------------------------


def to_list(td: Any, convert_nodes: bool, convert_tensors: Any, tolist_first: bool) -> Any:
    """Build nested lists over the batch dimensions, of dicts or of TensorDicts; without any, return the row."""
    if convert_tensors and not convert_nodes:
        raise InvalidTypeError("convert_tensors=True converts tensors in dicts to numbers: it needs convert_nodes=True")
    if td.batch_dims:
        return [to_list(row, convert_nodes, convert_tensors, tolist_first) for row in td]
    return td.to_dict(convert_tensors=convert_tensors, tolist_first=tolist_first) if convert_nodes else td


def to_namedtuple(td: Any, dest_cls: type | None) -> tuple[Any, ...]:
    """Build a named tuple of the entries, nested TensorDicts as named tuples `GenericDict`, or one of `dest_cls`."""
    entries = {
        key: to_namedtuple(value, None)
        if isinstance(value, Container)
        else value.plain()
        if isinstance(value, NonTensor)
        else value
        for key, value in td._resident().items()
    }
    if dest_cls is not None:
        check_callable(dest_cls, "dest_cls")
    made: tuple[Any, ...] = (namedtuple("GenericDict", list(entries)) if dest_cls is None else dest_cls)(**entries)
    return made


def from_dict_instance(
    td: Container,
    input_dict: Mapping[Any, Any],
    auto_batch_size: bool | None,
    batch_size: SizeLike | None,
    device: DeviceLike | None,
    batch_dims: int | None,
    names: NamesLike,
) -> TensorDictBase:
    """Build as `from_dict`; nested dicts become instances of the classes of the entries of `td`.

    Args:
        td: the TensorDict whose entries determine the classes.
        input_dict: nested dicts of entries, or a TensorDict.
        auto_batch_size: whether each level gets the largest batch size that its entries share.
        batch_size: the batch size; default: `[]`.
        device: the device of the tensors.
        batch_dims: with `auto_batch_size`, the largest number of batch dimensions.
        names: the names of the batch dimensions.
    """
    if isinstance(input_dict, Container):
        made: TensorDictBase = from_container(input_dict, batch_size, device, names)
        return made
    if not isinstance(input_dict, Mapping):
        raise refuse_type("what from_dict_instance() takes", "a dict or a TensorDict", input_dict)
    entries = {}
    for key, value in input_dict.items():
        like = td.get(key, None) if isinstance(value, Mapping) and not isinstance(value, Container) else None
        entries[key] = like.from_dict_instance(value) if isinstance(like, Container) else value  # type: ignore[attr-defined]
    cls = Container._resident_class
    return made_from_dict(cls, entries, batch_size, auto_batch_size, batch_dims, device, names)
