"""An in-memory container whose entries are views of a store: files, shared memory."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from tdstore.container.core.container import Container
from tdstore.container.core.locks import BOUND, CONSOLIDATED, LOCKED, MAPPED, READONLY, SHARED, THROUGH
from tdstore.container.core.one_buffer import cloned, compare_copied, is_one_buffer, reduced
from tdstore.container.core.primitives import LeafFacts
from tdstore.container.core.staging import pieces_on_cpu
from tdstore.container.core.tensorclasses import unwrap
from tdstore.container.entries.nested_tensors import leaf_shape, ragged_dim
from tdstore.container.entries.unbatched import is_batched
from tdstore.container.entries.uninitialized import is_uninitialized, shape_shown
from tdstore.container.storage.change_plan import Prepared, StorePlan, Undo
from tdstore.container.storage.describe import check_value
from tdstore.container.storage.handle import StoreHandle
from tdstore.container.storage.open_and_save import entry, over
from tdstore.container.values.codecs import pickling
from tdstore.container.values.nontensor import NonTensor, NonTensorData, NonTensorStack
from tdstore.container.varlen.nested_leaves import leaf_below, parts_of_nested, specs_of_nested
from tdstore.dtypes import DTYPE_TO_NAME
from tdstore.errors import (
    BatchSizeError,
    KeyNotFoundError,
    StoreClosedError,
    StoreError,
    StoreExistsError,
    UnsupportedError,
)
from tdstore.header import Group
from tdstore.index.selection import gather
from tdstore.index.tracing import mapped, traced
from tdstore.io.mapped import copy_to_pickle, seen_by_others, sent
from tdstore.keys import key_text, unravel
from tdstore.pickling import rebuild
from tdstore.storekit.pages import HOLES, reserve
from tdstore.tensordicts.resident import leaf_pickles
from tdstore.tensordicts.resident.leafwise import LeafwiseTree
from tdstore.threads import without_interrupts
from tdstore.types import IndexType, LeafSpec, Names, NestedKey, Path, Read, Write, path_text

if TYPE_CHECKING:
    from tdstore.tensordicts.base import TensorDictBase
    from tdstore.tensordicts.resident.tensordict import TensorDict

_BULK = 1 << 20


class _Closed(dict[str, Any]):
    """In place of the entries of a closed TensorDict: every use says so."""

    __slots__ = ("_url",)

    def __init__(self, url: str) -> None:
        self._url = url

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise StoreClosedError(f"{self._url} was closed", url=self._url, hint="open it again")

    __getitem__ = __setitem__ = __delitem__ = __iter__ = __contains__ = __len__ = _refuse
    get = items = keys = values = update = pop = clear = _refuse


class BindingMixin(LeafwiseTree):
    """What saving and loading need of an in-memory container."""

    __slots__ = ()

    # -- facts -------------------------------------------------------------------------------
    def _leaf_facts(self, key: str) -> LeafFacts:
        leaf = self._data[key]
        if is_uninitialized(leaf):
            return LeafFacts(shape_shown(leaf), leaf.device, leaf.dtype, None, type(leaf).__name__)
        dense = leaf.layout is torch.strided and not leaf.is_nested and leaf.device.type in ("cpu", "cuda")
        shared = bool(self._state & SHARED) or (dense and not mapped() and seen_by_others(leaf))
        name = "Tensor" if type(leaf) is Tensor else type(leaf).__name__
        return LeafFacts(leaf_shape(leaf), leaf.device, leaf.dtype, shared, name)

    def _companions(self, key: str) -> list[tuple[Any, int]]:
        leaf = self._data[key]
        parts = [leaf.grad] if leaf.requires_grad and leaf.is_leaf else []
        if leaf.layout is torch.jagged:
            parts += [leaf.offsets(), leaf.lengths()]
        return [(id(part), part.nbytes) for part in parts if part is not None]

    def _leaf_class(self, key: str) -> type:
        return type(self._data[key])

    def _identity(self, key: str) -> Any:
        return id(self._data[key])

    def _leaf_layout(self, key: str) -> torch.layout:
        leaf: Tensor = self._data[key]
        return torch.jagged if leaf.is_nested else leaf.layout

    def _plain_specs(self) -> Mapping[str, LeafSpec]:
        found = {}
        for key, leaf in self._data.items():
            if (
                type(leaf) is Tensor
                and leaf.layout is torch.strided
                and not leaf.is_nested
                and not leaf.is_meta
                and leaf.dtype in DTYPE_TO_NAME
            ):
                found[key] = LeafSpec.of_checked(tuple(leaf.shape), leaf.dtype, 0, leaf.nbytes)
        return found

    def _nested_parts(self, key: str) -> tuple[dict[str, Any], dict[str, LeafSpec]] | None:
        leaf: Tensor = self._data[key]
        if not leaf.is_nested or leaf.is_meta or isinstance(leaf, FakeTensor):
            return None
        record, parts = parts_of_nested(leaf)
        return record, specs_of_nested(parts)

    def _nested_layout(self, key: str) -> tuple[torch.layout, int] | None:
        leaf: Tensor = self._data[key]
        return (leaf.layout, ragged_dim(leaf) if leaf.layout is torch.jagged else 1) if leaf.is_nested else None

    def is_shared(self) -> bool:
        """Return whether other processes of this machine see writes to the leaves. On CUDA they always do.

        Example:
            >>> td = TensorDict({"a": torch.zeros(2)}, [2])
            >>> td.is_shared(), td.share_memory_().is_shared()
            (False, True)
        """
        return bool(self._state & SHARED) or (self._device is not None and self._device.type == "cuda")

    # -- structure ---------------------------------------------------------------------------
    # Opened for writing, a TensorDict is its dataset: entries that come and go do so there, as on one that
    # is not resident. What memmap() returns is another matter: unlocked, it is an ordinary TensorDict.
    def _stored(self) -> Any:
        """Return a container of the same place that writes to the store, or None where structure stays in memory."""
        if not self._state & THROUGH or self._binding is None:
            return None
        handle, path = self._binding
        if path not in handle.groups:
            raise KeyNotFoundError(f"the group {path_text(path)} of {handle.store.url} was moved or removed")
        return Container._stored_class._over(handle, path)

    def _assign(self, entries: Mapping[str, Any]) -> None:
        if (stored := self._stored()) is None:
            super()._assign(entries)
        else:
            self._change(lambda: stored._assign(entries), entries)

    def _plan_set(self, changes: Any, entries: Mapping[str, Any]) -> None:
        if (stored := self._stored()) is None:
            super()._plan_set(changes, entries)
        else:
            stored._plan_set(changes, entries)
            changes.follow(lambda: self._take_entries(entries))

    @without_interrupts
    def _take_entries(self, keys: Iterable[str]) -> None:
        """Take over what the store has of these keys."""
        self._forget_facts()
        handle, path = self._binding
        for key in keys:
            if handle.kind((*path, key)) is None:
                self._data.pop(key, None)
            else:
                self._data[key] = entry(handle, (*path, key), self._state)

    def _change(self, change: Callable[[], object], keys: Collection[str]) -> None:
        """Change entries in the store, and take them over; so too after an interrupt, which may follow the commit."""
        try:
            change()
            self._take_entries(keys)
        except Exception:
            raise
        except BaseException:
            self._take_entries(keys)
            raise

    def _drop(self, keys: Iterable[str]) -> None:
        gone = list(keys)
        if (stored := self._stored()) is None:
            super()._drop(gone)
        else:
            self._change(lambda: stored._drop(gone), gone)

    def _rename(self, old: str, new: str) -> None:
        if (stored := self._stored()) is None:
            super()._rename(old, new)
        else:
            order = list(dict.fromkeys([*(key for key in self._data if key != old), new]))
            self._change(lambda: stored._rename(old, new), [old, new])
            super()._reorder(order)

    def _prepared(self, entries: Mapping[str, Any], at: tuple[Any, ...] | None = None) -> Callable[[], None]:
        write = super()._prepared(entries, at)
        values = [
            key
            for key, value in entries.items()
            if isinstance(v := self._data.get(key), NonTensor)
            and not isinstance(v, Tensor)
            and (at or value is not v)  # an entry that is written onto itself stays as it is
        ]
        if values and self._binding is None and self._state & (MAPPED | SHARED) and not self._state & CONSOLIDATED:
            self._check_slice(entries, values)
        if not values or self._binding is None or not self._binding[0].store.writable:
            return write
        assert isinstance(write, Prepared)
        handle, path = self._binding
        with pickling(handle.trusted):
            for key in values:
                assigned = entries[key]
                check_value(assigned if isinstance(assigned, NonTensor) else NonTensorData(assigned), (*path, key))

        def begin(back: list[Undo]) -> None:
            # Columns in the store have a way back of their own; of few values a copy is cheap.
            few = {k: v.clone() for k in values if not (v := self._data[k]).lies_in(handle, (*path, k))}

            def undo() -> None:
                if few:
                    self._data.update(few)
                    self._keep_values(list(few))

            try:
                write.begin(back)
                self._keep_values(values)
            except BaseException as error:
                self._data.update(few)
                if not isinstance(error, Exception):
                    self._take_entries(few)
                raise
            back.append(undo)

        return Prepared(write.finish, begin)

    def _check_slice(self, entries: Mapping[str, Any], keys: list[str]) -> None:
        """Refuse to write into some rows what is one value of the dataset, or of shared memory."""
        for key in keys:
            held, assigned = self._data[key], entries[key]
            part = assigned if isinstance(assigned, NonTensor) else NonTensorData(assigned)
            if isinstance(held, NonTensorData) and held.written(..., part) is not held:
                raise UnsupportedError(
                    f"the value {key!r} of some rows of a dataset cannot be written by itself",
                    hint="write into the TensorDict over the dataset: td[index] = {key: value}",
                )

    def _keep_values(self, keys: list[str]) -> None:
        """Store the values, which have no memory of the store behind them but for long columns."""
        handle, path = self._binding
        plan = StorePlan(handle)
        changed = [key for key in keys if not self._data[key].lies_in(handle, (*path, key))]
        for key in changed:
            plan.keep((*path, key), self._data[key])
        plan.perform()
        for key in changed:
            if isinstance(self._data[key], NonTensorStack):
                self._data[key] = entry(handle, (*path, key), self._state)

    def _reorder(self, keys: list[str]) -> None:
        if (stored := self._stored()) is not None:
            stored._reorder(keys)
        super()._reorder(keys)

    def _refuse_readonly(self) -> None:
        """Refuse a change of shape or names: a reader's TensorDict is the dataset as it is stored."""
        if self._state & READONLY and self._binding is not None:
            self._check_writable()
        for group in self._data.values():
            if type(group) is not Tensor and isinstance(group, BindingMixin):
                group._refuse_readonly()

    def _check_batch(self, new: torch.Size, path: tuple[str, ...]) -> None:
        if self._batch_size[: len(new)] != new or not path:
            self._refuse_readonly()
        super()._check_batch(new, path)

    def _set_names(self, names: Names) -> None:
        if names is None and self._clear_names():
            return
        self._refuse_readonly()
        if (stored := self._stored()) is not None:
            stored._set_names(names)
        super()._set_names(names)

    def _batches_above(self) -> list[torch.Size]:
        return super()._batches_above() + (
            [] if self._binding is None else self._binding[0].batch_above(self._binding[1])
        )

    def _set_batch_size(self, batch_size: torch.Size) -> None:
        self._refuse_readonly()
        if (stored := self._stored()) is not None:
            stored._set_batch_size(batch_size)
        super()._set_batch_size(batch_size)

    # -- growing -----------------------------------------------------------------------------
    def _refuse_part(self, what: str) -> None:
        if self._binding is None and self._state & (BOUND | MAPPED | SHARED):
            raise UnsupportedError(
                f"cannot {what} in a view of some rows or keys of a dataset",
                hint="do it on the TensorDict that was indexed, or on a clone()",
            )

    @without_interrupts
    def _catch_up(self) -> None:
        if self._binding is None:
            return
        handle, path = self._binding
        now = handle.groups[path].batch_size if path in handle.groups else None
        if not now or not self._batch_size or now[0] == self._batch_size[0]:
            return
        self._forget_facts()
        for key, value in self._data.items():
            if isinstance(value, Container):
                value._catch_up()  # type: ignore[attr-defined]
            else:
                self._data[key] = entry(handle, (*path, key), self._state)
        self._batch_size = torch.Size((now[0], *self._batch_size[1:]))

    def _forget_views(self) -> None:
        if not self._state & THROUGH and self._state & BOUND:
            self._drop_binding()

    # -- becoming another --------------------------------------------------------------------
    def _become(self, other: Any) -> Self:
        """Take over another container's entries, keeping the identity of nested ones where both have them."""
        self._forget_facts()
        other = other._resident()
        data: dict[str, Any] = {}
        for key, value in other._data.items():
            mine = self._data.get(key)
            nested = isinstance(mine, BindingMixin) and isinstance(value, BindingMixin)
            rows = type(mine) is NonTensorStack and type(value) is NonTensorStack
            data[key] = mine._become(value) if nested or rows else value  # type: ignore[union-attr]
        self._data = data
        self._batch_size, self._device, self._names = other._batch_size, other._device, other._names
        self._state, self._binding = other._state & ~LOCKED, other._binding
        if other._state & LOCKED:
            self.lock_()
        return self

    def _as_meta(self) -> Any:
        td = self._foreach(lambda leaves: [torch.empty(t.shape, dtype=t.dtype, device="meta") for t in leaves])
        td._set_device(torch.device("meta"))
        return td

    # -- reading in bulk ---------------------------------------------------------------------
    def _read_into(self, out: Any) -> Any:
        pairs: list[tuple[Tensor, Tensor]] = []
        for key, leaf in self.items(True, True):
            if not is_batched(leaf):
                continue
            buffer = out.get(key)
            if not isinstance(buffer, Tensor):
                raise KeyNotFoundError(f"out has no tensor {key_text(key)}")
            if buffer.shape != leaf.shape or buffer.dtype != leaf.dtype:
                raise BatchSizeError(
                    f"the buffer {key_text(key)} is {buffer.dtype} of shape {list(buffer.shape)}, "
                    f"the leaf {leaf.dtype} of shape {list(leaf.shape)}"
                )
            pairs.append((buffer, leaf))
        if HOLES:
            for buffer, _ in pairs:
                reserve(buffer)
        for buffer, leaf in pairs:
            buffer.copy_(leaf)
        return out

    def read(
        self, index: IndexType = None, keys: NestedKey | Sequence[NestedKey] | None = None, out: Self | None = None
    ) -> Self:
        whole = index is None and out is None
        if self._binding is not None and self._state & MAPPED:
            handle, path = self._binding
            leaves, copied = _leaves_of(handle, path, keys), self._copied_rows(index)
            if whole and not traced():
                made: Self = self._read_whole(handle, leaves, keys)
                return made
            if copied is not None and (first := self._batch_size[:1]):
                specs = handle.specs
                if mismatched := [leaf for leaf in leaves if specs[leaf].shape[:1] != first]:
                    handle.store.check(mismatched)  # parts of entries that are no plain tensors have other rows
                    leaves = [leaf for leaf in leaves if specs[leaf].shape[:1] == first]
            handle.store.check(leaves, copied)
        elif self._binding is None:
            chosen = self if keys is None else self.select(*([keys] if isinstance(keys, str) else keys))
            if whole and self._state & CONSOLIDATED and not traced():
                return chosen._with_leaves(cloned(leaf) for leaf in chosen._leaf_list())
            compare_copied(chosen._leaf_list(), self._copied_rows(index), self._batch_size)
        if out is None or index is None or len(self._batch_size) == 0:
            return super().read(index, keys, out)
        # Straight into the caller's buffers: no batch is built in between.
        td = self if keys is None else self.select(*([keys] if isinstance(keys, str) else keys))
        if (rows := td._rows_of(index)) is None:
            return super().read(index, keys, out)
        unwrap(out)._check_all_writable()
        if HOLES:
            for key in td.keys(True, True):
                if is_batched(buffer := out.get(key)):
                    reserve(buffer)
        for key, leaf in td.items(True, True):
            if is_batched(leaf):
                gather(leaf, (rows,), out.get(key))
        return out

    def _read_whole(self, handle: StoreHandle, leaves: list[Path], keys: Any) -> Any:
        """Copy everything: plain leaves by the store, which compares them with checksums while it copies."""
        td = self if keys is None else self.select(*([keys] if isinstance(keys, str) else keys))
        live: list[Tensor] = td._leaf_list()
        plain = {id(leaf) for leaf in live if not leaf.requires_grad}
        views = {leaf: id(handle.store.view(leaf)) for leaf in leaves}
        copied = [leaf for leaf in leaves if views[leaf] in plain]
        handle.store.check([leaf for leaf in leaves if views[leaf] not in plain])
        values = handle.store.read([Read(leaf) for leaf in copied])
        copies = dict(zip((views[leaf] for leaf in copied), values, strict=True))
        return td._with_leaves(copies[id(leaf)] if id(leaf) in copies else leaf.clone() for leaf in live)

    def _copied_rows(self, index: Any) -> slice | Tensor | None:
        """Return the rows of the first dimension that an index copies, or None for all."""
        if index is None or not self._batch_size:
            return slice(None)
        first = index[0] if isinstance(index, tuple) and index else index
        if isinstance(first, slice):
            return first
        if type(first) is int:
            return slice(first, first + 1 or None)
        return None if isinstance(first, (bool, str)) or first is None or first is ... else self._rows_of(first)

    def _rows_of(self, index: Any) -> Tensor | None:
        raise NotImplementedError

    def _read_pieces(self, batch: Any) -> list[Tensor]:
        out = []
        for path, index in batch:
            leaf = self._data.get(path[0]) if len(path) == 1 else None
            if type(leaf) is not Tensor:
                leaf = leaf_below(self, path)
            out.append(leaf[index] if index else leaf)
        return pieces_on_cpu(out)

    # -- writing in bulk ---------------------------------------------------------------------
    def _write_files(self, rows: slice, values: list[Tensor]) -> bool:
        """Write a large block of rows through the store; False, with nothing written, where views do better.

        The first store through a fresh page of a mapped file costs a fault each; the store writes whole ranges.
        """
        if self._binding is None or sum(v.nbytes for v in values) < _BULK:
            return False
        handle, root = self._binding
        start, stop, step = rows.indices(self._batch_size[0])
        paths = [(*root, *unravel(key)) for key, leaf in self.items(True, True) if is_batched(leaf)]
        if len(paths) != len(values):
            return False
        if any(p not in handle.specs or handle.specs[p].dtype != v.dtype for p, v in zip(paths, values, strict=True)):
            return False
        at = (slice(start, max(start, stop), step),)
        without_interrupts(handle.store.write)([Write(p, at, v.detach()) for p, v in zip(paths, values, strict=True)])
        return True

    # -- adding to the store -------------------------------------------------------------------
    def _add_leaf(self, key: NestedKey, spec: LeafSpec, tensor: Tensor | None) -> Tensor:
        handle, root = self._owned("make_memmap")
        path = unravel(key)
        batch = self._batch_size
        if spec.shape[: len(batch)] != tuple(batch):
            raise BatchSizeError(f"{path_text(path)} of shape {list(spec.shape)} does not start with {list(batch)}")
        full = (*root, *path)
        if handle.kind(full) is not None:
            raise StoreExistsError(
                f"{path_text(path)} is already there", url=handle.store.url, hint="delete it first, or write into it"
            )
        try:
            with handle.changing():
                handle.store.create({full: spec})
                if tensor is not None:
                    handle.store.write([Write(full, (), tensor.detach().cpu())])
                handle.commit(_with_entry(handle, full, root, batch), {**handle.specs, full: spec})
            return self._show_leaf(path)
        except BaseException as error:  # an interrupt may follow the commit
            if not isinstance(error, Exception) and full in handle.specs:
                self._show_leaf(path)
            raise

    @without_interrupts
    def _show_leaf(self, path: Path) -> Tensor:
        """Take over a leaf that the store has got, and the groups above it."""
        handle, root = self._binding
        leaf: Tensor = handle.store.view((*root, *path))
        node: Any = self
        for depth, part in enumerate(path[:-1]):
            if part not in node._data:
                made = node._new({}, node._batch_size, node._device, node._names, node._state)
                made._binding = (handle, (*root, *path[: depth + 1]))
                node._data[part] = made
            node = node._data[part]
        node._data[path[-1]] = leaf
        return leaf

    def close(self) -> None:
        if self._binding is None:
            return
        handle = self._binding[0]
        self._mark_closed(handle.store.url)
        handle.close()

    def _mark_closed(self, url: str) -> None:
        data = self._data
        if not isinstance(data, _Closed):
            if self._state == LOCKED:  # else there are no facts
                self._forget_facts()
            self._data = _Closed(url)
            for value in data.values():
                if type(value) is not Tensor and isinstance(value, Container):
                    value._mark_closed(url)

    # -- pickling ----------------------------------------------------------------------------
    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        # Files of `torch.save` are written with protocol 2, and stay as they are.
        if protocol >= 4 and type(self) is self._resident_class and not self._state & ~LOCKED and self._binding is None:
            return leaf_pickles.reduced(self)
        return self.__reduce__()

    def __reduce__(self) -> tuple[Any, ...]:
        if self._binding is not None and self._state & (MAPPED | SHARED) and self._binding[0].pickles_by_name():
            return self._reference()
        return self._by_value(alone=True)

    def _to_process(self) -> tuple[Any, ...]:
        """Reduce as `__reduce__`, for a `multiprocessing` process: memory without a name can be sent to it."""
        if self._binding is not None and self._state & (MAPPED | SHARED):
            try:
                self._binding[0].__reduce__()
            except StoreError:
                return self._by_value()  # temporary files of this process
            return self._reference()
        return self._by_value()

    def _reference(self) -> tuple[Any, ...]:
        handle, path = self._binding
        parts = (handle, path, self.is_locked, self._device, self._state & THROUGH)
        return rebuild, ("TensorDict.stored", *parts)

    def _by_value(self, *, alone: bool = False) -> tuple[Any, ...]:
        """Reduce to the entries; `alone` leaves behind what else is in their shared memory."""
        if is_one_buffer(self):
            return reduced(self)
        data = dict(self._data)
        if alone and self._binding is None and self._state & SHARED:
            data = {key: _alone(leaf) for key, leaf in data.items()}
        if self._binding is not None:  # else all of the memory that they are views of would go with each
            data = {key: copy_to_pickle(leaf) if isinstance(leaf, Tensor) else leaf for key, leaf in data.items()}
        else:
            data = {key: sent(leaf) if is_batched(leaf) else leaf for key, leaf in data.items()}
        parts = (data, self._batch_size, self._device, self._names, self.is_locked)
        cls = None if type(self) is self._resident_class else type(self)
        return rebuild, ("TensorDict", cls, *parts)


def _alone(leaf: Any) -> Any:
    """Return a copy of a tensor that is a part of a larger memory: torch pickles all of that memory."""
    if type(leaf) is not Tensor or leaf.requires_grad or leaf.layout is not torch.strided:
        return leaf
    return leaf.clone() if leaf.untyped_storage().nbytes() > leaf.nbytes else leaf


def _leaves_of(handle: StoreHandle, path: Path, keys: Any) -> list[Path]:
    if keys is None:
        return handle.leaves_below(path)
    wanted = [keys] if isinstance(keys, str) else keys
    return [leaf for key in wanted for leaf in handle.leaves_below((*path, *unravel(key)))]


def _with_entry(handle: StoreHandle, path: Path, root: Path, batch: torch.Size) -> dict[Path, Group]:
    groups = dict(handle.groups)
    for i in range(len(root), len(path)):
        old = groups.get(path[:i], Group(batch_size=tuple(batch)))
        keys = tuple(dict.fromkeys((*old.keys, path[i])))
        values = {k: v for k, v in old.values.items() if k != path[i]}
        groups[path[:i]] = Group(old.batch_size, old.names, old.device, old.kind, keys, values, old.extra)
    return groups


def reopened(handle: StoreHandle, path: Path, locked: bool, device: torch.device | None, flags: int) -> TensorDictBase:
    """Rebuild a TensorDict over a dataset from its pickle."""
    td = over(handle, path, flags)
    if device is not None:
        td._set_device(device)
    return td.lock_() if locked else td


def rebuilt(
    cls: Any, data: dict[str, Any], batch: torch.Size, device: torch.device | None, names: Names, locked: bool
) -> TensorDict:
    """Rebuild a TensorDict in memory from its pickle."""
    td = (Container._resident_class if cls is None else cls)._new(data, batch, device, names)
    return td.lock_() if locked else td
