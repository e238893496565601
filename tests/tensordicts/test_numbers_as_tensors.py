"""A number that is made a tensor once for all leaves gives the bits that it gives leaf by leaf."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tdstore import TensorDict
from tdstore.ops.arithmetic import as_tensors

NUMBERS = [1, -3, 0, 0.1, 1e-40, 3.3, float("inf"), float("nan"), 2**24 + 1, 2**53 + 1, 2**62, 1e300, 10**30, True]
OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    name: getattr(operator, name) for name in ("add", "sub", "mul", "truediv", "lt", "le", "gt", "ge", "eq", "pow")
} | {"rsub": lambda a, b: b - a, "rdiv": lambda a, b: b / a}
FLOATS = {"a": torch.float32, "b": torch.float64, "c": torch.float32}
MIXED = {"a": torch.float32, "b": torch.int32, "c": torch.bfloat16, "d": torch.bool, "e": torch.uint8}


def leaf(dtype: torch.dtype) -> Tensor:
    return torch.tensor([[0.0, 1.5, -2.25, 16777216.0], [0.1, 3.0, 7.7, 1e-39]], dtype=torch.float64).to(dtype)


def outcome(run: Callable[[], Any]) -> Any:
    try:
        return run()
    except (RuntimeError, OverflowError, TypeError) as error:
        return type(error)


@pytest.mark.parametrize("dtypes", [FLOATS, MIXED], ids=["floats", "mixed"])
@pytest.mark.parametrize("number", NUMBERS, ids=str)
@pytest.mark.parametrize("name", OPERATORS)
def test_a_number_beside_leaves(name: str, number: Any, dtypes: dict[str, torch.dtype]) -> None:
    op = OPERATORS[name]
    leaves = {key: leaf(dtype) for key, dtype in dtypes.items()}
    want = outcome(lambda: {key: op(value, number) for key, value in leaves.items()})
    made = outcome(lambda: op(TensorDict(leaves, [2]), number))
    if isinstance(want, dict):
        for key, value in want.items():
            assert made[key].dtype is value.dtype
            assert torch.equal(made[key].isnan(), value.isnan())
            assert torch.equal(made[key].nan_to_num(0.5), value.nan_to_num(0.5))
    else:
        assert isinstance(made, type) and issubclass(made, want)


@pytest.mark.parametrize("name", ["iadd", "isub", "imul", "itruediv"])
def test_in_place(name: str) -> None:
    td = TensorDict({key: leaf(dtype) for key, dtype in FLOATS.items()}, [2])
    want = {key: getattr(operator, name)(value.clone(), 0.3) for key, value in td.items()}
    getattr(operator, name)(td, 0.3)
    assert all(torch.equal(td[key], value) for key, value in want.items())


def test_gradients_reach_the_leaves() -> None:
    leaves = {key: leaf(torch.float32).requires_grad_() for key in "ab"}
    (TensorDict(leaves, [2]) * 3 + 1).sum(reduce=True).backward()
    assert all(torch.equal(value.grad, torch.full((2, 4), 3.0)) for value in leaves.values())


def test_what_stays_a_number() -> None:
    floats = [leaf(torch.float32), leaf(torch.float32)]
    assert all(isinstance(part, Tensor) for part in as_tensors([2, 2], floats))
    for number, leaves in (
        (2, [leaf(torch.float32), leaf(torch.bfloat16)]),  # rounded once less with a number
        (2, [torch.zeros(2, device="meta"), torch.zeros(2, device="meta")]),
        (True, floats),
        (1e300, floats),
        (1j, floats),
    ):
        assert as_tensors([number, number], leaves) == [number, number]
    assert as_tensors([2], floats[:1]) == [2]


def test_under_modes_of_torch() -> None:
    td = TensorDict({"a": leaf(torch.float32), "b": leaf(torch.float32)}, [2])
    with torch.device("meta"):
        assert (td + 1)["a"].device.type == "cpu"
    with torch.inference_mode():
        made = td + 1
    assert torch.equal(made["b"], td["b"] + 1)
