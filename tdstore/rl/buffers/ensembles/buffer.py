"""Several replay buffers that are sampled as one."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path as FilePath
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

import tdstore
from tdstore import TensorDict
from tdstore.errors import InvalidArgumentError, InvalidStateError, InvalidTypeError, OutOfRangeError
from tdstore.rl.buffers.buffer import ReplayBuffer
from tdstore.rl.buffers.checkpoints import (
    METADATA,
    Action,
    BufferState,
    batches_of_state,
    read_buffer_state,
    state_of_batches,
)
from tdstore.rl.buffers.ensembles.parts import (
    SamplerEnsemble,
    StorageEnsemble,
    WriterEnsemble,
    check_members,
    numbered_folders,
    write_refusal,
)
from tdstore.rl.buffers.parts import collated
from tdstore.rl.buffers.prioritized import PrioritizedSampler, as_numbers, ranked
from tdstore.rl.buffers.samplers import Sampler
from tdstore.rl.buffers.writers import only_collections
from tdstore.rl.kinds import is_collection
from tdstore.rl.types import Rows, Transform
from tdstore.types import NestedKey

if TYPE_CHECKING:
    from tdstore import TensorDictBase


class ReplayBufferEnsemble(ReplayBuffer):
    """Several replay buffers that are sampled as one.

    A batch has the shape `[members, rows]`: for each member that it is drawn from, rows that this member samples and
    transforms. Its entry "index" is a TensorDict of "buffer_ids" and "index". If the entries or shapes of members
    differ, batches are lazy stacks. `ensemble[0]` is a member, `ensemble[:2]` an ensemble of two.

    Args:
        *buffers: the members; without them, their parts:
        storages, samplers, writers: ensembles with one part for each member.
        transform: called with each batch.
        batch_size: rows of a batch, of all members together.
        collate_fn: makes one batch of a list of the batches of members. Default: they are stacked.
        collate_fns: for each member, as `collate_fn` of `ReplayBuffer`; only where parts are given.
        p, sample_from_all, num_buffer_sampled: as `SamplerEnsemble`.
        routing_key: entry with the number of the member that a row is written to; without it, and without
            `routing_dim`, rows are only written through members.
        routing_dim: dimension of data along which the members are.
        generator, **kwargs: as `ReplayBuffer`.

    Raises:
        TypeError: there are no members, both members and parts, or objects of other types.
        ValueError: the numbers of parts differ, or both ways of routing are given.

    Example:
        >>> members = [TensorDictReplayBuffer(storage=LazyTensorStorage(10)) for _ in range(2)]
        >>> rb = ReplayBufferEnsemble(*members, sample_from_all=True, batch_size=6)
        >>> for k in range(2):
        ...     _ = rb[k].extend(TensorDict({"obs": torch.full((5,), k)}, [5]))
        >>> rb.sample()["obs"]
        tensor([[0, 0, 0],
                [1, 1, 1]])
    """

    def __init__(
        self,
        *buffers: ReplayBuffer,
        storages: StorageEnsemble | None = None,
        samplers: SamplerEnsemble | None = None,
        writers: WriterEnsemble | None = None,
        transform: Transform | None = None,
        batch_size: int | None = None,
        collate_fn: Callable[[Any], Any] | None = None,
        collate_fns: Sequence[Any] | None = None,
        p: Sequence[float] | Tensor | None = None,
        sample_from_all: bool = False,
        num_buffer_sampled: int | None = None,
        routing_key: NestedKey | None = None,
        routing_dim: int | None = None,
        generator: torch.Generator | None = None,
        **kwargs: Any,
    ) -> None:
        if buffers:
            if storages is not None or samplers is not None or writers is not None or collate_fns is not None:
                raise InvalidTypeError("give the members of an ensemble, or their parts, not both")
            for member in buffers:
                if not isinstance(member, ReplayBuffer):
                    raise InvalidTypeError(f"members of an ensemble are buffers, not {type(member).__name__}")
            storages = StorageEnsemble(*(member.storage for member in buffers))
            samplers = SamplerEnsemble(
                *(member.sampler for member in buffers),
                p=p, sample_from_all=sample_from_all, num_buffer_sampled=num_buffer_sampled,
            )  # fmt: skip
            writers = WriterEnsemble(*(member.writer for member in buffers))
        elif storages is None or samplers is None or writers is None:
            raise InvalidTypeError("give the members of an ensemble, or all of storages, samplers and writers")
        else:
            collate_fns = [None] * len(storages) if collate_fns is None else collate_fns
            if len({len(storages), len(samplers), len(writers), len(collate_fns)}) != 1:
                raise InvalidArgumentError(
                    f"there are {len(storages)} storages, {len(samplers)} samplers, {len(writers)} writers and "
                    f"{len(collate_fns)} collate_fns"
                )
            parts = zip(storages, samplers, writers, storages.transforms, collate_fns, strict=True)
            buffers = tuple(
                ReplayBuffer(storage=rows, sampler=sampler, writer=writer, transform=made, collate_fn=collate)
                for rows, sampler, writer, made, collate in parts
            )
        if routing_key is not None and routing_dim is not None:
            raise InvalidArgumentError("give one of routing_key and routing_dim")
        self.members = buffers
        self.routing_key, self.routing_dim = routing_key, routing_dim
        super().__init__(
            storage=storages, sampler=samplers, writer=writers, transform=transform, batch_size=batch_size,
            collate_fn=collate_fn, generator=generator, **kwargs,
        )  # fmt: skip

    # -- reading -----------------------------------------------------------------------------
    def _sample(self, size: int) -> tuple[Any, dict[Any, Any]]:
        rows = self._sampler.rows_each(size)
        batches, infos = [], []
        with self._lock:
            for k in self._sampler.choose(lambda: [_sampleable(member, rows) for member in self.members]):
                batch, info = self.members[k]._sample(rows)
                batches.append(batch)
                infos.append(_described(k, info))
        about = collated(infos)
        batch = collated(batches) if self._collate is None else self._collate(batches)
        if is_collection(batch) and not tdstore.is_tensorclass(batch) and batch.batch_size[:2] == about.batch_size:
            batch.set("index", about["index"])
        return self._transformed(batch), about

    def can_sample(self, batch_size: int | None = None) -> bool:
        """Check whether a batch can be sampled now, whichever members are chosen.

        Args:
            batch_size: the number of rows; default: that of the constructor.

        Raises:
            RuntimeError: there is no batch size. ValueError: it cannot be divided among members.
        """
        size = self._batch_size if batch_size is None else batch_size
        if size is None:
            raise InvalidStateError("no batch size: give one to can_sample(), or to the constructor of the ensemble")
        rows = self._sampler.rows_each(size)
        ready = [member.can_sample(rows) for member in self.members]
        return any(ready) if isinstance(self._sampler.p, str) else all(ready)

    def __len__(self) -> int:
        """Return the number of members."""
        return len(self.members)

    def __getitem__(self, index: Any) -> Any:
        """Return a member, an ensemble of several, or rows: `ensemble[members, rows]`.

        Raises:
            IndexError: there is no such member. TypeError: the index is of another kind.
        """
        index, rows = index if isinstance(index, tuple) and len(index) == 2 else (index, None)
        members = range(len(self))[index] if isinstance(index, slice) else index
        if isinstance(members, int):
            if not -len(self) <= members < len(self):
                raise OutOfRangeError(f"there is no member {members} among {len(self)}")
            member = self.members[members]
            return member if rows is None else member[rows]
        if not isinstance(members, (range, list, Tensor)):
            raise InvalidTypeError(f"members of an ensemble are indexed by integers, not by {index!r}")
        chosen = [range(len(self))[int(k)] for k in members]
        if rows is not None:
            return collated([self.members[k][rows] for k in chosen])
        return ReplayBufferEnsemble._of(self, chosen)

    def _of(self, chosen: list[int]) -> ReplayBufferEnsemble:
        sampler = self._sampler._subset(chosen)
        made = ReplayBufferEnsemble(
            *(self.members[k] for k in chosen), batch_size=self._batch_size, collate_fn=self._collate,
            p=sampler.p, sample_from_all=sampler.sample_from_all, num_buffer_sampled=sampler.num_buffer_sampled,
        )  # fmt: skip
        made._transforms.extend(self._transforms)
        return made

    def stats(self) -> dict[str, Any]:
        """Return how full the members are together."""
        each = [member.stats() for member in self.members]
        total = {key: sum(one[key] for one in each) for key in ("size", "capacity", "write_count")}
        return {
            **total, "utilization": total["size"] / total["capacity"], "prefetch_queue_size": len(self._pending),
            "initialized": all(one["initialized"] for one in each), "num_buffers": len(self),
        }  # fmt: skip

    # -- writing -----------------------------------------------------------------------------
    def extend(self, data: Rows) -> TensorDictBase:  # type: ignore[override]  # which says the members, too
        """Write rows to the members that they name.

        Everything is checked before the first member writes: after bad input nothing is changed in any member. After an
        error of the storage itself (a full disk, a lost connection, a new place that cannot be made), the rows of
        earlier members stay written; each member writes all of its rows or none.

        Returns:
            A TensorDict `[n]` of "buffer_ids" and "index".

        Raises:
            RuntimeError: there is neither `routing_key` nor `routing_dim`, or a member accepts no rows.
            ValueError: a row names no member.
        """
        with self._lock:
            return self._planned(data)()

    def _planned(self, data: Any) -> Callable[[], TensorDictBase]:  # type: ignore[override]
        if self.routing_key is None and self.routing_dim is None:
            raise write_refusal()
        ids = self._routes(only_collections(data))
        flat = data.reshape(-1)
        planned = []
        for k in ids.unique().tolist():
            rows = (ids == k).nonzero().squeeze(-1)
            planned.append((rows, self.members[k]._planned(flat[rows])))

        def write() -> TensorDict:
            index = torch.empty(len(ids), dtype=torch.int64, device="cpu")
            for rows, of_member in planned:
                index[rows] = of_member()
            return TensorDict({"buffer_ids": ids, "index": index}, [len(ids)])

        return write

    def _routes(self, data: Any) -> Tensor:
        """Return the members that rows go to, int64 `[n]`."""
        if self.routing_key is not None:
            named = data.get(self.routing_key, None)
            if not isinstance(named, Tensor) or named.dtype.is_floating_point or named.numel() != data.numel():
                raise InvalidArgumentError(f"rows have no integer {self.routing_key!r}, which names their member")
            ids = named.reshape(-1).long()
        else:
            dim, shape = self.routing_dim, data.batch_size
            if dim is None or not -len(shape) <= dim < len(shape) or shape[dim] != len(self):
                raise InvalidArgumentError(
                    f"data of {list(shape)} has not {len(self)} places, one a member, along routing_dim={dim}"
                )
            sizes = [1] * len(shape)
            sizes[dim] = len(self)
            ids = torch.arange(len(self), device="cpu").reshape(sizes).expand(shape).reshape(-1)
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < len(self):
            raise InvalidArgumentError(f"members are 0 to {len(self) - 1}, and rows name {ids.unique().tolist()}")
        return ids

    def add(self, data: Any) -> TensorDictBase:  # type: ignore[override]
        """Write one row to the member that its `routing_key` names; otherwise as `extend`."""
        return self.extend(only_collections(data).unsqueeze(0))[0]

    def update_priority(self, index: Any, priority: Any) -> None:
        """Set priorities of rows.

        Args:
            index: a TensorDict of "buffer_ids" and "index", as a sample has it.
            priority: a number, or one for each row.

        Raises:
            ValueError: a priority is negative or NaN, or their number is wrong.
            IndexError: there is no such member or row. After an error all priorities are as before.
        """
        ids, rows = index["buffer_ids"].reshape(-1), index["index"]
        rows = rows.reshape(len(ids), -1) if rows.numel() != len(ids) else rows.reshape(-1)
        priority = as_numbers(priority).reshape(-1)
        ranked(priority, len(ids))
        priority = priority.expand(len(ids))
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < len(self):
            raise OutOfRangeError(f"members are 0 to {len(self) - 1}, and rows are of {ids.unique().tolist()}")
        parts = [(self.members[k], rows[ids == k], priority[ids == k]) for k in ids.unique().tolist()]
        with self._lock:
            for member, slots, _ in parts:
                if isinstance(member.sampler, PrioritizedSampler):
                    member.sampler.check_index(slots, member.storage)
            for member, slots, values in parts:
                member.update_priority(slots, values)

    def empty(self, empty_write_count: bool = True) -> None:
        """Forget the rows of all members, as `ReplayBuffer.empty`."""
        with self._lock:
            self._clear_prefetched()
            for member in self.members:
                member.empty(empty_write_count)

    # -- checkpoints, and the end ------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        """Return the state of each member, by its number, the random numbers and the prefetched batches."""
        return self._with_batches(self._state)

    def _state(self, pending: Sequence[Future[Any]]) -> dict[str, Any]:
        rng = None if self._generator is None else self._generator.get_state()
        states = {str(k): member.state_dict() for k, member in enumerate(self.members)}
        return {**states, "_batch_size": self._batch_size, "_rng": rng, "_prefetched": state_of_batches(pending)}

    def _plan_state(self, state_dict: Any) -> Action:
        own = ("_batch_size", "_rng", "_prefetched")
        check_members(len(self), sorted(name for name in state_dict if name not in own))
        actions = [member._plan_state(state_dict[str(k)]) for k, member in enumerate(self.members)]
        rng = state_dict.get("_rng")
        self._check_rng(rng)
        pending = batches_of_state(state_dict.get("_prefetched", ()))
        return partial(self._resume, actions, state_dict.get("_batch_size", self._batch_size), rng, pending)

    def _parts(self) -> dict[str, Any]:
        return {str(k): member for k, member in enumerate(self.members)}

    def _plan_loads(self, path: str | os.PathLike[str]) -> Action:
        folder = FilePath(path)
        check_members(len(self), numbered_folders(folder))
        # Earlier releases wrote only the checkpoints of the members.
        former = not (folder / METADATA).exists()
        beside = BufferState(self._batch_size, None, []) if former else read_buffer_state(folder)
        self._check_rng(beside.rng)
        actions = [member._plan_loads(folder / str(k)) for k, member in enumerate(self.members)]
        return partial(self._resume, actions, *beside)

    def flush(self) -> None:
        """Commit the rows of all members."""
        for member in self.members:
            member.flush()

    def close(self) -> None:
        """Close all members."""
        self._clear_prefetched()
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(wait=True)
        for member in self.members:
            member.close()


def _sampleable(member: ReplayBuffer, rows: int) -> int:
    if not member.can_sample(rows):
        return 0
    sampler = member.sampler
    return sampler.available(member.storage, rows) if isinstance(sampler, Sampler) else len(member.storage)


def _described(k: int, info: dict[Any, Any]) -> TensorDict:
    """Return where the rows of a member's part of a batch come from, and what its sampler says about them."""
    index = info["index"]
    index = torch.stack(index, -1) if isinstance(index, tuple) else index
    place = TensorDict({"buffer_ids": torch.full((len(index),), k, device="cpu"), "index": index}, [len(index)])
    rest = {key: value for key, value in info.items() if key != "index" and isinstance(value, Tensor)}
    return TensorDict({"index": place, **rest}, [len(index)])
