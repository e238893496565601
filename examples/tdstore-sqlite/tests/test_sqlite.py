"""What the kit cannot know: databases of others, catalogues that lie, and what SQL sees."""

import json
import sqlite3
import zlib

import pytest
import torch
from tdstore.errors import CorruptStoreError, StoreBusyError, StoreIOError, UnsupportedError
from tdstore.header import Group, Header
from tdstore.types import LeafSpec, Read, Write

from tdstore_sqlite.store import open_sqlite

HEADER = Header({(): Group(batch_size=(4,), keys=("a",))})


@pytest.fixture
def path(tmp_path):
    with open_sqlite(tmp_path / "x.sqlite", mode="w") as store:
        store.create({("a",): LeafSpec((4, 2), "int64", fill_value=7)})
        store.write([Write(("a",), (slice(1, 3, 1),), torch.tensor([[1, 2], [3, 4]]))])
        store.save_header(HEADER)
    return tmp_path / "x.sqlite"


def rows(store):
    return store.read([Read(("a",))])[0].tolist()


def document(path, change):
    """Change the catalogue, and give it the right checksum."""
    sql = sqlite3.connect(path)
    plain = json.loads(sql.execute("SELECT document FROM tdstore").fetchone()[0])
    text = change(plain)
    text = json.dumps(plain).encode() if text is None else text
    sql.execute("UPDATE tdstore SET document = ?, crc = ?", (text, zlib.crc32(text)))
    sql.commit()
    sql.close()


def test_rows_that_were_not_written_take_no_room(path):
    sql = sqlite3.connect(path)
    (table,) = [name for (name,) in sql.execute("SELECT name FROM sqlite_master") if name.startswith("rows_")]
    assert sql.execute(f"SELECT row, hex(bytes) FROM {table}").fetchall() == [
        (1, "01000000000000000200000000000000"),
        (2, "03000000000000000400000000000000"),
    ]
    sql.close()
    with open_sqlite(path) as store:
        assert rows(store) == [[7, 7], [1, 2], [3, 4], [7, 7]]


@pytest.mark.parametrize("mode", ["r", "r+", "a"])
def test_a_database_of_another_program(tmp_path, mode):
    sql = sqlite3.connect(tmp_path / "x.sqlite")
    sql.execute("CREATE TABLE places (url TEXT)")
    sql.commit()
    sql.close()
    before = (tmp_path / "x.sqlite").read_bytes()
    with pytest.raises(CorruptStoreError, match="another program"):
        open_sqlite(tmp_path / "x.sqlite", mode=mode)
    assert (tmp_path / "x.sqlite").read_bytes() == before


LIES = {
    "statement": lambda d: d["leaves"][0].__setitem__(4, "tdstore; DROP TABLE tdstore"),
    "table-of-no-kind": lambda d: d["leaves"][0].__setitem__(4, 3),
    "huge-and-empty": lambda d: d["leaves"][0].__setitem__(2, [1 << 62, 1 << 62, 0]),
    "negative": lambda d: d["leaves"][0].__setitem__(2, [-1]),
    "unknown-dtype": lambda d: d["leaves"][0].__setitem__(1, "int65"),
    "key-of-no-kind": lambda d: d["leaves"][0].__setitem__(0, [1]),
    "no-key": lambda d: d["leaves"][0].__setitem__(0, []),
    "record-of-no-kind": lambda d: d.__setitem__("leaves", [3]),
    "no-leaves": lambda d: d.pop("leaves") and None,
    "no-json": lambda d: b"{",
    "no-object": lambda d: b"[]",
}


@pytest.mark.parametrize("lie", LIES)
def test_a_catalogue_that_lies(path, lie):
    document(path, LIES[lie])
    with pytest.raises(CorruptStoreError, match="x.sqlite"):
        open_sqlite(path)


def test_a_catalogue_without_its_checksum(path):
    sql = sqlite3.connect(path)
    sql.execute("UPDATE tdstore SET crc = crc + 1")
    sql.commit()
    sql.close()
    with pytest.raises(CorruptStoreError, match="checksum"):
        open_sqlite(path)


def test_a_row_of_another_size(path):
    document(path, lambda d: d["leaves"][0].__setitem__(2, [4, 3]))
    with open_sqlite(path) as store, pytest.raises(CorruptStoreError, match="row 1 of 'a'"):
        rows(store)


def test_more_than_there_is_memory_for(path):
    document(path, lambda d: d["leaves"][0].__setitem__(2, [1 << 50, 2]))
    with open_sqlite(path) as store:
        with pytest.raises(StoreIOError, match="no memory for 'a'"):
            rows(store)
        read = Read(("a",), (slice(2, 4, 1),))
        assert store.read([read])[0].tolist() == [[3, 4], [7, 7]]


def test_a_row_that_sqlite_cannot_hold(tmp_path):
    with open_sqlite(tmp_path / "x.sqlite", mode="w") as store:
        with pytest.raises(UnsupportedError, match="'a'"):
            store.create({("b",): LeafSpec((1,), "uint8"), ("a",): LeafSpec((1, 1_000_000_001), "uint8")})
        assert list(store.paths()) == []


def test_one_writer_at_a_time(path):
    with open_sqlite(path, mode="r+") as first, open_sqlite(path, mode="r+", lock_timeout=0) as second:
        first.write([Write(("a",), (slice(0, 1, 1),), torch.zeros(1, 2, dtype=torch.int64))])
        with pytest.raises(StoreBusyError, match="x.sqlite"):
            second.write([Write(("a",), (slice(3, 4, 1),), torch.zeros(1, 2, dtype=torch.int64))])
        first.save_header(HEADER)
        with pytest.raises(StoreBusyError, match="open it again"):
            second.delete([("a",)])
    with open_sqlite(path) as store:
        assert rows(store) == [[0, 0], [1, 2], [3, 4], [7, 7]]


def test_a_reader_beside_commits(path):
    with open_sqlite(path) as reader:
        with open_sqlite(path, mode="r+") as writer:
            writer.resize({("a",): 5})
            writer.write([Write(("a",), (slice(3, 5, 1),), torch.ones(2, 2, dtype=torch.int64))])
            assert rows(reader) == [[7, 7], [1, 2], [3, 4], [7, 7]]
            writer.save_header(HEADER)
        assert rows(reader) == [[7, 7], [1, 2], [3, 4], [1, 1]]  # the rows that it knows of
        with open_sqlite(path, mode="w") as writer:
            writer.create({("a",): LeafSpec((4, 2), "int64")})
            writer.save_header(HEADER)
        with pytest.raises(StoreBusyError, match="open it again"):
            rows(reader)


def test_names_with_signs_of_urls(tmp_path):
    for name in ("a?mode=memory.sqlite", "a#b.sqlite", "a%3f.sqlite"):
        with open_sqlite(tmp_path / name, mode="x") as store:
            store.create({("a",): LeafSpec((1,), "int64")})
            store.save_header(HEADER)
        assert (tmp_path / name).stat().st_size
        with open_sqlite(tmp_path / name) as store:
            assert rows(store) == [0]
