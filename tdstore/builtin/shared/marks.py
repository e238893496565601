"""Dirty markers of leaves in the middle of a write, in memory that outlives the writer.

A slot is four words: pid, start time and pid namespace of its writer, and the offset of the leaf (0: none).
"""

from __future__ import annotations

import os
import weakref
from typing import Any

import numpy as np

from tdstore.builtin.shared.arena import SLOT_WORDS, SLOTS, SLOTS_AT, Arena
from tdstore.builtin.shared.process import Process, alive, this_process
from tdstore.storekit import refusals


class DirtyMarkers:
    """The slots of this process in one arena; each is used by one thread at a time."""

    def __init__(self, arena: Arena, timeout: float) -> None:
        self._arena = arena
        self._timeout = timeout
        self._pid = 0
        self._free: list[int] = []
        self._own_slots: list[int] = []
        self._release: object = None

    def take(self) -> int:
        """Return the word of a slot for the offset of a write; return it with `give`."""
        if self._pid != os.getpid():
            # A forked child: the slots are its parent's.
            self._free, self._pid = [], os.getpid()
            del self._own_slots[:]
        try:
            return self._free.pop()
        except IndexError:
            return self._claim()

    def give(self, word: int) -> None:
        """Clear the marker; the slot remains for the next write."""
        self._arena.words[word] = 0
        self._free.append(word)

    def _claim(self) -> int:
        words = self._arena.words
        me = this_process()
        with self._arena.locked(self._timeout):
            base = _free_slot(self._arena)
            if base is not None:
                words[base + 1 : base + 3] = me.start, me.namespace
                words[base] = me.pid
                self._own_slots.append(base)
                if self._release is None:
                    self._release = weakref.finalize(self, _release, self._arena, self._own_slots)
                return base + 3
        raise refusals.too_many_writers(self._arena.url, SLOTS)


def _free_slot(arena: Arena) -> int | None:
    """Return the first word of a slot without a writer, or whose writer ended between two writes."""
    slots = _slots(arena)
    free = (slots[:, 0] == 0).nonzero()[0].tolist()
    if not free:
        free = [i for i, row in enumerate(slots.tolist()) if not row[3] and not alive(Process(*row[:3]))]
    return SLOTS_AT // 8 + free[0] * SLOT_WORDS if free else None


def dirty_leaves(arena: Arena) -> dict[int, Process]:
    """Return offsets of leaves whose writer ended in the middle of a write, with that writer."""
    slots = _slots(arena)
    found = {}
    for row in slots[slots[:, 3] != 0].tolist():
        if not alive(writer := Process(*row[:3])):
            found[row[3]] = writer
    return found


def clear_markers(arena: Arena, timeout: float) -> None:
    """Clear the markers of writers that ended."""
    with arena.locked(timeout):
        for row in _slots(arena):
            if row[3] and not alive(Process(*row[:3].tolist())):
                row[:] = 0


def _slots(arena: Arena) -> np.ndarray[Any, np.dtype[np.uint64]]:
    return arena.words[SLOTS_AT // 8 :].reshape(SLOTS, SLOT_WORDS)


def _release(arena: Arena, own_slots: list[int]) -> None:
    for base in own_slots:
        # Not those of a parent process whose list a fork copied.
        if int(arena.words[base]) == os.getpid():
            arena.words[base] = 0
