"""Redis storage for tdstore, and any server with its protocol: valkey, dragonfly."""

from __future__ import annotations

from collections.abc import Iterable

from tdstore.hookspecs import Backend, hookimpl
from tdstore.store import Cap

__all__ = ["tdstore_backends"]


@hookimpl
def tdstore_backends() -> Iterable[Backend]:
    """Declare `redis`; nothing connects, and hiredis is not imported, before a dataset is opened."""
    yield Backend(
        name="redis",
        opener="tdstore_redis.store:open_redis",
        summary="a redis, valkey or dragonfly server",
        caps=Cap.WRITE
        | Cap.PARTIAL_READ
        | Cap.PARTIAL_WRITE
        | Cap.RESIZE
        | Cap.SHARED
        | Cap.PERSISTENT
        | Cap.CONCURRENT_READ
        | Cap.CONCURRENT_WRITE
        | Cap.DISCARD,
        schemes=("redis", "rediss", "redis+unix", "valkey", "valkeys", "dragonfly"),
        remove="tdstore_redis.housekeeping:remove_dataset",
        list="tdstore_redis.housekeeping:list_datasets",
        install="pip install ./plugins/tdstore-redis   # from a clone of tdstore",
    )
