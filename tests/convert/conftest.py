"""The same rows in every kind of container."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import tdstore
from tdstore import TensorDict

KINDS = ["TensorDict", "memmap", "lazy stack", "h5", "zarr", "window"]


def rows(n: int = 4, start: int = 0) -> TensorDict:
    """`n` rows with numbers, features, a nested TensorDict, a value per row and one for all."""
    at = torch.arange(start, start + n)
    return TensorDict(
        {
            "a": at,
            "v": (at[:, None] + torch.arange(2) / 4).double(),
            "n": {"b": at * 2 % 3 == 0, "s": [f"row {i}" for i in at.tolist()]},
            "one": "x",
        },
        batch_size=[n],
    )


def in_container(td: TensorDict, kind: str, folder: Path) -> Any:
    if kind == "TensorDict":
        return td
    if kind == "memmap":
        return td.memmap(folder / "m")
    if kind == "lazy stack":
        return tdstore.lazy_stack(list(td.unbind(0)), 0)
    if kind == "window":
        both = torch.cat([td[:1], td, td[:1]])
        return both.save(folder / "w.h5")[1 : 1 + len(td)]
    return td.save(f"{folder}/x.{kind}", storage=kind)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def held(kind: str, tmp_path: Path) -> Any:
    """`rows()` in a container of that kind."""
    return in_container(rows(), kind, tmp_path)


def same(one: Any, other: Any) -> None:
    """Equal entries, dtypes, batch size and values, whatever the containers and the order of keys."""
    assert one.batch_size == other.batch_size
    assert set(one.keys(True)) == set(other.keys(True))
    for key in one.keys(True):
        a, b = one[key], other[key]
        if isinstance(a, torch.Tensor):
            assert a.dtype == b.dtype, key
            assert torch.equal(a, b), key
        elif not tdstore.is_tensor_collection(a):
            assert key == "one" or a == b, key  # of a stack, it is one value per row
