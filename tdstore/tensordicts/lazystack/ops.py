"""Maths, reductions and shapes of a lazy stack: element by element where that is the same, stacked where it is not."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np
import torch
from torch import Tensor

from tdstore.arguments import as_list, as_operand, check_mask
from tdstore.container.core.container import Container
from tdstore.container.core.locks import LOCKED
from tdstore.container.core.tensorclasses import without_classes
from tdstore.container.functions.broadcast import uneven, widened
from tdstore.container.methods.access import NO_DEFAULT
from tdstore.container.methods.apply import Mapper, check_trees
from tdstore.container.methods.key_selection import KEY_SET
from tdstore.errors import BatchSizeError, InvalidTypeError, UnevenError
from tdstore.index.shapes import as_dim, as_size, flat_args, view_shape
from tdstore.index.tracing import mapped, one_by_one
from tdstore.ops.block_reductions import Reduction, State
from tdstore.ops.reduce import Over
from tdstore.tensordicts.lazystack.parts import merge_states, pieces, reduced_size
from tdstore.tensordicts.lazystack.routing import Traced, merges_dims, trace, wants_view
from tdstore.tensordicts.lazystack.writing import LazyWrites
from tdstore.tensordicts.resident.leafwise import LeafwiseTree
from tdstore.types import DeviceLike, Names, NamesLike, NestedKey, Path, SizeLike

if TYPE_CHECKING:
    from tdstore.tensordicts.base import TensorDictBase
    from tdstore.tensordicts.resident.tensordict import TensorDict

_ALL = slice(None)


class LazyOps(LazyWrites):
    """What `OpsBase` asks for, and the methods that would otherwise need the whole stack in memory."""

    __slots__ = ()

    # -- operands ----------------------------------------------------------------------------
    def _operands(self, other: Any, *, to_write: bool = False) -> list[Any]:
        """List the second operand of each element."""
        n, d = len(self._tds), self._stack_dim
        if isinstance(other, Container):
            if other.batch_size != self._batch_size and not self._ragged:
                other = other.expand(self._batch_size)
            return self._per_element(other, to_write=to_write)
        if isinstance(other, np.ndarray):
            other = as_operand(other)
        if not isinstance(other, Tensor) or not other.ndim:
            return [other] * n
        batch = self._batch_size
        at = d - (len(batch) - other.ndim)
        if other.ndim > len(batch) or (at >= 0 and other.shape[at] not in (1, n)):
            raise BatchSizeError(
                f"a tensor of shape {list(other.shape)} cannot be broadcast to batch size {list(batch)}"
            )
        if at < 0:
            return [other] * n
        return list(other.unbind(at)) if other.shape[at] == n else [other.select(at, 0)] * n

    def _foreach(self, fn: Callable[..., Sequence[Tensor]], *operands: Any) -> Self:
        if uneven(self, operands) and (wide := widened(self, operands)) is not None:
            result: Self = wide[0]._foreach(fn, *wide[1])
            return result
        columns = [self._operands(o) for o in operands]
        made = self._all_at_once(fn, columns)
        if made is None:
            made = [td._foreach(fn, *[c[i] for c in columns]) for i, td in enumerate(self._tds)]
        return self._of(made, self._stack_dim, self._dim_name, self._empty_batch_size)

    def _all_at_once(self, fn: Callable[..., Sequence[Tensor]], columns: list[list[Any]]) -> list[Any] | None:
        """Call once for the leaves of all elements. Return None unless they and the operands allow it."""
        leaves: list[Tensor] = []
        arguments: list[list[Any]] = [[] for _ in columns]
        for i, td in enumerate(self._tds):
            mine: list[Tensor] = []
            if not isinstance(td, LeafwiseTree) or td._state & LOCKED or not td._collect(mine):
                return None
            for into, column in zip(arguments, columns, strict=True):
                part = td._operand(column[i], mine)
                if not isinstance(part, list):
                    return None
                into += part
            leaves += mine
        if not leaves:
            return None
        results = iter((one_by_one(fn) if mapped() else fn)(leaves, *arguments))
        return [td._with_leaves(results) for td in self._tds]

    def _in_rows(self) -> Any:
        return self._resident()

    def _aligned(self, other: Any, default: Any) -> tuple[Any, Any]:
        if isinstance(default, Tensor) and default.ndim:
            return super()._aligned(other, default)
        pairs = [td._aligned(part, default) for td, part in zip(self._tds, self._operands(other), strict=True)]
        return self._of([a for a, _ in pairs], self._stack_dim, self._dim_name), self._of(
            [b for _, b in pairs], self._stack_dim
        )

    def _compare(self, other: Any, op: Any) -> Any:
        if uneven(self, (other,)) and (wide := widened(self, (other,))) is not None:
            return wide[0]._compare(wide[1][0], op)
        if isinstance(other, Mapping) and not isinstance(other, Container):
            other = self._each(lambda td: td.empty()).update(other)
        elif not isinstance(other, (Container, Tensor, bool, int, float, complex, np.ndarray, np.generic)):
            return NotImplemented
        parts = iter(self._operands(other))
        return self._each(lambda td: td._compare(next(parts), op))

    def _compared(self, other: Any, op: Any) -> Any:
        return self._compare(other, op)

    def _chosen(self, condition: Tensor, other: Any, pad: Any) -> Any:
        d = self._stack_dim
        if 1 in condition.shape and condition.ndim <= len(self._batch_size) and not self._ragged:
            condition = condition.expand(self._batch_size[: condition.ndim])
        conditions = [condition] * len(self._tds) if condition.ndim <= d else condition.unbind(d)
        if len(conditions) != len(self._tds):
            raise BatchSizeError(f"a condition of shape {list(condition.shape)} for {list(self._batch_size)}")
        if condition.ndim <= d and condition.ndim:
            self._even("where")
        pairs = iter(zip(conditions, self._operands(other), strict=True))
        return self._each(lambda td: td.where(*next(pairs), pad=pad))

    def masked_select(self, mask: Tensor, *, inplace: bool = False) -> Self:
        check_mask(mask, "mask")
        if inplace:
            self._refuse_masking()
        if mask.dtype != torch.bool:
            raise InvalidTypeError(f"a mask is a bool tensor, not one of {mask.dtype}")
        found: Self = self._at(mask)
        try:
            dense: Self = found._resident()
            return dense
        except UnevenError:
            return found

    # -- one element after the other -----------------------------------------------------------
    def clone(self, recurse: bool = True) -> Self:
        return self._each(lambda td: td.clone(recurse))

    def _own_copy(self) -> Self:
        return self._each(lambda td: td._own_copy())

    def _to(self, device: torch.device | None, dtype: torch.dtype | None, non_blocking: bool) -> Self:
        return self._each(lambda td: td._to(device, dtype, non_blocking))

    def to(self, *args: Any, **kwargs: Any) -> Self:
        if kwargs.pop("inplace", False):
            if "batch_size" in kwargs:
                self.batch_size = kwargs.pop("batch_size")
            for td in self._tds:
                td.to(*args, inplace=True, **kwargs)
            return self
        return super().to(*args, **kwargs)

    def detach(self) -> Self:
        return self._each(lambda td: td.detach())

    @property
    def data(self) -> Self:
        return self._each(lambda td: td.data)

    @property
    def grad(self) -> Self | None:
        grads = [td.grad for td in self._tds]
        if all(g is None for g in grads):
            return None
        made = self._of(
            [td.empty() if g is None else g for td, g in zip(self._tds, grads, strict=True)], self._stack_dim
        )
        return made.lock_() if self.is_locked else made

    def _expanded_as(self, other: Any, lead: int) -> Self:
        try:
            dense: Self = self._resident()
        except UnevenError:
            d = self._stack_dim + lead
            parts = other.unbind(d)
            if len(parts) != len(self._tds):
                raise BatchSizeError(
                    f"cannot expand a batch size of {list(self._batch_size)} to {list(other.batch_size)}"
                ) from None
            made = [td._expanded_as(part, lead) for td, part in zip(self._tds, parts, strict=True)]
            return self._of(made, d, self._dim_name)
        return dense._expanded_as(other, lead)

    def data_ptr(self, *, storage: bool = False) -> TensorDictBase:
        return self._resident_class({str(i): td.data_ptr(storage=storage) for i, td in enumerate(self._tds)}, [])

    def to_tensordict(self, *, retain_none: bool | None = None) -> TensorDict:
        """Return a plain in-memory TensorDict: the stack, made dense.

        Raises:
            UnsupportedError: elements that differ in shape; `densify()` takes them, as nested tensors.
        """
        made: TensorDict = without_classes(self._resident(), retain_none)
        return made

    def to_dict(
        self,
        *,
        retain_none: bool = True,
        convert_tensors: bool | Literal["numpy"] = False,
        tolist_first: bool = False,
    ) -> dict[str, Any]:
        keys = [set(td.keys(True)) for td in self._tds]
        if any(k != keys[0] for k in keys):
            raise UnevenError(
                "to_dict: the elements of this lazy stack have different keys",
                hint="[td.to_dict() for td in stack.tensordicts]",
            )
        return super().to_dict(retain_none=retain_none, convert_tensors=convert_tensors, tolist_first=tolist_first)

    def empty(
        self,
        recurse: bool = False,
        *,
        batch_size: SizeLike | None = None,
        device: DeviceLike | None = NO_DEFAULT,
        names: NamesLike = None,
    ) -> Self:
        if batch_size is not None:
            return super().empty(recurse, batch_size=batch_size, device=device, names=names)
        made = self._each(lambda td: td.empty(recurse, device=device))
        if names is not None:
            made.names = names
        return made

    def _without_values(self) -> Any:
        return self._each(lambda td: td._without_values())

    def select(self, *keys: NestedKey, inplace: bool = False, strict: bool = True, as_tensordict: bool = False) -> Self:
        if inplace:
            self._free("select")
        made = [td.select(*keys, inplace=inplace, strict=strict) for td in self._tds]
        return self if inplace else self._of(made, self._stack_dim, self._dim_name, self._empty_batch_size)

    def exclude(self, *keys: NestedKey, inplace: bool = False) -> Self:
        if inplace:
            self._free("exclude")
        made = [td.exclude(*keys, inplace=inplace) for td in self._tds]
        return self if inplace else self._of(made, self._stack_dim, self._dim_name, self._empty_batch_size)

    def _selected(self, wanted: dict[str, Any]) -> Self:
        return self._each(lambda td: td._selected(wanted))

    def filter_non_tensor_data(self) -> Self:
        return self._each(lambda td: td.filter_non_tensor_data())

    def filter_empty_(self) -> Self:
        for td in self._tds:
            td.filter_empty_()
        return self

    def split_keys(self, *key_sets: Iterable[NestedKey], inplace: bool = False, **kwargs: Any) -> tuple[Self, ...]:
        # Elements share what can be iterated over only once; a dict gives other names.
        sets = [s if isinstance(s, (str, dict)) else as_list(s, "key_set", KEY_SET) for s in key_sets]
        made = [td.split_keys(*sets, inplace=inplace, **kwargs) for td in self._tds]
        parts = tuple(self._of(column, self._stack_dim, self._dim_name) for column in zip(*made, strict=True))
        return (*parts[:-1], self) if inplace else parts

    def flatten_keys(
        self, separator: str = ".", inplace: bool = False, is_leaf: Callable[[type], bool] | None = None
    ) -> Self:
        return self._rekeyed(
            lambda td: td.flatten_keys(separator, inplace, is_leaf), inplace, lambda v: v.unflatten_keys(separator)
        )

    def unflatten_keys(self, separator: str = ".", inplace: bool = False) -> Self:
        return self._rekeyed(
            lambda td: td.unflatten_keys(separator, inplace), inplace, lambda v: v.flatten_keys(separator)
        )

    def _rekeyed(self, fn: Callable[[Any], Any], inplace: bool, undo: Callable[[Any], Any]) -> Self:
        if inplace:
            self._free("change the key structure")
            for td in self._tds:
                fn(td)
            return self
        made = self._each(fn)
        made._undo = (weakref.ref(self), undo)
        return made

    # -- apply -------------------------------------------------------------------------------
    def _mapped(self, plan: Mapper, others: Sequence[Any], path: Path, batch: torch.Size) -> Any:
        if batch != self._batch_size:
            return super()._mapped(plan, others, path, batch)
        columns = [self._per_element(o) for o in others]
        made = [td._mapped(plan, [c[i] for c in columns], path, td._batch_size) for i, td in enumerate(self._tds)]
        if made and all(m is None for m in made):
            return None
        full = [td.empty() if m is None else m for td, m in zip(self._tds, made, strict=True)]
        return self._of(full, self._stack_dim, self._dim_name, self._empty_batch_size)

    def apply_(self, fn: Callable[..., object], *others: Container, **kwargs: Any) -> Self:
        check_trees(others)
        self._check_all_writable()
        columns = [self._per_element(o, to_write=True) for o in others]
        for i, td in enumerate(self._tds):
            td.apply_(fn, *[c[i] for c in columns], **kwargs)
        return self

    # -- reductions --------------------------------------------------------------------------
    def _reduced(self, kind: Reduction, over: Over, keepdim: bool, batch_size: torch.Size, names: Names) -> Any:
        """Reduce: stack first where that is possible and in memory, else merge the results of the elements."""
        if all(isinstance(td, LeafwiseTree) for td in self._tds):
            try:
                return self._resident()._reduced(kind, over, keepdim, batch_size, names)
            except UnevenError:
                pass
        return self._merged_over(kind, over, keepdim, batch_size, names)

    def _over_leaves_of(self, fn: Any, over: Over, batch_size: torch.Size, names: Names) -> Any:
        return self._resident()._over_leaves_of(fn, over, batch_size, names)

    def _merged_over(self, kind: Reduction, over: Over, keepdim: bool, batch: torch.Size, names: Names) -> Any:
        d = self._stack_dim
        if over.features or (over.dims is not None and d not in over.dims):
            inner = None if over.dims is None else tuple(x - (x > d) for x in over.dims)
            below = Over(inner, over.features, over.batch_dims - 1)
            place = d if over.features or keepdim else d - sum(x < d for x in over.dims or ())
            made = []
            for td in self._tds:
                left = td._batch_size if over.features else reduced_size(td._batch_size, inner or (), keepdim)
                made.append(td._reduced(kind, below, keepdim, left, None))
            stack = self._of(made, place)
            try:
                dense = stack._resident()
            except UnevenError:
                return stack
            dense._set_names(names)
            return dense
        if kind.part is None or kind.merge is None or kind.finish is None:
            return self._resident()._reduced(kind, over, keepdim, batch, names)
        if over.dims is not None:
            self._even("this reduction")
        states: dict[Path, State] = {}
        for td in self._tds:
            leaves = td._walkable()
            for path in self._leaf_paths():
                if over.dims is None and not keepdim:  # shapes do not matter: stacks below may be uneven
                    parts = [kind.part(piece.flatten(), (0,), False) for piece in pieces(leaves, path)]
                else:
                    parts = [kind.part(*over.of(leaves[path].unsqueeze(d)), keepdim)]
                for new in parts:
                    states[path] = merge_states(kind, path, states[path], new) if path in states else new
        out = self._resident_class._new({}, batch, self._device, names)
        for path, state in states.items():
            out.set(path, kind.finish(state))
        return out

    def _leaf_paths(self) -> list[Path]:
        return [k if isinstance(k, tuple) else (k,) for k in self.keys(True, True)]

    def _over_leaves(self, kind: Reduction, over: Over, keepdim: bool) -> Tensor:
        if over.features or over.dims is not None:
            return self._resident()._over_leaves(kind, over, keepdim)  # type: ignore[no-any-return]
        return super()._over_leaves(kind, over, keepdim)

    # -- shapes ------------------------------------------------------------------------------
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
        made = self._moved(fn, trace(fn, self._batch_size, self._stack_dim), batch_size, names)
        if undo is not None and made is not self:
            made._undo = (weakref.ref(self), undo)
        if keep_lock and self._state & LOCKED:
            made.lock_()
        return made

    def _moved(
        self, fn: Callable[[Tensor], Tensor], traced: list[Traced] | None, batch_size: torch.Size, names: Names
    ) -> Any:
        return self._copied(fn, batch_size, names) if traced is None else self._view_of(fn, traced[0], names)

    def _move_tree(self, fn: Callable[[Tensor], Tensor], new: torch.Size, names: Names, n: int) -> Any:
        """Move this stack as part of a TensorDict of `n` batch dimensions."""
        traced = trace(fn, self._batch_size, self._stack_dim)
        if traced is None and (wants_view(fn, self._batch_size) or self._is_flattened(fn, new)):
            self._even("view")
            places = fn(torch.arange(self._batch_size.numel(), device="cpu").reshape(self._batch_size))
            made = self._row_by_row(places.flatten().tolist(), places.shape)
            if names is not None:
                made._set_names(names)
            return made
        return self._moved(fn, traced, new, names)

    def _is_flattened(self, fn: Callable[[Tensor], Tensor], new: torch.Size) -> bool:
        """Return whether a move makes one dimension of all, so that rows share memory with the elements."""
        if len(new) != 1 or self._ragged or new[0] != self._batch_size.numel():
            return False
        places = torch.arange(new[0], device="cpu")
        return torch.equal(fn(places.reshape(self._batch_size)), places)

    def _row_by_row(self, places: Iterable[int], shape: Sequence[int]) -> Any:
        """Stack the rows at flat positions to a batch of `shape`; they share memory with the elements."""
        d = self._stack_dim
        spots = list(itertools.product(*map(range, self._batch_size)))
        rows = [spots[place] for place in places]
        return self._nest(self._singly((row[d], (*row[:d], *row[d + 1 :])) for row in rows), shape, 0)

    def _view_of(self, fn: Callable[[Tensor], Any], found: Traced, names: Names) -> Self:
        """Move elements one by one, where `fn` makes nothing but views of them."""
        rows = found.rows
        if isinstance(rows, int):
            made: Self = self._moved_element(rows, fn, found, 0)
        else:
            parts = [self._moved_element(row, fn, found, i) for i, row in enumerate(rows)]
            place = found.dims[0]
            made = self._nest(parts, found.shape, place) if parts else self._of((), place, None, self._inner)
        if made._names != names:
            made = made._shallow() if found.same else made  # the elements keep their own names
            made._set_names(names)
        return made

    def _moved_element(self, row: int, fn: Callable[[Tensor], Any], found: Traced, number: int) -> Any:
        td = self._tds[row]
        if found.same:
            return td
        d, n = self._stack_dim, len(self._tds)
        at: Any = np.unravel_index(number, found.shape) if found.dims else ()

        def one(t: Tensor) -> Tensor:
            out: Tensor = fn(t.unsqueeze(d).expand(*t.shape[:d], n, *t.shape[d:]))
            for dim, i in sorted(zip(found.dims, at, strict=False), reverse=True):
                out = out.select(dim, int(i))
            return out

        return td._move(one, one(torch.empty(td._batch_size, device="meta")).shape, None, keep_lock=False, views=True)

    def _repeated(self, times: tuple[int, ...], names: Names) -> Self:
        d = self._stack_dim
        inner = (*times[:d], *times[d + 1 :])
        parts = [
            td._repeated(inner, td._dim_names()) if inner else td.clone() for _ in range(times[d]) for td in self._tds
        ]
        return self._restacked(parts, names) if parts else super()._repeated(times, names)

    def _interleaved(self, repeats: Any, at: int, output_size: int | None, new: torch.Size, names: Names) -> Self:
        d = self._stack_dim
        if at == d:
            counts = torch.as_tensor(repeats).expand(len(self._tds)).tolist()
            parts = [td.clone() for td, many in zip(self._tds, counts, strict=True) for _ in range(many)]
        else:
            parts = [td.repeat_interleave(repeats, at - (at > d), output_size=output_size) for td in self._tds]
        return self._restacked(parts, names) if parts else super()._interleaved(repeats, at, output_size, new, names)

    def _restacked(self, parts: list[Any], names: Names) -> Self:
        """Stack copies of elements as they were stacked."""
        for td in parts:
            td._undo = None
        made = self._of(parts, self._stack_dim, self._dim_name)
        made._set_names(names)
        return made.lock_() if self._state & LOCKED else made

    def _copied(self, fn: Callable[[Tensor], Tensor], batch_size: torch.Size, names: Names) -> Any:
        try:
            return self._resident()._move(fn, batch_size, names, keep_lock=False)
        except UnevenError:
            if self._ragged:
                raise
        places = torch.arange(self._batch_size.numel(), device="cpu").reshape(self._batch_size)
        there = fn(places)
        if not torch.equal(fn(places + len(places.flatten())), there + len(places.flatten())):
            raise UnevenError(
                "this operation needs dense leaves, and the elements of the lazy stack differ in shape",
                hint="iterate over td.tensordicts, or td.apply(...) leaf by leaf",
            )
        made: Self = self._gathered(there)
        made._set_names(names)
        return made

    def _fan_out(
        self,
        fn: Callable[[Tensor], Sequence[Tensor]],
        batch_sizes: Sequence[torch.Size],
        names: Names,
        *,
        keep_lock: bool = False,
    ) -> Any:
        traced = trace(fn, self._batch_size, self._stack_dim)
        if traced is None:
            return self._resident()._fan_out(fn, batch_sizes, names)

        def part(k: int) -> Callable[[Tensor], Tensor]:
            return lambda t: fn(t)[k]

        return tuple(self._view_of(part(k), found, names) for k, found in enumerate(traced))

    def _fan_tree(
        self, fn: Callable[[Tensor], Sequence[Tensor]], batch_sizes: Sequence[torch.Size], names: Names
    ) -> Any:
        return self._fan_out(fn, batch_sizes, names)

    def unbind(self, dim: int = 0) -> tuple[Any, ...]:
        """Return a tuple of one TensorDict per index of `dim`: along the stack dimension, the elements themselves."""
        d = self._stack_dim
        at = as_dim(dim, len(self._inner) + 1)
        if at == d:
            return tuple(self._tds)
        inner = at - (at > d)
        if self._inner[inner] < 0:
            self._even("unbind")
        place = d - (at < d)
        columns = zip(*(td.unbind(inner) for td in self._tds), strict=True)
        return tuple(self._of(column, place, self._dim_name) for column in columns)

    def unsqueeze(self, dim: int) -> Self:
        at, d = as_dim(dim, len(self._inner) + 2), self._stack_dim
        old = self._batch_size
        place = d + (at <= d)
        made = self._of(
            (td.unsqueeze(at - (at > d)) for td in self._tds), place, self._dim_name, self._empty_batch_size
        )
        for td in made._tds:
            td._undo = None
        made._undo = (weakref.ref(self), lambda v: v.squeeze(at) if -1 in old else v.reshape(old))
        return made

    def narrow(self, dim: int, start: int, length: int) -> Self:
        at = as_dim(dim, len(self._inner) + 1)
        torch.empty(self._batch_size, device="meta").narrow(at, start, length)  # torch checks the range
        first = start + self._batch_size[at] if start < 0 else start
        made: Self = self._at((*(_ALL,) * at, slice(first, first + length)))
        return made

    def view(
        self, *shape: SizeLike | torch.dtype, size: SizeLike | None = None, batch_size: SizeLike | None = None
    ) -> Self:
        """View the batch as `shape`, sharing memory; where the stack dimension is merged, row by row."""
        if shape and isinstance(shape[0], torch.dtype):
            return self._bytes_as(shape[0], batch_size)
        self._even("view")
        old = self._batch_size
        wanted = size if size is not None else batch_size if batch_size is not None else flat_args(shape)
        new = view_shape(old, as_size(wanted))
        if new == old:
            return self._return_unchanged()
        n = len(old)
        lead = len(new) - n + 1
        if not self._stack_dim and self._tds and self._names is None and lead > 1 and new[lead:] == old[1:]:
            split: Self = self._nest(list(self._tds), new[:lead], 0)  # the stack dimension alone, into several
            split._undo = (weakref.ref(self), lambda v: v.reshape(old))
            return split.lock_() if self._state & LOCKED else split

        def fn(t: Tensor) -> Tensor:
            return t.view((*new, *t.shape[n:]))

        if not merges_dims(old, new) and trace(fn, old, self._stack_dim) is not None:
            found: Self = self._move(fn, new, None, lambda v: v.reshape(old))
            return found
        made = self._row_by_row(range(old.numel()), new)
        made._undo = (weakref.ref(self), lambda v: v.reshape(old))
        result: Self = made.lock_() if self._state & LOCKED else made
        return result

    def _bytes_as(self, dtype: torch.dtype, batch_size: Any) -> Self:
        if batch_size is not None:
            return super()._bytes_as(dtype, batch_size)
        made = self._each(lambda td: td._bytes_as(dtype, None))
        old = list(self.keys(True, True))
        made._offer((weakref.ref(self), lambda v: v.exclude(*old)))
        return made

    def reshape(
        self, *args: SizeLike, shape: SizeLike | None = None, size: SizeLike | None = None, inplace: bool = False
    ) -> Self:
        """View where the result has one dimension or keeps the stack dimension separate; else copy."""
        old = self._batch_size
        wanted = shape if shape is not None else size if size is not None else flat_args(args)
        new = old if self._ragged else view_shape(old, as_size(wanted))
        made = self.view(new) if len(new) == 1 and len(old) > 1 else super().reshape(*args, shape=shape, size=size)
        return self._apply_inplace_result(made, "reshape", inplace)

    def _flattened(self, start_dim: int | None, end_dim: int | None) -> Any:
        n = self.batch_dims
        first = 0 if start_dim is None else as_dim(start_dim, n)
        last = n - 1 if end_dim is None else as_dim(end_dim, n)
        if first == last:
            return self._return_unchanged()
        if (first, last) == (0, n - 1) and not self._ragged:
            return self.view(-1)
        return super()._flattened(start_dim, end_dim)

    # -- dense -------------------------------------------------------------------------------
