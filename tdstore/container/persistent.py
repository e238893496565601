"""PersistentTensorDict: a TensorDict whose entries stay in a store until they are asked for."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Self

import msgspec
import torch
from torch import Tensor

from tdstore.container.base import TensorDictBase
from tdstore.container.core import GROUP, LEAF, Container
from tdstore.container.describe import describe, value_json
from tdstore.container.handle import StoreHandle, without
from tdstore.container.locks import LOCKED
from tdstore.container.names import extend_names
from tdstore.container.nontensor import NonTensor, assign
from tdstore.container.paths import is_key
from tdstore.container.terms import indexed_names, spelled_out
from tdstore.errors import BatchSizeError, KeyNotFoundError, UnsupportedError
from tdstore.header import Group
from tdstore.indexing import Selection
from tdstore.io.blocks import row_ranges
from tdstore.ops.base import Names
from tdstore.shapes import as_size
from tdstore.store import Cap
from tdstore.types import LeafSpec, Path, Read, Write


class PersistentTensorDict(TensorDictBase):
    """A TensorDict over a store: HDF5, zarr, a bucket, ...

    Reading a key reads that leaf into a fresh tensor. Indexing gives a *window*: lazy, chainable and
    write-through; a key of a window reads only its rows. Whatever needs many leaves (`to_tensordict()`,
    `clone()`, `to(device)`, maths, iteration) fetches them in one batched read.

    Args:
        batch_size: checked against, or replacing, the stored one.
        filename: location of the store; `location` is the same.
        group: path of a nested TensorDict to open instead of the root.
        mode: "r", "r+", "w", "x" or "a", see `tdstore.store.Store`.
        backend: name of the backend; None finds it from the location.
        device: where reads land.
        **options: of the backend, such as `chunks=` and `compression=`.

    Example:
        >>> TensorDict({"obs": torch.zeros(100, 4)}, [100]).save("data.h5")  # doctest: +SKIP
        >>> window = PersistentTensorDict(filename="data.h5")[10:20]  # doctest: +SKIP
        >>> window["obs"].shape  # doctest: +SKIP
        torch.Size([10, 4])
    """

    __slots__ = ("_handle", "_path", "_sel", "_wanted")

    _handle: StoreHandle
    _path: Path
    _sel: Selection
    _wanted: dict[str, Any] | None

    def __init__(
        self,
        *,
        batch_size: Any = None,
        filename: Any = None,
        group: Any = None,
        mode: Any = "r",
        backend: str | None = None,
        device: Any = None,
        location: Any = None,
        **options: Any,
    ) -> None:
        handle = StoreHandle.open(location if location is not None else filename, storage=backend, mode=mode, **options)
        path = () if group is None else tuple(group.split("/")) if isinstance(group, str) else tuple(group)
        if handle.kind(path) != GROUP:
            raise KeyNotFoundError(f"no group {path!r} in {handle.store.url}")
        self._setup(handle, path, None, None, device)
        if batch_size is not None and as_size(batch_size) != self._batch_size:
            self.batch_size = batch_size
        if mode in ("w", "x") and not handle.store.load_header():
            handle.commit(handle.groups)

    def _setup(
        self,
        handle: StoreHandle,
        path: Path,
        sel: Selection | None,
        wanted: dict[str, Any] | None,
        device: Any,
        names: Names = None,
    ) -> None:
        group = handle.groups[path]
        self._handle, self._path, self._wanted = handle, path, wanted
        self._sel = Selection.full(group.batch_size or ()) if sel is None else sel
        self._batch_size = torch.Size(self._sel.shape)
        self._names = group.names if sel is None else names
        self._device = torch.device(device) if device is not None else _usable_device(group.device)
        self._parents = self._undo = None
        self._state = 0

    @classmethod
    def _over(
        cls,
        handle: StoreHandle,
        path: Path = (),
        sel: Selection | None = None,
        wanted: dict[str, Any] | None = None,
        device: Any = None,
        names: Names = None,
    ) -> Self:
        td = cls.__new__(cls)
        td._setup(handle, path, sel, wanted, device, names)
        return td

    # -- looking -----------------------------------------------------------------------------
    @property
    def store(self) -> Any:
        """The open store behind this container."""
        return self._handle.store

    @property
    def filename(self) -> str | None:
        """The location it was opened from."""
        return self._handle.location

    def _group(self) -> Group:
        try:
            return self._handle.groups[self._path]
        except KeyError:
            raise KeyNotFoundError(f"the group {self._path!r} of {self._handle.store.url} was removed") from None

    def _first_keys(self) -> Iterable[str]:
        keys = self._group().keys
        return keys if self._wanted is None else [k for k in keys if k in self._wanted]

    def _kind(self, key: str) -> str | None:
        if self._wanted is not None and key not in self._wanted:
            return None
        return self._handle.kind((*self._path, key))

    def _leaf_shape(self, key: str) -> torch.Size:
        spec = self._handle.specs[(*self._path, key)]
        return torch.Size((*self._batch_size, *spec.shape[len(self._sel.src_shape) :]))

    def _leaf_facts(self, key: str) -> tuple[Any, ...]:
        dtype = self._handle.specs[(*self._path, key)].dtype
        return self._leaf_shape(key), self._device or torch.device("cpu"), dtype, False, "Tensor"

    def _raw(self, key: str) -> Any:
        kind = self._kind(key)
        path = (*self._path, key)
        if kind == GROUP:
            return self._child(key)
        if kind == LEAF:
            return self._fetch([(path, self._sel)])[0]
        value = self._handle.value(path)
        return value if self._sel.is_full else value.move(self._sel_on_tensor)

    def _child(self, key: str) -> Self:
        path = (*self._path, key)
        batch = self._handle.groups[path].batch_size or ()
        full = self._sel.is_full
        sel = None if full else self._sel.extend(batch[len(self._sel.src_shape) :])
        names = None if full else extend_names(self._names, len(batch))
        wanted = None if self._wanted is None else self._wanted[key]
        child = self._over(self._handle, path, sel, wanted, self._device, names)
        if self._state & LOCKED:
            child._state |= LOCKED
            child._parents = [weakref.ref(self)]
        return child

    def _groups(self) -> list[Any]:
        return []  # children are made when asked for, and inherit the lock then

    def _sel_on_tensor(self, t: Tensor) -> Tensor:
        plan = self._sel.read_plan()
        return plan.finish(t[plan.index])

    # -- reading -----------------------------------------------------------------------------
    def _fetch(self, wanted: Sequence[tuple[Path, Selection]], outs: Sequence[Tensor] | None = None) -> list[Tensor]:
        """One batched read of leaves, each at a selection of its leading dimensions."""
        caps = self._handle.store.caps
        plans: dict[int, Any] = {}
        reads = []
        for i, (path, sel) in enumerate(wanted):
            plan = plans.get(id(sel))
            if plan is None:
                plan = plans[id(sel)] = sel.read_plan()
            whole = sel.is_full or Cap.PARTIAL_READ not in caps
            out = outs[i] if outs is not None and plan.exact and not (whole and not sel.is_full) else None
            reads.append(Read(path, () if whole else plan.index, out))
        values = self._handle.store.read(reads)
        done = []
        for i, ((_, sel), value) in enumerate(zip(wanted, values, strict=True)):
            if not sel.is_full:
                plan = plans[id(sel)]
                value = plan.finish(value if Cap.PARTIAL_READ in caps else value[plan.index])
            if outs is not None and outs[i] is not value:
                if outs[i].data_ptr() != value.data_ptr():
                    outs[i].copy_(value)
                value = outs[i]
            elif self._device is not None and value.device != self._device:
                value = value.to(self._device)
            done.append(value)
        return done

    def _leaves(self) -> list[tuple[Path, Selection]]:
        """Every leaf under this container with its selection, in key order."""
        out: list[tuple[Path, Selection]] = []
        for key in self._first_keys():
            kind = self._kind(key)
            if kind == LEAF:
                out.append(((*self._path, key), self._sel))
            elif kind == GROUP:
                out += self._child(key)._leaves()
        return out

    def _resident(self) -> Any:
        return self._built(iter(self._fetch(self._leaves())))

    def _built(self, leaves: Iterator[Tensor]) -> Any:
        data: dict[str, Any] = {}
        for key in self._first_keys():
            kind = self._kind(key)
            if kind == LEAF:
                data[key] = next(leaves)
            elif kind == GROUP:
                data[key] = self._child(key)._built(leaves)
            else:
                data[key] = self._raw(key)
        return self._resident_class._new(data, self._batch_size, self._device, self._names)

    def _read_into(self, out: Any) -> Any:
        buffers = []
        for path, _ in self._leaves():
            buffer = out.get(path[len(self._path) :])
            if buffer is None:
                raise KeyNotFoundError(f"out has no entry {path[len(self._path) :]!r}")
            spec = self._handle.specs[path]
            feature = spec.shape[len(self._sel.src_shape) :]
            if buffer.dtype != spec.dtype or buffer.shape[len(buffer.shape) - len(feature) :] != feature:
                raise BatchSizeError(
                    f"the buffer {path!r} has dtype {buffer.dtype} and shape {list(buffer.shape)}, the leaf {spec!r}"
                )
            buffers.append(buffer)
        self._fetch(self._leaves(), buffers)
        return out

    def _leaf_list(self) -> list[Tensor]:
        return self._fetch(self._leaves())

    # -- windows -----------------------------------------------------------------------------
    def _at(self, index: Any) -> Self:
        if isinstance(index, tuple):
            index = spelled_out(index, len(self._batch_size))
        sel = self._sel[index]
        names = indexed_names(self._names, index, len(self._batch_size))
        window = self._over(self._handle, self._path, sel, self._wanted, self._device, names)
        if self._state & LOCKED:
            window._state |= LOCKED
        return window

    def _kept(self, wanted: dict[str, Any]) -> Self:
        if self._wanted is not None:
            wanted = _intersect(self._wanted, wanted)
        return self._over(self._handle, self._path, self._own_sel(), wanted, self._device, self._names)

    def _own_sel(self) -> Selection | None:
        return None if self._sel.is_full else self._sel

    def split(self, split_size: int | Sequence[int], dim: int = 0) -> tuple[Self, ...]:
        """A tuple of windows along `dim`; nothing is read."""
        places = torch.empty((), device="meta").expand(self._batch_size).split(split_size, dim)
        at, out, start = dim % max(1, self.batch_dims), [], 0
        for piece in places:
            stop = start + piece.shape[at]
            out.append(self._at((*(slice(None),) * at, slice(start, stop))))
            start = stop
        return tuple(out)

    def __iter__(self) -> Iterator[Any]:
        if not self._batch_size:
            raise TypeError("iteration over a TensorDict without batch dimensions; use td.keys()")
        for start, stop in self._row_blocks():
            yield from self._at(slice(start, stop))._resident().unbind(0)

    def _row_blocks(self) -> Iterator[tuple[int, int]]:
        rows = self._batch_size[0]
        total = 0
        for path, sel in self._leaves():
            spec = self._handle.specs[path]
            feature = torch.Size(spec.shape[len(sel.src_shape) :]).numel()
            total += torch.Size(sel.shape).numel() * feature * spec.dtype.itemsize
        return row_ranges(rows, total // max(1, rows))

    # -- writing -----------------------------------------------------------------------------
    def _whole(self, what: str) -> None:
        if not self._sel.is_full:
            raise UnsupportedError(
                f"cannot {what} in a window of {self._handle.store.url}: it would change rows outside of it",
                url=self._handle.store.url,
                hint="do it on the TensorDict that was indexed",
            )

    def _assign(self, entries: Mapping[str, Any]) -> None:
        self._handle.check_writable()
        handle, specs = self._handle, dict(self._handle.specs)
        records: dict[Path, Group] = {}
        values: dict[str, Any] = {}
        fresh: dict[Path, LeafSpec] = {}
        data: list[tuple[Path, Any]] = []
        gone: list[Path] = []
        src = tuple(self._sel.src_shape)
        n = len(self._batch_size)
        for key, entry in entries.items():
            path = (*self._path, key)
            old = handle.kind(path)
            if isinstance(entry, Tensor):
                spec = LeafSpec((*src, *entry.shape[n:]), entry.dtype)
                if old != LEAF or handle.specs[path] != spec:
                    fresh[path] = spec
                    if old is not None:
                        gone.append(path)
                data.append((path, entry))
            elif isinstance(entry, NonTensor):
                values[key] = self._value_record(key, entry)
                if old in (LEAF, GROUP):
                    gone.append(path)
            else:
                self._whole(f"set the TensorDict {key!r}")
                below, more = describe(entry, path)
                records.update(below)
                fresh.update(more)
                if old is not None:
                    gone.append(path)
                data += [(leaf, entry.get(leaf[len(path) :])) for leaf in more]
        store = handle.store
        writes = [w for path, value in data for w in self._writes(path, value, fresh.get(path))]
        structural = bool(fresh or values or records or gone)
        stale = [leaf for path in gone for leaf in handle.leaves_below(path) if leaf not in fresh]
        if fresh:
            store.create(fresh)
        store.write(writes)
        if structural:
            groups = without(handle.groups, [p for p in gone if p in handle.groups])
            mine = groups[self._path]
            kept = {k: v for k, v in mine.values.items() if k not in entries}
            keys = tuple(dict.fromkeys((*self._group().keys, *entries)))
            groups[self._path] = msgspec.structs.replace(mine, keys=keys, values={**kept, **values})
            groups.update(records)
            if stale:
                store.delete(stale)
            left = {p: s for p, s in specs.items() if p not in set(stale)}
            handle.commit(groups, {**left, **fresh})

    def _value_record(self, key: str, entry: NonTensor) -> Any:
        path = (*self._path, key)
        if not self._sel.is_full:
            old = self._handle.value(path) if self._kind(key) not in (None, LEAF, GROUP) else None
            if old is None:
                self._whole(f"set the value {key!r}")
                raise AssertionError("unreachable")
            places = torch.arange(torch.Size(self._sel.src_shape).numel()).reshape(self._sel.src_shape)
            at = self._sel_on_tensor(places)
            flat = old.move(lambda t: t.reshape(-1))
            entry = assign(flat, at, entry).move(lambda t: t.reshape(self._sel.src_shape))
        return value_json(entry, path)

    def _writes(self, path: Path, value: Tensor, spec: LeafSpec | None) -> list[Write]:
        """The writes that put `value`, of this window's batch size, into a leaf."""
        spec = spec or self._handle.specs[path]
        value = value.detach()
        value = value.to(device="cpu", dtype=spec.dtype)
        if self._sel.is_full:
            return [Write(path, (), value)]
        if Cap.PARTIAL_WRITE not in self._handle.store.caps:
            raise self._handle.store.unsupported(Cap.PARTIAL_WRITE)
        return [Write(path, index, part) for index, part in self._sel.write_plan().pieces(value)]

    def _leaf_at(self, key: str, index: Any) -> Tensor:
        return self._fetch([((*self._path, key), self._leaf_sel(key)[index])])[0]

    def _leaf_sel(self, key: str) -> Selection:
        """This window over all dimensions of a leaf, feature dimensions too."""
        shape = self._handle.specs[(*self._path, key)].shape
        return Selection.full(shape) if self._sel.is_full else self._sel.extend(shape[len(self._sel.src_shape) :])

    def _write_leaf_at(self, key: str, index: Any, value: Any) -> None:
        self._handle.check_writable()
        path = (*self._path, key)
        sel = self._leaf_sel(key)[index]
        spec = self._handle.specs[path]
        tensor = _expanded(torch.as_tensor(value), torch.Size(sel.shape), key).to(device="cpu", dtype=spec.dtype)
        if Cap.PARTIAL_WRITE not in self._handle.store.caps:
            raise self._handle.store.unsupported(Cap.PARTIAL_WRITE)
        self._handle.store.write([Write(path, at, part) for at, part in sel.write_plan().pieces(tensor)])

    def _prepared(self, entries: Mapping[str, Any], at: tuple[Any, ...] | None = None) -> Callable[[], None]:
        self._handle.check_writable()
        window = self if at is None else self._at(at)
        writes: list[Write] = []
        values: dict[Path, dict[str, Any]] = {}
        window._plan_writes(entries, writes, values)

        def write() -> None:
            if writes:
                self._handle.store.write(writes)
            if values:
                groups = dict(self._handle.groups)
                for path, changed in values.items():
                    groups[path] = msgspec.structs.replace(groups[path], values={**groups[path].values, **changed})
                self._handle.commit(groups)

        return write

    def _plan_writes(self, entries: Mapping[str, Any], writes: list[Write], values: dict[Path, dict[str, Any]]) -> None:
        for key, value in entries.items():
            kind, path = self._kind(key), (*self._path, key)
            if kind is None:
                raise self._missing(key)
            if kind == GROUP:
                if not isinstance(value, (Container, Mapping)):
                    raise ValueError(f"entry {key!r} is a TensorDict; cannot write a {type(value).__name__} into it")
                pairs: Any = value
                self._child(key)._plan_writes(dict(pairs.items()), writes, values)
            elif kind == LEAF:
                writes += self._writes(path, self._leaf_value(key, value), None)
            else:
                entry = value if isinstance(value, NonTensor) else self._coerce(key, value)
                values.setdefault(self._path, {})[key] = self._value_record(key, entry)

    def _leaf_value(self, key: str, value: Any) -> Tensor:
        return _expanded(torch.as_tensor(value), self._leaf_shape(key), key)

    def _drop(self, keys: Iterable[str]) -> None:
        self._whole("remove entries")
        self._handle.remove([(*self._path, key) for key in keys])

    def _rename(self, old: str, new: str) -> None:
        self._whole("rename entries")
        self._handle.rename((*self._path, old), (*self._path, new))

    def _reorder(self, keys: list[str]) -> None:
        self._whole("reorder entries")
        groups = dict(self._handle.groups)
        groups[self._path] = msgspec.structs.replace(groups[self._path], keys=tuple(keys))
        self._handle.commit(groups)

    def _set_batch_size(self, batch_size: torch.Size) -> None:
        self._whole("change the batch size")
        groups = dict(self._handle.groups)
        names = self._names and extend_names(self._names[: len(batch_size)], len(batch_size))
        for path, group in groups.items():
            mine = path == self._path
            below = path[: len(self._path)] == self._path
            if mine or (below and tuple((group.batch_size or ())[: len(batch_size)]) != tuple(batch_size)):
                groups[path] = msgspec.structs.replace(
                    group, batch_size=tuple(batch_size), names=names if mine or names is None else group.names
                )
        if self._handle.store.writable:
            self._handle.commit(groups)
        else:
            self._handle.groups = groups  # a reader's own view of the data; the store is not touched
        self._names = names
        self._sel = Selection.full(batch_size)
        self._batch_size = batch_size

    def _set_names(self, names: Names) -> None:
        self._names = names
        if self._sel.is_full:
            groups = dict(self._handle.groups)
            for path, group in groups.items():
                if path[: len(self._path)] == self._path:
                    groups[path] = msgspec.structs.replace(
                        group, names=extend_names(names, len(group.batch_size or ()))
                    )
            if self._handle.store.writable:
                self._handle.commit(groups)
            else:
                self._handle.groups = groups

    def _detached(self) -> Any:
        return self._resident()

    # -- primitives that need the data ---------------------------------------------------------
    def _move(
        self,
        fn: Callable[[Tensor], Tensor],
        batch_size: torch.Size,
        names: Names,
        undo: Callable[[Any], Any] | None = None,
        *,
        keep_lock: bool = True,
    ) -> Any:
        td = self._resident()._move(fn, batch_size, names)
        if keep_lock and self._state & LOCKED:
            td.lock_()
        if undo is not None:
            td._undo = (weakref.ref(self), undo)
        return td

    def _fan_out(
        self,
        fn: Callable[[Tensor], Sequence[Tensor]],
        batch_sizes: Sequence[torch.Size],
        names: Names,
        *,
        keep_lock: bool = False,
    ) -> Any:
        return self._resident()._fan_out(fn, batch_sizes, names)

    def _foreach(self, fn: Callable[..., Sequence[Tensor]], *operands: Any) -> Any:
        return self._resident()._foreach(fn, *operands)

    def _reduce(
        self, fn: Callable[[Tensor], Tensor], batch_size: torch.Size, names: Names, *, keep_values: bool = False
    ) -> Any:
        return self._resident()._reduce(fn, batch_size, names, keep_values=keep_values)

    def _foreach_(self, fn: Callable[..., object], *operands: Any) -> Self:
        """In blocks of rows: read, change, write back."""

        def change(block: Any, *parts: Any) -> None:
            block._foreach_(fn, *parts)

        return self._stream(change, operands)

    def _stream(self, change: Callable[..., None], operands: tuple[Any, ...]) -> Self:
        self._handle.check_writable()
        n = len(self._batch_size)
        if not n:
            block = self._resident()
            change(block, *operands)
            return self.update_(block)
        for start, stop in self._row_blocks():
            rows = slice(start, stop)
            window = self._at(rows)
            block = window._resident()
            change(block, *[_rows_of(o, rows, self._batch_size) for o in operands])
            window.update_(block)
        return self

    def apply_(self, fn: Callable[..., Any], *others: Any, **kwargs: Any) -> Self:
        """Map `fn` over the leaves and write the results back, in blocks of rows of bounded memory."""

        def change(block: Any, *parts: Any) -> None:
            block.update_(block.apply(fn, *parts, **kwargs))

        return self._stream(change, others)

    # -- the rest ----------------------------------------------------------------------------
    def __setitem__(self, index: Any, value: Any) -> None:
        if is_key(index):
            node, rest = self._descend(index if isinstance(index, tuple) else (index,), value)
            # As users of stored TensorDicts expect: an existing entry of the same form is written in place.
            if len(rest) == 1 and isinstance(node, PersistentTensorDict) and node._kind(rest[0]) == LEAF:
                made = node._coerce(rest[0], value)
                spec = node._handle.specs[(*node._path, rest[0])]
                if isinstance(made, Tensor) and made.shape == node._leaf_shape(rest[0]) and made.dtype == spec.dtype:
                    node._write({rest[0]: made})
                    return
            self.set(index, value)
        else:
            self._set_rows(index, value)

    def clone(self, recurse: bool = True) -> Any:
        """An in-memory copy, or with `recurse=False` another container over the same store."""
        if recurse:
            return self._resident()
        return self._over(self._handle, self._path, self._own_sel(), self._wanted, self._device, self._names)

    def to_tensordict(self, *, retain_none: bool | None = None) -> Any:
        """The entries in memory, by one batched read."""
        return self._resident()

    def is_shared(self) -> bool:
        return False

    def _read_pieces(self, batch: Any) -> list[Tensor]:
        wanted = []
        for path, index in batch:
            node = self
            for key in path[:-1]:
                node = node._child(key)
            wanted.append(((*node._path, path[-1]), node._sel, index))
        if self._sel.is_full:
            return self._handle.store.read([Read(path, index) for path, _, index in wanted])
        cut = [(path, sel[index] if index and sel.shape else sel) for path, sel, index in wanted]
        values = [v.cpu() for v in self._fetch(cut)]
        pairs = zip(wanted, values, strict=True)
        return [v[index] if index and not sel.shape else v for (_, sel, index), v in pairs]

    def _as_meta(self) -> Any:
        def build(td: Any) -> Any:
            data: dict[str, Any] = {}
            for key in td._first_keys():
                if td._kind(key) == LEAF:
                    shape, _, dtype, *_ = td._leaf_facts(key)
                    data[key] = torch.empty(shape, dtype=dtype, device="meta")
                else:
                    data[key] = build(td._raw(key)) if td._kind(key) == GROUP else td._raw(key)
            return td._resident_class._new(data, td._batch_size, torch.device("meta"), td._names)

        return build(self)

    def _compared(self, other: Any, op: Any) -> Any:
        return self._resident()._compared(other, op)

    def _to(self, device: torch.device | None, dtype: torch.dtype | None, non_blocking: bool) -> Any:
        if dtype is not None:
            return super()._to(device, dtype, non_blocking)
        return self._over(self._handle, self._path, self._own_sel(), self._wanted, device, self._names)

    def close(self) -> None:
        """Commit and close the store. Twice is fine."""
        self._handle.store.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore, (self._handle, self._path, self._own_sel(), self._wanted, self._device, self._names)


def _restore(
    handle: StoreHandle, path: Path, sel: Selection | None, wanted: Any, device: Any, names: Names
) -> PersistentTensorDict:
    return PersistentTensorDict._over(handle, path, sel, wanted, device, names)


def _expanded(tensor: Tensor, shape: torch.Size, key: str) -> Tensor:
    while tensor.ndim > len(shape) and tensor.shape[0] == 1:
        tensor = tensor[0]  # as torch does
    try:
        return tensor.expand(shape)
    except RuntimeError:
        raise BatchSizeError(
            f"cannot write shape {list(tensor.shape)} into entry {key!r} of shape {list(shape)}"
        ) from None


def _usable_device(device: str | None) -> torch.device | None:
    """The stored device, or the CPU where this machine lacks it."""
    if device is None:
        return None
    found = torch.device(device)
    if found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
        return torch.device("cpu")
    return found


def _intersect(a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, sub in b.items():
        if key in a:
            mine = a[key]
            out[key] = sub if mine is None else mine if sub is None else _intersect(mine, sub)
    return out


def _rows_of(operand: Any, rows: slice, batch: torch.Size) -> Any:
    if isinstance(operand, Container):
        return operand._at(rows)
    if isinstance(operand, Tensor) and operand.ndim:
        return operand.expand(batch)[rows]
    return operand


Container._stored_class = PersistentTensorDict
