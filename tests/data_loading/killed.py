"""A program that reads an epoch, writes what it has had after each step, and waits to be killed."""

from __future__ import annotations

import json
import time
from typing import Any

from torch.utils.data import DataLoader

from tdstore.data import Epochs

SIZE = 120


def ranks_of(place: str, world_size: int, batch_size: int, shuffle: Any, options: dict[str, Any]) -> list[Epochs]:
    """The epochs of all ranks, which a job would have in as many processes."""
    made = []
    for rank in range(world_size):
        one = Epochs(
            place, batch_size, shuffle=shuffle, seed=8, rank=rank, world_size=world_size, columns=["row"],
            block_rows=8, window_blocks=3, options=options,
        )  # fmt: skip
        made.append(one)
    return made


def main(place: str, world_size: int, batch_size: int, shuffle: Any, workers: int, options: dict[str, Any]) -> None:
    """Write a line after each step: the rows of all ranks, and the state."""
    ranks = ranks_of(place, world_size, batch_size, shuffle, options)
    loaders = [DataLoader(epochs, batch_size=None, num_workers=workers) for epochs in ranks]
    for number, step in enumerate(zip(*loaders, strict=False), 1):
        rows = [row for batch in step for row in batch["row"].tolist()]
        state = ranks[-1].state_dict(batches=number) if workers else ranks[-1].state_dict()
        print(json.dumps([rows, state]), flush=True)
        time.sleep(0.02)
    time.sleep(600)
