"""The container of the scores of instruction-following answers (IFEval), and its specification."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import tdstore
from tdstore.arguments import as_device
from tdstore.errors import InvalidTypeError

Entry = tuple[tuple[int, ...], torch.dtype]
"""The shape and the dtype of one field."""


class IFEvalScoreData(tdstore.TensorClass):
    """Scores of answers to prompts with verifiable instructions (IFEval).

    Each field is a tensor, a bool, a list of bools or None. None becomes zeros of shape `[*B, 1]`, in the default
    float dtype; a value with exactly the batch dimensions gets a trailing dimension of 1; other values are unchanged.
    Scores of prompts with different numbers of instructions go into one lazy stack:
    `tdstore.lazy_stack(scores).get("inst_level_strict_acc", as_padded_tensor=True)` pads with False.

    Args:
        prompt_level_strict_acc: bool `[*B, 1]`, whether the exact answer follows all instructions.
        inst_level_strict_acc: bool `[*B, n]`, for each instruction, whether the exact answer follows it.
        prompt_level_loose_acc: bool `[*B, 1]`, as the first, for at least one variant of the answer.
        inst_level_loose_acc: bool `[*B, n]`, as the second, for at least one variant of the answer.

    Raises:
        TypeError: a field is missing, or is none of these. BatchSizeError: a value does not start with the batch size.

    Example:
        >>> score = IFEvalScoreData(True, [True, False, True], True, [True, True, True])
        >>> score.prompt_level_strict_acc.shape, score.inst_level_strict_acc.shape
        (torch.Size([1]), torch.Size([3]))
    """

    prompt_level_strict_acc: Tensor | None
    inst_level_strict_acc: Tensor | None
    prompt_level_loose_acc: Tensor | None
    inst_level_loose_acc: Tensor | None

    def __post_init__(self) -> None:
        batch = self.batch_size
        for name in FIELDS:
            value = self.get(name)
            if value is None:
                setattr(self, name, torch.zeros(*batch, 1, device=self.device))
            elif not isinstance(value, Tensor):
                raise InvalidTypeError(f"{name} is a tensor, a bool, a list of bools or None, not {value!r:.100}")
            elif value.ndim == len(batch):
                setattr(self, name, value.unsqueeze(-1))

    @classmethod
    def default_spec(cls, shape: Sequence[int] = (), device: torch.device | str | None = None) -> ScoreSpec:
        """Return the shape and dtype of each field of an object with the batch size `shape`.

        Args:
            shape: the batch size; every field has the shape `[*shape, 1]`.
            device: where `zero()` puts its tensors.

        Example:
            >>> spec = IFEvalScoreData.default_spec((2,))
            >>> spec["inst_level_loose_acc"], spec.zero().batch_size
            (((2, 1), torch.bool), torch.Size([2]))
        """
        return ScoreSpec(cls, torch.Size(shape), device)


FIELDS = ("prompt_level_strict_acc", "inst_level_strict_acc", "prompt_level_loose_acc", "inst_level_loose_acc")
"""The fields of `IFEvalScoreData`, in the order of its arguments."""


class ScoreSpec(dict[str, Entry]):
    """The shape and dtype of each field, `{field: (shape, dtype)}`, as `from_schema` takes them.

    Attributes:
        data_cls: the class that the fields belong to.
        shape: the batch size of `zero()`; the shapes of the fields start with it.
        device: where `zero()` puts its tensors.
    """

    def __init__(
        self, data_cls: type[IFEvalScoreData], shape: torch.Size, device: torch.device | str | None = None
    ) -> None:
        super().__init__(dict.fromkeys(FIELDS, ((*shape, 1), torch.bool)))
        self.data_cls = data_cls
        self.shape = shape
        self.device = None if device is None else as_device(device)

    def zero(self) -> IFEvalScoreData:
        """Make an object whose fields are all False, with the batch size `shape`."""
        values: dict[str, Any] = {
            name: torch.zeros(shape, dtype=dtype, device=self.device) for name, (shape, dtype) in self.items()
        }
        return self.data_cls(**values, batch_size=self.shape, device=self.device)
