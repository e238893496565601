"""The primitives of a container: what `TensorDict`, `PersistentTensorDict` and `LazyStackedTensorDict` implement.

Everything else is written once, over these and over those of `OpsBase`. A method of one mixin calls nothing private of
another mixin that is not declared here, so that the order of the mixins means nothing. An entry is a LEAF (a tensor), a
GROUP (a nested container) or a VALUE (all else); `at` is a batch index with one term per dimension.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeAlias

import torch
from torch import Tensor

from tdstore.ops.base import OpsBase
from tdstore.ops.reduce import Over
from tdstore.types import LeafSpec, Names

LEAF = "leaf"
GROUP = "group"
VALUE = "value"


EntrySource: TypeAlias = "OpsBase | Mapping[Any, Any]"
"""Where entries are copied from: a TensorDict, or a dict of entries by key."""


class LeafFacts(NamedTuple):
    """What a leaf is, without its data. Where elements of a lazy stack differ, device and dtype are None."""

    shape: torch.Size
    device: Any
    dtype: Any
    shared: bool | None
    """Whether other processes of this machine see writes to it; None if it has no memory yet."""
    class_name: str


class Primitives(OpsBase):
    """The primitives, in four blocks: the catalogue of entries, reading, writing, reshaping."""

    __slots__ = ()
    _binding: Any
    """The handle and the path of a container whose entries are live views of a store; None otherwise."""

    if TYPE_CHECKING:  # methods that one mixin defines and others call
        __getitem__: Any
        __setitem__: Any
        get: Any
        is_empty: Any
        items: Any
        keys: Any
        load: Any
        save: Any
        split_keys: Callable[..., tuple[Self, ...]]
        to_tensordict: Any
        _existing: Any
        _find: Any
        _node: Any
        _read_pieces: Any
        _in_class: Any
        clone: Callable[..., Self]
        create_nested: Callable[..., Self]
        del_: Callable[..., Self]
        exclude: Callable[..., Self]
        load_: Callable[..., Self]
        select: Callable[..., Self]
        set: Callable[..., Self]
        set_: Callable[..., Self]
        set_non_tensor: Callable[..., Self]
        update: Callable[..., Self]
        _become: Callable[..., Self]
        _set_device: Callable[..., None]
        _update_in_place: Callable[..., Any]
        _write_replaced: Callable[[Any], None]

    # -- the catalogue: which entries there are; reads no data ---------------------------------
    @abstractmethod
    def _first_keys(self) -> Iterable[str]:
        """Return the first-level keys in insertion order."""

    @abstractmethod
    def _kind(self, key: str) -> str | None:
        """Return LEAF, GROUP or VALUE; None when there is no such entry."""

    @abstractmethod
    def _leaf_shape(self, key: str) -> torch.Size:
        """Return the shape of a first-level LEAF."""

    def is_shared(self) -> bool:
        """Check whether other processes of this machine see writes to the leaves."""
        raise NotImplementedError

    def _leaf_facts(self, key: str) -> LeafFacts:
        """Return the facts of a first-level LEAF, without reading it."""
        raise NotImplementedError

    def _leaf_layout(self, key: str) -> torch.layout:
        """Return the memory layout of a first-level LEAF: dense in every store."""
        return torch.strided

    def _plain_specs(self) -> Mapping[str, LeafSpec]:
        """Return the specs of the first-level LEAFs that are dense tensors in memory, by key."""
        return {}

    def _nested_parts(self, key: str) -> tuple[dict[str, Any], dict[str, LeafSpec]] | None:
        """Return the record of a first-level LEAF that is a nested tensor, and the specs of its leaves; else None."""
        return None

    def _nested_layout(self, key: str) -> tuple[torch.layout, int] | None:
        """Return the layout and the ragged dimension of a first-level LEAF that is a nested tensor; else None."""
        return None

    def _leaves(self) -> list[Any]:
        """Return what reads every leaf below, in key order: the leaf itself, or its path and selection."""
        raise NotImplementedError

    def _columns(self) -> list[Any]:
        """Return what reads every variable-length column below, in key order."""
        raise NotImplementedError

    def _nested_keys(self) -> list[Any]:
        """Return the paths of the nested tensors below, which are read by themselves."""
        raise NotImplementedError

    def _mark_closed(self, url: str) -> None:
        """Refuse further reads and writes: the store at `url` was closed."""
        raise NotImplementedError

    # -- reading -------------------------------------------------------------------------------
    @abstractmethod
    def _raw(self, key: str) -> Any:
        """Return the entry of an existing first-level key; non-tensor values stay wrapped."""

    @abstractmethod
    def _leaf_at(self, key: str, index: Any) -> Tensor:
        """Return `leaf[index]` of a first-level LEAF; the index may reach into feature dimensions."""

    @abstractmethod
    def _at(self, index: Any) -> Any:
        """Return the container at a batch index (anything torch takes but a string key)."""

    @abstractmethod
    def _resident(self) -> Any:
        """Return this container with its entries as live tensors: itself, or one batched read."""

    def _collect_reads(self, leaves: list[Any], others: list[Any]) -> list[Any]:
        """Add what has to be read for all entries below, in key order: leaves, and the rounds of other entries.

        Returns:
            For `_built`, which of the two gives each entry.
        """
        raise NotImplementedError

    def _built(self, plan: list[Any], leaves: Iterator[Tensor], others: Iterator[Any]) -> Any:
        """Build the resident form from what was read for `_collect_reads`, in its order."""
        raise NotImplementedError

    def _with_leaves(self, leaves: Iterator[Tensor]) -> Any:
        """Return this container with other leaves, in the order of `_leaf_list`."""
        raise NotImplementedError

    # -- writing -------------------------------------------------------------------------------
    @abstractmethod
    def _assign(self, entries: Mapping[str, Any]) -> None:
        """Add or replace entries (already coerced), all or none."""

    @abstractmethod
    def _prepared(self, entries: Mapping[str, Any], at: tuple[Any, ...] | None = None) -> Callable[[], None]:
        """Check that values can be written into existing entries, at an index or whole; return what writes them."""

    def _write(self, entries: Mapping[str, Any], at: tuple[Any, ...] | None = None) -> None:
        """Write into existing entries in place; all are checked before any is written."""
        self._prepared(entries, at)()

    def _plan_write(self, changes: Any, entries: Mapping[str, Any], at: tuple[Any, ...] | None = None) -> None:
        """Add to a change what `_write` does, all checked."""
        changes.then(self._prepared(entries, at))

    def _plan_set(self, changes: Any, entries: Mapping[str, Any]) -> None:
        """Add to a change what `_assign` does, all checked."""
        changes.then(lambda: self._assign(entries))

    def _plan_writes(self, entries: Mapping[str, Any], writes: Any, plan: Any) -> None:
        """Add the writes of values into existing entries, for one call of the store."""
        raise NotImplementedError

    @abstractmethod
    def _write_leaf_at(self, key: str, index: Any, value: Any) -> None:
        """Do `leaf[index] = value` of a first-level LEAF; the index may reach into feature dimensions."""

    @abstractmethod
    def _drop(self, keys: Iterable[str]) -> None:
        """Remove existing first-level entries."""

    def _take_back(self, keys: list[str]) -> None:
        """Remove first-level entries that were just made, wherever they were made."""
        self._drop(keys)

    @abstractmethod
    def _rename(self, old: str, new: str) -> None:
        """Rename an existing first-level entry, replacing `new`."""

    @abstractmethod
    def _reorder(self, keys: list[str]) -> None:
        """Put the first-level entries in the order of `keys`, which are all of them."""

    # -- reshaping -----------------------------------------------------------------------------
    @abstractmethod
    def _to(self, device: torch.device | None, dtype: torch.dtype | None, non_blocking: bool) -> Any:
        """Return a container of the same entries on a device, of a dtype."""

    @abstractmethod
    def _set_batch_size(self, batch_size: torch.Size) -> None:
        """Change the batch size, checked already against every leaf."""

    def _move_tree(self, fn: Callable[[Tensor], Tensor], new: torch.Size, names: Names, n: int) -> Any:
        """Do `_move` as part of a container of `n` batch dimensions that is moved."""
        raise NotImplementedError

    def _fan_tree(
        self, fn: Callable[[Tensor], Sequence[Tensor]], batch_sizes: Sequence[torch.Size], names: Names
    ) -> Any:
        """Do `_fan_out` as part of a container that is split."""
        raise NotImplementedError

    def _compared(self, other: Any, op: Any) -> Any:
        """Compare with another container, a number or a tensor, entry by entry."""
        raise NotImplementedError

    def _over_leaves_of(self, fn: Any, over: Over, batch_size: torch.Size, names: Names) -> Any:
        """Reduce each leaf by `fn`; the result has the batch size and the names given."""
        raise NotImplementedError
