"""What growing does to a tree: the walk that compares rows with it, and the steps in memory and in a store.

A tree may have parts of several kinds: tensors of this process, views of a store, stored groups, lazy stacks. One
`Growth` is one part with one owner (this process, or one store), and knows the parts of other owners below it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import msgspec
import torch
from torch import Tensor

from tdstore.container.core.container import GROUP, LEAF, VALUE, Container
from tdstore.container.core.tensorclasses import class_of, kind_of, unwrap
from tdstore.container.entries.nested_tensors import leaf_shape
from tdstore.container.storage.column_plan import ValuePlan, give_back
from tdstore.container.storage.describe import describe, stored_value
from tdstore.container.storage.entry_kinds import NestedTensor
from tdstore.container.storage.handle import StoreHandle
from tdstore.container.values.codecs import pickling
from tdstore.container.values.nontensor import NonTensor, NonTensorData, merge
from tdstore.container.varlen.columns import column_leaves
from tdstore.container.varlen.nested_leaves import SPANS, VALUES, leaf_below, parts_of_rows, record_of_rows
from tdstore.container.varlen.nested_rows import NestedForm, NestedRoom, check_row_shapes, empty_rows, lengthened
from tdstore.dtypes import dtype_name
from tdstore.errors import (
    BatchSizeError,
    InvalidArgumentError,
    InvalidTypeError,
    KeyNotFoundError,
    TDStoreError,
    UnsupportedError,
)
from tdstore.header import Group
from tdstore.store import Cap
from tdstore.types import LeafSpec, Path, Write, path_text


def place_of(td: Any) -> tuple[StoreHandle, Path] | None:
    """Return `(handle, path)` of a container whose entries are those of a store, or None for one in memory."""
    if isinstance(td, Container._stored_class):
        return td._handle, td._path
    binding: tuple[StoreHandle, Path] | None = getattr(td, "_binding", None)
    return binding


def _bound_to(td: Any) -> tuple[StoreHandle, Path]:
    """Return `place_of` a container that is known to be over a store."""
    return cast("tuple[StoreHandle, Path]", place_of(td))


def check_owner(td: Any, what: str) -> None:
    """Refuse what is not the whole of something that can change its length."""
    td._refuse_part(what)
    binding = place_of(td)
    if binding is not None:
        handle, path = binding
        url = handle.store.url
        if (Cap.RESIZE | Cap.PARTIAL_WRITE) & ~handle.store.caps:
            raise UnsupportedError(
                f"{what}: {url} has a fixed length (the {handle.backend.name!r} backend has no RESIZE)",
                url=url,
                hint="tdstore.copy() it to a backend that has RESIZE, such as memmap, h5 or zarr, and grow the copy",
            )
        if any(handle.groups[path[:i]].batch_size for i in range(len(path))):
            raise BatchSizeError(
                f"{what}: {path_text(path)} is part of {url}, whose batch size it shares",
                hint="do it on the outermost TensorDict",
            )
        handle.check_writable()
    td._check_writable()


class Step(NamedTuple):
    """A change, and how to take it back."""

    do: Callable[[], None]
    undo: Callable[[], None]


class Entry(NamedTuple):
    """One entry of a tree and the rows that come to it (None: the length changes only)."""

    node: Any
    key: str
    rows: Any


class Growth:
    """A new length of the first batch dimension, for all entries of a container at once.

    Creating it checks the rows against every entry and changes nothing. `step_of` makes the change, and its undo.

    Args:
        root: the container.
        rows: a container with the rows to add; None to shorten, or to add rows of the fill value.
        length: the new length.

    Raises:
        KeyNotFoundError, BatchSizeError, InvalidTypeError, InvalidArgumentError: the rows do not fit.
    """

    def __init__(self, root: Any, rows: Any, length: int) -> None:
        self.old = int(root._batch_size[0])
        self._begin(root, rows, length)
        self._walk(root, rows, ())

    @classmethod
    def of_elements(cls, stack: Any, elements: list[Any]) -> Growth:
        """Add new elements to a stored lazy stack, along any dimension."""
        growth = cls.__new__(cls)
        growth.old = len(stack._tds)
        growth._begin(stack, None, growth.old + len(elements))
        growth.stacks.append(Entry(stack, "", elements))
        return growth

    def _begin(self, root: Any, rows: Any, length: int) -> None:
        self.root, self.rows, self.length = root, rows, length
        self.binding: Any = place_of(root)
        self.nodes: list[Any] = []
        """The containers that get a new length, without lazy stacks."""
        self.leaves: list[Entry] = []
        self.nested: list[Entry] = []
        """Nested tensors: leaves whose rows have shapes of their own."""
        self.values: list[Entry] = []
        self.stacks: list[Entry] = []
        """Lazy stacks along the dimension that grows: `rows` are their new elements."""
        self.others: list[Growth] = []
        """Growths of the containers below that another owner holds."""

    def _walk(self, node: Any, rows: Any, path: Path) -> None:
        node, rows = unwrap(node), unwrap(rows)
        binding = place_of(node)
        if (
            node is not self.root
            and binding is not None
            and (self.binding is None or binding[0] is not self.binding[0])
        ):
            check_owner(node, "a new length")
            self.others.append(Growth(node, rows, self.length))
            return
        if isinstance(node, Container._stack_class):
            self._walk_stack(node, rows, path)
            return
        self.nodes.append(node)
        keys = list(node._first_keys())
        if rows is not None:
            _compare_keys(keys, list(rows._first_keys()), path)
        for key in keys:
            kind = node._kind(key)
            if rows is not None and rows._kind(key) != kind:
                raise InvalidTypeError(_kinds((*path, key), kind, rows._kind(key)))
            if kind == GROUP:
                self._walk(node._raw(key), None if rows is None else rows._raw(key), (*path, key))
            elif kind == LEAF:
                nested = node._nested_layout(key)
                if rows is not None:
                    _compare_shapes(node._leaf_shape(key), rows._leaf_shape(key), (*path, key), nested)
                    _compare_dtypes(node, rows, (*path, key))
                (self.leaves if nested is None else self.nested).append(Entry(node, key, rows))
            else:
                self.values.append(Entry(node, key, None if rows is None else rows._raw(key)))

    def _walk_stack(self, node: Any, rows: Any, path: Path) -> None:
        if not node._stack_dim:
            if rows is None and self.length > self.old:
                raise UnsupportedError(
                    f"cannot make new elements of the lazy stack{' ' + path_text(path) if path else ''}",
                    hint="append() or extend() it with elements",
                )
            elements = None if rows is None else list(rows.unbind(0))
            if elements and node._tds:
                _compare_elements(node, elements, path)
            self.stacks.append(Entry(node, "", elements))
            return
        parts = [None] * len(node._tds) if rows is None else list(rows.unbind(node._stack_dim))
        if len(parts) != len(node._tds):
            raise BatchSizeError(f"rows for {len(parts)} elements, and the lazy stack {path} has {len(node._tds)}")
        for td, part in zip(node._tds, parts, strict=True):
            self._walk(td, part, path)

    def new_batch(self, node: Any) -> torch.Size:
        """Return the batch size that a node gets."""
        return torch.Size((self.length, *node._batch_size[1:]))

    def check_values(self, entry: Entry) -> None:
        """Refuse to make rows of an entry that has a value for each."""
        if entry.rows is None and self.length > self.old:
            raise UnsupportedError(
                f"resize_ cannot make new rows for {entry.key!r}, which has one value per row",
                hint="append() or extend() rows, which bring their values; or exclude the key first",
            )

    def new_value(self, entry: Entry) -> NonTensor:
        """Return a value as it is afterwards."""
        old: NonTensor = entry.node._raw(entry.key)
        if entry.rows is None:
            length = self.length
            if isinstance(old, NonTensorData):
                return NonTensorData(old.data, (length, *old.batch_size[1:]))
            self.check_values(entry)
            return old.move(lambda t: t[:length])
        new: NonTensor = entry.rows
        if new.batch_size[1:] != old.batch_size[1:]:
            if not isinstance(new, NonTensorData):
                raise BatchSizeError(
                    f"the values {entry.key!r} have the shape {list(old.batch_size[1:])} in each row, "
                    f"those given {list(new.batch_size[1:])}"
                )
            new = NonTensorData(new.data, (new.batch_size[0], *old.batch_size[1:]))
        return merge([old, new], torch.cat, collapse=True)


def step_of(root: Any, growth: Growth) -> Step:
    """Build the step that changes a whole tree: steps that can fail come first, and are undone if one fails."""
    own = _in_memory(growth) if growth.binding is None else _in_store(growth)
    steps = [*(step_of(other.root, other) for other in growth.others), own]

    def do() -> None:
        done: list[Step] = []
        try:
            for step in steps:
                step.do()
                done.append(step)
        except BaseException:
            for step in reversed(done):
                step.undo()
            raise

    def undo() -> None:
        for step in reversed(steps):
            step.undo()

    return Step(do, undo)


# -- in memory ---------------------------------------------------------------------------------
class Room(NamedTuple):
    """A leaf with spare memory after it. It counts only while the leaf is the very tensor that is the entry."""

    leaf: Tensor
    buffer: Tensor


def _in_memory(growth: Growth) -> Step:
    old = [(node, dict(node._data), node._batch_size) for node in growth.nodes]
    before = [(entry.node, list(entry.node._tds)) for entry in growth.stacks]
    for entry in growth.stacks:
        if entry.node.is_locked:
            raise entry.node._refuse_locked("add or remove elements")
    made: list[tuple[Any, str, Tensor, Room | NestedRoom | None]] = []
    for node, key, rows in growth.leaves:
        room = (getattr(node, "_rooms", None) or {}).get(key)
        new = None if rows is None else rows._raw(key)
        made.append((node, key, *_relengthened(node._data[key], new, growth.length, room)))
    for node, key, rows in growth.nested:
        spare = (getattr(node, "_rooms", None) or {}).get(key)
        more = None if rows is None else rows._raw(key)
        made.append((node, key, *lengthened(node._data[key], more, growth.length, spare)))
    values = [(node, key, growth.new_value(Entry(node, key, rows))) for node, key, rows in growth.values]

    def do() -> None:
        for node, key, leaf, room in made:
            node._data[key] = leaf
            if room is not None:
                if getattr(node, "_rooms", None) is None:
                    node._rooms = {}
                node._rooms[key] = room
        for node, key, value in values:
            node._data[key] = value
        for node, _, elements in growth.stacks:
            node._tds[:] = node._tds[: growth.length] if elements is None else [*node._tds, *elements]
        for node in growth.nodes:
            node._forget_facts()
            node._batch_size = growth.new_batch(node)

    def undo() -> None:
        for node, data, batch in old:
            node._forget_facts()
            node._data.update(data)
            node._batch_size = batch
        for node, tds in before:
            node._tds[:] = tds

    return Step(do, undo)


def _relengthened(leaf: Tensor, rows: Tensor | None, length: int, room: Room | None) -> tuple[Tensor, Room | None]:
    """Give a leaf another length. Rows after the old ones are `rows`, or zeros."""
    old = leaf.shape[0]
    if length <= old:
        return leaf[:length], None
    plain = type(leaf) is Tensor and leaf.layout is torch.strided and not leaf.is_nested
    if not plain or leaf.requires_grad or (rows is not None and rows.requires_grad and torch.is_grad_enabled()):
        more = leaf.new_zeros((length - old, *leaf.shape[1:])) if rows is None else rows.to(leaf.device, leaf.dtype)
        return torch.cat([leaf, more], 0), None
    # Through `.data`: writing behind the end must not tell autograd that the rows before it have changed.
    if room is not None and room.leaf is leaf and len(room.buffer) >= length:
        buffer = room.buffer.data
    else:
        # Who grows once gets what was asked for; who grows again gets twice that, and the rest is for the next ones.
        again = room is not None and room.leaf is leaf
        buffer = leaf.new_empty((max(length, 2 * old) if again else length, *leaf.shape[1:]))
        buffer[:old].copy_(leaf)
    if rows is None:
        buffer[old:length].zero_()
    else:
        buffer[old:length].copy_(rows.detach())
    longer = buffer.data[:length]
    return longer, Room(longer, buffer)


# -- in a store --------------------------------------------------------------------------------
class _Plan:
    """The changes that a `Growth` makes in one store: lengths, new and removed leaves, and records of the header.

    Args:
        growth: the growth of a container of this store.
    """

    def __init__(self, growth: Growth) -> None:
        handle, _ = growth.binding
        self.handle, self.growth = handle, growth
        self.lengths: dict[Path, int] = {}
        self.groups: dict[Path, Group] = dict(handle.groups)
        self.specs: dict[Path, LeafSpec] = dict(handle.specs)
        self.fresh: dict[Path, LeafSpec] = {}
        self.made: list[tuple[Path, Any]] = []
        self.gone: list[Path] = []
        self.columns = False
        """Bytes of values are added to leaves that stay."""
        for node, key, _ in growth.leaves:
            self._set_length((*_bound_to(node)[1], key), growth.length)
        for node in growth.nodes:
            self._record(_bound_to(node)[1], batch_size=tuple(growth.new_batch(node)))
        self.parts: dict[Path, dict[str, Tensor]] = {}
        """The leaves of rows of nested tensors that are in memory, by entry."""
        for entry in growth.nested:
            self._nested(entry)
        for entry in growth.values:
            path = _bound_to(entry.node)[1]
            if handle.column((*path, entry.key)):  # many values are leaves
                self.columns = growth.rows is not None
                growth.check_values(entry)
                self._set_length(column_leaves((*path, entry.key))[0], growth.length)
                continue
            value = growth.new_value(entry)
            with pickling(handle.trusted):
                json, specs = stored_value(value, (*path, entry.key))
            self._record(path, values={**self.groups[path].values, entry.key: json})
            self.fresh.update(specs)
            self.specs.update(specs)
            self.made += [(leaf, value._raw(leaf[-1])) for leaf in specs]  # type: ignore[attr-defined]
        for node, _, elements in growth.stacks:
            self._elements(node, _bound_to(node)[1], elements)

    def _nested(self, entry: Entry) -> None:
        """Plan the new lengths of the leaves of a nested tensor."""
        growth, (node, key, rows) = self.growth, entry
        path = (*_bound_to(node)[1], key)
        found = self.handle.entries[path]
        assert isinstance(found, NestedTensor), path
        self._keep_record(path, found.layout.rest)
        for leaf in found.leaves[1:]:
            self._set_length(leaf, growth.length)
        if growth.length < growth.old:
            self._set_length(found.leaves[0], found.layout.elements_before(growth.length, self.handle.store))
            return
        if rows is None:
            kind = found.layout
            form = NestedForm(kind.layout, kind.dim, kind.rest, kind.dtype)
            rows_made = empty_rows(form, growth.length - growth.old)
        elif isinstance(rows, Container._stored_class):
            return  # a block at a time
        else:
            rows_made = rows._raw(key)
        self.parts[path] = self._parts(path, rows_made)

    def _parts(self, path: Path, rows: Tensor) -> dict[str, Tensor]:
        """Plan to add rows to a nested tensor: its values get longer, and its record may change."""
        parts = parts_of_rows(rows, self.groups[path[:-1]].values[path[-1]])
        self._keep_record(path, leaf_shape(rows)[1:])
        values = (*path, VALUES)
        self._set_length(values, self.specs[values].shape[0] + len(parts[VALUES]))
        return parts

    def _keep_record(self, path: Path, row: Sequence[int]) -> None:
        group, key = self.groups[path[:-1]], path[-1]
        record = record_of_rows(group.values[key], self.growth.length, row)
        self._record(path[:-1], values={**group.values, key: record})

    def _set_length(self, leaf: Path, length: int) -> None:
        self.lengths[leaf] = length
        self.specs[leaf] = self.specs[leaf].replace(shape=(length, *self.specs[leaf].shape[1:]))

    def _record(self, path: Path, **changes: Any) -> None:
        self.groups[path] = msgspec.structs.replace(self.groups[path], **changes)

    def _elements(self, node: Any, path: Path, elements: list[Any] | None) -> None:
        count = self.growth.length if elements is None else len(node._tds) + len(elements)
        keys = tuple(map(str, range(count)))
        self._record(path, keys=keys, extra={**self.groups[path].extra, "count": count})
        for i, td in enumerate(elements or (), len(node._tds)):
            with pickling(self.handle.trusted):
                groups, specs = describe(td, (*path, str(i)))
            record, tensorclass = groups[(*path, str(i))], class_of(node)
            if tensorclass is not None and record.kind == kind_of(None):  # elements are of the stack's class
                groups[(*path, str(i))] = msgspec.structs.replace(record, kind=kind_of(tensorclass))
            self.groups.update(groups)
            self.fresh.update(specs)
            self.made += [(leaf, leaf_below(td, leaf[len(path) + 1 :])) for leaf in specs]
        for i in range(count, len(node._tds)):
            below = (*path, str(i))
            self.gone += self.handle.leaves_below(below)
            self.groups = {p: g for p, g in self.groups.items() if p[: len(below)] != below}
        self.specs = {p: s for p, s in (self.specs | self.fresh).items() if p not in set(self.gone)}

    def writes(self) -> Iterator[list[Write]]:
        """Yield the writes of the new rows, in blocks of bounded memory where they are stored themselves."""
        yield [Write(path, (), value.detach().to("cpu", self.specs[path].dtype)) for path, value in self.made]
        yield [
            write for path, parts in self.parts.items() for write in self._nested_writes(path, parts, self.growth.old)
        ]
        rows, old = self.growth.rows, self.growth.old
        if rows is None:
            return
        if not isinstance(rows, Container._stored_class):
            yield self._block(self.growth, old)
            return
        for start, stop in rows._row_blocks():
            part = rows._at(slice(start, stop))._resident()
            yield self._block(Growth(self.growth.root, part, self.growth.length), old + start)

    def _block(self, growth: Growth, start: int) -> list[Write]:
        out = []
        for node, key, rows in growth.leaves:
            path, value = (*_bound_to(node)[1], key), rows._raw(key)
            at = (slice(start, start + len(value), 1),)
            out.append(Write(path, at, value.detach().to("cpu", self.specs[path].dtype)))
        for node, key, rows in growth.nested:
            path = (*_bound_to(node)[1], key)
            if path not in self.parts:
                parts = self._parts(path, rows._raw(key))
                self.handle.store.resize({(*path, VALUES): self.specs[(*path, VALUES)].shape[0]})
                out += self._nested_writes(path, parts, start)
        values = ValuePlan(self.handle)
        for node, key, rows in growth.values:
            path = (*_bound_to(node)[1], key)
            if self.handle.column(path):
                out.append(values.rows(path, start, rows))
        out += values.prepare()
        self.specs.update({path: self.handle.specs[path] for path in values.grown()})
        return out

    def _nested_writes(self, path: Path, parts: dict[str, Tensor], start: int) -> list[Write]:
        """Build the writes of rows of a nested tensor, whose first is row `start`."""
        before = self.specs[(*path, VALUES)].shape[0] - len(parts[VALUES])
        out = []
        for name, part in parts.items():
            leaf, at = (*path, name), before if name == VALUES else start
            if len(part):
                data = part + before if name == SPANS else part
                out.append(Write(leaf, (slice(at, at + len(part), 1),), data.to("cpu", self.specs[leaf].dtype)))
        return out


def _in_store(growth: Growth) -> Step:
    handle = growth.binding[0]
    rows = growth.rows
    if rows is not None and (place_of(rows) or (None,))[0] is handle:
        growth = Growth(growth.root, rows._resident().clone(), growth.length)  # rows of the very leaves that change
    plan = _Plan(growth)
    before = dict(handle.groups), dict(handle.specs)

    def change() -> None:
        store = handle.store
        try:
            if plan.fresh:
                store.create(plan.fresh)
            store.resize(plan.lengths)
            for writes in filter(None, plan.writes()):
                store.write(writes)
            if plan.gone:
                store.delete(plan.gone)
            handle.commit(plan.groups, plan.specs)
        except BaseException as error:
            if Cap.DISCARD not in store.caps:
                _take_back(handle, plan, error)
            raise

    def do() -> None:
        try:
            with handle.changing():
                change()
            _follow(growth)
        except BaseException:
            for node in growth.nodes:  # an interrupt may come after the commit
                node._catch_up()
            raise
        if growth.length < growth.old:
            give_back(handle, [(*_bound_to(entry.node)[1], entry.key) for entry in growth.values])

    def undo() -> None:
        groups, specs = before
        if plan.gone:
            raise UnsupportedError("elements that were removed from a stored lazy stack cannot be brought back")
        with handle.changing():
            handle.store.resize({path: specs[path].shape[0] for path in plan.lengths})
            if plan.fresh:
                handle.store.delete(list(plan.fresh))
            handle.commit(groups, specs)
        _follow(growth)

    return Step(do, undo)


def _take_back(handle: Any, plan: _Plan, error: BaseException) -> None:
    """Undo after a failure: give the leaves their old length again. Nothing of it was committed."""
    store = handle.store
    try:
        made = set(store.paths())
        old = {path: handle.specs[path].shape[0] for path in plan.lengths if path in made}
        now = dict(zip(old, store.specs(list(old)), strict=True))
        store.resize({path: n for path, n in old.items() if now[path].shape[0] != n})
        store.delete([path for path in plan.fresh if path in made and path not in handle.specs])
        if plan.columns:
            handle.commit(dict(handle.groups))  # bytes that no row points at: their checksums are to hold all the same
    except TDStoreError as second:
        error.add_note(f"{store.url} could not be put back ({second}): open it again to find it as it was committed")


def _follow(growth: Growth) -> None:
    """Make the containers of the tree take over what the store has now."""
    for node, _, elements in growth.stacks:
        node._follow_elements(growth.length if elements is None else len(node._tds) + len(elements))
    for node in growth.nodes:
        node._catch_up()


# -- comparing ---------------------------------------------------------------------------------
def _compare_keys(mine: list[str], theirs: list[str], path: Path) -> None:
    lost = [k for k in mine if k not in theirs]
    unmatched = [k for k in theirs if k not in mine]
    if lost:
        raise KeyNotFoundError(f"the rows have no entry {path_text((*path, lost[0]))}", hint="every entry grows")
    if unmatched:
        raise KeyNotFoundError(
            f"the rows have an entry {path_text((*path, unmatched[0]))} that is not here",
            hint="set it first, or exclude it",
        )


def _compare_shapes(mine: torch.Size, theirs: torch.Size, path: Path, nested: tuple[torch.layout, int] | None) -> None:
    if nested is not None:
        free = nested[0] is not torch.jagged
        check_row_shapes((-1,) * len(mine) if free else mine, theirs, f"the nested tensor {path_text(path)}")
    elif mine[1:] != theirs[1:] or len(mine) != len(theirs):
        raise BatchSizeError(
            f"rows of entry {path_text(path)} have the shape {list(mine[1:])}, those given {list(theirs[1:])}"
        )


def _compare_dtypes(node: Any, rows: Any, path: Path) -> None:
    mine, theirs = _dtype_of(node, path[-1]), _dtype_of(rows, path[-1])
    if mine is theirs or torch.can_cast(theirs, mine) or 0 in rows._leaf_shape(path[-1]):
        return  # an empty list is made a tensor of floats
    raise InvalidArgumentError(
        f"rows of entry {path_text(path)} have the dtype {dtype_name(mine)}, and those given have "
        f"{dtype_name(theirs)}, which would be cut",
        hint=f"cast them with .to(torch.{dtype_name(mine)}), or the entry with astype_()",
    )


def _dtype_of(td: Any, key: str) -> torch.dtype:
    dtype: torch.dtype
    dtype = td._raw(key).dtype if isinstance(td, Container._resident_class) else td._leaf_facts(key).dtype
    return dtype


def _compare_elements(stack: Any, elements: list[Any], path: Path) -> None:
    inner = stack._inner
    for td in elements:
        if td.batch_dims != len(inner) or (td.batch_size != inner and -1 not in inner):
            raise BatchSizeError(
                f"elements of the lazy stack {path_text(path) if path else ''} have the batch size {list(inner)}, "
                f"those given {list(td.batch_size)}"
            )


def _kinds(path: Path, mine: Any, theirs: Any) -> str:
    names = {LEAF: "a tensor", GROUP: "a TensorDict", VALUE: "a value that is not a tensor"}
    return f"entry {path_text(path)} is {names[mine]}, and in the rows it is {names[theirs]}"
