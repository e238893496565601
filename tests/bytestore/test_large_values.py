"""Large values: written without a copy, one file after the other, and read into the caller's memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tdstore.bytestore import open_objects
from tdstore.bytestore.read import DIRECT
from tdstore.errors import CorruptStoreError
from tdstore.index.ranges import Range, RangeInto
from tdstore.storekit.local_engine import LocalEngine
from tdstore.types import LeafSpec, Read, Write
from tests.bytestore.memory_engine import MemoryEngine
from tests.bytestore.support import contents, equal, numbered, save

ROWS = DIRECT // 1024
"""Of 2 KiB: a leaf is twice what a request of its own needs, and not aligned."""


def value(fill: int = 0) -> torch.Tensor:
    return (torch.arange((ROWS + 3) * 1024, dtype=torch.int64) + fill).to(torch.int16).view(ROWS + 3, 1024)


def rows(start: int, stop: int) -> tuple[slice]:
    return (slice(start, stop, 1),)


@pytest.fixture(params=["local", "memory"])
def engine(request: Any, tmp_path: Path) -> Any:
    return LocalEngine(tmp_path / "run", durable=False) if request.param == "local" else MemoryEngine()


def test_a_value_that_changes_after_its_write_is_stored_as_it_was(engine: Any) -> None:
    written, small = value(), torch.arange(100)
    before = written.clone()
    store = open_objects(engine, mode="w", buffer_bytes=1 << 20)
    store.create({("a",): LeafSpec(written.shape, written.dtype), ("b",): LeafSpec(small.shape, small.dtype)})
    store.write([Write(("a",), (), written), Write(("b",), (), small)])
    written.zero_()
    small.zero_()
    store.write([Write(("a",), rows(5, 6), torch.full((1, 1024), 7, dtype=torch.int16))])
    store.save_header(numbered(0))
    assert not written.any(), "the row was not written into the caller's memory"
    before[5] = 7
    assert equal(contents(open_objects(engine)), {("a",): before, ("b",): torch.arange(100)})


def test_writes_of_one_leaf_that_overlap_leave_the_values_alone(engine: Any) -> None:
    first, second = value(), value(1)
    given = first.clone(), second.clone()
    store = open_objects(engine, mode="w", buffer_bytes=8 << 20)
    store.create({("a",): LeafSpec(first.shape, first.dtype)})
    store.write([Write(("a",), (), first), Write(("a",), rows(3, ROWS), second[3:ROWS])])
    store.save_header(numbered(0))
    assert torch.equal(first, given[0])
    assert torch.equal(second, given[1])
    expected = torch.cat([first[:3], second[3:ROWS], first[ROWS:]])
    assert torch.equal(open_objects(engine).read([Read(("a",))])[0], expected)


def test_a_local_store_has_few_files_and_a_bucket_many(tmp_path: Path) -> None:
    leaves = {("a",): value().repeat(4, 1)}
    local, bucket = LocalEngine(tmp_path / "run", durable=False), MemoryEngine()
    for engine in (local, bucket):
        save(engine, leaves).close()
    assert len(list(local.list("data/"))) == 1
    assert bucket.puts_at_once > 1


@pytest.mark.parametrize("verify", ["full", "size"])
def test_large_leaves_are_read_into_the_memory_of_the_caller(engine: Any, verify: Any) -> None:
    leaves = {("a",): value(), ("b",): value(5), ("c",): torch.arange(3000)}
    save(engine, leaves).close()
    answered: list[Any] = []
    plain = engine.get_ranges

    def watched(ranges: list[Range]) -> list[Any]:
        answers = plain(ranges)
        answered.extend(zip(ranges, answers, strict=True))
        return answers

    engine.get_ranges = watched
    store = open_objects(engine, verify=verify)
    outs = [torch.zeros_like(leaf) for leaf in leaves.values()]
    got = store.read([Read(path, (), out) for path, out in zip(leaves, outs, strict=True)])
    assert all(g is out and torch.equal(g, leaf) for g, out, leaf in zip(got, outs, leaves.values(), strict=True))
    direct = [(asked, answer) for asked, answer in answered if isinstance(asked, RangeInto)]
    # All but the ends of the leaves, which a bucket has in objects of their own.
    assert sum(asked.into.nbytes for asked, _ in direct) > 1.9 * leaves["a",].nbytes
    if isinstance(engine, LocalEngine):
        assert all(answer is asked.into for asked, answer in direct), "without memory of its own"
    # Some rows of a leaf beside all of it, the same leaf twice, and rows that end amid a checksum.
    some = rows(1, ROWS + 1)
    got = store.read([Read(("a",), some), Read(("a",)), Read(("b",)), Read(("b",)), Read(("b",), rows(7, 9))])
    a, b = leaves["a",], leaves["b",]
    assert all(torch.equal(g, e) for g, e in zip(got, [a[some], a, b, b, b[7:9]], strict=True))


def test_damage_of_a_large_leaf_is_found_and_one_bad_answer_is_mended() -> None:
    engine = MemoryEngine()
    save(engine, {("a",): value()}).close()
    spoiled = iter([True])
    # Only the first large answer is wrong.
    engine.spoil = lambda key, data: b"x" + data[1:] if len(data) >= DIRECT and next(spoiled, False) else data
    assert torch.equal(open_objects(engine).read([Read(("a",))])[0], value())
    engine.spoil = lambda key, data: b"x" + data[1:] if len(data) >= DIRECT else data
    with pytest.raises(CorruptStoreError, match="leaf 'a' is damaged from row 0"):
        open_objects(engine).read([Read(("a",))])
    engine.spoil = lambda key, data: data[:-1] if len(data) >= DIRECT else data
    with pytest.raises(CorruptStoreError, match=r"leaf 'a' cannot be read.* gives \d+ of the bytes"):
        open_objects(engine).read([Read(("a",))])
