"""What index writes are given, and what each of them means: one position written after the other."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from .indices import index_of
from .structures import SAMPLES, t


def changed(x: torch.Tensor) -> torch.Tensor:
    return ~x if x.dtype == torch.bool else x + 50


def leaves(td):
    return dict(td.items(True, True))


def like(M, part):
    """A TensorDict of the same structure with other values."""
    return M.td({k: changed(v) for k, v in leaves(part).items()}, batch_size=part.batch_size)


VALUES = {
    "float": lambda M, part: 0.5,
    "bool": lambda M, part: True,
    "0-d tensor": lambda M, part: torch.tensor(3),
    "tensor of the batch": lambda M, part: t(*part.batch_size),
    "1-element tensor": lambda M, part: torch.tensor([3]),
    "wrong tensor": lambda M, part: t(17),
    "dict": lambda M, part: like(M, part).to_dict(),
    "itself": lambda M, part: part,
    "clone": lambda M, part: part.clone(),
    "some keys": lambda M, part: M.td({"a": changed(part["a"])}, part.batch_size),
    "nested subset": lambda M, part: {"n": {"b": changed(part["n", "b"])}},
    "a new key": lambda M, part: M.td({"a": changed(part["a"]), "new": t(*part.batch_size, 2)}, part.batch_size),
    "a new nested key": lambda M, part: M.td({"x": {"y": t(*part.batch_size)}}, part.batch_size),
    "smaller batch": lambda M, part: like(M, part)[0],
    "batch of one": lambda M, part: like(M, part)[:1],
    "wrong batch": lambda M, part: M.td({"a": t(17)}, [17]),
    "empty td": lambda M, part: M.td({}, part.batch_size),
    "str": lambda M, part: "text",
    "None": lambda M, part: None,
    "another dtype": lambda M, part: like(M, part).to(torch.float64),
    "locked": lambda M, part: like(M, part).lock_(),
    "list": lambda M, part: [1],
    "td over a leaf": lambda M, part: M.td({"a": {"q": t(*part.batch_size)}}, part.batch_size),
    "leaf over a td": lambda M, part: M.td({"n": t(*part.batch_size)}, part.batch_size),
}


def write_row_by_row(M, case):
    """The result of the case "sample[index] = value" when every position is written by itself, in order.

    Values are broadcast and cast to the leaf's dtype, and the last one to come wins.
    """
    sample, text, name = re.fullmatch(r"(\w+)\[(.*)\] = (.*)", case).groups()
    td = M.sample(sample)
    index = index_of(text, SAMPLES[sample].batch)
    value = {"td": like, "1": lambda M, part: 1, **VALUES}[name](M, td[index])
    n = td.batch_dims
    places = torch.arange(math.prod(td.batch_size)).reshape(td.batch_size)[as_torch(index)]
    for key, leaf in leaves(td).items():
        given, lead = _value_at(value, key if isinstance(key, tuple) else (key,))
        if given is None:
            continue
        given = torch.as_tensor(given)
        feature = leaf.shape[n:]
        while lead is None and given.ndim > places.ndim + len(feature) and given.shape[0] == 1:
            given = given[0]  # as torch does
        if lead is not None:  # the batch is that of the value, aligned to the right; features stay where they are
            given = given.reshape((1,) * (places.ndim - lead) + given.shape)
        rows = torch.broadcast_to(given, (*places.shape, *feature)).reshape(-1, *feature)
        flat = leaf.reshape(-1, *feature)
        for place, row in zip(places.flatten().tolist(), rows, strict=True):
            flat[place].copy_(row) if feature else flat.__setitem__(place, row.to(leaf.dtype))
    return None, td, {str(key): True for key in leaves(td)}


def as_torch(index: Any) -> Any:
    """The index with its lists, ranges and arrays as tensors."""
    terms = index if isinstance(index, tuple) else (index,)
    return tuple(_as_torch(term) for term in terms)


def _as_torch(term: Any) -> Any:
    if not isinstance(term, (list, range, np.ndarray)):
        return term
    array = np.asarray(term)
    return torch.from_numpy(array if array.dtype == bool else array.astype(np.int64))


def _value_at(value: Any, path: tuple[str, ...]) -> tuple[Any, int | None]:
    """What a value holds for a leaf, or what it holds for a TensorDict above it; and its batch dimensions."""
    lead = None if isinstance(value, Mapping) else getattr(value, "batch_dims", None)
    for part in path:
        if not hasattr(value, "keys"):
            break
        if part not in value.keys():
            return None, None
        value = value[part]
    return value, lead
