"""A stack of containers that is not made: the primitives that read, each by asking the elements."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import is_
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from torch.compiler import is_compiling

from tdstore import errors
from tdstore.container.core.container import GROUP, LEAF, VALUE, Container
from tdstore.container.core.locks import LOCKED
from tdstore.container.core.primitives import LeafFacts
from tdstore.container.core.tensorclasses import rewrap, unwrap, unwrap_all
from tdstore.container.entries.nested_tensors import forms, nested, padded
from tdstore.container.entries.unbatched import is_batched
from tdstore.container.functions.construct_and_join import nested_names
from tdstore.container.methods.access import NO_DEFAULT
from tdstore.container.storage.describe import STACK_KIND
from tdstore.container.values.linked_lists import LinkedList
from tdstore.container.values.nontensor import NonTensor, NonTensorData, NonTensorStack, merge
from tdstore.header import Group
from tdstore.index.index_terms import as_row, as_terms, indexed_names, spelled_out
from tdstore.index.selection import index_shape
from tdstore.index.shapes import as_dim
from tdstore.keys import key_text
from tdstore.tensordicts.base import TensorDictBase
from tdstore.tensordicts.lazystack.batch_read import residents, with_common_keys
from tdstore.tensordicts.lazystack.parts import copy_of_selected, merged_size, without_rows
from tdstore.tensordicts.lazystack.routing import Route, positions, route, unravel
from tdstore.tensordicts.resident.locked_facts import may_keep
from tdstore.tensordicts.resident.store_backed import BindingMixin
from tdstore.types import Entry, Names, NestedKey, Path, path_text

_ALL = slice(None)
_FORMS = ("as_list", "as_padded_tensor", "as_nested_tensor")


class LazyTree(TensorDictBase):
    """The elements, and what follows from them: nothing is kept here that they could contradict."""

    __slots__ = ("_binding", "_dim_name", "_empty_batch_size", "_stack_dim", "_tds")

    _tds: list[Any]
    _stack_dim: int
    _dim_name: str | None
    """Name of the stack dimension; the other names are the elements'."""
    _empty_batch_size: torch.Size
    """Batch size of the elements while there are none."""
    _binding: Any
    _stack_class: ClassVar[Any]

    @classmethod
    def _of(cls, tds: Iterable[Any], dim: int, name: str | None = None, empty_batch_size: Sequence[int] = ()) -> Self:
        """Build from checked parts, without `__init__`."""
        td: Self = object.__new__(cls)
        td._tds, td._stack_dim, td._dim_name, td._empty_batch_size = list(tds), dim, name, torch.Size(empty_batch_size)
        td._parents = td._undo = td._binding = None
        td._state = 0
        return td

    def _each(self, fn: Callable[[Any], Any]) -> Self:
        """Apply `fn`, which keeps batch sizes, to each element, and stack the results."""
        return self._of(map(fn, self._tds), self._stack_dim, self._dim_name, self._empty_batch_size)

    # -- what the elements say ---------------------------------------------------------------
    @property
    def tensordicts(self) -> list[Any]:
        """The elements, in order. Change the stack with `append`, `insert` and `extend`, not this list."""
        return self._tds

    @property
    def stack_dim(self) -> int:
        """The batch dimension along which the elements are stacked."""
        return self._stack_dim

    @property
    def _inner(self) -> torch.Size:
        """Batch size of the elements; -1 where they differ."""
        tds = self._tds
        if not tds:
            return self._empty_batch_size
        first: torch.Size = tds[0]._batch_size
        for td in tds:
            size = td._batch_size
            if size is not first and size != first:
                merged = merged_size([td._batch_size for td in tds])
                if merged is None:
                    raise errors.BatchSizeError("an element of this lazy stack has another number of batch dimensions")
                return merged
        return first

    @property
    def _batch_size(self) -> torch.Size:  # type: ignore[override]
        # Asked of the elements each time: one of them may have been given another batch size, or have grown.
        inner, d = self._inner, self._stack_dim
        if not d:
            return torch.Size((len(self._tds), *inner))
        return torch.Size((*inner[:d], len(self._tds), *inner[d:]))

    @property
    def _device(self) -> torch.device | None:  # type: ignore[override]
        devices = {td._device for td in self._tds}
        return devices.pop() if len(devices) == 1 else None

    @property
    def _names(self) -> Names:  # type: ignore[override]
        tds, d = self._tds, self._stack_dim
        found: Any = tds[0]._names if tds else None
        if any(td._names != found for td in tds):
            columns = zip(*(td._names or (None,) * td.batch_dims for td in tds), strict=True)
            found = tuple(c[0] if len(set(c)) == 1 else None for c in columns)
        if found is None and self._dim_name is None:
            return None
        found = found or (None,) * len(self._inner)
        names = (*found[:d], self._dim_name, *found[d:])
        return names if any(names) else None

    @property
    def _ragged(self) -> bool:
        return -1 in self._inner

    def _even(self, what: str) -> None:
        if self._ragged:
            raise errors.UnevenError(
                f"{what}: the elements of this lazy stack have different batch sizes, {list(self._batch_size)}",
                hint="index the stack dimension first, or iterate over td.tensordicts",
            )

    # -- primitives --------------------------------------------------------------------------
    def _first_keys(self) -> Iterable[str]:
        tds = self._tds
        if not tds:
            return []
        known = self._facts if self._state == LOCKED and not is_compiling() else None
        if known is None:
            return self._common_keys()
        of, keys = known.get("keys", ((), []))
        if len(of) != len(tds) or False in map(is_, of, tds):  # `tensordicts` is a list that anyone can change
            keys = self._common_keys()
            if all(map(may_keep, tds)):
                known["keys"] = tuple(tds), keys
        return keys.copy()  # type: ignore[no-any-return]

    def _common_keys(self) -> list[str]:
        tds = self._tds
        first: Any = tds[0]._first_keys()
        others: list[Any] = [td._first_keys() for td in tds[1:]]
        if isinstance(first, dict):
            same = first.keys()
            if all(isinstance(keys, dict) and keys.keys() == same for keys in others):
                return list(first)
        first = list(first)
        common = set(first).intersection(*others)
        return first if len(common) == len(first) else [k for k in first if k in common]

    def _kind(self, key: str) -> str | None:
        plain = self._resident_class
        for td in self._tds:
            if type(td) is not plain or type(td._data.get(key)) is not Tensor:
                break
        else:
            return LEAF if self._tds else None
        kinds = {td._kind(key) for td in self._tds}
        if not kinds or None in kinds:
            return None
        return kinds.pop() if len(kinds) == 1 else LEAF  # reading one of several kinds says what to do

    def _is_unbatched(self, key: str) -> bool:
        return all(td._kind(key) == VALUE and td._is_unbatched(key) for td in self._tds)

    def _unwrapped(self, key: str, entry: Any) -> Any:
        if isinstance(entry, NonTensorStack):  # a copy: what is written into it goes to the elements, too
            return LinkedList.over(entry, (self, key))
        return super()._unwrapped(key, entry)

    def _raw(self, key: str) -> Any:
        return self._stacked(key, [td._raw(key) for td in self._tds], self._stack_dim)

    def _stacked(self, key: NestedKey, parts: list[Any], place: int) -> Any:
        """Stack the entries of the elements into one."""
        first = parts[0]
        if isinstance(first, Container):
            if all(isinstance(p, Container) for p in parts):
                tensorclass, bare = unwrap_all(parts)
                return rewrap(tensorclass, self._of(bare, place, self._dim_name))
        else:
            try:
                if is_batched(first):
                    return torch.stack(parts, place)
                return merge(parts, lambda columns: torch.stack(columns, place))
            except (RuntimeError, TypeError, AttributeError):
                if all(isinstance(p, (NonTensorData, NonTensorStack)) for p in parts) and (
                    made := _lists(parts, place)
                ):
                    return made
                # the others are told below
        raise errors.UnevenError(
            f"the entries {key_text(key)} of this lazy stack cannot be stacked: {forms(parts)}",
            hint=f"td.get({key!r}, as_list=True), or as_padded_tensor=True, or as_nested_tensor=True",
        )

    def _leaf_shape(self, key: str) -> torch.Size:
        merged = self._merged_leaf(key)
        if merged is None:
            return torch.Size((-1,))
        return torch.Size((*merged[: self._stack_dim], len(self._tds), *merged[self._stack_dim :]))

    def _value_size(self, key: str) -> torch.Size:
        sizes = [td._value_size(key) for td in self._tds]
        if len(set(sizes)) < 2:
            return super()._value_size(key)
        merged, d = merged_size(sizes) or torch.Size(()), self._stack_dim
        return torch.Size((*merged[:d], len(sizes), *merged[d:]))

    def _merged_leaf(self, key: str) -> torch.Size | None:
        """Return the shape of an entry, -1 where elements differ; None unless all are tensors of one rank."""
        if any(td._kind(key) != LEAF for td in self._tds):
            return None
        return merged_size([td._leaf_shape(key) for td in self._tds])

    def _leaf_facts(self, key: str) -> LeafFacts:
        if self._is_unbatched(key):
            facts: LeafFacts = self._tds[0]._leaf_facts(key)
            return facts
        if any(td._kind(key) != LEAF for td in self._tds):
            return LeafFacts(self._leaf_shape(key), None, None, False, "Tensor")
        found: list[LeafFacts] = [td._leaf_facts(key) for td in self._tds]
        devices = {f.device for f in found}
        dtype = functools.reduce(torch.promote_types, (f.dtype for f in found))
        device = devices.pop() if len(devices) == 1 else None
        return LeafFacts(self._leaf_shape(key), device, dtype, all(f.shared for f in found), "Tensor")

    def _leaf_layout(self, key: str) -> torch.layout:
        layouts = {td._leaf_layout(key) for td in self._tds}
        return layouts.pop() if len(layouts) == 1 else torch.strided

    def _identity(self, key: str) -> Any:
        return tuple(td._identity(key) for td in self._tds)

    def _leaf_places(self) -> list[tuple[Any, str]]:
        return [place for td in self._tds for place in td._leaf_places()]

    def _groups(self) -> list[Any]:
        return self._tds

    def _leaf_list(self) -> list[Tensor]:
        """List the elements' own tensors, one element after the other."""
        return [leaf for td in self._tds for leaf in td._leaf_list()]

    def __contains__(self, key: object) -> bool:
        """Return whether there is an entry of that key, or whether a TensorDict is an element of the stack."""
        if isinstance(key, Container):
            element = unwrap(key)
            return any(td is element for td in self._tds)
        return super().__contains__(key)

    def _leaf_depth(self) -> int:
        return max((td._leaf_depth() for td in self._tds), default=-1)

    def _resident(self) -> Any:
        """Stack for good. Entries that not all elements have are left out.

        Raises:
            UnsupportedError: the elements differ in shape.
        """
        if not self._tds:
            return self._resident_class._new({}, self._batch_size, None, self._names)
        self._even("cannot stack")
        made = self._dense(residents(self._tds), (), self._batch_size, self._names, self._stack_dim)
        made._device = self._device
        return made

    def _dense(self, parts: list[Any], path: Path, batch: torch.Size, names: Names, d: int) -> Any:
        data: dict[str, Any] = {}
        first = parts[0]
        for key in first._data:
            column = [p._data.get(key) for p in parts]
            if any(v is None for v in column):
                continue
            if all(isinstance(v, Container) for v in column):
                tensorclass, bare = unwrap_all(column)
                below = [v._resident() for v in bare]
                inner = merged_size([b._batch_size for b in below])
                if inner is None or -1 in inner or len(inner) < d:
                    raise errors.UnevenError(f"the TensorDicts {path_text((*path, key))} have different batch sizes")
                wide = torch.Size((*inner[:d], len(parts), *inner[d:]))
                made = self._dense(below, (*path, key), wide, nested_names(below, names, len(batch) - 1, batch), d)
                data[key] = rewrap(tensorclass, made)
            else:
                data[key] = self._stacked((*path, key) if path else key, column, d)
        return self._resident_class._new(data, batch, first._device, names)

    def _plain_entries(self) -> Iterable[tuple[str, Any]]:
        if self._ragged:  # there is no TensorDict of these, but values have lists
            return [(key, self._raw(key)) for key in self._first_keys()]
        return super()._plain_entries()

    # -- get, in all its forms ---------------------------------------------------------------
    def _raw_as(self, key: str, **form: Any) -> Any:
        """Return the entry in the form asked for. Nested TensorDicts stay lazy stacks."""
        mismatched = set(form).difference(_FORMS, ("padding_side", "padding_value", "layout"))
        if mismatched or sum(bool(form.get(name)) for name in _FORMS) > 1:
            raise errors.InvalidTypeError(f"get takes one of {', '.join(sorted(_FORMS))}, not {form}")
        as_list, as_padded_tensor, as_nested_tensor = (form.get(name, False) for name in _FORMS)
        if self._kind(key) == GROUP or not (as_list or as_padded_tensor or as_nested_tensor):
            return self._raw(key)
        # Of stacks of stacks, each in the form asked for.
        parts = [
            td._raw_as(key, **form) if isinstance(td, LazyTree) and not as_nested_tensor else td._raw(key)
            for td in self._tds
        ]
        if as_list:
            return [p.plain() if isinstance(p, NonTensor) else p for p in parts]
        if not all(is_batched(p) for p in parts):
            raise errors.UnevenError(f"the entries {key!r} are not all tensors", hint=f"td.get({key!r}, as_list=True)")
        if as_nested_tensor:
            return nested(parts, form.get("layout") or torch.jagged)
        made = padded(parts, form.get("padding_side", "right"), form.get("padding_value", 0.0))
        return torch.stack(made, self._stack_dim)

    def get_nestedtensor(
        self, key: NestedKey, default: object = NO_DEFAULT, *, layout: torch.layout | None = None
    ) -> Entry:
        """Return the entry as a nested tensor, one component per element.

        Args:
            default: is returned if there is no such entry.
            layout: `torch.strided` (default) or `torch.jagged`.

        Raises:
            KeyNotFoundError: there is no such entry, and no default. UnsupportedError: the elements are stacked along
                another dimension than the first.
        """
        if self._stack_dim:
            raise errors.UnsupportedError(
                f"the components of a nested tensor are stacked along its first dimension, not along {self._stack_dim}",
                hint=f"td.get({key!r}, as_nested_tensor=True) has the elements as components",
            )
        if (found := self._find(key)) is None:
            return self._default(key, default)
        return nested([td._raw(found[1]) for td in found[0]._tds], layout or torch.strided)

    # -- indexing ----------------------------------------------------------------------------
    def _at(self, index: Any) -> Any:
        if type(index) is int and not self._stack_dim:
            try:
                return self._tds[index]
            except IndexError:
                n = len(self._tds)
                raise errors.OutOfRangeError(f"index {index} is out of bounds for dimension 0 with size {n}") from None
        if (row := as_row(index)) is not index:
            return self._at(row)
        if not self._stack_dim and (quick := self._quick_rows(index)) is not None:
            return quick
        ndim = len(self._inner) + 1
        terms = spelled_out(as_terms(index), ndim)
        if len(terms) <= ndim and all(type(t) is slice and t == _ALL for t in terms):
            return self._of(list(self._tds), self._stack_dim, self._dim_name, self._empty_batch_size)
        found = route(terms, self._stack_dim, len(self._tds), ndim)
        if found is None:
            return self._scattered(terms)
        if isinstance(found.rows, int):
            return self._cut(self._tds[found.rows], found)
        elements = self._elements_at(found.rows.flatten().tolist(), found)
        name = self._dim_name if found.rows.ndim == 1 else None
        if not elements and self._tds and isinstance(unwrap(self._tds[0]), self._resident_class):
            return without_rows(self._tds, self._cut(self._tds[0], found), found.place, found.rows.shape, name)
        empty_batch_size = () if elements else index_shape(self._inner, found.rest)
        return self._nest(elements, found.rows.shape, found.place, empty_batch_size, name)

    def _quick_rows(self, index: Any) -> Any:
        """Select elements at a slice or at rows of the first dimension. Return None for any other index."""
        if type(index) is slice:
            if index.step is not None and index.step <= 0:
                raise errors.InvalidArgumentError("slice step must be positive")
            rows = self._tds[index]
        elif type(index) is Tensor and index.ndim == 1 and index.dtype is torch.int64:
            tds, n = self._tds, len(self._tds)
            numbers = index.tolist()
            if not numbers or min(numbers) < -n or max(numbers) >= n:
                return None
            rows = [tds[i] for i in numbers]
            if len(set(map(id, rows))) < len(rows):
                return None
        else:
            return None
        return self._of(rows, 0, self._dim_name, self._inner) if rows else None

    def _cut(self, td: Any, found: Route) -> Any:
        if found.whole:
            return td
        part = td._at(found.index)
        return part._at((*(_ALL,) * found.place, 0)) if found.lift else part

    def _elements_at(self, rows: list[int], found: Route) -> list[Any]:
        """Select elements at rows. A repeated one is copied, so that no change is made twice to it."""
        seen: set[int] = set()
        out = []
        for row in rows:
            part = self._cut(self._tds[row], found)
            out.append(part.clone() if row in seen else part)
            seen.add(row)
        return list(map(copy_of_selected, out)) if found.masked else out

    def _nest(
        self,
        elements: list[Any],
        shape: Sequence[int],
        place: int,
        empty_batch_size: Sequence[int] = (),
        name: str | None = None,
    ) -> Any:
        """Nest stacks in stacks, for elements that span several dimensions from `place` on."""
        if not shape:
            return elements[0]
        if len(shape) > 1:
            width = torch.Size(shape[1:]).numel()
            parts = [elements[i * width : (i + 1) * width] for i in range(shape[0])]
            elements = [self._nest(part, shape[1:], place, empty_batch_size) for part in parts]
            empty_batch_size = (*empty_batch_size[:place], *shape[1:], *empty_batch_size[place:])
        return self._of(elements, place, name, empty_batch_size)

    def _scattered(self, terms: tuple[Any, ...]) -> Any:
        """Apply any other index: copy positions one by one, into a TensorDict if they can be stacked."""
        self._even("this index")
        made = self._gathered(positions(self._batch_size, terms))
        made._set_names(indexed_names(self._names, terms, len(self._batch_size)))
        return made

    def _gathered(self, places: Tensor) -> Any:
        """Gather the batch positions `places`, in its shape. The caller names the dimensions."""
        numbers, inner = unravel(places.flatten(), self._batch_size, self._stack_dim)
        parts, order = [], []
        for number in numbers.unique().tolist():
            mine = (numbers == number).nonzero().flatten()
            td = self._tds[number]
            at = tuple(i[mine] for i in inner)
            parts.append(
                td._at(at) if at else td._at((None,))._at(torch.zeros(len(mine), dtype=torch.int64, device="cpu"))
            )
            order.append(mine)
        if not parts:
            empty = self._of(self._tds[:1], self._stack_dim)._resident() if self._tds else self._resident()
            return empty.reshape(-1)[:0].reshape(places.shape)
        try:
            flat = torch.cat(residents(with_common_keys(parts)), 0)
        except RuntimeError:
            spots = zip(*(i.tolist() for i in inner), strict=True) if inner else [()] * len(numbers)
            return self._nest(self._singly(zip(numbers.tolist(), spots, strict=True)), places.shape, 0)
        return flat[torch.cat(order).argsort()].reshape(places.shape)

    def _singly(self, positions: Iterable[tuple[int, tuple[int, ...]]]) -> list[Any]:
        """Select rows by the number of the element and the position in it, sharing memory."""
        return [self._tds[number]._at(at) if at else self._tds[number] for number, at in positions]

    def _leaf_route(self, key: str, terms: tuple[Any, ...]) -> Route | None:
        inner = self._merged_leaf(key)
        return None if inner is None else route(terms, self._stack_dim, len(self._tds), len(inner) + 1)

    def _leaf_at(self, key: str, index: Any) -> Tensor:
        shape = self._leaf_shape(key)
        terms = spelled_out(as_terms(index), len(shape))
        found = self._leaf_route(key, terms)
        if found is None:
            whole: Tensor = self._raw(key)[terms]
            return whole
        cut = _leaf_cutter(key, found)
        if isinstance(found.rows, int):
            return cut(self._tds[found.rows])
        parts = [cut(self._tds[row]) for row in found.rows.flatten().tolist()]
        if not parts:
            empty: Tensor = self._raw(key)[terms]
            return empty
        stacked: Tensor = self._stacked(key, parts, found.place)
        return stacked if found.rows.ndim == 1 else stacked.unflatten(found.place, found.rows.shape)

    # -- as a store sees it ------------------------------------------------------------------
    def _own_record(self) -> Group:
        """Describe a group whose groups are the elements, "0", "1", ..., and record how many there are."""
        extra: dict[str, Any] = {"stack_dim": self._stack_dim, "count": len(self._tds)}
        if self._dim_name is not None:
            extra["name"] = self._dim_name
        if not self._tds:
            extra["batch_size"] = list(map(int, self._empty_batch_size))
        return Group(batch_size=(), kind=STACK_KIND, keys=tuple(map(str, range(len(self._tds)))), extra=extra)

    def _stored_groups(self) -> list[tuple[str, Any]]:
        return [(str(i), td) for i, td in enumerate(self._tds)]

    def _child(self, key: str) -> Any:
        return self._tds[int(key)]

    def _leaves(self) -> list[Any]:
        return [leaf for td in self._tds for leaf in td._leaves()]

    def _nested_keys(self) -> list[Any]:
        return [path for td in self._tds for path in td._nested_keys()]

    def _columns(self) -> list[Any]:
        return [column for td in self._tds for column in td._columns()]

    def _collect_reads(self, leaves: list[Any], others: list[Any]) -> list[Any]:
        return [td._collect_reads(leaves, others) for td in self._tds]

    def _built(self, plan: list[Any], leaves: Iterator[Tensor], others: Iterator[Any]) -> Any:
        plans = iter(plan)
        return self._each(lambda td: td._built(next(plans), leaves, others))

    def _read_pieces(self, batch: Any) -> list[Tensor]:
        return [self._tds[int(path[0])]._read_pieces([(path[1:], index)])[0] for path, index in batch]

    def _as_meta(self) -> Any:
        return self._each(lambda td: td._as_meta())

    def _read_into(self, out: Any) -> Any:
        for td, part in zip(self._tds, out.unbind(self._stack_dim), strict=True):
            td._read_into(part)
        return out

    def _walkable(self) -> Any:
        return self

    def _mark_closed(self, url: str) -> None:
        for td in self._tds:
            if isinstance(td, (BindingMixin, LazyTree)):
                td._mark_closed(url)

    def _with_leaves(self, leaves: Iterator[Tensor]) -> Self:
        return self._each(lambda td: td._walkable()._with_leaves(leaves))

    # -- flags -------------------------------------------------------------------------------
    def is_memmap(self) -> bool:
        return bool(self._tds) and all(td.is_memmap() for td in self._tds)

    def is_shared(self) -> bool:
        return bool(self._tds) and all(td.is_shared() for td in self._tds)

    def is_contiguous(self) -> bool:
        """Return False: a lazy stack is not one block of memory."""
        return False


def _leaf_cutter(key: str, found: Route) -> Callable[[Any], Tensor]:
    def cut(td: Any) -> Tensor:
        part: Tensor = td._leaf_at(key, found.rest)
        return part.squeeze(found.place) if found.lift else part

    return cut


def _lists(parts: Sequence[Any], place: int) -> NonTensorStack | None:
    """Merge values of any lengths into one entry of nested lists, from the dimensions behind `place`."""
    leading = {part.batch_size[:place] for part in parts}
    if len(leading) > 1:
        return None
    size = torch.Size((*leading.pop(), len(parts)))
    columns = [part.tolist() for part in parts]
    for _ in range(place):
        columns = [[value for row in column for value in row] if _ else column for column in columns]
    flat = list(columns) if not place else [column[i] for i in range(size[:-1].numel()) for column in columns]
    return NonTensorStack._make(flat, torch.arange(size.numel(), device="cpu").reshape(size))


def check_elements(tds: Sequence[Any], dim: int, strict_shape: bool) -> int:
    """Check that elements can be stacked, and return the stack dimension, not negative.

    Raises:
        InvalidTypeError: not a TensorDict. BatchSizeError: their batch sizes differ in length (or at all, with
            `strict_shape`). DimensionError: no such dimension. ValueError: the names of their dimensions differ.
    """
    for td in tds:
        if not isinstance(td, TensorDictBase):
            raise errors.InvalidTypeError(f"a lazy stack is made of TensorDicts, not of a {type(td).__name__}")
    sizes = [td.batch_size for td in tds]
    if len({len(s) for s in sizes}) > 1 or (strict_shape and len(set(sizes)) > 1):
        shown = ", ".join(str(list(s)) for s in dict.fromkeys(sizes))
        raise errors.BatchSizeError(f"cannot stack TensorDicts of batch sizes {shown}")
    check_same_names(tds)
    return as_dim(dim, (len(sizes[0]) if sizes else 0) + 1)


def check_same_names(tds: Sequence[Any]) -> None:
    """Refuse to stack elements whose dimensions have different names.

    Raises:
        InvalidArgumentError: they differ.
    """
    if any(td._names != tds[0]._names for td in tds):
        shown = " and ".join(str(list(names)) for names in dict.fromkeys(tuple(td.names) for td in tds))
        raise errors.InvalidArgumentError(f"the elements of a lazy stack have the same dimension names, not {shown}")
