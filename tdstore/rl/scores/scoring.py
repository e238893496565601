"""Conversion of checks to scores, and of scores to accuracies and rewards."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from tdstore import TensorDictBase
from tdstore.arguments import as_list, refuse_type
from tdstore.errors import InvalidArgumentError, UnevenError
from tdstore.rl.scores.ifeval import FIELDS, IFEvalScoreData

Blocks = int | Tensor | Sequence[str] | Sequence[Sequence[str]] | None
"""Blocks found in answers: how many, or the blocks of one answer (a list of strings), or of each (a list of lists)."""


def score_from_checks(strict: Sequence[bool], loose: Sequence[bool], batch_size: Sequence[int] = ()) -> IFEvalScoreData:
    """Make the score of one answer from its checks, one for each instruction.

    The prompt level is True when all instructions are followed, and so also when there are none.

    Args:
        strict: for each instruction, whether the exact answer follows it.
        loose: for each instruction, whether some variant of the answer follows it.
        batch_size: repeat the score for each element of a batch of this size.

    Returns:
        A score with fields of shape `[*batch_size, 1]` and `[*batch_size, len(strict)]`, bool.

    Raises:
        ValueError: `strict` and `loose` have different lengths.

    Example:
        >>> score = score_from_checks([True, False], [True, True])
        >>> score.prompt_level_strict_acc.item(), score.prompt_level_loose_acc.item()
        (False, True)
    """
    strict, loose = (
        as_list(checks, "what score_from_checks() takes", "a sequence of bools") for checks in (strict, loose)
    )
    if len(strict) != len(loose):
        raise InvalidArgumentError(
            f"{len(strict)} strict checks and {len(loose)} loose ones: each instruction has one of both"
        )
    fields = []
    for checks in (strict, loose):
        one = torch.tensor([bool(check) for check in checks], dtype=torch.bool)
        fields += [part.expand(*batch_size, -1).clone() for part in (one.all().reshape(1), one)]
    return IFEvalScoreData(*fields, batch_size=batch_size)


def accuracies(scores: IFEvalScoreData | Iterable[IFEvalScoreData]) -> dict[str, float]:
    """Average scores over a dataset.

    The prompt level is the mean over prompts. The instruction level is the mean over all instructions of all
    prompts, so a prompt with more instructions counts more.

    Args:
        scores: scores of single prompts, or stacks of them, dense or lazy.

    Raises:
        ValueError: there is no score.

    Example:
        >>> scores = [score_from_checks([True, False], [True, True]), score_from_checks([True], [True])]
        >>> round(accuracies(scores)["inst_level_strict_acc"], 3)
        0.667
    """
    single = isinstance(scores, IFEvalScoreData)
    parts: list[Any] = (
        [scores] if single else as_list(scores, "what accuracies() takes", "a score or a sequence of scores")
    )
    for part in parts:
        _check_score(part, "what accuracies() takes")
    columns = {name: [row for part in parts for row in _rows(part, name)] for name in FIELDS}
    if not columns[FIELDS[0]]:
        raise InvalidArgumentError("accuracies needs at least one score, and there is none")
    out = {}
    for name, rows in columns.items():
        pooled = torch.cat(rows).double()
        out[name] = pooled.mean().item() if len(pooled) else 1.0  # no instruction at all: none is broken
    return out


def default_reward(
    score: IFEvalScoreData,
    think_blocks: Blocks = None,
    answer_blocks: Blocks = None,
    weights: Sequence[float] = (0.4, 0.3, 0.2, 0.1),
) -> Tensor:
    """Convert scores to rewards: a weighted sum of the fields, and a bonus for well-formed answers.

    `w[0] * prompt_strict + w[1] * mean(inst_strict) + w[2] * prompt_loose + w[3] * mean(inst_loose)`, plus 0.1 for
    exactly one answer block and 0.05 for exactly one think block. With the default weights it is between 0 and 1.15.
    A field that is None counts as 0; in a lazy stack with different numbers of instructions, only real ones are
    averaged.

    Args:
        score: scores of any batch size `B`.
        think_blocks: the think blocks of the answer, one list for all of the batch, or one list for each element
            of a batch of one dimension; their number, or a tensor of numbers of shape `[*B]`.
        answer_blocks: the answer blocks, likewise.
        weights: the weights of the four fields, in their order.

    Returns:
        Rewards of shape `[*B, 1, 1]`, in the default float dtype.

    Raises:
        ValueError: not four weights, or not one list of blocks for each element.

    Example:
        >>> default_reward(score_from_checks([True], [True]), answer_blocks=["42"])
        tensor([[1.1000]])
    """
    if len(weights) != len(FIELDS):
        raise InvalidArgumentError(
            f"default_reward takes {len(FIELDS)} weights, one for each field, not {len(weights)}"
        )
    _check_score(score, "what default_reward() takes")
    batch = torch.Size(score.batch_size)
    total = torch.zeros(batch, dtype=torch.float64, device=score.device)
    for weight, name in zip(weights, FIELDS, strict=True):
        total = total + weight * _means(score, name)
    total = total + 0.1 * _one_block("answer_blocks", answer_blocks, batch).to(total.device)
    total = total + 0.05 * _one_block("think_blocks", think_blocks, batch).to(total.device)
    return total.to(torch.get_default_dtype())[..., None, None]


def _check_score(score: object, what: str) -> None:
    if not isinstance(score, (IFEvalScoreData, TensorDictBase)):
        raise refuse_type(what, "a score", score)


def _means(score: IFEvalScoreData, name: str) -> Tensor:
    """Average a field over its last dimension, float64 `[*B]`; 1 where there is no instruction."""
    batch = torch.Size(score.batch_size)
    try:
        values = score.get(name)
    except UnevenError:
        parts: list[Any] = list(score.unbind(0))
        return torch.stack([_means(part, name) for part in parts])
    if values is None:
        return torch.zeros(batch, dtype=torch.float64, device=score.device)
    flat: Tensor = values.double().unsqueeze(-1).flatten(len(batch))
    return flat.mean(-1) if flat.shape[-1] else flat.new_ones(batch)


def _rows(score: IFEvalScoreData, name: str) -> list[Tensor]:
    """Return the values of a field for each element of the batch, as 1-D tensors; zeros for a field that is None."""
    rows: list[Any] = [score] if not score.batch_size else list(score.reshape(-1).unbind(0))
    found = [row.get(name) for row in rows]
    return [torch.zeros(1) if value is None else value.reshape(-1) for value in found]


def _one_block(argument: str, blocks: Blocks, batch: torch.Size) -> Tensor:
    """Check whether there is exactly one block, as float64 0 or 1 that broadcasts with `[*B]`."""
    counts: Any
    if blocks is None:
        counts = 0
    elif isinstance(blocks, (int, Tensor)):
        counts = blocks
    elif len(blocks) and not any(isinstance(block, str) for block in blocks):
        if batch != (len(blocks),):
            raise InvalidArgumentError(
                f"{argument} has lists for {len(blocks)} answers, and the scores have batch size {batch}"
            )
        counts = [len(block) for block in blocks]
    else:
        counts = len(blocks)
    return (torch.as_tensor(counts) == 1).double()
