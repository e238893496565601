"""Maths in place on leaves of several dtypes: what torch refuses changes nothing, also after it took the like."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tdstore import TensorDict


def mixed() -> TensorDict:
    leaves = {"f": torch.full((2,), 4.0), "h": torch.full((2,), 4.0, dtype=torch.float16), "i": torch.tensor([4, 4])}
    return TensorDict(leaves, [2])


@pytest.mark.parametrize(
    ("taken", "refused"),
    [
        (lambda td: td.pow_(2), lambda td: td.pow_(-1)),
        (lambda td: td.add_(1), lambda td: td.add_(1.0)),
        (lambda td: td.mul_(2), lambda td: td.mul_(0.5)),
        (lambda td: td.mul_(torch.tensor(2)), lambda td: td.mul_(torch.tensor(2.0))),
        (lambda td: td.add_(td.clone()), lambda td: td.add_(td.float())),
        (lambda td: td.neg_(), lambda td: td.set("b", torch.tensor([True, False])).neg_()),
    ],
)
def test_refusals_after_a_call_that_was_taken(taken: Callable[[Any], Any], refused: Callable[[Any], Any]) -> None:
    for _ in range(3):
        td = mixed()
        taken(td)
        before = td.clone()
        with pytest.raises(RuntimeError):
            refused(td)
        assert all(torch.equal(td[key], before[key]) for key in ("f", "h", "i"))


def test_results_do_not_depend_on_earlier_calls() -> None:
    for number in (3, 2, 3, True, 2):
        td = mixed().mul_(number)
        assert [td[key].tolist() for key in ("f", "h", "i")] == [[4 * number] * 2] * 3
        assert [td[key].dtype for key in ("f", "h", "i")] == [torch.float32, torch.float16, torch.int64]
    assert mixed().zero_().abs_().bytes() == mixed().bytes()
