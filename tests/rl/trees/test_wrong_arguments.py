"""Arguments that no tree can take: an error of ours that names the argument, and the numbers of all nodes as before."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tdstore.errors import ArgumentKindError, InvalidTypeError
from tdstore.rl.trees import Tree


def searched() -> Tree:
    """A root with two children, each visited once, where wins are whole numbers in the root only."""
    root = Tree(count=torch.tensor(2), wins=torch.tensor(3))
    for _ in range(2):
        root.add_child(Tree(count=torch.tensor(1), wins=torch.tensor(1.0)))
    return root


CALLS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "no path": ({"path": None}, InvalidTypeError, "path must be a sequence of numbers, not None"),
    "a number as a path": ({"path": 1}, InvalidTypeError, "path must be a sequence of numbers, not an int"),
    "a value": ({"value": "x"}, InvalidTypeError, "value is a number or a tensor, not str"),
    "a discount": ({"discount": None}, InvalidTypeError, "discount is a number or a tensor, not NoneType"),
    "a value that the root cannot have": ({"value": float("nan")}, ArgumentKindError, "for the wins of a node"),
    "a value beyond all": ({"value": 10**30}, ArgumentKindError, "for the wins of a node"),
    "what a discount makes of it": ({"discount": float("inf")}, ArgumentKindError, "for the wins of a node"),
}


@pytest.mark.parametrize("name", CALLS)
def test_the_error_names_the_argument_and_nothing_changes(name: str) -> None:
    arguments, kind, text = CALLS[name]
    root = searched()
    with pytest.raises(kind, match=text):
        root.backpropagate(**{"path": (0,), "value": 1.0, **arguments})
    assert [(node.count.item(), node.wins.item()) for node in root.iter_nodes()] == [(2, 3), (1, 1), (1, 1)]
    root.backpropagate((), 1)
    assert [(node.count.item(), node.wins.item()) for node in root.iter_nodes()] == [(3, 4), (1, 1), (1, 1)]
