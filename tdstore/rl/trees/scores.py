"""Scores for selecting children in a search: UCB and PUCT."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor

from tdstore.errors import KeyNotFoundError


def ucb_score(wins: Tensor, visits: Tensor, total_visits: Tensor | float, c: float = math.sqrt(2.0)) -> Tensor:
    """Return `wins / visits + c * sqrt(log(total_visits) / visits)`: UCB1, the upper confidence bound of a mean.

    Args:
        wins: sums of values, of any shape.
        visits: numbers of visits, of the same shape; what was never visited scores infinity.
        total_visits: the number of visits of the parent, a number or of a shape that broadcasts.
        c: how much is explored.

    Example:
        >>> ucb_score(torch.tensor([1.0, 3.0, 0.0]), torch.tensor([1, 4, 0]), 5.0, c=1.0)
        tensor([2.2686, 1.3843,    inf])
    """
    visits = visits.to(torch.get_default_dtype())
    total = torch.as_tensor(total_visits, dtype=visits.dtype, device=visits.device).clamp(min=1)
    score = wins / visits + c * (total.log() / visits).sqrt()
    return torch.where(visits > 0, score, torch.inf)


def puct_score(wins: Tensor, visits: Tensor, total_visits: Tensor | float, prior: Tensor, c: float = 1.25) -> Tensor:
    """Return `wins / visits + c * prior * sqrt(total_visits) / (1 + visits)`, with 0 as the mean of no visits.

    Args:
        wins: sums of values, of any shape.
        visits: numbers of visits, of the same shape.
        total_visits: the number of visits of the parent, a number or of a shape that broadcasts.
        prior: probabilities of a policy, of the same shape.
        c: how much is explored.

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
        c: how much is explored.
    """

    c: float = math.sqrt(2.0)

    def __call__(self, node: Any) -> Tensor:
        """Return the scores of the children of a node."""
        wins, visits, total = statistics(node)
        return ucb_score(wins, visits, total, self.c)


@dataclasses.dataclass(frozen=True)
class PUCTScore:
    """The PUCT score of each child of a node, `[n_children]`.

    Args:
        c: how much is explored.
        prior_key: the entry of the children's `node_data` with the probability of a policy, a number for each child.

    Raises:
        KeyError: a child has no such entry.
    """

    c: float = 1.25
    prior_key: str = "prior"

    def __call__(self, node: Any) -> Tensor:
        """Return the scores of the children of a node."""
        wins, visits, total = statistics(node)
        priors = []
        for number, child in enumerate(node.children()):
            prior = None if child.node_data is None else child.node_data.get(self.prior_key, None)
            if prior is None:
                raise KeyNotFoundError(f"the child {number} has no entry {self.prior_key!r} in its node_data")
            priors.append(prior.reshape(()))
        return puct_score(wins, visits, total, torch.stack(priors), self.c)


def statistics(node: Any) -> tuple[Tensor, Tensor, float]:
    """Return wins and visits of the children of a node, `[n_children]`, and its own visits or theirs, if more."""
    dtype = torch.get_default_dtype()
    children = node.children()
    wins = torch.tensor([float(child.wins or 0) for child in children], dtype=dtype)
    visits = torch.tensor([float(child.count or 0) for child in children], dtype=dtype)
    return wins, visits, max(float(node.count or 0), float(visits.sum()))
