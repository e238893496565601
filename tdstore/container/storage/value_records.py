"""Decode values from the value records of a header."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tdstore.container.core.tensor_attrs import TensorAttrs
from tdstore.container.entries.unbatched import UnbatchedTensor
from tdstore.container.values.codecs import from_plain
from tdstore.container.values.nontensor import MetaData, NonTensor, NonTensorData, NonTensorStack
from tdstore.errors import InvalidArgumentError
from tdstore.storekit.documents import MAX_DIMS


def from_json(record: Any, batch_size: torch.Size) -> NonTensor:
    """Decode the entry that `to_json` described, in a TensorDict of that batch size.

    Raises:
        InvalidArgumentError: malformed, or a stack that does not fit the batch.
    """
    if not isinstance(record, dict):
        raise InvalidArgumentError("not a value record")
    if "data" in record:
        data = from_plain(record["data"])
        if record.get("attrs") is True:
            return TensorAttrs.from_data(data, batch_size)
        return (MetaData if record.get("meta") is True else NonTensorData)(data, batch_size)
    if "unbatched" in record:
        return UnbatchedTensor(from_plain(record["unbatched"]), batch_size)
    if "stack" not in record:
        raise InvalidArgumentError("neither one value nor one per position")
    ndim = record.get("ndim", max(1, len(batch_size)))
    if type(ndim) is not int or not 1 <= ndim <= MAX_DIMS:
        raise InvalidArgumentError(f"values with other than 1 to {MAX_DIMS} dimensions")
    if isinstance(record["stack"], dict):  # all of it in one codec: another package's pickle
        stack = NonTensorStack.from_list(from_plain(record["stack"]), ndim)
        return _fitted(stack, ndim, batch_size)
    levels, probe = 0, record["stack"]
    while isinstance(probe, list) and levels < ndim:
        levels, probe = levels + 1, probe[0] if probe else None
    if levels < 1:
        raise InvalidArgumentError("a stack of values must be a list")
    stack = NonTensorStack.from_list(_map_levels(record["stack"], levels, from_plain), levels)
    return _fitted(stack, levels, batch_size)


def _fitted(stack: NonTensor, levels: int, batch_size: torch.Size) -> NonTensor:
    both = min(levels, len(batch_size))
    if stack.batch_size[:both] != batch_size[:both]:
        raise InvalidArgumentError(f"values of shape {list(stack.batch_size)} in a batch of {list(batch_size)}")
    while stack.ndim < len(batch_size):  # one value per leading position stands for all below it
        size = (*stack.batch_size, batch_size[stack.ndim])
        stack = stack.unsqueeze(-1).expand(size)
    return stack


def _map_levels(values: Any, levels: int, fn: Callable[[Any], Any]) -> Any:
    if levels and not isinstance(values, list):
        raise InvalidArgumentError("a stack of values must be lists to one depth")
    return [_map_levels(v, levels - 1, fn) for v in values] if levels else fn(values)
