"""Indices whose class is derived from tuple, and keys that are none."""

from __future__ import annotations

from collections import namedtuple

import pytest
import torch

from .oracle import OURS, PEER
from .programs import check, programs

Place = namedtuple("Place", ["row", "column"])  # noqa: PYI024 - such an index is what is tested
PLACES = [
    torch.Size([1, 2]),
    torch.Size([3]),
    Place(1, 2),
    Place(slice(1, 3), 0),
    Place([0, 2], [1, 1]),
]


@pytest.mark.parametrize("place", PLACES, ids=str)
def test_a_class_of_tuple_is_a_tuple(place: tuple[object, ...]) -> None:
    data = torch.arange(12.0).view(4, 3)
    for side in (PEER, OURS):
        td = side.TensorDict({"a": data.clone(), "n": {"b": data.clone()}}, [4, 3])
        part = td[place]
        assert part.batch_size == data[place].shape and part["n", "b"].equal(data[place])
        td[place] = part.clone().zero_()
        assert not td["a"][place].any() and td["a"].any()
        stack = side.module.lazy_stack(list(td.unbind(0)))
        assert stack[place].batch_size == data[place].shape


@programs("""
td = TensorDict(a=torch.zeros(3), batch_size=[3])
try:
    td.select(1)
except RuntimeError:
    caught = "RuntimeError"
caught
---
try:
    TensorDict(a=torch.zeros(3)).exclude(1)
except RuntimeError:
    caught = "RuntimeError"
caught
---
try:
    unravel_key(1)
except RuntimeError:
    caught = "RuntimeError"
caught
""")
def test_what_is_no_key_is_a_runtime_error(source: str) -> None:
    check(source)
