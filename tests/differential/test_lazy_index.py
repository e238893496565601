"""Indices into lazy stacks, read and written: as into the TensorDicts that they make, at every stack dimension."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from .cases import Case, Cases, grouped
from .oracle import OURS, differences, outcome
from .stacks import STACKS, content, exact
from .structures import t

tensor = torch.tensor
BASIC: dict[str, Any] = {
    "0": 0,
    "-1": -1,
    "99": 99,
    "1:": slice(1, None),
    ":1": slice(0, 1),
    "::2": slice(None, None, 2),
    "::-1": slice(None, None, -1),
    ":": slice(None),
    "...": ...,
    "()": (),
    "None": None,
    "(0, 0)": (0, 0),
    "(:, 0)": (slice(None), 0),
    "(..., 0)": (..., 0),
    "(0, ...)": (0, ...),
    "(1:, 1:)": (slice(1, None), slice(1, None)),
    "(:, 1)": (slice(None), 1),
    "(None, 0)": (None, 0),
    "(0, None)": (0, None),
    "(:, None)": (slice(None), None),
    "(0, 0, 0, 0)": (0, 0, 0, 0),
    "[0, 1]": [0, 1],
    "tensor([1, 0])": tensor([1, 0]),
    "tensor([-1])": tensor([-1]),
    "tensor(1)": tensor(1),
    "range(2)": range(2),
    "(:, tensor([1, 0]))": (slice(None), tensor([1, 0])),
    "(0, tensor([1, 0]))": (0, tensor([1, 0])),
    "(1:, [0, 1])": (slice(1, None), [0, 1]),
}
FANCY: dict[str, Any] = {
    "tensor([[0, 1], [1, 0]])": tensor([[0, 1], [1, 0]]),
    "tensor([0, 0, 1])": tensor([0, 0, 1]),
    "([0, 1], [1, 0])": ([0, 1], [1, 0]),
    "([0, 1], :1)": ([0, 1], slice(0, 1)),
    "(tensor([[0], [1]]), tensor([0, 1]))": (tensor([[0], [1]]), tensor([0, 1])),
    "(None, [0, 1])": (None, [0, 1]),
    "([1, 0], None, [0, 1])": ([1, 0], None, [0, 1]),
    "True": True,
    "False": False,
    "tensor([])": tensor([], dtype=torch.int64),
    "0.5": 0.5,
    "[99]": [99],
}
CUBE: dict[str, Any] = {
    "([0, 1], :, [1, 0])": ([0, 1], slice(None), [1, 0]),
    "(:, [0, 1], [1, 0])": (slice(None), [0, 1], [1, 0]),
    "(0, :, [1, 0])": (0, slice(None), [1, 0]),
    "([0, 1], 0)": ([0, 1], 0),
    "([0, 1], 1:, 0)": ([0, 1], slice(1, None), 0),
    "([[0, 1], [1, 1]], :, 1)": (tensor([[0, 1], [1, 1]]), slice(None), 1),
    "(:, :, [1, 1, 0])": (slice(None), slice(None), [1, 1, 0]),
}
EVEN = ["even@0", "even@1", "named@0", "named@1", "text@0", "text@1", "wide@0", "wide@1", "wide@2", "bare@0", "inner@0"]
SQUARE = ["even@0", "even@1", "text@0", "text@1", "wide@0", "wide@1", "wide@2"]


def indices(stack: str) -> dict[str, Any]:
    td = STACKS[stack](OURS)
    n = td.batch_size
    masks = {
        "mask of 1": t(n[0], dtype=torch.bool),
        "no rows": torch.zeros(n[0], dtype=torch.bool),
        "wrong mask": torch.ones(n[0] + 1, dtype=torch.bool),
    }
    if len(n) > 1:
        masks |= {
            "mask of 2": t(*n[:2], dtype=torch.bool),
            "(:, mask)": (slice(None), t(n[1], dtype=torch.bool)),
            "(mask, 0)": (t(n[0], dtype=torch.bool), 0),
        }
    return {**BASIC, **FANCY, **masks, **(CUBE if len(n) > 2 else {})}


ALL = {(stack, name): index for stack in EVEN for name, index in indices(stack).items()}

case = Cases()
for stack in ("even@0", "even@1", "wide@1", "uneven@0", "uneven@1", "named@0", "bare@0", "inner@0"):
    for name, index in BASIC.items():
        if name in ("99", "::-1", "(0, 0, 0, 0)", "tensor(1)", "tensor([-1])"):
            continue  # the peer goes by other ways than torch
        case(f"{stack}[{name}]", lambda M, s=stack, i=index: exact(STACKS[s](M)[i]))


@case.parametrize
def test_same_elements(case: Case) -> None:
    case.check()


@grouped(("stack", "name"), ALL)
def test_read(stack: str, name: str) -> None:
    index, lazy = ALL[stack, name], STACKS[stack](OURS)
    want = outcome(lambda: content(lazy.to_tensordict()[index]))
    got = outcome(lambda: content(lazy[index]))
    assert not list(differences(want, got))


@pytest.mark.parametrize("what", ["number", "td", "lazy", "dict"])
@grouped(("stack", "name"), ALL)
def test_write(stack: str, name: str, what: str) -> None:
    index = ALL[stack, name]

    def run(td: Any) -> Any:
        part = STACKS[stack](OURS).to_tensordict()[index]
        value: Any = 7
        if what != "number":
            value = part.apply(lambda x: x + 50, filter_empty=False)
        if what == "lazy" and part.batch_dims:
            value = value.to_lazystack(0) if len(value) else value
        if what == "dict":
            value = value.filter_non_tensor_data().to_dict()
        td[index] = value
        return content(td)

    lazy = outcome(lambda: run(STACKS[stack](OURS)))
    dense = outcome(lambda: run(STACKS[stack](OURS).to_tensordict()))
    assert not list(differences(dense, lazy))


@grouped(("stack", "name"), [(s, n) for s, n in ALL if s in SQUARE])
def test_leaf(stack: str, name: str) -> None:
    index = ALL[stack, name]

    def run(td: Any) -> Any:
        read = td.get_at("a", index).clone()
        td.set_at_("a", read + 50, index)
        td.set_at_("a", 3.0, index)
        return read, td["a"]

    lazy, dense = (outcome(lambda: run(td)) for td in (STACKS[stack](OURS), STACKS[stack](OURS).to_tensordict()))
    assert not list(differences(dense, lazy))


def test_repeated_rows_are_copies() -> None:
    stack = STACKS["even@0"](OURS)
    rows = stack[[0, 0, 1]]
    rows += 1
    assert torch.equal(rows["a"][0], rows["a"][1])
    assert rows[0] is stack[0] and rows[1] is not stack[0]
