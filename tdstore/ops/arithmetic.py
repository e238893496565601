"""Arithmetic and comparison, leaf by leaf; the second operand is a TensorDict, a tensor or a number.

A tensor operand is aligned with the batch dimensions: `td * t` with `t` of shape `[*B]` scales every row.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
from torch import Tensor

from tdstore.ops.base import OpsBase


def _each(fn: Callable[[Any, Any], Tensor]) -> Callable[..., list[Tensor]]:
    """Lift a function of two values to lists, for what `torch._foreach_*` does not offer."""

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


class ArithmeticOps(OpsBase):
    """`+ - * / ** %`, comparisons and logic; named and operator forms.

    `default=` of the named forms says what to do about entries that one of two TensorDicts lacks: a
    number or tensor stands for them, "intersection" leaves them out; without it they are a `KeyError`.
    """

    __slots__ = ()

    def _with(self, fn: Callable[..., Sequence[Tensor]], other: Any, default: Any) -> Self:
        if default is None or not isinstance(other, OpsBase):
            return self._foreach(fn, other)
        mine, theirs = self._aligned(other, default)
        result: Self = mine._foreach(fn, theirs)
        return result

    # -- out of place -----------------------------------------------------------------------
    def add(self, other: Any, *, alpha: float | None = None, default: Any = None) -> Self:
        """Apply [`torch.add`][] to every leaf: `leaf + alpha * other`."""
        return self._with(_add_scaled(alpha), other, default)

    def sub(self, other: Any, *, alpha: float | None = None, default: Any = None) -> Self:
        """Apply [`torch.sub`][] to every leaf: `leaf - alpha * other`."""
        return self._with(_sub_scaled(alpha), other, default)

    def mul(self, other: Any, *, default: Any = None) -> Self:
        """Apply [`torch.mul`][] to every leaf."""
        return self._with(torch._foreach_mul, other, default)

    def div(self, other: Any, *, default: Any = None) -> Self:
        """Apply [`torch.div`][] to every leaf."""
        return self._with(torch._foreach_div, other, default)

    def pow(self, other: Any, *, default: Any = None) -> Self:
        """Apply [`torch.pow`][] to every leaf."""
        return self._with(torch._foreach_pow, other, default)

    # -- in place ---------------------------------------------------------------------------
    def add_(self, other: Any, *, alpha: float | None = None) -> Self:
        """Add to every leaf in place, as `Tensor.add_`."""
        return self._foreach_(_add_scaled_(alpha), other)

    def sub_(self, other: Any, *, alpha: float | None = None) -> Self:
        """Subtract from every leaf in place, as `Tensor.sub_`."""
        return self._foreach_(_sub_scaled_(alpha), other)

    def mul_(self, other: Any) -> Self:
        """Multiply every leaf in place, as `Tensor.mul_`."""
        return self._foreach_(torch._foreach_mul_, other)

    def div_(self, other: Any) -> Self:
        """Divide every leaf in place, as `Tensor.div_`."""
        return self._foreach_(torch._foreach_div_, other)

    def pow_(self, other: Any) -> Self:
        """Raise every leaf to a power in place, as `Tensor.pow_`."""
        return self._foreach_(torch._foreach_pow_, other)

    # -- operators --------------------------------------------------------------------------
    def __add__(self, other: Any) -> Self:
        return self.add(other)

    __radd__ = __add__

    def __sub__(self, other: Any) -> Self:
        return self.sub(other)

    def __rsub__(self, other: Any) -> Self:
        return self._foreach(_rsub, other)

    def __mul__(self, other: Any) -> Self:
        return self.mul(other)

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> Self:
        return self.div(other)

    def __rtruediv__(self, other: Any) -> Self:
        return self._foreach(_rdiv, other)

    def __pow__(self, other: Any) -> Self:
        return self.pow(other)

    def __rpow__(self, other: Any) -> Self:
        return self._foreach(_rpow, other)

    def __mod__(self, other: Any) -> Self:
        return self._foreach(_mod, other)

    def __iadd__(self, other: Any) -> Self:
        return self.add_(other)

    def __isub__(self, other: Any) -> Self:
        return self.sub_(other)

    def __imul__(self, other: Any) -> Self:
        return self.mul_(other)

    def __itruediv__(self, other: Any) -> Self:
        return self.div_(other)

    def __ipow__(self, other: Any) -> Self:
        return self.pow_(other)

    def __neg__(self) -> Self:
        return self._foreach(torch._foreach_neg)

    def abs(self) -> Self:
        """Apply [`torch.abs`][] to every leaf."""
        return self._foreach(torch._foreach_abs)

    __abs__ = abs

    def __invert__(self) -> Self:
        return self._foreach(lambda leaves: [~x for x in leaves])

    def __and__(self, other: Any) -> Self:
        return self._foreach(_and, other)

    __rand__ = __and__

    def __or__(self, other: Any) -> Self:
        return self._foreach(_or, other)

    __ror__ = __or__

    def __xor__(self, other: Any) -> Self:
        return self._foreach(_xor, other)

    __rxor__ = __xor__

    def __lt__(self, other: Any) -> Self:
        return self._foreach(_lt, other)

    def __le__(self, other: Any) -> Self:
        return self._foreach(_le, other)

    def __gt__(self, other: Any) -> Self:
        return self._foreach(_gt, other)

    def __ge__(self, other: Any) -> Self:
        return self._foreach(_ge, other)


def _add_scaled(alpha: float | None) -> Callable[..., Any]:
    return torch._foreach_add if alpha is None else _each(lambda a, b: torch.add(a, b, alpha=alpha))


def _sub_scaled(alpha: float | None) -> Callable[..., Any]:
    return torch._foreach_sub if alpha is None else _each(lambda a, b: torch.sub(a, b, alpha=alpha))


def _add_scaled_(alpha: float | None) -> Callable[..., Any]:
    return torch._foreach_add_ if alpha is None else _each(lambda a, b: a.add_(b, alpha=alpha))


def _sub_scaled_(alpha: float | None) -> Callable[..., Any]:
    return torch._foreach_sub_ if alpha is None else _each(lambda a, b: a.sub_(b, alpha=alpha))
