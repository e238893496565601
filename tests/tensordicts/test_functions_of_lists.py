"""Functions of lists of tensors give what those of one tensor give: results, dtypes, errors and gradients."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from tdstore import TensorDict
from tdstore.ops import arithmetic

INF, NAN = float("inf"), float("nan")
BINARY = {
    "maximum": arithmetic._maximum,
    "minimum": arithmetic._minimum,
    "clamp_max": arithmetic._clamp_max,
    "clamp_min": arithmetic._clamp_min,
}
TERNARY = {
    "clamp": arithmetic._clamp,
    "lerp": arithmetic._lerp,
    "addcmul": arithmetic._addcmul(2.5),
    "addcdiv": arithmetic._addcdiv(2),
}
DTYPES = (torch.float32, torch.float64, torch.float16, torch.int64, torch.uint8, torch.bool, torch.complex64)
NUMBERS: tuple[Any, ...] = (1, -2, 0.5, NAN, -INF, True, 10**20, 1 + 2j)


def leaves(dtype: torch.dtype, shift: float = 0.0) -> list[Tensor]:
    """Tensors of several shapes, one of them empty, one expanded, one transposed, with NaN and infinities."""
    numbers = torch.tensor([-2.0, -0.0, 0.5, 1.0, NAN, INF], dtype=torch.float64) + shift
    if not (dtype.is_floating_point or dtype.is_complex):
        numbers = numbers.nan_to_num(3.0, 4.0).abs()
    made = [numbers.reshape(6), numbers.reshape(2, 3).T, numbers[:0], numbers[2], numbers[3:4].expand(4)]
    return [tensor.to(dtype) for tensor in made]


def operands(number: int) -> list[tuple[str, Any]]:
    """Lists of tensors of each dtype, lists of one number for all, and of one tensor without dimensions."""
    kinds: list[tuple[str, Any]] = [(str(dtype), leaves(dtype, number)) for dtype in DTYPES]
    kinds += [(str(n), [n] * 5) for n in NUMBERS]
    return [
        *kinds,
        ("0-dim", [torch.tensor(0.75)] * 5),
        ("0-dim float64", [torch.tensor(0.75, dtype=torch.float64)] * 5),
    ]


def outcome(fn: Any, *args: Any) -> list[Tensor] | type[BaseException]:
    try:
        return list(fn(*args))
    except Exception as error:
        return type(error)


def check_alike(fn: Any, dtype: torch.dtype, *parts: Any) -> bool:
    """Compare a call for all leaves with one for each; whether there was a result."""
    got, wanted = outcome(fn, leaves(dtype), *parts), outcome(fn.each, leaves(dtype), *parts)
    if isinstance(wanted, type):
        assert got is wanted
        return False
    assert isinstance(got, list)
    for one, two in zip(got, wanted, strict=True):
        assert one.dtype is two.dtype
        torch.testing.assert_close(one, two, rtol=0, atol=0, equal_nan=True)
        if not one.dtype.is_complex:
            assert torch.equal(torch.signbit(one), torch.signbit(two))
    return True


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", BINARY)
def test_one_operand(name: str, dtype: torch.dtype) -> None:
    results = [check_alike(BINARY[name], dtype, other) for _, other in operands(1)]
    assert dtype.is_complex or any(results)


@pytest.mark.filterwarnings("ignore:Casting complex values to real")
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", TERNARY)
def test_two_operands(name: str, dtype: torch.dtype) -> None:
    pairs = itertools.product(operands(1), operands(2))
    results = [check_alike(TERNARY[name], dtype, second, third) for (_, second), (_, third) in pairs]
    assert any(results) or dtype.is_complex or dtype in (torch.bool, torch.int64, torch.uint8)


@pytest.mark.parametrize("name", [*BINARY, *TERNARY])
def test_gradients(name: str) -> None:
    number = name in ("clamp", "lerp")
    fn: Any = {**BINARY, **TERNARY}[name]

    def gradients(call: Any) -> list[Tensor]:
        mine = [torch.tensor([-1.0, 0.0, 0.5, 1.0, 2.0]).requires_grad_() for _ in range(3)]
        second = [torch.tensor([0.5, 0.0, 0.0, 1.0, -1.0]).requires_grad_() for _ in range(3)]
        parts: list[Any] = [second] if name in BINARY else [second, [0.75] * 3 if number else second]
        results = call(mine, *parts)
        sum(result.square().sum() for result in results).backward()
        return [tensor.grad for tensor in (*mine, *second) if tensor.grad is not None]

    got, wanted = gradients(fn), gradients(fn.each)
    assert len(got) == len(wanted) == 6
    for one, two in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", [*BINARY, *TERNARY])
def test_results_require_gradients_where_their_own_leaf_does(name: str) -> None:
    fn: Any = {**BINARY, **TERNARY}[name]
    mine = [torch.arange(3.0), torch.arange(3.0).requires_grad_(), torch.arange(3.0)]
    parts = [[0.5] * 3] if name in BINARY else [[torch.ones(3)] * 3, [torch.ones(3)] * 3]
    assert [result.requires_grad for result in fn(mine, *parts)] == [False, True, False]
    if name in BINARY:
        mixed = [torch.arange(3), *mine]
        assert [result.requires_grad for result in fn(mixed, [1] * 4)] == [False, False, True, False]
        assert [result.requires_grad for result in fn(mixed, [0.5] * 4)] == [False, False, True, False]
    other = TensorDict({"a": torch.ones(3), "b": torch.ones(3, requires_grad=True)}, [3])
    if name in BINARY:
        made = getattr(TensorDict({"a": torch.zeros(3), "b": torch.zeros(3)}, [3]), name)(other)
        assert not made["a"].requires_grad and made["b"].requires_grad


def test_clamp_between_numbers_has_the_gradients_of_its_leaves() -> None:
    mine = [torch.tensor([-1.0, 0.25, 2.0]).requires_grad_() for _ in range(3)]
    td = TensorDict({str(i): leaf for i, leaf in enumerate(mine)}, [3]).clamp(0, 1)
    td.sum(reduce=True).backward()
    assert [leaf.grad.tolist() for leaf in mine] == [[0.0, 1.0, 0.0]] * 3
    assert [leaf.tolist() for leaf in mine] == [[-1.0, 0.25, 2.0]] * 3


def test_operands_that_do_not_fit_are_refused_as_for_one_leaf() -> None:
    td = TensorDict({"a": torch.ones(3, 2), "b": torch.ones(3)}, [3])
    bad = TensorDict({"a": torch.ones(3, 4), "b": torch.ones(3)}, [3])
    for call in (td.maximum, td.clamp_min, lambda other: td.lerp(other, 0.5), lambda other: td.addcmul(other, other)):
        with pytest.raises(RuntimeError, match="size of tensor"):
            call(bad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int32, torch.bool, torch.complex64], ids=str)
def test_casts_share_what_has_the_dtype(dtype: torch.dtype) -> None:
    source = TensorDict({"a": torch.tensor([0.0, 1.5]), "b": torch.tensor([1, 0])}, [2])
    for made in (source.type(dtype), source.to(dtype)):
        assert made["a"].dtype is dtype and made["b"].dtype is dtype
        assert torch.equal(made["a"], source["a"].to(dtype)) and torch.equal(made["b"], source["b"].to(dtype))
        assert (made["a"] is source["a"]) == (dtype is torch.float32)
