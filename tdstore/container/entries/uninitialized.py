"""Parameters and buffers of several lazy modules side by side, before their shape is known."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn.parameter import Parameter, UninitializedBuffer, UninitializedParameter
from torch.utils._pytree import tree_leaves

from tdstore.errors import InvalidStateError, UnevenError
from tdstore.types import DeviceLike

_INITIALIZED = frozenset((Tensor, Parameter))


def is_uninitialized(value: object) -> bool:
    """Check whether a tensor belongs to a lazy module that was not called yet."""
    # The class of parameters answers `isinstance` by a Python function.
    return type(value) not in _INITIALIZED and isinstance(value, (UninitializedParameter, UninitializedBuffer))


class StackedMixin:
    """A stack of uninitialized tensors: `materialize` takes the shape of one of them.

    Args:
        count: how many there are.
        requires_grad, device, dtype: of all of them.
    """

    count: int

    def __new__(
        cls, count: int, requires_grad: bool = False, device: DeviceLike | None = None, dtype: Any = None
    ) -> Self:
        allocate: Any = super().__new__
        made: Any = allocate(cls, requires_grad, device, dtype)
        made.count = count
        return made  # type: ignore[no-any-return]

    def materialize(self, shape: Sequence[int], device: DeviceLike | None = None, dtype: Any = None) -> None:
        """Become a tensor of `[count, *shape]`, whose values are not set."""
        below: Any = super()
        below.materialize((self.count, *shape), device, dtype)

    def single(self) -> Tensor:
        """Return one element of the stack as a new uninitialized tensor."""
        raise NotImplementedError

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        if id(self) not in memo:
            tensor: Any = self
            memo[id(self)] = type(self)(self.count, tensor.requires_grad, tensor.device, tensor.dtype)
        found: Self = memo[id(self)]
        return found

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        tensor: Any = self
        return type(self), (self.count, tensor.requires_grad, tensor.device, tensor.dtype)


class StackedUninitializedParameter(StackedMixin, UninitializedParameter):
    """Parameters of several lazy modules, see `TensorDict.from_modules`."""

    def single(self) -> UninitializedParameter:
        """Return one element of the stack as a new uninitialized parameter."""
        kind: Any = UninitializedParameter
        return kind(self.requires_grad, self.device, self.dtype)  # type: ignore[no-any-return]


class StackedUninitializedBuffer(StackedMixin, UninitializedBuffer):
    """Buffers of several lazy modules, see `TensorDict.from_modules`."""

    def single(self) -> UninitializedBuffer:
        """Return one element of the stack as a new uninitialized buffer."""
        kind: Any = UninitializedBuffer
        return kind(self.requires_grad, self.device, self.dtype)  # type: ignore[no-any-return]


class MappedUninitialized(UninitializedParameter):
    """One of a stack, as the function sees it that `torch.vmap` maps over the stack.

    Args:
        stack: the stack, whose first dimension is mapped over.
        level: of vmap.
    """

    stack: Any
    level: int

    def __new__(cls, stack: Any, level: int) -> Self:
        made: Any = super().__new__(cls, stack.requires_grad, stack.device, stack.dtype)
        made.stack, made.level = stack, level
        return made  # type: ignore[no-any-return]

    def initialized(self) -> Tensor:
        """Return the tensor that vmap maps over, once the stack has a shape."""
        found: Tensor = torch._C._functorch._add_batch_dim(self.stack, 0, self.level)
        return found


class MappedUneven(UninitializedBuffer):
    """An entry of a lazy stack that cannot be stacked, in a function that `torch.vmap` maps over the stack.

    It may be there as long as nothing computes with it.

    Args:
        message: of the error that any use of it raises.
    """

    message: str

    def __new__(cls, message: str) -> Self:
        made: Any = super().__new__(cls)
        made.message = message
        return made  # type: ignore[no-any-return]

    def refused(self) -> UnevenError:
        """Return the error of a use."""
        return UnevenError(self.message, hint="leave the entry alone in the mapped function, or exclude it")

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        """Raise an UnevenError: there is none."""
        raise self.refused()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _DESCRIPTIONS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        for value in tree_leaves((args, kwargs)):
            if isinstance(value, cls):
                raise value.refused()
        return NotImplemented

    def __repr__(self) -> str:  # type: ignore[override]
        return "MappedUneven()"


_DESCRIPTIONS = {vars(torch._C.TensorBase)[name].__get__ for name in ("device", "dtype", "requires_grad", "layout")}
"""The attributes of a tensor that printing and copying of containers read."""


def stack_uninitialized(column: Sequence[Any]) -> Tensor:
    """Stack uninitialized tensors, one of each module.

    Raises:
        InvalidStateError: they differ in device or dtype.
    """
    first = column[0]
    if len({(t.device, t.dtype) for t in column}) > 1:
        raise InvalidStateError("uninitialized parameters of several devices or dtypes cannot be stacked")
    parameter = isinstance(first, UninitializedParameter)
    kind: Any = StackedUninitializedParameter if parameter else StackedUninitializedBuffer
    made: Tensor = kind(len(column), first.requires_grad, first.device, first.dtype)
    return made


def shape_shown(tensor: Any) -> torch.Size:
    """Return the text of the shape for `repr`."""
    return torch.Size((tensor.count, -1) if isinstance(tensor, StackedMixin) else (-1,))
