"""What the tests of this plugin share."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from redis import Redis
from tdstore_redis.store import open_redis
from torch import Tensor

from tdstore.header import Group, Header
from tdstore.testing.crash import NEW, OLD, deaths, die, in_child, killed_after
from tdstore.testing.samples import bits
from tdstore.testing.setup import fill
from tdstore.testing.setup import load as load_from
from tdstore.testing.setup import read_all as everything
from tdstore.testing.setup import same_leaves as same
from tdstore.types import Path

__all__ = [
    "NEW",
    "OLD",
    "Leaves",
    "bits",
    "blocks",
    "deaths",
    "die",
    "dump",
    "everything",
    "fill",
    "header_of",
    "in_child",
    "killed_after",
    "load",
    "rows",
    "same",
    "save",
    "span",
]

Leaves = dict[Path, Tensor]
load = partial(load_from, open_redis)


def save(location: str, leaves: Leaves, **options: Any) -> None:
    with open_redis(location, mode="w", **options) as store:
        fill(store, leaves)
        store.save_header(header_of(leaves))


def header_of(leaves: Leaves, tag: int = 0) -> Header:
    keys: dict[Path, list[str]] = {(): []}
    for path in leaves:
        for depth in range(len(path)):
            keys.setdefault(path[:depth], [])
            if path[depth] not in keys[path[:depth]]:
                keys[path[:depth]].append(path[depth])
    return Header({p: Group(batch_size=(), keys=tuple(k), extra={"tag": tag}) for p, k in keys.items()})


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
