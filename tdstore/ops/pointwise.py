"""Pointwise functions of one argument, leaf by leaf; each with its in-place variant."""

from __future__ import annotations

from typing import Self

import torch

from tdstore.ops.base import OpsBase


class PointwiseOps(OpsBase):
    """From abs to trunc, and the predicates on floats."""

    __slots__ = ()

    def abs(self) -> Self:
        """Apply [`torch.abs`][] to every leaf."""
        return self._foreach(torch._foreach_abs)

    def acos(self) -> Self:
        """Apply [`torch.acos`][] to every leaf."""
        return self._foreach(torch._foreach_acos)

    def asin(self) -> Self:
        """Apply [`torch.asin`][] to every leaf."""
        return self._foreach(torch._foreach_asin)

    def atan(self) -> Self:
        """Apply [`torch.atan`][] to every leaf."""
        return self._foreach(torch._foreach_atan)

    def ceil(self) -> Self:
        """Apply [`torch.ceil`][] to every leaf."""
        return self._foreach(torch._foreach_ceil)

    def cos(self) -> Self:
        """Apply [`torch.cos`][] to every leaf."""
        return self._foreach(torch._foreach_cos)

    def cosh(self) -> Self:
        """Apply [`torch.cosh`][] to every leaf."""
        return self._foreach(torch._foreach_cosh)

    def erf(self) -> Self:
        """Apply [`torch.erf`][] to every leaf."""
        return self._foreach(torch._foreach_erf)

    def erfc(self) -> Self:
        """Apply [`torch.erfc`][] to every leaf."""
        return self._foreach(torch._foreach_erfc)

    def exp(self) -> Self:
        """Apply [`torch.exp`][] to every leaf."""
        return self._foreach(torch._foreach_exp)

    def expm1(self) -> Self:
        """Apply [`torch.expm1`][] to every leaf."""
        return self._foreach(torch._foreach_expm1)

    def floor(self) -> Self:
        """Apply [`torch.floor`][] to every leaf."""
        return self._foreach(torch._foreach_floor)

    def frac(self) -> Self:
        """Apply [`torch.frac`][] to every leaf."""
        return self._foreach(torch._foreach_frac)

    def lgamma(self) -> Self:
        """Apply [`torch.lgamma`][] to every leaf."""
        return self._foreach(torch._foreach_lgamma)

    def log(self) -> Self:
        """Apply [`torch.log`][] to every leaf."""
        return self._foreach(torch._foreach_log)

    def log10(self) -> Self:
        """Apply [`torch.log10`][] to every leaf."""
        return self._foreach(torch._foreach_log10)

    def log1p(self) -> Self:
        """Apply [`torch.log1p`][] to every leaf."""
        return self._foreach(torch._foreach_log1p)

    def log2(self) -> Self:
        """Apply [`torch.log2`][] to every leaf."""
        return self._foreach(torch._foreach_log2)

    def neg(self) -> Self:
        """Apply [`torch.neg`][] to every leaf."""
        return self._foreach(torch._foreach_neg)

    def reciprocal(self) -> Self:
        """Apply [`torch.reciprocal`][] to every leaf."""
        return self._foreach(torch._foreach_reciprocal)

    def round(self) -> Self:
        """Apply [`torch.round`][] to every leaf."""
        return self._foreach(torch._foreach_round)

    def sigmoid(self) -> Self:
        """Apply [`torch.sigmoid`][] to every leaf."""
        return self._foreach(torch._foreach_sigmoid)

    def sign(self) -> Self:
        """Apply [`torch.sign`][] to every leaf."""
        return self._foreach(torch._foreach_sign)

    def sin(self) -> Self:
        """Apply [`torch.sin`][] to every leaf."""
        return self._foreach(torch._foreach_sin)

    def sinh(self) -> Self:
        """Apply [`torch.sinh`][] to every leaf."""
        return self._foreach(torch._foreach_sinh)

    def sqrt(self) -> Self:
        """Apply [`torch.sqrt`][] to every leaf."""
        return self._foreach(torch._foreach_sqrt)

    def tan(self) -> Self:
        """Apply [`torch.tan`][] to every leaf."""
        return self._foreach(torch._foreach_tan)

    def tanh(self) -> Self:
        """Apply [`torch.tanh`][] to every leaf."""
        return self._foreach(torch._foreach_tanh)

    def trunc(self) -> Self:
        """Apply [`torch.trunc`][] to every leaf."""
        return self._foreach(torch._foreach_trunc)

    __abs__ = abs
    __neg__ = neg

    # -- in place ---------------------------------------------------------------------------
    def abs_(self) -> Self:
        """Apply [`torch.abs`][] to every leaf in place."""
        return self._foreach_(torch._foreach_abs_)

    def acos_(self) -> Self:
        """Apply [`torch.acos`][] to every leaf in place."""
        return self._foreach_(torch._foreach_acos_)

    def asin_(self) -> Self:
        """Apply [`torch.asin`][] to every leaf in place."""
        return self._foreach_(torch._foreach_asin_)

    def atan_(self) -> Self:
        """Apply [`torch.atan`][] to every leaf in place."""
        return self._foreach_(torch._foreach_atan_)

    def ceil_(self) -> Self:
        """Apply [`torch.ceil`][] to every leaf in place."""
        return self._foreach_(torch._foreach_ceil_)

    def cos_(self) -> Self:
        """Apply [`torch.cos`][] to every leaf in place."""
        return self._foreach_(torch._foreach_cos_)

    def cosh_(self) -> Self:
        """Apply [`torch.cosh`][] to every leaf in place."""
        return self._foreach_(torch._foreach_cosh_)

    def erf_(self) -> Self:
        """Apply [`torch.erf`][] to every leaf in place."""
        return self._foreach_(torch._foreach_erf_)

    def erfc_(self) -> Self:
        """Apply [`torch.erfc`][] to every leaf in place."""
        return self._foreach_(torch._foreach_erfc_)

    def exp_(self) -> Self:
        """Apply [`torch.exp`][] to every leaf in place."""
        return self._foreach_(torch._foreach_exp_)

    def expm1_(self) -> Self:
        """Apply [`torch.expm1`][] to every leaf in place."""
        return self._foreach_(torch._foreach_expm1_)

    def floor_(self) -> Self:
        """Apply [`torch.floor`][] to every leaf in place."""
        return self._foreach_(torch._foreach_floor_)

    def frac_(self) -> Self:
        """Apply [`torch.frac`][] to every leaf in place."""
        return self._foreach_(torch._foreach_frac_)

    def lgamma_(self) -> Self:
        """Apply [`torch.lgamma`][] to every leaf in place."""
        return self._foreach_(torch._foreach_lgamma_)

    def log_(self) -> Self:
        """Apply [`torch.log`][] to every leaf in place."""
        return self._foreach_(torch._foreach_log_)

    def log10_(self) -> Self:
        """Apply [`torch.log10`][] to every leaf in place."""
        return self._foreach_(torch._foreach_log10_)

    def log1p_(self) -> Self:
        """Apply [`torch.log1p`][] to every leaf in place."""
        return self._foreach_(torch._foreach_log1p_)

    def log2_(self) -> Self:
        """Apply [`torch.log2`][] to every leaf in place."""
        return self._foreach_(torch._foreach_log2_)

    def neg_(self) -> Self:
        """Apply [`torch.neg`][] to every leaf in place."""
        return self._foreach_(torch._foreach_neg_)

    def reciprocal_(self) -> Self:
        """Apply [`torch.reciprocal`][] to every leaf in place."""
        return self._foreach_(torch._foreach_reciprocal_)

    def round_(self) -> Self:
        """Apply [`torch.round`][] to every leaf in place."""
        return self._foreach_(torch._foreach_round_)

    def sigmoid_(self) -> Self:
        """Apply [`torch.sigmoid`][] to every leaf in place."""
        return self._foreach_(torch._foreach_sigmoid_)

    def sign_(self) -> Self:
        """Apply [`torch.sign`][] to every leaf in place."""
        return self._foreach_(torch._foreach_sign_)

    def sin_(self) -> Self:
        """Apply [`torch.sin`][] to every leaf in place."""
        return self._foreach_(torch._foreach_sin_)

    def sinh_(self) -> Self:
        """Apply [`torch.sinh`][] to every leaf in place."""
        return self._foreach_(torch._foreach_sinh_)

    def sqrt_(self) -> Self:
        """Apply [`torch.sqrt`][] to every leaf in place."""
        return self._foreach_(torch._foreach_sqrt_)

    def tan_(self) -> Self:
        """Apply [`torch.tan`][] to every leaf in place."""
        return self._foreach_(torch._foreach_tan_)

    def tanh_(self) -> Self:
        """Apply [`torch.tanh`][] to every leaf in place."""
        return self._foreach_(torch._foreach_tanh_)

    def trunc_(self) -> Self:
        """Apply [`torch.trunc`][] to every leaf in place."""
        return self._foreach_(torch._foreach_trunc_)

    # -- predicates -------------------------------------------------------------------------
    def isfinite(self) -> Self:
        """Apply [`torch.isfinite`][] to every leaf. The results are bool."""
        return self._foreach(lambda leaves: [torch.isfinite(x) for x in leaves])

    def isnan(self) -> Self:
        """Apply [`torch.isnan`][] to every leaf. The results are bool."""
        return self._foreach(lambda leaves: [torch.isnan(x) for x in leaves])

    def isneginf(self) -> Self:
        """Apply [`torch.isneginf`][] to every leaf. The results are bool."""
        return self._foreach(lambda leaves: [torch.isneginf(x) for x in leaves])

    def isposinf(self) -> Self:
        """Apply [`torch.isposinf`][] to every leaf. The results are bool."""
        return self._foreach(lambda leaves: [torch.isposinf(x) for x in leaves])

    def isreal(self) -> Self:
        """Apply [`torch.isreal`][] to every leaf. The results are bool."""
        return self._foreach(lambda leaves: [torch.isreal(x) for x in leaves])
