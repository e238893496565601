"""Decode the entries of a store into one class per kind, once, from the header and the specs.

`StoreHandle.entries[path]` gives one of them, or None. What an entry needs is asked by `match`; records of the header
are looked at here, and in the checks at opening.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import msgspec

from tdstore.container.core.container import GROUP, LEAF, VALUE
from tdstore.container.entries.unbatched import LEAF as UNBATCHED
from tdstore.container.varlen.columns import column_leaves, is_column
from tdstore.container.varlen.nested_leaves import VALUES, Nested, check_nested, is_nested
from tdstore.container.varlen.reading import check_column
from tdstore.errors import CorruptStoreError
from tdstore.header import Group
from tdstore.storekit.foreign_strings import Refusal
from tdstore.types import LeafSpec, Path, path_text


class Leaf(msgspec.Struct, frozen=True, gc=False):
    """A tensor with rows: one leaf of the store."""

    kind: ClassVar[str] = LEAF
    path: Path

    @property
    def leaves(self) -> tuple[Path, ...]:
        """The paths of the leaves that hold it."""
        return (self.path,)


class SubGroup(msgspec.Struct, frozen=True, gc=False):
    """A nested TensorDict, or a lazy stack, with entries of its own."""

    kind: ClassVar[str] = GROUP
    leaves: ClassVar[tuple[Path, ...]] = ()
    path: Path


class Column(msgspec.Struct, frozen=True):
    """Values per row in two leaves: the offsets of each, and the bytes of all."""

    kind: ClassVar[str] = VALUE
    path: Path

    @property
    def leaves(self) -> tuple[Path, ...]:
        """The paths of the leaves that hold it: spans, then text."""
        return column_leaves(self.path)


class NestedTensor(msgspec.Struct, frozen=True):
    """A nested tensor in two or three leaves."""

    kind: ClassVar[str] = LEAF
    path: Path
    layout: Nested

    @property
    def leaves(self) -> tuple[Path, ...]:
        """The paths of the leaves that hold it: values first."""
        return self.layout.leaves


class Unbatched(msgspec.Struct, frozen=True):
    """A tensor without rows in a leaf."""

    kind: ClassVar[str] = VALUE
    path: Path

    @property
    def leaves(self) -> tuple[Path, ...]:
        """The path of the leaf that holds it."""
        return ((*self.path, UNBATCHED),)


class Inline(msgspec.Struct, frozen=True):
    """A value, or a few values per row, in the header itself."""

    kind: ClassVar[str] = VALUE
    leaves: ClassVar[tuple[Path, ...]] = ()
    path: Path
    record: Any
    unbatched: bool
    """Whether the value is an unbatched tensor."""


class Refused(msgspec.Struct, frozen=True):
    """An entry that the store could not read. The caller is told when it asks for it."""

    kind: ClassVar[str] = VALUE
    leaves: ClassVar[tuple[Path, ...]] = ()
    path: Path
    record: Refusal

    @property
    def why(self) -> str:
        """The reason why the entry cannot be read."""
        return str(self.record["refused"])


Entry = Leaf | SubGroup | Column | NestedTensor | Unbatched | Inline | Refused


ValueEntry = Column | NestedTensor | Unbatched | Inline | Refused


def value_entry(
    path: Path, record: Any, specs: Mapping[Path, LeafSpec], url: str, batch: Sequence[int] | None = None
) -> ValueEntry:
    """Decode a value record of a header: nothing else looks into one to tell what it is.

    Args:
        path: the entry.
        record: its value record.
        specs: the leaves of the store.
        url: where it is, for messages.
        batch: the batch size of its group, for a record that was not looked at yet.

    Raises:
        CorruptStoreError: with `batch`, the leaves that the record speaks of are not there, or do not fit.
    """
    if isinstance(record, Refusal):
        return Refused(path, record)
    if is_column(record):
        if batch is not None:
            check_column(path, record, specs, batch, url)
        return Column(path)
    if is_nested(record):
        if batch is not None:
            check_nested(path, record, specs, batch, url)
        return NestedTensor(path, Nested(path, record, specs[(*path, VALUES)], url))
    unbatched = isinstance(record, dict) and "unbatched" in record
    if not unbatched or record["unbatched"] != 1:
        return Inline(path, record, unbatched)
    if batch is not None and (*path, UNBATCHED) not in specs:
        raise CorruptStoreError(f"the tensor {path_text(path)} of {url} is missing", url=url)
    return Unbatched(path)


class Entries(dict[Path, Entry | None]):
    """The entries of a catalogue by path; None where nothing is. Values are decoded when they are first asked for.

    Args:
        groups: the group records. Neither mapping gains or loses an entry afterwards.
        specs: the leaves.
        url: where they are, for messages.
        values: entries that are decoded already.

    Example:
        >>> entries = Entries({(): Group(batch_size=(3,), keys=("a", "b"), values={"b": {"data": 1}})},
        ...                   {("a",): LeafSpec((3,), "int64")}, "?")
        >>> entries[("a",)], entries[("b",)].kind, entries[("c",)]
        (Leaf(path=('a',)), 'value', None)
    """

    __slots__ = ("_groups", "_specs", "_url")

    def __init__(
        self,
        groups: Mapping[Path, Group],
        specs: Mapping[Path, LeafSpec],
        url: str,
        values: Mapping[Path, ValueEntry] | None = None,
    ) -> None:
        super().__init__(values or {})
        self.update(zip(groups, map(SubGroup, groups), strict=True))
        self.update(zip(specs, map(Leaf, specs), strict=True))
        self._groups, self._specs, self._url = groups, specs, url

    def __missing__(self, path: Path) -> Entry | None:
        group = self._groups.get(path[:-1]) if path else None
        if group is None or path[-1] not in group.values:
            return None
        found = self[path] = value_entry(path, group.values[path[-1]], self._specs, self._url)
        return found
