"""Checkpoints of `torch.distributed.checkpoint`: saved by two ranks, and loaded by one and by three."""

from __future__ import annotations

import doctest
import importlib
import json
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

import tdstore
from tdstore.dcp import StorageReader, StorageWriter
from tdstore.errors import CorruptStoreError, StoreNotFoundError, UnsupportedError
from tdstore.testing.processes.warm import python

from .world import full

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is:UserWarning",
    "ignore:.*ShardedTensor:FutureWarning",
    "ignore:TypedStorage is deprecated:UserWarning",
)
LOCAL = {"memmap": "run", "h5": "run.h5", "zarr": "run.zarr", "tdz": "run.tdz", "file": "file://{}/run"}


def save(state: dict[str, Any], place: str, **options: Any) -> None:
    dcp.save(state, storage_writer=StorageWriter(place, **options), no_dist=True)


def load(state: dict[str, Any], place: str, **options: Any) -> dict[str, Any]:
    dcp.load(state, storage_reader=StorageReader(place, **options), no_dist=True)
    return state


def in_world(size: int, places: list[tuple[str, dict[str, Any]]]) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [*python(), "-m", "tests.dcp.world"]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(size), str(port), json.dumps(places)], cwd=ROOT, stderr=subprocess.PIPE, text=True
        )
        for rank in range(size)
    ]
    try:
        errors = [rank.communicate(timeout=240)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [rank.returncode for rank in ranks] == [0] * size, "\n".join(errors)


def test_two_ranks_save_and_one_and_three_load(tmp_path: Path, s3: Any) -> None:
    bucket = {"storage_options": s3.fsspec_options}
    places: list[tuple[str, dict[str, Any]]] = [(str(tmp_path / "run"), {}), (f"{s3.url}/ckpt", bucket)]
    in_world(2, places)
    for place, options in places:
        # The two saves and the one that failed: the last that was complete is there, and one part of the failed one.
        assert len(tdstore.list_datasets(place, **options)) == 4
        found = load({"model": {k: torch.zeros_like(v) for k, v in full().items() if k != "plain"}}, place, **options)
        assert all(torch.equal(found["model"][name], full()[name]) for name in found["model"])
    in_world(3, places)
    for place, options in places:
        save({"a": torch.ones(2)}, place, **options)
        assert len(tdstore.list_datasets(place, **options)) == 2
        assert load({"a": torch.zeros(2)}, place, **options)["a"].tolist() == [1, 1]


def rich() -> dict[str, Any]:
    return {
        "weight": torch.arange(6.0).reshape(2, 3),
        "half": torch.tensor(3, dtype=torch.bfloat16),
        "none": torch.zeros(0, 4),
        "dotted.name/of": torch.arange(3),
        "values": {"step": 7, "lr": 0.5, "pair": (1, "x"), "deep": [{"a": None}]},
    }


def blank() -> dict[str, Any]:
    state = {key: torch.zeros_like(value) for key, value in rich().items() if key != "values"}
    return {**state, "values": {"step": 0, "lr": 0.0, "pair": (0, ""), "deep": [{"a": 1}]}}


@pytest.mark.parametrize("kind", [*LOCAL, "memory"])
def test_one_rank_on_each_storage(tmp_path: Path, kind: str) -> None:
    place = f"memory://dcp-{id(tmp_path)}" if kind == "memory" else LOCAL[kind].format(tmp_path)
    place = place if "://" in place else str(tmp_path / place)
    save({"old": torch.zeros(3)}, place)
    save(rich(), place)
    assert len(tdstore.list_datasets(place)) == 2  # the document, and the part of this rank
    found = load(blank(), place)
    assert found["values"] == rich()["values"]
    for name in ("weight", "half", "none", "dotted.name/of"):
        assert torch.equal(found[name], rich()[name])
    part = next(p for p in tdstore.list_datasets(place) if not p.endswith("checkpoint"))
    with tdstore.open(part) as td:
        assert torch.equal(td["weight"], rich()["weight"])


def test_small_tensors_share_one_file(tmp_path: Path) -> None:
    """In place of a file and an `fsync` for each."""
    state = {f"layer.{i}": torch.full((30, 30), float(i)) for i in range(20)}
    save(state, str(tmp_path / "run"))
    (part,) = (p for p in (tmp_path / "run").iterdir() if p.name != "checkpoint")
    assert {p.name for p in part.iterdir()} == {"tdstore.json", "tdstore.pack"}
    loaded = load({key: torch.zeros(30, 30) for key in state}, str(tmp_path / "run"))
    assert all(torch.equal(loaded[key], value) for key, value in state.items())


def test_a_load_casts(tmp_path: Path) -> None:
    save({"a": torch.arange(4)}, str(tmp_path / "x"))
    assert load({"a": torch.zeros(4)}, str(tmp_path / "x"))["a"].tolist() == [0, 1, 2, 3]


def test_the_id_of_a_checkpoint_is_its_location(tmp_path: Path) -> None:
    writer, reader = StorageWriter(tmp_path / "none"), StorageReader(tmp_path / "none")
    for step in (1, 2):
        state = {"a": torch.tensor(step)}
        dcp.save(state, storage_writer=writer, checkpoint_id=str(tmp_path / f"{step}"), no_dist=True)
    dcp.load(state := {"a": torch.tensor(0)}, storage_reader=reader, checkpoint_id=tmp_path / "1", no_dist=True)
    assert state["a"] == 1
    assert not (tmp_path / "none").exists()


class Odd:
    """No value of tdstore's."""


class Own(dcp.SavePlanner):
    """A planner that has no `lookup_object`: it delegates."""

    def __init__(self) -> None:
        self.inner = DefaultSavePlanner()

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        self.inner.set_up_planner(state_dict, storage_meta, is_coordinator)

    def create_local_plan(self) -> Any:
        return self.inner.create_local_plan()

    def create_global_plan(self, all_plans: Any) -> Any:
        return self.inner.create_global_plan(all_plans)

    def finish_plan(self, new_plan: Any) -> Any:
        return self.inner.finish_plan(new_plan)

    def resolve_data(self, write_item: Any) -> Any:
        return self.inner.resolve_data(write_item)


def test_what_cannot_be_stored_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    place = str(tmp_path / "run")
    save({"a": [1, {"b": 2.5}]}, place)
    with pytest.raises(dcp.CheckpointException, match="'odd' of the state is no tensor, and cannot be stored"):
        save({"a": [2], "odd": Odd()}, place)
    with pytest.raises(dcp.CheckpointException, match=r"'a' is a tensor of layout torch\.sparse_coo"):
        save({"a": torch.eye(3).to_sparse()}, place)
    assert load({"a": [0, {"b": 0.0}]}, place) == {"a": [1, {"b": 2.5}]}


def test_a_planner_that_gives_pickles_only(tmp_path: Path) -> None:
    for state in ({"a": torch.arange(3)}, {"a": torch.arange(3), "b": 1}):
        arguments = {"storage_writer": StorageWriter(tmp_path / "run"), "planner": Own(), "no_dist": True}
        if "b" in state:
            with pytest.raises(dcp.CheckpointException, match="'b' of the state is no tensor, and Own gives a pickle"):
                dcp.save(state, **arguments)
        else:
            dcp.save(state, **arguments)
    assert load({"a": torch.zeros(3)}, str(tmp_path / "run"))["a"].tolist() == [0, 1, 2]


def test_a_dataset_is_no_place_for_a_checkpoint(tmp_path: Path) -> None:
    tdstore.TensorDict({"a": torch.arange(3)}, [3]).save(tmp_path / "run").close()
    with pytest.raises(dcp.CheckpointException, match="is a dataset; a checkpoint needs a location of its own"):
        save({"a": torch.zeros(2)}, str(tmp_path / "run"))
    assert tdstore.open(tmp_path / "run")["a"].tolist() == [0, 1, 2]


def test_ranks_without_collectives_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="one document for all ranks"):
        StorageWriter(tmp_path / "run").set_up_storage_writer(True, rank=0, use_collectives=False)


def test_missing_and_damaged_documents(tmp_path: Path) -> None:
    reader = StorageReader(tmp_path / "run")
    with pytest.raises(StoreNotFoundError, match="no checkpoint was saved at"):
        reader.read_metadata()
    save({"a": torch.arange(4)}, str(tmp_path / "run"))
    document = tmp_path / "run" / "checkpoint" / "tdstore.json"
    sound = document.read_bytes()
    document.write_bytes(sound.replace(b'"save":"', b'"save":"0', 1))
    with pytest.raises(CorruptStoreError, match=r"tdstore\.json"):
        reader.read_metadata()
    with pytest.raises(dcp.CheckpointException, match="global metadata read failed: .*checksum|metadata is None"):
        load({"a": torch.zeros(4)}, str(tmp_path / "run"))
    document.write_bytes(sound)
    tdstore.TensorDict({"a": torch.zeros(2)}, [2]).save(tmp_path / "run" / "checkpoint").close()
    with pytest.raises(CorruptStoreError, match="no sound document of a checkpoint"):
        reader.read_metadata()


def rewritten(place: Path, **changes: Any) -> None:
    """Write a document that is sealed, and not what `StorageWriter` writes."""
    handle = tdstore.StoreHandle.open(place / "checkpoint", mode="r+")
    group = handle.groups[()]
    extra = {"torch_checkpoint": {**group.extra["torch_checkpoint"], **changes}}
    with handle.changing():
        handle.commit({(): type(group)(batch_size=(), extra=extra)}, {})
    handle.close()


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"save": "../../etc"}, CorruptStoreError, "the name of the save"),
        ({"version": 2}, UnsupportedError, "a checkpoint of version 2"),
        ({"parts": 0}, CorruptStoreError, "a part that is not there"),
        ({"entries": {"a": {"type": "tensor"}}}, CorruptStoreError, "missing required field"),
        ({"planner": {"$unknown": 1}}, CorruptStoreError, "unknown tagged value"),
        (
            {"entries": {"a": {"type": "tensor", "dtype": "int64", "size": [4], "pieces": [[[2], [4], 0]]}}},
            CorruptStoreError,
            "a piece of 'a' is outside of the tensor",
        ),
        (
            {"entries": {"a": {"type": "tensor", "dtype": "object", "size": [4], "pieces": []}}},
            CorruptStoreError,
            "object",
        ),
    ],
)
def test_documents_that_nobody_wrote(tmp_path: Path, changes: Any, error: Any, message: str) -> None:
    save({"a": torch.arange(4)}, str(tmp_path))
    rewritten(tmp_path, **changes)
    with pytest.raises(error, match=message):
        StorageReader(tmp_path).read_metadata()


def test_parts_that_are_damaged_or_of_another_save(tmp_path: Path) -> None:
    save({"a": torch.arange(4), "b": 3}, str(tmp_path))
    (part,) = (p for p in tmp_path.iterdir() if p.name != "checkpoint")
    tdstore.TensorDict({"a": torch.zeros(4)}).save(part).close()
    with pytest.raises(dcp.CheckpointException, match="does not hold the values of its checkpoint"):
        load({"b": 0}, str(tmp_path))
    tdstore.TensorDict({"c": torch.zeros(4)}).save(part).close()
    with pytest.raises(dcp.CheckpointException, match="does not hold 'a' of its checkpoint"):
        load({"a": torch.zeros(4)}, str(tmp_path))


@pytest.mark.parametrize("name", ["reader", "writer"])
def test_examples(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = doctest.testmod(importlib.import_module(f"tdstore.dcp.{name}"), optionflags=doctest.NORMALIZE_WHITESPACE)
    assert done.attempted
    assert not done.failed
