"""The fields of structured arrays as entries."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tdstore.container.values.nontensor import NonTensor, NonTensorData, NonTensorStack
from tdstore.dtypes import torch_ready


class TypedValues(list[Any]):
    """Values per row that came from a numpy array, and its dtype for the way back: views of the rows keep it."""

    dtype: np.dtype[Any]


def fields_of(array: np.ndarray[Any, Any], nested: Callable[..., Any]) -> dict[str, Any]:
    """Return the fields of an array, as views where possible; structured fields become `nested(fields, shape)`."""
    out: dict[str, Any] = {}
    for name in array.dtype.names or ():
        field = array[name]
        if field.dtype.names is not None:
            out[name] = nested(fields_of(field, nested), array.shape)
        elif field.dtype.kind in "biufc":
            out[name] = _shared(field)
        else:
            out[name] = _values(field)
    return out


def _shared(field: np.ndarray[Any, Any]) -> Tensor:
    ready = torch_ready(field)
    return torch.from_numpy(ready if ready.flags.writeable else ready.copy())


def _values(field: np.ndarray[Any, Any]) -> NonTensor:
    """Return one value per position: `str`, `bytes`, numpy's dates, or objects."""
    flat = field.flatten()
    pool = TypedValues(list(flat) if field.dtype.kind in "mM" else flat.tolist())
    pool.dtype = field.dtype
    if not field.ndim:
        return NonTensorData(pool[0])
    return NonTensorStack._make(pool, torch.arange(len(pool), device="cpu").reshape(field.shape))
