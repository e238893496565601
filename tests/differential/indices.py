"""Index expressions as text: the text is the test's name, and is evaluated for the batch at hand."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch


def _texts(table: str) -> list[str]:
    return [text.strip() for line in table.splitlines() for text in line.split("  |  ") if text.strip()]


# No more than one batch dimension is used.
ONE = _texts(
    """
    0  |  -1  |  2  |  1:3  |  :  |  ::2  |  1::2  |  -2:  |  3:1  |  0:0  |  10:20  |  -99:2  |  1:-1  |  ...
    None  |  True  |  False  |  ()  |  0,  |  :,  |  ...,  |  None,  |  True,  |  [0, 2]  |  [2, 0, 0]  |  [-1, 1]
    []  |  [1]  |  [[0, 1], [2, 0]]  |  (0,)  |  ([0, 2],)  |  range(2)  |  range(0)  |  range(2, -1, -1)
    range(0, 4, 2)  |  np.array([1, 0])  |  np.array([[1, 0]])  |  np.int64(1)  |  np.array(1)
    np.array([], dtype=np.int64)  |  np.array([0, 1], dtype=np.uint16)  |  tensor([0, 2])  |  tensor([2, 0, 2])
    tensor([-1, 0])  |  tensor(1)  |  tensor(-1)  |  tensor([[0, 1], [2, 0]])
    tensor([0, 1], dtype=torch.int32)  |  tensor([], dtype=torch.int64)  |  tensor(True)  |  tensor(False)
    mask(1)  |  ~mask(1)  |  mask(1) & ~mask(1)  |  mask(1).tolist()  |  mask(1).cpu().numpy()  |  [True]  |  0, None
    None, 0  |  ..., None  |  None, ..., None  |  None, None  |  :, None  |  0, ...  |  1:3, ...  |  [0, 1], ...
    mask(1), ...  |  [0, 1], None  |  None, [0, 1]  |  True, 0  |  None, 1:3, None  |  None, tensor([1, 0]), None
    """
)

TWO = _texts(
    """
    :, 0  |  0, :  |  ..., 0  |  ..., 0:2  |  0, 0  |  -1, -1  |  0, ..., 1  |  1:3, 0:2  |  ::2, ::2
    :, None, 0  |  0, None, 1  |  None, 0, 1  |  [0, 2], 1  |  1, [0, 2]  |  [0, 2], [1, 0]  |  [0, 2], :
    :, [0, 2]  |  [0, 2], 1:  |  1:, [2, 0]  |  0:0, [0]  |  [], 0  |  [], :  |  tensor([0, 2]), 1:
    1:, tensor([0, 2])  |  :, tensor([[0, 1], [2, 0]])  |  tensor([[0, 1], [2, 0]]), :
    tensor([[0, 1], [2, 0]]), tensor([0, 1])  |  tensor([0, 2]), tensor([[1], [0]])  |  tensor(1), 0
    tensor(1), :  |  tensor(1), tensor(0)  |  tensor(1), [0, 2]  |  tensor([0, 1]), tensor(1)  |  range(2), 0
    0, range(2)  |  range(2), range(2)  |  np.array([0, 1]), np.array([1, 0])  |  np.array([0, 1]), :
    np.int64(0), :  |  np.int64(0), np.int64(1)  |  mask(1), 0  |  mask(1), :  |  mask(1), 1:  |  :, mask(2)[0]
    mask(1), [0]  |  mask(2)  |  ~mask(2)  |  mask(2) & ~mask(2)  |  mask(2), None  |  None, mask(2)
    mask(2).cpu().numpy()  |  mask(2).tolist()  |  mask(1).tolist(), 0  |  ..., [0, 1]  |  [0, 1], ..., 0
    [0, 1], None, [1, 0]  |  None, [0, 1], [1, 0]  |  True, 0, 1  |  0, True  |  :, True  |  0, False
    [0, 1], [True, False, True]  |  None, :, 0  |  :, 0:2, None  |  [[0, 1]], [[1], [0]]
    """
)

THREE = _texts(
    """
    0, 1, 2  |  :, 0, :  |  ..., 0:2  |  0, ..., 1  |  [0, 1], :, [1, 2]  |  :, [0, 1], [1, 2]
    [0, 1], [1, 2], :  |  0, :, [1, 3]  |  [0, 1], 0, :  |  0, [0, 1], :  |  0, [0, 1], [1, 2]
    [0, 1], 0, [1, 2]  |  [0, 1], :, 0  |  [0, 1], 1:, 2  |  mask(2), 0  |  mask(2), :  |  mask(2), 1:
    mask(2), [0]  |  0, mask(3)[0]  |  :, mask(3)[0]  |  None, ..., 0, None  |  None, 0, None, 1, None, 2
    mask(3)  |  mask(3), None  |  tensor([[0, 1], [1, 0]]), :, tensor([0, 1])  |  :, tensor([[0, 1], [1, 0]]), :
    0, None, [0, 1], :  |  [0, 1], None, :, [0, 1]  |  ..., [0, 1], 0  |  ..., mask(3)[0, 0]  |  :, :, ::2
    1, ..., [0, 3]  |  tensor(1), :, [0, 1]  |  0, :, tensor(1)  |  [0, 1], :, tensor(1)
    [0, 1], :, None, [1, 2]  |  mask(1), :, 0  |  mask(1), :, [0]  |  None, [0, 1], :, [1, 2]
    """
)

# Refused for every batch of one or more dimensions, and for two or more.
INVALID = _texts(
    """
    99  |  -99  |  [99]  |  [-99]  |  tensor([99])  |  tensor(99)  |  np.array([99])  |  0.5  |  [0.5]  |  object()
    slice(0.5)  |  ..., ...  |  {0}  |  1j  |  (0, 'a')  |  slice(None, None, 0)  |  ::-1  |  tensor([0.0, 1.0])
    torch.ones(7, dtype=torch.bool)
    """
)
INVALID_TWO = _texts("0, 99  |  99, 0  |  :, [99]  |  0, tensor([99])  |  [0, 1], [0, 1, 2]")

# More terms than the batch has dimensions. Of these structures at least one leaf has no room for them.
TOO_MANY = {
    "deep_batch": _texts("0, 0  |  :, 0  |  [0, 1], [0, 1]  |  0, None, 0  |  ..., 0, 0"),
    "flat": _texts(
        "0, 0  |  :, 0  |  ..., 0, 0  |  [0, 1], 0  |  mask(1), 0  |  0, 0, 0  |  torch.ones(5, 3, dtype=torch.bool)"
    ),
    "nested": _texts("0, 0, 0  |  :, :, 0  |  mask(2), 0  |  mask(1), 0, 0  |  [0, 1], :, [0]  |  None, 0, 0, 0"),
    "scalar": _texts("0  |  :  |  [0]  |  tensor([0])  |  torch.ones(3, dtype=torch.bool)"),
}

# Of "wide" every leaf has two feature dimensions, which the peer then indexes.
INTO_FEATURES = _texts(
    "0, 0  |  :, 0  |  [0, 1], 0  |  mask(1), 0  |  ..., 0, 0  |  None, 0, 0  |  0, :  |  :, [0, 2], 1"
)


def index_of(text: str, batch: tuple[int, ...]) -> Any:
    """The index that `text` says, for a batch of that shape; `mask(n)` covers the first `n` dimensions."""

    def mask(dims: int) -> torch.Tensor:
        shape = batch[:dims]
        return (torch.arange(math.prod(shape)) % 3 != 1).reshape(shape)

    def mask_of(n: int) -> torch.Tensor:
        return torch.arange(n) % 2 == 0

    names = {"np": np, "torch": torch, "tensor": torch.tensor, "mask": mask, "mask_of": mask_of}
    return eval(f"np.s_[{text}]", names) if text != "()" else ()


def indices_for(batch: tuple[int, ...]) -> list[str]:
    """The texts that use no more dimensions than the batch has."""
    groups = [
        ["...", "None", "True", "False", "()", "None, None", "..., None", "tensor(True)"],
        ONE,
        ONE + TWO,
        ONE + TWO + THREE,
    ]
    return list(dict.fromkeys(groups[len(batch)]))
