"""Entries that are read together share their rounds of `Store.read`: a batch costs what its slowest entry costs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch

import tdstore
from tdstore import TensorDict, UnbatchedTensor, lazy_stack
from tdstore.builtin.memory import open_memory
from tdstore.container.varlen.rounds import Rounds, drive, together
from tdstore.testing import CountingStore
from tdstore.types import LeafSpec, Read

ROWS = 300  # more than a header keeps as values
SOME = torch.tensor([3, 0, ROWS - 1, 3])
pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")


def nested(layout: torch.layout, first: int) -> torch.Tensor:
    rows = [torch.full(((first + row) % 4, 2), float(row)) for row in range(ROWS)]
    return torch.nested.nested_tensor(rows, layout=layout)


def texts(prefix: str) -> list[str]:
    return [f"{prefix} {row}" * (row % 3) for row in range(ROWS)]


def group(depth: int) -> TensorDict:
    td = TensorDict(
        {"tensor": torch.arange(ROWS), "strings": texts("below"), "jagged": nested(torch.jagged, 1)}, [ROWS]
    )
    if depth:
        td["further"] = group(depth - 1)
    return td


def element(number: int) -> TensorDict:
    return TensorDict({"tensor": torch.full((ROWS, number + 1), number), "strings": texts(str(number))}, [ROWS])


def dataset() -> TensorDict:
    td = TensorDict(
        {
            "tensor": torch.arange(ROWS * 2).reshape(ROWS, 2),
            "strings": texts("row"),
            "more strings": texts("another"),
            "jagged": nested(torch.jagged, 0),
            "strided": nested(torch.strided, 2),
            "unbatched": UnbatchedTensor(torch.arange(5)),
            "value": "one for all rows",
            "group": group(1),
        },
        [ROWS],
    )
    td["stack"] = lazy_stack([element(1), element(1)], 1)
    return td


ALONE = {
    "tensor": 1,
    "strings": 2,
    "more strings": 2,
    "jagged": 2,
    "strided": 2,
    "unbatched": 1,
    "group": 2,
    "stack": 2,
}
"""Rounds of some rows of an entry by itself."""


@pytest.fixture(scope="module", params=["h5", "zarr", "objects"])
def stored(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("rounds")
    place = f"file://{folder}/data" if request.param == "objects" else str(folder / f"data.{request.param}")
    dataset().save(place).close()
    td = tdstore.open(place)
    td._handle.store = CountingStore(td._handle.store)
    yield td
    td.close()


def rounds_of(td: Any, run: Callable[[Any], Any]) -> int:
    counting = td._handle.store
    counting.reset()
    run(td)
    rounds: int = counting.calls["read"]
    return rounds


READS: dict[str, Callable[[Any], Any]] = {
    "read": lambda td: td.read(SOME),
    "to_tensordict": lambda td: td[SOME].to_tensordict(),
    "clone": lambda td: td[10:20].clone(),
    "a loader's batch": lambda td: td.__getitems__([1, 2, 8]),
    "iteration": lambda td: list(td[:3]),
}


@pytest.mark.parametrize("key", ALONE)
def test_rounds_of_an_entry_by_itself(stored: Any, key: str) -> None:
    for how, read in READS.items():
        assert rounds_of(stored.select(key), read) == ALONE[key], how


def test_a_mix_of_entries_costs_what_its_slowest_costs(stored: Any) -> None:
    for count in range(2, len(ALONE) + 1):
        for mix in combinations(ALONE, count):
            rounds = rounds_of(stored, lambda td, mix=mix: td.read(SOME, keys=[*mix, "value"]))
            assert rounds == max(ALONE[key] for key in mix), mix


@pytest.mark.parametrize("how", READS)
def test_all_entries_cost_what_the_slowest_costs(stored: Any, how: str) -> None:
    assert rounds_of(stored, READS[how]) == max(ALONE.values())


def test_all_rows_need_the_places_of_strings_only(stored: Any) -> None:
    assert rounds_of(stored.select("tensor", "jagged", "strided", "unbatched", "value"), lambda td: td.clone()) == 1
    assert rounds_of(stored, lambda td: td.to_tensordict()) == 2


def test_what_is_read_together_is_what_was_saved(stored: Any) -> None:
    source = dataset()
    made = stored.read(SOME)
    assert torch.equal(made["tensor"], source["tensor"][SOME])
    assert made["strings"] == [source["strings"][row] for row in SOME.tolist()]
    assert made["more strings"] == [source["more strings"][row] for row in SOME.tolist()]
    for key in ("jagged", "strided", ("group", "jagged"), ("group", "further", "jagged")):
        parts = source[key].unbind()
        assert all(map(torch.equal, made[key].unbind(), [parts[row] for row in SOME.tolist()])), key
    assert torch.equal(made["unbatched"].wrapped, torch.arange(5)) and made["value"] == "one for all rows"
    below = made["group", "further"]
    assert torch.equal(below["tensor"], SOME) and below["strings"] == [texts("below")[row] for row in SOME.tolist()]
    assert torch.equal(made["stack"]["tensor"], source["stack"][SOME]["tensor"])
    assert made["stack"]["strings"] == source["stack"][SOME]["strings"]


@pytest.mark.parametrize("kind", ["h5", "zarr", "objects"])
def test_the_elements_of_a_stack_are_read_together(tmp_path: Path, kind: str) -> None:
    place = f"file://{tmp_path}/data" if kind == "objects" else str(tmp_path / f"data.{kind}")
    parts = [element(1) for _ in range(4)]
    for number, part in enumerate(parts):
        part["jagged"] = nested(torch.jagged, number)
    lazy_stack([part.exclude("jagged") for part in parts], 0).save(place).close()
    td = tdstore.open(place)
    counting = CountingStore(td._binding[0].store)
    td._binding[0].store = counting
    assert torch.equal(td.to_tensordict()["tensor"], torch.stack([part["tensor"] for part in parts]))
    assert counting.calls["read"] == 2
    counting.reset()
    rows = (torch.tensor([3, 0, 1]), torch.tensor([5, 5, 299]))
    assert td[rows]["strings"] == [texts("1")[5], texts("1")[5], texts("1")[299]]
    assert counting.calls["read"] == 2
    td.close()


def steps(path: str, count: int) -> Rounds[list[float]]:
    found = []
    for step in range(count):
        (value,) = yield [Read((path,), (slice(step, step + 1, 1),))]
        found.append(float(value))
    return found


def test_reads_of_different_length_end_when_they_are_done() -> None:
    store = open_memory()
    store.create({("a",): LeafSpec((4,), "float32"), ("b",): LeafSpec((4,), "float32")})
    counting = CountingStore(store)
    assert drive(together([steps("a", 3), steps("b", 0), steps("b", 1)]), counting) == [[0.0, 0.0, 0.0], [], [0.0]]
    assert (counting.calls["read"], counting.leaves["read"]) == (3, 4)
    assert drive(together([]), counting) == []


def test_an_error_of_one_entry_is_told_and_ends_the_read(stored: Any) -> None:
    def failing() -> Rounds[None]:
        yield [Read(("tensor",))]
        raise ValueError("damaged")

    with pytest.raises(ValueError, match="damaged"):
        drive(together([failing(), steps("tensor", 2)]), stored._handle.store)
    assert stored.read(SOME)["tensor"].shape == (4, 2)
