"""What the tests of this plugin share."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from redis import Redis
from tdstore_redis.store import open_redis
from torch import Tensor

from tdstore.header import Group, Header
from tdstore.store import Store
from tdstore.types import LeafSpec, Path, Read, Write

Leaves = dict[Path, Tensor]


def save(location: str, leaves: Leaves, **options: Any) -> None:
    with open_redis(location, mode="w", **options) as store:
        fill(store, leaves)
        store.save_header(header_of(leaves))


def fill(store: Store, leaves: Leaves) -> None:
    store.create({p: LeafSpec(t.shape, t.dtype) for p, t in leaves.items()})
    store.write([Write(p, (), t) for p, t in leaves.items()])


def header_of(leaves: Leaves, tag: int = 0) -> Header:
    keys: dict[Path, list[str]] = {(): []}
    for path in leaves:
        for depth in range(len(path)):
            keys.setdefault(path[:depth], [])
            if path[depth] not in keys[path[:depth]]:
                keys[path[:depth]].append(path[depth])
    return Header({p: Group(batch_size=(), keys=tuple(k), extra={"tag": tag}) for p, k in keys.items()})


def load(location: str, **options: Any) -> Leaves:
    with open_redis(location, **options) as store:
        return everything(store)


def everything(store: Store) -> Leaves:
    paths = sorted(store.paths())
    return dict(zip(paths, store.read([Read(p) for p in paths]), strict=True))


def same(a: Leaves, b: Leaves) -> bool:
    return a.keys() == b.keys() and all(
        a[p].dtype == b[p].dtype and a[p].shape == b[p].shape and bits(a[p]) == bits(b[p]) for p in a
    )


def bits(t: Tensor) -> bytes:
    return bytes(t.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()) if t.numel() else b""


def rows(*numbers: int) -> tuple[Tensor]:
    return (torch.tensor(numbers),)


def span(a: int, b: int) -> tuple[slice]:
    return (slice(a, b, 1),)


def dump(client: Redis) -> dict[bytes, Any]:
    """Everything on the server, comparable."""
    found: dict[bytes, Any] = {}
    for key in client.scan_iter(count=1000):
        kind = client.type(key)
        found[key] = (
            client.hgetall(key) if kind == b"hash" else client.smembers(key) if kind == b"set" else client.get(key)
        )
    return found


def blocks(client: Redis) -> list[bytes]:
    """The keys of all blocks, sorted."""
    return sorted(key for key in client.scan_iter(b"tds:*", count=1000) if b"{" not in key)


def in_child(work: Callable[[], object]) -> int:
    """Run in a forked child: its exit code, or -9 when it was killed."""
    pid = os.fork()
    if not pid:
        code = 99
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
