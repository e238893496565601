"""What is written into a lazy stack may lie in the memory of its elements: the result is that of a copy."""

from __future__ import annotations

import pytest
import torch

import tdstore
from tdstore import TensorDict

N = 4


def stack(kind):
    """Return a lazy stack whose elements are rows or columns of two tensors, and these."""
    x, y = torch.arange(float(N * N)).reshape(N, N), torch.arange(float(N * N * 2)).reshape(N, N, 2)
    if kind == "columns":
        return tdstore.lazy_stack([TensorDict({"x": x[:, i], "n": {"y": y[:, i]}}, [N]) for i in range(N)], 1), x, y
    batch = [N] if kind == "rows of a batch" else []
    return tdstore.lazy_stack([TensorDict({"x": x[i], "n": {"y": y[i]}}, batch) for i in range(N)]), x, y


def as_td(lazy, x, y):
    return TensorDict({"x": x, "n": {"y": y}}, lazy.batch_size)


ROWS = torch.tensor([2, 0, 3, 1])
MASK = torch.tensor([True, False, True, True])
WRITES = {
    "set_": lambda lazy, x, y: lazy.set_("x", x),
    "set_ of a nested entry": lambda lazy, x, y: lazy.set_(("n", "y"), y),
    "set(inplace=True)": lambda lazy, x, y: lazy.set("x", x, inplace=True),
    "set_at_ of a slice": lambda lazy, x, y: lazy.set_at_("x", x[:2], slice(1, 3)),
    "set_at_ of rows": lambda lazy, x, y: lazy.set_at_("x", x, ROWS),
    "set_at_ of a mask": lambda lazy, x, y: lazy.set_at_("x", x[1:], MASK),
    "update_": lambda lazy, x, y: lazy.update_(as_td(lazy, x, y)),
    "update_ with a dict": lambda lazy, x, y: lazy.update_({"x": x, ("n", "y"): y}),
    "update(inplace=True)": lambda lazy, x, y: lazy.update(as_td(lazy, x, y), inplace=True),
    "update_at_": lambda lazy, x, y: lazy.update_at_(as_td(lazy, x, y), ROWS),
    "update_at_ with a dict": lambda lazy, x, y: lazy.update_at_({"x": x[:2], "n": {"y": y[:2]}}, slice(1, 3)),
    "lazy[:] =": lambda lazy, x, y: lazy.__setitem__(slice(None), as_td(lazy, x, y)),
    "lazy[rows] =": lambda lazy, x, y: lazy.__setitem__(ROWS, as_td(lazy, x, y)),
    "lazy[mask] =": lambda lazy, x, y: lazy.__setitem__(MASK, as_td(lazy, x, y)[1:]),
    "lazy[slice] = dict": lambda lazy, x, y: lazy.__setitem__(slice(1, 3), {"x": x[:2], "n": {"y": y[:2]}}),
    "add_": lambda lazy, x, y: lazy.add_(as_td(lazy, x, y)),
    "lerp_": lambda lazy, x, y: lazy.lerp_(as_td(lazy, x, y), 0.25),
    "apply_": lambda lazy, x, y: lazy.apply_(lambda mine, other: other, as_td(lazy, x, y)),
}


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("kind", ["rows", "rows of a batch", "columns"])
def test_a_transposed_source_is_read_before_it_is_written(write, kind):
    results = []
    for copy in (True, False):
        lazy, x, y = stack(kind)
        sources = (x.T, y.transpose(0, 1))
        WRITES[write](lazy, *([t.clone() for t in sources] if copy else sources))
        results.append((x, y))
    for expected, found in zip(*results, strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("write", ["add_", "mul_", "lerp_"])
@pytest.mark.parametrize("order", [[1, 2, 3, 0], [3, 2, 1, 0]])
def test_elements_in_another_order_are_read_before_they_are_written(write, order):
    results = []
    for copy in (True, False):
        lazy = tdstore.lazy_stack([TensorDict({"x": torch.tensor([i + 1.0])}, []) for i in range(N)])
        moved = tdstore.lazy_stack([lazy.tensordicts[i] for i in order])
        getattr(lazy, write)(moved.clone() if copy else moved, *([0.5] if write == "lerp_" else []))
        results.append(lazy["x"].tolist())
    assert results[0] == results[1]
