"""Scores of instruction-following answers: the container, computation, averages and rewards."""

from __future__ import annotations

from tdstore.rl.scores.checking import Checker, loose_variants, verify
from tdstore.rl.scores.ifeval import IFEvalScoreData, ScoreSpec
from tdstore.rl.scores.scoring import accuracies, default_reward, score_from_checks

__all__ = [
    "Checker",
    "IFEvalScoreData",
    "ScoreSpec",
    "accuracies",
    "default_reward",
    "loose_variants",
    "score_from_checks",
    "verify",
]
