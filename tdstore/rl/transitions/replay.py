"""A ring of transitions, sampled in batches."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from pathlib import Path as FilePath
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

import tdstore
from tdstore import TensorDict
from tdstore.arguments import as_device, check_int, check_path
from tdstore.errors import EmptyBufferError, InvalidArgumentError, InvalidStateError, InvalidTypeError, StateDictError
from tdstore.rl.buffers.samplers import as_slots
from tdstore.rl.storages import LazyStorage
from tdstore.rl.types import BackendLike

if TYPE_CHECKING:
    from tdstore import TensorDictBase

_FACTS = "buffer"
Ints = npt.NDArray[np.int64]
UNIQUE_BELOW = 16_384
"""With fewer rows, a batch repeats no row; from here on, drawing with replacement is as good, and costs less."""


class ReplayBuffer:
    """A ring buffer of transitions on any backend: the newest `max_size` rows, sampled uniformly.

    Args:
        max_size: number of rows.
        device: of the rows, and of batches: a device for rows in memory, "cpu" for a backend.
        dtype: the dtype to cast floating-point entries to; None leaves them unchanged.
        storage: where the rows are: None for memory, the name of a backend, or a URL; see `LazyStorage`.
        path: the place, for a backend that is named.
        **options: of `LazyStorage`.

    Example:
        >>> buffer = ReplayBuffer(100)
        >>> buffer.add(tdstore.TensorDict({"obs": torch.zeros(8, 4), "reward": torch.ones(8)}, [8]))
        >>> buffer.size, buffer.sample(4)["reward"].shape
        (8, torch.Size([4, 1]))
    """

    def __init__(
        self,
        max_size: int,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
        *,
        storage: BackendLike | None = None,
        path: str | os.PathLike[str] | None = None,
        **options: Any,
    ) -> None:
        self.max_size = max_size
        self.device = as_device(device)
        self.dtype = torch.float32 if dtype is None else dtype
        self._cast = dtype
        self._in_memory = storage is None and path is None
        self._make = functools.partial(LazyStorage, max_size, storage, path=path, device=device, **options)
        self._rows = self._make()
        self._before = 0
        """Rows that were added before the last `clear`."""

    @classmethod
    def open(cls, place: str | os.PathLike[str], *, storage: str | None = None, **kwargs: Any) -> Self:
        """Open the rows of an earlier buffer, and continue from its last row, even after it was killed.

        Args:
            place: path or URL.
            storage: name of the backend, if the place does not determine it.
            **kwargs: further arguments of the class.

        Raises:
            StoreNotFoundError: there is nothing at this place.
        """
        rows = LazyStorage.open(place, storage=storage)
        made = cls(rows.capacity, storage=storage, path=place, existsok=True, **kwargs)
        made._rows = rows
        made._reopened()
        return made

    def _reopened(self) -> None:
        """Read the facts of rows that `open` found. A subclass overrides this."""

    # -- counters ----------------------------------------------------------------------------------
    def __len__(self) -> int:
        return len(self._rows)

    @property
    def size(self) -> int:
        """The present number of rows."""
        return len(self._rows)

    @property
    def counter(self) -> int:
        """The number of all rows that were ever added."""
        return self._before + self._rows.write_count

    @property
    def cursor(self) -> int:
        """The position of the next row."""
        return self._rows.cursor

    @property
    def is_full(self) -> bool:
        """Whether the next row replaces the oldest."""
        return self.size == self.max_size

    @property
    def initialized(self) -> bool:
        """Whether rows were added."""
        return self.size > 0

    @property
    def storage(self) -> TensorDictBase | None:
        """All rows as a TensorDict `[max_size]`, zeros where nothing was added; None before the first row.

        They are views if rows are live tensors, else copies; `sample_from_indices` reads only some of them.
        """
        return self._rows.all_slots() if self.size else None

    # -- rows in -----------------------------------------------------------------------------------
    def add(self, data: TensorDictBase) -> TensorDictBase | None:
        """Add rows; a full buffer overwrites its oldest rows.

        A leaf of shape `[n]` becomes `[n, 1]`. If there are more than `max_size` rows, only the last ones are stored.
        An entry that earlier rows lack is zero in them.

        Args:
            data: a TensorDict or tensorclass of batch size `[n]`; it is not changed.

        Raises:
            RuntimeError: `data` has no batch dimension. KeyError: it lacks an entry. TypeError: a cast would lose
                digits. UnsupportedError: it has an additional entry, and other processes write the rows too.
        """
        self._append(self._ready(data))
        return None

    def _ready(self, data: Any) -> Any:
        """Convert rows to their stored form."""
        if not tdstore.is_tensor_collection(data):
            raise InvalidTypeError(f"a buffer takes TensorDicts and tensorclasses, not a {type(data).__name__}")
        if not data.batch_size:
            raise InvalidStateError("data has no batch dimension: add data.unsqueeze(0), a batch of one row")
        if tdstore.is_tensorclass(data):
            data = data.to_tensordict()
        return data.apply(self._leaf, batch_size=data.batch_size[:1])

    def _leaf(self, leaf: Tensor) -> Tensor:
        if self._cast is not None and leaf.is_floating_point():
            leaf = leaf.to(self._cast)
        return leaf.unsqueeze(-1) if leaf.ndim == 1 else leaf

    def _append(self, rows: Any) -> Ints:
        if self.size and self._adds_entries(rows):
            self._rows.add_entries(rows)
        return self._rows.append(rows)

    def _adds_entries(self, rows: Any) -> bool:
        """Check whether rows have more entries than earlier ones; raise an error if one is missing."""
        known, added = self._rows.entries, set(rows.keys(True, True))
        return added > known

    # -- rows out ----------------------------------------------------------------------------------
    def sample(self, batch_size: int, return_idx: bool = False, *, beta: float = 0.4) -> TensorDictBase:
        """Sample `min(batch_size, size)` random rows, as a copy.

        With fewer than 16,384 rows each row occurs at most once; with more, rows are drawn with replacement.

        Args:
            batch_size: number of rows.
            return_idx: whether to add `idxs`, int64 `[n]`, the positions of the rows.
            beta: no effect; for prioritized buffers.

        Raises:
            EmptyBufferError: there are no rows.
        """
        size = self._check_size(batch_size)
        number = min(batch_size, size)
        slots = (
            torch.randperm(size, device="cpu")[:number]
            if size < UNIQUE_BELOW
            else torch.randint(size, (number,), device="cpu")
        )
        batch = self.sample_from_indices(slots)
        if return_idx:
            batch.set("idxs", slots.to(batch.device or "cpu"))
        return batch

    def sample_from_indices(self, idxs: Tensor | list[int]) -> TensorDictBase:
        """Return rows by their positions, as a copy.

        Args:
            idxs: int64 `[n]` or `[n, 1]`.

        Raises:
            EmptyBufferError: there are no rows. IndexError: a position has no row.
        """
        self._check_size(1)
        made: TensorDictBase = self._rows.take_slots(self._rows.check_slots(as_slots(idxs, None)))
        return made

    def _check_size(self, batch_size: int) -> int:
        check_int(batch_size, "batch_size")
        if batch_size < 1:
            raise InvalidArgumentError(f"batch_size is at least 1, not {batch_size}")
        size = self.size
        if not size:
            raise EmptyBufferError("the buffer is empty: add transitions before sampling")
        return size

    # -- checkpoints -------------------------------------------------------------------------------
    def dumps(self, path: str | os.PathLike[str]) -> None:
        """Write a checkpoint to a folder: the rows to `storage/`, the state of the buffer beside it.

        Rows that are in `storage/` already are committed, not copied.
        """
        check_path(path, "path")
        folder = FilePath(path)
        folder.mkdir(parents=True, exist_ok=True)
        if self._rows.initialized:
            self._rows.dumps(folder / "storage")
        facts = TensorDict({"rows": torch.tensor(self._rows.initialized, device="cpu"), **self._facts()})
        facts.save(folder / _FACTS, mode="w").close()

    def loads(self, path: str | os.PathLike[str]) -> None:
        """Restore the rows and the state of a checkpoint.

        Args:
            path: the folder of `dumps`.

        Raises:
            StoreNotFoundError: there is no checkpoint. RuntimeError: it has too many rows, or rows of another form.
            ValueError: it belongs to another kind of buffer.
        """
        check_path(path, "path")
        folder = FilePath(path)
        with tdstore.open(folder / _FACTS) as found:
            facts = found.clone()
        self._check_facts(facts)
        if facts["rows"]:
            self._rows.loads(folder / "storage")
        elif self.size:
            self._rows.empty()
        self._take_facts(facts)

    def state_dict(self) -> dict[str, Any]:
        """Return the rows and the state of the buffer, as tensors and plain data."""
        return {"rows": self._rows.state_dict(), "facts": self._facts().to_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the rows and the state of the buffer from a copy of the result of `state_dict`.

        Raises:
            RuntimeError: it has too many rows, or rows of another form. ValueError: it belongs to another kind of
                buffer. KeyError: it has no rows and facts.
        """
        if not isinstance(state_dict, Mapping) or not {"rows", "facts"} <= {*state_dict}:
            raise StateDictError(f"state_dict is no state of a {type(self).__name__}: it has no 'rows' and 'facts'")
        facts = TensorDict.from_dict(state_dict["facts"], batch_size=[])
        self._check_facts(facts)
        self._rows.load_state_dict(state_dict["rows"])
        self._take_facts(facts)

    def _facts(self) -> Any:
        """Return the state of the buffer without its rows, as a TensorDict."""
        numbers = {"cursor": self.cursor, "write_count": self._rows.write_count, "before": self._before}
        return TensorDict({name: torch.tensor(value, device="cpu") for name, value in numbers.items()})

    def _check_facts(self, facts: Any) -> None:
        missing = [key for key in self._facts().keys(True, True) if facts.get(key, None) is None]
        if missing:
            raise InvalidArgumentError(f"this is no checkpoint of a {type(self).__name__}: it has no {missing[0]!r}")

    def _take_facts(self, facts: Any) -> None:
        self._before = int(facts["before"])
        cursor = int(facts["cursor"])
        cursor = cursor if cursor < self.max_size else self.size % self.max_size
        self._rows.set_counters(cursor, int(facts["write_count"]))

    # -- the end -----------------------------------------------------------------------------------
    def clear(self) -> None:
        """Remove all rows. `counter` is not reset."""
        self._before = self.counter
        if self._in_memory:
            self._rows = self._make()
        else:
            self._rows.empty()

    def flush(self) -> None:
        """Make all rows durable, if the backend can."""
        self._rows.flush()

    def close(self) -> None:
        """Commit, and close the storage."""
        self._rows.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.size} of {self.max_size} rows, {self._rows.place})"
