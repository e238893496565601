"""The store of the example plugin: the memory store, kept by location for as long as the process lives."""

from __future__ import annotations

from tdstore.builtin.memory import MemoryStore
from tdstore.errors import StoreNotFoundError

_PLACES: dict[str, MemoryStore] = {}


def open_example(location: str, *, mode: str = "r", compression: str = "none", chunks: int = 1) -> MemoryStore:
    if mode in ("r", "r+") and location not in _PLACES:
        raise StoreNotFoundError(f"nothing is stored at {location}", url=location)
    store = _PLACES.setdefault(location, MemoryStore())
    store.url = location
    return store


def open_odd(location: str, *, mode: str = "r") -> dict[str, str]:
    return {}
