"""Rows that come to and go from a stored tensorclass, and the tensorclasses below it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import tdstore
from tdstore import TensorClass, TensorDict, lazy_stack
from tdstore.errors import BatchSizeError


class Inner(TensorClass):
    x: torch.Tensor
    tag: str = "in"
    texts: Any = None


class Outer(TensorClass):
    t: torch.Tensor
    name: str = "n"
    inner: Inner | None = None


def rows(*numbers: int, tag: str = "in") -> Outer:
    n, texts = len(numbers), [f"t{i}" for i in numbers]
    inner = Inner(x=torch.tensor(numbers)[:, None], tag=tag, texts=texts, batch_size=[n])
    return Outer(t=torch.tensor(numbers), name=texts, inner=inner, batch_size=[n])


PLACES = ["run", "run.h5", "run.zarr", "file://run", "redis"]


def place_at(place: str, tmp_path: Path, request: pytest.FixtureRequest) -> str:
    if place == "redis":
        return f"{request.getfixturevalue('redis').url}/growing-{tmp_path.name}"
    scheme, _, name = place.rpartition("://")
    return f"{scheme}://{tmp_path / name}" if scheme else str(tmp_path / name)


@pytest.mark.parametrize("below", [False, True], ids=["whole", "entry"])
@pytest.mark.parametrize("place", PLACES)
def test_nested_tensorclasses_grow(place: str, below: bool, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    location = place_at(place, tmp_path, request)

    def made(*numbers: int, tag: str = "in") -> Any:
        found = rows(*numbers, tag=tag)
        return TensorDict({"o": found, "k": torch.tensor(numbers)}, [len(numbers)]) if below else found

    made(0, 1, 2).save(location).close()
    with tdstore.open(location, "r+") as td:
        td.append(made(3)[0])
        td.extend(made(4, 5, tag="other"))
        with pytest.raises(BatchSizeError):
            td.append(made(6).update({"o": {"t": torch.zeros(1, 2)}} if below else {"t": torch.zeros(1, 2)}))
    with tdstore.open(location, "r+") as td:
        found = td["o"] if below else td
        assert type(found) is Outer and type(found.inner) is Inner
        assert found.t.tolist() == found.inner.x[:, 0].tolist() == list(range(6))
        assert found.name == found.inner.texts == [f"t{i}" for i in range(6)]
        assert found.inner.tag == ["in"] * 4 + ["other"] * 2 and found[4].inner.tag == "other"
        td.resize_(2)
    with tdstore.open(location) as td:
        found = td["o"] if below else td
        assert found.batch_size == found.inner.batch_size == (2,) and found.inner.texts == ["t0", "t1"]


@pytest.mark.parametrize("place", ["run", "run.h5"])
def test_lazy_stacks_of_tensorclasses_grow(place: str, tmp_path: Path) -> None:
    parts = [Outer(t=torch.ones(i), name=str(i)) for i in (1, 2, 3)]
    TensorDict({"l": lazy_stack(parts[:2])}, [2]).save(tmp_path / place).close()
    with tdstore.open(tmp_path / place, "r+") as td:
        td.append(TensorDict({"l": parts[2]}))
    with tdstore.open(tmp_path / place) as td:
        assert [type(part) for part in td["l"].unbind(0)] == [Outer] * 3
        assert [td["l"][i].name for i in range(3)] == ["1", "2", "3"] and td["l"][2].t.sum() == 3
