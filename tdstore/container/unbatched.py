"""A tensor that belongs to a batch as a whole, and has no rows of its own."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tdstore.container.nontensor import NonTensor
from tdstore.container.plain import to_plain
from tdstore.errors import MismatchError, UnsupportedError
from tdstore.shapes import as_size

LEAF = "data"
"""Below its key, a store keeps the tensor by this name."""


class UnbatchedTensor(NonTensor):
    """A tensor of any shape as an entry: indexing, reshaping or stacking the TensorDict leaves it as it is.

    Torch functions, operators and methods of tensors take it as the tensor that it holds (`data`) and give such an
    entry again, and leaf-wise maths of the TensorDict includes it. Indexing and the methods that shape a batch leave
    it as it is: index or reshape `data`. It is no `torch.Tensor`: where one is asked for, give `data`.

    Example:
        >>> td = TensorDict({"x": torch.zeros(3), "mean": UnbatchedTensor(torch.ones(7))}, [3])
        >>> td[0]["mean"].shape
        torch.Size([7])
        >>> (td + 1)["mean"].data[0]
        tensor(2.)
    """

    __slots__ = ("batch_size", "data")

    def __init__(self, data: Any, batch_size: Any = None) -> None:
        self.data: Tensor = data.data if isinstance(data, UnbatchedTensor) else torch.as_tensor(data)
        self.batch_size = as_size(batch_size)

    @property
    def shape(self) -> torch.Size:
        """Shape of the tensor."""
        return self.data.shape

    @property
    def ndim(self) -> int:
        """Number of dimensions of the tensor."""
        return self.data.ndim

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the tensor."""
        return self.data.dtype

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """Device of the tensor."""
        return self.data.device

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = func(*_opened(args), **_opened(kwargs or {}))
        first = next((a for a in args if isinstance(a, UnbatchedTensor)), None)
        return cls(made, first.batch_size) if isinstance(made, Tensor) and first is not None else made

    def __getattr__(self, name: str) -> Any:
        """A method or property of the tensor, which gives such entries for tensors."""
        if name[0] == "_" or name in UnbatchedTensor.__slots__ or not hasattr(self.data, name):
            raise AttributeError(f"an UnbatchedTensor has no attribute {name!r}, nor has the tensor that it holds")
        found = getattr(self.data, name)
        return self._method(found) if callable(found) else self._again(found)

    def _method(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(fn)
        def call(*args: Any, **kwargs: Any) -> Any:
            return self._again(fn(*_opened(args), **_opened(kwargs)))

        return call

    def _again(self, made: Any) -> Any:
        if isinstance(made, tuple) and not isinstance(made, torch.Size):
            return tuple(map(self._again, made))
        return self if made is self.data else self.holding(made) if isinstance(made, Tensor) else made

    def plain(self) -> UnbatchedTensor:
        """The entry itself."""
        return self

    def flat(self) -> list[Any]:
        return [self.data] * self.batch_size.numel()

    def tolist(self) -> Any:
        """The numbers of the tensor, as nested lists."""
        return self.data.tolist()

    def same(self, other: object) -> bool:
        return isinstance(other, UnbatchedTensor) and torch.equal(self.data, other.data)

    def equal_values(self, other: object) -> Tensor:
        return torch.full(self.batch_size, self.same(other))

    def holding(self, data: Tensor) -> UnbatchedTensor:
        """Another tensor for the same batch."""
        return type(self)(data, self.batch_size)

    def for_batch(self, batch_size: torch.Size) -> UnbatchedTensor:
        return type(self)(self.data, batch_size)

    def move(self, fn: Callable[[Tensor], Tensor]) -> UnbatchedTensor:
        """The same tensor for the new batch."""
        return type(self)(self.data, fn(torch.empty(()).expand(self.batch_size)).shape)

    def spread(self, fn: Callable[[Tensor], Sequence[Tensor]]) -> list[NonTensor]:
        """The same tensor for each new batch."""
        return [type(self)(self.data, part.shape) for part in fn(torch.empty(()).expand(self.batch_size))]

    def __len__(self) -> int:
        return len(self.data)

    def apart(self) -> UnbatchedTensor:
        return self.holding(self.data.clone())

    def clone(self, recurse: bool = True) -> UnbatchedTensor:
        """A copy of the tensor."""
        return self.holding(self.data.clone() if recurse else self.data)

    def to(self, *args: Any, **kwargs: Any) -> UnbatchedTensor:
        """The tensor on another device, or of another dtype."""
        return self.holding(self.data.to(*args, **kwargs))

    def joined(self, parts: Sequence[NonTensor], fn: Callable[[list[Tensor]], Tensor]) -> NonTensor:
        """The tensor that all parts hold.

        Raises:
            MismatchError: they hold different ones.
        """
        if not all(self.same(part) for part in parts):
            raise MismatchError(
                "these unbatched tensors differ, so that none of them belongs to the whole batch",
                hint="make them entries with rows before you join the TensorDicts",
            )
        return type(self)(self.data, fn([torch.empty(()).expand(p.batch_size) for p in parts]).shape)

    def written(self, index: Any, part: NonTensor) -> NonTensor:
        if not self.same(part):
            raise UnsupportedError(
                "an unbatched tensor has no rows that could be written", hint="set the whole entry: td.set(key, value)"
            )
        return self

    def to_json(self) -> dict[str, Any]:
        """For documents that hold everything: `{"unbatched": the tensor as a value}`."""
        return {"unbatched": to_plain(self.data.detach().cpu())}

    def _raw(self, key: str) -> Tensor:
        return {LEAF: self.data}[key]

    def __repr__(self) -> str:
        return f"UnbatchedTensor({self.data!r})"


def _opened(value: Any) -> Any:
    if isinstance(value, UnbatchedTensor):
        return value.data
    if isinstance(value, (list, tuple)):
        return type(value)(map(_opened, value))
    return {k: _opened(v) for k, v in value.items()} if isinstance(value, dict) else value


def _two(name: str, fn: Callable[..., Any]) -> None:
    def operate(self: UnbatchedTensor, other: Any) -> Any:
        return self.holding(fn(self.data, _opened(other)))

    def reflected(self: UnbatchedTensor, other: Any) -> Any:
        return self.holding(fn(other, self.data))

    setattr(UnbatchedTensor, f"__{name}__", operate)
    setattr(UnbatchedTensor, f"__r{name}__", reflected)


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul"):
    _two(_name, getattr(operator, _name))
