"""Entries that are not tensors: one value for the whole batch, or one per position.

Both answer to the shape operations of a batch through a tensor of positions, so that whatever torch can do to a shape
works here too, and nothing is written twice. Views and copies are those of a tensor: rows written through a slice are
seen by all that share them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor

from tdstore.container.values import typed_metadata
from tdstore.container.values.codecs import to_plain
from tdstore.container.values.elements import Element, Elements, PutPlan, evened, set_each, spread_over
from tdstore.container.values.equality import alike, equal
from tdstore.container.values.lazy_gather import (
    MANY,
    GatherRegistry,
    LazyGather,
    PartValues,
    counted,
    repeats,
    stacked_positions,
)
from tdstore.container.values.linked_lists import LinkedList
from tdstore.container.values.methods import ValueMethods
from tdstore.container.values.nested_lists import as_text, levels, levels_of, nested, stack_text
from tdstore.container.values.shapes import ValueShapes
from tdstore.errors import BatchSizeError, DimensionError, InvalidStateError, KeyNotFoundError
from tdstore.index.index_terms import on_cpu
from tdstore.index.shapes import as_dim, as_size
from tdstore.ops.rearrange import Padding
from tdstore.settings import capture_non_tensor_stack
from tdstore.threads import complete
from tdstore.types import NamesLike


class NonTensor(ValueShapes):
    """Base of all kinds. `batch_size` is that of the TensorDict that holds it."""

    __slots__ = ()
    batch_size: torch.Size
    device: torch.device | None = None
    _container: ClassVar[Any]
    """`TensorDict`, which stands above this module; below, its form that is saved for a value by itself."""
    _stored_form: Callable[..., Any]

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        joined = {torch.stack: torch.stack, torch.cat: torch.cat, torch.concat: torch.cat}.get(func)
        if joined is not None:
            return _joined(joined, *args, **(kwargs or {}))
        if func in (torch.eq, torch.ne, Tensor.eq, Tensor.ne) and len(args) == 2:
            mine, theirs = args if isinstance(args[0], NonTensor) else args[::-1]
            return mine._compared(theirs, equal=func in (torch.eq, Tensor.eq))
        if func is torch.where and len(args) == 3 and isinstance(args[1], NonTensor):
            return args[1].where(args[0], args[2])
        if args and isinstance(args[0], NonTensor) and callable(method := getattr(args[0], func.__name__, None)):
            return method(*args[1:], **(kwargs or {}))
        return NotImplemented

    # -- values ------------------------------------------------------------------------------
    def plain(self) -> Any:
        """Return what `td[key]` returns: the value, or nested lists of values."""
        raise NotImplementedError

    def tolist(self, **kwargs: Any) -> Any:
        """Return nested lists of values, one level per batch dimension."""
        return nested(self.flat(), self.batch_size)

    def to_dict(self, **kwargs: Any) -> Any:
        """Return the value, as `plain` does."""
        return self.plain()

    def flat(self) -> list[Any]:
        """Return the values of all positions in C order."""
        raise NotImplementedError

    def positions(self) -> Tensor:
        """Return an int64 tensor of the batch's shape; positions with equal numbers show one value."""
        return torch.zeros((), dtype=torch.int64, device="cpu").expand(self.batch_size)

    def to_json(self) -> dict[str, Any]:
        """Return the value record for a header; raise `TypeError` for a value that is not plain data."""
        raise NotImplementedError

    def lies_in(self, handle: Any, path: tuple[str, ...]) -> bool:
        """Check whether writes into this entry reach a store already."""
        return False

    def same(self, other: object) -> bool:
        """Check whether both hold equal values at every position."""
        if not isinstance(other, NonTensor) or self.batch_size != other.batch_size:
            return False
        try:
            return bool(self.tolist() == other.tolist())
        except (TypeError, ValueError, RuntimeError):
            return False  # values that cannot be compared as a whole, such as arrays

    def equal_values(self, other: object) -> Tensor:
        """Return a bool tensor of the batch: where both hold equal values."""
        if isinstance(other, NonTensor) and other.batch_size != self.batch_size:
            raise BatchSizeError(f"cannot compare batches of {list(self.batch_size)} and {list(other.batch_size)}")
        theirs = other.flat() if isinstance(other, NonTensor) else [other] * self.numel()
        pairs = zip(self.flat(), theirs, strict=True)
        return torch.tensor([alike(a, b) for a, b in pairs], dtype=torch.bool).reshape(self.batch_size)

    def __eq__(self, other: object) -> Any:
        return self._compared(other, equal=True)

    def __ne__(self, other: object) -> Any:
        return self._compared(other, equal=False)

    def _compared(self, other: object, *, equal: bool) -> Any:
        """Return a bool tensor for an entry, and an empty one of the batch for numbers and tensors."""
        if isinstance(other, NonTensor):
            wide = torch.broadcast_shapes(self.batch_size, other.batch_size)
            found = self.expand(wide).equal_values(other.expand(wide))
            return found if equal else ~found
        if isinstance(other, (bool, int, float, complex, Tensor, np.ndarray, np.generic)):
            return self._container(batch_size=self.batch_size)
        return not equal

    __hash__ = None  # type: ignore[assignment]

    def written(self, index: Any, part: NonTensor) -> NonTensor:
        """Write an entry at an index: this entry where it can take it, else a new one."""
        raise NotImplementedError

    # -- shapes ------------------------------------------------------------------------------
    def joined(self, parts: Sequence[NonTensor], fn: Callable[[list[Tensor]], Tensor]) -> NonTensor | None:
        """Join all parts (this entry is the first) into one entry, or return None where `merge` has to."""
        return None

    def for_batch(self, batch_size: torch.Size) -> NonTensor | None:
        """Return the entry for any other batch, if it holds one value for all; else None."""
        return None

    def move(self, fn: Callable[[Tensor], Tensor]) -> NonTensor:
        """Apply a shape operation, given as a function on a tensor of the batch's shape."""
        raise NotImplementedError

    def __getitem__(self, index: Any) -> NonTensor:
        if not self.batch_size and isinstance(index, (int, slice)):
            raise DimensionError(f"an entry without batch dimensions cannot be indexed with {index!r}")
        return self.move(lambda t: t[on_cpu(index)])

    def rows(self, rows: Tensor) -> NonTensor:
        """Return rows of the first dimension, in range, as an entry of its own."""
        return self.move(lambda t: t[on_cpu(rows)])

    def clone(self, recurse: bool = True) -> NonTensor:
        """Copy the entry and its values; with `recurse=False`, share the values."""
        return self.own_values() if recurse else self.move(lambda t: t[...])

    def own_values(self) -> NonTensor:
        """Return the result of `own_copy`, with copies of the values that can be changed."""
        return self.own_copy()

    def own_copy(self) -> NonTensor:
        """Return an independent entry: rows written in one do not appear in the other."""
        return self

    def contiguous(self, *, canonical: bool = False, inplace: bool = False) -> NonTensor:
        """Return the entry itself."""
        return self

    def where(self, condition: Tensor, other: Any, *, out: Any = None, pad: Any = None) -> NonTensor:
        """Select values of this entry where `condition` is true, of `other` elsewhere, into `out` if given."""
        theirs = other if isinstance(other, NonTensor) else NonTensorData(other)
        wide = torch.broadcast_shapes(condition.shape, self.batch_size, theirs.batch_size)
        rows = zip(
            condition.expand(wide).flatten().tolist(), self.expand(wide).flat(), theirs.expand(wide).flat(), strict=True
        )
        values = [mine if here else yours for here, mine, yours in rows]
        at = torch.arange(len(values), device="cpu").reshape(wide)
        made = NonTensorStack._make(values, at) if wide else NonTensorData(values[0])
        return made if out is None else out.update(made)

    def to(self, *args: Any, **kwargs: Any) -> NonTensor:
        """Return the entry itself: values have no device."""
        return self

    def maybe_to_stack(self) -> NonTensor:
        """Return one value per position, so that rows can differ; without batch dimensions, the entry itself."""
        return self

    @classmethod
    def from_list(cls, non_tensors: list[Any]) -> NonTensor:
        """Build one value per position from nested lists; the leading levels of equal length are batch dimensions."""
        return NonTensorStack.from_list(non_tensors)

    @staticmethod
    def is_non_tensor() -> bool:
        """Return True."""
        return True


class NonTensorData(Element, NonTensor, ValueMethods):
    """One value for the whole batch.

    Example:
        >>> NonTensorData("hello", batch_size=[3]).data
        'hello'
        >>> NonTensorData("hello", batch_size=[3]).tolist()
        ['hello', 'hello', 'hello']
    """

    __slots__ = ("_data", "_names", "_source", "batch_size")
    _source: tuple[NonTensorStack, Tensor]
    _stays = False
    """Whether equal values stay one value when they are stacked."""

    def __init__(self, data: Any, batch_size: Any = None, device: object = None, names: NamesLike = None) -> None:
        self._data = data.data if isinstance(data, NonTensorData) else list(data) if type(data) is LinkedList else data
        self.batch_size = as_size(batch_size)
        self._names: tuple[str | None, ...] | None = None if names is None else tuple(names)

    def plain(self) -> Any:
        """Return the value itself."""
        return self._data

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the value, which is a function."""
        return self.data(*args, **kwargs)

    def flat(self) -> list[Any]:
        return [self.data] * self.numel()

    def same(self, other: object) -> bool:
        if isinstance(other, NonTensorData):
            return self.batch_size == other.batch_size and equal(self.data, other.data)
        return super().same(other)

    def tolist(self, **kwargs: Any) -> Any:
        """Return nested lists of the value, one level per batch dimension; without any, the value itself."""
        return super().tolist() if self.batch_size else self.data

    def move(self, fn: Callable[[Tensor], Tensor]) -> NonTensorData:
        """Return the same value for the new batch."""
        return self.for_batch(fn(torch.empty((), device="cpu").expand(self.batch_size)).shape)

    def spread(self, fn: Callable[[Tensor], Sequence[Tensor]]) -> list[NonTensor]:
        """Return the same value for each new batch."""
        return [self.for_batch(part.shape) for part in fn(torch.empty((), device="cpu").expand(self.batch_size))]

    def maybe_to_stack(self) -> NonTensor:
        return NonTensorStack.from_nontensordata(self)

    def pad(self, pad_size: Sequence[int], value: float = 0.0, inplace: bool = False, safe: bool = True) -> NonTensor:
        """Pad the batch as `TensorDict.pad` does: one value per position, and None in the padding.

        Raises:
            BatchSizeError: `inplace`: a stack is another object.
        """
        if inplace:
            raise BatchSizeError("pad of a NonTensorData gives a NonTensorStack: it cannot be done in place")
        found = [self.data] * self.numel()
        return NonTensorStack._make(*Padding.of(self.batch_size, pad_size, value).of_values(found, self.batch_size))

    def for_batch(self, batch_size: torch.Size) -> NonTensorData:
        cls, data = type(self), self.data
        checked = cls is NonTensorData and type(data) is not LinkedList
        return cls._unchecked(data, batch_size) if checked else cls(data, batch_size)

    @classmethod
    def _unchecked(cls, data: Any, batch_size: torch.Size) -> Self:
        made = cls.__new__(cls)
        made._data, made.batch_size, made._names = data, batch_size, None
        return made

    def written(self, index: Any, part: NonTensor) -> NonTensor:
        if isinstance(part, NonTensorData) and equal(self.data, part.data):
            return self
        made = self.maybe_to_stack()
        return made.written(index, part) if made is not self else NonTensorData(part.flat()[0])

    def to_json(self) -> dict[str, Any]:
        """Return `{"data": value}`."""
        return {"data": to_plain(self.data), **({"meta": True} if self._stays else {})}

    def __repr__(self) -> str:
        return f"{type(self).__name__}(data={self.data}, batch_size={self.batch_size}, device=None)"


class MetaData(NonTensorData):
    """One value that describes the batch as a whole: stacks of equal ones stay one value.

    `MetaData[int]` is a subclass that takes values of that type only.

    Raises:
        TypeError: the value is of another type than the class says.

    Example:
        >>> torch.stack([MetaData("v1"), MetaData("v1")])
        MetaData(data=v1, batch_size=torch.Size([2]), device=None)
        >>> isinstance(MetaData[int](3), MetaData[int])
        True
    """

    __slots__ = ()
    _stays = True
    _kind: ClassVar[tuple[Any] | None] = None
    """The type of the values, where the class has one."""

    def __init__(self, data: Any, batch_size: Any = None, device: object = None, names: object = None) -> None:
        super().__init__(data, batch_size)
        if self._kind is not None:
            typed_metadata.check(type(self), self.data)

    def __class_getitem__(cls, kind: Any) -> Any:
        return typed_metadata.class_for(cls, kind)

    def for_batch(self, batch_size: torch.Size) -> MetaData:
        return self._unchecked(self.data, batch_size)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return super().__reduce_ex__(protocol) if self._kind is None else typed_metadata.reduced(self)


SHOWN = 100
"""A repr lists at most so many values."""


class NonTensorStack(Elements, NonTensor, ValueMethods):
    """One value per batch position.

    Args:
        *values: one per row, or nested lists of them as `from_list` takes.
        batch_size: is compared with that of the values.

    Example:
        >>> stack = NonTensorStack("a", "b")
        >>> stack[1].data
        'b'
        >>> stack[1] = "c"
        >>> stack.tolist()
        ['a', 'c']
    """

    __slots__ = ("_at", "_gathers", "_held", "_names", "_pool")
    _gathers: GatherRegistry | None
    _names: tuple[str | None, ...] | None
    _held: dict[str, Tensor] | None

    def __init__(
        self, *values: Any, stack_dim: int = 0, batch_size: Any = None, device: object = None, names: object = None
    ) -> None:
        rows = [v if isinstance(v, NonTensor) else NonTensorData(v) for v in evened(values, stack_dim)]
        made = merge(rows, lambda parts: torch.stack(parts, stack_dim)) if rows else None
        self._pool: Any = made._pool if isinstance(made, NonTensorStack) else []
        self._at: Tensor = made._at if isinstance(made, NonTensorStack) else torch.arange(0, device="cpu")
        self._gathers = made._gathers if isinstance(made, NonTensorStack) else None
        self._held = None
        if batch_size is not None and as_size(batch_size) != self._at.shape:
            raise BatchSizeError(f"batch_size={list(as_size(batch_size))} for a stack of {list(self._at.shape)}")

    @classmethod
    def _make(cls, pool: Any, at: Tensor, gathers: GatherRegistry | None = None) -> Self:
        stack = cls.__new__(cls)
        if gathers is None and type(pool) in (list, LazyGather) and not torch.compiler.is_compiling():
            gathers = GatherRegistry()
        stack._pool, stack._at, stack._held, stack._gathers = pool, at, None, gathers
        return stack

    @classmethod
    def from_list(cls, non_tensors: list[Any], ndim: int | None = None) -> NonTensorStack:
        """Build a stack from `ndim` levels of nested lists, or from as many levels as have lists of one length."""
        shape, pool = levels(non_tensors, ndim)
        pool = [v.data if isinstance(v, NonTensorData) else v for v in pool]
        return NonTensorStack._make(pool, torch.arange(len(pool), device="cpu").reshape(shape))

    @classmethod
    def from_nontensordata(cls, non_tensor: NonTensorData) -> NonTensor:
        """Repeat the reference at each position; without batch dimensions, return the entry itself."""
        if not non_tensor.batch_size:
            return non_tensor
        n = non_tensor.numel()
        return NonTensorStack._make([non_tensor.data] * n, torch.arange(n, device="cpu").reshape(non_tensor.batch_size))

    one = NonTensorData
    """The entry of one value."""

    @property
    def batch_size(self) -> torch.Size:  # type: ignore[override]
        """Shape of the batch."""
        return self._at.shape

    @property
    def data(self) -> list[Any]:
        """The values, as `tolist`."""
        return self.tolist()  # type: ignore[no-any-return]

    def plain(self) -> list[Any]:
        """Return the values as `tolist` does; a list element that is set (`td[key][0] = "x"`) is set here."""
        return LinkedList.over(self)

    def positions(self) -> Tensor:
        return self._at

    def flat(self) -> list[Any]:
        pool = self._pool
        values = pool.values() if type(pool) is LazyGather else pool
        return list(map(values.__getitem__, self._at.flatten().tolist()))

    # -- shapes ------------------------------------------------------------------------------
    def move(self, fn: Callable[[Tensor], Tensor]) -> NonTensor:
        """Return the values in the order of the operation; None in new rows."""
        if isinstance(fn, Padding):
            return NonTensorStack._make(*fn.of_values(self.flat(), self.batch_size))
        try:
            at = fn(self._at)
        except RuntimeError:  # `view` of positions that repeat: no caller sees their memory
            at = fn(self._at.contiguous())
        return self._select(at)

    def spread(self, fn: Callable[[Tensor], Sequence[Tensor]]) -> list[NonTensor]:
        """Return the values in the order of the operation, one entry per result."""
        return [self._select(at) for at in fn(self._at)]

    def _select(self, at: Tensor) -> NonTensor:
        of_part = type(self._pool) is PartValues and at.ndim < self._at.ndim and at.numel() and not any(at.stride())
        if not at.ndim or (of_part and self._shares(at)):
            made = NonTensorData(self._one(at.flatten()[0]) if at.ndim else self._one(at), at.shape)
            if not torch.compiler.is_compiling():
                made._source = (self, at)
            return made
        return self._make(self._pool, at, self._gathers) if self._shares(at) else self._copied(at)

    def _one(self, at: Tensor) -> Any:
        return self._pool[int(at)]

    def rows(self, rows: Tensor) -> NonTensor:
        return self._copied(self._at.index_select(0, rows))

    def _shares(self, at: Tensor) -> bool:
        """Check whether positions are a view of these, as torch decides for tensors."""
        if torch.compiler.is_compiling():
            return False
        return at.untyped_storage().data_ptr() == self._at.untyped_storage().data_ptr()

    def _copied(self, at: Tensor) -> NonTensor:
        pool = self._pool
        if torch.compiler.is_compiling():
            return NonTensorStack._make(list(pool), at)  # what the positions are is known when it runs
        if type(pool) is LazyGather:
            pool = pool.values()
        flat = at.flatten()
        if self._gathers is not None and len(flat) >= MANY and type(pool) is list:
            values: Any = self._gathers.gather(pool, flat)
        else:
            values = list(map(pool.__getitem__, flat.tolist()))
        positions = counted(len(values))
        return NonTensorStack._make(values, positions if at.ndim == 1 else positions.reshape(at.shape))

    def own_copy(self) -> NonTensor:
        at = self._at
        if type(self._pool) is PartValues:
            return self._make(PartValues(self._pool), at)
        if isinstance(self._pool, list) and len(self._pool) <= 2 * at.numel() and not repeats(at):
            return NonTensorStack._make(list(self._pool), at.clone())
        return self._copied(at.clone())

    def pad(self, pad_size: Sequence[int], value: float = 0.0, inplace: bool = False, safe: bool = True) -> NonTensor:
        """Pad the batch with None, as `TensorDict.pad`; with `inplace`, this stack itself."""
        made = self.move(Padding.of(self.batch_size, pad_size, value))
        return self._become(made) if inplace else made

    def _become(self, other: Any) -> Self:
        """Take over the values and the batch of another stack."""
        self._pool, self._at, self._gathers, self._held = other._pool, other._at, other._gathers, other._held
        return self

    def own(self) -> NonTensorStack:
        """Return a stack of plain objects that no other stack writes into."""
        values = self.flat()
        return NonTensorStack._make(values, torch.arange(len(values), device="cpu").reshape(self.batch_size))

    # -- writing -----------------------------------------------------------------------------
    def __setitem__(self, index: Any, value: Any) -> None:
        if type(value) is list and value and (ndim := self._at[on_cpu(index)].ndim):
            value = self.from_list(value, levels_of(value, ndim))
        if assign(self, index, value) is not self:
            raise InvalidStateError("this stack has one value at several positions: clone() it before writing to it")

    def update(self, other: Any = None, inplace: bool = False, **kwargs: Any) -> Self:
        """Take over the values of another, position by position; of None nothing."""
        if other is not None:
            self[...] = other
        return self

    update_ = update

    def written(self, index: Any, part: NonTensor) -> NonTensor:
        if self.put(index, part):
            return self
        made = self.own()
        made.put(index, part)
        return made

    def put(self, index: Any, part: NonTensor) -> bool:
        """Write `part`, broadcast, at an index of the batch; False if that cannot be done in place."""
        if repeats(self._at) and type(self._pool) is not PartValues:
            return False
        values, placed = self.put_plan(index, part)
        complete(set_each, placed, values)
        return True

    def put_plan(self, index: Any, part: NonTensor) -> PutPlan:
        """Prepare what `put` does: the list, and where in it to write which value."""
        if repeats(self._at):
            self._become(self.own())
        places = self._at[on_cpu(index)]
        values = spread_over(part, places.shape)
        if self._gathers is not None:
            self._gathers.materialize()
        pool = self._pool.values() if type(self._pool) is LazyGather else self._pool
        return pool, zip(places.flatten().tolist(), values, strict=True)

    # -- in a store --------------------------------------------------------------------------
    def to_json(self) -> dict[str, Any]:
        """Return `{"stack": nested lists, "dim": 0, "ndim": levels}`."""
        values = nested([to_plain(v) for v in self.flat()], self.batch_size)
        return {"stack": values, "dim": 0, "ndim": self._at.ndim}

    def _raw(self, key: str) -> Tensor:
        """Return one of the two leaves that a store holds for many values, as `describe` made them."""
        if self._held is None:
            raise KeyNotFoundError(key)
        return self._held[key]

    def __copy__(self) -> Self:
        return self._make(self._pool, self._at, self._gathers)

    def __getstate__(self) -> Any:
        pool = self._pool.values() if type(self._pool) is LazyGather else list(self._pool)
        return None, {"_pool": pool, "_at": self._at, "_held": self._held}

    def __setstate__(self, state: Any) -> None:
        for name, value in state[1].items():
            setattr(self, name, value)
        self._gathers = GatherRegistry() if type(self._pool) is list else None

    def __repr__(self) -> str:
        if self.numel() <= SHOWN:
            return as_text(repr(self.tolist()), self.batch_size)
        return stack_text(self[:3].flat() if self.ndim == 1 else ["..."], self.batch_size)


def _joined(fn: Any, tensors: Sequence[Any], dim: int = 0, *, out: Any = None) -> NonTensor:
    at = as_dim(dim, tensors[0].ndim + (fn is torch.stack))
    uneven = fn is torch.stack and not at and len({part.batch_size for part in tensors}) > 1  # one list for each
    return NonTensorStack(*tensors) if uneven else merge(list(tensors), lambda p: fn(p, at), collapse=fn is torch.cat)


def merge(parts: list[NonTensor], fn: Callable[[list[Tensor]], Tensor], *, collapse: bool = False) -> NonTensor:
    """Join entries with a function on their position tensors, such as `torch.stack` or `torch.cat`.

    Args:
        collapse: give one `NonTensorData` when all parts hold one equal value, as `MetaData` always does.
    """
    first = parts[0]
    if (own := first.joined(parts, fn)) is not None:
        return own
    if isinstance(first, NonTensorData) and all(isinstance(p, NonTensorData) for p in parts):
        stays = all(p._stays for p in parts)  # type: ignore[attr-defined]
        if (collapse or stays or capture_non_tensor_stack()) and all(equal(p.data, first.data) for p in parts):  # type: ignore[attr-defined]
            return first.for_batch(fn([torch.empty((), device="cpu").expand(p.batch_size) for p in parts]).shape)
    if isinstance(first, NonTensorStack) and all(
        isinstance(p, NonTensorStack) and p._pool is first._pool and type(p) is type(first) for p in parts
    ):
        return first._copied(fn([p._at for p in parts]))  # type: ignore[attr-defined]
    single = not collapse and all(isinstance(p, NonTensorData) and p.ndim for p in parts)
    if single and (stacked := stacked_positions([p.batch_size for p in parts], fn)) is not None:
        return NonTensorStack._make(PartValues(p.plain() for p in parts), stacked)
    values = [value for part in parts for value in part.flat()]
    rows = torch.arange(len(values), device="cpu").split([part.numel() for part in parts])
    return NonTensorStack._make(values, fn([at.reshape(p.batch_size) for at, p in zip(rows, parts, strict=True)]))


def assign(target: NonTensor, index: Any, value: Any) -> NonTensor:
    """Write `value` (an entry, or one plain value) at an index: the target where it can take it, else a new entry."""
    return target.written(index, value if isinstance(value, NonTensor) else NonTensorData(value))
