"""Fixtures of every local backend, by one string: what a test says of one it says of all."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tdstore
from tdstore import TensorDict
from tdstore.builtin.shared.store import remove

PERSISTENT = ["memmap", "h5"]
REOPENED = [*PERSISTENT, "named shared"]
ALL = [*REOPENED, "memory", "shared"]


@pytest.fixture(params=ALL)
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=REOPENED)
def reopened(request: pytest.FixtureRequest) -> str:
    """Backends whose data can be opened again by a location."""
    return str(request.param)


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Callable[[str], dict[str, Any]]]:
    """`place(backend)` gives fresh arguments for `save` and `from_schema`."""
    named: list[str] = []

    def fresh(backend: str) -> dict[str, Any]:
        if backend == "named shared":
            named.append(f"shm://test-{uuid.uuid4().hex}")
            return {"location": named[-1]}
        if backend in PERSISTENT:
            return {"location": str(tmp_path / f"{uuid.uuid4().hex}.data"), "storage": backend}
        return {"storage": backend}

    yield fresh
    for name in named:
        remove(name)


@pytest.fixture
def rich() -> TensorDict:
    """Nested batch sizes, names, values, many dtypes, an order that is not alphabetical."""
    td = TensorDict(
        {
            "z": torch.arange(24, dtype=torch.uint8).reshape(4, 6),
            "a": torch.randn(4, 3),
            "next": {"obs": torch.randn(4, 5, 2), "done": torch.tensor([[True], [False], [True], [False]])},
            "scalar row": torch.arange(4),
        },
        batch_size=[4],
        names=["time"],
    )
    td["wide"] = TensorDict({"x": torch.randn(4, 2, 3)}, batch_size=[4, 2], names=["time", "env"])
    td["bf"] = torch.randn(4, 2).bfloat16()
    td["f8"] = torch.randn(4, 2).to(torch.float8_e4m3fn)
    td["c"] = torch.randn(4, dtype=torch.complex64)
    td["empty"] = torch.zeros(4, 0, 2)
    td["hello"] = "world"
    td["none"] = None
    td["plain"] = tdstore.NonTensorData({"lr": 1e-3, "tags": ("a", 1)}, [4])
    td["rows"] = ["p", "q", "r", "s"]
    td["next", "why"] = "because"
    return td


def assert_same(a: Any, b: Any) -> None:
    """Entries, order, batch sizes, names and values alike, bit by bit."""
    assert list(a.keys()) == list(b.keys())
    assert a.batch_size == b.batch_size
    assert a.names == b.names
    for key in a.keys():
        x, y = a.get(key), b.get(key)
        if isinstance(x, tdstore.TensorDictBase):
            assert_same(x, y)
        elif isinstance(x, torch.Tensor):
            assert x.dtype == y.dtype, key
            assert x.shape == y.shape, key
            assert torch.equal(bits(x), bits(y)), key
        else:
            assert x.tolist() == y.tolist(), key


def bits(t: torch.Tensor) -> torch.Tensor:
    t = t.detach().clone().contiguous()
    if t.dtype.is_complex:
        return torch.view_as_real(t)
    return t.reshape(-1).view(torch.uint8) if t.numel() else t
