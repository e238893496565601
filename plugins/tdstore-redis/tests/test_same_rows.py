"""Writes of the same rows of many leaves, which are packed together: the results and the checks of any other write."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from redis import Redis
from redishelp import Leaves, blocks, everything, header_of, load, same, save, span
from tdstore_redis.cells import same_rows as module
from tdstore_redis.cells.same_rows import same_rows
from tdstore_redis.connection import Wire
from tdstore_redis.store import RedisStore, open_redis
from tdstore_redis.transactions import row_writes
from torch import Tensor

from tdstore.errors import CorruptStoreError
from tdstore.types import LeafSpec, Write

ROWS = 200
LEAVES: Leaves = {
    **{("alike", str(i)): torch.rand(ROWS, 8) for i in range(5)},
    ("alike", "ints"): torch.randint(0, 100, (ROWS, 8), dtype=torch.int32),
    ("odd",): torch.randint(0, 255, (ROWS, 7), dtype=torch.uint8),
    ("flags",): torch.rand(ROWS) > 0.5,
    ("half",): torch.rand(ROWS, 3).to(torch.bfloat16),
    ("wide",): torch.rand(ROWS, 200),
    ("cut",): torch.rand(ROWS, 20_000)[:, :17_001],
}


def fresh(rows: int) -> Leaves:
    made: Leaves = {}
    for path, value in LEAVES.items():
        made[path] = (torch.rand(rows, *value.shape[1:]) * 100).to(value.dtype)
    return made


def written(into: Leaves, values: Leaves, start: int) -> Leaves:
    made = {path: value.clone() for path, value in into.items()}
    for path, value in values.items():
        made[path][start : start + len(value)] = value
    return made


def writes(values: Leaves, start: int) -> list[Write]:
    return [Write(path, span(start, start + len(value)), value) for path, value in values.items()]


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """Whether each write went the way of these."""
    found: list[bool] = []

    def look(items: list[tuple[Write, object]]) -> object:
        made = same_rows(items)  # type: ignore[arg-type]
        found.append(made is not None)
        return made

    monkeypatch.setattr(row_writes, "same_rows", look)
    yield found


@pytest.mark.parametrize("start, rows", [(0, 16), (5, 1), (16, 3), (3, 60), (7, 9), (184, 16), (199, 1), (190, 9)])
def test_rows_of_all_leaves(place: str, seen: list[bool], start: int, rows: int) -> None:
    small = {path: value for path, value in LEAVES.items() if path != ("cut",)}
    save(place, small)
    values = {path: value for path, value in fresh(rows).items() if path in small}
    with open_redis(place, mode="r+") as store:
        store.write(writes(values, start))
        assert seen == [True]
        assert same(everything(store), written(small, values, start))
    with open_redis(place, verify="full") as store:
        assert same(everything(store), written(small, values, start))


@pytest.mark.parametrize("block", [1_000, 4_000, 1 << 20])
def test_what_lies_in_several_blocks_is_written_as_changes(place: str, seen: list[bool], block: int) -> None:
    save(place, LEAVES, block=block)
    expected = LEAVES
    with open_redis(place, mode="r+") as store:
        for start in (0, 1, 30, 31, 100, 150):
            values = fresh(33)
            store.write(writes(values, start))
            expected = written(expected, values, start)
    assert same(load(place, verify="full"), expected)
    assert not all(seen)


def test_values_of_any_layout_in_memory(place: str, seen: list[bool]) -> None:
    leaves: Leaves = {("a",): torch.zeros(64, 4, 2), ("b",): torch.zeros(64, 4, 2), ("c",): torch.zeros(64, 8)}
    save(place, leaves)
    values: Leaves = {
        ("a",): torch.rand(2, 4, 10).permute(2, 1, 0),
        ("b",): torch.rand(20, 4, 2)[::2].requires_grad_(),
        ("c",): torch.rand(8).expand(10, 8),
    }
    with open_redis(place, mode="r+") as store:
        store.write(writes(values, 13))
    assert seen == [True]
    assert same(load(place), written(leaves, {path: value.detach() for path, value in values.items()}, 13))


@pytest.mark.parametrize("rows", [1, 9])
def test_expanded_values(place: str, seen: list[bool], rows: int) -> None:
    """A number that is written to all rows arrives expanded: one element, with strides of 0."""
    save(place, LEAVES)
    values = {path: value[:1].flatten()[0].expand(rows, *value.shape[1:]) for path, value in fresh(1).items()}
    with open_redis(place, mode="r+") as store:
        store.write(writes(values, 5))
    assert seen == [True]
    assert same(load(place), written(LEAVES, values, 5))


@pytest.mark.parametrize(
    "others",
    [
        [Write(("a",), span(4, 6), torch.ones(2, 8))],
        [Write(("b",), (torch.tensor([3, 1]),), torch.ones(2, 8))],
        [Write(("b",), (slice(0, 9, 2),), torch.ones(5, 8))],
        [Write(("b",), (slice(3, 9, 1), slice(0, 2, 1)), torch.ones(6, 2))],
        [Write(("b",), (), torch.ones(64, 8))],
    ],
    ids=["again", "rows", "steps", "columns", "all"],
)
def test_other_writes_beside_them(place: str, seen: list[bool], others: list[Write]) -> None:
    leaves: Leaves = {("a",): torch.zeros(64, 8), ("b",): torch.zeros(64, 8)}
    save(place, leaves)
    first = Write(("a",), span(3, 5), torch.full((2, 8), 7.0))
    with open_redis(place, mode="r+") as store:
        store.write([first, *others])
    expected = {path: value.clone() for path, value in leaves.items()}
    for w in (first, *others):
        expected[w.path][w.index] = w.value
    assert same(load(place), expected)


def test_two_round_trips_with_one_command_for_each_cell(
    client: Redis, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    leaves: Leaves = {(str(i),): torch.zeros(200, 8) for i in range(24)}
    save(place, leaves)
    rounds: list[int] = []
    send = Wire.send
    with open_redis(place, mode="r+") as store:
        store.write(writes({path: torch.ones(40, 8) for path in leaves}, 5))
        client.config_resetstat()
        monkeypatch.setattr(
            Wire, "send", lambda wire, commands: (rounds.append(len(commands)), send(wire, commands))[1]
        )
        store.write(writes({path: torch.ones(40, 8) for path in leaves}, 5))
        calls = {name: of["calls"] for name, of in client.info("commandstats").items()}
        assert len(rounds) == 2
        assert (calls["cmdstat_getrange"], calls["cmdstat_setrange"], calls["cmdstat_exec"]) == (48, 24, 1)
        store.write(writes({path: torch.ones(32, 8) for path in leaves}, 16))
        assert len(rounds) == 3  # whole cells need no look at what is there


def test_rows_that_were_never_written(place: str, seen: list[bool]) -> None:
    with open_redis(place, mode="w") as store:
        store.create({("a",): LeafSpec((64, 8), "float32"), ("b",): LeafSpec((64, 8), "float32")})
        store.write([Write(("a",), span(0, 20), torch.ones(20, 8)), Write(("b",), span(0, 64), torch.ones(64, 8))])
        store.save_header(header_of({("a",): torch.zeros(0), ("b",): torch.zeros(0)}))
        store.write([Write((name,), span(30, 34), torch.full((4, 8), 2.0)) for name in "ab"])
    assert seen == [False]
    expected = {("a",): torch.zeros(64, 8), ("b",): torch.ones(64, 8)}
    expected["a",][:20] = 1
    for value in expected.values():
        value[30:34] = 2
    assert same(load(place), expected)


@pytest.mark.parametrize("which", [0, -1], ids=["first", "last"])
@pytest.mark.parametrize("damage", ["changed", "short"])
def test_damage_of_a_cell_that_is_changed_in_part(client: Redis, place: str, which: int, damage: str) -> None:
    leaves: Leaves = {(name,): torch.rand(64, 8) for name in "abc"}
    save(place, leaves)
    key = blocks(client)[1]
    held = client.get(key)
    assert isinstance(held, bytes)
    if damage == "changed":
        at = 16 * 32 + 4 + 100 if which == 0 else len(held) - 100
        client.setrange(key, at, bytes([held[at] ^ 1]))
    else:
        client.set(key, held[: 600 if which == 0 else -50])
    before = {name: client.get(name) for name in blocks(client)}
    with open_redis(place, mode="r+", verify="none") as store:
        with pytest.raises(CorruptStoreError, match="cell"):
            store.write(writes({path: torch.ones(40, 8) for path in leaves}, 20))
        assert {name: client.get(name) for name in blocks(client)} == before


def test_another_writer_in_between(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    leaves: Leaves = {(name,): torch.zeros(64, 8) for name in "ab"}
    save(place, leaves)
    turns: list[Tensor] = []
    with open_redis(place, mode="r+") as store, open_redis(place, mode="r+") as other:
        assert isinstance(store, RedisStore)
        sets = module._sets

        def late(form: module._Form, old: list[bytes]) -> list[bytes]:
            made = sets(form, old)
            if not turns:
                turns.append(torch.full((4, 8), 5.0))
                other.write([Write((name,), span(0, 4), turns[0]) for name in "ab"])
            return made

        monkeypatch.setattr(module, "_sets", late)
        store.write([Write((name,), span(6, 9), torch.full((3, 8), 6.0)) for name in "ab"])
    for value in leaves.values():
        value[:4], value[6:9] = 5, 6
    assert same(load(place), leaves)


def test_what_is_large_goes_the_other_way(place: str, seen: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    save(place, {("a",): torch.zeros(64, 8)})
    monkeypatch.setattr(module, "MOST", 100)
    with open_redis(place, mode="r+") as store:
        store.write([Write(("a",), span(3, 5), torch.ones(2, 8))])
        store.write([Write(("a",), span(3, 6), torch.ones(3, 8))])
        store.write([Write(("a",), span(5, 11), torch.ones(6, 8))])
    assert seen == [True, True, False]
