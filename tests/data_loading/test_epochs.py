"""`Epochs`: every row once, the same batches in every way of reading, and exact resume."""

from __future__ import annotations

import itertools
import json
import pickle
import threading
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from tdstore import TensorDict
from tdstore.data import Epochs, reading
from tdstore.data.blocks import Block, BlockReader
from tdstore.data.orders import BlockOrder
from tdstore.data.source import Source
from tdstore.errors import InvalidArgumentError, InvalidStateError, MismatchError, StoreIOError, StoreTimeoutError
from tests import scripts
from tests.data_loading.places import LOCAL, SERVERS, numbered, stored

pytestmark = [
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),  # by torch; torchdata calls it
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),  # more workers than this machine has cores
]
SHUFFLES = pytest.mark.parametrize("shuffle", [True, False, "blocks"])


def rows_of(batches: Any) -> list[list[int]]:
    return [batch["row"].tolist() for batch in batches]


def flat(batches: list[list[int]]) -> list[int]:
    return list(itertools.chain.from_iterable(batches))


def epochs_of(td: Any, batch_size: int = 7, **options: Any) -> Epochs:
    return Epochs(td, batch_size, columns=["row"], **{"seed": 5, "block_rows": 8, "window_blocks": 3, **options})


# -- the order -----------------------------------------------------------------------------
@SHUFFLES
@pytest.mark.parametrize("size", [1, 6, 7, 100, 5000])
def test_an_epoch_has_each_row_once(shuffle: Any, size: int) -> None:
    epochs = epochs_of(numbered(size), shuffle=shuffle, prefetch=3)
    first, second = rows_of(epochs), rows_of(epochs)
    assert sorted(flat(first)) == sorted(flat(second)) == list(range(size))
    assert [len(batch) for batch in first[:-1]] == [7] * (len(first) - 1)
    assert len(first) == len(epochs)
    assert (flat(first) == flat(second)) == (not shuffle or size == 1)
    assert (flat(first) == list(range(size))) == (not shuffle or size == 1)


@SHUFFLES
def test_seeds_and_threads(shuffle: Any) -> None:
    td = numbered(200)
    orders = [flat(rows_of(epochs_of(td, shuffle=shuffle, prefetch=n))) for n in (0, 1, 5)]
    assert orders[0] == orders[1] == orders[2]
    assert (flat(rows_of(epochs_of(td, shuffle=shuffle, seed=6))) == orders[0]) == (not shuffle)


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 24, 25, 1001])
def test_blocks_are_whole_within_their_window(size: int) -> None:
    order = BlockOrder(size, 8, 3, seed=1, epoch=2)
    items = order(np.arange(size))
    assert sorted(items.tolist()) == list(range(size))
    blocks = [set((items[i : i + 24] // 8).tolist()) for i in range(0, size, 24)]
    # Where the short block has moved the bounds of windows, 24 rows are of two of them.
    assert all(len(window) <= (3 if size % 8 == 0 else 6) for window in blocks)
    assert order(np.arange(size)[size // 2 :]).tolist() == items[size // 2 :].tolist()


def test_a_short_block_is_anywhere() -> None:
    places = {BlockOrder(81, 8, 1, seed=1, epoch=e)(np.arange(81)).tolist().index(80) // 8 for e in range(200)}
    assert places == set(range(11))


# -- ranks ---------------------------------------------------------------------------------
@SHUFFLES
@pytest.mark.parametrize("drop_last", [False, True])
def test_ranks_share_an_epoch(shuffle: Any, drop_last: bool) -> None:
    td = numbered(103)
    ranks = [epochs_of(td, 5, shuffle=shuffle, rank=rank, world_size=4, drop_last=drop_last) for rank in range(4)]
    had = [rows_of(epochs) for epochs in ranks]
    assert [len(batches) for batches in had] == [len(epochs) for epochs in ranks]
    everything = sorted(flat(flat(had)))  # type: ignore[arg-type]
    if drop_last:
        assert [len(batch) for batch in flat(had)] == [5] * 20  # type: ignore[arg-type]
        assert len(set(everything)) == 100
    else:
        assert everything == list(range(103))
        assert [len(batches[-1]) for batches in had] == [1, 1, 1, 5]
    whole = rows_of(epochs_of(td, 20, shuffle=shuffle))
    assert [flat(list(step)) for step in zip(*(batches[:5] for batches in had), strict=True)] == whole[:5]


# -- resume --------------------------------------------------------------------------------
@SHUFFLES
@pytest.mark.parametrize("stop", [0, 1, 3, 15])
def test_a_state_gives_the_batches_that_were_left(shuffle: Any, stop: int) -> None:
    td = numbered(100)
    whole = epochs_of(td, shuffle=shuffle)
    expected = [rows_of(whole) for _ in range(3)]
    first = epochs_of(td, shuffle=shuffle)
    assert rows_of(first) == expected[0]
    assert rows_of(itertools.islice(first, stop)) == expected[1][:stop]
    state = json.loads(json.dumps(first.state_dict()))
    again = epochs_of(td, shuffle=shuffle, prefetch=5, seed=99)
    again.load_state_dict(state)
    left = expected[1][stop:]
    assert again.epoch == (1 if left else 2)
    assert rows_of(again) == rows_of(first) == (left or expected[2]), "the one that was stopped goes on, too"
    assert rows_of(again) == (expected[2] if left else rows_of(first))


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_caller_that_counts_batches_gets_the_next_epoch(prefetch: int) -> None:
    """Loops of Lightning, and `zip(range(n), epochs)`, do not ask for the end of an epoch."""
    expected = [rows_of(whole) for whole in [epochs_of(numbered(10), 5)] for _ in range(3)]
    epochs = epochs_of(numbered(10), 5, prefetch=prefetch)
    for epoch in range(3):
        assert rows_of(itertools.islice(epochs, len(epochs))) == expected[epoch]
        assert epochs.epoch == epoch
    empty = epochs_of(numbered(4), 5, drop_last=True)
    assert (rows_of(empty), rows_of(empty), empty.epoch) == ([], [], 2)


@SHUFFLES
def test_other_ranks_and_batches_give_the_rows_that_were_left(shuffle: Any) -> None:
    td = numbered(101)
    ranks = [epochs_of(td, 5, shuffle=shuffle, rank=rank, world_size=2) for rank in range(2)]
    had = [flat(rows_of(itertools.islice(epochs, 3))) for epochs in ranks]
    states = [epochs.state_dict() for epochs in ranks]
    assert states[0] == states[1]
    left = []
    for rank in range(3):
        again = epochs_of(td, 4, shuffle=shuffle, rank=rank, world_size=3, prefetch=rank)
        again.load_state_dict(states[rank % 2])
        left.append(flat(rows_of(again)))
    assert sorted(flat(had) + flat(left)) == list(range(101))
    order = flat(rows_of(epochs_of(td, shuffle=shuffle)))
    assert set(flat(left)) == set(order[30:])


@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_a_script_ends_between_two_batches(prefetch: int) -> None:
    code = """
import sys, torch
from tdstore import TensorDict
from tdstore.data import Epochs
batches = iter(Epochs(TensorDict({"a": torch.arange(64)}, [64]), 4, prefetch=int(sys.argv[1])))
print(next(batches).shape)
"""
    script = scripts.run(code, prefetch)
    assert (script.status, script.output, script.errors) == (0, "torch.Size([4])\n", "")


def test_a_billion_rows_cost_as_much_as_ten() -> None:
    billion = TensorDict({"row": torch.zeros(1, dtype=torch.int8).expand(10**9)}, [10**9])
    for shuffle in (True, False, "blocks"):
        epochs = Epochs(billion, 32, shuffle=shuffle, seed=3, rank=1, world_size=7)  # type: ignore[arg-type]
        state = {**epochs.state_dict(), "items": 900_000_000, "epoch": 12}
        assert len(pickle.dumps(state)) < 300
        epochs.load_state_dict(state)
        assert next(iter(epochs)).batch_size == torch.Size([32])
        assert epochs.state_dict()["items"] == 900_000_000 + 32 * 7


def test_states_of_other_data_are_refused() -> None:
    td = numbered(100)
    state = epochs_of(td).state_dict()
    with pytest.raises(MismatchError, match="of 100 items .* has 99"):
        epochs_of(td[:99]).load_state_dict(state)
    with pytest.raises(MismatchError, match="another order"):
        epochs_of(td, shuffle=False).load_state_dict(state)
    for wrong in ({}, {**state, "version": 2}, {**state, "items": 101}, {**state, "epoch": "1"}):
        with pytest.raises(InvalidArgumentError):
            epochs_of(td).load_state_dict(wrong)
    with pytest.raises(InvalidArgumentError, match="worker 1 of 2"):
        epochs_of(td).load_state_dict({**state, "worker": 1, "workers": 2, "done": 0})


# -- loaders -------------------------------------------------------------------------------
@pytest.mark.parametrize("workers", [0, 2, 3])
def test_a_loader_gives_the_same_batches(workers: int) -> None:
    td = numbered(100)
    alone = epochs_of(td)
    expected = [rows_of(alone) for _ in range(3)]
    loader = DataLoader(epochs_of(td), batch_size=None, num_workers=workers)
    assert [rows_of(loader) for _ in range(3)] == expected


@pytest.mark.parametrize("context", ["fork", "spawn"])
@pytest.mark.parametrize("persistent", [False, True])
def test_workers_of_each_kind(tmp_path: Any, context: str, persistent: bool) -> None:
    numbered(60).save(tmp_path / "x.h5").close()
    alone = epochs_of(tmp_path / "x.h5")
    expected = [rows_of(alone) for _ in range(3)]
    one = context == "spawn" and not persistent  # a new interpreter for each epoch, which costs seconds
    loader = DataLoader(
        epochs_of(tmp_path / "x.h5"), batch_size=None, num_workers=1 if one else 2, multiprocessing_context=context,
        persistent_workers=persistent,
    )  # fmt: skip
    assert [rows_of(loader) for _ in range(2)] == expected[:2]
    loader.dataset.set_epoch(1)  # type: ignore[attr-defined]
    assert rows_of(loader) == expected[1]
    assert rows_of(loader) == expected[2]


def test_the_position_of_a_loader_with_workers() -> None:
    td = numbered(100)
    alone = epochs_of(td)
    expected = [rows_of(alone) for _ in range(2)]
    epochs = epochs_of(td)
    loader = DataLoader(epochs, batch_size=None, num_workers=2)
    assert rows_of(loader) == expected[0]
    had = rows_of(itertools.islice(loader, 5))
    assert had == expected[1][:5]
    assert epochs.epoch == 1
    with pytest.raises(InvalidStateError, match="how many batches the loader has handed out"):
        epochs.state_dict()
    again = epochs_of(td)
    again.load_state_dict(epochs.state_dict(batches=5))
    assert rows_of(DataLoader(again, batch_size=None, num_workers=3)) == expected[1][5:]
    assert rows_of(epochs) == rows_of(again), "read alone after the loader: what follows its epoch"
    with pytest.raises(InvalidArgumentError, match="15 batches left"):
        epochs.state_dict(batches=16)


def test_a_position_before_the_first_batch_of_an_iteration() -> None:
    """Workers may not have begun the epoch, and the state was then that of the epoch before."""
    td = numbered(40)
    alone = epochs_of(td)
    expected = [rows_of(alone) for _ in range(3)]
    epochs = epochs_of(td)
    loader = DataLoader(epochs, batch_size=None, num_workers=2)
    assert rows_of(loader) == expected[0]
    for epoch in (1, 0, 2):
        again = epochs_of(td)
        again.load_state_dict(epochs.state_dict(batches=0, epoch=epoch))
        assert again.epoch == epoch and rows_of(again) == expected[epoch]
    again.load_state_dict(epochs.state_dict(batches=3, epoch=1))
    assert rows_of(again) == expected[1][3:]
    resumed = epochs_of(td)
    resumed.load_state_dict(epochs.state_dict(batches=2, epoch=1))
    assert resumed.state_dict(batches=0, epoch=1) == resumed.state_dict()
    with pytest.raises(InvalidArgumentError, match="epoch -1"):
        epochs.state_dict(batches=0, epoch=-1)


def test_a_state_for_workers_that_live() -> None:
    epochs = epochs_of(numbered(50))
    loader = DataLoader(epochs, batch_size=None, num_workers=1, persistent_workers=True)
    rows_of(loader)
    epochs.load_state_dict(epochs.state_dict(batches=2))
    with pytest.raises(InvalidStateError, match="workers, which do not know of it"):
        next(iter(loader))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("stop", [1, 4, 14, 15])
def test_a_stateful_loader_resumes(workers: int, stop: int) -> None:
    td = numbered(100)
    alone = epochs_of(td)
    expected = [rows_of(alone) for _ in range(3)]

    def loader() -> Any:
        return StatefulDataLoader(epochs_of(td), batch_size=None, num_workers=workers)

    first = loader()
    assert rows_of(first) == expected[0]
    assert rows_of(itertools.islice(first, stop)) == expected[1][:stop]
    state = pickle.loads(pickle.dumps(first.state_dict()))
    again = loader()
    again.load_state_dict(state)
    left = expected[1][stop:]
    if left or workers:  # workers do not know that the others have nothing left
        assert rows_of(again) == left
    assert rows_of(again) == expected[2]


# -- reading -------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", LOCAL + SERVERS)
@SHUFFLES
def test_batches_of_every_place(kind: str, shuffle: Any, request: Any) -> None:
    with stored(kind, 40, request) as (place, options):
        epochs = Epochs(place, 16, shuffle=shuffle, seed=2, options=options)
        batches = list(epochs)
        rows = torch.cat([batch["row"] for batch in batches])
        assert sorted(rows.tolist()) == list(range(40))
        assert torch.equal(torch.cat([batch["next", "x"] for batch in batches])[:, 1], rows.float())
        assert [name for batch in batches for name in batch["name"]] == [f"r{row}" for row in rows]


class Failing:
    """Fail once at a row, or wait for an event."""

    def __init__(self, row: int, error: Exception | None = None) -> None:
        self.row, self.error = row, error
        self.event = threading.Event()

    def __call__(self, batch: Any) -> Any:
        if self.row in batch["row"].tolist():
            self.row = -1
            if self.error is None:
                self.event.wait(200)
            else:
                raise self.error
        return batch


@pytest.mark.parametrize("prefetch", [0, 1, 4])
@pytest.mark.parametrize("error", [StoreTimeoutError("stalled"), ZeroDivisionError("by 0")])
def test_a_failure_names_the_rows_and_they_are_read_again(prefetch: int, error: Exception) -> None:
    epochs = epochs_of(numbered(50), 10, shuffle=False, prefetch=prefetch, transform=Failing(25, error))
    batches = iter(epochs)
    had = [next(batches)["row"].tolist() for _ in range(2)]
    with pytest.raises(type(error)) as caught:
        next(batches)
    text = str(caught.value) + "".join(getattr(caught.value, "__notes__", ()))
    assert "rows 20, 21, 22, 23, 24, 25, 26, 27, ... (10 in all) of epoch 0 of a TensorDict of 50 rows" in text
    assert epochs.state_dict()["items"] == 20
    assert flat(had + rows_of(epochs)) == list(range(50))


def test_a_read_that_stalls_ends_at_the_timeout() -> None:
    failing = Failing(25)
    epochs = epochs_of(numbered(50), 10, shuffle=False, prefetch=2, transform=failing, timeout=2.0)
    batches = iter(epochs)
    had = [next(batches)["row"].tolist() for _ in range(2)]
    with pytest.raises(StoreTimeoutError, match="nothing was read within 2.0 s: rows 20, 21"):
        next(batches)
    failing.event.set()
    assert flat(had + rows_of(epochs)) == list(range(50))


def test_no_more_batches_are_read_ahead_than_asked() -> None:
    read: list[int] = []

    def note(batch: Any) -> Any:
        read.append(batch["row"][0].item())
        return batch

    had = 0
    for _ in epochs_of(numbered(100), 10, shuffle=False, prefetch=3, transform=note):
        had += 1
        assert len(read) <= had + 3
    assert had == 10
    read.clear()
    next(iter(epochs_of(numbered(100), 10, shuffle=False, prefetch=0, transform=note)))
    assert read == [0]


def test_the_first_batch_is_read_alone(monkeypatch: Any) -> None:
    monkeypatch.setattr(reading, "ALONE", 100.0)
    others = threading.Event()
    alone: list[bool] = []

    def note(batch: Any) -> Any:
        if batch["row"][0] == 0:
            alone.append(not others.wait(0.1))
        else:
            others.set()
        return batch

    assert flat(rows_of(epochs_of(numbered(50), 10, shuffle=False, prefetch=4, transform=note))) == list(range(50))
    assert alone == [True]


def test_a_slow_first_batch_does_not_keep_the_others() -> None:
    others = threading.Event()
    kept: list[bool] = []

    def note(batch: Any) -> Any:
        if batch["row"][0] == 0:
            kept.append(not others.wait(60))
        else:
            others.set()
        return batch

    assert flat(rows_of(epochs_of(numbered(50), 10, shuffle=False, prefetch=4, transform=note))) == list(range(50))
    assert kept == [False]


# -- windows -------------------------------------------------------------------------------
@SHUFFLES
def test_windows(shuffle: Any) -> None:
    batches = list(epochs_of(numbered(101), 4, shuffle=shuffle, span=10))
    assert [batch.batch_size for batch in batches] == [torch.Size([4, 10])] * 2 + [torch.Size([2, 10])]
    windows = torch.cat([batch["row"] for batch in batches])
    assert (windows.diff(dim=1) == 1).all()
    assert sorted(windows.flatten().tolist()) == list(range(100))
    overlapping = torch.cat([b["row"] for b in epochs_of(numbered(20), 4, shuffle=shuffle, span=10, stride=1)])
    assert sorted(overlapping[:, 0].tolist()) == list(range(11))


@pytest.mark.parametrize("bounds", ["done", "number", ("in", "done"), "starts"])
def test_windows_do_not_cross_episodes(bounds: Any) -> None:
    lengths = [5, 1, 12, 3, 4, 10]
    starts = np.cumsum([0, *lengths])
    number = torch.from_numpy(np.repeat([7, 3, 9, 3, 0, 2], lengths))
    done = torch.zeros(35, dtype=torch.bool)
    done[starts[1:] - 1] = True
    td = TensorDict({"row": torch.arange(35), "number": number, "done": done[:, None], "in": {"done": done}}, [35])
    epochs = Epochs(td, 6, span=4, stride=1, episodes=starts[:-1].tolist() if bounds == "starts" else bounds)
    windows = torch.cat([batch["row"] for batch in epochs])
    expected = [s + i for s, n in zip(starts, lengths, strict=False) for i in range(n - 3)]
    assert sorted(windows[:, 0].tolist()) == expected
    assert (windows.diff(dim=1) == 1).all()
    apart = torch.cat([b["row"] for b in Epochs(td, 6, span=4, shuffle=False, episodes="done")])
    assert apart[:, 0].tolist() == [0, 6, 10, 14, 21, 25, 29]


# -- whole blocks --------------------------------------------------------------------------
def counted(epochs: Epochs) -> list[list[int]]:
    """Note the rows of each read of the source."""
    reads: list[list[int]] = []
    read = epochs.source.read

    def noted(rows: Any) -> Any:
        reads.append(rows.reshape(-1).tolist())
        return read(rows)

    epochs.source.read = noted  # type: ignore[method-assign]
    return reads


@pytest.mark.parametrize("shuffle", [False, "blocks"])
@pytest.mark.parametrize("prefetch", [0, 3])
@pytest.mark.parametrize("windows", [{}, {"span": 4, "stride": 3}, {"span": 3, "episodes": [0, 11, 40]}])
def test_whole_blocks_give_the_same_batches(shuffle: Any, prefetch: int, windows: dict[str, Any]) -> None:
    td = numbered(103)
    td["text"] = [str(row) for row in range(103)]
    how: dict[str, Any] = {"shuffle": shuffle, "block_rows": 10, "window_blocks": 3, "prefetch": prefetch, **windows}
    expected = list(Epochs(td, 7, **how))
    whole = Epochs(td, 7, **how, whole_blocks=True)
    reads = counted(whole)
    for batch, wanted in zip(whole, expected, strict=True):
        assert batch.batch_size == wanted.batch_size
        assert (batch == wanted).all()
        assert batch["text"] == wanted["text"]
    if not windows:
        rows = [row for read in reads for row in read]
        assert sorted(rows) == list(range(103)), "each block was read once"


def test_a_slow_batch_keeps_its_blocks() -> None:
    """Other threads are windows ahead meanwhile."""
    source = Source(numbered(200))
    reader = BlockReader(source, 10, keep=2)
    reads: list[int] = []
    read = source.read
    source.read = lambda rows: (reads.extend(rows.tolist()), read(rows))[1]  # type: ignore[method-assign]
    batches = [np.array([5, 13, 8]), np.array([17, 2]), *(np.arange(k, k + 10) for k in range(20, 200, 10))]
    plans = [reader.plan(rows) for rows in batches]
    assert len(reader._blocks) == 2
    for rows, plan in reversed(list(zip(batches, plans, strict=True))):
        assert plan()["row"].tolist() == rows.tolist()
    assert sorted(reads) == list(range(200)), "each block was read once"


def test_batches_that_are_dropped_leave_nothing_to_wait_for() -> None:
    epochs = epochs_of(numbered(60), shuffle="blocks", block_rows=10, window_blocks=2, whole_blocks=True)
    expected = rows_of(epochs_of(numbered(60), shuffle="blocks", block_rows=10, window_blocks=2))
    for _ in range(3):
        batch, _ = next(epochs._tasks(epochs._position, 0, 1))
        batch.plan()  # and nobody reads it
    assert rows_of(epochs) == expected


def test_whole_blocks_that_fail_are_read_again() -> None:
    epochs = epochs_of(numbered(60), shuffle="blocks", block_rows=10, window_blocks=2, prefetch=2, whole_blocks=True)
    expected = rows_of(epochs_of(numbered(60), shuffle="blocks", block_rows=10, window_blocks=2))
    read, failures = epochs.source.read, [StoreIOError("the network is down", url="s3://bucket")]

    def failing(rows: Any) -> Any:
        if failures:
            raise failures.pop()
        return read(rows)

    epochs.source.read = failing  # type: ignore[method-assign]
    with pytest.raises(StoreIOError, match=r"the network is down .*while reading rows"):
        next(iter(epochs))
    assert rows_of(epochs) == expected


def test_a_forked_worker_does_not_wait_for_blocks_of_its_parent() -> None:
    epochs = epochs_of(numbered(60), shuffle="blocks", block_rows=10, window_blocks=2, whole_blocks=True)
    for number in range(6):
        epochs.blocks._blocks[number] = block = Block()  # type: ignore[union-attr]
        block.claim()  # as a thread does that reads it now
    loader = DataLoader(epochs, batch_size=None, num_workers=1, multiprocessing_context="fork", timeout=60)
    assert sorted(flat(rows_of(loader))) == list(range(60))


def test_whole_blocks_in_memory_are_those_of_two_windows() -> None:
    epochs = epochs_of(numbered(400), shuffle="blocks", block_rows=10, window_blocks=2, prefetch=2, whole_blocks=True)
    for _ in epochs:
        assert len(epochs.blocks._blocks) <= 4  # type: ignore[union-attr]
    assert pickle.loads(pickle.dumps(epochs))._blocks is None
    with pytest.raises(InvalidArgumentError, match="whole_blocks=True with a full shuffle"):
        epochs_of(numbered(10), shuffle=True, whole_blocks=True)


def test_what_is_wrong_is_refused() -> None:
    td = numbered(10)
    for name in ("batch_size", "world_size", "span", "stride", "block_rows", "window_blocks"):
        with pytest.raises(InvalidArgumentError, match=f"{name}=0"):
            Epochs(td, **{"batch_size": 1, name: 0})  # type: ignore[arg-type]
    for options in ({"rank": 2, "world_size": 2}, {"shuffle": "rows"}, {"prefetch": -1}, {"timeout": 0}):
        with pytest.raises(InvalidArgumentError):
            Epochs(td, 1, **options)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match="no window of span=11"):
        len(Epochs(td, 1, span=11))
    with pytest.raises(InvalidArgumentError, match="float32 of shape"):
        len(Epochs(td, 1, span=2, episodes=("next", "x")))
    with pytest.raises(InvalidArgumentError, match="ascend from 0"):
        len(Epochs(td, 1, span=2, episodes=[1, 5]))
    with pytest.raises(InvalidArgumentError, match="counted from 0"):
        Epochs(td, 1).set_epoch(-1)


def test_a_process_group_without_ranks_is_warned_of() -> None:
    td = numbered(10)
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    try:
        with pytest.warns(UserWarning, match="all 2 processes read the same batches: give Epochs rank=1, world_size=2"):
            Epochs(td, 2)
        Epochs(td, 2, rank=1, world_size=2)
        Epochs(td, 2, rank=0, world_size=1)
    finally:
        dist.destroy_process_group()
    Epochs(td, 2)
