"""Reads of entries in rounds: each round is one `Store.read`, shared by all entries that are read together.

The place of a row of strings or of a nested tensor has to be read before its bytes can be asked for. So the read of
an entry is a generator: it yields the reads that it wants next and is sent their tensors. `together` drives several
in lockstep, and a batch costs as many rounds as its slowest entry, whatever else is in it.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from itertools import islice
from typing import Any, TypeVar

from torch import Tensor

from tdstore.index.selection import Selection
from tdstore.store import Cap, Store
from tdstore.types import LeafSpec, Path, Read

T = TypeVar("T")

Rounds = Generator[list[Read], list[Tensor], T]
"""The read of one entry: yields lists of reads, is sent their tensors, and returns the entry."""


def drive(rounds: Rounds[T], store: Store) -> T:
    """Run a read: one `Store.read` per round.

    Args:
        rounds: not started yet.
        store: the store that its paths are about.

    Returns:
        What the generator returns.
    """
    try:
        reads = next(rounds)
        while True:
            reads = rounds.send(store.read(reads))
    except StopIteration as end:
        result: T = end.value
        return result


def read_plain(store: Store, specs: Mapping[Path, LeafSpec], paths: Sequence[Path], sel: Selection) -> list[Tensor]:
    """Read leaves, all at one selection of their leading dimensions, by one `Store.read`.

    Args:
        store: the store.
        specs: what it says of its leaves.
        paths: the leaves.
        sel: the rows.

    Raises:
        BatchSizeError: a leaf no longer has all of these rows.
    """
    for path in paths:
        sel.check_there(specs[path].shape)
    plan, parts = sel.read_plan(), Cap.PARTIAL_READ in store.caps
    full = sel.shape == sel.src_shape and sel.is_full
    index = plan.index if parts and not full else ()
    values = store.read([Read(path, index) for path in paths])
    if full or (parts and plan.exact):
        return values
    return [plan.finish(value if parts else value[plan.index]) for value in values]


def together(parts: Sequence[Rounds[Any]]) -> Rounds[list[Any]]:
    """Combine reads of one store: each round asks for what all of them want next.

    Args:
        parts: not started yet.

    Returns:
        The results, in the order of `parts`.
    """
    results: list[Any] = [None] * len(parts)
    wanted: dict[int, list[Read]] = {}
    for number, part in enumerate(parts):
        try:
            wanted[number] = next(part)
        except StopIteration as end:
            results[number] = end.value
    while wanted:
        found = iter((yield [read for reads in wanted.values() for read in reads]))
        further: dict[int, list[Read]] = {}
        for number, reads in wanted.items():
            try:
                further[number] = parts[number].send(list(islice(found, len(reads))))
            except StopIteration as end:
                results[number] = end.value
        wanted = further
    return results
