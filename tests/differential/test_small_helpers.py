"""Helpers of `utils` for shapes, indices and settings."""

from __future__ import annotations

import importlib
from collections import namedtuple

import pytest
import torch

from .oracle import OURS, PEER, Side

Point = namedtuple("Point", ["x", "y"])  # noqa: PYI024 - what is asked about

CALLS = [
    'unravel_keys("a")',
    'unravel_keys((("a", "b"), "c"))',
    'unravel_keys(("a",))',
    'strtobool("Yes")',
    'strtobool("t")',
    'strtobool("off")',
    'strtobool("N")',
    "infer_size_impl([4, -1], 12)",
    "infer_size_impl((3, -1, 2), 12)",
    "infer_size_impl((3, 4), 12)",
    "convert_ellipsis_to_idx((..., 0), [4, 3])",
    "convert_ellipsis_to_idx((0, ...), torch.Size([4, 3, 2]))",
    "convert_ellipsis_to_idx(..., [4, 3])",
    "convert_ellipsis_to_idx((0,), [4, 3])",
    "convert_ellipsis_to_idx((None, ..., 0), [4, 3])",
    "convert_ellipsis_to_idx((0, 1, ...), [4, 3])",
    "convert_ellipsis_to_idx(0, [4, 3])",
    "is_namedtuple(Point(1, 2))",
    "is_namedtuple((1, 2))",
    "is_namedtuple(Point)",
    "is_namedtuple_class(Point)",
    "is_namedtuple_class(tuple)",
    "prod([2, 3])",
    "prod([])",
]


def value(call: str, side: Side) -> object:
    utils = importlib.import_module(f"{side.module.__name__}.utils")
    name = call.partition("(")[0]
    return eval(call, {name: getattr(utils, name), "torch": torch, "Point": Point})


@pytest.mark.parametrize("call", CALLS)
def test_the_value(call: str) -> None:
    assert value(call, OURS) == value(call, PEER)


@pytest.mark.parametrize(
    ("call", "kind"),
    [
        ('strtobool("maybe")', ValueError),
        ("convert_ellipsis_to_idx((..., ...), [4, 3])", RuntimeError),
        ("convert_ellipsis_to_idx((0, 1, 2, ...), [4, 3])", RuntimeError),
    ],
)
def test_the_error(call: str, kind: type[Exception]) -> None:
    for side in (PEER, OURS):
        with pytest.raises(kind):
            value(call, side)
