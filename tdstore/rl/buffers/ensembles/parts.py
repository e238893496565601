"""Ensembles of the parts of buffers: of storages, of writers and of samplers."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path as FilePath
from typing import Any, NoReturn, Self, overload

import torch

from tdstore.arguments import check_flags
from tdstore.errors import InvalidArgumentError, InvalidStateError, StateDictError
from tdstore.rl.buffers.checkpoints import (
    Action,
    plan_sampler_load,
    plan_sampler_state,
    plan_storage_load,
    plan_storage_state,
    plan_writer_load,
    plan_writer_state,
)
from tdstore.rl.buffers.samplers import Info, Sampler
from tdstore.rl.buffers.writers import Writer
from tdstore.rl.storages.base import Storage
from tdstore.rl.tables.state import Ints
from tdstore.rl.types import Rows, StorageLike


class Ensemble(ABC):
    """A tuple of parts, one for each member of an ensemble."""

    _parts: tuple[Any, ...]

    def __len__(self) -> int:
        """Return the number of members."""
        return len(self._parts)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._parts)

    @overload
    def __getitem__(self, index: int) -> Any: ...

    @overload
    def __getitem__(self, index: slice) -> Self: ...

    def __getitem__(self, index: int | slice) -> Any:
        """Return the part of one member, or an ensemble of those of several."""
        return self._subset(range(len(self))[index]) if isinstance(index, slice) else self._parts[index]

    def _subset(self, members: Sequence[int]) -> Self:
        return type(self)(*(self._parts[k] for k in members))

    def state_dict(self) -> dict[str, Any]:
        """Return the state of each member's part, by its number."""
        return {str(k): part.state_dict() for k, part in enumerate(self._parts)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Make each member's part resume; everything is checked first.

        Raises:
            KeyError: it is of a different number of members.
        """
        check_members(len(self), sorted(state_dict))
        for act in [self._plan_part_state(part, state_dict[str(k)]) for k, part in enumerate(self._parts)]:
            act()

    def dumps(self, path: str | os.PathLike[str]) -> None:
        """Write the part of each member into a folder of its number."""
        for k, part in enumerate(self._parts):
            part.dumps(FilePath(path) / str(k))

    def loads(self, path: str | os.PathLike[str]) -> None:
        """Make each member's part take over its folder; all folders are checked first.

        Raises:
            KeyError: the number of folders differs.
        """
        check_members(len(self), numbered_folders(FilePath(path)))
        for act in [self._plan_part_load(part, FilePath(path) / str(k)) for k, part in enumerate(self._parts)]:
            act()

    @abstractmethod
    def _plan_part_state(self, part: Any, state: Any) -> Action:
        """Check the state of a part, and return the function that makes the part resume."""

    @abstractmethod
    def _plan_part_load(self, part: Any, folder: FilePath) -> Action:
        """Check the folder of a part, and return the function that makes the part take it over."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(map(repr, self._parts))})"


class StorageEnsemble(Ensemble):
    """The storages of an ensemble of buffers. Rows are written through the buffers: `ensemble[0].extend(...)`.

    Args:
        *storages: one for each member.
        transforms: for each member, a function that is called with its part of a batch, or None.

    Raises:
        ValueError: the number of transforms differs.

    Example:
        >>> storages = StorageEnsemble(LazyTensorStorage(3), LazyTensorStorage(4))
        >>> len(storages), storages[1].max_size, storages.max_size
        (2, 4, 7)
    """

    ndim = 1
    initialized = True

    def __init__(self, *storages: Any, transforms: Sequence[Any] | None = None) -> None:
        self._parts = storages
        self.transforms = [None] * len(storages) if transforms is None else list(transforms)
        if len(self.transforms) != len(storages):
            raise InvalidArgumentError(f"there are {len(self.transforms)} transforms for {len(storages)} storages")

    def _subset(self, members: Sequence[int]) -> Self:
        return type(self)(*(self._parts[k] for k in members), transforms=[self.transforms[k] for k in members])

    @property
    def max_size(self) -> int:
        """Slots of all storages."""
        return sum(int(one.max_size) for one in self._parts)

    @property
    def shape(self) -> torch.Size:
        """Number of slots."""
        return torch.Size((self.max_size,))

    def get(self, index: Any) -> list[tuple[int, Any]]:
        """Return the rows of the index of a sample: pairs of the number of a member and its rows.

        Args:
            index: a TensorDict `[members, rows]` of "buffer_ids" and "index".
        """
        return [
            (int(ids.reshape(-1)[0]), self._parts[int(ids.reshape(-1)[0])].get(rows))
            for ids, rows in zip(index["buffer_ids"], index["index"], strict=True)
        ]

    def set(self, cursor: Any, data: Any, *, set_cursor: bool = True) -> NoReturn:
        """Refuse to write.

        Args:
            cursor, data, set_cursor: as `Storage.set`.

        Raises:
            RuntimeError: always.
        """
        raise write_refusal()

    def _plan_part_state(self, part: Any, state: Any) -> Action:
        return plan_storage_state(part, state)[1]

    def _plan_part_load(self, part: Any, folder: FilePath) -> Action:
        return plan_storage_load(part, folder)[1]

    def register_save_hook(self, hook: Callable[..., Any]) -> None:
        """Call `register_save_hook(hook)` of each storage."""
        for one in self._parts:
            one.register_save_hook(hook)

    def register_load_hook(self, hook: Callable[..., Any]) -> None:
        """Call `register_load_hook(hook)` of each storage."""
        for one in self._parts:
            one.register_load_hook(hook)


class WriterEnsemble(Ensemble, Writer):
    """The writers of an ensemble of buffers.

    Args:
        *writers: one for each member.

    Example:
        >>> len(WriterEnsemble(RoundRobinWriter(), ImmutableDatasetWriter()))
        2
    """

    def __init__(self, *writers: Any) -> None:
        Writer.__init__(self)
        self._parts = writers

    def register_storage(self, storage: StorageLike) -> None:
        """Do nothing: each member has a storage of its own."""

    def add(self, data: Rows) -> NoReturn:
        """Refuse to write.

        Raises:
            RuntimeError: always.
        """
        raise write_refusal()

    def extend(self, data: Rows) -> NoReturn:
        """Refuse to write.

        Raises:
            RuntimeError: always.
        """
        raise write_refusal()

    @property
    def write_count(self) -> int:
        """Rows that were ever written by all members."""
        return sum(int(one.write_count) for one in self._parts)

    def _plan_part_state(self, part: Any, state: Any) -> Action:
        return plan_writer_state(part, state, getattr(part.storage, "capacity", None))

    def _plan_part_load(self, part: Any, folder: FilePath) -> Action:
        return plan_writer_load(part, folder, getattr(part.storage, "capacity", None))


class SamplerEnsemble(Ensemble, Sampler):
    """The samplers of an ensemble of buffers, and how its members are chosen.

    Args:
        *samplers: one for each member.
        p: the share of each member, up to a common factor; None: equal shares. "sampleable": the number of rows of each
            (for slices, of places where one can begin), and 0 where there is no batch.
        sample_from_all: each batch has rows of each member.
        num_buffer_sampled: from how many members a batch is drawn, with replacement; by default, as many as there are.

    Raises:
        ValueError: `p` is not a share for each member, or `num_buffer_sampled` below 1.
        RuntimeError: `p` and `sample_from_all`.

    Example:
        >>> SamplerEnsemble(RandomSampler(), RandomSampler(), p=[1, 3]).p
        tensor([0.2500, 0.7500])
    """

    def __init__(
        self, *samplers: Any, p: Any = None, sample_from_all: bool = False, num_buffer_sampled: int | None = None
    ) -> None:
        Sampler.__init__(self)
        check_flags(sample_from_all=sample_from_all)
        self._parts = samplers
        if p is not None and sample_from_all:
            raise InvalidStateError("give one of p and sample_from_all")
        if isinstance(p, str) and p != "sampleable":
            raise InvalidArgumentError(f'p is "sampleable", or a share for each member, not {p!r}')
        if p is not None and not isinstance(p, str):
            p = torch.as_tensor(p, dtype=torch.float32).flatten()
            if len(p) != len(samplers) or not bool((p >= 0).all()) or not 0 < float(p.sum()) < float("inf"):
                raise InvalidArgumentError(f"p={p.tolist()} is no share for each of {len(samplers)} members")
            p = p / p.sum()
        if num_buffer_sampled is not None and num_buffer_sampled < 1:
            raise InvalidArgumentError(f"a batch is drawn from at least 1 member, not {num_buffer_sampled}")
        self.p, self.sample_from_all = p, sample_from_all
        self.num_buffer_sampled = len(samplers) if num_buffer_sampled is None or sample_from_all else num_buffer_sampled

    def _subset(self, members: Sequence[int]) -> Self:
        p = self.p if self.p is None or isinstance(self.p, str) else self.p[list(members)]
        return type(self)(
            *(self._parts[k] for k in members), p=p, sample_from_all=self.sample_from_all,
            num_buffer_sampled=self.num_buffer_sampled,
        )  # fmt: skip

    def rows_each(self, batch_size: int) -> int:
        """Return how many rows each chosen member contributes to a batch.

        Raises:
            ValueError: the batch cannot be divided among them.
        """
        if batch_size % self.num_buffer_sampled:
            raise InvalidArgumentError(
                f"a batch of {batch_size} rows cannot be divided by the {self.num_buffer_sampled} members it is drawn "
                "from (num_buffer_sampled)"
            )
        return batch_size // self.num_buffer_sampled

    def choose(self, available: Callable[[], Sequence[int]]) -> list[int]:
        """Choose the members of a batch.

        Args:
            available: returns the number of rows of each member that can be sampled.

        Raises:
            RuntimeError: with "sampleable", no member has a batch.
        """
        if self.sample_from_all:
            return list(range(len(self)))
        if self.p is None:
            chosen: list[int] = torch.randint(
                len(self), (self.num_buffer_sampled,), generator=self._rng, device="cpu"
            ).tolist()
            return chosen
        shares = torch.tensor(available(), dtype=torch.float32, device="cpu") if isinstance(self.p, str) else self.p
        if not bool(shares.any()):
            raise InvalidStateError("no member of this ensemble can be sampled")
        return torch.multinomial(shares, self.num_buffer_sampled, True, generator=self._rng).tolist()

    def slots(self, storage: Storage, batch_size: int) -> tuple[Ints, Info]:
        """Refuse to choose slots: each member chooses its own.

        Args:
            storage, batch_size: as `Sampler.slots`.

        Raises:
            RuntimeError: always.
        """
        raise InvalidStateError("the members of a ReplayBufferEnsemble are sampled through it")

    def _plan_part_state(self, part: Any, state: Any) -> Action:
        return plan_sampler_state(part, state)

    def _plan_part_load(self, part: Any, folder: FilePath) -> Action:
        return plan_sampler_load(part, folder)

    def set_rng(self, generator: torch.Generator | None) -> None:
        """Draw from that generator from now on, and make all members do so."""
        self._rng = generator
        for one in self._parts:
            if isinstance(one, Sampler):
                one.set_rng(generator)
            else:
                one._rng = generator


def numbered_folders(folder: FilePath) -> list[str]:
    """Return the folders in a folder whose names are numbers."""
    return sorted(found.name for found in folder.iterdir() if found.is_dir() and found.name.isdigit())


def check_members(members: int, found: list[str]) -> None:
    """Raise StateDictError unless there is one for each member."""
    if found != sorted(map(str, range(members))):
        raise StateDictError(f"this ensemble has {members} members, and there are {', '.join(found)}")


def write_refusal() -> InvalidStateError:
    """Return the error of a write to an ensemble as a whole."""
    return InvalidStateError(
        "rows of an ensemble are written through its members, ensemble[0].extend(...), or with routing_key= or "
        "routing_dim= of the ReplayBufferEnsemble"
    )
