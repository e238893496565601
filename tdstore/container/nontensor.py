"""Entries that are not tensors: one value for the whole batch, or one per position.

Both answer to the shape operations of a batch through a tensor of positions, so that whatever
torch can do to a shape works here too, and nothing is written twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tdstore.shapes import as_size
from tdstore.values import decode_value, encode_value


class NonTensor:
    """Base of both kinds. `batch_size` is that of the TensorDict that holds it."""

    __slots__ = ()
    batch_size: torch.Size
    device = None

    @property
    def shape(self) -> torch.Size:
        """Alias of `batch_size`."""
        return self.batch_size

    @property
    def ndim(self) -> int:
        """Number of batch dimensions."""
        return len(self.batch_size)

    def numel(self) -> int:
        """Number of batch positions."""
        return self.batch_size.numel()

    def plain(self) -> Any:
        """What `td[key]` gives: the value, or nested lists of values."""
        raise NotImplementedError

    def tolist(self) -> Any:
        """Nested lists of values, one level per batch dimension."""
        return self._values(self.positions().tolist())

    def _values(self, at: Any) -> Any:
        return [self._values(i) for i in at] if isinstance(at, list) else self.value_at(at)

    def move(self, fn: Callable[[Tensor], Tensor]) -> NonTensor:
        """Apply a shape operation, given as a function on a tensor of the batch's shape."""
        raise NotImplementedError

    def spread(self, fn: Callable[[Tensor], Sequence[Tensor]]) -> list[NonTensor]:
        """As `move`, for an operation that gives several tensors (unbind, split)."""
        raise NotImplementedError

    def positions(self) -> Tensor:
        """An int64 tensor of the batch's shape that tells equal positions apart."""
        raise NotImplementedError

    def value_at(self, position: int) -> Any:
        """The value that `positions()` calls by that number."""
        raise NotImplementedError

    def to_json(self) -> dict[str, Any]:
        """The envelope that a header keeps; `TypeError` for a value that is not plain data."""
        raise NotImplementedError

    def __getitem__(self, index: Any) -> NonTensor:
        return self.move(lambda t: t[index])

    def __len__(self) -> int:
        return self.batch_size[0] if self.batch_size else 0

    def same(self, other: object) -> bool:
        """Whether both hold equal values at every position."""
        if not isinstance(other, NonTensor) or self.batch_size != other.batch_size:
            return False
        try:
            return bool(self.tolist() == other.tolist())
        except (TypeError, ValueError, RuntimeError):
            return False  # values that cannot be compared as a whole, such as arrays


class NonTensorData(NonTensor):
    """One value for the whole batch.

    Example:
        >>> NonTensorData("hello", batch_size=[3]).data
        'hello'
    """

    __slots__ = ("batch_size", "data")

    def __init__(self, data: Any, batch_size: Any = None, device: object = None, names: object = None) -> None:
        self.data = data
        self.batch_size = as_size(batch_size)

    def plain(self) -> Any:
        """The value itself."""
        return self.data

    def move(self, fn: Callable[[Tensor], Tensor]) -> NonTensorData:
        """The same value for the new batch."""
        return NonTensorData(self.data, fn(torch.empty(()).expand(self.batch_size)).shape)

    def spread(self, fn: Callable[[Tensor], Sequence[Tensor]]) -> list[NonTensor]:
        """The same value for each new batch."""
        return [NonTensorData(self.data, part.shape) for part in fn(torch.empty(()).expand(self.batch_size))]

    def positions(self) -> Tensor:
        """Zeros: one value everywhere."""
        return torch.zeros((), dtype=torch.int64).expand(self.batch_size)

    def value_at(self, position: int) -> Any:
        """The value."""
        return self.data

    def to_json(self) -> dict[str, Any]:
        """`{"data": value}`."""
        return {"data": encode_value(self.data)}

    def __repr__(self) -> str:
        return f"NonTensorData(data={self.data}, batch_size={self.batch_size}, device=None)"


_SHOWN = 100
"""A repr lists at most so many values."""


class NonTensorStack(NonTensor):
    """One value per batch position.

    Args:
        *values: one per row, or nested lists of them as `from_list` takes.

    Example:
        >>> NonTensorStack("a", "b")[1].data
        'b'
    """

    __slots__ = ("_at", "_pool")

    def __init__(self, *values: Any) -> None:
        self._pool: list[Any] = [v.data if isinstance(v, NonTensorData) else v for v in values]
        self._at = torch.arange(len(values))

    @classmethod
    def _make(cls, pool: list[Any], at: Tensor) -> NonTensorStack:
        stack = cls.__new__(cls)
        stack._pool, stack._at = pool, at
        return stack

    @classmethod
    def from_list(cls, values: list[Any], ndim: int = 1) -> NonTensorStack:
        """From `ndim` levels of nested lists, all of one length at each level."""
        shape, pool = [len(values)], list(values)
        for _ in range(ndim - 1):
            width = len(pool[0]) if pool else 0
            if any(not isinstance(part, list) or len(part) != width for part in pool):
                raise ValueError(f"expected {ndim} levels of lists of equal length")
            shape.append(width)
            pool = [v for part in pool for v in part]
        return cls._make(pool, torch.arange(len(pool)).reshape(shape))

    @property
    def batch_size(self) -> torch.Size:  # type: ignore[override]
        """Shape of the batch."""
        return self._at.shape

    @property
    def data(self) -> Any:
        """The values, as `tolist`."""
        return self.tolist()

    def plain(self) -> Any:
        """As `tolist`."""
        return self.tolist()

    def move(self, fn: Callable[[Tensor], Tensor]) -> NonTensor:
        """The values where the operation puts them."""
        return self._at_positions(fn(self._at))

    def spread(self, fn: Callable[[Tensor], Sequence[Tensor]]) -> list[NonTensor]:
        """The values where the operation puts them."""
        return [self._at_positions(at) for at in fn(self._at)]

    def _at_positions(self, at: Tensor) -> NonTensor:
        return NonTensorStack._make(self._pool, at) if at.ndim else NonTensorData(self._pool[int(at)])

    def positions(self) -> Tensor:
        """Where each position's value lies in the pool."""
        return self._at

    def value_at(self, position: int) -> Any:
        """A value of the pool."""
        return self._pool[position]

    def to_json(self) -> dict[str, Any]:
        """`{"stack": nested lists, "dim": 0, "ndim": levels}`."""
        values = _map_levels(self.tolist(), self._at.ndim, encode_value)
        return {"stack": values, "dim": 0, "ndim": self._at.ndim}

    def __repr__(self) -> str:
        if self.numel() <= _SHOWN:
            shown = repr(self.tolist())
        else:
            first = [self.value_at(int(i)) for i in self._at.flatten()[:3]] if self.ndim == 1 else ["..."]
            shown = f"{repr(first)[:-1]}, ... {self.numel()} values]"
        return f"NonTensorStack(\n    {shown},\n    batch_size={self.batch_size},\n    device=None)"


def _map_levels(values: Any, levels: int, fn: Callable[[Any], Any]) -> Any:
    if levels and not isinstance(values, list):
        raise ValueError("a stack of values must be lists to one depth")
    return [_map_levels(v, levels - 1, fn) for v in values] if levels else fn(values)


def from_json(envelope: Any, batch_size: torch.Size) -> NonTensor:
    """The entry that `to_json` described, in a TensorDict of that batch size.

    Raises:
        ValueError: malformed, or a stack that does not fit the batch.
    """
    if not isinstance(envelope, dict):
        raise ValueError("not an envelope of a value")
    if "data" in envelope:
        return NonTensorData(decode_value(envelope["data"]), batch_size)
    if "stack" not in envelope:
        raise ValueError("neither one value nor one per position")
    ndim = envelope.get("ndim", max(1, len(batch_size)))
    levels, probe = 0, envelope["stack"]
    while isinstance(probe, list) and levels < ndim:
        levels, probe = levels + 1, probe[0] if probe else None
    if levels < 1:
        raise ValueError("a stack of values must be a list")
    stack = NonTensorStack.from_list(_map_levels(envelope["stack"], levels, decode_value), levels)
    both = min(levels, len(batch_size))
    if stack.batch_size[:both] != batch_size[:both]:
        raise ValueError(f"values of shape {list(stack.batch_size)} in a batch of {list(batch_size)}")
    while stack.ndim < len(batch_size):  # one value per leading position stands for all below it
        size = (*stack.batch_size, batch_size[stack.ndim])
        stack = NonTensorStack._make(stack._pool, stack._at.unsqueeze(-1).expand(size))
    return stack


def merge(parts: list[NonTensor], fn: Callable[[list[Tensor]], Tensor], *, collapse: bool = False) -> NonTensor:
    """Join entries with a function on their position tensors, such as `torch.stack` or `torch.cat`.

    Args:
        collapse: give one `NonTensorData` when all parts hold one equal value.
    """
    first = parts[0]
    if collapse and all(isinstance(p, NonTensorData) for p in parts):
        data = first.plain()
        if all(_equal(p.plain(), data) for p in parts):
            return NonTensorData(data, fn([p.positions() for p in parts]).shape)
    pool: list[Any] = []
    at = []
    for part in parts:
        known = [part.data] if isinstance(part, NonTensorData) else part._pool  # type: ignore[attr-defined]
        at.append(part.positions() + len(pool))
        pool += known
    return NonTensorStack._make(pool, fn(at))


def assign(target: NonTensor, index: Any, value: Any) -> NonTensor:
    """The entry with `value` (an entry, or one plain value) at `index`; the target is not changed."""
    part = value if isinstance(value, NonTensor) else NonTensorData(value)
    if isinstance(target, NonTensorData) and isinstance(part, NonTensorData) and _equal(target.data, part.data):
        return target
    pool = list(target._pool) if isinstance(target, NonTensorStack) else [target.plain()]
    at = target.positions().clone()
    added = part.positions() + len(pool)
    pool += part._pool if isinstance(part, NonTensorStack) else [part.plain()]
    at[index] = added
    if not at.ndim:
        return NonTensorData(pool[int(at)])
    # Drop values that nothing points at any more, or repeated writes would pile up.
    used, renumbered = at.unique(return_inverse=True)
    return NonTensorStack._make([pool[i] for i in used.tolist()], renumbered)


def _equal(a: Any, b: Any) -> bool:
    try:
        return type(a) is type(b) and bool(a == b)
    except (TypeError, ValueError, RuntimeError):
        return a is b


def is_non_tensor(value: object) -> bool:
    """Whether an entry is a non-tensor one."""
    return isinstance(value, NonTensor)
