"""Writing into a container over a store: entries, rows of a window, in-place operations in blocks of rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Self

import msgspec
import torch
from torch import Tensor

from tdstore.arguments import tensor_for
from tdstore.container.core.container import GROUP, LEAF, VALUE, Container
from tdstore.container.core.dim_names import extend_names, names_below, names_or_none
from tdstore.container.core.tensorclasses import class_of, kind_of, unwrap
from tdstore.container.entries.unbatched import is_batched
from tdstore.container.methods.apply import check_trees
from tdstore.container.storage.block_writer import into, rows_of
from tdstore.container.storage.change_plan import Changes, Prepared
from tdstore.container.storage.column_plan import ValuePlan
from tdstore.container.storage.describe import STACK_KIND, describe, named_groups
from tdstore.container.storage.entry_kinds import Leaf, NestedTensor, SubGroup
from tdstore.container.values.codecs import pickling
from tdstore.container.values.elements import spread_over
from tdstore.container.values.nontensor import NonTensor, NonTensorData, NonTensorStack
from tdstore.container.varlen.columns import column_leaves
from tdstore.container.varlen.nested_leaves import leaf_below
from tdstore.errors import BatchSizeError, InvalidArgumentError, UnsupportedError
from tdstore.index.index_terms import as_terms, reaches_past, spelled_out
from tdstore.index.rows import scatter
from tdstore.index.selection import Selection
from tdstore.store import Cap
from tdstore.tensordicts.persistent.reading import StoredTree
from tdstore.tensordicts.persistent.row_expansion import (
    can_hold_rows,
    dense,
    entry_text,
    is_of_value,
    put_rows,
    rows_below,
    widened,
)
from tdstore.types import LeafSpec, Names, Path, Read, Write, is_key, path_text


class StoredWrites(StoredTree):
    """The primitives that write. What fails leaves the store and the catalogue as they were."""

    __slots__ = ()

    # -- writing -----------------------------------------------------------------------------
    def _whole(self, what: str) -> None:
        if self._view is not None:
            raise UnsupportedError(
                f"cannot {what} in a view of {self._handle.store.url}: it would change what is outside of it",
                url=self._handle.store.url,
                hint="do it on the TensorDict that was indexed, or that these keys were selected from",
            )

    def _all_rows(self, what: str) -> None:
        if self._window is not None:
            raise UnsupportedError(
                f"cannot {what} in a window of {self._handle.store.url}: it would change rows outside of it",
                url=self._handle.store.url,
                hint="do it on the TensorDict that was indexed",
            )

    def _refuse_part(self, what: str) -> None:
        self._whole(what)

    def _assign(self, entries: Mapping[str, Any]) -> None:
        changes = Changes()
        self._plan_set(changes, entries)
        changes.run()

    def _plan_set(self, changes: Changes, entries: Mapping[str, Any]) -> None:
        self._handle.check_writable()
        handle, plan = self._handle, changes.plan_of(self._handle)
        data: list[tuple[Path, Any]] = []
        src, sel = self._source(), self._sel
        n = len(sel.shape)
        for key, entry in entries.items():
            path = (*self._path, key)
            old = handle.kind(path)
            plan.set(self._path, key, isinstance(entry, NonTensor))
            if old is not None and self._window is not None:
                self._plan_rows_of_entry(changes, key, entry)
            elif is_batched(entry) and entry.is_nested:
                self._all_rows(f"set the nested tensor {key!r}")
                data += plan.nest(path, entry)
                if old is not None:
                    plan.gone.append(path)
            elif is_batched(entry):
                self._check_rows(key, entry.shape)
                spec = LeafSpec((*src, *entry.shape[n:]), entry.dtype)
                if old != LEAF or handle.specs.get(path) != spec:
                    plan.fresh[path] = spec
                    if old is not None:
                        plan.gone.append(path)
                data.append((path, entry))
            elif isinstance(entry, NonTensor):
                self._plan_value(key, entry, plan)
                if old in (LEAF, GROUP):
                    plan.gone.append(path)
            else:
                found, rows = self._whole_rows(key, entry)
                with pickling(handle.trusted):
                    below, more = describe(found, path)
                plan.records.update(below)
                plan.fresh.update(more)
                if old is not None:
                    plan.gone.append(path)
                for leaf in more:
                    rest = leaf[len(path) :]
                    if found is rows:
                        data.append((leaf, leaf_below(rows, rest)))
                    elif is_of_value(found, rest):
                        plan.writes.append(Write(leaf, (), leaf_below(found, rest)))
                    else:
                        data.append((leaf, rows_below(rows, rest)))
        plan.data += [w for path, value in data for w in self._writes(path, value, plan.fresh.get(path))]
        if (view := self._view) is not None:
            changes.then(lambda: self._added(view, entries.items()))

    def _plan_rows_of_entry(self, changes: Changes, key: str, entry: Any) -> None:
        """Plan that an entry of the store is set at the rows of this window: the other rows keep what they have.

        A tensor is cast to the dtype of its leaf. Entries of a nested TensorDict that are not set are forgotten by the
        window, and stay in the store.

        Raises:
            UnsupportedError: another kind of entry, or another shape, which the other rows do not have.
        """
        path, plan = (*self._path, key), changes.plan_of(self._handle)
        old = self._handle.entries[path]
        if isinstance(old, Leaf) and is_batched(entry) and not entry.is_nested:
            self._check_rows(key, entry.shape)
            further = self._handle.specs[path].shape[len(self._sel.src_shape) :]
            if entry.shape[len(self._sel.shape) :] == further:
                plan.data += self._writes(path, entry, None)
                return
        elif isinstance(old, SubGroup) and isinstance(entry, Container):
            group = self._handle.groups[path]
            if group.kind != STACK_KIND:
                child, td = self._group_child(path, group), dense(self._with_rows(key, entry))
                if can_hold_rows(group.kind, child, entry):
                    changes.set(child, {k: td._raw(k) for k in td._first_keys()})
                    return
            else:
                stack = unwrap(self._stack_child(key))
                pairs = list(zip(stack._tds, stack._per_element(self._with_rows(key, entry)), strict=True))
                if all(can_hold_rows(kind_of(class_of(td)), unwrap(td), part, exactly=True) for td, part in pairs):
                    for td, part in pairs:
                        changes.set(unwrap(td), {k: unwrap(part)._raw(k) for k in part._first_keys()})
                    return
        elif old is not None and old.kind == VALUE and isinstance(entry, NonTensor):
            self._plan_value(key, entry, plan)
            return
        there = self._handle.specs[path] if isinstance(old, Leaf) else old
        raise UnsupportedError(
            f"cannot set {path_text(path)} to {entry_text(entry)} in a window of {self._handle.store.url}: "
            f"there it is {entry_text(there)}, whose rows outside of the window would be lost",
            url=self._handle.store.url,
            hint="set the whole entry on the TensorDict that was indexed, or set rows that fit it",
        )

    def _with_rows(self, key: str, entry: Any) -> Any:
        """Return a nested TensorDict with at least the batch dimensions of this container."""
        lead = self._sel.shape
        if len(entry.batch_size) < len(lead):
            entry = entry._shallow()
            try:
                entry.batch_size = lead
            except BatchSizeError:
                self._check_rows(key, entry.batch_size)
        self._check_rows(key, entry.batch_size)
        return entry

    def _whole_rows(self, key: str, entry: Any) -> tuple[Any, Any]:
        """Expand a nested TensorDict to all rows of the store, and the current one to the rows of this container."""
        entry = self._with_rows(key, entry)
        if self._window is None:
            return entry, entry
        source = self._source()
        return widened(entry, self._sel, source, extend_names(self._group().names, len(source))), entry

    def _check_rows(self, key: str, shape: Sequence[int]) -> None:
        """Refuse what fits the batch size of this view, but not the larger one that the store has."""
        sel, batch = self._sel, self._group().batch_size or ()
        if tuple(shape[: len(sel.shape)]) != tuple(sel.shape) or len(sel.src_shape) < len(batch):
            raise UnsupportedError(
                f"cannot set {key!r} of shape {list(shape)} in a view of {self._handle.store.url}: what is selected "
                f"there has the batch size {list(sel.shape)}",
                url=self._handle.store.url,
                hint="give it those dimensions, or set it in td.to_tensordict()",
            )

    def _plan_value(self, key: str, entry: NonTensor, plan: ValuePlan) -> None:
        path, sel = (*self._path, key), self._sel
        batch = torch.Size(self._group().batch_size or ())
        more = len(sel.src_shape) - len(batch)
        one = entry.for_batch(entry.batch_size) is not None
        if self._view is not None and not one:
            lack = len(sel.shape) - len(entry.batch_size)
            if 0 < lack <= more:
                entry = entry.move(lambda t: t.reshape(*t.shape, *(1,) * lack).expand(*t.shape, *sel.shape[-lack:]))
            self._check_rows(key, entry.batch_size)
        if self._window is None:
            plan.keep(path, entry)
            return
        if self._handle.column(path) and not more:
            leaf = column_leaves(path)[0]
            further = self._handle.specs[leaf].shape[len(sel.src_shape) :]
            shape = torch.Size((*sel.shape, *further))
            if isinstance(entry, NonTensorStack):
                offsets = plan.place(path, spread_over(entry, shape[:-1])).reshape(shape)
            else:
                offsets = plan.place(path, [entry.plain()])[0].expand(shape)
            plan.writes += self._parts(leaf, sel, offsets)
            return
        old = self._handle.value(path) if self._handle.kind(path) == VALUE else NonTensorData(None, batch)
        if one and isinstance(old, NonTensorData) and self._view is not None:
            self._view.single.add(key)
        new = put_rows(key, old, sel, entry)
        if more and not one and not self._value_here(new).same(entry):
            raise UnsupportedError(
                f"cannot write values of the batch size {list(entry.batch_size)} into {key!r}: in "
                f"{self._handle.store.url} they have {list(batch)}",
                url=self._handle.store.url,
                hint="set one value for each of those rows, or set them in td.to_tensordict()",
            )
        plan.keep(path, new)

    def _writes(self, path: Path, value: Tensor, spec: LeafSpec | None) -> list[Write]:
        """Build the writes that put `value`, of this window's batch size, into a leaf."""
        fresh, spec = spec, spec or self._handle.specs[path]
        value = value.detach()
        value = value.to(device="cpu", dtype=spec.dtype)
        if self._sel.is_full:
            return [Write(path, (), value)]
        return self._parts(path, self._sel, value, fresh)

    def _parts(self, path: Path, sel: Selection, value: Tensor, fresh: LeafSpec | None = None) -> list[Write]:
        """Build the writes that put `value` at a selection; whole leaves where the store has no others."""
        sel.check_there((fresh or self._handle.specs[path]).shape)
        pieces = sel.write_plan().pieces(value)
        if Cap.PARTIAL_WRITE in self._handle.store.caps:
            return [Write(path, index, part) for index, part in pieces]
        if fresh is None:
            whole = self._handle.store.read([Read(path)])[0]
        else:
            whole = torch.zeros(fresh.shape, dtype=fresh.dtype, device="cpu")
        for index, part in pieces:
            scatter(whole, index, part)
        return [Write(path, (), whole)]

    def _leaf_at(self, key: str, index: Any) -> Tensor:
        if isinstance(self._entry(key), NestedTensor):
            return self._nested_at(key, as_terms(index))
        return self._fetch([((*self._path, key), self._leaf_sel(key)[index])])[0]

    def _nested_at(self, key: str, terms: tuple[Any, ...]) -> Tensor:
        """Select rows of a nested tensor by the batch index, then apply the rest of the index."""
        n = len(self._batch_size)
        plain = all(isinstance(t, (int, slice)) for t in terms)
        window, rest = (self._at(terms[:n]), terms[n:]) if plain and n else (self, terms)
        found: Tensor = window._raw(key)
        return found[rest] if rest else found

    def _leaf_sel(self, key: str) -> Selection:
        """Return this window over all dimensions of a leaf, feature dimensions too."""
        shape = self._handle.specs[(*self._path, key)].shape
        return Selection.full(shape) if self._sel.is_full else self._sel.extend(shape[len(self._sel.src_shape) :])

    def _write_leaf_at(self, key: str, index: Any, value: Any) -> None:
        self._handle.check_writable()
        self._handle.store.write(self._writes_at(key, index, value))

    def _writes_at(self, key: str, index: Any, value: Any) -> list[Write]:
        """Build the writes of `entry[index] = value`."""
        path = (*self._path, key)
        self._refuse_nested(key)
        sel = self._leaf_sel(key)[index]
        spec = self._handle.specs[path]
        tensor = _expanded(tensor_for(value, f"entry {key!r}", spec.dtype), torch.Size(sel.shape), key)
        tensor = tensor.to(device="cpu", dtype=spec.dtype)
        return self._parts(path, sel, tensor)

    def _prepared(self, entries: Mapping[str, Any], at: tuple[Any, ...] | None = None) -> Callable[[], None]:
        changes = Changes()
        self._plan_write(changes, entries, at)
        return Prepared(changes.finish, changes.begin)

    def _plan_rows(self, changes: Changes, index: Any, value: Any, made: list[tuple[Any, list[str]]]) -> None:
        """Plan `td[index] = value`. The index is parsed once where every entry of a TensorDict in memory is here."""
        if isinstance(value, self._resident_class) and value._data and value.device in (None, self._device):
            window = self._at(spelled_out(as_terms(index), len(self._batch_size)))
            if value._batch_size == window._batch_size and window._has_all(value):
                self._handle.check_writable()
                plan = changes.plan_of(self._handle)
                window._plan_writes(value._data, plan.data, plan)
                return
        super()._plan_rows(changes, index, value, made)

    def _has_all(self, value: Any) -> bool:
        """Return whether the entries of an in-memory TensorDict exist here, groups as groups, without lazy stacks."""
        for key, entry in value._data.items():
            found = self._entry(key)
            if found is None or isinstance(entry, Container) != isinstance(found, SubGroup):
                return False
            if isinstance(found, SubGroup):
                child = self._child(key)
                if not (isinstance(entry, self._resident_class) and isinstance(child, StoredWrites)):
                    return False
                if not child._has_all(entry):
                    return False
        return True

    def _plan_write(self, changes: Changes, entries: Mapping[str, Any], at: tuple[Any, ...] | None = None) -> None:
        self._handle.check_writable()
        plan = changes.plan_of(self._handle)
        if at is not None and reaches_past(at, len(self._batch_size)) and all(self._kind(k) == LEAF for k in entries):
            for key, value in entries.items():
                plan.data += self._writes_at(key, at, value)
            return
        window = self if at is None else self._at(at)
        window._plan_writes(entries, plan.data, plan)

    def _plan_writes(self, sources: Mapping[str, Any], writes: list[Write], plan: ValuePlan) -> None:
        for key, value in sources.items():
            kind, path = self._kind(key), (*self._path, key)
            if kind is None:
                raise self._missing(key)
            if kind == GROUP:
                if not isinstance(value, (Container, Mapping)):
                    raise InvalidArgumentError(
                        f"entry {key!r} is a TensorDict; cannot write a {type(value).__name__} into it"
                    )
                pairs: Any = value
                child = self._child(key)
                if isinstance(child, self._stack_class) and isinstance(value, self._stack_class):
                    for td, part in zip(child._tds, child._per_element(value), strict=True):
                        td._plan_writes(dict(part.items()), writes, plan)
                else:
                    entries = value._data if isinstance(value, self._resident_class) else dict(pairs.items())
                    child._plan_writes(entries, writes, plan)
            elif kind == LEAF:
                self._refuse_nested(key)
                writes += self._writes(path, self._leaf_value(key, value), None)
            else:
                entry = value if isinstance(value, NonTensor) else self._coerce(key, value)
                if not isinstance(entry, NonTensor):  # a number or a tensor is a value here, as it is in memory
                    entry = NonTensorData(value, self._batch_size)
                self._plan_value(key, entry, plan)

    def _refuse_nested(self, key: str) -> None:
        path = (*self._path, key)
        if isinstance(self._handle.entries[path], NestedTensor):
            raise UnsupportedError(
                f"the rows of the nested tensor {path_text(path)} of {self._handle.store.url} cannot be written: they "
                "lie one after the other, each with its own shape",
                url=self._handle.store.url,
                hint="set the whole entry: td.set(key, nested); or store rows that change as td.to_lazystack(0)",
            )

    def _leaf_value(self, key: str, value: Any) -> Tensor:
        dtype = self._handle.specs[(*self._path, key)].dtype
        return _expanded(tensor_for(value, f"entry {key!r}", dtype), self._leaf_shape(key), key)

    def _drop(self, keys: Iterable[str]) -> None:
        if self._view is not None:
            self._forget(self._view, keys)
            return
        self._handle.remove([(*self._path, key) for key in keys])

    def _take_back(self, keys: list[str]) -> None:
        if self._view is not None:
            self._forget(self._view, keys)
        self._handle.remove([(*self._path, key) for key in keys])

    def _rename(self, old: str, new: str) -> None:
        self._whole("rename entries")
        self._handle.rename((*self._path, old), (*self._path, new))

    def _reorder(self, keys: list[str]) -> None:
        if self._view is not None:
            self._view.keys = dict.fromkeys(keys)
            return
        groups = dict(self._handle.groups)
        groups[self._path] = msgspec.structs.replace(groups[self._path], keys=tuple(keys))
        self._handle.commit(groups)

    def _batches_above(self) -> list[torch.Size]:
        return super()._batches_above() + (self._handle.batch_above(self._path) if self._view is None else [])

    def _set_batch_size(self, batch_size: torch.Size) -> None:
        if self._view is not None:
            self._take_batch(self._view, batch_size)
            return
        groups = dict(self._handle.groups)
        extended = extend_names(self._names and self._names[: len(batch_size)], len(batch_size))
        names = extended if extended and any(extended) else None
        for path, group in groups.items():
            mine = path == self._path
            below = path[: len(self._path)] == self._path
            if mine or (below and tuple((group.batch_size or ())[: len(batch_size)]) != tuple(batch_size)):
                groups[path] = msgspec.structs.replace(
                    group, batch_size=tuple(map(int, batch_size)), names=names if mine or names is None else group.names
                )
        if self._handle.store.writable:
            self._handle.commit(groups)
        else:
            self._handle.overlay(groups)
        self._names = names

    def _set_names(self, names: Names) -> None:
        self._names = names_or_none(names)
        if self._view is not None:
            for td in self._view.nested.values():
                unwrap(td)._set_names(names_below(names, td._names, td.batch_dims))
        else:
            groups = named_groups(self._handle.groups, self._path, names)
            if self._handle.store.writable:
                self._handle.commit(groups)
            else:
                self._handle.overlay(groups)

    def __setitem__(self, index: Any, value: Any) -> None:
        if is_key(index):
            node, rest = self._descend(index if isinstance(index, tuple) else (index,), value)
            # As users of stored TensorDicts expect: an existing entry of the same form is written in place.
            if len(rest) == 1 and isinstance(node, StoredWrites) and node._kind(rest[0]) == LEAF:
                made = node._coerce(rest[0], value)
                shape, _, dtype, *_ = node._leaf_facts(rest[0])
                if isinstance(made, Tensor) and -1 not in shape and made.shape == shape and made.dtype == dtype:
                    node._write({rest[0]: made})
                    return
            self.set(index, value)
        elif not self._write_tensors(index, value):
            self._set_rows(index, value)

    def _write_tensors(self, index: Any, value: Any) -> bool:
        """Do `td[index] = value` if all is tensors that are here and fit as they are; else do nothing and give False.

        This is most of what is written. The index is parsed once, the entries of both sides are walked together, and
        the store is written once.
        """
        handle, view = self._handle, self._view
        if not isinstance(value, self._resident_class) or (view is not None and view.is_own):
            return False
        leaves: list[tuple[Path, LeafSpec, Tensor]] = []
        if Cap.PARTIAL_WRITE not in handle.store.caps or not self._match_leaves(self._path, value._data, leaves):
            return False
        plain = type(index) is Tensor or type(index) is slice
        sel = self._sel[index if plain else spelled_out(as_terms(index), len(self._sel.shape))]
        shape, n = sel.shape, len(sel.src_shape)
        if value._batch_size != shape or sel.is_full:
            return False
        for _, spec, tensor in leaves:
            if tensor.shape != shape + spec.shape[n:]:
                return False
        self._check_writable()
        handle.check_writable()
        sel.check_there(self._group().batch_size or ())
        plan = sel.write_plan()
        writes: list[Write] = []
        for path, spec, tensor in leaves:
            converted = tensor.detach().to(device="cpu", dtype=spec.dtype)
            if plan.exact:
                writes.append(Write(path, plan.indices[0], converted))
            else:
                writes += [Write(path, at, part) for at, part in plan.pieces(converted)]
        if writes:
            handle.store.write(writes)
        return True

    def _match_leaves(self, path: Path, data: Mapping[str, Any], leaves: list[tuple[Path, LeafSpec, Tensor]]) -> bool:
        """Add the tensors of a TensorDict, with their leaves in a group of the store; False if any of them has none."""
        entries, specs = self._handle.entries, self._handle.specs
        for key, value in data.items():
            match entries[(*path, key)]:
                case Leaf(place) if type(value) is Tensor and value.layout is torch.strided and not value.is_nested:
                    leaves.append((place, specs[place], value))
                case SubGroup(place) if isinstance(value, self._resident_class):
                    if self._handle.groups[place].kind == STACK_KIND or not self._match_leaves(
                        place, value._data, leaves
                    ):
                        return False
                case _:
                    return False
        return True

    # -- in place, in blocks of rows ---------------------------------------------------------
    def _foreach_(self, fn: Callable[..., object], *operands: Any) -> Self:
        """Read, change and write back, in blocks of rows."""

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
            change(block, *[rows_of(o, rows, self._batch_size) for o in operands])
            window.update_(block)
        return self

    def _map_leaves(self, fn: Callable[..., Any], others: tuple[Any, ...], named: bool, **options: Any) -> Self:
        """Map leaves; where results have a target (`inplace`, `out`), in blocks of rows of bounded memory too."""
        inplace, out = options.pop("inplace", False), options.pop("out", None)
        check_trees(others, out)
        target = self if inplace else out
        tensors_only = not options.get("call_on_nested") and options.get("is_leaf") is None
        if target is not None and options.get("batch_size") is None and tensors_only:
            blocks: list[bool] = []

            def run(block: Any, rows: slice) -> Any:
                parts = tuple(rows_of(o, rows, self._batch_size) for o in others)
                part = block._resident()._map_leaves(fn, parts, named, **options)
                blocks.append(part is not None)
                return part

            if into(self, target, run, exact=not inplace and not target.is_locked):
                result: Any = target if any(blocks) or not blocks else None
                return result  # type: ignore[no-any-return]
        made: Self = super()._map_leaves(fn, others, named, inplace=inplace, out=out, **options)
        return made

    def apply_(self, fn: Callable[..., object], *others: Container, **kwargs: Any) -> Self:
        """Map `fn` over the leaves and write the results back, in blocks of rows of bounded memory."""

        check_trees(others)

        def change(block: Any, *parts: Any) -> None:
            part = block.apply(fn, *parts, **kwargs)
            if part is not None:
                block.update_(part)

        self._stream(change, others)
        return self


def _expanded(tensor: Tensor, shape: torch.Size, key: str) -> Tensor:
    if tensor.shape == shape:
        return tensor
    while tensor.ndim > len(shape) and tensor.shape[0] == 1:
        tensor = tensor[0]  # as torch does
    try:
        return tensor.expand(shape)
    except RuntimeError:
        raise BatchSizeError(
            f"cannot write shape {list(tensor.shape)} into entry {key!r} of shape {list(shape)}"
        ) from None
