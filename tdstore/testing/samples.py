"""Sample values and indices of the kit, and the comparison of tensors by their bits."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from tdstore.dtypes import NAME_TO_DTYPE, dtype_name, from_numpy, numpy_dtype, to_numpy
from tdstore.types import Path, StoreIndex

DTYPES = tuple(NAME_TO_DTYPE)
SHAPES: tuple[tuple[int, ...], ...] = ((), (1,), (0,), (5,), (3, 0, 2), (4, 3), (2, 3, 4), (1, 1, 1, 1))

ODD_KEYS = (
    "../x",
    "..",
    ".",
    "",
    "a/b",
    "a\\b",
    "a.b",
    ".hidden",
    "shape",
    "device",
    "_type",
    "dtype",
    "meta.json",
    "tdstore.json",
    "zarr.json",
    "a.memmap",
    "con",
    "NUL",
    "aux.txt",
    "dot.",
    "space ",
    " ",
    "~x",
    "%41",
    "%",
    "A",
    "key",
    "KEY",
    "Key",
    "ß",
    "ключ",
    "鍵🔑",
    "é",
    "e\u0301",  # the same letter as the one before, in two code points
    "tab\there",
    "line\nbreak",
    "nul\0byte",
    'quote"s',
    "*?<>|:",
    "$tuple",
    "x" * 300,
    "ж" * 200,
)
"""Keys that a file system, a URL or a file format could misread; each is a valid name of a leaf."""


def sample(dtype: torch.dtype | str, shape: tuple[int, ...], seed: int = 0) -> Tensor:
    """Return a tensor of random bit patterns, with NaN payloads, infinities and negative zeros among them.

    Args:
        dtype: the dtype, or its name.
        shape: the shape.
        seed: draws other bits for the same dtype and shape.

    Example:
        >>> sample("float32", (3, 2)).shape, same(sample("int64", (4,)), sample("int64", (4,)))
        (torch.Size([3, 2]), True)
    """
    dtype = NAME_TO_DTYPE[dtype] if isinstance(dtype, str) else dtype
    rng = np.random.default_rng([seed, *dtype_name(dtype).encode(), *shape])
    if dtype is torch.bool:
        return torch.from_numpy(rng.integers(0, 2, shape).astype(bool).reshape(shape))
    raw = rng.integers(0, 256, (*shape, dtype.itemsize), dtype=np.uint8)
    array = np.ascontiguousarray(raw).view(numpy_dtype(dtype)).reshape(shape)
    return from_numpy(array, dtype)


def bits(tensor: Tensor) -> bytes:
    """Return the elements of a tensor, in C order, as raw bytes."""
    return np.ascontiguousarray(to_numpy(tensor.cpu())).tobytes()


def digest(tensor: Tensor) -> str:
    """Return a hash of dtype, shape and bits."""
    return hashlib.sha256(f"{tensor.dtype}{tuple(tensor.shape)}".encode() + bits(tensor)).hexdigest()


def same(got: Tensor, expected: Tensor) -> bool:
    """Check for equal shape, dtype and bits. NaN equals itself, and 0.0 differs from -0.0.

    Args:
        got: a tensor.
        expected: another one.

    Example:
        >>> same(torch.tensor(0.0), torch.tensor(-0.0)), same(torch.tensor(torch.nan), torch.tensor(torch.nan))
        (False, True)
    """
    return got.shape == expected.shape and got.dtype == expected.dtype and bits(got) == bits(expected)


def pick(value: Tensor, index: StoreIndex) -> Tensor:
    """Compute `value[index]` by numpy over bit patterns: an oracle that shares no code with the stores.

    Args:
        value: a tensor.
        index: an index of the storage protocol.
    """
    array = to_numpy(value)[_numpy_index(index)]
    return from_numpy(np.array(array, order="C").reshape(array.shape), value.dtype)


def assign(value: Tensor, index: StoreIndex, new: Tensor) -> Tensor:
    """Return a copy of `value` with `new` at `index`, row by row: of repeated rows the last one wins.

    Args:
        value: a tensor.
        index: an index of the storage protocol.
        new: values of the shape of `pick(value, index)`.
    """
    array, source = to_numpy(value).copy(), to_numpy(new)
    at = next((i for i, term in enumerate(index) if isinstance(term, Tensor)), None)
    if at is None:
        array[_numpy_index(index)] = source
    else:
        rows = index[at]
        assert isinstance(rows, Tensor), "only a tensor names rows"
        for k, row in enumerate(rows.tolist()):
            array[(*_numpy_index(index[:at]), row, *_numpy_index(index[at + 1 :]))] = source.take(k, axis=at)
    return from_numpy(array, value.dtype)


def _numpy_index(index: StoreIndex) -> tuple[Any, ...]:
    return tuple(term.numpy() if isinstance(term, Tensor) else term for term in index)


def rows(*numbers: int) -> Tensor:
    """Return row numbers as a store index term."""
    return torch.tensor(numbers, dtype=torch.int64)


# For a leaf of shape (6, 4, 3): every form of index that can reach a store.
INDICES: dict[str, StoreIndex] = {
    "everything": (),
    "all-rows": (slice(0, 6, 1),),
    "all-full": (slice(0, 6, 1), slice(0, 4, 1), slice(0, 3, 1)),
    "range": (slice(1, 4, 1),),
    "one-row": (slice(5, 6, 1),),
    "step": (slice(0, 6, 2),),
    "odd-step": (slice(1, 6, 3),),
    "step-beyond": (slice(2, 5, 10),),
    "no-rows": (slice(3, 3, 1),),
    "no-rows-at-end": (slice(6, 6, 1),),
    "second-dim": (slice(0, 6, 1), slice(1, 3, 1)),
    "last-dim-step": (slice(0, 6, 1), slice(0, 4, 1), slice(0, 3, 2)),
    "box": (slice(1, 5, 2), slice(1, 4, 2), slice(1, 2, 1)),
    "rows": (rows(0, 2, 3),),
    "rows-unsorted": (rows(4, 0, 5, 1),),
    "rows-twice": (rows(2, 2, 0, 2),),
    "rows-many": (rows(*(5, 0, 3) * 7),),
    "rows-none": (rows(),),
    "rows-reversed": (rows(5, 4, 3, 2, 1, 0),),
    "rows-then-slice": (rows(3, 1), slice(1, 4, 2)),
    "rows-then-slices": (rows(3, 1, 3), slice(0, 4, 3), slice(2, 3, 1)),
    "rows-at-dim-1": (slice(0, 6, 1), rows(3, 0, 3)),
    "slice-then-rows": (slice(1, 6, 2), rows(2, 0, 1)),
    "rows-at-dim-2": (slice(0, 6, 1), slice(0, 4, 1), rows(2, 0)),
    "rows-between": (slice(2, 4, 1), rows(3, 3), slice(0, 3, 2)),
    "rows-at-dim-1-none": (slice(0, 6, 1), rows()),
}


# For the same leaf: what is not within it, or no index of a store at all.
OUTSIDE: dict[str, Any] = {
    "row-at-end": (rows(0, 6),),
    "row-far": (rows(2**40),),
    "row-negative": (rows(0, -1),),
    "row-at-dim-1": (slice(0, 6, 1), rows(4)),
    "row-at-dim-2": (slice(0, 2, 1), slice(0, 4, 1), rows(0, 3)),
    "slice-over-end": (slice(4, 7, 1),),
    "slice-after-end": (slice(7, 8, 1),),
    "slice-negative": (slice(-1, 6, 1),),
    "slice-at-dim-1": (slice(0, 6, 1), slice(0, 5, 1)),
    "slice-after-rows": (rows(1), slice(3, 5, 1)),
    "int": (6,),
    "too-many": (slice(0, 6, 1), slice(0, 4, 1), slice(0, 3, 1), slice(0, 1, 1)),
}


@st.composite
def store_indices(draw: st.DrawFn, shape: tuple[int, ...]) -> StoreIndex:
    """Draw any index of the protocol for a leaf of `shape`."""
    terms: list[slice | Tensor] = []
    may_gather = True
    for dim in shape[: draw(st.integers(0, len(shape)))]:
        if may_gather and dim and draw(st.booleans()):
            terms.append(rows(*draw(st.lists(st.integers(0, dim - 1), max_size=6))))
            may_gather = False
        else:
            start = draw(st.integers(0, dim))
            terms.append(slice(start, draw(st.integers(start, dim)), draw(st.integers(1, 3))))
    return tuple(terms)


def deep_path(depth: int) -> Path:
    """Return the path of a leaf inside `depth` groups."""
    return (*(f"g{i}" for i in range(depth)), "leaf")
