"""Draw random batches and tell their content apart to the bit: used by the writer and by each reader."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import time
from typing import Any

import torch
from tqdm import tqdm

import tdstore

BATCH = 256
BLOCK = 256


@dataclasses.dataclass(frozen=True)
class Findings:
    """What a dataset holds. Two datasets are equal if all but `seconds` is."""

    shape: list[Any]
    """Class-independent structure: batch sizes, and each entry's key, shape and dtype, in order."""
    blocks: list[str]
    """A hash of each block of rows, which together are all rows."""
    batches: list[str]
    """A hash of each random batch."""
    seconds: float
    """Time that drawing the random batches took, without hashing."""


def structure(td: Any) -> list[Any]:
    """Batch size, key order, shapes and dtypes, of nested TensorDicts too."""
    rows: list[Any] = [["", list(td.batch_size), "entries"]]
    empty = td[:0]  # no rows: nothing is read
    for key in td.keys(include_nested=True):
        path = key if isinstance(key, tuple) else (key,)
        value = empty.get(key)
        if tdstore.is_tensor_collection(value):
            rows.append(
                ["/".join(path), list(value.batch_size), "values" if tdstore.is_non_tensor(value) else "entries"]
            )
        else:
            rows.append(["/".join(path), list(value.shape), str(value.dtype)])
    return rows


def digest(batch: Any) -> str:
    """SHA-256 of every key, dtype, shape and value of a batch."""
    found = hashlib.sha256()
    for key in batch.keys(include_nested=True):
        value = batch[key]
        if isinstance(value, torch.Tensor):
            found.update(f"{key} {value.dtype} {list(value.shape)}".encode())
            found.update(value.cpu().contiguous().flatten().view(torch.uint8).numpy())
        elif isinstance(value, list):
            found.update(f"{key} {json.dumps(value)}".encode())
        else:
            found.update(f"{key} {list(value.batch_size)}".encode())
    return found.hexdigest()


def random_rows(rows: int, seed: int) -> torch.Tensor:
    """Row numbers of one batch: unsorted, with duplicates, the same in every process."""
    return torch.randint(rows, (BATCH,), generator=torch.Generator().manual_seed(seed))


def examine(td: Any, seeds: range, label: str) -> Findings:
    """Draw the batch of each seed, then go through all rows."""
    rows = td.batch_size[0]
    steps = len(seeds) + -(-rows // BLOCK)
    batches, blocks, seconds = [], [], 0.0
    with tqdm(total=steps, desc=f"reading {label}", unit=" batches", leave=False) as bar:
        for seed in seeds:
            wanted = random_rows(rows, seed)
            start = time.perf_counter()
            batch = td.read(wanted)
            seconds += time.perf_counter() - start
            batches.append(digest(batch))
            bar.update()
        for first in range(0, rows, BLOCK):
            blocks.append(digest(td.read(slice(first, min(first + BLOCK, rows)))))
            bar.update()
    return Findings(structure(td), blocks, batches, seconds)
