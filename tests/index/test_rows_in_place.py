"""Rows written from the leaf that they go to, rows that repeat, and rows from the end where a leaf is empty."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tdstore import TensorDict


@pytest.mark.parametrize("wide", [3, 64])
@pytest.mark.parametrize("step", [1, 2])
def test_a_value_that_lies_over_the_leaf_is_read_first(wide: int, step: int) -> None:
    """The `tensordict` package refuses some of these, and gives garbage for others, as torch does."""
    leaf = torch.arange(600 * wide).reshape(600, wide)[::step][:300]
    before = leaf.clone()
    td = TensorDict({"a": leaf}, [300])
    rows = torch.arange(300).roll(1)
    td[rows] = TensorDict({"a": leaf[:]}, [300])
    assert torch.equal(leaf[rows], before)


@pytest.mark.parametrize("form", [torch.as_tensor, np.asarray, list])
def test_the_last_of_many_repeated_rows_wins(form: Any) -> None:
    rows = torch.randint(0, 50, (9000,), generator=torch.Generator().manual_seed(0)).tolist()
    value = torch.arange(9000 * 3).reshape(9000, 3)
    td = TensorDict({"a": torch.zeros(50, 3, dtype=torch.int64)}, [50])
    td[form(rows)] = TensorDict({"a": value}, [9000])
    last = {row: at for at, row in enumerate(rows)}
    assert td["a"].tolist() == [value[last[row]].tolist() for row in range(50)]


def test_rows_from_the_end_of_a_leaf_without_elements() -> None:
    td = TensorDict({"a": torch.zeros(5, 0), "b": torch.arange(5)}, [5])
    assert td[torch.tensor([-1, 0])]["b"].tolist() == [4, 0]
    with pytest.raises(IndexError, match="index 5 is out of range"):
        td[torch.tensor([5])]


@pytest.mark.parametrize("rows", [3, 500, 5000])
def test_a_backward_pass_notices_rows_that_were_written_since(rows: int) -> None:
    """Whatever writes them: wide rows and many rows are copied by numpy, which torch does not see."""
    leaf, weight = torch.ones(5000, 32), torch.ones(5000, 32, requires_grad=True)
    loss = (leaf * weight).sum()
    td = TensorDict({"a": leaf}, [5000])
    td[torch.arange(rows)] = TensorDict({"a": torch.zeros(rows, 32)}, [rows])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
