"""One leaf: a table with a row of bytes for each row of the leaf that was ever written."""

from __future__ import annotations

import json
import sqlite3
import zlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from tdstore.dtypes import numpy_dtype, to_numpy
from tdstore.errors import CorruptStoreError
from tdstore.types import LeafSpec, StoreIndex

Array = np.ndarray[Any, Any]


class Leaf(NamedTuple):
    """A leaf, and the name of its table."""

    spec: LeafSpec
    table: str

    @property
    def rows(self) -> int:
        """Rows of the table when all are written. A leaf without dimensions is one row."""
        return self.spec.shape[0] if self.spec.shape else 1

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return self.spec.nbytes // self.rows if self.rows else 0

    def empty(self, count: int) -> Array:
        """Make rows that hold the fill value."""
        fill = to_numpy(torch.full((), self.spec.fill_value, dtype=self.spec.dtype))
        return np.full((count, *self.spec.shape[1:]), fill, numpy_dtype(self.spec.dtype))

    def numbers(self, index: StoreIndex) -> Array:
        """Return the numbers of the rows that the first term of an index selects."""
        first = index[0] if index else slice(None)
        return np.arange(*first.indices(self.rows)) if isinstance(first, slice) else first.numpy()

    def selected(self, index: StoreIndex) -> tuple[int, ...]:
        """Return the shape of the rows that an index needs, without a list of them."""
        first = index[0] if index else slice(None)
        count = len(range(self.rows)[first]) if isinstance(first, slice) else len(first)
        return count, *self.spec.shape[1:]

    # -- SQL ---------------------------------------------------------------------------------
    def make(self, sql: sqlite3.Connection) -> None:
        """Make the table: no row is there yet, and a row that is not there reads as the fill value."""
        sql.execute(f"CREATE TABLE {self.table} (row INTEGER PRIMARY KEY, bytes BLOB, crc INTEGER) STRICT")

    def read(self, sql: sqlite3.Connection, index: StoreIndex, where: str) -> Array:
        """Read `leaf[index]`."""
        rows = self.fetch(sql, self.numbers(index), where)
        return rows[inner(index)] if self.spec.shape else rows.reshape(())

    def write(self, sql: sqlite3.Connection, index: StoreIndex, value: Array, where: str) -> None:
        """Write `leaf[index]`. Where the index goes further than to rows, the rest of each row is read first."""
        numbers = self.numbers(index)
        if len(index) > 1:
            rows = self.fetch(sql, numbers, where)
            rows[inner(index)] = value
        else:
            rows = value.reshape(len(numbers), *self.spec.shape[1:])
        self.put(sql, numbers, rows)

    def fetch(self, sql: sqlite3.Connection, numbers: Array, where: str) -> Array:
        """Read rows by their numbers, in any order, each as often as it is named."""
        distinct, places = np.unique(numbers, return_inverse=True)
        found = self.empty(len(distinct))
        raw = found.reshape(len(distinct), -1).view(np.uint8) if found.size else found
        place_of = {number: place for place, number in enumerate(distinct.tolist())}
        for number, data, crc in self._select(sql, distinct):
            if not isinstance(data, bytes) or len(data) != self.row_bytes or zlib.crc32(data) != crc:
                raise CorruptStoreError(f"row {number} of {where} is damaged", url=where)
            raw[place_of[number]] = np.frombuffer(data, np.uint8)
        found = found[places]
        # A file may hold any byte, and a bool of another one than 0 and 1 breaks torch.
        return np.asarray(found.view(np.uint8) != 0) if found.dtype == bool else found

    def _select(self, sql: sqlite3.Connection, distinct: Array) -> Iterator[tuple[int, bytes, int]]:
        if not len(distinct) or not self.row_bytes:
            return iter(())
        first, last = int(distinct[0]), int(distinct[-1])
        query = f"SELECT row, bytes, crc FROM {self.table} WHERE row "
        if last - first == len(distinct) - 1:
            return sql.execute(query + "BETWEEN ? AND ?", (first, last))
        return sql.execute(query + "IN (SELECT value FROM json_each(?))", (json.dumps(distinct.tolist()),))

    def put(self, sql: sqlite3.Connection, numbers: Array, rows: Array) -> None:
        """Write rows by their numbers."""
        blobs = (row.tobytes() for row in rows)
        new = ((number, data, zlib.crc32(data)) for number, data in zip(numbers.tolist(), blobs, strict=True))
        sql.executemany(f"INSERT OR REPLACE INTO {self.table} VALUES (?, ?, ?)", new)

    def fault(self, sql: sqlite3.Connection) -> str:
        """Say what is damaged; nothing, if nothing is."""
        for number, data, crc in sql.execute(f"SELECT row, bytes, crc FROM {self.table} WHERE row < ?", (self.rows,)):
            if not isinstance(data, bytes) or len(data) != self.row_bytes or zlib.crc32(data) != crc:
                return f"row {number} does not have its checksum"
        return ""


def inner(index: StoreIndex) -> tuple[Any, ...]:
    """Return an index for the rows that the first term of `index` selected: the terms after it."""
    return slice(None), *(term if isinstance(term, slice) else term.numpy() for term in index[1:])
