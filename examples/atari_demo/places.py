"""Where the demo stores its data: one place for each backend that is installed."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from servers import Servers

import tdstore


@dataclasses.dataclass(frozen=True)
class Place:
    """One row of the table. Only `storage` and `location` tell one backend from another."""

    storage: str | None
    location: str | None = None
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    note: str = ""
    read_from: str | None = None
    """Another location of the same data, for readers: what was written to a folder is read over http."""

    @property
    def label(self) -> str:
        """Name in the table."""
        return f"{self.storage or ''} {self.note}".strip()


def places(folder: Path, running: Servers) -> Iterator[Place]:
    """A place for every installed backend, ours first; some twice, to show an option."""
    order = ("memory", "cuda", "shared", "memmap", "h5", "zarr", "remote", "redis")
    found = {status.name: status.backend for status in tdstore.backends() if status.backend is not None}
    run = f"atari-{os.getpid()}"
    for name in sorted(found, key=lambda name: (order.index(name) if name in order else len(order), name)):
        if name in ("memory", "cuda"):
            yield Place(name)
        elif name == "shared":
            yield Place(name, f"shm://{run}")
        elif name == "remote":
            if running.s3:
                yield Place(None, f"{running.s3}/{run}", note=f"s3 ({running.s3_kind})")
                if "zarr" in found:
                    yield Place(None, f"{running.s3}/{run}.zarr", note="s3 zarr")
            if running.http:
                written = f"file://{running.http_folder}/{run}"
                yield Place(None, written, {"mode": "w"}, "http", read_from=f"{running.http}/{run}")
        elif name == "redis":
            if running.redis:
                yield Place(None, f"{running.redis}/{run}", note="redis")
        else:
            suffix = next(iter(found[name].suffixes), "")
            yield Place(name, str(folder / f"atari-{name}{suffix}"))
            if name == "h5":
                packed = {"compression": "gzip", "chunks": 8}
                yield Place(name, str(folder / f"atari-gzip{suffix}"), packed, "gzip")


def failures() -> list[str]:
    """What is installed but does not load."""
    return [str(status) for status in tdstore.backends() if status.backend is None]


def not_installed() -> list[str]:
    """Which of the project's own plugins are not there."""
    there = {status.name for status in tdstore.backends()}
    return [name for name in ("h5", "zarr", "remote", "redis") if name not in there]


def size_of(place: Place, td: Any) -> int:
    """Bytes of the files at the place; of the tensors, where there are no files."""
    location = (place.location or "").removeprefix("file://")
    where = Path(location)
    if not location or "://" in location:
        return sum(leaf.nbytes for leaf in td.values(include_nested=True, leaves_only=True))
    files = [where] if where.is_file() else [file for file in where.rglob("*") if file.is_file()]
    return sum(file.stat().st_size for file in files)
