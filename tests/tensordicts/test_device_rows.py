"""Rows that go to another device than the one they are on: what the CPU can show, with `meta` as the other device."""

from __future__ import annotations

import pytest
import torch

from tdstore import TensorDict
from tdstore.index.rows import at_rows, put_rows, rows_on


def test_rows_go_to_a_device_once_and_checked():
    there: dict[torch.device, torch.Tensor] = {}
    meta = torch.device("meta")
    first = rows_on(meta, torch.tensor([1, -1]), 3, there)
    assert first.device == meta
    assert rows_on(meta, torch.tensor([1, -1]), 3, there) is first
    with pytest.raises(IndexError, match="index 3 is out of range for dimension 0 with size 3"):
        rows_on(meta, torch.tensor([3]), 3, {})


@pytest.mark.parametrize("dtype", [torch.uint16, torch.float8_e4m3fn, torch.complex64, torch.bool])
def test_rows_of_every_dtype_may_be_negative(dtype):
    leaf = torch.tensor([[0, 1], [1, 0], [1, 1]]).to(dtype)
    bits = at_rows(leaf, torch.tensor([-1, 0])).contiguous().view(torch.uint8)
    assert torch.equal(bits, leaf.view(torch.uint8).reshape(3, -1)[[2, 0]].reshape(bits.shape))


def test_rows_that_are_written_on_the_cpu_need_no_other_device():
    leaf = torch.zeros(3)
    put_rows(leaf, torch.tensor([2, 0, 2]), torch.tensor([1.0, 2.0, 3.0]), {})
    assert leaf.tolist() == [2.0, 0.0, 3.0]
    assert TensorDict({"a": leaf}, [3])[torch.tensor([2])]["a"].tolist() == [3.0]
