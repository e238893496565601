"""Values as a header keeps them, taken out of their envelopes."""

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


def from_json(envelope: Any, batch_size: torch.Size) -> NonTensor:
    """Decode the entry that `to_json` described, in a TensorDict of that batch size.

    Raises:
        ValueError: malformed, or a stack that does not fit the batch.
    """
    if not isinstance(envelope, dict):
        raise InvalidArgumentError("not an envelope of a value")
    if "data" in envelope:
        data = from_plain(envelope["data"])
        if envelope.get("attrs") is True:
            return TensorAttrs.from_data(data, batch_size)
        return (MetaData if envelope.get("meta") is True else NonTensorData)(data, batch_size)
    if "unbatched" in envelope:
        return UnbatchedTensor(from_plain(envelope["unbatched"]), batch_size)
    if "stack" not in envelope:
        raise InvalidArgumentError("neither one value nor one per position")
    ndim = envelope.get("ndim", max(1, len(batch_size)))
    if type(ndim) is not int or not 1 <= ndim <= MAX_DIMS:
        raise InvalidArgumentError(f"values with other than 1 to {MAX_DIMS} dimensions")
    if isinstance(envelope["stack"], dict):  # all of it in one codec: another package's pickle
        stack = NonTensorStack.from_list(from_plain(envelope["stack"]), ndim)
        return _fitted(stack, ndim, batch_size)
    levels, probe = 0, envelope["stack"]
    while isinstance(probe, list) and levels < ndim:
        levels, probe = levels + 1, probe[0] if probe else None
    if levels < 1:
        raise InvalidArgumentError("a stack of values must be a list")
    stack = NonTensorStack.from_list(_map_levels(envelope["stack"], levels, from_plain), levels)
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
