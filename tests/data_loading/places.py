"""One dataset of numbered rows at a place of each kind."""

from __future__ import annotations

import itertools
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from tdstore import TensorDict
from tdstore.builtin.shared.store import remove

LOCAL = ["memmap", "h5", "zarr", "tdz", "file", "shared"]
SERVERS = ["redis", "s3"]
_numbers = itertools.count()


def numbered(rows: int) -> TensorDict:
    """Rows that know their numbers, in two levels and a string per row."""
    row = torch.arange(rows)
    return TensorDict({"row": row, "next": {"x": row[:, None] * torch.ones(3)}, "name": [f"r{i}" for i in row]}, [rows])


@contextmanager
def stored(kind: str, rows: int, request: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """A location with `numbered(rows)`, and the options to open it."""
    folder, name = request.getfixturevalue("tmp_path"), f"rows{os.getpid()}-{next(_numbers)}"
    options: dict[str, Any] = {}
    if kind == "redis":
        place = f"{request.getfixturevalue('redis').url}/{name}"
    elif kind == "s3":
        server = request.getfixturevalue("s3")
        place, options = f"{server.url}/{name}", {"storage_options": server.fsspec_options}
    elif kind == "shared":
        place = f"shm://test-{uuid.uuid4().hex}"
    elif kind == "file":  # the object layout, in a folder
        place = f"file://{folder}/{name}"
    else:
        place = str(folder / f"{name}{'' if kind == 'memmap' else '.' + kind}")
    numbered(rows).save(place, **options).close()
    try:
        yield place, options
    finally:
        if kind == "shared":
            remove(place)
