"""Sealed documents: one encoding, one check of limits on both ways, and a strict way back."""

from __future__ import annotations

import msgspec
import pytest

from tdstore.errors import CorruptStoreError, InvalidArgumentError, UnsupportedError
from tdstore.header import MAX_DEPTH
from tdstore.storekit.documents import SealedDocument, seal


class Leaf(msgspec.Struct, forbid_unknown_fields=True):
    path: tuple[str, ...]


class Index(msgspec.Struct, forbid_unknown_fields=True):
    leaves: list[Leaf]


INDEX = SealedDocument(Index, {b'"path":': (3, "leaves")}, what="the index", hint="restore it", ascii=True)
OTHER = SealedDocument(Index, {}, tag=b"TDX")


def index(count: int) -> Index:
    return Index([Leaf((f"ä{number}",)) for number in range(count)])


@pytest.mark.parametrize("count", [0, 1, 3])
def test_there_and_back(count: int) -> None:
    data = INDEX.encode(index(count), [leaf.path for leaf in index(count).leaves], url="runs/1")
    assert data.isascii() and data.startswith(b"TDS1 ")
    assert INDEX.decode(data, url="runs/1") == index(count)


def test_what_a_reader_refuses_is_not_written() -> None:
    with pytest.raises(
        InvalidArgumentError, match="runs/1 would have a manifest that cannot be read: more than 3 leaves"
    ):
        INDEX.encode(index(4), (), url="runs/1")
    with pytest.raises(CorruptStoreError, match="runs/1: the index has more than 3 leaves"):
        INDEX.decode(seal(msgspec.json.encode(index(4))), url="runs/1")
    with pytest.raises(InvalidArgumentError, match=f"nested {MAX_DEPTH + 1} levels deep; the limit is {MAX_DEPTH}"):
        INDEX.encode(index(1), [("a",) * (MAX_DEPTH + 1)], url="runs/1")


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "does not start as a manifest"),
        (b"TDS1 00000000\n{}", "its checksum is"),
        (seal(b"{}"), "the index is not readable: .*leaves"),
        (seal(b'{"leaves":[],"more":1}'), "the index is not readable: .*more"),
        (seal(b'{"leaves":[' + b"[" * 100_000), "the index is not readable"),
        (OTHER.encode(Index([]), (), url="runs/1"), "does not start as a manifest"),
    ],
)
def test_damage_is_refused(data: bytes, reason: str) -> None:
    with pytest.raises(CorruptStoreError, match=f"runs/1: .*{reason}") as caught:
        INDEX.decode(data, url="runs/1")
    assert caught.value.hint == "restore it"


def test_a_tag_of_its_own_and_a_newer_version() -> None:
    data = OTHER.encode(index(2), (), url="runs/1")
    assert data.startswith(b"TDX1 ") and OTHER.decode(data, url="runs/1") == index(2)
    with pytest.raises(UnsupportedError, match="format version 2"):
        OTHER.decode(data.replace(b"TDX1", b"TDX2", 1), url="runs/1")
