"""Containers over a store that reads and writes leaves only whole: rows work all the same."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import Tensor

import tdstore
from tdstore import TensorDict
from tdstore.builtin.memory import MemoryStore
from tdstore.errors import StoreNotFoundError
from tdstore.hookspecs import Backend
from tdstore.store import Cap
from tdstore.types import Mode, Read, Write

KEPT: dict[str, WholeStore] = {}


class WholeStore(MemoryStore):
    caps = Cap.WRITE

    def read(self, reads: Sequence[Read]) -> list[Tensor]:
        assert not any(r.index for r in reads)
        return super().read(reads)

    def write(self, writes: Sequence[Write]) -> None:
        assert not any(w.index for w in writes)
        super().write(writes)

    def close(self) -> None:
        """What is kept stays open to the next test step."""


def open_whole(location: str, *, mode: Mode = "r") -> WholeStore:
    if mode in ("r", "r+") and location not in KEPT:
        raise StoreNotFoundError(f"nothing is stored at {location}", url=location)
    return KEPT[location] if mode in ("r", "r+") else KEPT.setdefault(location, WholeStore())


@pytest.fixture
def kept() -> Iterator[TensorDict]:
    tdstore.register_backend(Backend(name="whole", opener=f"{__name__}:open_whole", summary="", schemes=("whole",)))
    td = TensorDict({"a": torch.arange(12).reshape(6, 2), "n": {"b": torch.arange(6.0)}}, [6])
    yield td.save("whole://x", mode="w")
    tdstore.unregister_backend("whole")
    KEPT.clear()


def test_rows_are_read(kept: TensorDict) -> None:
    assert kept[2:4].to_tensordict()["a"].tolist() == [[4, 5], [6, 7]]
    assert kept[torch.tensor([5, 0])]["n", "b"].tolist() == [5, 0]


def test_rows_are_written(kept: TensorDict) -> None:
    kept[1] = TensorDict({"a": torch.tensor([-1, -2])}, [])
    kept[[5, 3, 5]] = TensorDict({"n": {"b": torch.tensor([50.0, 30.0, 51.0])}}, [3])
    kept[4:].set_("a", torch.zeros(2, 2))
    kept.set_at_("a", 7, (slice(0, 1), slice(1, 2)))
    again = tdstore.open("whole://x")
    assert again["a"].tolist() == [[0, 7], [-1, -2], [4, 5], [6, 7], [0, 0], [0, 0]]
    assert again["n", "b"].tolist() == [0, 1, 2, 30, 4, 51]
    kept[:3].zero_()
    assert again["a"].tolist() == [[0, 0]] * 3 + [[6, 7], [0, 0], [0, 0]]
