"""Reading several containers into memory: those over one store in common rounds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tdstore.container.core.container import Container
from tdstore.container.varlen.rounds import drive, together


def residents(tds: Sequence[Any]) -> list[Any]:
    """Read containers into memory, in their order.

    Those that stay in a store are read together, as many at a time as share it.
    """
    by_store: dict[int, list[int]] = {}
    for number, td in enumerate(tds):
        if isinstance(td, Container._stored_class):
            by_store.setdefault(id(td._handle.store), []).append(number)
    made: dict[int, Any] = {}
    for numbers in by_store.values():
        rounds = together([tds[number]._rounds() for number in numbers])
        made.update(zip(numbers, drive(rounds, tds[numbers[0]]._handle.store), strict=True))
    return [made[number] if number in made else td._resident() for number, td in enumerate(tds)]


def with_common_keys(tds: list[Any]) -> list[Any]:
    """Return the same containers with only the keys that all have."""
    keys = [set(td.keys(True)) for td in tds]
    both = set.intersection(*keys)
    if all(k == both for k in keys):
        return tds
    return [td.exclude(*(k - both)) for td, k in zip(tds, keys, strict=True)]
