"""Scores for selecting children in a search: UCB and PUCT."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor

from tdstore.arguments import NO_NUMBER, refuse_value
from tdstore.errors import InvalidArgumentError, KeyNotFoundError


def ucb_score(wins: Tensor, visits: Tensor, total_visits: Tensor | float, c: float = math.sqrt(2.0)) -> Tensor:
    """Compute the upper confidence bound of a mean (UCB1): `wins / visits + c * sqrt(log(total_visits) / visits)`.

    Args:
        wins: sums of values, of any shape.
        visits: numbers of visits, of the same shape; without visits the score is infinite.
        total_visits: the number of visits of the parent, a number or of a shape that broadcasts.
        c: the weight of exploration.

    Example:
        >>> ucb_score(torch.tensor([1.0, 3.0, 0.0]), torch.tensor([1, 4, 0]), 5.0, c=1.0)
        tensor([2.2686, 1.3843,    inf])
    """
    visits = visits.to(torch.get_default_dtype())
    total = torch.as_tensor(total_visits, dtype=visits.dtype, device=visits.device).clamp(min=1)
    score = wins / visits + c * (total.log() / visits).sqrt()
    return torch.where(visits > 0, score, torch.inf)


def puct_score(wins: Tensor, visits: Tensor, total_visits: Tensor | float, prior: Tensor, c: float = 1.25) -> Tensor:
    """Compute `wins / visits + c * prior * sqrt(total_visits) / (1 + visits)`, with 0 as the mean of no visits.

    Args:
        wins: sums of values, of any shape.
        visits: numbers of visits, of the same shape.
        total_visits: the number of visits of the parent, a number or of a shape that broadcasts.
        prior: probabilities of a policy, of the same shape.
        c: the weight of exploration.

    Example:
        >>> puct_score(torch.tensor([1.0, 0.0]), torch.tensor([2, 0]), 4.0, torch.tensor([0.25, 0.75]), c=1.0)
        tensor([0.6667, 1.5000])
    """
    visits = visits.to(torch.get_default_dtype())
    total = torch.as_tensor(total_visits, dtype=visits.dtype, device=visits.device)
    return wins / visits.clamp(min=1) + c * prior * total.sqrt() / (1 + visits)


@dataclasses.dataclass(frozen=True)
class UCBScore:
    """The UCB1 score of each child of a node, `[n_children]`.

    Args:
        c: the weight of exploration.

    Example:
        >>> root = Tree(count=5, wins=0.0)
        >>> root.subtree = tdstore.lazy_stack([Tree(count=1, wins=1.0), Tree(count=4, wins=3.0)])
        >>> UCBScore(c=1.0)(root)
        tensor([2.2686, 1.3843])
    """

    c: float = math.sqrt(2.0)

    def __call__(self, node: Any) -> Tensor:
        """Compute the scores of the children of a node."""
        wins, visits, total = statistics(node)
        return ucb_score(wins, visits, total, self.c)


@dataclasses.dataclass(frozen=True)
class PUCTScore:
    """The PUCT score of each child of a node, `[n_children]`.

    Args:
        c: the weight of exploration.
        prior_key: the entry of the children's `node_data` with the probability of a policy, a number for each child.

    Raises:
        KeyError: a child has no such entry.

    Example:
        >>> priors = [tdstore.TensorDict({"prior": torch.tensor(p)}) for p in (0.25, 0.75)]
        >>> root = Tree(count=4, wins=0.0)
        >>> children = [Tree(count=n, wins=w, node_data=p) for n, w, p in zip((2, 0), (1.0, 0.0), priors)]
        >>> root.subtree = tdstore.lazy_stack(children)
        >>> PUCTScore(c=1.0)(root)
        tensor([0.6667, 1.5000])
    """

    c: float = 1.25
    prior_key: str = "prior"

    def __call__(self, node: Any) -> Tensor:
        """Compute the scores of the children of a node."""
        wins, visits, total = statistics(node)
        priors = []
        for number, child in enumerate(node.children()):
            prior = None if child.node_data is None else child.node_data.get(self.prior_key, None)
            if prior is None:
                raise KeyNotFoundError(f"the child {number} has no entry {self.prior_key!r} in its node_data")
            priors.append(prior.reshape(()))
        return puct_score(wins, visits, total, torch.stack(priors), self.c)


def statistics(node: Any) -> tuple[Tensor, Tensor, float]:
    """Return wins and visits of the children, `[n_children]`, and those of the node or of all its children, if more."""
    dtype = torch.get_default_dtype()
    children = node.children()
    wins = torch.tensor([float(child.wins or 0) for child in children], dtype=dtype)
    visits = torch.tensor([float(child.count or 0) for child in children], dtype=dtype)
    return wins, visits, max(float(node.count or 0), float(visits.sum()))


def check_value(value: float | Tensor, wins: object) -> None:
    """Check that a value can be added to the wins of a node in place.

    Raises:
        InvalidArgumentError: its shape differs. ArgumentKindError: the dtype of the wins has no such number.
    """
    if not isinstance(wins, Tensor):
        return
    if isinstance(value, Tensor):
        if value.numel() != 1 and value.shape != wins.shape:
            raise InvalidArgumentError(f"value has shape {list(value.shape)}, and wins has {list(wins.shape)}")
    else:
        try:
            wins.clone().add_(value)
        except NO_NUMBER as error:
            raise refuse_value(value, "the wins of a node", error) from None
