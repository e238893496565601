"""Arithmetic and comparison, leaf by leaf; the second operand is a TensorDict, a tensor or a number.

A tensor operand is aligned with the batch dimensions: `td * t` with `t` of shape `[*B]` scales every row.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, Self, TypeAlias, TypeVar

import torch
from torch import Tensor

from tdstore.errors import InvalidArgumentError, InvalidStateError
from tdstore.index.tracing import traced
from tdstore.ops.base import Operand, OpsBase
from tdstore.types import Number

Default: TypeAlias = "Tensor | Number | Literal['intersection'] | None"
"""`default=`: what an entry that one side lacks is combined as."""


def _each(fn: Callable[[Any, Any], Tensor]) -> Callable[..., list[Tensor]]:
    """Lift a function of two values to lists, for functions that `torch._foreach_*` lacks."""

    def over(leaves: Sequence[Tensor], other: Any) -> list[Tensor]:
        if isinstance(other, list):
            return [fn(a, b) for a, b in zip(leaves, other, strict=True)]
        return [fn(a, other) for a in leaves]

    return over


_eq, _ne, _lt, _le, _gt, _ge = map(
    _each, (operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge)
)
_and, _or, _xor = map(_each, (operator.and_, operator.or_, operator.xor))
_mod, _rsub, _rdiv, _rpow = map(_each, (torch.remainder, lambda a, b: b - a, lambda a, b: b / a, lambda a, b: b**a))


def _each3(fn: Callable[[Any, Any, Any], Tensor]) -> Callable[..., list[Tensor]]:
    """Lift a function of three values to lists."""

    def over(leaves: Sequence[Tensor], second: Any, third: Any) -> list[Tensor]:
        seconds, thirds = (o if isinstance(o, list) else [o] * len(leaves) for o in (second, third))
        return [fn(a, b, c) for a, b, c in zip(leaves, seconds, thirds, strict=True)]

    return over


NUMBER_AS_TENSOR = frozenset({
    torch._foreach_add, torch._foreach_sub, torch._foreach_mul, torch._foreach_div,
    torch._foreach_add_, torch._foreach_sub_, torch._foreach_mul_, torch._foreach_div_,
    _lt, _le, _gt, _ge, _rsub,
})  # fmt: skip
"""Functions that do the same with a number and with a tensor of it, if that has the dtype of the leaf. With a tensor
they take half the time, since a number is made a tensor for each leaf, and converted to its dtype. A number divided by
a tensor is not here: that multiplies by the reciprocal."""
_FLOATS = frozenset({torch.float32, torch.float64})
_NUMBERS = frozenset({int, float})
_PLAIN = frozenset({Tensor, torch.nn.Parameter})


def as_tensors(operand: Any, leaves: Sequence[Tensor], *, plain: bool = False) -> object:
    """Convert a list with one number for all leaves to tensors of their dtypes.

    Other operands are returned unchanged, and so are numbers if the leaves are not plain tensors of float32 or float64
    in main memory: a tensor promotes other dtypes differently than a number does, or is rounded. With `plain`, the
    caller knows that they are.
    """
    if type(operand) is not list or len(operand) < 2:
        return operand
    number = operand[0]
    if type(number) is not float and type(number) is not int:
        return operand
    made: dict[torch.dtype, Tensor] = {}
    parts: list[Tensor] = []
    for leaf in leaves:
        dtype = leaf.dtype
        if not plain and (dtype not in _FLOATS or type(leaf) not in _PLAIN or not leaf.is_cpu):
            return operand
        if dtype not in made:
            try:
                made[dtype] = torch.scalar_tensor(number, dtype=dtype, device="cpu")
            except RuntimeError:  # too large for it
                return operand
        parts.append(made[dtype])
    return parts


def _can_cast(source: torch.dtype, target: torch.dtype) -> bool:
    """Call `torch.can_cast`, which torch.compile cannot trace."""
    if source.is_complex or source.is_floating_point:
        return target.is_complex or (target.is_floating_point and not source.is_complex)
    return target is not torch.bool or source is torch.bool


def alike(leaves: Sequence[Tensor], operands: Sequence[Any], numbers: bool = True) -> bool:
    """Check whether all are plain floats in main memory, with tensors of their dtypes and shapes as operands.

    Args:
        leaves: what is written.
        operands: a list for each; the last may be one of `numbers`.
        numbers: whether it may.
    """
    for leaf in leaves:
        if leaf.dtype not in _FLOATS or type(leaf) not in _PLAIN or not leaf.is_cpu:
            return False
    checked: list[Any] = []
    for parts in operands:
        if type(parts) is not list:
            return False
        if numbers and parts is operands[-1] and _NUMBERS.issuperset(map(type, parts)):
            continue
        if len(checked) == len(parts) and all(map(operator.is_, checked, parts)):
            continue  # as in addcmul_(grad, grad)
        for leaf, part in zip(leaves, parts, strict=True):
            if type(part) not in _PLAIN or part.dtype is not leaf.dtype or not part.is_cpu or part.shape != leaf.shape:
                return False
        checked = parts
    return True


class InPlace:
    """The in-place form of a function over lists. It raises if a result needs a wider dtype, as torch does.

    Args:
        fn: returns the results.
        at_once: does it in place, for leaves and operands that are `alike`.
        numbers: whether the last operand of `at_once` may be numbers.
    """

    __slots__ = ("at_once", "fn", "numbers")

    def __init__(
        self, fn: Callable[..., Sequence[Tensor]], at_once: Callable[..., None], *, numbers: bool = True
    ) -> None:
        self.fn, self.at_once, self.numbers = fn, at_once, numbers

    def __call__(self, leaves: Sequence[Tensor], *operands: Any) -> None:
        """Write the results into the leaves."""
        if not traced() and alike(leaves, operands, self.numbers):
            self.at_once(leaves, *operands)
            return
        for leaf, result in zip(leaves, self.fn(leaves, *operands), strict=True):
            if not _can_cast(result.dtype, leaf.dtype):
                raise InvalidStateError(
                    f"a result of dtype {result.dtype} cannot be stored in a leaf of dtype {leaf.dtype}"
                )
            if result.shape != leaf.shape:
                raise InvalidStateError(
                    f"a result of shape {list(result.shape)} does not fit a leaf of {list(leaf.shape)}"
                )
            leaf.copy_(result)


def _like(leaf: Tensor, other: Any) -> Tensor:
    """Convert a number to a tensor that takes part in dtype promotion as a number does."""
    return other if isinstance(other, Tensor) else torch.as_tensor(other, device=leaf.device)


class ListFunction:
    """A function over lists of leaves and operands: one call of torch for all of them.

    Args:
        each: does the same leaf by leaf: under a trace, and where torch refuses the lists.
        at_once: takes the leaves and, for each operand, one tensor per leaf or one number for all.
    """

    __slots__ = ("at_once", "each")

    def __init__(self, each: Callable[..., list[Tensor]], at_once: Callable[..., Sequence[Tensor]]) -> None:
        self.each, self.at_once = each, at_once

    def __call__(self, leaves: Sequence[Tensor], *operands: Any) -> Sequence[Tensor]:
        """Return the results, one per leaf."""
        if traced():
            return self.each(leaves, *operands)
        try:
            made = self.at_once(leaves, *map(_one_number, operands))
        except (RuntimeError, TypeError, OverflowError):
            return self.each(leaves, *operands)  # raises it again, unless it can convert the operands
        # As soon as one result requires gradients, torch lets all of them that can: the first tells.
        first = next((result for result in made if result.is_floating_point() or result.is_complex()), made[0])
        if first.requires_grad and not all(leaf.requires_grad for leaf in leaves):
            return self.each(leaves, *operands)
        return made


def _one_number(operand: Any) -> Any:
    """Return the number that a list has for all leaves; other operands as they are."""
    if type(operand) is list and type(operand[0]) in _NUMBERS and operand.count(operand[0]) == len(operand):
        return operand[0]
    return operand


def _clamp_at_once(leaves: list[Tensor], low: Any, high: Any) -> tuple[Tensor, ...]:
    made: tuple[Tensor, ...] = torch._foreach_clamp_min(leaves, low)
    if type(high) is list:
        return torch._foreach_clamp_max(made, high)  # may promote
    torch._foreach_clamp_max_(made, high)
    return made


_maximum = ListFunction(
    _each(lambda a, b: torch.maximum(a, b) if isinstance(b, Tensor) else torch.clamp_min(a, b)), torch._foreach_maximum
)
_minimum = ListFunction(
    _each(lambda a, b: torch.minimum(a, b) if isinstance(b, Tensor) else torch.clamp_max(a, b)), torch._foreach_minimum
)
_clamp_max = ListFunction(_each(torch.clamp_max), torch._foreach_clamp_max)
_clamp_min = ListFunction(_each(torch.clamp_min), torch._foreach_clamp_min)
_clamp = ListFunction(_each3(lambda a, low, high: torch.clamp_max(torch.clamp_min(a, low), high)), _clamp_at_once)
_logical_and = _each(lambda a, b: torch.logical_and(a, _like(a, b)))
_lerp = ListFunction(_each3(lambda a, b, c: torch.lerp(a, _like(a, b).to(a.dtype), c)), torch._foreach_lerp)


def _addcmul(value: float) -> ListFunction:
    each = _each3(lambda a, b, c: torch.addcmul(a, _like(a, b), _like(a, c), value=value))
    return ListFunction(each, partial(torch._foreach_addcmul, value=value))


def _addcdiv(value: float) -> ListFunction:
    each = _each3(lambda a, b, c: torch.addcdiv(a, _like(a, b), _like(a, c), value=value))
    return ListFunction(each, partial(torch._foreach_addcdiv, value=value))


Made = TypeVar("Made")


class ArithmeticOps(OpsBase):
    """`+ - * / ** %`, comparisons and logic; as named methods and as operators.

    `default=` of the named methods says what to do about entries that one of two TensorDicts lacks: a
    number or tensor is used for them, "intersection" leaves them out; without it they are a `KeyError`.
    """

    __slots__ = ()

    def _with(self, fn: Callable[..., Sequence[Tensor]], other: Any, default: Any) -> Self:
        if default is None or not isinstance(other, OpsBase):
            return self._foreach(fn, other)
        mine, theirs = self._aligned(other, default)
        result: Self = mine._foreach(fn, theirs)
        return result

    # -- out of place -----------------------------------------------------------------------
    def add(self, other: Operand, *, alpha: float | None = None, default: Default = None) -> Self:
        """Add to every leaf: `leaf + alpha * other`, as [`torch.add`][].

        Args:
            other: a number, a tensor that broadcasts with the batch, or a TensorDict with the keys of this one.
            alpha: a factor for `other`. Default: 1.
            default: used for entries that one side lacks: a number, a tensor, or "intersection" to leave such entries
                out.

        Raises:
            KeyNotFoundError: `other` lacks an entry, or has one more, and there is no `default`.
            RuntimeError: shapes do not broadcast.

        Example:
            >>> td = TensorDict({"a": torch.ones(2)}, [2])
            >>> td.add(td, alpha=2)["a"]
            tensor([3., 3.])
        """
        return self._with(_add_scaled(alpha), other, default)

    def sub(self, other: Operand, *, alpha: float | None = None, default: Default = None) -> Self:
        """Apply [`torch.sub`][] to every leaf: `leaf - alpha * other`."""
        return self._with(_sub_scaled(alpha), other, default)

    def mul(self, other: Operand, *, default: Default = None) -> Self:
        """Apply [`torch.mul`][] to every leaf."""
        return self._with(torch._foreach_mul, other, default)

    def div(self, other: Operand, *, default: Default = None) -> Self:
        """Apply [`torch.div`][] to every leaf."""
        return self._with(torch._foreach_div, other, default)

    def pow(self, other: Operand, *, default: Default = None) -> Self:
        """Apply [`torch.pow`][] to every leaf."""
        return self._with(torch._foreach_pow, other, default)

    def maximum(self, other: Operand, *, default: Default = None) -> Self:
        """Apply [`torch.maximum`][] to every leaf; the result is NaN where either operand is."""
        return self._with(_maximum, other, default)

    def minimum(self, other: Operand, *, default: Default = None) -> Self:
        """Apply [`torch.minimum`][] to every leaf; the result is NaN where either operand is."""
        return self._with(_minimum, other, default)

    def clamp_max(self, other: Operand, *, default: Default = None) -> Self:
        """Bound every leaf from above."""
        return self._with(_clamp_max, other, default)

    def clamp_min(self, other: Operand, default: Default = None) -> Self:
        """Bound every leaf from below."""
        return self._with(_clamp_min, other, default)

    def clamp(self, min: Operand | None = None, max: Operand | None = None, *, out: Self | None = None) -> Self:
        """Apply [`torch.clamp`][] to every leaf; a bound is a number, a tensor over the batch, or a TensorDict.

        `out` is a TensorDict to write the result into.
        """
        if max is not None:
            result = self.clamp_max(max) if min is None else self._foreach(_clamp, min, max)
        elif min is not None:
            result = self.clamp_min(min)
        else:
            raise InvalidArgumentError("clamp needs min=, max= or both")
        if out is not None:
            target: Any = out
            target.update(result, inplace=True)
            return out
        both = not any(bound is None or isinstance(bound, ArithmeticOps) for bound in (min, max))
        return _unlocked(result) if both else result

    def mod(self, other: Operand, *, default: Default = None) -> Self:
        """Apply [`torch.remainder`][] to every leaf: the remainder has the sign of the divisor."""
        return self._with(_mod, other, default)

    def rsub(self, other: Operand, *, alpha: float | None = None, default: Default = None) -> Self:
        """Apply [`torch.rsub`][] to every leaf: `other - alpha * leaf`."""
        return self._with(_rsub if alpha is None else _each(lambda a, b: torch.rsub(a, b, alpha=alpha)), other, default)

    def logical_and(self, other: Operand, *, default: Default = None) -> Self:
        """Apply [`torch.logical_and`][] to every leaf. The results are bool."""
        return self._with(_logical_and, other, default)

    def bitwise_and(self, other: Operand, *, default: Default = None) -> Self:
        """Apply [`torch.bitwise_and`][] to every leaf, of integers or bools."""
        return self._with(_and, other, default)

    def lerp(self, end: Operand, weight: Operand) -> Self:
        """Interpolate every leaf linearly: `leaf + weight * (end - leaf)`, as [`torch.lerp`][].

        Args:
            end: a TensorDict with the keys of this one.
            weight: a number, or a TensorDict with a weight for each leaf.

        Raises:
            KeyNotFoundError: `end` lacks an entry, or has one more.

        Example:
            >>> start, end = TensorDict({"a": torch.zeros(2)}, [2]), TensorDict({"a": torch.ones(2)}, [2])
            >>> start.lerp(end, 0.25)["a"]
            tensor([0.2500, 0.2500])
        """
        return self._foreach(_lerp, end, weight)

    def addcmul(self, other1: Operand, other2: Operand, *, value: float = 1) -> Self:
        """Apply [`torch.addcmul`][] to every leaf: `leaf + value * other1 * other2`, leaves matched by key."""
        return self._foreach(_addcmul(value), other1, other2)

    def addcdiv(self, other1: Operand, other2: Operand, value: float = 1) -> Self:
        """Apply [`torch.addcdiv`][] to every leaf: `leaf + value * other1 / other2`, leaves matched by key."""
        return self._foreach(_addcdiv(value), other1, other2)

    # -- in place ---------------------------------------------------------------------------
    def add_(self, other: Operand, *, alpha: float | None = None) -> Self:
        """Add to every leaf in place, as `Tensor.add_`. A dataset that is open for writing is changed.

        Args:
            other: a number, a tensor that broadcasts with the batch, or a TensorDict with the keys of this one.
            alpha: a factor for `other`. Default: 1.

        Returns:
            This TensorDict.

        Raises:
            KeyNotFoundError: `other` lacks an entry, or has one more.
            ReadOnlyError: the dataset was opened in mode "r".

        Example:
            >>> TensorDict({"a": torch.ones(2)}, [2]).add_(1)["a"]
            tensor([2., 2.])
        """
        return self._foreach_(_add_scaled_(alpha), other)

    def sub_(self, other: Operand, alpha: float | None = None) -> Self:
        """Subtract from every leaf in place, as `Tensor.sub_`."""
        return self._foreach_(_sub_scaled_(alpha), other)

    def mul_(self, other: Operand) -> Self:
        """Multiply every leaf in place, as `Tensor.mul_`."""
        return self._foreach_(torch._foreach_mul_, other)

    def div_(self, other: Operand) -> Self:
        """Divide every leaf in place, as `Tensor.div_`."""
        return self._foreach_(torch._foreach_div_, other)

    def pow_(self, other: Operand) -> Self:
        """Raise every leaf to a power in place, as `Tensor.pow_`."""
        return self._foreach_(torch._foreach_pow_, other)

    def maximum_(self, other: Operand) -> Self:
        """Take the larger of every leaf and `other`, in place."""
        return self._foreach_(InPlace(_maximum, torch._foreach_maximum_), other)

    def minimum_(self, other: Operand) -> Self:
        """Take the smaller of every leaf and `other`, in place."""
        return self._foreach_(InPlace(_minimum, torch._foreach_minimum_), other)

    def clamp_max_(self, other: Operand) -> Self:
        """Bound every leaf from above, in place."""
        return self._foreach_(InPlace(_clamp_max, torch._foreach_clamp_max_), other)

    def clamp_min_(self, other: Operand) -> Self:
        """Bound every leaf from below, in place."""
        return self._foreach_(InPlace(_clamp_min, torch._foreach_clamp_min_), other)

    def lerp_(self, end: Operand, weight: Operand) -> Self:
        """Interpolate every leaf in place, as `Tensor.lerp_`."""
        return self._foreach_(InPlace(_lerp, torch._foreach_lerp_), end, weight)

    def addcmul_(self, other1: Operand, other2: Operand, *, value: float = 1) -> Self:
        """Add `value * other1 * other2` to every leaf in place, as `Tensor.addcmul_`."""
        return self._foreach_(
            InPlace(_addcmul(value), partial(torch._foreach_addcmul_, value=value), numbers=False), other1, other2
        )

    def addcdiv_(self, other1: Operand, other2: Operand, *, value: float = 1) -> Self:
        """Add `value * other1 / other2` to every leaf in place, as `Tensor.addcdiv_`."""
        return self._foreach_(
            InPlace(_addcdiv(value), partial(torch._foreach_addcdiv_, value=value), numbers=False), other1, other2
        )

    # -- operators --------------------------------------------------------------------------
    __array_ufunc__ = None  # numpy leaves `np.float32(2) * td` to this class, instead of taking it for a sequence

    def __add__(self, other: Operand) -> Self:
        return self.add(other)

    __radd__ = __add__

    def __sub__(self, other: Operand) -> Self:
        return self.sub(other)

    def __rsub__(self, other: Operand) -> Self:
        return self._foreach(_rsub, other)

    def __mul__(self, other: Operand) -> Self:
        return self.mul(other)

    __rmul__ = __mul__

    def __truediv__(self, other: Operand) -> Self:
        return self.div(other)

    def __rtruediv__(self, other: Operand) -> Self:
        return self._foreach(_rdiv, other)

    def __pow__(self, other: Operand) -> Self:
        return self.pow(other)

    def __rpow__(self, other: Operand) -> Self:
        return self._foreach(_rpow, other)

    def __mod__(self, other: Operand) -> Self:
        return self._foreach(_mod, other)

    def __iadd__(self, other: Operand) -> Self:
        return self.add_(other)

    def __isub__(self, other: Operand) -> Self:
        return self.sub_(other)

    def __imul__(self, other: Operand) -> Self:
        return self.mul_(other)

    def __itruediv__(self, other: Operand) -> Self:
        return self.div_(other)

    def __ipow__(self, other: Operand) -> Self:
        return self.pow_(other)

    def __invert__(self) -> Self:
        return self._foreach(lambda leaves: [~x for x in leaves])

    def __and__(self, other: Operand) -> Self:
        return self._foreach(_and, other)

    __rand__ = __and__

    def __or__(self, other: Operand) -> Self:
        return _unlocked(self._foreach(_or, other))

    __ror__ = __or__

    def __xor__(self, other: Operand) -> Self:
        return _unlocked(self._foreach(_xor, other))

    __rxor__ = __xor__

    def __lt__(self, other: Operand) -> Self:
        return _unlocked(self._foreach(_lt, other))

    def __le__(self, other: Operand) -> Self:
        return _unlocked(self._foreach(_le, other))

    def __gt__(self, other: Operand) -> Self:
        return _unlocked(self._foreach(_gt, other))

    def __ge__(self, other: Operand) -> Self:
        return _unlocked(self._foreach(_ge, other))


def _unlocked(made: Made) -> Made:
    """Unlock a result that no other object refers to yet."""
    td: Any = made
    td.unlock_()
    return made


def _add_scaled(alpha: float | None) -> Callable[..., Any]:
    return torch._foreach_add if alpha is None else _each(lambda a, b: torch.add(a, b, alpha=alpha))


def _sub_scaled(alpha: float | None) -> Callable[..., Any]:
    return torch._foreach_sub if alpha is None else _each(lambda a, b: torch.sub(a, b, alpha=alpha))


def _add_scaled_(alpha: float | None) -> Callable[..., Any]:
    return torch._foreach_add_ if alpha is None else _each(lambda a, b: a.add_(b, alpha=alpha))


def _sub_scaled_(alpha: float | None) -> Callable[..., Any]:
    return torch._foreach_sub_ if alpha is None else _each(lambda a, b: a.sub_(b, alpha=alpha))
