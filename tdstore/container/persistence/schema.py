"""Schemas: what `from_schema` allocates, entry by entry, before there is any data."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import msgspec
import torch
from torch import Tensor

from tdstore.arguments import refuse_type
from tdstore.container.core.paths import entry_path
from tdstore.container.values.nontensor import NonTensor, NonTensorData, NonTensorStack
from tdstore.container.varlen.columns import column_record, specs_of
from tdstore.container.varlen.nested_leaves import SPANS, VALUES
from tdstore.container.varlen.nested_rows import NestedForm, empty_rows
from tdstore.errors import BatchSizeError, InvalidArgumentError, InvalidTypeError, OptionError
from tdstore.storekit.foreign_strings import COLUMN_FROM, TEXT, text_of
from tdstore.storekit.foreign_strings import SPANS as OFFSETS
from tdstore.types import LeafSpec, Path, Write, path_text


class RaggedSpec(msgspec.Struct, frozen=True):
    """A jagged tensor. Its rows have no elements when it is allocated."""

    row: tuple[int, ...]
    """The shape of a row: -1 for the dimension in which rows differ."""
    dtype: torch.dtype


class ValueSpec(msgspec.Struct, frozen=True):
    """Values that are not tensors."""

    value: NonTensorData | None
    """The value of the batch; None: one value per row, None until it is written."""


_OFFSETS_OF_A_ROW = 16
"""The bytes of a row of a jagged tensor, and of a value, that is empty."""
SchemaEntry = LeafSpec | RaggedSpec | ValueSpec


class Allocation(msgspec.Struct, frozen=True):
    """What a store needs for the entries of a schema.

    Args:
        specs: the leaves.
        values: the value records, by entry.
        writes: what is written before the first commit.
    """

    specs: dict[Path, LeafSpec]
    values: dict[Path, Any]
    writes: list[Write]


def flat_schema(schema: Mapping[Any, Any], prefix: Path = ()) -> dict[Path, SchemaEntry]:
    """Return the entries of a schema by path, without the batch size.

    Args:
        schema: `key -> entry`. An entry is a `LeafSpec`, a `(shape, dtype)` pair, a dtype, the type `str` or `object`,
            a `NonTensorData`, or a mapping: a group.
        prefix: the path of the mapping itself.

    Raises:
        InvalidTypeError: an entry is none of these. InvalidArgumentError: a key comes twice. Both name the key.

    Example:
        >>> flat_schema({"obs": ((4,), "uint8"), "next": {"tokens": ((-1,), "int64")}})
        {('obs',): LeafSpec((4,), 'uint8'), ('next', 'tokens'): RaggedSpec(row=(-1,), dtype=torch.int64)}
    """
    if not isinstance(schema, Mapping):
        raise refuse_type("a schema", "a dict of keys and entries", schema)
    out: dict[Path, SchemaEntry] = {}
    for key, value in schema.items():
        path = (*prefix, *entry_path(key))
        found = flat_schema(value, path) if isinstance(value, Mapping) else {path: _entry(path, value)}
        for leaf, spec in found.items():
            if leaf in out:
                raise InvalidArgumentError(f"the schema has the key {path_text(leaf)} twice")
            out[leaf] = spec
    for path in out:
        for i in range(1, len(path)):
            if path[:i] in out:
                raise InvalidArgumentError(f"the schema has {path_text(path[:i])} as a leaf and as a group")
    return out


def _entry(path: Path, entry: Any) -> SchemaEntry:
    if isinstance(entry, LeafSpec):
        return entry
    if entry is str or entry is object:
        return ValueSpec(None)
    if isinstance(entry, NonTensorData):
        return ValueSpec(NonTensorData(entry.data))
    try:
        if isinstance(entry, (tuple, list)) and len(entry) == 2 and not isinstance(entry[1], int):
            shape = (entry[0],) if isinstance(entry[0], int) else tuple(entry[0])
            if shape.count(-1) == 1:
                return RaggedSpec(shape, LeafSpec([n for n in shape if n != -1], entry[1]).dtype)
            return LeafSpec(shape, entry[1])
        return LeafSpec((), entry)
    except (TypeError, ValueError) as error:
        raise InvalidTypeError(
            f"schema entry {path_text(path)}: expected (shape, dtype), a dtype or a LeafSpec, not {entry!r} ({error})",
            hint="one dimension of the shape may be -1 (rows of different lengths); "
            "str or object stands for one value per row",
        ) from None


def _ragged(path: Path, spec: RaggedSpec, batch: torch.Size) -> NestedForm:
    if not batch:
        raise BatchSizeError(
            f"schema entry {path_text(path)}: {spec.row} is ragged, which needs rows", hint="pass batch_size=[n]"
        )
    dim = len(batch) + spec.row.index(-1)
    return NestedForm(torch.jagged, dim, [*batch[1:], *spec.row], spec.dtype)


def check_sizes(entries: Mapping[Path, SchemaEntry], batch: torch.Size) -> None:
    """Refuse entries with more bytes than a tensor can have.

    Raises:
        BatchSizeError: names the entry.
    """
    rows = math.prod(batch)
    for path, entry in entries.items():
        each = entry.nbytes if isinstance(entry, LeafSpec) else _OFFSETS_OF_A_ROW
        if rows * each >= 2**63:
            raise BatchSizeError(f"schema entry {path_text(path)}: no tensor has {rows} rows of {each} bytes")


def allocation(entries: Mapping[Path, SchemaEntry], batch: torch.Size) -> Allocation:
    """Plan the leaves and the value records of the entries of a schema.

    Args:
        entries: as `flat_schema` gives them.
        batch: the batch size.

    Raises:
        BatchSizeError: a ragged entry without a batch dimension.
    """
    plan = Allocation({}, {}, [])
    for path, entry in entries.items():
        match entry:
            case LeafSpec():
                plan.specs[path] = entry.replace(shape=(*batch, *entry.shape))
            case RaggedSpec():
                form = _ragged(path, entry, batch)
                about = {"layout": "jagged", "shape": [batch[0], *form.row], "dim": form.dim}
                plan.values[path] = {"nested": about}
                below = [n for n in form.row if n != -1]
                plan.specs[(*path, VALUES)] = LeafSpec((0, *below), entry.dtype)
                plan.specs[(*path, SPANS)] = LeafSpec((batch[0], 2), torch.int64)
            case ValueSpec(None) if math.prod(batch) >= COLUMN_FROM:
                text = text_of(b"")
                plan.values[path] = column_record(text)
                leaves = {OFFSETS: torch.empty((*batch, 2), dtype=torch.int64, device="meta"), TEXT: text}
                plan.specs.update(specs_of(leaves, path))  # the fill value of offsets stands for None
                plan.writes.append(Write((*path, TEXT), (), text))
            case ValueSpec():
                plan.values[path] = _value(entry, batch).to_json()
    return plan


def _value(entry: ValueSpec, batch: torch.Size) -> NonTensor:
    if entry.value is None:
        return NonTensorStack._make([None], torch.zeros(batch, dtype=torch.int64, device="cpu"))
    return NonTensorData(entry.value.data, batch)


def in_memory_entry(path: Path, entry: SchemaEntry, batch: torch.Size, device: Any) -> Tensor | NonTensor:
    """Allocate one entry in memory.

    Raises:
        OptionError: a leaf has options, which are for backends. BatchSizeError: as `allocation`.
    """
    if isinstance(entry, ValueSpec):
        return _value(entry, batch)
    if isinstance(entry, RaggedSpec):
        return empty_rows(_ragged(path, entry, batch), batch[0]).to(device or "cpu")
    if entry.options:
        raise OptionError(f"an in-memory leaf has no option {next(iter(entry.options))!r} (entry {path_text(path)})")
    return torch.full((*batch, *entry.shape), entry.fill_value, dtype=entry.dtype, device=device)
