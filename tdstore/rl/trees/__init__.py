"""Search trees: a node with everything below it, forests that grow from rollouts, and the scores of a search."""

from __future__ import annotations

from tdstore.rl.trees.forest import MCTSForest
from tdstore.rl.trees.maps import DataMap, NodeMap, row_hashes
from tdstore.rl.trees.scores import PUCTScore, UCBScore, puct_score, ucb_score
from tdstore.rl.trees.tree import Tree

__all__ = [
    "DataMap",
    "MCTSForest",
    "NodeMap",
    "PUCTScore",
    "Tree",
    "UCBScore",
    "puct_score",
    "row_hashes",
    "ucb_score",
]
