"""Checksums of blocks are computed while they are written: the commit reads only the rest, and damage is found."""

from __future__ import annotations

import errno
import os
import random
from pathlib import Path as FsPath
from typing import Any

import pytest
import torch
from h5help import header_of, load
from tdstore_h5.rows.contiguous import RawFile
from tdstore_h5.session import Session
from tdstore_h5.store import open_h5

from tdstore.errors import CorruptStoreError, StoreError
from tdstore.types import LeafSpec, Read, Write

ROWS, WIDE = 64, 8192
"""Rows of 32 KiB, so that each is a grain."""
VALUE = torch.arange(ROWS * WIDE, dtype=torch.int32).view(ROWS, WIDE)


def made(place: FsPath, **leaves: torch.Tensor) -> dict[tuple[str, ...], torch.Tensor]:
    values = {(name,): value for name, value in leaves.items()}
    with open_h5(place, mode="w", durable="none") as store:
        store.create({path: LeafSpec(tuple(v.shape), v.dtype) for path, v in values.items()})
        store.write([Write(path, (), v) for path, v in values.items()])
        store.save_header(header_of(values))
    return values


def rows(first: int, last: int) -> tuple[slice]:
    return (slice(first, last, 1),)


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The bytes of leaves that were read for checksums."""
    found: list[tuple[int, int]] = []
    whole = Session.read_bytes

    def counted(session: Session, path: Any, start: int, stop: int) -> Any:
        found.append((start, stop))
        return whole(session, path, start, stop)

    monkeypatch.setattr(Session, "read_bytes", counted)
    return found


def test_a_commit_does_not_read_what_was_written(
    tmp_path: FsPath, monkeypatch: pytest.MonkeyPatch, read: list[tuple[int, int]]
) -> None:
    values = made(tmp_path / "a.h5", a=VALUE, b=torch.arange(7.0))
    assert read == []
    with open_h5(tmp_path / "a.h5", mode="r+", durable="none", verify="none") as store:
        store.write([Write(("a",), rows(3, 9), VALUE[:6])])
        store.save_header(store.load_header())
        assert read == []
        store.write([Write(("a",), (*rows(3, 4), slice(10, 20, 1)), VALUE[:1, :10])])
        store.save_header(store.load_header())
        assert read == [(3 * WIDE * 4, 4 * WIDE * 4)]
    monkeypatch.undo()
    values["a",][3:9] = VALUE[:6].clone()
    found = load(tmp_path / "a.h5", verify="full")
    assert torch.equal(found["a",][9:], VALUE[9:])
    assert torch.equal(found["a",][3, 10:20], VALUE[0, :10])


@pytest.mark.parametrize("layout", [{}, {"chunks": 2, "maxshape": True}, {"chunks": 2, "compression": "gzip"}])
@pytest.mark.parametrize("fill", [0, -0.0, 2.5, float("nan")])
def test_a_commit_does_not_read_rows_that_were_never_written(
    tmp_path: FsPath, layout: dict[str, Any], fill: float, read: list[tuple[int, int]]
) -> None:
    place, value = tmp_path / "a.h5", VALUE[:4].float()
    with open_h5(place, mode="w", durable="none", **layout) as store:
        store.create({("a",): LeafSpec((3, WIDE), "float32", fill_value=fill)})
        store.write([Write(("a",), rows(0, 3), value[:3])])
        store.save_header(header_of({("a",): value}))
    read.clear()
    row = 4 * WIDE
    with open_h5(place, mode="r+", durable="none") as store:
        store.resize({("a",): 64})
        store.write([Write(("a",), rows(40, 41), value[3:])])
        store.save_header(header_of({("a",): value.expand(16, 4, WIDE).reshape(64, WIDE)}))
    assert (64 * row - 4, 64 * row) in read, "the fill value"
    assert sum(stop - start for start, stop in read) <= 3 * row, "of 64"
    found = load(place, verify="full")["a",]
    assert torch.equal(found[[0, 1, 2, 40]], value)
    rest = torch.cat([found[3:40], found[41:]])
    assert torch.equal(rest.view(torch.int32), torch.full_like(rest, fill).view(torch.int32))


def test_a_leaf_of_four_billion_rows_is_not_read_by_its_commit(tmp_path: FsPath, read: list[tuple[int, int]]) -> None:
    place, count = tmp_path / "a.h5", 2**32
    with open_h5(place, mode="w", durable="none", chunks=2**20, maxshape=True) as store:
        store.create({("a",): LeafSpec((2**20,), "uint8")})
        store.write([Write(("a",), (), torch.full((2**20,), 7, dtype=torch.uint8))])
        store.resize({("a",): count})
        store.save_header(header_of({("a",): torch.zeros(1, dtype=torch.uint8).expand(count)}))
    assert sum(stop - start for start, stop in read) < 4 << 20
    with open_h5(place) as store:
        first, last = (store.read([Read(("a",), rows(at, at + 1))])[0] for at in (2**20 - 1, count - 1))
        assert (int(first), int(last)) == (7, 0)


@pytest.mark.parametrize("seed", range(6))
def test_writes_of_every_form_between_commits_and_ways_back(tmp_path: FsPath, seed: int) -> None:
    rng, place = random.Random(seed), tmp_path / "a.h5"
    dtype = rng.choice([torch.int32, torch.bool, torch.bfloat16, torch.complex64])
    model = {("a",): torch.zeros(40, 3000).to(dtype), ("b",): torch.zeros(30_000).to(dtype)}
    made(place, a=model["a",], b=model["b",])
    committed = {path: value.clone() for path, value in model.items()}
    with open_h5(place, mode="r+", durable="none") as store:
        for number in range(40):
            writes = []
            for path in rng.sample([("a",), ("b",), ("a",)], rng.randint(1, 3)):
                n = model[path].shape[0]
                first, last = sorted((rng.randrange(n + 1), rng.randrange(n + 1)))
                step = rng.choice([1, 1, 1, 3])
                part = model[path][first:last:step]
                value = torch.full(part.shape, number % 7 + 1).to(dtype)
                value = rng.choice([value, value[:1].expand_as(value), value.clone().conj().resolve_conj()])
                writes.append(Write(path, (slice(first, last, step),), value))
                part.copy_(value)
            store.write(writes)
            way = rng.random()
            if way < 0.3:
                store.save_header(store.load_header())
                committed = {path: value.clone() for path, value in model.items()}
                assert not store.verify()
            elif way < 0.5:
                store.discard()
                model = {path: value.clone() for path, value in committed.items()}
            found = store.read([Read(path) for path in model])
            assert all(map(torch.equal, found, model.values()))
    assert all(map(torch.equal, load(place, verify="full").values(), model.values()))


@pytest.mark.parametrize("again", [False, True])
def test_a_failed_call_leaves_the_checksums_of_the_rows_that_come_back(
    tmp_path: FsPath, monkeypatch: pytest.MonkeyPatch, again: bool
) -> None:
    made(tmp_path / "a.h5", a=VALUE, b=VALUE)
    with open_h5(tmp_path / "a.h5", mode="r+", durable="none") as store:
        if again:
            store.write([Write(("a",), rows(20, 21), VALUE[:1])])
        whole, left = RawFile.write, [1]

        def full(raw: RawFile, *args: Any) -> None:
            if not left:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            left.pop()
            whole(raw, *args)

        monkeypatch.setattr(RawFile, "write", full)
        with pytest.raises(StoreError):
            store.write([Write((name,), rows(4, 12), VALUE[40:48]) for name in "ab"])
        monkeypatch.undo()
        store.save_header(store.load_header())
    found = load(tmp_path / "a.h5", verify="full")
    assert torch.equal(found["a",][4:12], VALUE[4:12])
    assert torch.equal(found["b",], VALUE)


def test_damage_of_a_block_that_was_written_and_not_read_is_found(tmp_path: FsPath) -> None:
    place = tmp_path / "a.h5"
    made(place, a=VALUE)
    data = bytearray(place.read_bytes())
    at = data.index(VALUE[7, 100:110].numpy().tobytes())
    data[at] ^= 1
    place.write_bytes(data)
    with open_h5(place) as store:
        assert torch.equal(store.read([Read(("a",), rows(8, 12))])[0], VALUE[8:12])
        with pytest.raises(CorruptStoreError, match="row 7"):
            store.read([Read(("a",), rows(6, 8))])


def test_of_two_writes_of_one_leaf_the_second_may_change_a_part_of_a_grain(tmp_path: FsPath) -> None:
    place = tmp_path / "a.h5"
    made(place, a=VALUE)
    with open_h5(place, mode="r+", durable="none") as store:
        first = Write(("a",), rows(0, 8), VALUE[8:16])
        store.write([first, Write(("a",), (*rows(4, 5), slice(10, 20, 1)), VALUE[:1, :10])])
        store.save_header(store.load_header())
    found = load(place, verify="full")["a",]
    assert torch.equal(found[:4], VALUE[8:12])
    assert torch.equal(found[4, 10:20], VALUE[0, :10])
    assert torch.equal(found[4, 20:], VALUE[12, 20:])
