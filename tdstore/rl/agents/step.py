"""One step of an agent: what it read and answered, what it called, its tokens and its reward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import tdstore
from tdstore import NonTensorData
from tdstore.errors import InvalidArgumentError

Message = dict[str, Any]
"""A message of a conversation, in the form of chat interfaces: `{"role": "user", "content": "..."}`."""

TOKENS = {"token_ids": torch.int64, "log_probs": torch.float32, "loss_mask": torch.bool}
"""The dtypes of the fields with one element per token."""


class Step(tdstore.TensorClass):
    """One step of an agent: a turn of a conversation, with its tokens and its reward.

    Lists of numbers become tensors. Fields that are left out are empty, `reward` is 0, `log_probs` are 0, and
    `loss_mask` is True for all tokens.

    Args:
        messages: the messages of the step, in order: what the agent read, then what it answered. Dicts of plain values.
        tool_calls: the calls of the step, in order: dicts of plain values, such as `{"name": ..., "arguments": ...}`.
        reward: float32 `[]`, what the step earned.
        token_ids: int64 `[tokens]`, all tokens of the step, including those that were read.
        log_probs: float32 `[tokens]`, the natural logarithm of the probability with which a token was sampled.
        loss_mask: bool `[tokens]`, True for a token that the agent sampled, False for one that it read.

    Raises:
        InvalidArgumentError: `reward` is not a single number, a field of tokens is not 1-D, or their lengths differ.

    Example:
        >>> step = Step(messages=[{"role": "assistant", "content": "4"}], reward=1.0, token_ids=[19, 2])
        >>> step.token_ids, step.log_probs.shape, step.messages[0]["content"]
        (tensor([19,  2]), torch.Size([2]), '4')
    """

    messages: list[Message] | None = None
    tool_calls: list[Message] | None = None
    reward: Tensor | float | None = None
    token_ids: Tensor | list[int] | None = None
    log_probs: Tensor | list[float] | None = None
    loss_mask: Tensor | list[bool] | None = None

    def __post_init__(self) -> None:
        if self.batch_dims:  # rows that are stored, or were put together, are what they should be
            return
        for name in ("messages", "tool_calls"):
            given = getattr(self, name)
            empty = given is None or isinstance(given, Tensor)  # a tensorclass makes a tensor of an empty list
            self.set(name, NonTensorData([] if empty else list(given)))
        reward = torch.as_tensor(0.0 if self.reward is None else self.reward, dtype=torch.float32)
        if reward.numel() != 1:
            raise InvalidArgumentError(f"reward has the shape {list(reward.shape)}: a step has a single number")
        self.set("reward", reward.reshape(()))
        count = 0 if self.token_ids is None else len(self.token_ids)
        default = {"token_ids": 0, "log_probs": 0.0, "loss_mask": True}
        for name, dtype in TOKENS.items():
            value = getattr(self, name)
            tokens = torch.full((count,), default[name], dtype=dtype) if value is None else torch.as_tensor(value)
            if tokens.shape != (count,):
                raise InvalidArgumentError(f"{name} has the shape {list(tokens.shape)}: the step has {count} token ids")
            self.set(name, tokens.to(dtype))
