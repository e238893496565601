"""Structure of a row: its tensors and values, by name or position.

Data is a TensorDict, a tensorclass, a tensor, or a dict or tuple of these. A column is one tensor of it, over all rows;
a value that is not a tensor (a string, None, a list) is a column of bytes of a fixed width.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

import tdstore
from tdstore import TensorDict, TensorDictBase
from tdstore.dtypes import dtype_name
from tdstore.errors import (
    CorruptStoreError,
    DifferentKeysError,
    InvalidTypeError,
)
from tdstore.interop import from_tensordict
from tdstore.rl.kinds import is_foreign
from tdstore.rl.tables.columns import Column
from tdstore.rl.tables.values import decode_values, plain_value
from tdstore.rl.types import Rows
from tdstore.types import LeafSpec, Path, path_text
from tdstore.values import decode_value, encode_value

if TYPE_CHECKING:
    from tdstore.values import JSON

RESERVED = ("_replay_state", "_replay_undo")
"""Names in a place that users may not give to entries."""


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
            data = self._unwrapped(data)
        count, parts = 0, self.parts
        for key, value in data.items():
            part = parts.get(key)
            if part is None:
                if lenient or value is None:
                    continue
                raise self._keys_error(data)
            count += 1
            if type(part) is int:
                columns[part] = value
            else:
                part.take(value, columns, lenient)  # type: ignore[union-attr]
        if count < len(parts) and not lenient:
            raise self._keys_error(data)

    def _unwrapped(self, data: Any) -> Any:
        data = tdstore.unwrap_tensorclass(data)
        if isinstance(data, (TensorDictBase, Mapping)):
            return data
        if is_foreign(data):
            return self._unwrapped(from_tensordict(data))
        where = f" {path_text(self.path)}" if self.path else ""
        raise InvalidTypeError(f"the rows of this storage are TensorDicts, and data{where} is a {type(data).__name__}")

    def _keys_error(self, data: Any) -> DifferentKeysError:
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
                raise self._keys_error(data)
            if not lenient and data.keys() != set(self.keys):
                raise self._keys_error(data)
            values = [data.get(key) for key in self.keys]
        else:
            if not isinstance(data, tuple) or len(data) != len(self.parts):
                raise self._keys_error(data)
            values = list(data)
        for part, value in zip(self.parts, values, strict=True):
            if isinstance(part, int):
                columns[part] = value
            elif value is not None or not lenient:
                part.take(value, columns, lenient)

    def _keys_error(self, data: Any) -> DifferentKeysError:
        what = f"a dict with the keys {list(self.keys)}" if self.kind is None else f"a tuple of {len(self.parts)}"
        received = f"the keys {list(data)}" if isinstance(data, Mapping) else type(data).__name__
        received += f" of {len(data)}" if isinstance(data, tuple) else ""
        where = f" at {path_text(self.path)}" if self.path else ""
        return DifferentKeysError(f"the rows of this storage are {what}{where}, and the data has {received}")

    def build(self, columns: Sequence[Any], lead: tuple[int, ...]) -> Any:
        """Make data of columns whose leading dimensions are `lead`."""
        made = [columns[part] if isinstance(part, int) else part.build(columns, lead) for part in self.parts]
        made = [plain_value(value) if tdstore.is_non_tensor(value) else value for value in made]
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
            decode_values(value, size) if column.values else value
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
        return Structure(_join_parts(self.root, other.root, columns, other.columns), columns, self.inner)

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


def _join_parts(mine: Part, theirs: Part, columns: list[Column], received: Sequence[Column]) -> Part:
    if not isinstance(mine, Collection) or not isinstance(theirs, Collection):
        return mine
    parts = dict(mine.parts)
    for key, part in theirs.parts.items():
        if key in parts:
            parts[key] = _join_parts(parts[key], part, columns, received)
        else:
            parts[key] = _renumber(part, columns, received)
    return replace(mine, parts=parts)


def _renumber(part: Part, columns: list[Column], received: Sequence[Column]) -> Part:
    """Return a part with its columns added to a list of others."""
    if isinstance(part, int):
        columns.append(received[part])
        return len(columns) - 1
    if isinstance(part, Collection):
        return replace(part, parts={key: _renumber(one, columns, received) for key, one in part.parts.items()})
    assert isinstance(part, Fields)
    return replace(part, parts=tuple(_renumber(one, columns, received) for one in part.parts))


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
        root = _decode_part(plain["root"], ())
        return Structure(root, columns, tuple(plain["inner"]))
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptStoreError(f"the structure of the rows of {url} is malformed: {error}", url=url) from error


def _decode_part(plain: Any, path: Path) -> Part:
    if isinstance(plain, int):
        return plain
    if "td" in plain:
        parts = {str(key): _decode_part(part, (*path, str(key))) for key, part in plain["td"]}
        name = plain["class"]
        return Collection(
            path, parts, tuple(plain["batch"]), None if name is None else tdstore.find_tensorclass(name), name
        )
    if "tuple" in plain:
        return Fields(path, (), tuple(_decode_part(part, path) for part in plain["tuple"]), tuple)
    keys = tuple(decode_value(key) for key in plain["keys"])
    return Fields(path, keys, tuple(_decode_part(part, path) for part in plain["dict"]))
