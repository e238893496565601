"""The short way to the shape of an index gives what the general one gives, for any terms."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from tdstore.index.selection import Selection, index_shape

TERMS: list[Any] = [
    lambda r: r.randrange(-5, 5),
    lambda r: slice(r.choice([None, -2, 0, 1, 9]), r.choice([None, -1, 2, 9]), r.choice([None, 1, 2, -1, 0])),
    lambda r: None,
    lambda r: ...,
    lambda r: True,
    lambda r: [0, 1],
    lambda r: torch.tensor([r.randrange(-4, 4) for _ in range(r.randrange(3))], dtype=torch.int64),
    lambda r: torch.tensor([[r.randrange(-3, 3)] * 2] * 2),
    lambda r: torch.tensor([r.random() > 0.5 for _ in range(3)]),
    lambda r: torch.tensor([[r.random() > 0.5, True]] * 3),
    lambda r: torch.tensor(r.randrange(-3, 3)),
    lambda r: torch.tensor(r.random() > 0.5),
]


def outcome(run: Any) -> Any:
    try:
        return run()
    except Exception as error:
        return type(error), str(error)


@pytest.mark.parametrize("seed", range(8))
def test_shapes_and_errors_are_those_of_a_selection(seed: int) -> None:
    r = random.Random(seed)
    shapes = 0
    for _ in range(800):
        size = torch.Size(r.choice([(), (3,), (3, 2), (3, 2, 4), (0, 2)]))
        index = tuple(r.choice(TERMS)(r) for _ in range(r.randrange(4)))
        wanted = outcome(lambda size=size, index=index: Selection.full(size)[index].shape)
        assert outcome(lambda size=size, index=index: index_shape(size, index)) == wanted, (size, index)
        shapes += isinstance(wanted, torch.Size)
    assert shapes > 200
