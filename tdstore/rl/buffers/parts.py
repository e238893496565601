"""Parts of a buffer: valid types, collation of items, calls of transforms."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence, Sized
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

import tdstore
from tdstore import TensorDict
from tdstore.arguments import check_callable, check_flags, check_int, check_prefetch
from tdstore.errors import InvalidArgumentError, InvalidStateError, InvalidTypeError, TDStoreError
from tdstore.interop import from_tensordict, to_tensordict
from tdstore.rl.buffers.checkpoints import Checkpointer
from tdstore.rl.buffers.samplers import ConsumingSampler, RandomSampler, Sampler
from tdstore.rl.buffers.slices import MASK, SliceSampler
from tdstore.rl.buffers.writers import Writer
from tdstore.rl.kinds import is_collection, is_container, is_foreign
from tdstore.rl.storages.base import Storage
from tdstore.rl.storages.tabular import TabularStorage
from tdstore.rl.torchrl import torchrl_storage
from tdstore.rl.types import Transform

if TYPE_CHECKING:
    from torchrl.data import TensorStorage  # type: ignore[import-untyped,import-not-found,unused-ignore]

    from tdstore.rl.buffers.buffer import ReplayBuffer

V = TypeVar("V")


def collated(items: Sequence[Any]) -> Any:
    """Collate a list of items into one batch: a dense stack where shapes agree, a lazy one where they differ."""
    if is_foreign(items[0]):
        items = [from_tensordict(item) for item in items]
    first = items[0]
    if is_container(first):
        try:
            return tdstore.stack(list(items))
        except (TDStoreError, RuntimeError):  # other shapes or keys
            return tdstore.lazy_stack(list(items))
    if isinstance(first, Tensor):
        return torch.stack(list(items))
    if isinstance(first, tuple):
        made = [collated(parts) for parts in zip(*items, strict=True)]
        return type(first)(*made) if hasattr(first, "_fields") else tuple(made)
    if isinstance(first, dict):
        return {key: collated([item[key] for item in items]) for key in first}
    if isinstance(first, (int, float, bool, np.ndarray, np.generic)):
        return torch.as_tensor(np.asarray(items))
    return list(items)


def stats_of(buffer: ReplayBuffer) -> dict[str, Any]:
    """Return how full a buffer is."""
    if not buffer.initialized:
        return {"size": 0, "write_count": 0, "prefetch_queue_size": 0, "initialized": False}
    size, capacity = len(buffer), int(buffer.storage.max_size)
    return {
        "size": size, "capacity": capacity, "utilization": size / capacity, "write_count": buffer.write_count,
        "prefetch_queue_size": len(buffer._pending), "initialized": True,
    }  # fmt: skip


def refuse_empty(storage: Sized) -> None:
    """Check that a storage has rows.

    Raises:
        RuntimeError: it has none.
    """
    if not len(storage):
        raise InvalidStateError("this buffer has no rows to sample")


def made_part(name: str, part: Any, default: Callable[[], Any], fits: Callable[[Any], bool]) -> Any:
    """Return the part of a buffer that an argument specifies.

    Args:
        name: the name of the argument, for errors.
        part: the part, a function that creates it, or None.
        default: creates the default part.
        fits: checks whether an object is such a part.

    Raises:
        TypeError: `part` is none of these.
    """
    if part is None:
        return default()
    if fits(part):
        return part
    if callable(part):
        made = part()
        if fits(made):
            return made
        raise InvalidTypeError(f"{name}= is a function that makes a {type(made).__name__}, and no {name}")
    raise InvalidTypeError(
        f"{name}= is a {name}, or a function without arguments that makes one, not {type(part).__name__}"
    )


_REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "sample_unit": ((None,), "use SliceSampler for pieces of trajectories"),
    "sampler_device": ((None, "cpu"), "samplers work on the CPU"),
    "sync": ((True, False), ""),
    "service_backend": ((None, "direct"), "share the rows by a storage that several processes open, as LazyStorage"),
    "service_backend_options": ((None,), "share the rows by a storage that several processes open, as LazyStorage"),
    "transport": ((None, "auto", "direct"), "share the rows by a storage that several processes open, as LazyStorage"),
    "transport_options": ((None,), "share the rows by a storage that several processes open, as LazyStorage"),
}
"""Unsupported arguments of torchrl's buffers: values without effect, and what to do instead."""


def refuse(name: str, arguments: Mapping[str, Any]) -> None:
    """Raise TypeError for arguments of a class that it does not know, or does not support.

    Args:
        name: the name of the class.
        arguments: the arguments by name.
    """
    for argument, value in arguments.items():
        if argument not in _REFUSED:
            raise InvalidTypeError(f"{name} got an unexpected keyword argument {argument!r}")
        harmless, instead = _REFUSED[argument]
        if value not in harmless:
            raise InvalidTypeError(f"{argument}={value!r:.100} is not supported by {name}: {instead}")


def consuming(sampler: V, count: int | None, prefetch: int | None) -> V | ConsumingSampler:
    """Return the sampler that samples each row that many times; None: as often as the given sampler does.

    Raises:
        ValueError: the sampler is neither a random nor a consuming one, or batches are prefetched.
    """
    if count is not None and not isinstance(sampler, (RandomSampler, ConsumingSampler)):
        raise InvalidArgumentError(f"consume_after_n_samples= is for random sampling, not a {type(sampler).__name__}")
    made = sampler if count is None else ConsumingSampler(count)
    if isinstance(made, ConsumingSampler) and prefetch:
        raise InvalidArgumentError("rows that are sampled a limited number of times are not prefetched")
    return made


def checkpointer_of(checkpointer: object) -> Checkpointer | None:
    """Return the object that writes the checkpoints of a storage; None: the storage itself.

    Raises:
        TypeError: it has no `dumps` and `loads`, or its format is one of torchrl's that are not supported.
    """
    made = (
        checkpointer()
        if isinstance(checkpointer, type) or (callable(checkpointer) and not hasattr(checkpointer, "dumps"))
        else checkpointer
    )
    if made is None or (
        is_torchrl(made) and type(made).__name__ in ("TensorStorageCheckpointer", "ListStorageCheckpointer")
    ):
        return None  # a storage writes and reads that format
    if is_torchrl(made) or not all(callable(getattr(made, name, None)) for name in ("dumps", "loads")):
        raise InvalidTypeError(
            f"checkpointer={type(made).__name__}: give an object with dumps(storage, path) and loads(storage, path), "
            "or nothing: storages write checkpoints in the format of torchrl's TensorStorageCheckpointer"
        )
    return cast("Checkpointer", made)


def transforms_of(transform: V, factory: Callable[[], Transform] | None) -> V | Callable[[Any], Any]:
    """Return the transform of a buffer, from either of its two arguments.

    Raises:
        TypeError: both are given, or the factory is not callable.
    """
    if factory is None:
        return transform
    if transform is not None:
        raise InvalidTypeError("give one of transform and transform_factory")
    if not callable(factory):
        raise InvalidTypeError(f"transform_factory is a function that makes a transform, not {type(factory).__name__}")
    made: Callable[[Any], Any] = factory()
    return made


def check_size(batch_size: object) -> None:
    """Raise ValueError unless this is a number of rows."""
    if isinstance(batch_size, bool) or not isinstance(batch_size, (int, np.integer)) or not 1 <= batch_size < 1 << 62:
        raise InvalidArgumentError(f"batch_size is a number of rows, at least 1 and below 2**62, not {batch_size!r}")


def check_generator(generator: object) -> None:
    """Raise TypeError unless this is a generator of random numbers, or None."""
    if generator is not None and not isinstance(generator, torch.Generator):
        raise InvalidTypeError(f"generator is a torch.Generator, not {type(generator).__name__}")


def check_transform(transform: object) -> None:
    """Raise TypeError unless this can be called with batches."""
    if not callable(transform):
        raise InvalidTypeError(f"transform is called with batches, which a {type(transform).__name__} cannot be")


def check_settings(
    batch_size: object,
    prefetch: int | None,
    dim_extend: int | None,
    collate_fn: object,
    pin_memory: object,
    shared: object,
) -> None:
    """Raise an error for arguments of a buffer that it cannot take.

    Raises:
        ValueError: a negative number. TypeError: no number, or no function.
    """
    check_flags(pin_memory=pin_memory, shared=shared)
    if batch_size is not None:
        check_size(batch_size)
    if prefetch is not None:
        check_prefetch(prefetch)
    if collate_fn is not None:
        check_callable(collate_fn, "collate_fn")
    if dim_extend is None:
        return
    check_int(dim_extend, "dim_extend")
    if dim_extend < 0:
        raise InvalidArgumentError(f"dim_extend is a dimension counted from the first one, not {dim_extend}")


def asked_size(asked: int | None, own: int | None) -> int:
    """Return the rows of a batch, from the argument of `sample` or else of the constructor.

    Raises:
        RuntimeError: neither was given.
    """
    if asked is None:
        if own is None:
            raise InvalidStateError("no batch size: give one to sample(), or to the constructor of the buffer")
        return own
    check_size(asked)
    if own is not None and asked != own:
        warnings.warn(f"batch_size={asked} is used, and not the {own} of this buffer", stacklevel=3)
    return int(asked)


def is_storage(part: object) -> bool:
    """Check whether an object is a storage, of this package or of torchrl."""
    return isinstance(part, Storage) or all(hasattr(part, n) for n in ("get", "set", "max_size", "ndim"))


def is_sampler(part: object) -> bool:
    """Check whether an object is a sampler, of this package or of torchrl."""
    return isinstance(part, Sampler) or (not isinstance(part, type) and hasattr(part, "sample"))


def is_writer(part: object) -> bool:
    """Check whether an object is a writer, of this package or of torchrl."""
    return isinstance(part, Writer) or (not isinstance(part, type) and hasattr(part, "register_storage"))


def is_torchrl(part: object) -> bool:
    """Check whether an object is of a class of torchrl."""
    return type(part).__module__.split(".")[0] == "torchrl"


def storage_for(part: Any, storage: V) -> V | TensorStorage:
    """Return the storage in the form for a sampler or a writer: parts of torchrl use a storage of torchrl."""
    if is_torchrl(part) and isinstance(storage, TabularStorage):
        return torchrl_storage(storage)
    return storage


def is_transform(part: object) -> bool:
    """Check whether a transform is one of torchrl's, which takes its TensorDicts."""
    return isinstance(part, torch.nn.Module) and is_torchrl(part)


def call_transform(transform: Any, data: Any) -> Any:
    """Call a transform with data."""
    if not is_transform(transform) or not is_collection(data):
        return transform(data)
    made = transform(data if is_foreign(data) else to_tensordict(data))
    return from_tensordict(made) if is_foreign(made) else made


def inverted(transforms: Sequence[tuple[Any, bool]], data: Any) -> Any:
    """Apply the transforms of a buffer before writing: those for writing are called, those of torchrl inverted."""
    for transform, invert in reversed(transforms):
        if invert:
            data = call_transform(transform, data)
        elif is_transform(transform) and hasattr(transform, "inv") and is_collection(data):
            data = from_tensordict(transform.inv(data if is_foreign(data) else to_tensordict(data)))
    return data


def written_rows(index: V) -> V:
    """Return the indices of written rows, without those of dropped rows, which are -1."""
    if isinstance(index, Tensor) and index.ndim == 1:
        return cast("V", index[index >= 0])
    return index


_FACTS = ("priority_weight", "staleness")


def describe(batch: Any, info: dict[Any, Any], with_facts: bool) -> None:
    """Set the entry "index" of a batch of TensorDicts.

    Args:
        batch: the collated rows.
        info: what the sampler says about the rows.
        with_facts: whether the weights or the staleness of the rows are set, too.
    """
    if type(batch) is not TensorDict and (not is_collection(batch) or tdstore.is_tensorclass(batch)):
        return
    index = info["index"]
    batch.set("index", torch.stack(index, -1) if isinstance(index, tuple) else index)
    for name in _FACTS if with_facts else ():
        if (value := info.get(name)) is not None:
            batch.set(name, value)


def mark_pieces(batch: Any, sampler: SliceSampler, info: dict[Any, Any]) -> None:
    """Mark the steps of pieces in a batch.

    The last step of each is truncated and done, and not terminated unless the rows say so. If the rows mark first
    steps, the first steps of pieces are marked too. Repeated last steps are distinguished from others.
    """
    begun = info.get(sampler.init_key) if sampler.init_key is not None else None
    if begun is not None:
        before = batch.get(sampler.init_key)
        batch.set(sampler.init_key, before.bool() | begun.reshape(-1, *(1,) * (before.ndim - 1)))
    if MASK in info:
        batch.set(MASK, info[MASK])
    key = sampler.truncated_key
    mark = info.get(key)
    if key is None or mark is None:
        return
    path = (key,) if isinstance(key, str) else tuple(key)
    batch.set(path, mark)
    done = (*path[:-1], "done")
    before = batch.get(done, None)
    info[done] = before | mark.reshape(before.shape) if isinstance(before, Tensor) else mark.clone()
    batch.set(done, info[done])
    ended = (*path[:-1], "terminated")
    if batch.get(ended, None) is None:
        batch.set(ended, torch.zeros_like(mark))
    info[ended] = batch.get(ended)
