"""`apply`: a walk over the entries of a tree and of others beside it, and where its results go."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from tdstore.container.core.container import GROUP, LEAF, Container
from tdstore.container.core.tensorclasses import unwrap
from tdstore.container.methods.access import NO_DEFAULT
from tdstore.container.values.nontensor import NonTensor, NonTensorData
from tdstore.errors import BatchSizeError, KeyNotFoundError
from tdstore.types import Path, path_text


def writes_in_place(out: Any, made: Any) -> bool:
    """Return whether results are written into the leaves of a container, rather than become its leaves.

    A locked one and one whose leaves lie in files or in shared memory keep their leaves; a stored one keeps leaves
    that have the shapes and dtypes of the results.
    """
    out = unwrap(out)
    if out.is_locked or out.is_memmap() or out.is_shared():
        return True
    if not isinstance(out, Container._stored_class):
        return False
    there = dict(_facts(out, ()))
    return all(there.get(path) == facts for path, facts in _facts(made, ()))


def _facts(node: Any, path: Path) -> Iterator[tuple[Path, tuple[torch.Size, torch.dtype]]]:
    for key in node._first_keys():
        kind = node._kind(key)
        if kind == GROUP:
            yield from _facts(node._raw(key), (*path, key))
        elif kind == LEAF:
            shape, _, dtype, *_ = node._leaf_facts(key)
            yield (*path, key), (shape, dtype)


class Mapper:
    """One walk of `apply`: a function over the leaves of a tree and of others beside it."""

    __slots__ = ("call_on_nested", "default", "device", "filter_empty", "fn", "is_leaf", "least", "named")

    def __init__(
        self,
        fn: Callable[..., Any],
        named: bool,
        default: Any,
        filter_empty: bool | None,
        call_on_nested: bool,
        is_leaf: Callable[[type], bool] | None = None,
        device: Any = NO_DEFAULT,
    ) -> None:
        self.device = device
        self.fn, self.named, self.default, self.is_leaf = fn, named, default, is_leaf
        self.filter_empty, self.call_on_nested = filter_empty, call_on_nested
        self.least: torch.Size | None = None

    def calls(self, entry: Any) -> bool:
        """Return whether the function is called on an entry that is not a tensor."""
        return self.call_on_nested or (self.is_leaf is not None and self.is_leaf(type(entry)))

    def run(self, td: Any, others: list[Any], path: Path, batch: torch.Size) -> Container | None:
        fn, named, n = self.fn, self.named, len(td._batch_size)
        # Below another batch size, a larger one of its own stays only where the results have it.
        above, self.least = self.least, None
        least = above if above is not None and len(above) < len(batch) and batch[: len(above)] == above else None
        data: dict[str, Any] = {}
        dropped = False
        names = td._names if batch == td._batch_size else None
        device = td._device if self.device is NO_DEFAULT else self.device
        built = td._resident_class._new(data, batch, device, names)
        for key, value in td._data.items():
            unmapped = isinstance(value, NonTensor) and not (isinstance(value, Tensor) and batch == td._batch_size)
            if unmapped and not self.calls(value):
                if isinstance(value, (NonTensorData, Tensor)) or batch == td._batch_size:  # else whose rows are they?
                    copy = value.own_copy()
                    if isinstance(copy, NonTensorData) and copy.batch_size != batch:
                        copy = copy.for_batch(batch)
                    data[key] = built._coerce(key, copy)
                continue
            rest = [_other_entry(o, (*path, key), self.default) for o in others] if others else ()
            if isinstance(value, Tensor) or self.calls(value):
                made = fn((*path, key), value, *rest) if named else fn(value, *rest)
            else:
                nested: Any = value
                wide = batch
                if len(nested._batch_size) != n:
                    wide = torch.Size((*batch, *nested._batch_size[n:]))
                below = [_or_empty(r, self.default, nested) for r in rest]
                self.least = batch
                made = nested._mapped(self, below, (*path, key) if named or others else (), wide)
            if made is None:
                dropped = True
            elif type(made) is Tensor and device is None and not made.is_nested and made.shape[: len(batch)] == batch:
                data[key] = made
            else:
                try:
                    data[key] = built._coerce(key, made)
                except BatchSizeError:
                    if least is None:
                        raise
                    batch, least = least, None
                    built = td._resident_class._new(data, batch, device, None)
                    data[key] = built._coerce(key, made)
        if not data and (self.filter_empty or (self.filter_empty is None and dropped)):
            return None
        result: Container = built
        return result


def _or_empty(entry: Any, default: Any, like: Any) -> Any:
    return entry if entry is not default else like._resident_class._new({}, like._batch_size, None, None)


def _other_entry(other: Any, path: Path, default: Any) -> Any:
    value = other._data.get(path[-1])
    if value is None:
        if default is NO_DEFAULT:
            raise KeyNotFoundError(f"apply: another TensorDict has no entry {path_text(path)}")
        return default
    return value
