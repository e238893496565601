"""Replay buffers of the released torchrl over stored TensorDicts."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import tensordict as peer
import torch
from torchrl import data as rl

import tdstore
from tdstore import NonTensorStack, TensorDict, interop
from tdstore.errors import MissingDependencyError, OptionError
from tdstore.interop import to_tensordict, torchrl_storage

LOCATIONS = ["run.h5", "run.zarr", "run"]


def steps(tmp_path: Any, location: str) -> Any:
    i = torch.arange(10)
    td = TensorDict({"obs": torch.stack([i, i], 1).float(), "next": {"r": i}}, [10])
    td["text"] = NonTensorStack(*map(str, range(10)))
    td.save(tmp_path / location).close()
    return tdstore.open(tmp_path / location, "r+")


def test_torchrl_is_named_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchrl.data", None)
    interop._storage_class.cache_clear()
    with pytest.raises(MissingDependencyError, match="pip install torchrl"):
        torchrl_storage(TensorDict({"a": torch.zeros(2)}, [2]))


@pytest.mark.parametrize("location", LOCATIONS)
def test_samples_are_rows(tmp_path: Any, location: str) -> None:
    stored = steps(tmp_path, location)
    buffer = rl.TensorDictReplayBuffer(storage=torchrl_storage(stored), batch_size=4)
    assert len(buffer) == 10
    batch = buffer.sample()
    assert isinstance(batch, peer.TensorDict) and torch.equal(batch["next", "r"].float(), batch["obs"][:, 0])
    assert batch["text"] == [str(int(r)) for r in batch["next", "r"]]
    assert buffer[2]["next", "r"] == 2 and buffer[torch.tensor([3, 1])]["next", "r"].tolist() == [3, 1]
    whole = rl.ReplayBuffer(
        storage=torchrl_storage(stored), sampler=rl.SamplerWithoutReplacement(), batch_size=5, prefetch=2
    )
    assert sorted(torch.cat([whole.sample()["next", "r"] for _ in range(2)]).tolist()) == list(range(10))


@pytest.mark.parametrize("location", LOCATIONS)
def test_what_a_buffer_is_extended_with_is_written(tmp_path: Any, location: str) -> None:
    stored = steps(tmp_path, location)
    buffer = rl.ReplayBuffer(storage=torchrl_storage(stored), batch_size=4)
    buffer.extend(
        to_tensordict(TensorDict({"obs": -torch.ones(2, 2), "next": {"r": [-1, -1]}, "text": ["a", "b"]}, [2]))
    )
    assert stored["next", "r"][:3].tolist() == [-1, -1, 2] and stored[:3]["text"] == ["a", "b", "2"]
    state = buffer.state_dict()
    other = rl.ReplayBuffer(storage=torchrl_storage(steps(tmp_path, f"other-{location}")), batch_size=4)
    other.load_state_dict(state)
    assert other[:]["next", "r"].tolist()[:3] == [-1, -1, 2]


@pytest.mark.parametrize("location", LOCATIONS)
def test_batches_are_cut_and_joined_as_trainers_do(tmp_path: Any, location: str) -> None:
    """What verl's DataProto asks of a TensorDict: select, split, chunk, cat, and TensorDicts of the other package."""
    stored = steps(tmp_path, location)
    assert [len(part) for part in stored.split(3)] == [3, 3, 3, 1]
    assert set(stored.select("obs", "text").keys()) == {"obs", "text"} and stored.select("obs").batch_size == (10,)
    halves = stored.chunk(2)
    for whole in (torch.cat(list(halves)), TensorDict.cat([half.to_tensordict() for half in halves])):
        assert whole["next", "r"].tolist() == list(range(10)) and whole["text"] == list(map(str, range(10)))
    theirs = torch.cat([to_tensordict(half) for half in halves])
    assert type(theirs) is peer.TensorDict and theirs["next", "r"].tolist() == list(range(10))
    rows = to_tensordict(stored[torch.tensor([7, 2])])
    assert rows["next", "r"].tolist() == [7, 2] and rows["text"] == ["7", "2"]
    lazy = rl.TensorDictReplayBuffer(storage=rl.LazyTensorStorage(10), batch_size=4)
    lazy.extend(to_tensordict(stored))
    batch = interop.from_tensordict(lazy.sample())
    assert type(batch) is TensorDict and batch["text"] == [str(int(r)) for r in batch["next", "r"]]


def test_a_torchrl_storage_made_of_what_is_in_memory(tmp_path: Any) -> None:
    td = steps(tmp_path, "run").exclude("text").clone()
    buffer = rl.ReplayBuffer(storage=rl.TensorStorage(to_tensordict(td)), batch_size=4)
    assert torch.equal((batch := buffer.sample())["next", "r"].float(), batch["obs"][:, 0])


class Transition(tdstore.TensorClass):
    obs: torch.Tensor
    text: str


def test_rows_of_a_tensorclass(tmp_path: Any) -> None:
    rows = Transition(obs=torch.arange(6.0), text=NonTensorStack(*"abcdef"), batch_size=[6])  # type: ignore[arg-type]
    rows.save(tmp_path / "x.h5").close()
    stored = tdstore.open(tmp_path / "x.h5", "r+")
    buffer = rl.ReplayBuffer(storage=torchrl_storage(stored), batch_size=4)
    batch = buffer.sample()
    assert peer.is_tensorclass(batch) and batch.text == ["abcdef"[int(i)] for i in batch.obs]
    buffer.extend(to_tensordict(Transition(obs=-torch.ones(2), text="new", batch_size=[2])))
    assert stored.obs.tolist() == [-1, -1, 2, 3, 4, 5] and stored[1].text == "new"


def rows(n: int, value: int) -> Any:
    return to_tensordict(TensorDict({"obs": torch.full((n, 2), float(value)), "r": torch.full((n,), value)}, [n]))


@pytest.mark.parametrize("location", [*LOCATIONS, None])
def test_an_allocated_dataset_has_no_rows_yet(tmp_path: Any, location: str | None) -> None:
    where = {} if location is None else {"location": tmp_path / location}
    td = TensorDict.from_schema({"obs": ((2,), "float32"), "r": ((), "int64")}, batch_size=[100], **where)
    buffer = rl.TensorDictReplayBuffer(storage=torchrl_storage(td), batch_size=32)
    assert len(buffer) == 0
    with pytest.raises(RuntimeError):
        buffer.sample()
    buffer.extend(rows(10, 7))
    assert len(buffer) == 10
    for _ in range(5):
        assert (buffer.sample()["r"] == 7).all(), "a row was sampled that nobody wrote"
    buffer.extend(rows(95, 8))
    assert len(buffer) == 100, "more rows than there is room for"
    assert td["r"].tolist() == [8] * 5 + [7] * 5 + [8] * 90
    assert set(td.keys()) == {"obs", "r"}, "the buffer added entries of its own to the dataset"
    state = buffer.state_dict()
    other = rl.TensorDictReplayBuffer(storage=torchrl_storage(td.clone(), length=3), batch_size=32)
    other.load_state_dict(state)
    assert len(other) == 100
    with pytest.raises(OptionError, match="how many is not known") as caught:
        torchrl_storage(td)
    assert "length=" in str(caught.value.hint)
    assert len(torchrl_storage(td, length=40)) == 40
    td.close()


@pytest.mark.parametrize("location", LOCATIONS)
def test_writes_between_allocation_and_buffer_are_seen(tmp_path: Any, location: str) -> None:
    td = TensorDict.from_schema({"r": ((), "int64")}, batch_size=[100], location=tmp_path / location)
    td[:5] = TensorDict({"r": torch.ones(5, dtype=torch.int64)}, [5])
    td.commit()
    with pytest.raises(OptionError):
        torchrl_storage(td)
    td.close()
    # Of a dataset that was opened nobody knows: all rows, unless the caller says how many.
    with tdstore.open(tmp_path / location, "r+") as opened:
        assert len(torchrl_storage(opened)) == 100
        assert len(torchrl_storage(opened, length=5)) == 5
        for wrong in (-1, 101, 2.0, True):
            with pytest.raises(OptionError, match="from 0 to 100"):
                torchrl_storage(opened, length=wrong)  # type: ignore[arg-type]
