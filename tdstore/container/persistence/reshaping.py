"""Change the dtype of entries, or the order of their feature dimensions, in place and with their values.

This needs no additional ability of a store: new leaves are written beside the old ones, block by block, and renamed
over them in one commit.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from tdstore.arguments import refuse_type
from tdstore.container.core.container import GROUP, LEAF, Container
from tdstore.container.core.paths import entry_path
from tdstore.container.core.tensorclasses import unwrap
from tdstore.container.storage.growth import place_of
from tdstore.container.storage.handle import StoreHandle
from tdstore.errors import InvalidArgumentError, InvalidTypeError, TDStoreError, UnsupportedError
from tdstore.io.blocks import pieces
from tdstore.store import Cap
from tdstore.types import LeafSpec, NestedKey, Path, Read, StoreIndex, Write, path_text

BLOCK_BYTES = 32 << 20
"""The most bytes in memory at a time, unless a single row is larger."""


class Change(NamedTuple):
    """The new form of an entry: a dtype, or the order of all its dimensions."""

    dtype: torch.dtype | None
    order: tuple[int, ...] | None

    def __call__(self, value: Tensor) -> Tensor:
        """Return a tensor in the new form."""
        value = value if self.order is None else value.permute(self.order)
        return value if self.dtype is None else value.to(self.dtype)

    def spec(self, old: LeafSpec) -> LeafSpec:
        """Return the spec of a leaf in the new form. A layout option with a number for each dimension follows them."""
        options = dict(old.options)
        shape = tuple(old.shape)
        if self.order is not None:
            shape = tuple(shape[d] for d in self.order)
            for name, option in options.items():
                if isinstance(option, (tuple, list)) and len(option) == len(self.order):
                    options[name] = tuple(option[d] for d in self.order)
        dtype = self.dtype or old.dtype
        fill = torch.full((), old.fill_value, dtype=old.dtype, device="cpu").to(dtype).item()
        return LeafSpec(shape, dtype, fill_value=fill, **options)


class Target(NamedTuple):
    """An entry that changes."""

    node: Any
    key: str
    name: Path
    change: Change


class ReshapingMixin(Container):
    """astype_, permute_features_."""

    __slots__ = ()

    def astype_(self, dtypes: torch.dtype | Mapping[NestedKey, torch.dtype]) -> Self:
        """Change the dtype of entries in place; values are cast as by [`torch.Tensor.to`][].

        A stored dataset is changed where it is, in blocks of bounded memory and in one commit: other processes see the
        old entries or the new ones. The storage needs space for both. In memory, the entries become new tensors.

        Args:
            dtypes: the new dtype by key, or one for every tensor.

        Returns:
            This TensorDict.

        Raises:
            KeyNotFoundError: there is no such entry.
            InvalidTypeError: an entry is not a tensor, or a dtype is not a dtype.
            LockedError: the TensorDict is locked.
            ReadOnlyError: the dataset was opened in mode "r".
            UnsupportedError: this is a window, or an entry is a nested tensor.

        Whatever is raised, nothing has changed.

        Example:
            >>> td = TensorDict({"a": torch.arange(3), "b": torch.zeros(3)}, [3])
            >>> td.astype_({"a": torch.float32})["a"]
            tensor([0., 1., 2.])
        """
        if isinstance(dtypes, Mapping):
            wanted = {entry_path(key): dtype for key, dtype in dtypes.items()}
        else:
            wanted = {(*path, key): dtypes for path, _, key in _leaves(self)}
        for dtype in [*wanted.values()] if isinstance(dtypes, Mapping) else [dtypes]:
            if not isinstance(dtype, torch.dtype):
                raise InvalidTypeError(f"astype_ takes dtypes of torch, such as torch.float16, not {dtype!r}")
        found = _found(self, wanted, "astype_", "change the dtype of")
        changes = [Target(node, key, name, Change(wanted[name], None)) for name, node, key in found]
        _perform([t for t in changes if _form(t)[1] != t.change.dtype], "astype_")
        return self

    def permute_features_(self, dims: Mapping[NestedKey, Sequence[int]]) -> Self:
        """Reorder the feature dimensions of entries in place: those after the batch dimensions, counted from 0.

        A stored dataset is changed as by `astype_`: in blocks, in one commit, and with space for both.

        Args:
            dims: for each key the order of its feature dimensions, as [`torch.permute`][] takes it.

        Returns:
            This TensorDict.

        Raises:
            KeyNotFoundError: there is no such entry.
            InvalidArgumentError: the numbers do not contain each feature dimension exactly once.
            LockedError: the TensorDict is locked.
            ReadOnlyError: the dataset was opened in mode "r".
            UnsupportedError: this is a window, or an entry is a nested tensor.

        Whatever is raised, nothing has changed.

        Example:
            >>> td = TensorDict({"image": torch.zeros(5, 3, 32, 48)}, [5])
            >>> td.permute_features_({"image": (1, 2, 0)})["image"].shape
            torch.Size([5, 32, 48, 3])
        """
        if not isinstance(dims, Mapping):
            raise refuse_type("dims", "a dict of keys and orders", dims)
        wanted = {entry_path(key): order for key, order in dims.items()}
        changes = []
        for name, node, key in _found(self, wanted, "permute_features_", "reorder the dimensions of"):
            batch, shape = len(node.batch_size), node._leaf_shape(key)
            order = _order(wanted[name], len(shape) - batch, name)
            changes.append(Target(node, key, name, Change(None, (*range(batch), *(batch + d for d in order)))))
        _perform([t for t in changes if t.change.order != tuple(range(len(t.change.order or ())))], "permute_features_")
        return self


def _order(dims: Sequence[int], n: int, name: Path) -> tuple[int, ...]:
    order = tuple(d + n if isinstance(d, int) and d < 0 else d for d in dims)
    if sorted(order) != list(range(n)):
        raise InvalidArgumentError(
            f"permute_features_: {path_text(name)} has {n} feature dimensions, and {tuple(dims)} is no order of them"
        )
    return order


def _leaves(node: Any, path: Path = ()) -> Iterator[tuple[Path, Any, str]]:
    for key in list(node._first_keys()):
        kind = node._kind(key)
        if kind == GROUP:
            yield from _leaves(unwrap(node._raw(key)), (*path, key))
        elif kind == LEAF:
            yield path, node, key


def _found(td: Any, wanted: Mapping[Path, Any], method: str, what: str) -> list[tuple[Path, Any, str]]:
    """Find the entries of all names, each in the container that holds it: in a lazy stack, in every element."""
    found = []
    for name in wanted:
        node, key = td._existing(name)
        for holder in _holders(unwrap(node)):
            kind = holder._kind(key)
            if kind != LEAF:
                raise InvalidTypeError(
                    f"{method}: {path_text(name)} is a {'TensorDict' if kind == GROUP else 'value'}, not a tensor",
                    hint="name the entries in it" if kind == GROUP else None,
                )
            if holder._nested_layout(key) is not None:
                raise UnsupportedError(
                    f"{method}: {path_text(name)} is a nested tensor",
                    hint="set the whole entry anew: td.set(key, value)",
                )
            if holder.is_locked:
                raise holder._refuse_locked(f"{what} {path_text(name)}")
            holder._refuse_part(method)
            found.append((name, holder, key))
    return found


def _holders(node: Any) -> Iterator[Any]:
    if isinstance(node, Container._stack_class):
        for element in node._tds:
            yield from _holders(unwrap(element))
    else:
        yield node


def _form(target: Target) -> tuple[torch.Size, torch.dtype]:
    """Return shape and dtype of an entry, without reading it."""
    place = place_of(target.node)
    if place is None:
        leaf = target.node._raw(target.key)
        return leaf.shape, leaf.dtype
    spec = place[0].specs[(*place[1], target.key)]
    return torch.Size(spec.shape), spec.dtype


def _perform(targets: list[Target], method: str) -> None:
    """Make all changes: first those of stores, since they may fail, and then those in memory, which cannot."""
    stored: dict[int, tuple[StoreHandle, dict[Path, Change]]] = {}
    live: list[tuple[Target, StoreHandle, Path]] = []
    resident = []
    for target in targets:
        place = place_of(target.node)
        if place is None:
            resident.append((target, target.change(target.node._raw(target.key)).contiguous()))
            continue
        handle, path = place
        handle.check_writable()
        stored.setdefault(id(handle), (handle, {}))[1][(*path, target.key)] = target.change
        if Cap.VIEW in handle.store.caps:
            live.append((target, handle, (*path, target.key)))
    if len(stored) > 1:
        raise UnsupportedError(
            f"{method}: the entries are in {len(stored)} stores, which have no common commit",
            hint="call it on the TensorDict of each",
        )
    for handle, changes in stored.values():
        _in_store(handle, changes)
    for target, handle, leaf in live:  # tensors obtained earlier stay as they are
        target.node._data[target.key] = handle.store.view(leaf)
    for target, made in resident:
        target.node._assign({target.key: made})


def _in_store(handle: StoreHandle, changes: Mapping[Path, Change]) -> None:
    store = handle.store
    old = dict(zip(changes, store.specs(list(changes)), strict=True))
    new = {path: change.spec(old[path]) for path, change in changes.items()}
    mark = secrets.token_hex(4)
    beside = {path: (*path[:-1], f"{path[-1]}.{mark}") for path in changes}
    with handle.changing():
        try:
            store.create({beside[path]: spec for path, spec in new.items()})
            for path, change in changes.items():
                for index in _blocks(old[path], change, store.caps):
                    value = change(store.read([Read(path, index)])[0])
                    store.write([Write(beside[path], index, value)])
        except BaseException as error:
            if Cap.DISCARD not in store.caps:
                _remove(store, list(beside.values()), error)
            raise
        store.rename({new: path for path, new in beside.items()})
        plain = {p: LeafSpec(s.shape, s.dtype, fill_value=s.fill_value) for p, s in new.items()}
        handle.commit(handle.groups, {**handle.specs, **plain})


def _blocks(spec: LeafSpec, change: Change, caps: Cap) -> Iterator[StoreIndex]:
    """Yield indices of blocks of rows, the same rows in both forms; `()` for the whole leaf."""
    moved = change.order is not None and change.order[:1] != (0,)
    if moved or not math.prod(spec.shape) or (Cap.PARTIAL_READ | Cap.PARTIAL_WRITE) & ~caps:
        yield ()
        return
    size = max(spec.dtype.itemsize, (change.dtype or spec.dtype).itemsize)
    yield from pieces(spec.shape, size, BLOCK_BYTES, dims=1)


def _remove(store: Any, paths: list[Path], error: BaseException) -> None:
    try:
        there = set(store.paths())
        store.delete([path for path in paths if path in there])
    except TDStoreError as second:
        error.add_note(f"{store.url} could not be put back ({second}): open it again")
