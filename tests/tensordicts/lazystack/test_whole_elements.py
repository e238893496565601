"""Rows of a lazy stack that are whole elements: the short ways do what a dense TensorDict does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import tdstore
from tdstore import LazyStackedTensorDict, TensorDict
from tdstore.errors import (
    BatchSizeError,
    DimensionError,
    GradientError,
    InvalidArgumentError,
    LockedError,
    ReadOnlyError,
)

ROWS = torch.tensor([4, 0, 2])
MASK = torch.tensor([True, False, True, True, False])


def dense() -> TensorDict:
    a = torch.arange(60.0).reshape(5, 3, 4)
    return TensorDict({"a": a, "n": {"b": torch.arange(15).reshape(5, 3)}}, [5, 3])


def stack(whole: TensorDict | None = None) -> LazyStackedTensorDict:
    return tdstore.lazy_stack([td.clone() for td in (whole if whole is not None else dense()).unbind(0)])


def same(one: Any, other: Any) -> None:
    assert one.batch_size == other.batch_size
    assert (one.to_tensordict() == other.to_tensordict()).all()


INDICES: list[Any] = [
    0, -2, slice(None), slice(1, 4), slice(0, 5, 2), ..., ROWS, ROWS - 5, [4, 0, 2], MASK,
    (slice(None), 0), (slice(None), slice(0, 2)), (slice(1, 4), 1), (slice(None), ..., 2), (slice(None), ROWS[1:] % 3),
]  # fmt: skip


@pytest.mark.parametrize("lazy", [False, True], ids=["dense value", "lazy value"])
@pytest.mark.parametrize("index", INDICES, ids=str)
def test_rows_are_written_as_in_a_dense_one(index: Any, lazy: bool) -> None:
    want, got = dense(), stack()
    value = want[index] * 2 + 100
    want[index] = value
    got[index] = (stack(dense() * 2 + 100)[index]) if lazy else value
    same(got, want)


@pytest.mark.parametrize("index", INDICES, ids=str)
@pytest.mark.parametrize("number", [7, 7.0, True])
def test_numbers_are_written_as_in_a_dense_one(index: Any, number: float) -> None:
    want, got = dense(), stack()
    want[index] = number
    got[index] = number
    same(got, want)


@pytest.mark.parametrize("index", [0, -1, ROWS, [4, 0, 2], slice(1, 4), ROWS - 5, MASK, ...], ids=str)
def test_rows_of_one_entry(index: Any) -> None:
    want, got = dense(), stack()
    assert torch.equal(got.get_at("a", index), want.get_at("a", index))
    assert torch.equal(got.get_at(("n", "b"), index), want.get_at(("n", "b"), index))
    values = dense() * 3
    for td in (want, got):
        td.set_at_("a", values["a"][index], index)
        td.set_at_(("n", "b"), values["n", "b"][index], index)
    same(got, want)
    for td in (want, got):
        td.update_at_(values[index] - 1, index)
    same(got, want)


@pytest.mark.parametrize(
    ("at", "of"),
    [(torch.tensor([0, 1]), torch.tensor([1, 0])), (slice(0, 4), slice(1, 5)), (slice(1, 5), slice(0, 4))],
    ids=str,
)
def test_what_is_written_is_read_first(at: Any, of: Any) -> None:
    want, got = dense(), stack()
    want[at] = want[of].clone()
    got[at] = got[of]
    same(got, want)


def test_entries_written_over_one_another() -> None:
    shared = torch.arange(10.0)
    td = tdstore.lazy_stack([TensorDict({"a": shared[i : i + 4]}, [4]) for i in range(3)])
    before = [element["a"].clone() for element in td.tensordicts[1:]]
    td.set_at_("a", torch.stack(before), slice(0, 2))
    assert shared[:5].tolist() == [1.0, 2.0, 3.0, 4.0, 5.0]


def test_repeated_rows_take_the_last() -> None:
    got = stack()
    got[[1, 1]] = stack(dense() + 100)[[0, 2]]
    assert torch.equal(got["a"][1], dense()["a"][2] + 100)


def test_nothing_is_written_if_one_element_cannot_take_its_row() -> None:
    td = tdstore.lazy_stack([TensorDict({"a": torch.zeros(3)}, [3]), TensorDict({"a": torch.zeros(3)}, [3])])
    td.tensordicts[1]["a"].requires_grad_()
    with pytest.raises(RuntimeError):
        td[:] = tdstore.lazy_stack([TensorDict({"a": torch.ones(3)}, [3])] * 2)
    assert not td.tensordicts[0]["a"].any()


def test_entries_that_are_new_are_made() -> None:
    td = tdstore.lazy_stack([TensorDict({"a": torch.zeros(3)}, [3]) for _ in range(2)])
    td[0] = TensorDict({"a": torch.ones(3), "b": torch.ones(3)}, [3])
    assert td.tensordicts[0]["b"].tolist() == [1, 1, 1]
    assert td.tensordicts[0]["a"].tolist() == [1, 1, 1]


SHAPES: dict[str, Callable[[Any], Any]] = {
    "transpose": lambda td: td.transpose(0, 1),
    "permute twice": lambda td: td.permute(1, 0).permute(1, 0),
    "unflatten": lambda td: td[:4].unflatten(0, (2, -1)),
    "unflatten inner": lambda td: td.unflatten(1, (3, 1)),
    "tensor_split": lambda td: td.tensor_split(3),
    "tensor_split at": lambda td: td.tensor_split([1, 2]),
    "more parts than rows": lambda td: td.tensor_split(7),
    "split": lambda td: td.split(2),
    "split sizes": lambda td: td.split([1, 4]),
    "split inner": lambda td: td.split(2, 1),
    "chunk": lambda td: td.chunk(2),
}


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("names", [None, ["time", "env"]])
def test_shapes_are_views_of_the_elements(name: str, names: list[str] | None) -> None:
    want, got = dense(), stack()
    want.names = got.names = names
    wanted, found = SHAPES[name](want), SHAPES[name](got)
    for one, other in zip(found, wanted, strict=True) if isinstance(found, tuple) else [(found, wanted)]:
        assert one.batch_size == other.batch_size
        if len(one):  # an empty stack has no elements that could have names
            assert one.names == other.names
            same(one, other)
            one.zero_()
            assert not one["a"].any()
    if not isinstance(found, tuple):
        elements = list(got[:4]) if name == "unflatten" else list(got)
        assert not any(td["a"].any() for td in elements)


def test_views_are_undone() -> None:
    got = stack()
    with got.transpose(0, 1) as moved:
        moved["c"] = torch.ones(3, 5)
    assert got["c"].shape == (5, 3)
    part = got[:4]
    with part.unflatten(0, (2, 2)) as parts:
        parts["d"] = torch.ones(2, 2, 3)
    assert part["d"].shape == (4, 3)
    locked = stack().lock_()
    assert locked.transpose(0, 1).is_locked
    with pytest.raises(LockedError):
        locked.unflatten(0, (5, 1))["new"] = torch.ones(5, 1, 3)


def test_facts_count_entries_that_only_some_elements_have() -> None:
    both = TensorDict({"a": torch.zeros(2), "b": torch.ones(2)}, [2])
    td = LazyStackedTensorDict(both, TensorDict({"a": torch.zeros(2)}, [2]))
    assert td.any()
    assert not td.all()
    assert td.bytes() == 24
    assert td.param_count() == 6
    assert td.dtype is torch.float32


@pytest.mark.parametrize("index", [0, slice(None), torch.tensor([0]), torch.tensor([True, False]), ...])
@pytest.mark.parametrize("nested", [False, True], ids=["flat", "nested"])
def test_a_number_is_not_written_to_entries_that_only_some_elements_have(index: Any, nested: bool) -> None:
    """They are no entries of the stack; `masked_fill_` fills the elements, as tensordict does."""
    more: Any = (
        {"n": {"a": torch.zeros(2), "b": torch.zeros(2)}} if nested else {"a": torch.zeros(2), "b": torch.zeros(2)}
    )
    less: Any = {"n": {"a": torch.zeros(2)}} if nested else {"a": torch.zeros(2)}
    a, b = (("n", "a"), ("n", "b")) if nested else ("a", "b")
    td = LazyStackedTensorDict(TensorDict(more, [2]), TensorDict(less, [2]))
    td[index] = 1
    assert td[0][a].all()
    assert not td[0][b].any()
    td.masked_fill_(torch.tensor([True, False]), 2)
    assert (td[0][b] == 2).all()


@pytest.mark.parametrize(
    "index", [MASK, MASK.tolist(), MASK.numpy(), (MASK, slice(0, 2)), (None, MASK), (MASK, 0), MASK | True], ids=str
)
def test_what_a_mask_selects_is_a_copy(index: Any) -> None:
    td = stack()
    part = td[index]
    assert type(part) is LazyStackedTensorDict
    same(part, dense()[index])
    part.zero_()
    part["new"] = torch.ones(part.batch_size)
    same(td, dense())
    assert "new" not in td[0].keys()  # noqa: SIM118  # keys of an element


def test_stored_elements_at_a_mask_are_windows(tmp_path: Path) -> None:
    parts = [td.save(tmp_path / f"{row}.h5") for row, td in enumerate(dense().unbind(0))]
    td = tdstore.lazy_stack(parts)
    td[MASK]["a"][...] = 1  # of a copy
    td[MASK].zero_()
    assert [bool((part["a"] == 0).all()) for part in parts] == MASK.tolist()
    for part in parts:
        part.close()


# -- whole entries -------------------------------------------------------------------------------
def wide() -> TensorDict:
    return dense() * 2 + 100


SOURCES: dict[str, Callable[[], Any]] = {
    "a dict": lambda: wide().to_dict(),
    "a dict of one entry": lambda: {"a": wide()["a"]},
    "a dict with nested keys": lambda: {("n", "b"): wide()["n", "b"]},
    "a dict of other dtypes": lambda: {"a": wide()["a"].double()},
    "a TensorDict": wide,
    "a lazy stack": lambda: stack(wide()),
    "a locked one": lambda: stack(wide()).lock_(),
    "one along another dimension": lambda: tdstore.lazy_stack([td.clone() for td in wide().unbind(1)], 1),
    "one of other dtypes": lambda: stack(wide().double()),
}


@pytest.mark.parametrize("locked", [False, True])
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("call", ["update_", "update", "copy_", "keys"])
def test_whole_entries_are_written_as_in_a_dense_one(call: str, source: str, locked: bool) -> None:
    want, got = dense(), stack()
    before = [td["a"] for td in got.tensordicts]
    if locked:
        got.lock_()
    for td in (want, got):
        value = SOURCES[source]()
        if call == "update":
            td.update(value, inplace=True)
        elif call == "keys":
            td.update_(value, keys_to_update=["a"])
        else:
            getattr(td, call)(value)
    same(got, want)
    assert all(td["a"] is old for td, old in zip(got.tensordicts, before, strict=True))


def test_entries_that_are_new_are_added_or_refused() -> None:
    td, other = stack(), stack(wide())
    other["c"] = torch.ones(5, 3)
    with pytest.raises(KeyError):
        td.update_(other)
    same(td, dense())
    td.update_(other, keys_to_update=["a", ("n", "b")])
    same(td, wide())
    td.update(other, inplace=True)
    same(td, wide().set("c", torch.ones(5, 3)))


@pytest.mark.parametrize("locked", [False, True])
def test_elements_that_are_written_over_one_another_are_read_first(locked: bool) -> None:
    td, want = stack(), dense().flip(0)
    if locked:
        td.lock_()
    td.update_(tdstore.lazy_stack(td.tensordicts[::-1]))
    same(td, want)
    td.update_(tdstore.lazy_stack(td.tensordicts[::-1]), keys_to_update=iter(["a"]))
    assert torch.equal(td["a"], dense()["a"]) and torch.equal(td["n", "b"], want["n", "b"])
    td.update_({"n": {"b": td["n", "b"].flip(0)}})
    same(td, dense())


@pytest.mark.parametrize(
    ("source", "error"),
    [
        ({"a": torch.zeros(5, 3, 4), "n": {"b": torch.zeros(5, 2)}}, BatchSizeError),
        ({"a": torch.zeros(5, 3, 4), "new": torch.zeros(5, 3)}, KeyError),
        ({"a": torch.zeros(5, 3, 4), "n": {"b": "text"}}, InvalidArgumentError),
        (TensorDict({"a": torch.zeros(5, 3, 4)}), BatchSizeError),
        (TensorDict({"a": torch.zeros(4, 3, 4)}, [4]), BatchSizeError),
    ],
    ids=["shape", "key", "kind", "no batch", "fewer rows"],
)
def test_what_does_not_fit_in_one_entry_changes_none(source: Any, error: type[Exception]) -> None:
    td = stack()
    with pytest.raises(error):
        td.update_(source)
    same(td, dense())


def test_entries_that_only_some_elements_have_are_copied_by_element() -> None:
    td, other = stack(), stack(wide())
    for one in (td, other):
        one.tensordicts[1]["own"] = torch.full((3,), float(one is other))
    td.update_(other)
    same(td, wide())
    assert td.tensordicts[1]["own"].tolist() == [1.0, 1.0, 1.0]


def test_elements_that_require_gradients_refuse_all() -> None:
    td = stack()
    td.tensordicts[3]["a"].requires_grad_()
    with pytest.raises(GradientError):
        td.update_(stack(wide()))
    with torch.no_grad():
        same(td, dense())
        td.update_(stack(wide()))
        same(td, wide())


def test_rolled_and_flipped_ones_are_copies() -> None:
    td = stack()
    for made, want in (
        (td.roll(2, 0), dense().roll(2, 0)),
        (td.flip(1), dense().flip(1)),
        (td.roll(4), dense().roll(4)),
    ):
        same(made, want)
    held = TensorDict({"all": td}, [5])
    same(held.roll(1, 0)["all"], dense().roll(1, 0))
    same(held.flip(0)["all"], dense().flip(0))


def test_a_dimension_that_is_flattened_alone_stays_as_it_is() -> None:
    td = stack()
    assert td.flatten(0, 0) is td and td.flatten(-1, 1) is td
    with pytest.raises(InvalidArgumentError, match="the end comes first"):
        td.flatten(1, 0)
    with pytest.raises(DimensionError):
        td.flatten(2, 2)


def test_a_state_dict_is_loaded_in_place_or_not_at_all() -> None:
    td, state = stack(), wide().state_dict()
    before = [one["n", "b"] for one in td.tensordicts]
    td.load_state_dict(state)
    same(td, wide())
    assert all(one["n", "b"] is old for one, old in zip(td.tensordicts, before, strict=True))
    with pytest.raises(BatchSizeError, match=r"'n.b' has shape \[5, 3\], and \[5, 2\] in the state dict"):
        td.load_state_dict({**dense().state_dict(), "n.b": torch.zeros(5, 2)})
    same(td, wide())


def test_any_and_all_ask_all_elements() -> None:
    td = tdstore.lazy_stack([TensorDict({"a": torch.zeros(2), "n": {"b": torch.zeros(2)}}) for _ in range(3)])
    assert not td.any() and not td.all()
    td.tensordicts[2]["n", "b"][1] = 1.0
    assert td.any() and not td.all()
    td.apply_(lambda leaf: leaf.fill_(1))
    assert td.all()
    td.tensordicts[1]["n", "c"] = torch.zeros(2).to_sparse()  # no entry of the stack
    held = TensorDict({"all": td, "x": torch.ones(1)})
    assert held.all() and held.any()


@pytest.mark.parametrize("locked", [False, True])
@pytest.mark.parametrize("stacked", [False, True])
def test_nested_groups_that_are_read_only_are_not_written(tmp_path: Path, stacked: bool, locked: bool) -> None:
    TensorDict({"b": torch.zeros(3)}, [3]).save(tmp_path / "group", storage="memmap")
    loaded = [tdstore.open(tmp_path / "group", "r", storage="memmap") for _ in range(2)]
    elements = [TensorDict({"a": torch.zeros(3), "n": group}, [3]) for group in loaded]
    td: Any = tdstore.lazy_stack(elements) if stacked else elements[0]
    other = td.clone() + 1
    if locked:
        td.lock_()
    writes: list[Callable[[], object]] = [
        lambda: td.update_(other), lambda: td.copy_(other), lambda: td.update(other, inplace=True),
    ]  # fmt: skip
    for write in writes:
        with pytest.raises(ReadOnlyError):
            write()
        assert not td["a"].any() and not td["n", "b"].any()


def test_copies_of_stacks_compile_as_one_graph() -> None:
    td = stack()
    torch.compile(lambda t: t.update_(t + 1), backend="eager", fullgraph=True)(td)
    assert torch.equal(td["a"], dense()["a"] + 1) and torch.equal(td["n", "b"], dense()["n", "b"] + 1)


@pytest.mark.parametrize(
    "index", [slice(0, 0), [], torch.tensor([], dtype=torch.int64), torch.zeros(3, dtype=torch.bool)]
)
def test_no_rows_have_the_entries_that_all_elements_have(index):
    elements = [TensorDict({"a": torch.zeros(2, i), "n": {"b": torch.zeros(2)}, "t": "x"}, [2]) for i in range(3)]
    elements[0]["only here"] = torch.zeros(2)
    stack = tdstore.lazy_stack(elements)
    stack.names = ["time", None]
    found = stack[index]
    assert (found.batch_size, found["a"].shape, found["n", "b"].shape) == ((0, 2), (0, 2, 0), (0, 2))
    assert ("only here" in found, found.names) == (False, ["time", None])
    assert tdstore.lazy_stack(elements, 1)[:, index].batch_size == (2, 0)
