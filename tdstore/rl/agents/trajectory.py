"""A trajectory of an agent: its steps in one row, so that many trajectories form a table that grows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

import tdstore
from tdstore import NonTensorData
from tdstore.errors import BatchSizeError, InvalidArgumentError

from .step import TOKENS, Message, Step

SCHEMA: dict[str, Any] = {
    "task": object,
    "messages": object,
    "tool_calls": object,
    "rewards": ((-1,), "float32"),
    "token_counts": ((-1,), "int64"),
    "token_ids": ((-1,), "int64"),
    "log_probs": ((-1,), "float32"),
    "loss_mask": ((-1,), "bool"),
    "terminated": ((), "bool"),
}


class Trajectory(tdstore.TensorClass):
    """The steps of one agent at one task. Stored, a trajectory is one row, and rows differ in length.

    `Trajectory.from_steps` makes one, `create` makes an empty table on any backend, and `append` and `extend` of the
    table write trajectories, each of which is there as a whole or not at all. A batch of rows has one jagged tensor
    (`torch.nested`) for each field that is ragged, and a list of values for `task`, `messages` and `tool_calls`.

    Args:
        task: what the agent was asked: any plain value, such as a name or a number.
        messages: for each step, the list of its messages.
        tool_calls: for each step, the list of its calls.
        rewards: float32 `[steps]`.
        token_counts: int64 `[steps]`, how many tokens each step has.
        token_ids: int64 `[tokens]`, those of all steps, one step after the other.
        log_probs: float32 `[tokens]`, natural logarithms.
        loss_mask: bool `[tokens]`, True for tokens that the agent sampled.
        terminated: bool `[]`, True if the task came to its end, False if the trajectory was cut off.

    Example:
        >>> step = Step(messages=[{"role": "assistant", "content": "4"}], reward=1.0, token_ids=[19, 2])
        >>> trajectory = Trajectory.from_steps([step, Step(reward=0.5, token_ids=[7])], task="2 + 2", terminated=True)
        >>> trajectory.token_ids, trajectory.token_counts
        (tensor([19,  2,  7]), tensor([2, 1]))
        >>> table = Trajectory.create("trajectories")
        >>> table.append(trajectory)
        >>> [float(step.reward) for step in table[0].steps()]
        [1.0, 0.5]
    """

    task: Any
    messages: list[list[Message]]
    tool_calls: list[list[Message]]
    rewards: Tensor
    token_counts: Tensor
    token_ids: Tensor
    log_probs: Tensor
    loss_mask: Tensor
    terminated: Tensor

    @classmethod
    def from_steps(cls, steps: Sequence[Step], *, task: str | None = None, terminated: bool = False) -> Self:
        """Put steps together, in order.

        Args:
            steps: the steps, each of batch size `[]`; there may be none.
            task: what the agent was asked.
            terminated: whether the task came to its end.

        Raises:
            BatchSizeError: a step has a batch dimension.
        """
        for number, step in enumerate(steps):
            if step.batch_dims:
                raise BatchSizeError(f"step {number} has the batch size {list(step.batch_size)}: a step has none")
        tokens: dict[str, Tensor] = {
            name: torch.cat([torch.zeros(0, dtype=dtype), *(step.get(name) for step in steps)])
            for name, dtype in TOKENS.items()
        }
        fields = {
            "task": NonTensorData(task),
            "messages": NonTensorData([list(step.get("messages")) for step in steps]),
            "tool_calls": NonTensorData([list(step.get("tool_calls")) for step in steps]),
            "rewards": torch.tensor([float(step.get("reward")) for step in steps], dtype=torch.float32),
            "token_counts": torch.tensor([len(step.get("token_ids")) for step in steps], dtype=torch.int64),
            "terminated": torch.tensor(terminated),
        }
        return cls.from_dict({**fields, **tokens}, batch_size=[])

    @classmethod
    def create(cls, location: str | Path | None = None, **options: Any) -> Self:
        """Make an empty table of trajectories, which grows by `append` and `extend`.

        Args:
            location: a path or URL for any backend; None keeps the table in memory.
            options: of `from_schema`, such as `storage` or `mode`.

        Raises:
            StoreExistsError: there is something at the location, and `mode` does not allow replacing it.
        """
        return cls.from_schema(SCHEMA, batch_size=[0], location=location, **options)

    def steps(self) -> list[Step]:
        """Return the steps of one trajectory.

        Raises:
            BatchSizeError: the object holds several trajectories: index one first.
            InvalidArgumentError: `token_counts`, and the numbers of rewards, messages and tokens, do not agree.
        """
        if self.batch_dims:
            raise BatchSizeError(f"{list(self.batch_size)} trajectories: index one of them for its steps")
        counts = self.token_counts.tolist()
        tokens = {name: self.get(name) for name in TOKENS}
        found = {"rewards": len(self.rewards), "messages": len(self.messages), "tool_calls": len(self.tool_calls)}
        wrong = {name: count for name, count in found.items() if count != len(counts)}
        wrong |= {name: len(value) for name, value in tokens.items() if len(value) != sum(counts)}
        if wrong:
            text = ", ".join(f"{count} {name}" for name, count in wrong.items())
            raise InvalidArgumentError(f"token_counts has {len(counts)} steps and {sum(counts)} tokens, but: {text}")
        columns = zip(*(value.split(counts) for value in tokens.values()), strict=True) if counts else iter(())
        rows = zip(self.messages, self.tool_calls, self.rewards.unbind(), columns, strict=True)
        return [
            Step(messages=said, tool_calls=called, reward=reward, **dict(zip(TOKENS, values, strict=True)))
            for said, called, reward, values in rows
        ]

    def conversation(self) -> list[Message]:
        """Return the messages of all steps of one trajectory, in order.

        Raises:
            BatchSizeError: the object holds several trajectories: index one first.
        """
        if self.batch_dims:
            raise BatchSizeError(f"{list(self.batch_size)} trajectories: index one of them for its conversation")
        return [message for messages in self.messages for message in messages]
