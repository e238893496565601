"""Removal of a dataset: first its head, in one transaction, then its blocks."""

from __future__ import annotations

import random
import time

from tdstore.storekit import refusals
from tdstore_redis.connection import pack
from tdstore_redis.transactions import keyspace
from tdstore_redis.transactions.commit import others_writing, replaced_arrays, sweep
from tdstore_redis.transactions.writer import Writer


def remove(writer: Writer) -> None:
    """Remove the dataset that a writer has open. A killed process leaves blocks that the next writer removes.

    Raises:
        StoreBusyError: other processes have written rows, and not committed them.
        StoreError: the dataset was replaced since it was opened.
    """
    with writer.line.errors("deleting"):
        until = time.monotonic() + writer.lock_timeout
        while not _remove(writer, last=time.monotonic() >= until):
            time.sleep(random.uniform(0.002, 0.02))


def _remove(writer: Writer, *, last: bool) -> bool:
    keys, wire = writer.keys, writer.wire()
    _, state, notes = wire.raising(
        [
            pack(b"WATCH", keys.head, keys.pending, keys.writers),
            pack(b"HMGET", keys.head, b"dataset", b"owner"),
            pack(b"HGETALL", keys.writers),
        ],
        limit=keyspace.MAX_RECORDS_BYTES,
    )
    try:
        if state[0] != writer.document.dataset.encode():
            raise writer.replaced()
        if others := others_writing(writer, wire, state[1], notes):
            wire.call(b"UNWATCH")
            if last:
                raise refusals.busy(writer.url, ", ".join(sorted(others)), writer.lock_timeout)
            return False
        field, listed = replaced_arrays(writer, wire, state[0])
        commands = [pack(b"MULTI"), pack(b"DEL", keys.head, keys.writers)]
        commands += [pack(b"HSET", keys.pending, field, listed)] if listed is not None else []
        if not writer.execute(wire, commands):
            return False
    except BaseException:
        writer.disarm(wire)
        raise
    if listed is not None:
        sweep(writer, field)
    return True
