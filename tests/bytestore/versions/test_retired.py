"""The list of retired objects: commits that change little of it against a plain list."""

from __future__ import annotations

import random
from collections.abc import Iterable

import msgspec
import numpy as np
import pytest

from tdstore.bytestore.manifest import (
    RECENT,
    Document,
    ObjectRecord,
    Retired,
    RetiredList,
    decode_objects,
    encode_objects,
    new_generation,
)
from tdstore.bytestore.versions.records import following, split_expired
from tdstore.header import Header


def naming(names: Iterable[str]) -> Document:
    objects = [ObjectRecord(name, 8) for name in names]
    return Document(new_generation(), Header(), objects, np.empty((0, 5), int), [], np.empty((0, 4), int))


def test_many_commits_retire_and_expire_as_a_plain_list_would():
    """Some 2,000 commits, of which each replaces an object, over more than `keep_old` seconds."""
    draw = random.Random(0)
    document, plain, now = naming(["data/0.bin"]), [], 1000.0
    for number in range(1, 2000):
        now += draw.choice((0.0, 0.5, 0.5, 3.0))
        fresh = naming([f"data/{number}.bin"])
        if number % 700 == 0:  # as when versions were dropped
            extra = [Retired(f"data/{number}{i}f.bin", 9, int(now), i) for i in range(0, 900, 9)]
            document = msgspec.structs.replace(document, retired=[*document.retired, *extra])
            plain += extra
        if number % 650 == 0:
            document = decode_objects(encode_objects(document, url="x"), url="x")
        if number % 901 == 0:  # an object that is in use again
            fresh = naming([plain[-1].name, f"data/{number}.bin"])
        gone = {record.name for record in document.objects} - {record.name for record in fresh.objects}
        plain = [item for item in plain if item.name not in {record.name for record in fresh.objects}]
        plain += [Retired(name, 8, int(now)) for name in gone]
        due = {item.name for item in plain if item.since + (item.stay if item.stay >= 0 else 300.0) <= int(now)}
        plain = [item for item in plain if item.name not in due]
        document, expired = following(fresh, document, keep_old=300.0, now=now)
        assert sorted(expired) == sorted(due)
        assert len(document.retired) == len(plain)
        if number % 50 == 0:
            assert {item.name: item for item in document.retired} == {item.name: item for item in plain}
            assert list(document.retired) == list(document.retired[:])
            data = encode_objects(document, url="x")
            assert data == encode_objects(msgspec.structs.replace(document, retired=list(document.retired)), url="x")
            assert decode_objects(data, url="x").retired == list(document.retired)


def test_a_commit_encodes_few_retired_objects_anew():
    retired = RetiredList.of([Retired(f"data/{number}.bin", 1, 5) for number in range(5000)])
    for number in range(5000, 5200):
        retired = retired.plus([Retired(f"data/{number}.bin", 1, 6)])
        assert len(retired) == number + 1 and len(retired.encodable()) <= RECENT + 1
        kept, expired = split_expired(retired, keep_old=10.0, now=14.9)
        assert kept is retired and not expired and retired.without({"data/a.bin"}) is retired
    kept, expired = split_expired(retired, keep_old=10.0, now=15.0)
    assert len(kept) == 200 and len(expired) == 5000


@pytest.mark.parametrize("count", [0, 1, RECENT, RECENT + 1])
def test_the_newest_are_first(count):
    items = [Retired(f"data/{number}.bin", 1, 5) for number in range(count)]
    found = RetiredList.of(()).plus(items)
    assert list(found) == items == list(found[:])
    assert len(RetiredList.of(items[1:]).plus(items[:1]).encodable()) == min(count, 2)
