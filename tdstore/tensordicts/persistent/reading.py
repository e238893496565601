"""Reading a container over a store: keys, batched reads, windows, and what needs the data in memory."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

from tdstore.container.core.container import GROUP, LEAF, VALUE
from tdstore.container.core.locks import LOCKED, SHARED
from tdstore.container.core.primitives import LeafFacts
from tdstore.container.core.tensorclasses import without_classes, wrap
from tdstore.container.entries.unbatched import LEAF as UNBATCHED
from tdstore.container.entries.unbatched import UnbatchedTensor, is_batched
from tdstore.container.storage.entry_kinds import Column, Inline, Leaf, NestedTensor, Refused, SubGroup, Unbatched
from tdstore.container.values.linked_lists import LinkedList
from tdstore.container.values.nested_lists import stack_text
from tdstore.container.values.nontensor import SHOWN, NonTensor, NonTensorData, NonTensorStack, merge
from tdstore.container.varlen.columns import column_leaves, stored_leaves
from tdstore.container.varlen.nested_leaves import Nested, parts_of_nested, specs_of_nested
from tdstore.container.varlen.reading import column_rounds
from tdstore.container.varlen.rounds import Rounds, drive, read_plain, together
from tdstore.errors import (
    BatchSizeError,
    InvalidStateError,
    KeyNotFoundError,
    NoRowsError,
    UnsupportedError,
    UntrustedDataError,
)
from tdstore.index.plans import ReadPlan
from tdstore.index.selection import Selection
from tdstore.index.shapes import as_dim, split_sizes
from tdstore.io.blocks import row_ranges
from tdstore.ops.block_reductions import Reduction, State
from tdstore.ops.reduce import Over, common_dtype
from tdstore.store import Cap
from tdstore.storekit.pages import HOLES, reserve
from tdstore.tensordicts.persistent.device_reads import to_cuda
from tdstore.tensordicts.persistent.window import WindowTree
from tdstore.types import LeafSpec, Names, Path, Read, path_text

if TYPE_CHECKING:
    from tdstore.store import Store
    from tdstore.tensordicts.resident.tensordict import TensorDict

_LEAF, _IN_ROUNDS, _AT_HAND = "a leaf", "other rounds", "at hand"
_LEAVES = frozenset([Leaf])
"""Where `_built` finds an entry: among the leaves, among the other reads, or in the header."""


class StoredTree(WindowTree):
    """The entries of a group of a store, or a window of them."""

    __slots__ = ()

    # -- looking -----------------------------------------------------------------------------
    @property
    def store(self) -> Store:
        """The open store behind this container."""
        return self._handle.store

    @property
    def filename(self) -> str | None:
        """The location it was opened from; None for a store object of another library."""
        location = self._handle.location
        return location if isinstance(location, str) else None

    def _leaf_shape(self, key: str) -> torch.Size:
        if isinstance(entry := self._entry(key), NestedTensor):
            return entry.layout.shape(self._sel, self._handle.store)
        spec, sel = self._handle.specs[(*self._path, key)], self._sel
        return torch.Size((*sel.shape, *spec.shape[len(sel.src_shape) :]))

    def _leaf_facts(self, key: str) -> LeafFacts:
        if self._kind(key) == VALUE:  # an unbatched tensor
            spec = self._handle.specs.get((*self._path, key, UNBATCHED)) or self._raw(key)
            device = self._device or torch.device("cpu")
            return LeafFacts(torch.Size(spec.shape), device, spec.dtype, False, UnbatchedTensor.__name__)
        entry = self._entry(key)
        nested = entry.layout if isinstance(entry, NestedTensor) else None
        dtype = self._handle.specs[(*self._path, key)].dtype if nested is None else nested.dtype
        jagged = nested is not None and nested.layout is torch.jagged and not nested.is_row(self._sel)
        name = "NestedTensor" if jagged else "Tensor"
        return LeafFacts(self._leaf_shape(key), self._device or torch.device("cpu"), dtype, False, name)

    def _leaf_layout(self, key: str) -> torch.layout:
        entry = self._entry(key)
        whole = isinstance(entry, NestedTensor) and not entry.layout.is_row(self._sel)
        return torch.jagged if whole else torch.strided

    def _companions(self, key: str) -> list[tuple[Any, int]]:
        entry = None if self._kind(key) == VALUE else self._entry(key)  # a value: an unbatched tensor
        if not isinstance(entry, NestedTensor) or entry.layout.layout is not torch.jagged:
            return []
        if entry.layout.is_row(self._sel):
            return []
        offsets = self._leaf_shape(key)[0] + 1  # int64, as the tensor has them once it is read
        return [(self._identity(key), offsets * torch.int64.itemsize)]

    def _nested_parts(self, key: str) -> tuple[dict[str, Any], dict[str, LeafSpec]] | None:
        entry = self._entry(key)
        if not isinstance(entry, NestedTensor) or entry.layout.is_row(self._sel):
            return None
        if not self._sel.is_full:
            record, parts = parts_of_nested(self._raw(key))
            return record, specs_of_nested(parts)
        leaves = {leaf[-1]: self._handle.specs[leaf] for leaf in entry.leaves}
        return self._group().values[key], leaves

    def _nested_layout(self, key: str) -> tuple[torch.layout, int] | None:
        entry = self._entry(key)
        if not isinstance(entry, NestedTensor) or entry.layout.is_row(self._sel):
            return None
        return entry.layout.layout, entry.layout.dim

    def _raw(self, key: str) -> Any:
        match entry := self._entry(key):
            case Leaf(path):
                return self._fetch([(path, self._sel)])[0]
            case SubGroup(path):
                return wrap(self._handle, path, self._child(key))
            case NestedTensor(_, layout):
                return drive(self._nested_rounds(layout), self._handle.store)
            case Column() if self._by_column(key):
                return drive(self._column_rounds(key), self._handle.store)
            case None:
                raise self._missing(key)
        return self._value_shown(key, self._value_here(self._handle.value(entry.path)))

    def _value_here(self, value: NonTensor) -> NonTensor:
        """Return a value of the store, for the rows and the batch dimensions of this container."""
        if self._view is None:
            return value
        size = value.batch_size
        if more := self._sel.src_shape[len(size) :]:
            value = value.move(lambda t: t.reshape(*size, *(1,) * len(more)).expand(*size, *more))
        return value if self._window is None else value.move(self._sel_on_tensor)

    def _value_shown(self, key: str, value: NonTensor) -> NonTensor:
        """Return one value for all rows, if this view was assigned it so and it has not changed."""
        if self._view is None:
            return value
        one_row = self._window is not None and self._window.is_one
        if (one_row or key in self._view.single) and isinstance(value, NonTensorStack) and value.numel():
            rows: list[NonTensor] = [NonTensorData(v) for v in value.flat()]
            size = value.batch_size
            value = merge(rows, lambda parts: torch.stack(parts).reshape(size), collapse=True)
        one = value.for_batch(self._batch_size)
        return value if one is None else one

    def _by_column(self, key: str) -> bool:
        """Return whether the rows of a value are read by themselves."""
        batch = self._group().batch_size or ()
        return self._handle.column((*self._path, key)) and len(self._sel.src_shape) <= len(batch)

    def _offsets(self, key: str) -> tuple[Path, Selection]:
        """Return the path and the selection of the offsets of a value per row, for the rows of this window."""
        return column_leaves((*self._path, key))[0], self._sel

    def _value_size(self, key: str) -> torch.Size:
        path, sel = self._offsets(key)
        if not self._by_column(key):
            return super()._value_size(key)
        return torch.Size((*sel.shape, *self._handle.specs[path].shape[len(sel.src_shape) : -1]))

    def _unwrapped(self, key: str, entry: Any) -> Any:
        if isinstance(entry, NonTensorStack):  # a copy: what is written into it goes to the store, too
            return LinkedList.over(entry, (self, key))
        return super()._unwrapped(key, entry)

    def _is_unbatched(self, key: str) -> bool:
        entry = self._handle.entries[(*self._path, key)]
        return isinstance(entry, Unbatched) or (isinstance(entry, Inline) and entry.unbatched)

    def _value_text(self, key: str) -> str:
        if isinstance(entry := self._entry(key), Refused):
            return f"<cannot be read: {entry.why}>"
        try:
            size = self._value_size(key)
            if size.numel() <= SHOWN or not self._by_column(key) or len(self._batch_size) != 1:
                return super()._value_text(key)
            rows = self._at(slice(0, 3))  # a million values are not read to show three
            return stack_text(rows._raw(key).flat(), size)
        except UntrustedDataError as error:
            return f"<cannot be read: {error.message}>"

    # -- reading -----------------------------------------------------------------------------
    def _fetch(self, wanted: Sequence[tuple[Path, Selection]], outs: Sequence[Tensor] | None = None) -> list[Tensor]:
        """Read leaves in one batch, each at a selection of its leading dimensions."""
        return drive(self._leaf_rounds(wanted, outs), self._handle.store)

    def _leaf_rounds(
        self, wanted: Sequence[tuple[Path, Selection]], outs: Sequence[Tensor] | None = None, *, staged: bool = True
    ) -> Rounds[list[Tensor]]:
        """Return the read of leaves: in one round, or of many bytes to a CUDA device in one for each block."""
        if staged and outs is None and self._device is not None and self._device.type == "cuda":
            for path, sel in wanted:
                sel.check_there(self._handle.specs[path].shape)
            rest = partial(self._leaf_rounds, staged=False)
            return (yield from to_cuda(self._handle, wanted, self._device, rest))
        parts = Cap.PARTIAL_READ in self._handle.store.caps
        plans: dict[int, tuple[ReadPlan, bool]] = {}
        reads = []
        looked_at: tuple[Any, ...] = ()
        for i, (path, sel) in enumerate(wanted):
            shape = self._handle.specs[path].shape
            if (sel, *shape[:1]) != looked_at:
                sel.check_there(shape)
                looked_at = (sel, *shape[:1])
            if id(sel) not in plans:
                plans[id(sel)] = sel.read_plan(), sel.shape == sel.src_shape and sel.is_full
            plan, full = plans[id(sel)]
            out = outs[i] if outs is not None and plan.exact and (parts or full) else None
            reads.append(Read(path, plan.index if parts and not full else (), out))
        values = yield reads
        done = []
        for i, ((_, sel), value) in enumerate(zip(wanted, values, strict=True)):
            plan, full = plans[id(sel)]
            if not full and not (parts and plan.exact):
                value = plan.finish(value if parts else value[plan.index])
            if outs is not None and outs[i] is not value:
                if outs[i].data_ptr() != value.data_ptr():
                    outs[i].copy_(value)
                value = outs[i]
            elif self._device is not None and value.device != self._device:
                value = value.to(self._device)
            done.append(value)
        return done

    def _leaves(self) -> list[tuple[Path, Selection]]:
        """List every leaf under this container with its selection, in key order."""
        out: list[tuple[Path, Selection]] = []
        for key in self._first_keys():
            match self._entry(key):
                case Leaf(path):
                    out.append((path, self._sel))
                case SubGroup():
                    out += self._child(key)._leaves()
        return out

    def _nested_keys(self) -> list[Path]:
        """List the paths of the nested tensors under this container, which are read by themselves."""
        out: list[Path] = []
        for key in self._first_keys():
            match self._entry(key):
                case NestedTensor(path):
                    out.append(path)
                case SubGroup():
                    out += self._child(key)._nested_keys()
        return out

    def _columns(self) -> list[tuple[Path, Selection]]:
        """List the offsets of the var-length columns under this container, in key order."""
        out: list[tuple[Path, Selection]] = []
        for key in self._first_keys():
            match self._entry(key):
                case Column() if self._by_column(key):
                    out.append(self._offsets(key))
                case SubGroup():
                    out += self._child(key)._columns()
        return out

    def _column_rounds(self, key: str) -> Rounds[NonTensor]:
        """Return the read of values per row, for the rows of this window."""
        offsets = _only(self._leaf_rounds([self._offsets(key)]))
        return self._value_shown(key, (yield from column_rounds(self._handle, (*self._path, key), offsets)))

    def _value_rounds(self, key: str, value: Rounds[NonTensor]) -> Rounds[NonTensor]:
        return self._value_shown(key, self._value_here((yield from value)))

    def _nested_rounds(self, nested: Nested) -> Rounds[Tensor]:
        found = yield from nested.rounds(self._sel, self._handle.store)
        return found if self._device is None else found.to(self._device)

    def _collect_reads(self, leaves: list[tuple[Path, Selection]], others: list[Rounds[Any]]) -> list[Any]:
        handle, sel = self._handle, self._window or self._sel
        plan: list[tuple[str, Any, Any]] = []
        for key in self._first_keys():
            match entry := handle.entries[(*self._path, key)]:
                case Leaf(path):
                    leaves.append((path, sel))
                    plan.append((key, None, _LEAF))
                    continue
                case SubGroup(path):
                    child = self._child(key)
                    below = child._collect_reads(leaves, others)
                    plan.append((key, wrap(handle, path, child), below))
                    continue
                case NestedTensor(_, layout):
                    others.append(self._nested_rounds(layout))
                case Column() if self._by_column(key):
                    others.append(self._column_rounds(key))
                case _:
                    if (value := handle.value_rounds(entry)) is None:
                        plan.append((key, None, _AT_HAND))
                        continue
                    others.append(self._value_rounds(key, value))
            plan.append((key, None, _IN_ROUNDS))
        return plan

    def _rounds(self) -> Rounds[Any]:
        """Return the read of all entries into a TensorDict, in as many rounds as the slowest entry needs."""
        leaves: list[tuple[Path, Selection]] = []
        others: list[Rounds[Any]] = []
        plan = self._collect_reads(leaves, others)
        rounds = self._leaf_rounds(leaves)
        if not others:
            return self._built(plan, iter((yield from rounds)), iter(()))
        values, *entries = yield from together([rounds, *others])
        return self._built(plan, iter(values), iter(entries))

    def _resident(self) -> Any:
        handle, device = self._handle, self._device
        if len(handle.groups) == 1 and (device is None or device.type != "cuda"):  # which gets its leaves in blocks
            keys = tuple(self._first_keys())
            paths: list[Path] = list(zip(keys))
            if _LEAVES.issuperset(map(type, map(handle.entries.__getitem__, paths))):
                found = read_plain(handle.store, handle.specs, paths, self._window or self._sel)
                if device is not None:
                    found = [value if value.device == device else value.to(device) for value in found]
                return self._resident_class._new(
                    dict(zip(keys, found, strict=True)), self._batch_size, device, self._names
                )
        return drive(self._rounds(), handle.store)

    def _built(self, plan: list[Any], leaves: Iterator[Tensor], others: Iterator[Any]) -> Any:
        data: dict[str, Any] = {}
        for key, child, source in plan:
            if child is not None:
                data[key] = child._built(source, leaves, others)
            elif source is _LEAF:
                data[key] = next(leaves)
            else:
                data[key] = next(others) if source is _IN_ROUNDS else self._raw(key)
        return self._resident_class._new(data, self._batch_size, self._device, self._names)

    def _read_into(self, out: Any) -> Any:
        if nested := self._nested_keys():
            raise UnsupportedError(
                f"the nested tensor {path_text(nested[0])} of {self._handle.store.url} cannot be read into a buffer",
                hint="read the other keys with keys=, and this entry by td[key]",
            )
        buffers = []
        for path, _ in self._leaves():
            buffer = out.get(path[len(self._path) :])
            if buffer is None:
                raise KeyNotFoundError(f"out has no entry {path_text(path[len(self._path) :])}")
            spec = self._handle.specs[path]
            feature = spec.shape[len(self._sel.src_shape) :]
            if buffer.dtype != spec.dtype or buffer.shape[len(buffer.shape) - len(feature) :] != feature:
                raise BatchSizeError(
                    f"the buffer {path_text(path)} is {buffer.dtype} of shape {list(buffer.shape)}, the leaf {spec!r}"
                )
            if HOLES:
                reserve(buffer)
            buffers.append(buffer)
        self._fetch(self._leaves(), buffers)
        return out

    def _leaf_list(self) -> list[Tensor]:
        if self._nested_keys():
            found: list[Tensor] = self._resident()._leaf_list()
            return found
        return self._fetch(self._leaves())

    # -- windows -----------------------------------------------------------------------------
    def split(self, split_size: int | Sequence[int], dim: int = 0) -> tuple[Self, ...]:
        """Split into a tuple of windows along `dim`. Nothing is read."""
        at = as_dim(dim, len(self._batch_size))
        out, start = [], 0
        for size in split_sizes(self._batch_size[at], split_size):
            out.append(self._at((*(slice(None),) * at, slice(start, start + size))))
            start += size
        return tuple(out)

    def __iter__(self) -> Iterator[Any]:
        if not self._batch_size:
            raise NoRowsError("iteration over a TensorDict without batch dimensions; use td.keys()")
        for start, stop in self._row_blocks():
            yield from self._at(slice(start, stop))._resident().unbind(0)

    def _row_blocks(self) -> Iterator[tuple[int, int]]:
        rows = self._batch_size[0]
        total = 0
        for path, sel in self._leaves():
            spec = self._handle.specs[path]
            feature = torch.Size(spec.shape[len(sel.src_shape) :]).numel()
            total += torch.Size(sel.shape).numel() * feature * spec.dtype.itemsize
        for path, _ in self._columns():
            total += sum(self._handle.specs[leaf].nbytes for leaf in column_leaves(path[:-1]))
        for path in self._nested_keys():
            total += sum(self._handle.specs[leaf].nbytes for leaf in self._handle.leaves_below(path))
        return row_ranges(rows, total // max(1, rows))

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
        views: bool = False,
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

    def _reduced(self, kind: Reduction, over: Over, keepdim: bool, batch_size: torch.Size, names: Names) -> Any:
        """Reduce in blocks of rows of bounded memory. Their results are merged, or concatenated."""
        if (td := self._without_columns()) is not self:
            return td._reduced(kind, over, keepdim, batch_size, names)
        rows = self._batch_size[0] if self._batch_size else 0
        blocks = list(self._row_blocks()) if rows else []
        across = not over.features and (over.dims is None or 0 in over.dims)
        if len(blocks) < 2 or (across and (kind.part is None or kind.merge is None or kind.finish is None)):
            return self._resident()._reduced(kind, over, keepdim, batch_size, names)
        if not across:
            parts = [
                block._reduced(kind, over, keepdim, torch.Size((len(block), *batch_size[1:])), names)
                for block in self._blocks(blocks)
            ]
            return torch.cat(parts, 0)
        states: list[State] = []
        shape: Any = None
        for block in self._blocks(blocks):
            shape = block
            new = [kind.part(*over.of(leaf), keepdim) for leaf in block._leaf_list()]  # type: ignore[misc]
            states = [kind.merge(a, b) for a, b in zip(states, new, strict=True)] if states else new  # type: ignore[misc]
        results = iter([kind.finish(state) for state in states])  # type: ignore[misc]
        return shape._over_leaves_of(lambda leaf: next(results), over, batch_size, names)

    def _over_leaves(self, kind: Reduction, over: Over, keepdim: bool) -> Tensor:
        if (td := self._without_columns()) is not self:
            return td._over_leaves(kind, over, keepdim)  # type: ignore[no-any-return]
        if over.features or over.dims is not None or kind.part is None or kind.merge is None or kind.finish is None:
            return super()._over_leaves(kind, over, keepdim)
        total: State | None = None
        wide: torch.dtype | None = None
        for block in self._blocks(self._row_blocks()) if self._batch_size else [self._resident()]:
            leaves = block._leaf_list()
            wide = wide or (common_dtype(leaves) if leaves else None)
            for leaf in leaves:
                part = kind.part(leaf.flatten().to(wide), (0,), False)
                total = part if total is None else kind.merge(total, part)
        if total is None:
            raise InvalidStateError("there is no leaf to reduce")
        return kind.finish(total)

    def _without_columns(self) -> Any:
        """Return this container without the values per row that lie in leaves; itself if there are none."""
        if not self._columns():
            return self
        return self._selected(self._tensor_keys())

    def _tensor_keys(self) -> dict[str, Any]:
        keys: dict[str, Any] = {}
        for key in self._first_keys():
            if self._kind(key) == GROUP:
                keys[key] = self._child(key)._tensor_keys()
            elif not self._handle.column((*self._path, key)):
                keys[key] = None
        return keys

    def _blocks(self, ranges: Iterable[tuple[int, int]]) -> Iterator[Any]:
        for start, stop in ranges:
            yield self._at(slice(start, stop))._resident()

    # -- the rest ----------------------------------------------------------------------------
    def clone(self, recurse: bool = True) -> Self:
        """Copy into memory, or with `recurse=False` return another container over the same store."""
        if recurse:
            made: Self = self._resident()
            return made
        return self._duplicate(self._device, lambda td: td.clone(recurse=False))

    def _shallow(self) -> Self:
        """Copy shallowly with a batch size and names of its own, for a place in another container."""
        return self._at(()) if self._view is None else self.clone(recurse=False)

    def _copy_with_names(self, names: Names) -> Any:
        td = self.clone(recurse=False)
        td._names = names
        return td

    def _own_copy(self) -> Self:
        made: Self = self._resident()
        return made

    def to_tensordict(self, *, retain_none: bool | None = None) -> TensorDict:
        """Read the entries into memory, by one batched read."""
        made: TensorDict = without_classes(self._resident(), retain_none)
        return made

    def is_shared(self) -> bool:
        return bool(self._state & SHARED)

    def _owned(self, what: str) -> tuple[Any, Path]:
        self._handle.check_writable()
        return self._handle, self._path

    def _read_pieces(self, batch: Any) -> list[Tensor]:
        wanted = []
        packed: dict[int, Tensor] = {}
        for number, (path, index) in enumerate(batch):
            node: Any = self
            for key in path[:-2]:
                node = node._child(key)
            if len(path) > 1 and isinstance(node, StoredTree) and node._nested_whole(path[-2]):
                wanted.append(((*node._path, path[-2], path[-1]), node._sel, index))
                continue
            node = node._child(path[-2]) if len(path) > 1 else node
            if is_batched(node):
                leaf = parts_of_nested(node)[1][path[-1]]
                packed[number] = (leaf[index] if index else leaf).cpu()
            elif isinstance(node, NonTensor):
                leaf = self._packed(path[:-1], node)[path[-1]]
                packed[number] = leaf[index] if index else leaf
            elif isinstance(node._handle.entries[(*node._path, path[-1])], NestedTensor):
                leaf = node._raw(path[-1])  # one row
                packed[number] = (leaf[index] if index else leaf).cpu()
            else:
                wanted.append(((*node._path, path[-1]), node._sel, index))
        if self._sel.is_full:
            values = self._handle.store.read([Read(path, index) for path, _, index in wanted])
        else:
            cut = [(path, sel[index] if index and sel.shape else sel) for path, sel, index in wanted]
            pairs = zip(wanted, self._fetch(cut), strict=True)
            values = [v.cpu()[index] if index and not sel.shape else v.cpu() for (_, sel, index), v in pairs]
        rest = iter(values)
        return [packed[number] if number in packed else next(rest) for number in range(len(batch))]

    def _nested_whole(self, key: str) -> bool:
        """Return whether an entry is a nested tensor seen as stored: its leaves are those of the store."""
        return self._sel.is_full and isinstance(self._handle.entries[(*self._path, key)], NestedTensor)

    def _packed(self, path: Path, value: Any) -> dict[str, Tensor]:
        """Encode the leaves of values per row, once for all the pieces of a copy."""
        if self._encoded_column is None or self._encoded_column[0] != path:
            found = stored_leaves(value)
            assert found is not None, path  # or nobody would ask for its leaves
            self._encoded_column = (path, found[1])
        return self._encoded_column[1]

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
        return self._duplicate(device, lambda td: td._to(device, None, non_blocking))


def _only(rounds: Rounds[list[Tensor]]) -> Rounds[Tensor]:
    """Return the read of one leaf."""
    return (yield from rounds)[0]
