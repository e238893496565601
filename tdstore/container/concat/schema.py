"""The structure of several places read as one: compared entry by entry, and concatenated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

import msgspec
import torch

from tdstore.container.concat.leaves import ConcatLeaf, Part, Role
from tdstore.container.storage.describe import STACK_KIND, value_json
from tdstore.container.storage.entry_kinds import (
    Column,
    Entry,
    Inline,
    Leaf,
    NestedTensor,
    Refused,
    SubGroup,
    Unbatched,
)
from tdstore.container.storage.handle import StoreHandle
from tdstore.container.values.codecs import pickling
from tdstore.container.values.nontensor import NonTensor, NonTensorData, merge
from tdstore.container.varlen.columns import column_record, pack
from tdstore.container.varlen.nested_leaves import SHAPES, VALUES
from tdstore.container.varlen.nested_leaves import SPANS as NESTED_SPANS
from tdstore.errors import BatchSizeError, MismatchError, UnsupportedError
from tdstore.header import Group
from tdstore.storekit.foreign_strings import COLUMN_FROM, SPANS, TEXT
from tdstore.types import LeafSpec, Path, path_text


class Place(NamedTuple):
    """One of the datasets that are concatenated."""

    name: str
    """Its location, for messages."""
    handle: StoreHandle


class Structure:
    """The group records and the leaves of places read as one.

    Args:
        places: one or more, opened for reading.

    Raises:
        BatchSizeError: a place has no batch dimension.
        MismatchError: a place has other entries than the first one; names the place and the key.
        UnsupportedError: an entry is a lazy stack along the dimension of the rows.
    """

    def __init__(self, places: Sequence[Place]) -> None:
        self.places = list(places)
        self.groups: dict[Path, Group] = {}
        self.leaves: dict[Path, ConcatLeaf] = {}
        self._lengths: list[int] = []
        for place in self.places:
            root = place.handle.groups[()]
            if root.kind == STACK_KIND:
                raise _stacked(place, ())
            if not root.batch_size:
                raise BatchSizeError(f"{place.name} has no batch dimension along which it could be concatenated")
            self._lengths.append(root.batch_size[0])
        self._rows = sum(self._lengths)
        self._group(())

    # -- groups ------------------------------------------------------------------------------
    def _group(self, path: Path) -> None:
        records = [place.handle.groups[path] for place in self.places]
        first = records[0]
        for place, record in zip(self.places, records, strict=True):
            if record.kind != first.kind:
                self._differs(place, path, record.kind, first.kind)
            if (record.batch_size or ())[1:] != (first.batch_size or ())[1:]:
                self._differs(place, path, _batch(record), _batch(first))
            if record.names != first.names:
                self._differs(place, path, f"has the names {record.names}", f"has {first.names}")
            if lost := [key for key in first.keys if key not in record.keys]:
                self._differs(place, (*path, lost[0]), "is missing", "is there")
            if unmatched := [key for key in record.keys if key not in first.keys]:
                self._differs(place, (*path, unmatched[0]), "is there", "is missing")
        if first.kind == STACK_KIND:
            first = self._stack(path, records)
        batch = first.batch_size
        if batch is not None and first.kind != STACK_KIND:
            batch = (self._rows, *batch[1:])
        self.groups[path] = msgspec.structs.replace(first, batch_size=batch, values={})
        values = {key: record for key in first.keys if (record := self._entry((*path, key))) is not None}
        self.groups[path] = msgspec.structs.replace(self.groups[path], values=values)

    def _stack(self, path: Path, records: list[Group]) -> Group:
        """Return the record of a lazy stack along another dimension than that of the rows."""
        for place, record in zip(self.places, records, strict=True):
            if not record.extra.get("stack_dim") or not record.keys:
                raise _stacked(place, path)
            if record.extra != records[0].extra:
                self._differs(place, path, f"is a lazy stack {record.extra}", f"is one {records[0].extra}")
        return records[0]

    # -- entries -----------------------------------------------------------------------------
    def _entry(self, path: Path) -> Any:
        """Add an entry, and return its value record; None for one that needs none."""
        found = [place.handle.entries[path] for place in self.places]
        first = found[0]
        for place, entry in zip(self.places, found, strict=True):
            if _kind(entry) != _kind(first):
                self._differs(place, path, f"is {_kind(entry)}", f"is {_kind(first)}")
        match first:
            case Leaf():
                self._leaf(path, path)
            case SubGroup():
                self._group(path)
            case NestedTensor():
                return self._nested(path)
            case Unbatched():
                return self._unbatched(path, first)
            case Column() | Inline() | Refused():
                return self._values(path, found)
        return None

    def _leaf(self, leaf: Path, entry: Path, role: Role = "rows", along: Path | None = None) -> None:
        """Add a leaf.

        Args:
            leaf: its path.
            entry: the entry that it belongs to, for messages.
            role: what it is for.
            along: the leaf that its offsets point at.
        """
        specs = [place.handle.specs[leaf] for place in self.places]
        first, parts, before = specs[0], [], 0
        for number, (place, spec) in enumerate(zip(self.places, specs, strict=True)):
            if (spec.shape[1:], spec.dtype) != (first.shape[1:], first.dtype):
                self._differs(place, entry, _row(spec), _row(first))
            room = 0 if along is None else place.handle.specs[along].shape[0]
            parts.append(Part(number, spec.shape[0], before=before, room=room))
            before += room
        length = sum(part.length for part in parts)
        whole = LeafSpec((length, *first.shape[1:]), first.dtype, fill_value=first.fill_value)
        self.leaves[leaf] = ConcatLeaf(whole, parts, role)

    def _nested(self, path: Path) -> Any:
        records = [place.handle.groups[path[:-1]].values[path[-1]]["nested"] for place in self.places]
        first = records[0]
        rest = list(first["shape"][1:])
        for place, record in zip(self.places, records, strict=True):
            own = list(record["shape"][1:])
            same = (record["layout"], record.get("dim", 1), len(own), bool(record.get("spans", True))) == (
                first["layout"], first.get("dim", 1), len(rest), bool(first.get("spans", True))
            )  # fmt: skip
            if not same or (first["layout"] == "jagged" and own != rest):
                self._differs(place, path, _ragged(record), _ragged(first))
            rest = [n if n == other else -1 for n, other in zip(rest, own, strict=True)]
        entry = self.places[0].handle.entries[path]
        assert isinstance(entry, NestedTensor), path
        values = (*path, VALUES)
        for leaf in entry.leaves:
            name = leaf[-1]
            assert name in (VALUES, NESTED_SPANS, SHAPES), leaf
            if name == NESTED_SPANS:
                self._leaf(leaf, path, "spans", values)
            else:
                self._leaf(leaf, path)
        return {"nested": {**first, "shape": [self._rows, *rest]}}

    def _unbatched(self, path: Path, entry: Unbatched) -> Any:
        (leaf,) = entry.leaves
        specs = [place.handle.specs[leaf] for place in self.places]
        for place, spec in zip(self.places, specs, strict=True):
            if (spec.shape, spec.dtype) != (specs[0].shape, specs[0].dtype):
                self._differs(place, path, _whole(spec), _whole(specs[0]))
        parts = [Part(number, 0) for number in range(len(specs))]
        self.leaves[leaf] = ConcatLeaf(LeafSpec(specs[0].shape, specs[0].dtype), parts, "unbatched")
        return self.places[0].handle.groups[path[:-1]].values[path[-1]]

    # -- values that are not tensors -----------------------------------------------------------
    def _values(self, path: Path, found: Sequence[Entry | None]) -> Any:
        records = [place.handle.groups[path[:-1]].values[path[-1]] for place in self.places]
        for entry, record in zip(found, records, strict=True):
            if isinstance(entry, Refused):
                return record  # reading it says why
        columns = any(isinstance(entry, Column) for entry in found)
        if not columns:
            stacks = any(isinstance(record, dict) and "stack" in record for record in records)
            if not stacks and all(record == records[0] for record in records):
                return records[0]
            for place, entry in zip(self.places, found, strict=True):
                if isinstance(entry, Inline) and entry.unbatched:
                    self._differs(place, path, "is an unbatched tensor", "is another one")
            entries = [place.handle.value(path) for place in self.places]
            if self._rows < COLUMN_FROM:
                with pickling(self._trusted):
                    return value_json(merge(entries, torch.cat, collapse=True), path)
        return self._column(path, found)

    @property
    def _trusted(self) -> bool:
        return self.places[0].handle.trusted

    def _column(self, path: Path, found: Sequence[Entry | None]) -> Any:
        """Add the two leaves of values per row. Values that a place has in its header are encoded in memory."""
        offsets, encoded, rest, before, mark = [], [], tuple[int, ...](), 0, None
        for number, (place, entry) in enumerate(zip(self.places, found, strict=True)):
            rows = self._lengths[number]
            if isinstance(entry, Column):
                places, text = (place.handle.specs[leaf] for leaf in entry.leaves)
                record = place.handle.groups[path[:-1]].values[path[-1]]
                offsets.append(Part(number, rows, before=before, room=text.shape[0]))
                encoded.append(Part(number, text.shape[0], mark=record["column"]))
                own = tuple(places.shape[1:])
            else:
                with pickling(self._trusted):
                    leaves = _encoded(place.handle.value(path))
                record = column_record(leaves[TEXT])
                offsets.append(Part(number, rows, leaves[SPANS], before, len(leaves[TEXT])))
                encoded.append(Part(number, len(leaves[TEXT]), leaves[TEXT]))
                own = tuple(leaves[SPANS].shape[1:])
            rest = own if not number else rest
            if own != rest:
                self._differs(place, path, f"has values {list(own[:-1])} in each row", f"has {list(rest[:-1])}")
            before += encoded[-1].length
            mark = record if mark is None else mark
        self.leaves[(*path, SPANS)] = ConcatLeaf(
            LeafSpec((self._rows, *rest), torch.int64, fill_value=-1), offsets, "offsets"
        )
        self.leaves[(*path, TEXT)] = ConcatLeaf(LeafSpec((before,), torch.uint8), encoded, "text")
        return mark

    def _differs(self, place: Place, path: Path, what: str, expected: str) -> NoReturn:
        raise MismatchError(
            f"{place.name} cannot be read as one with {self.places[0].name}: {path_text(path)} {what}, "
            f"where the first place has: {path_text(path)} {expected}",
            hint="select() what all places have, or cast and save those that differ",
        )


def _encoded(value: NonTensor) -> dict[str, Any]:
    if not isinstance(value, NonTensorData):
        return pack(value.flat(), value.batch_size)
    leaves = pack([value.data], torch.Size((1,)))
    return {**leaves, SPANS: leaves[SPANS].reshape(2).expand(*value.batch_size, 2)}


def _stacked(place: Place, path: Path) -> UnsupportedError:
    what = f"the lazy stack {path_text(path)} of {place.name}" if path else f"the lazy stack {place.name}"
    return UnsupportedError(
        f"{what} has its rows in elements of their own, which are not concatenated",
        url=place.name,
        hint="open the places one by one: tdstore.lazy_stack() of their elements is one stack",
    )


def _kind(entry: Entry | None) -> str:
    match entry:
        case Leaf():
            return "a tensor"
        case NestedTensor():
            return "a nested tensor"
        case SubGroup():
            return "a TensorDict"
        case Unbatched():
            return "an unbatched tensor"
    return "a value that is not a tensor"


def _batch(record: Group) -> str:
    return f"has the batch size {['*', *(record.batch_size or ())[1:]]}".replace("'", "")


def _row(spec: LeafSpec) -> str:
    return f"is {spec.dtype} {list(spec.shape[1:])} in each row"


def _whole(spec: LeafSpec) -> str:
    return f"is {spec.dtype} {list(spec.shape)} for all rows"


def _ragged(record: Any) -> str:
    return f"is a nested tensor {record['layout']} of rows {record['shape'][1:]}"
