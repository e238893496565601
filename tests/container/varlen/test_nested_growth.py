"""Nested tensors get rows and lose them, on every container, as a list of tensors would."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tdstore
from tdstore import TensorDict
from tdstore.builtin.shared.store import remove
from tdstore.errors import BatchSizeError, InvalidStateError, StoreNotFoundError, UnsupportedError

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")

WHERE = ["TensorDict", "memory", "memmap", "shm", "h5", "zarr", "tdz", "objects", "redis"]
REOPENED = ["memmap", "shm", "h5", "zarr", "tdz", "objects", "redis"]


def ragged(*sizes: int, start: int = 0, dtype: torch.dtype = torch.float32, width: int | None = None) -> torch.Tensor:
    """A jagged tensor whose rows are told apart by their values."""
    rows = [torch.arange(n * (width or 1), dtype=dtype) + 100 * (i + start) for i, n in enumerate(sizes)]
    return jagged(rows if width is None else [row.reshape(-1, width) for row in rows])


def jagged(rows: list[torch.Tensor]) -> torch.Tensor:
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def strided(rows: list[torch.Tensor]) -> torch.Tensor:
    return torch.nested.as_nested_tensor(rows, layout=torch.strided)


def lists(nested: torch.Tensor) -> list[Any]:
    return [row.tolist() for row in nested.unbind()]


def sample(*sizes: int, start: int = 0) -> TensorDict:
    return TensorDict(
        {
            "tokens": ragged(*sizes, start=start, dtype=torch.int64),
            "x": torch.arange(start, start + len(sizes)),
            "note": [f"row {i}" for i in range(start, start + len(sizes))],
            "n": {"points": ragged(*sizes, start=start, width=3)},
        },
        [len(sizes)],
    )


class Maker:
    """`make(where, td)` is that TensorDict, there; `make.at(where, td)` tells the place, too."""

    def __init__(self, folder: Path, request: pytest.FixtureRequest) -> None:
        self.folder, self.request, self.named = folder, request, list[str]()

    def __call__(self, where: str, td: Any) -> Any:
        return self.at(where, td)[0]

    def at(self, where: str, td: Any) -> tuple[Any, str]:
        name = uuid.uuid4().hex
        if where == "TensorDict":
            return td.clone(), ""
        if where == "memory":
            return td.save(storage="memory"), ""
        if where == "shm":
            place = f"shm://{name}"
            self.named.append(place)
        elif where == "redis":
            place = f"{self.request.getfixturevalue('redis').url}/0?name={name}"
        else:
            place = f"file://{self.folder}/{name}/" if where == "objects" else f"{self.folder}/{name}.{where}"
        return td.save(place, **({"storage": where} if where == "memmap" else {})), place


@pytest.fixture
def make(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Maker]:
    maker = Maker(tmp_path, request)
    yield maker
    for name in maker.named:
        with contextlib.suppress(StoreNotFoundError):  # the last handle that is closed removes it
            remove(name)


def check(td: Any, *sizes: int) -> None:
    whole = sample(*sizes)
    assert td.batch_size == (len(sizes),)
    for key in ("tokens", ("n", "points")):
        assert td[key].dtype == whole[key].dtype and lists(td[key]) == lists(whole[key])
    assert td["x"].tolist() == whole["x"].tolist() and td["note"] == whole["note"]


@pytest.mark.parametrize("where", WHERE)
def test_rows_are_added_and_removed(where: str, make: Maker) -> None:
    td, location = make.at(where, sample(3, 0, 2))
    whole = sample(3, 0, 2, 5, 1, 0, 4, 2, 6)
    taken = td["tokens"]
    td.append(whole[3])
    td.append({"tokens": [400], "x": 4, "note": "row 4", "n": {"points": whole[4]["n", "points"]}})
    td.extend(whole[5:7])
    td.extend([whole[7], whole[8]])
    check(td, 3, 0, 2, 5, 1, 0, 4, 2, 6)
    assert lists(taken) == lists(sample(3, 0, 2)["tokens"]), "what was taken stays as it was"
    td.resize_(4)
    check(td, 3, 0, 2, 5)
    rows = td[torch.tensor([0, 3])].to_tensordict()
    td.extend(rows)
    assert lists(td["tokens"])[4:] == [lists(whole["tokens"])[0], lists(whole["tokens"])[3]]
    if where in REOPENED:
        td.close()
        with tdstore.open(location) as again:
            assert again.batch_size == (6,) and lists(again["tokens"])[4:] == lists(rows["tokens"])
            assert lists(again.read(torch.tensor([5, 0]))["n", "points"]) == list(reversed(lists(rows["n", "points"])))


@pytest.mark.parametrize("where", WHERE)
def test_resize_makes_empty_rows(where: str, make: Maker) -> None:
    td = make(where, TensorDict({"r": ragged(2, 1), "p": ragged(2, 1, width=3), "x": torch.ones(2)}, [2]))
    td.resize_(4)
    assert lists(td["r"]) == [[0.0, 1.0], [100.0], [], []] and td["p"].unbind()[3].shape == (0, 3)
    td.append({"r": [7.0], "p": torch.ones(2, 3), "x": 1})
    assert lists(td["r"])[2:] == [[], [], [7.0]]
    td.resize_(0)
    assert td["r"].shape[0] == 0 and td.batch_size == (0,)
    td.append({"r": [8.0, 9.0], "p": torch.ones(1, 3), "x": 1})
    assert lists(td["r"]) == [[8.0, 9.0]]


@pytest.mark.parametrize("where", WHERE)
def test_strided_rows_of_any_shape(where: str, make: Maker) -> None:
    td = make(where, TensorDict({"image": strided([torch.ones(2, 3), torch.ones(4, 3)])}, [2]))
    td.append({"image": torch.full((2, 5), 2)})
    td.extend([{"image": torch.zeros(1, 1)}, {"image": torch.zeros(6, 2)}])
    assert [tuple(row.shape) for row in td["image"].unbind()] == [(2, 3), (4, 3), (2, 5), (1, 1), (6, 2)]
    assert td["image"].unbind()[2].tolist() == [[2.0] * 5] * 2
    td.resize_(1)
    assert [tuple(row.shape) for row in td["image"].unbind()] == [(2, 3)]


@pytest.mark.parametrize("where", WHERE)
def test_rows_that_do_not_fit_change_nothing(where: str, make: Maker) -> None:
    td = make(where, TensorDict({"p": ragged(2, 1, width=3), "x": torch.ones(2)}, [2]))
    for rows in ({"p": torch.ones(4), "x": 1}, {"p": torch.ones(4, 2), "x": 1}):
        with pytest.raises(BatchSizeError, match="nested tensor 'p'"):
            td.append(rows)
    with pytest.raises(BatchSizeError, match="nested tensor 'p'"):
        td.extend(TensorDict({"p": ragged(1, 2), "x": torch.ones(2)}, [2]))
    assert td.batch_size == (2,) and td["p"].size(0) == 2
    dense = make(where, TensorDict({"p": strided([torch.ones(2)] * 2)}, [2]))
    with pytest.raises(UnsupportedError, match="one shape"):
        dense.resize_(3)
    assert dense.batch_size == (2,)


@pytest.mark.parametrize("where", REOPENED)
@pytest.mark.parametrize("source", ["memmap", "h5", "objects"])
def test_rows_come_from_a_store_in_blocks(
    where: str, source: str, make: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = make(source, sample(*[2, 0, 1] * 20, start=3))
    if hasattr(type(rows), "_row_blocks"):
        monkeypatch.setattr(type(rows), "_row_blocks", lambda self: ((i, min(i + 7, 60)) for i in range(0, 60, 7)))
    td = make(where, sample(3, 0, 2))
    td.extend(rows)
    check(td, *[3, 0, 2], *[2, 0, 1] * 20)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_values_are_cast_and_another_ragged_dimension_is_kept(dtype: torch.dtype, tmp_path: Path) -> None:
    wide = torch.nested.nested_tensor_from_jagged(
        torch.arange(12.0).reshape(2, 6), torch.tensor([0, 2, 6]), jagged_dim=2
    )
    expected = [row.tolist() for row in wide.unbind()]
    for td in (TensorDict({"w": wide}, [2]), TensorDict({"w": wide}, [2]).save(tmp_path / "wide.h5")):
        td.append({"w": torch.ones(2, 5, dtype=dtype)})
        td.extend(td[:2])
        assert td["w"].dtype == torch.float32
        assert lists(td["w"]) == [*expected, [[1.0] * 5] * 2, *expected]


def test_appending_in_memory_copies_the_new_rows_only() -> None:
    td = TensorDict({"r": ragged(*[3] * 64)}, [64])
    places = set()
    for i in range(200):
        td.append({"r": torch.full((3,), float(i))})
        places.add(td["r"].values().data_ptr())
    assert len(places) < 8, "the values move when their memory is full, and then it doubles"
    assert lists(td["r"])[-1] == [199.0] * 3


def test_gradients_reach_rows_that_are_appended() -> None:
    row = torch.ones(1, 2, requires_grad=True)
    td = TensorDict({"r": ragged(2, 1)}, [2])
    td.extend(TensorDict({"r": row}, [1]))
    (td["r"].values() * 3).sum().backward()
    assert row.grad.tolist() == [[3.0, 3.0]]


def test_cat_joins_nested_tensors() -> None:
    a, b = sample(3, 0), sample(2, start=2)
    check(torch.cat([a, b]), 3, 0, 2)
    check(TensorDict.cat([a, b]), 3, 0, 2)
    mixed = torch.cat([TensorDict({"r": ragged(2, 1)}, [2]), TensorDict({"r": torch.ones(2, 4)}, [2])])
    assert lists(mixed["r"]) == [[0.0, 1.0], [100.0], [1.0] * 4, [1.0] * 4]
    images = TensorDict({"r": strided([torch.ones(2, 3)])}, [1])
    assert [tuple(r.shape) for r in torch.cat([images, images])["r"].unbind()] == [(2, 3)] * 2
    with pytest.raises(InvalidStateError, match="nested tensor"):
        torch.cat([TensorDict({"r": ragged(2, width=3)}, [1]), TensorDict({"r": ragged(2, width=2)}, [1])])


@pytest.mark.parametrize("width", [None, 3])
def test_a_gather_is_what_a_list_gives(width: int | None) -> None:
    sizes = [(7 * i) % 5 for i in range(300)]
    nested = ragged(*sizes, width=width)
    rows = nested.unbind()
    td = TensorDict({"r": nested}, [300])
    for index in (torch.randint(300, (32,)), [5, 5, 0], slice(10, 90, 7), torch.arange(300) % 3 == 0, slice(4, 4)):
        chosen = torch.arange(300)[index]
        assert lists(td[index]["r"]) == [rows[i].tolist() for i in chosen]
    moved = torch.nested.nested_tensor_from_jagged(torch.randn(4, 9), torch.tensor([0, 2, 9]), jagged_dim=2)
    got = TensorDict({"r": moved}, [2])[torch.tensor([1, 0])]["r"]
    assert lists(got) == [row.tolist() for row in reversed(moved.unbind())]
    grad = torch.randn(9, requires_grad=True)
    with_grad = torch.nested.nested_tensor_from_jagged(grad, torch.tensor([0, 2, 9]))
    TensorDict({"r": with_grad}, [2])[torch.tensor([0, 0])]["r"].values().sum().backward()
    assert grad.grad.tolist() == [2.0, 2.0, *[0.0] * 7]
