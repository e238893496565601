"""The table `tdstore`: one row, with the header, the leaves, and two marks that commits change."""

from __future__ import annotations

import json
import math
import re
import secrets
import sqlite3
import zlib
from collections.abc import Mapping

from tdstore.dtypes import dtype_name
from tdstore.errors import CorruptStoreError
from tdstore.header import Header, header_from_builtins, header_to_builtins
from tdstore.types import LeafSpec, Path
from tdstore.values import decode_value, encode_value

from tdstore_sqlite.database import APPLICATION_ID
from tdstore_sqlite.leaf import Leaf

NAME = re.compile(r"rows_[0-9a-f]{16}")
Catalogue = tuple[Header, dict[Path, Leaf]]


def new_leaf(spec: LeafSpec) -> Leaf:
    """Name a table that no other leaf has, here or in a database that replaces this one."""
    return Leaf(spec, f"rows_{secrets.token_hex(8)}")


def make(sql: sqlite3.Connection) -> None:
    """Make the table in a new database."""
    sql.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    sql.execute(
        "CREATE TABLE tdstore"
        " (one INTEGER PRIMARY KEY, document BLOB, crc INTEGER, structure TEXT, generation TEXT) STRICT"
    )


def save(sql: sqlite3.Connection, header: Header, leaves: Mapping[Path, Leaf]) -> None:
    """Write the header and the leaves, and change the mark of the structure."""
    records = [
        [path, dtype_name(spec.dtype), spec.shape, encode_value(spec.fill_value), table]
        for path, (spec, table) in leaves.items()
    ]
    document = json.dumps({"header": header_to_builtins(header), "leaves": records}).encode()
    row = (1, document, zlib.crc32(document), secrets.token_hex(8), "")
    sql.execute("INSERT OR REPLACE INTO tdstore VALUES (?, ?, ?, ?, ?)", row)


def load(sql: sqlite3.Connection, url: str) -> Catalogue | None:
    """Read the header and the leaves; None if the database is empty. Nothing that it says is believed unchecked."""
    if not sql.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
        return None
    if sql.execute("PRAGMA application_id").fetchone()[0] != APPLICATION_ID:
        raise CorruptStoreError(f"{url} is a SQLite database of another program", url=url)
    document, crc = sql.execute("SELECT document, crc FROM tdstore").fetchone() or (b"", -1)
    if zlib.crc32(document) != crc:
        raise CorruptStoreError(f"{url} is damaged: its catalogue does not have its checksum", url=url)
    try:
        plain = json.loads(document)
        header = header_from_builtins(plain["header"], url=url)
        leaves = {tuple(path): _leaf(*record) for path, *record in plain["leaves"]}
        if not all(path and all(isinstance(part, str) for part in path) for path in leaves):
            raise ValueError("a key is no text")
    except (ValueError, TypeError, KeyError) as error:
        raise CorruptStoreError(f"the catalogue of {url} is damaged: {error}", url=url) from error
    return header, leaves


def _leaf(dtype: str, shape: list[int], fill: object, table: str) -> Leaf:
    # The name of a table becomes a part of statements, so it may be nothing but one of ours.
    if not NAME.fullmatch(table) or math.prod(n or 1 for n in shape) >= 1 << 59:
        raise ValueError(f"the table {table!r} cannot have the shape {shape}")
    return Leaf(LeafSpec(shape, dtype, fill_value=decode_value(fill)), table)


def marks(sql: sqlite3.Connection) -> tuple[str, str]:
    """Return what the last change of structure left here, and what the last commit did."""
    return sql.execute("SELECT structure, generation FROM tdstore").fetchone() or ("", "")


def mark(sql: sqlite3.Connection) -> None:
    """Change the mark of the generation: the last step of a transaction."""
    sql.execute("UPDATE tdstore SET generation = ?", (secrets.token_hex(8),))


def drop_others(sql: sqlite3.Connection, leaves: Mapping[Path, Leaf]) -> None:
    """Drop the tables of all leaves but these."""
    tables = {leaf.table for leaf in leaves.values()}
    for (name,) in sql.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall():
        if NAME.fullmatch(name) and name not in tables:
            sql.execute(f"DROP TABLE {name}")
