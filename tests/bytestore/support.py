"""Openers and damage for the tests of byte stores."""

from __future__ import annotations

from typing import Any

import torch

from tdstore.bytestore import ByteStore, open_objects
from tdstore.header import Group, Header
from tdstore.storekit.local_engine import LocalEngine
from tdstore.types import LeafSpec, Mode, Path, Read, Write
from tests.bytestore.memory_engine import Bucket, MemoryEngine

BUCKETS: dict[str, Bucket] = {}


def open_mem(
    location: str,
    *,
    mode: Mode = "r",
    buffer_bytes: int = 64 << 20,
    object_bytes: int = 64 << 20,
    version: str | None = None,
) -> ByteStore:
    """The store of a bucket of this process, `mem://name`."""
    engine = MemoryEngine(BUCKETS.setdefault(location, Bucket()), url=location)
    return open_objects(engine, mode=mode, buffer_bytes=buffer_bytes, object_bytes=object_bytes, version=version)


def open_local(
    location: str,
    *,
    mode: Mode = "r",
    buffer_bytes: int = 64 << 20,
    synced: bool = False,
    version: str | None = None,
) -> ByteStore:
    """The object layout in a local folder."""
    engine = LocalEngine(location, durable=synced)
    return open_objects(engine, mode=mode, buffer_bytes=buffer_bytes, reopen=(location, {}), version=version)


def numbered(n: int) -> Header:
    return Header({(): Group(batch_size=(n,))})


def save(engine: Any, leaves: dict[Path, torch.Tensor], *, mode: Mode = "w", n: int = 0, **options: Any) -> ByteStore:
    """Write leaves whole and commit; the store stays open."""
    store = open_objects(engine, mode=mode, **options)
    store.create({path: LeafSpec(value.shape, value.dtype) for path, value in leaves.items()})
    store.write([Write(path, (), value) for path, value in leaves.items()])
    store.save_header(numbered(n))
    return store


def contents(store: ByteStore) -> dict[Path, torch.Tensor]:
    paths = list(store.paths())
    return dict(zip(paths, store.read([Read(path) for path in paths]), strict=True))


def equal(a: dict[Path, torch.Tensor], b: dict[Path, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)
