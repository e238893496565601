"""Get cells from the server, checked; tell what is not written yet from what is damaged."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from tdstore.types import Path
from tdstore_redis.layout import CHECK, Array, Bytes, Ids
from tdstore_redis.plans import Fetch
from tdstore_redis.wire import Wire

WINDOW = 16 << 20
"""Bytes that are asked for in one round trip: neither side holds more of an answer."""

Promised = Callable[[Wire, Array, Ids], "np.ndarray[Any, np.dtype[np.bool_]]"]
"""Which of these cells have been written, as far as the server's notes tell."""


class Damaged(Exception):
    """A cell is not what it should be. Becomes a `CorruptStoreError` when the dataset is still the same."""

    def __init__(self, path: Path, array: Array, reason: str) -> None:
        super().__init__(reason)
        self.path, self.array, self.reason = path, array, reason


def fetch(wire: Wire, fetches: Iterable[Fetch], promised: Promised) -> None:
    """Do all fetches, as many in one round trip as the window holds.

    Raises:
        Damaged: a cell whose checksum does not fit, or that should be there.
    """
    group: list[Fetch] = []
    size = 0
    for one in fetches:
        need = len(one.ids) * one.array.stride
        if group and size + need > WINDOW:
            _fetch_group(wire, group, promised)
            group, size = [], 0
        group.append(one)
        size += need
    if group:
        _fetch_group(wire, group, promised)


def _fetch_group(wire: Wire, group: Sequence[Fetch], promised: Promised) -> None:
    commands: list[bytes] = []
    expected: list[tuple[list[int], Ids | None]] = []
    total = 0
    for one in group:
        more, sizes, take = one.array.get_commands(one.ids)
        commands += more
        expected.append((sizes, take))
        total += sum(sizes)
    replies = wire.raising(commands, limit=total + 32 * len(commands) + 4096)
    at = 0
    for one, (sizes, take) in zip(group, expected, strict=True):
        raw = _raw(replies[at : at + len(sizes)], sizes)
        if take is not None:
            raw = np.frombuffer(raw, np.uint8).reshape(-1, one.array.stride)[take].tobytes()
        one.take(_checked(wire, one, raw, promised))
        at += len(sizes)


def _raw(replies: list[bytes], sizes: list[int]) -> bytes:
    """The answers behind one another; a block that ends early is filled up with zeros: cells not written."""
    raw = b"".join(replies) if len(replies) > 1 else replies[0]
    if len(raw) != sum(sizes):
        raw = b"".join([reply.ljust(size, b"\0") for reply, size in zip(replies, sizes, strict=True)])
    return raw


def _checked(wire: Wire, one: Fetch, raw: bytes, promised: Promised) -> Bytes:
    array, ids = one.array, one.ids
    wrong = array.wrong(ids, raw)
    stored = np.frombuffer(raw, np.uint8).reshape(len(ids), array.stride)
    if not len(wrong):
        return stored[:, CHECK:]
    suspects = ids[wrong]
    empty = ~stored[wrong].any(axis=1)
    if not empty.all():
        cell = int(suspects[~empty][0])
        raise Damaged(one.path, array, f"cell {cell} of {array.cells} does not have its checksum")
    if int(suspects[0]) < array.sealed or promised(wire, array, suspects).any():
        raise Damaged(one.path, array, f"cell {int(suspects[0])} of {array.cells} is missing")
    stored = stored.copy()
    stored[wrong, CHECK:] = array.fill_cell()
    return stored[:, CHECK:]
