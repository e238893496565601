"""One storage in each place: the memory, shared memory, files, servers."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tdstore import TensorDict
from tdstore.rl.buffers import ReplayBuffer
from tdstore.rl.storages import LazyMemmapStorage, LazyStorage, LazyTensorStorage

KINDS = ["memory", "memmap", "shared", "h5", "zarr", "remote", "redis", "s3"]
_SERVERS = {"redis": "redis", "s3": "rgw"}
_numbers = itertools.count()

Maker = Callable[..., Any]


def kinds(names: list[str] = KINDS) -> Any:
    """Parameters for each place."""
    return pytest.mark.parametrize("kind", names)


def maker(kind: str, request: pytest.FixtureRequest) -> Maker:
    """A function that makes a storage of that kind; `make.place(storage)` reopens it."""
    tmp_path = request.getfixturevalue("tmp_path")
    server = request.getfixturevalue(_SERVERS[kind]) if kind in _SERVERS else None

    def make(max_size: int, **options: Any) -> Any:
        number = next(_numbers)
        if kind == "memory":
            return LazyTensorStorage(max_size, **options)
        if kind == "memmap":
            return LazyMemmapStorage(max_size, scratch_dir=tmp_path / f"m{number}", **options)
        if kind == "shared":
            return LazyStorage(max_size, "shared", **options)
        if kind == "redis":
            return LazyStorage(max_size, f"{server.url}/replay{number}", **options)
        if kind == "s3":
            where = f"{server.url}/replay{os.getpid()}-{number}"
            return LazyStorage(max_size, where, storage_options=server.fsspec_options, **options)
        suffix = {"h5": ".h5", "zarr": ".zarr"}.get(kind, "")
        return LazyStorage(max_size, kind, path=tmp_path / f"p{number}{suffix}", **options)

    return make


def rows(*numbers: int) -> TensorDict:
    """Rows of one number each."""
    return TensorDict({"a": torch.tensor(numbers)}, [len(numbers)])


def write_four(storage: Any, start: int, index: Any) -> None:
    """Write four rows in another process, and wait for those of a second one."""
    torch.set_num_threads(1)
    buffer = ReplayBuffer(storage=storage)
    index.put(sorted(buffer.extend(rows(*range(start, start + 4))).tolist()))
    end = time.monotonic() + 60
    while len(buffer) < 8:
        assert time.monotonic() < end
        time.sleep(0.01)


def read_all(storage: Any, queue: Any) -> None:
    """Read rows in another process, and change one."""
    queue.put(storage[:]["a"].tolist())
    storage[2] = TensorDict({"a": torch.tensor(30)})


def wait_and_read(storage: Any, queue: Any) -> None:
    """Read rows that nobody has written yet."""
    queue.put("waiting")
    queue.put(storage[:]["a"].tolist() if storage.get(0) is not None else None)


def extend_by(storage: Any, first: int, last: int) -> None:
    """Write rows in another process."""
    torch.set_num_threads(1)
    buffer = ReplayBuffer(storage=storage)
    buffer.extend(rows(*range(first, last)))
    buffer.flush()


def add_to(buffer: Any, first: int, last: int, priority: float) -> None:
    """Write transitions with a priority in another process."""
    torch.set_num_threads(1)
    buffer.add(rows(*range(first, last)))
    buffer.update_priorities(torch.arange(first, last), torch.full((last - first,), priority))
