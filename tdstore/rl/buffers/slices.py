"""Samplers of pieces of trajectories: consecutive rows that belong together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from tdstore.arguments import as_list, check_flags, refuse_type
from tdstore.errors import InvalidArgumentError, InvalidKeyError, InvalidStateError, InvalidTypeError
from tdstore.keys import unravel
from tdstore.rl.buffers.prioritized import PrioritizedSampler, Reduction
from tdstore.rl.buffers.samplers import Info, Sampler
from tdstore.rl.buffers.trajectories import ParallelTrajectories, RowMarks, Trajectories, row_marks
from tdstore.rl.storages.base import Storage
from tdstore.rl.tables.state import Ints
from tdstore.rl.types import Keys, MarksLike
from tdstore.types import NestedKey

_TRIES = 8
_DETECTED = (("collector", "traj_ids"), "episode")
"""Entries that distinguish trajectories, if the caller names none."""
DONE = ("next", "done")
"""Entry that ends trajectories, if the caller names none, and the rows have none that distinguishes them."""
MASK = ("collector", "mask")
"""Entry that is false in rows that only fill a batch."""
Span = bool | int | tuple[bool | int, bool | int]
Lanes = Trajectories | ParallelTrajectories


def _span_of(span: Span) -> tuple[bool | int, bool | int]:
    """Return how many rows a piece may lack at its beginning, and at its end; True: as many as it can."""
    made = span if isinstance(span, tuple) else (span, span)
    if len(made) != 2 or any(not isinstance(most, int) or most < 0 for most in made):
        raise InvalidArgumentError(f"span is a bool, a number of rows, or a pair of these, not {span!r}")
    return made


def _key(key: NestedKey, name: str) -> NestedKey:
    """Return a key of an argument in its shortest form.

    Raises:
        InvalidKeyError: it is neither a string nor a (nested) tuple of strings.
    """
    try:
        path = unravel(key)
    except InvalidKeyError as error:
        raise InvalidKeyError(f"{name}: {error.message}", hint=error.hint) from None
    return path[0] if len(path) == 1 else path


class SliceSampler(Sampler):
    """Pieces of trajectories, each a run of consecutive rows, joined into one batch.

    First a trajectory is chosen, each with the same probability, then the row in it where the piece begins. The last
    step of each piece is marked as truncated. Trajectories may span the end of the ring. If rows have several slots
    (`ndim > 1`), filled by several environments, each slot has trajectories of its own along the rows.

    Args:
        num_slices: number of pieces in a batch. Exactly one of this and `slice_len`.
        slice_len: number of rows of a piece.
        traj_key: entry that is the same in all rows of a trajectory. Without it and the next two, that is
            `("collector", "traj_ids")` or "episode", if the rows have one of them.
        end_key: entry that is true in the last row of a trajectory; used without `traj_key`. Default:
            `("next", "done")`.
        end_keys: several such entries, any of which ends a trajectory; those that the rows lack are left out.
        init_key: entry that is set to true in the first step of a piece, if the rows have it; None: it is unchanged.
        pad_output: with `strict_length=False`, repeat the last step of a piece that is too short, so that the batch has
            all rows; the entry `("collector", "mask")` is false in the repetitions.
        strict_length: leave out trajectories that are shorter than a piece; otherwise they are taken whole, and the
            batch has fewer rows.
        truncated_key: entry that marks the last step of a piece; None: no mark.
        trajectories: a number for each row of the storage, the same in all rows of a trajectory, where the rows have
            no such entry.
        ends: for each row of the storage, whether it is the last one of a trajectory.
        span: how many rows a piece may lack because it begins before its trajectory, or ends after it: a number for
            both ends, or a pair for the first and the last one. True: all but one. The batch then has fewer rows.
        cache_values: accepted for compatibility; where trajectories begin is always remembered.
        fragmented: not supported: rows of a piece are consecutive.
        step_key, compile, use_gpu: no effect; accepted for callers of torchrl.

    Raises:
        TypeError: both or neither of the two sizes, or `fragmented=True`.
        ValueError: `pad_output` with `strict_length`. RuntimeError: both `end_key` and `end_keys`.

    Example:
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(8), sampler=SliceSampler(num_slices=2, traj_key="episode"))
        >>> _ = rb.extend(TensorDict({"episode": torch.tensor([0, 0, 0, 0, 1, 1, 1, 1])}, [8]))
        >>> rb.sample(6)["episode"].view(2, 3).unique(dim=1).shape
        torch.Size([2, 1])
    """

    def __init__(
        self,
        *,
        num_slices: int | None = None,
        slice_len: int | None = None,
        end_key: Keys | None = None,
        end_keys: Sequence[NestedKey] | None = None,
        traj_key: NestedKey | None = None,
        cache_values: bool = False,
        truncated_key: NestedKey | None = ("next", "truncated"),
        init_key: NestedKey | None = "is_init",
        strict_length: bool = True,
        trajectories: MarksLike | None = None,
        ends: MarksLike | None = None,
        span: Span = False,
        pad_output: bool = False,
        fragmented: bool = False,
        step_key: NestedKey = "step_count",
        compile: bool | Mapping[str, Any] = False,
        use_gpu: bool = False,
    ) -> None:
        super().__init__()
        check_flags(strict_length=strict_length, pad_output=pad_output, fragmented=fragmented, use_gpu=use_gpu)
        if fragmented:
            raise InvalidTypeError(
                "fragmented=True: the rows of a piece follow one another in the storage; write each trajectory by one "
                "extend, or those of several environments side by side, into a storage with ndim=2"
            )
        if pad_output and strict_length:
            raise InvalidArgumentError("pad_output=True is for short trajectories: pass strict_length=False as well")
        self._sizes(num_slices, slice_len, traj_key, truncated_key, strict_length)
        self._flags(end_key, end_keys, init_key)
        self._span, self.pad_output = _span_of(span), pad_output
        self._set_markers(trajectories, ends)

    def _set_markers(self, trajectories: MarksLike | None, ends: MarksLike | None) -> None:
        """Take trajectories from a tensor instead of an entry of the rows."""
        if trajectories is not None and ends is not None:
            raise InvalidTypeError("give one of trajectories and ends")
        self._marks = None if trajectories is None and ends is None else row_marks(trajectories, ends)
        self._trajectories: Lanes = Trajectories(self.end_key, self.traj_key, self._marks)

    _span = (0, 0)
    _marks: RowMarks | None = None

    def _sizes(self, num_slices: Any, slice_len: Any, traj_key: Any, truncated_key: Any, strict: bool) -> None:
        if (num_slices is None) == (slice_len is None):
            raise InvalidTypeError("give exactly one of num_slices and slice_len")
        size = num_slices if slice_len is None else slice_len
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise InvalidArgumentError(
                f"{'num_slices' if slice_len is None else 'slice_len'} is at least 1, not {size!r}"
            )
        self.num_slices, self.slice_len = num_slices, slice_len
        check_flags(strict_length=strict)
        self.traj_key = None if traj_key is None else _key(traj_key, "traj_key")
        self.truncated_key = None if truncated_key is None else _key(truncated_key, "truncated_key")
        self.strict_length = strict

    pad_output = False

    def _flags(self, end_key: Any, end_keys: Any, init_key: Any) -> None:
        """Set the entries that mark where trajectories end, and the one that marks where pieces begin."""
        if end_key is not None and end_keys is not None:
            raise InvalidStateError("give one of end_key and end_keys")
        self._detects = end_key is None and end_keys is None and self.traj_key is None
        several = end_key if isinstance(end_key, list) else end_keys
        if several is not None:
            name = "end_key" if end_keys is None else "end_keys"
            if isinstance(several, str):
                raise refuse_type(name, "a list of keys", several)
            listed = [_key(key, name) for key in as_list(several, name, "a list of keys")]
            if not listed:
                raise InvalidArgumentError(f"{name} is an empty list: without it, {DONE} is the entry")
            self.end_key: Keys = listed
        else:
            self.end_key = DONE if end_key is None else _key(end_key, "end_key")
        self.init_key = None if init_key is None else _key(init_key, "init_key")

    def _shape(self, batch_size: int) -> tuple[int, int]:
        """Return the number and length of the pieces of a batch."""
        size = self.num_slices if self.slice_len is None else self.slice_len
        assert size is not None
        if batch_size % size:
            name = "num_slices" if self.slice_len is None else "slice_len"
            raise InvalidStateError(f"batch_size {batch_size} is not a multiple of {name}={size}")
        other = batch_size // size
        return (size, other) if self.slice_len is None else (other, size)

    def look(self, storage: Storage) -> Lanes:
        """Read where trajectories begin in the rows written since the last look, and return that.

        Raises:
            TypeError: rows have no entries. KeyError: they lack the entry that distinguishes trajectories.
        """
        several, key, entries = storage.ndim > 1, self.traj_key, getattr(storage, "entries", None)
        if entries is None:
            raise InvalidTypeError(
                f"trajectories are told apart by entries, and a {type(storage).__name__} has objects: use a "
                "LazyStackStorage or a LazyTensorStorage"
            )
        if self._detects and self._marks is None:
            key = next((one for one in _DETECTED if one in entries), None)
        if several != isinstance(self._trajectories, ParallelTrajectories) or key != self._trajectories.traj_key:
            kind = ParallelTrajectories if several else Trajectories
            self._trajectories = kind(self.end_key, key, self._marks)
        self._trajectories.look(storage)
        self._trajectories.entries = entries
        return self._trajectories

    def slots(self, storage: Storage, batch_size: int) -> tuple[Ints, Info]:
        """Choose pieces."""
        pieces, length = self._shape(batch_size)
        found = self.look(storage)
        begins, lengths = self._choose(found, pieces, length)
        sizes = np.minimum(lengths, length)
        before, after = (np.minimum(sizes - 1, length if most is True else most) for most in self._span)
        free = lengths - sizes + 1 + before + after
        drawn = torch.rand(pieces, dtype=torch.float64, generator=self._rng, device="cpu").numpy()
        first = (drawn * free).astype(np.int64) - before
        stop = np.minimum(first + sizes, lengths)
        first = np.maximum(first, 0)
        return self._rows(found, begins + first, stop - first, length)

    def can_sample(self, storage: Storage, batch_size: int) -> bool:
        """Check whether a trajectory is long enough for pieces of a batch.

        Raises:
            RuntimeError: the batch cannot be divided into pieces.
        """
        _, length = self._shape(batch_size)
        if not len(storage):
            return False
        _, sizes = self.look(storage).begins_and_lengths()
        return bool((sizes >= (length if self.strict_length else 1)).any())

    def available(self, storage: Storage, batch_size: int) -> int:
        """Return how many places there are where a piece can begin."""
        _, length = self._shape(batch_size)
        _, sizes = self.look(storage).begins_and_lengths()
        places = sizes - length + 1
        return int(places.clip(min=0 if self.strict_length else 1).sum())

    def _choose(self, found: Lanes, pieces: int, length: int) -> tuple[Ints, Ints]:
        """Choose trajectories for the pieces: where they begin, and their lengths."""
        if not self.strict_length:
            return found.begins_and_lengths(
                torch.randint(len(found), (pieces,), generator=self._rng, device="cpu").numpy()
            )
        # Most trajectories are long enough as a rule, so short ones are drawn again; else all are checked.
        begins, lengths = np.zeros(0, np.int64), np.zeros(0, np.int64)
        for _ in range(_TRIES):
            picked = torch.randint(len(found), (pieces,), generator=self._rng, device="cpu").numpy()
            some, sizes = found.begins_and_lengths(picked)
            long = sizes >= length
            if not len(begins) and long.all():
                return some, sizes
            begins, lengths = np.concatenate([begins, some[long]]), np.concatenate([lengths, sizes[long]])
            if len(begins) >= pieces:
                return begins[:pieces], lengths[:pieces]
        some, sizes = found.begins_and_lengths()
        enough = np.flatnonzero(sizes >= length)
        if not len(enough):
            raise InvalidStateError(
                f"no trajectory has {length} rows, the longest has {int(sizes.max())}: "
                "ask for shorter pieces, or pass strict_length=False"
            )
        picked = enough[torch.randint(len(enough), (pieces,), generator=self._rng, device="cpu").numpy()]
        return some[picked], sizes[picked]

    def _rows(self, found: Lanes, begins: Ints, sizes: Ints, length: int) -> tuple[Ints, Info]:
        info: Info = {}
        steps = np.arange(length)
        if self.pad_output:
            positions = (begins[:, None] + np.minimum(steps, sizes[:, None] - 1)).reshape(-1)
            first = np.arange(0, len(positions), length)
            last = first + sizes - 1
            info[MASK] = torch.from_numpy((steps < sizes[:, None]).reshape(-1))
        elif (sizes == length).all():
            positions = (begins[:, None] + steps).reshape(-1)
            first = np.arange(0, len(positions), length)
            last = first + length - 1
        else:
            ends = np.cumsum(sizes)
            first = ends - sizes
            positions = np.arange(ends[-1]) + np.repeat(begins - first, sizes)
            last = ends - 1
        if self.init_key is not None and self.init_key in found.entries:
            begun = np.zeros((len(positions), 1), bool)
            begun[first] = True
            info[self.init_key] = torch.from_numpy(begun)
        if self.truncated_key is not None:
            mark = np.zeros((len(positions), 1), bool)
            mark[last] = True
            info[self.truncated_key] = torch.from_numpy(mark)
        return found.slots(positions), info

    def empty(self) -> None:
        """Reset after all rows are gone."""
        self._trajectories = Trajectories(self.end_key, self.traj_key, self._marks)

    def __repr__(self) -> str:
        """Return the class and its sizes."""
        return f"{type(self).__name__}(num_slices={self.num_slices}, slice_len={self.slice_len})"


class SliceSamplerWithoutReplacement(SliceSampler):
    """Sampler of pieces of trajectories; each trajectory yields one piece per pass.

    Args:
        drop_last: leave out the last batch of a pass if it is smaller than the others.
        shuffle: whether the order of trajectories is a new random one in each pass.
        num_slices, slice_len, end_key, end_keys, traj_key, truncated_key, init_key, strict_length, trajectories, ends,
            compile, use_gpu: as `SliceSampler`.

    Example:
        >>> sampler = SliceSamplerWithoutReplacement(slice_len=2, traj_key="run", shuffle=False)
        >>> rb = TensorDictReplayBuffer(storage=LazyTensorStorage(6), sampler=sampler, batch_size=4)
        >>> _ = rb.extend(TensorDict({"run": torch.tensor([0, 0, 0, 1, 1, 1])}, [6]))
        >>> rb.sample()["run"]
        tensor([0, 0, 1, 1])
    """

    def __init__(
        self,
        *,
        num_slices: int | None = None,
        slice_len: int | None = None,
        drop_last: bool = False,
        end_key: Keys | None = None,
        end_keys: Sequence[NestedKey] | None = None,
        traj_key: NestedKey | None = None,
        truncated_key: NestedKey | None = ("next", "truncated"),
        init_key: NestedKey | None = "is_init",
        strict_length: bool = True,
        shuffle: bool = True,
        trajectories: MarksLike | None = None,
        ends: MarksLike | None = None,
        compile: bool | Mapping[str, Any] = False,
        use_gpu: bool = False,
    ) -> None:
        super().__init__(
            num_slices=num_slices, slice_len=slice_len, end_key=end_key, end_keys=end_keys, traj_key=traj_key,
            truncated_key=truncated_key, init_key=init_key, strict_length=strict_length, trajectories=trajectories,
            ends=ends,
        )  # fmt: skip
        check_flags(drop_last=drop_last, shuffle=shuffle, use_gpu=use_gpu)
        self.drop_last, self.shuffle = drop_last, shuffle
        self._begins = self._lengths = self._firsts = np.zeros(0, np.int64)
        self._at = 0
        self._seen: tuple[int, int] | None = (-1, -1)
        """The counters of the storage when the pass began; None: it is one of a checkpoint."""

    def slots(self, storage: Any, batch_size: int) -> tuple[Ints, Info]:
        """Choose the next pieces of the pass."""
        pieces, length = self._shape(batch_size)
        found = self.look(storage)
        seen = (storage.write_count, storage.epoch)
        if self._seen is None:
            self._seen = seen if self._found_again(found, length) else (-1, -1)
        if seen != self._seen or self._at >= len(self._begins):
            self._start(found, length)
            self._seen = seen
        stop = min(len(self._begins), self._at + pieces)
        begins, lengths = self._begins[self._at : stop], self._lengths[self._at : stop]
        left = len(self._begins) - stop
        self.ran_out = left < pieces if self.drop_last else left == 0
        self._at = len(self._begins) if self.ran_out else stop
        sizes = np.minimum(lengths, length)
        drawn = torch.rand(len(begins), dtype=torch.float64, generator=self._rng, device="cpu").numpy()
        return self._rows(found, begins + (drawn * (lengths - sizes + 1)).astype(np.int64), sizes, length)

    def _long(self, found: Lanes, length: int) -> tuple[Ints, Ints]:
        """Return where the trajectories begin that are long enough, in order, and their lengths."""
        begins, lengths = found.begins_and_lengths()
        long = np.flatnonzero(lengths >= length) if self.strict_length else np.arange(len(begins))
        return begins[long], lengths[long]

    def _start(self, found: Lanes, length: int) -> None:
        begins, lengths = self._long(found, length)
        if not len(begins):
            raise InvalidStateError(
                f"no trajectory has {length} rows: ask for shorter pieces, or pass strict_length=False"
            )
        if self.shuffle:
            order = torch.randperm(len(begins), generator=self._rng, device="cpu").numpy()
            begins, lengths = begins[order], lengths[order]
        self._begins, self._lengths, self._at = begins, lengths, 0
        self._firsts = found.slots(begins)

    def _found_again(self, found: Lanes, length: int) -> bool:
        """Look up the trajectories of a checkpoint by their first slots; whether they are those of the storage."""
        begins, lengths = self._long(found, length)
        firsts = found.slots(begins)
        order = np.argsort(firsts)
        if not np.array_equal(firsts[order], np.sort(self._firsts)):
            return False
        order = order[np.searchsorted(firsts, self._firsts, sorter=order)]
        self._begins, self._lengths = begins[order], lengths[order]
        return True

    def state_dict(self) -> dict[str, Any]:
        """Return the first slots of the trajectories of this pass, and its position."""
        return {"_firsts": torch.from_numpy(self._firsts.copy()), "_at": self._at, "_ran_out": self.ran_out}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue in the middle of a pass, if the storage has its trajectories; otherwise begin a new one."""
        self._seen = None if "_firsts" in state_dict else (-1, -1)  # earlier releases and torchrl have none
        if self._seen is None:
            self._firsts = state_dict["_firsts"].clone().numpy()
            self._at, self.ran_out = int(state_dict["_at"]), bool(state_dict["_ran_out"])

    def batches_left(self, storage: Any, batch_size: int) -> int | None:
        """Return the number of batches left in this pass; None before its first one."""
        if (storage.write_count, storage.epoch) != self._seen or self._at >= len(self._begins):
            return 1
        pieces, _ = self._shape(batch_size)
        left = len(self._begins) - self._at
        return left // pieces if self.drop_last else -(-left // pieces)


class PrioritizedSliceSampler(SliceSampler, PrioritizedSampler):
    """Pieces of trajectories whose first rows are chosen by their priorities.

    Rows too close to the end of their trajectory for a whole piece are not chosen, unless `strict_length=False`.

    Args:
        max_capacity, alpha, beta, eps, dtype, reduction, max_priority_within_buffer: as `PrioritizedSampler`.
        num_slices, slice_len, end_key, end_keys, traj_key, truncated_key, init_key, strict_length, trajectories, ends:
            as `SliceSampler`.
        span: not supported.
        cache_values, compile: no effect; accepted for callers of torchrl.

    Raises:
        TypeError: `span`, or both or neither of the two sizes.

    Example:
        >>> sampler = PrioritizedSliceSampler(6, alpha=1.0, beta=1.0, slice_len=2, traj_key="run")
        >>> rb = TensorDictReplayBuffer(storage=LazyTensorStorage(6), sampler=sampler, batch_size=4)
        >>> _ = rb.extend(TensorDict({"run": torch.tensor([0, 0, 0, 1, 1, 1])}, [6]))
        >>> rb.sample().batch_size
        torch.Size([4])
    """

    def __init__(
        self,
        max_capacity: int,
        alpha: float,
        beta: float,
        eps: float = 1e-8,
        dtype: torch.dtype = torch.float32,
        reduction: Reduction = "max",
        *,
        num_slices: int | None = None,
        slice_len: int | None = None,
        end_key: Keys | None = None,
        end_keys: Sequence[NestedKey] | None = None,
        traj_key: NestedKey | None = None,
        cache_values: bool = False,
        truncated_key: NestedKey | None = ("next", "truncated"),
        init_key: NestedKey | None = "is_init",
        strict_length: bool = True,
        trajectories: MarksLike | None = None,
        ends: MarksLike | None = None,
        compile: bool | Mapping[str, Any] = False,
        span: Span = False,
        max_priority_within_buffer: bool = False,
    ) -> None:
        if span not in (False, (False, False)):
            raise InvalidTypeError(
                "span= of prioritized pieces: they begin at rows chosen by priority; pass strict_length=False for "
                "pieces that end with their trajectory"
            )
        PrioritizedSampler.__init__(self, max_capacity, alpha, beta, eps, dtype, reduction, max_priority_within_buffer)
        self._sizes(num_slices, slice_len, traj_key, truncated_key, strict_length)
        self._flags(end_key, end_keys, init_key)
        self._set_markers(trajectories, ends)

    def slots(self, storage: Storage, batch_size: int) -> tuple[Ints, Info]:
        """Choose first rows by their priorities, and the rows that follow them."""
        pieces, length = self._shape(batch_size)
        found = self.look(storage)
        first, ends = np.zeros(0, np.int64), np.zeros(0, np.int64)
        for _ in range(4 * _TRIES):
            slots, _ = PrioritizedSampler.slots(self, storage, pieces)
            positions, stops = found.containing(slots)
            good = stops - positions >= length if self.strict_length else np.ones(len(slots), bool)
            first, ends = np.concatenate([first, positions[good]]), np.concatenate([ends, stops[good]])
            if len(first) >= pieces:
                break
        else:
            first, ends = self._choose_among_all(storage, found, pieces, length)
        first, ends = first[:pieces], ends[:pieces]
        sizes = np.minimum(ends - first, length)
        slots, info = self._rows(found, first, sizes, length)
        weights = self._corrections(self._tree[found.slots(first)])
        info["priority_weight"] = weights.repeat_interleave(torch.from_numpy(sizes))
        return slots, info

    def _choose_among_all(self, storage: Any, found: Lanes, pieces: int, length: int) -> tuple[Ints, Ints]:
        """Choose first rows by their priorities, only among those that a whole piece follows."""
        everything = np.arange(len(storage))
        positions, ends = found.containing(everything)
        good = np.flatnonzero(ends - positions >= length)
        weights = self._tree[good]
        if not len(good) or not weights.sum() > 0:
            raise InvalidStateError(f"no row with a priority has {length} rows of its trajectory from there on")
        drawn = torch.rand(pieces, dtype=torch.float64, generator=self._rng, device="cpu").numpy() * weights.sum()
        picked = good[np.minimum(weights.cumsum().searchsorted(drawn, side="right"), len(good) - 1)]
        return positions[picked], ends[picked]

    def empty(self) -> None:
        """Forget priorities and trajectories."""
        PrioritizedSampler.empty(self)
        SliceSampler.empty(self)
