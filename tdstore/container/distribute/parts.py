"""Parts of a dataset that many writers make at the same place, and one manifest of them all. No data is copied."""

from __future__ import annotations

import builtins
from collections.abc import Iterator, Sequence

import msgspec
import numpy as np

from tdstore.bytestore.manifest import Document, LeafRecord, new_generation
from tdstore.dtypes import NAME_TO_DTYPE
from tdstore.engine import Blob, Buffer, Engine, EngineCap, Entry
from tdstore.errors import MismatchError
from tdstore.header import Group, Header
from tdstore.index.ranges import Range
from tdstore.storekit.documents import NAME
from tdstore.types import Path, path_text

PARTS = "build/"
"""Folder of the manifests of parts, and of the plan, until the manifest of the whole is there."""


def part_name(number: int) -> str:
    """Return the name of the manifest of a part.

    Args:
        number: the number of the part, from 0; parts are in this order.
    """
    return f"{PARTS}{number:08d}.json"


class PartEngine(Engine):
    """An engine that keeps the manifest under another name, so that data objects of many parts lie side by side.

    Args:
        inner: the engine of the place.
        name: the manifest of the part.
    """

    def __init__(self, inner: Engine, name: str) -> None:
        self.inner = inner
        self.name = name
        self.url = inner.url

    def _key(self, key: str) -> str:
        return self.name if key == NAME else key

    @property
    def can(self) -> EngineCap:
        """The abilities of the inner engine."""
        return self.inner.can

    @property
    def lanes(self) -> int:
        """How many objects of the inner engine travel side by side."""
        return self.inner.lanes

    def conditional(self) -> bool:
        """Check whether the inner engine has conditional puts."""
        return self.inner.conditional()

    def probed(self) -> tuple[bool, ...] | None:
        """Return what was found out about the server, as `Engine.probed` does."""
        return self.inner.probed()

    def accept_probed(self, found: tuple[bool, ...]) -> None:
        """Accept what another process found out, as `Engine.accept_probed` does."""
        self.inner.accept_probed(found)

    def sweep(self) -> None:
        """Remove what killed processes left, as `Engine.sweep` does."""
        self.inner.sweep()

    def get(self, key: str, limit: int | None = None) -> Blob:
        """Read an object, as `Engine.get` does."""
        return self.inner.get(self._key(key), limit)

    def get_ranges(self, ranges: Sequence[Range]) -> list[Buffer]:
        """Read ranges, as `Engine.get_ranges` does."""
        return self.inner.get_ranges(ranges)

    def size(self, key: str) -> int:
        """Return the size of an object, as `Engine.size` does."""
        return self.inner.size(self._key(key))

    def put(self, key: str, data: Buffer, *, if_absent: bool = False, if_match: str | None = None) -> str | None:
        """Write an object, as `Engine.put` does."""
        return self.inner.put(self._key(key), data, if_absent=if_absent, if_match=if_match)

    def put_many(self, items: Sequence[tuple[str, Buffer]]) -> None:
        """Write objects, as `Engine.put_many` does."""
        self.inner.put_many([(self._key(key), data) for key, data in items])

    def put_parts(self, items: Sequence[tuple[str, Sequence[Buffer]]]) -> None:
        """Write objects, as `Engine.put_parts` does."""
        self.inner.put_parts([(self._key(key), parts) for key, parts in items])

    def delete(self, keys: Sequence[str]) -> None:
        """Delete objects, as `Engine.delete` does."""
        self.inner.delete([self._key(key) for key in keys])

    def list(self, prefix: str = "") -> Iterator[Entry]:
        """List objects, as `Engine.list` does."""
        return self.inner.list(prefix)

    def where(self, key: str) -> str:
        """Return the URL of an object, as `Engine.where` does."""
        return self.inner.where(self._key(key))

    def close(self) -> None:
        """Close the inner engine, as `Engine.close` does."""
        self.inner.close()


def join_parts(parts: Sequence[Document], url: str) -> Document:
    """Return one document whose rows are those of the parts, in order.

    Args:
        parts: documents whose leaves all begin with the rows of their part; at least one.
        url: the place, for messages.

    Raises:
        MismatchError: a part has other leaves or groups, dtypes or shapes than the first.
    """
    first = parts[0]
    known = {leaf.path: leaf for leaf in first.leaves}
    rows = [_rows(part) for part in parts]
    extents: dict[Path, builtins.list[np.ndarray[tuple[int, ...], np.dtype[np.int64]]]] = {path: [] for path in known}
    pieces = []
    before = dict.fromkeys(known, 0)
    objects = piece_count = 0
    for number, part in enumerate(parts):
        _check_same(first, part, known, f"{url}: the rows of task {number} are unlike those of task 0")
        at = 0
        for leaf in part.leaves:
            mine = part.extents[at : at + leaf.extents].reshape(-1, 4)
            at += leaf.extents
            extents[leaf.path].append(mine + np.array([before[leaf.path], 0, piece_count, 0], np.int64))
            before[leaf.path] += _nbytes(leaf)
        pieces.append(part.pieces.reshape(-1, 5) + np.array([objects, 0, 0, 0, 0], np.int64))
        objects += len(part.objects)
        piece_count += len(part.pieces)
    tables = {path: np.concatenate(found) for path, found in extents.items()}
    total = sum(rows)
    leaves = [
        msgspec.structs.replace(leaf, shape=(total, *leaf.shape[1:]), extents=len(tables[leaf.path]))
        for leaf in first.leaves
    ]
    return msgspec.structs.replace(
        first,
        generation=new_generation(),
        header=Header({path: _sized(group, total) for path, group in first.header.groups.items()}),
        objects=[record for part in parts for record in part.objects],
        pieces=np.concatenate(pieces),
        leaves=leaves,
        extents=np.concatenate([np.zeros((0, 4), np.int64), *tables.values()]),
        retired=(),
    )


def _rows(part: Document) -> int:
    size = part.header.groups[()].batch_size
    assert size  # `build` writes no part without rows
    return size[0]


def _nbytes(leaf: LeafRecord) -> int:
    return int(np.prod(leaf.shape, dtype=np.int64)) * NAME_TO_DTYPE[leaf.dtype].itemsize


def _sized(group: Group, rows: int) -> Group:
    assert group.batch_size
    return msgspec.structs.replace(group, batch_size=(rows, *group.batch_size[1:]))


def _check_same(first: Document, part: Document, known: dict[Path, LeafRecord], what: str) -> None:
    found = {leaf.path: leaf for leaf in part.leaves}
    for path in [*known, *found]:
        one, other = known.get(path), found.get(path)
        if one is None or other is None:
            raise MismatchError(f"{what}: only one of them has {path_text(path)}")
        if (one.dtype, one.shape[1:]) != (other.dtype, other.shape[1:]):
            raise MismatchError(
                f"{what}: {path_text(path)} is {other.dtype} {list(other.shape[1:])}, not {one.dtype} "
                f"{list(one.shape[1:])}"
            )
    groups = [{path: _sized(g, 0) for path, g in d.header.groups.items()} for d in (first, part)]
    if groups[0] != groups[1]:
        raise MismatchError(f"{what}: other batch sizes, names, devices or orders of keys")
