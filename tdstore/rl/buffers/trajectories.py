"""Starts and ends of trajectories in a ring of rows, kept up to date as rows are appended."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tdstore.arguments import refuse_type
from tdstore.errors import InvalidArgumentError, KeyNotFoundError
from tdstore.rl.storages.base import Storage
from tdstore.rl.tables.state import Ints
from tdstore.rl.types import Keys, MarksLike
from tdstore.types import NestedKey

_BLOCK = 1 << 18
_LANE = 44
"""Bits of a position below the number of its lane."""


class Growing:
    """An array that grows at its end and shrinks at its beginning, each at constant cost."""

    def __init__(self) -> None:
        self._room = np.zeros(64, np.int64)
        self._first = self._last = 0

    def __len__(self) -> int:
        """Return the number of elements."""
        return self._last - self._first

    @property
    def values(self) -> Ints:
        """The elements, a view."""
        return self._room[self._first : self._last]

    def extend(self, values: Ints) -> None:
        """Add elements at the end."""
        if self._last + len(values) > len(self._room):
            held = self.values.copy()
            self._room = np.zeros(2 * (len(held) + len(values)) + 64, np.int64)
            self._room[: len(held)] = held
            self._first, self._last = 0, len(held)
        self._room[self._last : self._last + len(values)] = values
        self._last += len(values)

    def drop(self, count: int) -> None:
        """Remove elements at the beginning."""
        self._first += count


class RowMarks(NamedTuple):
    """Positions of trajectories, for all rows of a storage, in the order of its slots."""

    values: Tensor
    are_ends: bool
    """Whether values are true in last rows; else they are the same in all rows of a trajectory."""

    def at(self, slots: Ints) -> Tensor:
        """Return the values of slots.

        Raises:
            ValueError: the storage has more slots than there are values.
        """
        if len(slots) and int(slots.max()) >= len(self.values):
            name = "ends" if self.are_ends else "trajectories"
            raise InvalidArgumentError(f"{name}= has values for {len(self.values)} rows, and the storage has more")
        return self.values[torch.from_numpy(slots)]


def row_marks(trajectories: MarksLike | None, ends: MarksLike | None) -> RowMarks:
    """Return the marks of rows, from one of the two tensors.

    Raises:
        TypeError: it is no tensor of numbers or bools.
    """
    name, marks = ("ends", ends) if trajectories is None else ("trajectories", trajectories)
    try:
        values = torch.as_tensor(marks).detach().cpu()
    except (TypeError, ValueError, RuntimeError):
        raise refuse_type(name, "a tensor with a value for each row", marks) from None
    return RowMarks(values.reshape(-1), trajectories is None)


class Trajectories:
    """The trajectories of a storage, as positions in the order in which rows were written.

    A position counts rows from the first one that was read; it is in row `position % capacity` of the storage.
    Only rows that were appended since the last look are read.

    Args:
        end_key: entry that is true in the last row of a trajectory; of a list of entries, any one is true there.
        traj_key: entry that is the same in all rows of a trajectory; overrides `end_key`.
        marks: values for the rows; override both entries.
        lane: which of the slots of a row is read, if rows have several.
    """

    def __init__(
        self, end_key: Keys | None, traj_key: NestedKey | None, marks: RowMarks | None = None, lane: int = 0
    ) -> None:
        self.end_key, self.traj_key, self.lane = end_key, traj_key, lane
        self.marks = marks
        self._starts = Growing()
        self._oldest = self._newest = 0
        self._epoch = -1
        self._capacity = 0
        self._count = -1
        self._last_id: Any = None
        self._ended = True

    def look(self, storage: Any) -> None:
        """Read the rows that were appended since, or all of them after another kind of change.

        Raises:
            KeyError: the rows have no such entry.
        """
        length, cursor, capacity, count = storage.shape[0], storage.cursor, storage.capacity, storage.write_count
        full = length == capacity
        added = count - self._count
        position = self._newest + added
        in_step = (
            self._count >= 0
            and storage.epoch == self._epoch
            and capacity == self._capacity
            and 0 <= added <= length
            and (position % capacity == cursor or (not added and cursor == self._cursor))
            and (full or position - self._base == length)
        )
        if not in_step:
            self._starts = Growing()
            self._base = cursor if full else 0
            self._newest, self._ended, self._last_id = self._base, True, None
            position = self._base + length
        self._read(storage, position, capacity)
        self._oldest = position - length
        self._drop()
        self._epoch, self._capacity, self._count, self._cursor = storage.epoch, capacity, count, cursor

    _base = 0
    _cursor = -1
    entries: Collection[Any] = ()
    """Keys of the rows."""

    def _read(self, storage: Any, stop: int, capacity: int) -> None:
        lanes = _lanes(storage)
        for start in range(self._newest, stop, _BLOCK):
            rows = np.arange(start, min(stop, start + _BLOCK))
            first = self._begins(storage, rows % capacity if lanes == 1 else rows % capacity * lanes + self.lane)
            self._starts.extend(rows[first])
        self._newest = stop

    def _begins(self, storage: Any, slots: Ints) -> npt.NDArray[np.bool_]:
        """Check for each row that follows those read before whether a trajectory begins with it."""
        key = self.end_key if self.traj_key is None else self.traj_key
        column: Tensor | None
        if self.marks is not None:
            column = self.marks.at(slots)
        elif isinstance(key, list):
            column = _any_of([storage.column(one, slots) for one in key])
        else:
            column = storage.column(key, slots)
        if column is None:
            raise KeyNotFoundError(
                f"the rows have no entry {key!r}, which tells where trajectories end",
                hint=f"they have {', '.join(sorted(map(repr, storage.entries)))}",
            )
        values = column.reshape(len(slots), -1).cpu()
        first = np.empty(len(slots), bool)
        if self.traj_key is None if self.marks is None else self.marks.are_ends:
            ends = values.bool().any(1).numpy()
            first[0], first[1:] = self._ended, ends[:-1]
            self._ended = bool(ends[-1])
        else:
            differ = (values[1:] != values[:-1]).any(1).numpy()
            first[0] = self._last_id is None or not torch.equal(self._last_id, values[0])
            first[1:] = differ
            self._last_id = values[-1].clone()
        return first

    def _drop(self) -> None:
        """Forget trajectories that were overwritten completely; the first one left may be overwritten in part."""
        starts = self._starts.values
        gone = int(starts.searchsorted(self._oldest, side="right")) - 1
        if gone > 0:
            self._starts.drop(gone)

    def __len__(self) -> int:
        """Return the number of trajectories."""
        return len(self._starts)

    def begins_and_lengths(self, picked: Ints | slice = slice(None)) -> tuple[Ints, Ints]:
        """Return the positions where trajectories begin, and their lengths."""
        starts = self._starts.values
        if isinstance(picked, slice):
            ends = np.append(starts[1:], self._newest)
            begins = starts
        else:
            begins = starts.take(picked)
            following = picked + 1
            ends = starts.take(following, mode="clip")
            ends[following == len(starts)] = self._newest
        begins = np.maximum(begins, self._oldest)
        return begins, ends - begins

    def containing(self, slots: Ints) -> tuple[Ints, Ints]:
        """Return the position of each slot, and where its trajectory ends."""
        positions = self._oldest + (slots - self._oldest) % self._capacity
        starts = self._starts.values
        number = starts.searchsorted(positions, side="right") - 1
        begins, lengths = self.begins_and_lengths(number)
        return positions, begins + lengths

    def slots(self, positions: Ints) -> Ints:
        """Return the rows of the storage at positions."""
        return positions % self._capacity


def _any_of(columns: Sequence[Tensor | None]) -> Tensor | None:
    """Return for each row whether any number of it is not zero, in columns some of which may be missing; None: all."""
    marks = [column.reshape(len(column), -1).bool().any(1) for column in columns if column is not None]
    return torch.stack(marks, 1) if marks else None


def _lanes(storage: Any) -> int:
    """Return the slots of a row: parallel trajectories, as several environments produce them."""
    return 1 if storage.ndim == 1 else math.prod(storage.shape[1:])


class ParallelTrajectories:
    """The trajectories of a storage whose rows have several slots, each of which goes on in the next row.

    A position has the lane in its high bits, so that the rows of a trajectory are consecutive here too.

    Args:
        end_key, traj_key, marks: as of `Trajectories`.
    """

    def __init__(self, end_key: Keys | None, traj_key: NestedKey | None, marks: RowMarks | None = None) -> None:
        self.end_key, self.traj_key, self.marks = end_key, traj_key, marks
        self._each: list[Trajectories] = []
        self._begins = self._lengths = np.zeros(0, np.int64)

    entries: Collection[Any] = ()
    """Keys of the rows."""

    def look(self, storage: Storage) -> None:
        """Read the rows that were appended since, or all of them after another kind of change."""
        lanes = _lanes(storage)
        if len(self._each) != lanes:
            self._each = [Trajectories(self.end_key, self.traj_key, self.marks, lane) for lane in range(lanes)]
        by_lane = []
        for lane, one in enumerate(self._each):
            one.look(storage)
            begins, lengths = one.begins_and_lengths()
            by_lane.append((begins + (lane << _LANE), lengths))
        self._begins, self._lengths = (np.concatenate(parts) for parts in zip(*by_lane, strict=True))

    def __len__(self) -> int:
        """Return the number of trajectories."""
        return len(self._begins)

    def begins_and_lengths(self, picked: Ints | slice = slice(None)) -> tuple[Ints, Ints]:
        """Return the positions where trajectories begin, and their lengths."""
        return self._begins[picked], self._lengths[picked]

    def containing(self, slots: Ints) -> tuple[Ints, Ints]:
        """Return the position of each slot, and where its trajectory ends."""
        rows, lanes = np.divmod(slots, len(self._each))
        positions, ends = np.empty_like(slots), np.empty_like(slots)
        for lane in np.unique(lanes).tolist():
            mine = lanes == lane
            found = self._each[lane].containing(rows[mine])
            positions[mine], ends[mine] = (part + (lane << _LANE) for part in found)
        return positions, ends

    def slots(self, positions: Ints) -> Ints:
        """Return the slots of the storage at positions."""
        lanes = positions >> _LANE
        found: Ints = self._each[0].slots(positions & ((1 << _LANE) - 1)) * len(self._each) + lanes
        return found
