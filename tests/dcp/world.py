"""Ranks of one gloo world: two that save sharded state, or three that load it."""

from __future__ import annotations

import datetime
import json
import sys
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed._shard.sharded_tensor import Shard as Block
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from tdstore.dcp import StorageReader, StorageWriter

ROWS = 7  # that neither two nor three ranks share evenly


def full(sign: int = 1) -> dict[str, torch.Tensor]:
    """The tensors of the state, whole."""
    return {
        "rows": sign * torch.arange(ROWS * 4.0).reshape(ROWS, 4),
        "columns": sign * torch.arange(10.0).reshape(2, 5).to(torch.bfloat16),
        "same": sign * torch.arange(3),
        "blocks": sign * torch.arange(12.0).reshape(6, 2),
        "plain": torch.tensor(sign),
    }


def state(values: dict[str, torch.Tensor], blank: bool) -> dict[str, Any]:
    """The state of this rank: shards of whole tensors, or of zeros."""
    size = dist.get_world_size()
    values = {name: torch.zeros_like(value) if blank else value for name, value in values.items()}
    mesh = init_device_mesh("cpu", (size,))
    rows = 6 // size
    first = dist.get_rank() * rows
    mine = Block.from_tensor_and_offsets(values["blocks"][first : first + rows].clone(), [first, 0], dist.get_rank())
    return {
        "model": {
            "rows": distribute_tensor(values["rows"], mesh, [Shard(0)]),
            "columns": distribute_tensor(values["columns"], mesh, [Shard(1)]),
            "same": distribute_tensor(values["same"], mesh, [Replicate()]),
            "blocks": ShardedTensor._init_from_local_shards([mine], 6, 2),
        },
        "plain": values["plain"],
        "step": 0 if blank else 7,
        "names": [] if blank else ["a", (1, 2.5)],
    }


def check(loaded: dict[str, Any], sign: int) -> None:
    """Compare what this rank has with its share of the whole tensors."""
    expected = state(full(sign), blank=False)
    for name, value in expected["model"].items():
        found = loaded["model"][name]
        if name == "blocks":
            pairs = zip(value.local_shards(), found.local_shards(), strict=True)
            assert all(torch.equal(a.tensor, b.tensor) for a, b in pairs), name
        else:
            assert torch.equal(value.to_local(), found.to_local()), name
    assert (loaded["plain"], loaded["step"], loaded["names"]) == (sign, 7, ["a", (1, 2.5)])


class Failing(StorageWriter):
    """Rank 1 cannot write."""

    def write_data(self, plan: Any, planner: Any) -> Any:
        if dist.get_rank() == 1:
            raise OSError("no space is left")
        return super().write_data(plan, planner)


def save(location: str, options: dict[str, Any]) -> None:
    """Save twice, and fail to save once more."""
    for sign in (-1, 1):
        dcp.save(state(full(sign), blank=False), storage_writer=StorageWriter(location, **options))
    try:
        dcp.save(state(full(5), blank=False), storage_writer=Failing(location, **options))
    except dcp.CheckpointException as error:
        assert "no space is left" in str(error)
    else:
        raise AssertionError("a rank failed, and the save did not")


def load(location: str, options: dict[str, Any]) -> None:
    """Load into this number of ranks."""
    loaded = state(full(), blank=True)
    dcp.load(loaded, storage_reader=StorageReader(location, **options))
    check(loaded, 1)


def main(rank: int, size: int, port: int, places: list[tuple[str, dict[str, Any]]]) -> None:
    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=60)
    where = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=size, timeout=timeout)
    for place, options in places:
        (save if size == 2 else load)(place, options)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]), json.loads(sys.argv[4]))
