"""Structure of a row: its tensors and values, and the conversion of data to columns and back.

Data is a TensorDict, a tensorclass, a tensor, or a dict or tuple of these. A column is one tensor of it, over all rows;
a value that is not a tensor (a string, None, a list) is a column of bytes of a fixed width.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import torch
from torch import Tensor

import tdstore
from tdstore import NonTensorData, NonTensorStack, TensorDict, TensorDictBase
from tdstore.dtypes import dtype_name
from tdstore.errors import (
    BatchSizeError,
    CorruptStoreError,
    DifferentKeysError,
    InvalidArgumentError,
    InvalidTypeError,
    UnsupportedError,
)
from tdstore.interop import from_tensordict
from tdstore.rl.types import Rows
from tdstore.types import LeafSpec, Path, path_text
from tdstore.values import decode_value, encode_value

if TYPE_CHECKING:
    from tdstore.values import JSON

RESERVED = ("_replay_state", "_replay_undo")
"""Names in a place that users may not give to entries."""
_HEAD = 4
"""Bytes before a value: its length, and 1, so that rows that were never written read as None."""
_TEXT, _JSON = 0x73, 0x6A
_SMALLEST = 64


@dataclass(frozen=True, slots=True)
class Column:
    """One tensor of the rows: its name, and the shape and dtype of one row of it."""

    path: Path
    shape: tuple[int, ...]
    dtype: torch.dtype
    values: bool = False
    """Whether rows are values that are not tensors, as bytes."""

    @property
    def nbytes(self) -> int:
        """Bytes of one row."""
        return math.prod(self.shape) * self.dtype.itemsize

    def wider(self, width: int) -> Column:
        """Return the same column for values of up to `width` bytes."""
        return replace(self, shape=(*self.shape[:-1], width))


class Node:
    """A part of the structure that has parts of its own."""

    __slots__ = ()

    def take(self, data: Any, columns: list[Any], lenient: bool) -> None:
        """Write the tensors of `data` into the list of columns; `lenient` allows missing and unexpected entries."""
        raise NotImplementedError

    def build(self, columns: Sequence[Any], lead: tuple[int, ...]) -> Any:
        """Build data of columns whose leading dimensions are `lead`."""
        raise NotImplementedError

    def plain(self) -> JSON:
        """Return the plain form for a header."""
        raise NotImplementedError


Part = int | Node
"""The number of a column, or a node."""


def part_plain(part: Part) -> JSON:
    """Return the plain form of a part for a header."""
    return part if isinstance(part, int) else part.plain()


@dataclass(slots=True)
class Collection(Node):
    """A TensorDict, or a tensorclass."""

    path: Path
    parts: dict[str, Part]
    batch: tuple[int, ...] = ()
    """Batch dimensions after those of the rows."""
    kind: type | None = None
    name: str | None = None
    """Name of the tensorclass, even if this process has none of that name."""
    device: torch.device | None = None
    """The device that rows name; None: none."""

    def take(self, data: Any, columns: list[Any], lenient: bool) -> None:
        """Write the tensors of `data` into the list of columns; `lenient` allows missing and unexpected entries."""
        if type(data) is not TensorDict:
            data = self._opened(data)
        count, parts = 0, self.parts
        for key, value in data.items():
            part = parts.get(key)
            if part is None:
                if lenient or value is None:
                    continue
                raise self._different(data)
            count += 1
            if type(part) is int:
                columns[part] = value
            else:
                part.take(value, columns, lenient)  # type: ignore[union-attr]
        if count < len(parts) and not lenient:
            raise self._different(data)

    def _opened(self, data: Any) -> Any:
        data = tdstore.unwrap_tensorclass(data)
        if isinstance(data, (TensorDictBase, Mapping)):
            return data
        if is_foreign(data):
            return self._opened(from_tensordict(data))
        where = f" {path_text(self.path)}" if self.path else ""
        raise InvalidTypeError(f"the rows of this storage are TensorDicts, and data{where} is a {type(data).__name__}")

    def _different(self, data: Any) -> DifferentKeysError:
        received = {key for key, value in data.items() if value is not None}
        missing = [path_text((*self.path, k)) for k in self.parts if k not in received]
        unexpected = [path_text((*self.path, k)) for k in received if k not in self.parts]
        differences = [f"missing {', '.join(missing)}"] if missing else []
        differences += [f"unexpected {', '.join(sorted(unexpected))}"] if unexpected else []
        return DifferentKeysError(
            f"the keys of the data differ from those of the storage: {'; '.join(differences)}",
            hint="on_mismatch='peer' ignores unexpected entries, and does not change missing ones",
        )

    def build(self, columns: Sequence[Any], lead: tuple[int, ...]) -> TensorDictBase:
        """Make data of columns whose leading dimensions are `lead`."""
        made = {
            key: columns[part] if type(part) is int else part.build(columns, lead)  # type: ignore[union-attr]
            for key, part in self.parts.items()
        }
        td = TensorDict(made, (*lead, *self.batch), self.device)
        return td if self.kind is None else tdstore.wrap_tensorclass(self.kind, td)

    def plain(self) -> JSON:
        """Return the plain form for a header."""
        parts = [[key, part_plain(part)] for key, part in self.parts.items()]
        return {"td": parts, "batch": list(self.batch), "class": self.name}


@dataclass(slots=True)
class Fields(Node):
    """A dict, a tuple or a namedtuple of data."""

    path: Path
    keys: tuple[Any, ...]
    parts: tuple[Part, ...]
    kind: type | None = None
    """The class of a tuple; None: a dict."""

    def take(self, data: Any, columns: list[Any], lenient: bool) -> None:
        """Write the tensors of `data` into the list of columns; `lenient` allows missing and unexpected entries."""
        if self.kind is None:
            if not isinstance(data, Mapping):
                raise self._different(data)
            if not lenient and data.keys() != set(self.keys):
                raise self._different(data)
            values = [data.get(key) for key in self.keys]
        else:
            if not isinstance(data, tuple) or len(data) != len(self.parts):
                raise self._different(data)
            values = list(data)
        for part, value in zip(self.parts, values, strict=True):
            if isinstance(part, int):
                columns[part] = value
            elif value is not None or not lenient:
                part.take(value, columns, lenient)

    def _different(self, data: Any) -> DifferentKeysError:
        what = f"a dict with the keys {list(self.keys)}" if self.kind is None else f"a tuple of {len(self.parts)}"
        received = f"the keys {list(data)}" if isinstance(data, Mapping) else type(data).__name__
        received += f" of {len(data)}" if isinstance(data, tuple) else ""
        where = f" at {path_text(self.path)}" if self.path else ""
        return DifferentKeysError(f"the rows of this storage are {what}{where}, and the data has {received}")

    def build(self, columns: Sequence[Any], lead: tuple[int, ...]) -> Any:
        """Make data of columns whose leading dimensions are `lead`."""
        made = [columns[part] if isinstance(part, int) else part.build(columns, lead) for part in self.parts]
        made = [_plain(value) if tdstore.is_non_tensor(value) else value for value in made]
        if self.kind is None:
            return dict(zip(self.keys, made, strict=True))
        return self.kind(*made) if hasattr(self.kind, "_fields") else tuple(made)

    def plain(self) -> JSON:
        """Return the plain form for a header."""
        parts = [part_plain(part) for part in self.parts]
        return {"tuple": parts} if self.kind else {"dict": parts, "keys": [encode_value(key) for key in self.keys]}


@dataclass(slots=True)
class Structure:
    """Structure that all rows of a storage share."""

    root: Part
    columns: list[Column] = field(default_factory=list)
    inner: tuple[int, ...] = ()
    """Dimensions of slots after the first one."""
    device: torch.device | None = None
    """Where the tensors were of the data from which this was made."""

    @property
    def is_pytree(self) -> bool:
        """Whether rows are dicts or tuples."""
        return isinstance(self.root, Fields)

    @property
    def is_tensor(self) -> bool:
        """Whether a row is one tensor."""
        return isinstance(self.root, int)

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of the first dimension, all columns together."""
        return sum(column.nbytes for column in self.columns) * math.prod(self.inner)

    def take(self, data: Rows, *, lenient: bool = False) -> list[Any]:
        """Split data into its columns, in order; None for a missing one, which only `lenient` allows."""
        columns: list[Any] = [None] * len(self.columns)
        if isinstance(self.root, int):
            columns[0] = data
        else:
            self.root.take(data, columns, lenient)
        return columns

    def build(self, columns: Sequence[Any], lead: Sequence[int]) -> Any:
        """Build data from columns; those of values are tensors of bytes."""
        if isinstance(self.root, int):
            return columns[0]
        size = tuple(lead)
        made = [
            decoded(value, size) if column.values else value
            for column, value in zip(self.columns, columns, strict=True)
        ] if self.has_values else columns  # fmt: skip
        return self.root.build(made, size)

    @property
    def has_values(self) -> bool:
        """Whether any column is of values that are not tensors."""
        for column in self.columns:  # noqa: SIM110  a generator takes three times as long, at each sample
            if column.values:
                return True
        return False

    def specs(self, capacity: int) -> dict[Path, LeafSpec]:
        """Return the leaves of a store with that many rows."""
        return {c.path: LeafSpec((capacity, *self.inner, *c.shape), dtype_name(c.dtype)) for c in self.columns}

    def encode(self) -> dict[str, Any]:
        """Encode the structure as plain data."""
        columns = [[list(c.path), list(c.shape), dtype_name(c.dtype), c.values] for c in self.columns]
        return {"root": part_plain(self.root), "columns": columns, "inner": list(self.inner)}

    def collections(self) -> Iterator[Collection]:
        """Return the TensorDicts of a row, outermost first."""
        found = [self.root] if isinstance(self.root, Node) else []
        while found:
            node = found.pop(0)
            if isinstance(node, Collection):
                yield node
                found += [part for part in node.parts.values() if isinstance(part, Node)]
            elif isinstance(node, Fields):
                found += [part for part in node.parts if isinstance(part, Node)]

    def name_device(self, device: torch.device | None) -> None:
        """Make rows name that device."""
        for node in self.collections():
            node.device = device

    def with_more(self, other: Structure) -> Structure:
        """Return this structure with the additional entries of another one, after its own."""
        columns = list(self.columns)
        return Structure(_joined(self.root, other.root, columns, other.columns), columns, self.inner)

    def same_rows(self, other: Structure) -> list[str]:
        """Describe how the rows of another structure differ, for a message; empty where they fit."""
        mine, theirs = ({c.path: c for c in s.columns} for s in (self, other))
        differences = [f"{path_text(p)} is missing" for p in mine if p not in theirs]
        differences += [f"{path_text(p)} is unexpected" for p in theirs if p not in mine]
        for path, column in mine.items():
            there = theirs.get(path)
            if there is None or (column.values and there.values):
                continue
            if (there.shape, there.dtype) != (column.shape, column.dtype):
                differences.append(
                    f"{path_text(path)} has rows of shape {list(there.shape)} and dtype {dtype_name(there.dtype)}, "
                    f"not {list(column.shape)} and {dtype_name(column.dtype)}"
                )
        if self.inner != other.inner:
            differences.append(f"slots have the dimensions {list(other.inner)} after the first, not {list(self.inner)}")
        return differences


def _joined(mine: Part, theirs: Part, columns: list[Column], received: Sequence[Column]) -> Part:
    if not isinstance(mine, Collection) or not isinstance(theirs, Collection):
        return mine
    parts = dict(mine.parts)
    for key, part in theirs.parts.items():
        if key in parts:
            parts[key] = _joined(parts[key], part, columns, received)
        else:
            parts[key] = _moved(part, columns, received)
    return replace(mine, parts=parts)


def _moved(part: Part, columns: list[Column], received: Sequence[Column]) -> Part:
    """Return a part with its columns added to a list of others."""
    if isinstance(part, int):
        columns.append(received[part])
        return len(columns) - 1
    if isinstance(part, Collection):
        return replace(part, parts={key: _moved(one, columns, received) for key, one in part.parts.items()})
    assert isinstance(part, Fields)
    return replace(part, parts=tuple(_moved(one, columns, received) for one in part.parts))


def decode_structure(plain: Any, url: str) -> Structure:
    """Decode the result of `Structure.encode`.

    Raises:
        CorruptStoreError: it is malformed.
    """
    try:
        columns = [
            Column(tuple(path), tuple(shape), LeafSpec((), dtype).dtype, bool(values))
            for path, shape, dtype, values in plain["columns"]
        ]
        root = _decoded_part(plain["root"], ())
        return Structure(root, columns, tuple(plain["inner"]))
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptStoreError(f"the structure of the rows of {url} is malformed: {error}", url=url) from error


def _decoded_part(plain: Any, path: Path) -> Part:
    if isinstance(plain, int):
        return plain
    if "td" in plain:
        parts = {str(key): _decoded_part(part, (*path, str(key))) for key, part in plain["td"]}
        name = plain["class"]
        return Collection(
            path, parts, tuple(plain["batch"]), None if name is None else tdstore.find_tensorclass(name), name
        )
    if "tuple" in plain:
        return Fields(path, (), tuple(_decoded_part(part, path) for part in plain["tuple"]), tuple)
    keys = tuple(decode_value(key) for key in plain["keys"])
    return Fields(path, keys, tuple(_decoded_part(part, path) for part in plain["dict"]))


# -- the structure of data ---------------------------------------------------------------------
def is_foreign(data: object) -> bool:
    """Check whether data is a TensorDict or tensorclass of the `tensordict` package."""
    if isinstance(data, (TensorDictBase, Tensor, dict, tuple)) or not hasattr(data, "batch_size"):
        return False
    return not tdstore.is_tensor_collection(data)


def is_container(data: object) -> bool:
    """Check whether data is a TensorDict or a tensorclass of this package: not a value in one."""
    return isinstance(data, TensorDictBase) or (tdstore.is_tensor_collection(data) and not tdstore.is_non_tensor(data))


def structure_of(data: Rows, lead: int, inner: Sequence[int] = ()) -> Structure:
    """Return the structure of the rows of data whose first `lead` dimensions are slots.

    Raises:
        TypeError: it is not a TensorDict, a tensor, or a dict or tuple of these. ValueError: an entry has a reserved
            name.
        BatchSizeError: a tensor has fewer dimensions than the slots.
    """
    found = Structure(0, [], tuple(inner))
    found.root = _part_of(data, lead, (), found.columns)
    found.device = _device_in(data)
    if not found.columns:
        raise InvalidArgumentError("the data has no entries: the first rows say which ones a storage has")
    return found


def check_lengths(structure: Structure, data: Rows, lead: Sequence[int]) -> None:
    """Check that all tensors of data have the same leading dimensions.

    Raises:
        BatchSizeError: one has different ones.
    """
    for column, value in zip(structure.columns, structure.take(data), strict=True):
        if not column.values and tuple(torch.as_tensor(value).shape[: len(lead)]) != tuple(lead):
            raise BatchSizeError(
                f"{path_text(column.path)} has shape {list(value.shape)}, and the data is {list(lead)} rows"
            )


def _device_in(data: Any) -> torch.device | None:
    """Return the device that data names, or the device of its first tensor."""
    if getattr(data, "device", None) is not None:
        return torch.device(data.device)
    values = data if isinstance(data, tuple) else data.values() if hasattr(data, "values") else ()
    return next(filter(None, map(_device_in, values)), None)


def _part_of(data: Any, lead: int, path: Path, columns: list[Column]) -> Part:
    if path and path[0] in RESERVED:
        raise InvalidArgumentError(f"the name {path[0]} is taken by the storage itself: rename this entry")
    if is_foreign(data):
        data = from_tensordict(data)
    if is_container(data):
        td = tdstore.unwrap_tensorclass(data)
        kind = None if td is data else type(data)
        batch = tuple(td.batch_size[lead:])
        if len(td.batch_size) < lead:
            raise BatchSizeError(
                f"data{_at(path)} of batch size {list(td.batch_size)} has no {lead} leading dimensions for slots",
                hint="give it a batch size",
            )
        parts = {key: _part_of(value, lead, (*path, key), columns) for key, value in td.items() if value is not None}
        name = None if kind is None else tdstore.tensorclass_name(kind)
        return Collection(path, parts, batch, kind, name, td.device)
    if isinstance(data, Tensor):
        if data.layout is not torch.strided or data.is_nested or data.is_meta:
            found = "has no values" if data.is_meta else "is nested" if data.is_nested else "is sparse"
            raise UnsupportedError(
                f"data{_at(path)} {found}: rows are dense tensors of one shape",
                hint="LazyStackStorage and ListStorage keep rows of any kind in memory",
            )
        if data.ndim < lead:
            raise BatchSizeError(f"data{_at(path)} of shape {list(data.shape)} has no {lead} dimensions for slots")
        columns.append(Column(path or ("rows",), tuple(data.shape[lead:]), data.dtype))
        return len(columns) - 1
    if tdstore.is_non_tensor(data) or (path and not isinstance(data, (Mapping, tuple, np.ndarray))):
        return _values_column(data, lead, path, columns)
    if isinstance(data, Mapping):
        names = _unique([key if isinstance(key, str) else repr(key) for key in data])
        made = [_part_of(v, lead, (*path, n), columns) for n, v in zip(names, data.values(), strict=True)]
        return Fields(path, tuple(data), tuple(made))
    if isinstance(data, tuple):
        made = [_part_of(value, lead, (*path, str(i)), columns) for i, value in enumerate(data)]
        return Fields(path, (), tuple(made), type(data))
    if isinstance(data, (np.ndarray, int, float, bool, complex, np.generic)):
        return _part_of(torch.as_tensor(data), lead, path, columns)
    raise InvalidTypeError(
        f"rows are TensorDicts, tensorclasses, tensors, or dicts and tuples of these, not {type(data).__name__}"
    )


def _at(path: Path) -> str:
    return f" {path_text(path)}" if path else ""


def _unique(names: list[str]) -> list[str]:
    made: list[str] = []
    for name in names:
        while name in made:
            name += "'"
        made.append(name)
    return made


def _values_column(data: Any, lead: int, path: Path, columns: list[Column]) -> Part:
    if isinstance(data, (int, float, bool, complex)) and not tdstore.is_non_tensor(data):
        return _part_of(torch.as_tensor(data), lead, path, columns)
    extra = tuple(data.batch_size[lead:]) if tdstore.is_non_tensor(data) else ()
    columns.append(Column(path, (*extra, width_of(encoded_values(data))), torch.uint8, values=True))
    return len(columns) - 1


# -- values as bytes ---------------------------------------------------------------------------
def encoded_values(data: Rows) -> list[bytes]:
    """Encode each value of an entry, in the order of its rows."""
    values = _flat_values(data) if tdstore.is_non_tensor(data) else [data]
    made = []
    for value in values:
        if type(value) is str:
            made.append(b"s" + value.encode())
        elif value is None:
            made.append(b"")
        else:
            try:
                made.append(b"j" + msgspec.json.encode(encode_value(value)))
            except TypeError as error:
                raise UnsupportedError(f"a value cannot be stored as a row: {error}") from None
    return made


def _flat_values(data: Any) -> list[Any]:
    if isinstance(data, NonTensorData):
        return [data.data]
    values = data.tolist()
    for _ in data.batch_size[1:]:
        values = [value for row in values for value in row]
    return list(values)


def width_of(values: Sequence[bytes]) -> int:
    """Return a width for values, with space for longer ones: a power of two."""
    longest = max(map(len, values), default=0) + _HEAD
    return max(_SMALLEST, 1 << (2 * longest - 1).bit_length())


def packed(values: Sequence[bytes], shape: Sequence[int], width: int) -> Tensor:
    """Pack values into a tensor of bytes `[*shape, width]`."""
    room = np.zeros((len(values), width), np.uint8)
    for row, value in zip(room, values, strict=True):
        row[:_HEAD] = np.frombuffer((len(value) + 1).to_bytes(_HEAD, "little"), np.uint8)
        row[_HEAD : _HEAD + len(value)] = np.frombuffer(value, np.uint8)
    return torch.from_numpy(room.reshape(*shape, width))


def decoded(rows: Tensor, lead: tuple[int, ...]) -> NonTensorData | NonTensorStack:
    """Decode a tensor of bytes to the entry of a TensorDict."""
    shape = rows.shape[:-1]
    flat = rows.cpu().contiguous().view(-1, rows.shape[-1]).numpy()
    values = [_value(row.tobytes()) for row in flat]
    if not shape:
        return NonTensorData(values[0])
    if not values:
        return NonTensorData(None, batch_size=shape)
    return NonTensorStack.from_list(_lists(values, tuple(shape)))


def _plain(value: Any) -> Any:
    """Return a value in its original form, also within dicts and tuples; a list of them for several rows."""
    return value.data if isinstance(value, NonTensorData) else value.tolist()


def _lists(values: list[Any], shape: tuple[int, ...]) -> list[Any]:
    if len(shape) == 1:
        return values
    step = len(values) // shape[0]
    return [_lists(values[i * step : (i + 1) * step], shape[1:]) for i in range(shape[0])]


def _value(row: bytes) -> Any:
    length = int.from_bytes(row[:_HEAD], "little") - 1
    if length <= 0:
        return None
    body = row[_HEAD + 1 : _HEAD + length]
    if row[_HEAD] == _TEXT:
        return body.decode()
    return decode_value(msgspec.json.decode(body))


def length_of(data: Rows, dims: int = 1) -> tuple[int, ...]:
    """Return the first `dims` dimensions of data."""
    if type(data) is TensorDict:
        size = data.batch_size
        return size if len(size) == dims else size[:dims]
    if isinstance(data, (Tensor, np.ndarray)):
        return tuple(data.shape[:dims])
    if isinstance(data, Mapping) and not is_container(data):
        return next((length_of(value, dims) for value in data.values()), ())
    if isinstance(data, tuple):
        return next((length_of(value, dims) for value in data), ())
    if hasattr(data, "batch_size"):
        return tuple(data.batch_size[:dims])
    raise InvalidTypeError(f"rows are TensorDicts, tensors, or dicts and tuples of these, not {type(data).__name__}")


def prepared(structure: Structure, data: Rows, lead: Sequence[int]) -> list[Tensor]:
    """Return the columns of data that has this very structure, values as bytes."""
    made = []
    for column, value in zip(structure.columns, structure.take(data), strict=True):
        if column.values:
            values = encoded_values(value)
            shape = (*lead, *column.shape[:-1])
            made.append(packed(values * (math.prod(shape) if len(values) == 1 else 1), shape, column.shape[-1]))
        else:
            made.append(torch.as_tensor(value).detach().cpu())
    return made


def flat(rows: Any, dims: int) -> Any:
    """Merge the first dimensions of a pytree of rows into one."""
    if isinstance(rows, Tensor):
        return rows.reshape(-1, *rows.shape[dims:])
    if is_container(rows):
        return rows.reshape(-1, *rows.batch_size[dims:])
    if isinstance(rows, dict):
        return {key: flat(value, dims) for key, value in rows.items()}
    made = [flat(value, dims) for value in rows]
    return type(rows)(*made) if hasattr(rows, "_fields") else tuple(made)
