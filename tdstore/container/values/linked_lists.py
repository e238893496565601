"""Lists of values per row, as `td[key]` returns them, which write through.

Users see it in `td["names"][3] = "ann"`: as in `tensordict`, the value is then in the TensorDict, and not in a copy
(`test_linked_lists` runs this under both packages).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tdstore.container.values.nested_lists import levels_of

if TYPE_CHECKING:
    from tdstore.container.values.nontensor import NonTensor, NonTensorStack


class LinkedList(list[Any]):
    """The values of a stack, as nested lists: an element that is set is set in the stack, too."""

    _stack: NonTensorStack | None = None
    """None in a list that pickle or copy is filling."""
    _place: tuple[int, ...]
    _binding: tuple[Any, str] | None

    @classmethod
    def over(cls, stack: NonTensorStack, binding: tuple[Any, str] | None = None) -> LinkedList:
        """Build nested lists of the values of a stack; `binding` is the source's container and key, if it is a copy."""
        return cls._part(stack, binding, stack.tolist(), ())

    @classmethod
    def _part(cls, stack: NonTensorStack, binding: Any, values: list[Any], place: tuple[int, ...]) -> LinkedList:
        if stack.ndim > len(place) + 1:
            values = [cls._part(stack, binding, part, (*place, i)) for i, part in enumerate(values)]
        made = cls(values)
        made._stack, made._binding, made._place = stack, binding, place
        return made

    def __setitem__(self, index: Any, value: Any) -> None:
        if self._stack is None:
            super().__setitem__(index, value)
            return
        at = (*self._place, index)
        whole = isinstance(index, slice)
        levels = self._stack.ndim - len(at) + whole  # of lists in what is set
        if whole or (levels and isinstance(value, list)):
            self._put(at, self._stack.from_list(value := list(value), levels_of(value, levels)))
        else:
            self._put(at, self._stack.one(value))
        if levels > whole:  # the lists below are new ones
            values = self._stack.tolist()
            for i in self._place:
                values = values[i]
            super().__setitem__(slice(None), self._part(self._stack, self._binding, values, self._place))
        else:
            super().__setitem__(index, value)

    def _put(self, at: tuple[Any, ...], part: NonTensor) -> None:
        stack: Any = self._stack
        if self._binding is None:
            stack[at] = part
            return
        td, key = self._binding
        if len(at) <= td.batch_dims:
            td[at] = {key: part}
        else:  # the value has rows of its own below those of the batch
            stack[at] = part
            td.set_(key, stack)
        self._stack = td.get(key)

    def __repr__(self) -> str:
        return f"LinkedList({super().__repr__()})"

    def __reduce__(self) -> tuple[Any, ...]:
        return list, (list(self),)
