"""Where the demo stores its data: one place for each backend that is installed."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tdstore


@dataclasses.dataclass(frozen=True)
class Place:
    """One row of the table. Only `storage` and `location` tell one backend from another."""

    storage: str
    location: str | None = None
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    note: str = ""

    @property
    def label(self) -> str:
        """Name in the table."""
        return f"{self.storage} {self.note}".strip()


def places(folder: Path) -> Iterator[Place]:
    """A place for every installed backend, ours first; h5 twice, to show an option."""
    order = ("memory", "cuda", "shared", "memmap", "h5")
    found = {status.name: status.backend for status in tdstore.backends() if status.backend is not None}
    for name in sorted(found, key=lambda name: (order.index(name) if name in order else len(order), name)):
        if name in ("memory", "cuda"):
            yield Place(name)
        elif name == "shared":
            yield Place(name, f"shm://atari-demo-{os.getpid()}")
        else:
            suffix = next(iter(found[name].suffixes), "")
            yield Place(name, str(folder / f"atari-{name}{suffix}"))
            if name == "h5":
                packed = {"compression": "gzip", "chunks": 8}
                yield Place(name, str(folder / f"atari-gzip{suffix}"), packed, "gzip")


def failures() -> list[str]:
    """What is installed but does not load."""
    return [str(status) for status in tdstore.backends() if status.backend is None]


def size_of(place: Place, td: Any) -> int:
    """Bytes of the files at the place; of the tensors, where there are no files."""
    where = Path(place.location or "")
    if place.location is None or "://" in place.location:
        return sum(leaf.nbytes for leaf in td.values(include_nested=True, leaves_only=True))
    files = [where] if where.is_file() else [file for file in where.rglob("*") if file.is_file()]
    return sum(file.stat().st_size for file in files)
