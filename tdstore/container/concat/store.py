"""A read-only store whose leaves are those of several stores, one after the other."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tdstore.container.concat.leaves import ConcatLeaf, Piece
from tdstore.container.concat.schema import Place
from tdstore.errors import CorruptStoreError, MismatchError, ReadOnlyError
from tdstore.header import Header
from tdstore.index.ranges import index_shape
from tdstore.index.rows import gather, scatter
from tdstore.store import Cap, Store
from tdstore.storekit import CheckedStore, refusals
from tdstore.storekit.foreign_strings import HEAD, mark_of
from tdstore.threads import ThreadPool
from tdstore.types import Fault, Path, Read, path_text

MOST_THREADS = 32
WHERE_TO_WRITE = "open the place that has the rows with mode='r+' and write there"
_OF_ALL = Cap.PERSISTENT | Cap.CONCURRENT_READ
"""Abilities that the whole has where all places have them."""


class _Wanted(NamedTuple):
    """A request to one place, and what it is for."""

    number: int
    """The number of the request; -1: a read of a text's head, for comparison."""
    piece: Piece
    read: Read


class _Lanes(NamedTuple):
    """The threads in which the reads of one process run."""

    pid: int
    threads: ThreadPool
    locks: list[AbstractContextManager[Any]]


class ConcatStore(CheckedStore[ConcatLeaf]):
    """The leaves of several stores, concatenated along their first dimension. Nothing is written.

    A call of `read` is one call of each place that it names rows of. Places that are not live tensors are read at the
    same time, each in a thread.

    Args:
        places: opened for reading. They are closed with this store.
        leaves: what is read of them, by path.
        header: the header of the whole.
    """

    def __init__(self, places: Sequence[Place], leaves: Mapping[Path, ConcatLeaf], header: Header) -> None:
        names = [place.name for place in places]
        super().__init__(f"concat of {', '.join(names[:3])}{', ...' if len(names) > 3 else ''}", writable=False)
        self.places, self._leaves, self._header = list(places), dict(leaves), header
        caps = Cap.PARTIAL_READ | _OF_ALL
        for place in places:
            caps &= place.handle.store.caps | ~_OF_ALL
        vars(self)["caps"] = caps
        self._lanes: _Lanes | None = None

    def _store(self, place: int) -> Store:
        return self.places[place].handle.store

    def _catalogue(self) -> Mapping[Path, ConcatLeaf]:
        return self._leaves

    def _read_only(self) -> ReadOnlyError:
        return refusals.read_only(self.url, WHERE_TO_WRITE)

    # -- reading -----------------------------------------------------------------------------
    def _read(self, wanted: Sequence[tuple[ConcatLeaf, Read]]) -> list[Tensor]:
        made: list[Tensor | None] = [None] * len(wanted)
        asked: dict[int, list[_Wanted]] = {}
        for number, (leaf, read) in enumerate(wanted):
            pieces = list(leaf.pieces(read.index))
            if leaf.role != "unbatched" and len(pieces) != 1:
                shape = index_shape(leaf.spec.shape, read.index)
                made[number] = torch.empty(shape, dtype=leaf.spec.dtype, device="cpu") if read.out is None else read.out
            for piece in pieces:
                if piece.part.held is not None:
                    self._put(made, number, wanted[number], piece, gather(piece.part.held, piece.local))
                    continue
                place = asked.setdefault(piece.part.place, [])
                place.append(_Wanted(number, piece, self._request(piece, read, made[number])))
                if leaf.role == "text":
                    place.append(_Wanted(-1, piece, Read(read.path, (slice(0, HEAD, 1),))))
        for place_number, found in self._round({at: [one.read for one in several] for at, several in asked.items()}):
            for one, tensor in zip(asked[place_number], found, strict=True):
                if one.number < 0:
                    self._check_mark(one, tensor)
                elif one.read.out is None:
                    self._put(made, one.number, wanted[one.number], one.piece, tensor)
        return [tensor for tensor in made if tensor is not None]

    def _request(self, piece: Piece, read: Read, whole: Tensor | None) -> Read:
        """Build the request for a piece; rows that are as they are in the place are read to where they belong."""
        if Cap.PARTIAL_READ not in self._store(piece.part.place).caps:
            return Read(read.path)
        leaf = self._leaves[read.path]
        straight = leaf.role in ("rows", "text") and isinstance(piece.positions, slice)
        out = whole[piece.positions] if straight and whole is not None else None
        return Read(read.path, piece.local, out)

    def _put(
        self,
        made: list[Tensor | None],
        number: int,
        asked: tuple[ConcatLeaf, Read],
        piece: Piece,
        found: Tensor,
    ) -> None:
        """Put what a place has given where it belongs in the result of a request."""
        (leaf, read), part = asked, piece.part
        place = self.places[part.place]
        if part.held is None and Cap.PARTIAL_READ not in place.handle.store.caps:
            found = gather(found, piece.local)
        found = leaf.whole(part, found, read.path, place.name)
        whole = made[number]
        if leaf.role == "unbatched":
            if whole is not None and not _same_bits(whole, found):
                raise MismatchError(
                    f"the tensor {path_text(read.path[:-1])} has no rows, and {place.name} has another one than "
                    f"{self.places[0].name}",
                    hint="exclude the key",
                )
            made[number] = found
        elif whole is None:
            made[number] = found
        elif isinstance(piece.positions, slice):
            whole[piece.positions] = found
        else:
            scatter(whole, (piece.positions,), found)

    def _check_mark(self, one: _Wanted, head: Tensor) -> None:
        """Refuse the bytes of values that were compacted since the place was opened."""
        place = self.places[one.piece.part.place]
        if mark_of(gather(head, (slice(0, HEAD, 1),)).numpy()) != one.piece.part.mark:
            raise CorruptStoreError(
                f"the data of the values {path_text(one.read.path[:-1])} of {place.name} changed since it was opened",
                url=place.name,
                hint="another process has compacted the column: concatenate the places again",
            )

    # -- all places at once ------------------------------------------------------------------
    def _round(self, asked: Mapping[int, list[Read]]) -> list[tuple[int, list[Tensor]]]:
        """Read from several places: one call of each."""
        waiting = [place for place in asked if Cap.VIEW not in self._store(place).caps]
        if len(waiting) < 2:
            return [(place, self._of_place(place, reads)) for place, reads in asked.items()]
        threads = self._own_lanes().threads
        futures = {place: threads.submit(self._of_place, place, asked[place]) for place in waiting}
        found = [(place, self._of_place(place, reads)) for place, reads in asked.items() if place not in futures]
        return found + [(place, future.result()) for place, future in futures.items()]

    def _of_place(self, place: int, reads: list[Read]) -> list[Tensor]:
        with self._own_lanes().locks[place]:
            return self._store(place).read(reads)

    def _own_lanes(self) -> _Lanes:
        """Return the threads and locks of this process: a forked child has none of its parent's."""
        if self._lanes is None or self._lanes.pid != os.getpid():
            threads = ThreadPool(min(len(self.places), MOST_THREADS), "tdstore-concat")
            locks: list[AbstractContextManager[Any]] = [
                nullcontext() if Cap.CONCURRENT_READ in place.handle.store.caps else Lock() for place in self.places
            ]
            self._lanes = _Lanes(os.getpid(), threads, locks)
        return self._lanes

    # -- the rest ----------------------------------------------------------------------------
    def layout(self, path: Path) -> Mapping[str, Any]:
        """Return the layout of the leaf in the first place that has it."""
        parts = [part for part in self._leaf(path).parts if part.held is None]
        return self._store(parts[0].place).layout(path) if parts else {}

    def generation(self) -> object:
        """Return the generations of all places."""
        found = [place.handle.store.generation() for place in self.places]
        return None if None in found else tuple(found)

    def verify(self, paths: Sequence[Path] | None = None) -> list[Fault]:
        """Compare the leaves of all places with their checksums. The reasons name the place."""
        faults = []
        for place in self.places:
            store = place.handle.store
            there = None if paths is None else [path for path in paths if path in place.handle.specs]
            faults += [Fault(fault.path, f"{place.name}: {fault.reason}") for fault in store.verify(there)]
        return faults

    def nbytes_stored(self) -> int | None:
        """Return the bytes that all places take together."""
        sizes = [place.handle.store.nbytes_stored() for place in self.places]
        return None if None in sizes else sum(size for size in sizes if size is not None)

    def _close(self) -> None:
        if self._lanes is not None and self._lanes.pid == os.getpid():
            self._lanes.threads.shutdown(wait=False, cancel_futures=True)
        for place in self.places:
            place.handle.close()


def _same_bits(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    a, b = (tensor.contiguous().reshape(-1).view(torch.uint8).numpy() for tensor in (one, other))
    return bool(np.array_equal(a, b))
