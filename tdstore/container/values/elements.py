"""Single values: copies of mutable values, and writes through to the stack of a value."""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any, Self, TypeVar

import torch

from tdstore.container.values.lazy_gather import LazyGather, repeats
from tdstore.container.values.shapes import ValueShapes
from tdstore.errors import BatchSizeError, UnsupportedError
from tdstore.index.index_terms import on_cpu

if TYPE_CHECKING:
    from tdstore.container.values.nontensor import NonTensor

V = TypeVar("V")
PutPlan = tuple[list[Any], Iterator[tuple[int, Any]]]
"""A list, and what is to be written into it at which places."""
_UNCHANGING = {
    *(type(None), bool, int, float, complex, str, bytes, range, type, type(Ellipsis)),
    *(types.FunctionType, types.BuiltinFunctionType, types.ModuleType),
    *(torch.Size, torch.dtype, torch.device, torch.layout),
}


def unchanging(values: Iterable[Any]) -> bool:
    """Check whether the types of all values are immutable."""
    return _UNCHANGING.issuperset(map(type, values))


def copied(value: V) -> V:
    """Return a deep copy of a value; return the object itself where none is possible, as of a lock or an open file."""
    if type(value) in _UNCHANGING or isinstance(value, (type, Enum)) or torch.compiler.is_compiling():
        return value
    try:
        return copy.deepcopy(value)
    except TypeError:  # what deepcopy and pickle raise for objects that belong to one place or process
        return value


_LISTS = (dict, list, tuple)


def relisted(value: V) -> V:
    """Return dicts, lists and tuples made anew, level by level, around the same values."""
    made: Any = value
    if type(made) is dict:
        made = {key: relisted(item) for key, item in made.items()}
    elif type(made) in _LISTS:
        made = type(made)(map(relisted, made))
    return made  # type: ignore[no-any-return]


class Element:
    """Writes into an entry of one value. A value that was read from a stack writes into the stack, too."""

    __slots__ = ()

    @property
    def data(self: Any) -> Any:
        """The value. Setting it in an element of a stack, `stack[0].data = "x"`, writes the stack."""
        return self._data

    @data.setter
    def data(self: Any, value: Any) -> None:
        self._data = value
        if (source := getattr(self, "_source", None)) is None:
            return
        stack, at = source
        if at.ndim:  # a part of a stack of values for whole batches
            stack._pool[int(at.flatten()[0])] = value
        elif not repeats(stack.positions()):
            stack._select(at.reshape(1)).put(slice(None), self)

    def update(self, other: Any = None, inplace: bool = False, **kwargs: Any) -> Self:
        """Take over the value of another; of None nothing."""
        if other is not None:
            self.data = other.data if isinstance(other, Element) else other
        return self

    update_ = update

    def __setitem__(self: Any, index: Any, value: Any) -> None:
        chosen = torch.empty((), device="cpu").expand(self.batch_size)[on_cpu(index)].numel()
        entry: Any = value
        found = entry.flat() if isinstance(value, ValueShapes) else [value]
        if not chosen or not found:
            return
        if self.batch_size and not all(self.same(type(self)(v, self.batch_size)) for v in found):
            raise UnsupportedError(
                "one value for a whole batch cannot differ by rows",
                hint="maybe_to_stack() gives one value per row; in a TensorDict, write td[rows] = TensorDict(...)",
            )
        self.data = found[0]

    def way_back(self: Any, index: Any) -> Callable[[], None] | None:
        """Return the function that writes a value back to its stack; None for a value that is in no stack."""
        in_stack = getattr(self, "_source", None) is not None
        return functools.partial(setattr, self, "data", self._data) if in_stack else None

    def own_values(self: Any) -> NonTensor:
        """Return the entry with a copy of its value, if that can be changed."""
        me: Any = self.for_batch(self.batch_size)
        me._data = copied(self._data)
        made: NonTensor = me
        return made

    def own_lists(self: Any) -> NonTensor:
        """Return the entry with copies of the dicts and lists that it is made of, around the same values."""
        me: Any = self
        if type(self._data) in _LISTS:
            me = self.for_batch(self.batch_size)
            me._data = relisted(self._data)
        made: NonTensor = me
        return made

    def __getstate__(self: Any) -> Any:
        return None, {"data": self._data, "batch_size": self.batch_size}

    def __copy__(self: Any) -> Any:
        return self.for_batch(self.batch_size)


class Elements:
    """Methods of a stack about the entries along its first dimension."""

    __slots__ = ()

    stack_dim: int = 0
    """Always the first: a stack along another dimension has its values in another order."""

    @property
    def tensordicts(self: Any) -> list[Any]:
        """The entries along the first dimension; writes into them are writes here."""
        return list(self.unbind(0))

    def own_lists(self: Any) -> NonTensor:
        """Return a stack of its own: rows written in one do not appear in the other."""
        made: NonTensor = self.__copy__()
        return made

    def own_values(self: Any) -> NonTensor:
        """Return the entry with copies of the values that can be changed."""
        made: Any = self.own_copy()
        result: NonTensor = made
        if type(made._pool) not in (list, LazyGather) or torch.compiler.is_compiling() or unchanging(made.flat()):
            return result  # values in a buffer are decoded anew by each that reads them
        made = result = made.own()
        made._pool[:] = map(copied, made._pool)
        return result


def evened(values: Sequence[Any], dim: int) -> Sequence[Any]:
    """Return what a stack is made of: stacks of other lengths as lists, since a dimension has one length."""
    if dim or not values or not all(isinstance(value, Elements) for value in values):
        return values
    sizes = {tuple(value.batch_size) for value in values}
    uneven = len(sizes) > 1 and len(set(map(len, sizes))) == 1
    return [value.tolist() for value in values] if uneven else values


def set_each(placed: Iterator[tuple[int, Any]], values: list[Any]) -> None:
    """Write values at their places in a list."""
    for place, value in placed:
        values[place] = value


def spread_over(part: NonTensor, shape: torch.Size) -> list[Any]:
    """Return the values of an entry, broadcast to a shape, in C order.

    Raises:
        BatchSizeError: it does not fit.
    """
    if isinstance(part, Elements):
        try:
            return part.move(lambda t: t.expand(shape)).flat() if part.batch_size != shape else part.flat()
        except RuntimeError:
            raise BatchSizeError(
                f"cannot write values of shape {list(part.batch_size)} at an index of shape {list(shape)}"
            ) from None
    return [part.plain()] * shape.numel()
