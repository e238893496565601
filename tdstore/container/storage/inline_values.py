"""Inline values per row: a header holds them beside live tensors, and commits each write at once."""

from __future__ import annotations

from typing import Any

import msgspec
import torch

from tdstore.container.storage.describe import decoded, value_json
from tdstore.container.values.codecs import pickling
from tdstore.container.values.nontensor import NonTensor, NonTensorStack
from tdstore.errors import UnsupportedError
from tdstore.pickling import rebuild
from tdstore.threads import without_interrupts
from tdstore.types import Path, path_text


class _InlineValues(list[Any]):
    """The values of the whole entry, shared by all slices of it."""

    def __init__(self, values: list[Any], handle: Any, path: Path, shape: torch.Size) -> None:
        super().__init__(values)
        self.handle, self.path, self.shape = handle, path, shape
        self.known = self._value_record()

    def _value_record(self) -> Any:
        group = self.handle.groups.get(self.path[:-1])
        return None if group is None else group.values.get(self.path[-1])

    def catch_up(self) -> None:
        """Take over what another TensorDict over the same store has written since."""
        self.handle.check_writable()
        now = self._value_record()
        if now == self.known:
            return
        entry = None if now is None else self.handle.value(self.path)
        if not isinstance(entry, InlineStack) or entry.batch_size != self.shape:
            raise UnsupportedError(
                f"the values {path_text(self.path)} of {self.handle.store.url} were replaced after this entry was read",
                hint="read it again from the TensorDict over the dataset",
            )
        self[:], self.known = entry.flat(), now

    def keep(self) -> None:
        """Commit the values."""
        handle, (*above, key) = self.handle, self.path
        stack = NonTensorStack._make(list(self), torch.arange(len(self), device="cpu").reshape(self.shape))
        with pickling(handle.trusted):
            made = value_json(stack, self.path)
        group = handle.groups[tuple(above)]
        values = {**group.values, key: made}
        handle.commit({**handle.groups, tuple(above): msgspec.structs.replace(group, values=values)})
        self.known = made

    def __reduce__(self) -> tuple[Any, ...]:
        return list, (list(self),)


class InlineStack(NonTensorStack):
    """A stack of inline values, or a slice of one. A copy is an ordinary stack."""

    __slots__ = ()

    @classmethod
    def over(cls, handle: Any, path: Path, entry: NonTensorStack) -> InlineStack:
        """Build the entry that a header has at a path."""
        shape = entry.batch_size
        return cls._make(
            _InlineValues(entry.flat(), handle, path, shape), torch.arange(shape.numel(), device="cpu").reshape(shape)
        )

    @without_interrupts
    def put(self, index: Any, part: NonTensor) -> bool:
        pool = self._pool
        if not isinstance(pool, _InlineValues):
            return super().put(index, part)
        pool.catch_up()
        before = list(pool)
        try:
            if not super().put(index, part):
                return False
            pool.keep()
        except BaseException:
            pool[:] = before
            raise
        return True

    def lies_in(self, handle: Any, path: Path) -> bool:
        pool = self._pool
        return isinstance(pool, _InlineValues) and pool.handle is handle and pool.path == path

    def __reduce__(self) -> tuple[Any, ...]:
        return rebuild, ("NonTensorStack.of", self.flat(), self.batch_size)


def rebuilt(values: list[Any], shape: torch.Size) -> NonTensorStack:
    """Rebuild a stack from its pickle."""
    return NonTensorStack._make(list(values), torch.arange(len(values), device="cpu").reshape(shape))


def inline_value(handle: Any, path: Path, record: Any, batch_size: torch.Size) -> NonTensor:
    """Build the entry of a value record in the header of a store whose leaves are live tensors."""
    entry = decoded(record, batch_size)
    return InlineStack.over(handle, path, entry) if isinstance(entry, NonTensorStack) else entry
