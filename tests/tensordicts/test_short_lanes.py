"""Short ways of common operations give what the general ones give, and leave the rest to them."""

from __future__ import annotations

import inspect
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch

import tdstore
from tdstore import NonTensorStack, TensorDict, TensorDictBase, lazy_stack
from tdstore.container.methods.update_source import UPDATE_OPTIONS
from tdstore.convert.checkpoints import state_dict as state_dicts
from tdstore.errors import BatchSizeError, InvalidStateError, LockedError, OutOfRangeError, StateDictError


def made() -> TensorDict:
    return TensorDict(
        {"a": torch.arange(12.0).reshape(3, 4), "n": {"b": torch.ones(3, dtype=torch.int32), "c": torch.zeros(3, 2)}},
        [3],
    )


def slow(td: Any) -> Any:
    """The same entries in a lazy stack below, which no short way takes."""
    return TensorDict({"all": lazy_stack(list(td.unbind(0)))}, td.batch_size)


# -- facts ---------------------------------------------------------------------------------------
def test_facts_are_those_of_each_leaf() -> None:
    td = made()
    assert td.bytes() == 48 + 12 + 24 == slow(td).bytes()
    assert td.param_count() == 12 + 3 + 6 == slow(td).param_count()
    assert td.dtype is None and td.select("a").dtype is torch.float32
    assert not td.is_floating_point() and td.select("a").is_floating_point()
    assert td.is_contiguous() and not TensorDict({"a": torch.zeros(4, 3).T}, [3]).is_contiguous()


def test_bytes_count_gradients_and_nested_classes() -> None:
    @tdstore.tensorclass
    class Pair:
        one: torch.Tensor
        two: torch.Tensor

    td = TensorDict(
        {"p": Pair(torch.zeros(3), torch.zeros(3, 2), batch_size=[3]), "w": torch.nn.Parameter(torch.ones(3))}
    )
    assert td.bytes() == 12 + 24 + 12
    td["w"].sum().backward()
    assert td.bytes() == 12 + 24 + 12 + 12
    assert td.bytes(count_duplicates=False) == td.bytes()
    assert td.param_count() == 12 and td.dtype is torch.float32


def test_jagged_leaves_take_the_long_way() -> None:
    rows = torch.nested.nested_tensor([torch.ones(2), torch.ones(5)], layout=torch.jagged)
    td = TensorDict({"r": rows}, [2])
    assert td.param_count() == 7
    assert td.bytes() == 7 * 4 + 3 * 8


@pytest.mark.parametrize("nested", [False, True])
def test_all_and_any_look_no_further_than_they_must(nested: bool) -> None:
    for one, two in ((True, True), (True, False), (False, False)):
        td: Any = TensorDict({"a": torch.tensor([one, one]), "n": {"b": torch.tensor([two, two])}}, [2])
        td = slow(td) if nested else td
        assert td.all() is (one and two) and td.any() is (one or two)


# -- batch sizes -----------------------------------------------------------------------------------
def test_a_batch_size_is_checked_and_reaches_nested_ones() -> None:
    td = made()
    td.batch_size = []
    assert td.batch_size == torch.Size([]) and td["n"].batch_size == torch.Size([3])
    td["n"].batch_size = []
    td.batch_size = [3]
    assert td["n"].batch_size == torch.Size([3])
    with pytest.raises(BatchSizeError, match="'n', 'b'|n.*b"):
        td.batch_size = [3, 2]
    assert td.batch_size == torch.Size([3]) and td["n"].batch_size == torch.Size([3])


def test_a_batch_size_that_does_not_change_reaches_nested_ones() -> None:
    td = made()
    td["n"].batch_size = []
    td.batch_size = [3]
    assert td["n"].batch_size == torch.Size([3])


def test_a_locked_parent_keeps_its_batch_size_below() -> None:
    td = made().lock_()
    with pytest.raises(BatchSizeError):
        td["n"].batch_size = []


# -- entries by key --------------------------------------------------------------------------------
@pytest.mark.parametrize("key", ["a", ("n", "b")])
def test_fill_casts_as_torch_full_does(key: Any) -> None:
    td = made()
    before = td[key]
    assert td.fill_(key, 2.7) is td and td[key] is before
    assert torch.equal(before, torch.full_like(before, 2.7))


def test_fill_of_a_locked_one_writes_in_place() -> None:
    td = made().lock_()
    td.fill_("a", 7)
    assert (td["a"] == 7).all()


def test_get_at_is_a_row_or_the_same_error() -> None:
    td = made()
    assert torch.equal(td.get_at("a", 1), td["a"][1])
    assert torch.equal(td.get_at(("n", "c"), -1), td["n", "c"][-1])
    assert td.get_at("zz", 0, None) is None
    with pytest.raises(IndexError):
        td.get_at("a", 3)


def test_set_in_place_reaches_nested_leaves() -> None:
    td = made()
    leaf = td["n", "c"]
    td.set(("n", "c"), torch.full((3, 2), 5.0), inplace=True)
    assert td["n", "c"] is leaf and (leaf == 5).all()
    with pytest.raises(BatchSizeError):
        td.set(("n", "c"), torch.ones(2, 2), inplace=True)


# -- rows ------------------------------------------------------------------------------------------
@pytest.mark.parametrize("index", [..., (..., 0), (slice(0, 2),), (0, slice(1, 3)), (slice(None), 1), slice(None)])
def test_rows_at_terms_are_written_as_torch_does(index: Any) -> None:
    td = TensorDict({"a": torch.zeros(3, 4, 2), "n": {"b": torch.zeros(3, 4)}}, [3, 4])
    part = td[index].clone().apply(lambda x: x + torch.rand_like(x))
    expected = {key: td[key].clone() for key in ("a", ("n", "b"))}
    at = (slice(None), slice(None)) if index is ... else index
    at = (slice(None), 0) if index == (..., 0) else at
    for key, leaf in expected.items():
        leaf[at] = part[key]
    leaves = {key: td[key] for key in expected}
    td[index] = part
    for key, leaf in expected.items():
        assert td[key] is leaves[key] and torch.equal(td[key], leaf)


def test_everything_is_set_to_a_number() -> None:
    td = made()
    td[...] = 3
    assert all((leaf == 3).all() for leaf in td.values(True, True))


def with_text() -> TensorDict:
    td = TensorDict({"a": torch.zeros(3)}, [3])
    td.set("s", NonTensorStack("x", "y", "z"))
    return td


@pytest.mark.parametrize(
    ("index", "text"), [(1, ["x", "q", "z"]), (slice(0, 2), ["q", "r", "z"]), ([2, 0], ["r", "y", "q"])]
)
def test_values_of_rows_are_written_with_their_tensors(index: Any, text: list[str]) -> None:
    td = with_text()
    part = td[index].clone()
    part["a"] = part["a"] + 1
    part.set("s", "q" if index == 1 else NonTensorStack("q", "r"))
    stack = td.get("s")
    td[index] = part
    assert td.get("s") is stack and td["s"] == text
    assert td["a"][index].eq(1).all() and td["a"].sum() == (1 if index == 1 else 2)


def test_values_that_are_one_at_several_rows_become_their_own() -> None:
    td = TensorDict({"a": torch.zeros(3)}, [3])
    td.set("s", NonTensorStack("x").expand(3))
    part = TensorDict({"a": torch.ones(()), "s": "q"})
    td[1] = part
    assert td["s"] == ["x", "q", "x"]


def test_values_that_do_not_fit_leave_the_tensors_alone() -> None:
    td = with_text()
    part = TensorDict({"a": torch.ones(2), "s": NonTensorStack("q", "r")}, [2])
    with pytest.raises(BatchSizeError):
        td[0:1] = part
    assert td["a"].sum() == 0 and td["s"] == ["x", "y", "z"]


# -- arithmetic in place ---------------------------------------------------------------------------
FUNCTIONS = {
    "maximum_": torch.maximum,
    "minimum_": torch.minimum,
    "clamp_max_": torch.clamp_max,
    "clamp_min_": torch.clamp_min,
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64])
def test_bounds_in_place_are_those_of_torch(name: str, dtype: torch.dtype) -> None:
    one, two = torch.randn(2, 5).mul(3).to(dtype)
    if dtype.is_floating_point:
        one[0], two[1] = float("nan"), float("nan")
    td, other = TensorDict({"a": one.clone(), "b": one.clone()}, [5]), TensorDict({"a": two, "b": two}, [5])
    leaf = td["a"]
    getattr(td, name)(other)
    assert td["a"] is leaf and torch.equal(leaf.nan_to_num(9), FUNCTIONS[name](one, two).nan_to_num(9))
    td = TensorDict({"a": one.clone()}, [5])
    getattr(td, name)(1)
    assert torch.equal(td["a"].nan_to_num(9), FUNCTIONS[name](one, torch.tensor(1, dtype=dtype)).nan_to_num(9))


def test_lerp_and_addcmul_in_place() -> None:
    a, b, c = torch.rand(3, 4), torch.rand(3, 4), torch.rand(3, 4)
    for leaf, other, weight in ((a, b, 0.25), (a, b, TensorDict({"x": c}, [3])), (a, b, 1)):
        td = TensorDict({"x": leaf.clone()}, [3])
        td.lerp_(TensorDict({"x": other}, [3]), weight)
        assert torch.equal(td["x"], torch.lerp(leaf, other, weight["x"] if isinstance(weight, TensorDict) else weight))
    td = TensorDict({"x": a.clone()}, [3])
    td.addcmul_(TensorDict({"x": b}, [3]), TensorDict({"x": c}, [3]), value=2)
    assert torch.equal(td["x"], torch.addcmul(a, b, c, value=2))
    td.addcmul_(TensorDict({"x": b}, [3]), 2.0)
    assert torch.equal(td["x"], torch.addcmul(torch.addcmul(a, b, c, value=2), b, torch.tensor(2.0)))


def test_a_result_that_cannot_be_stored_changes_nothing() -> None:
    td = TensorDict({"a": torch.zeros(2), "b": torch.zeros(2, dtype=torch.int64)}, [2])
    with pytest.raises(tdstore.errors.InvalidStateError):
        td.maximum_(TensorDict({"a": torch.ones(2), "b": torch.full((2,), 0.5)}, [2]))
    assert td["b"].sum() == 0 and td["a"].sum() == 0


def test_functions_in_place_reach_nested_classes() -> None:
    @tdstore.tensorclass
    class Inner:
        x: torch.Tensor
        note: str = "n"

    td = TensorDict({"i": Inner(torch.full((2,), 4.0), batch_size=[2]), "a": torch.full((2,), 9.0)}, [2])
    leaf = td["i"].x
    td.sqrt_().add_(1)
    assert td["i"].x is leaf and leaf.tolist() == [3.0, 3.0] and td["a"].tolist() == [4.0, 4.0]
    assert isinstance(td["i"], Inner) and td["i"].note == "n"


def test_writes_reach_nested_classes() -> None:
    @tdstore.tensorclass
    class Inner:
        x: torch.Tensor
        note: str = "n"

    td = TensorDict({"i": Inner(torch.zeros(3, 2), batch_size=[3]), "a": torch.zeros(3)}, [3])
    leaf, other = td["i"].x, td.clone().add_(1)
    td.update_(other)
    assert td["i"].x is leaf and leaf.eq(1).all() and td["a"].eq(1).all()
    td[1] = other[1] * 3
    td[...] = other if td["i"].x[1].ne(3).any() else td.clone()
    assert td["i"].x is leaf and leaf[:, 0].tolist() == [1.0, 3.0, 1.0]
    td[0] = 7
    assert leaf[:, 0].tolist() == [7.0, 3.0, 1.0] and td["a"].tolist() == [7.0, 3.0, 1.0] and td["i"].note == "n"
    other["i"].note = "other"
    td[0:2] = other[0:2]
    assert td["i"][0].note == "other" and leaf[:, 0].tolist() == [1.0, 1.0, 1.0]


def test_update_of_another_class_is_checked_by_key() -> None:
    @tdstore.tensorclass
    class One:
        x: torch.Tensor

    td = TensorDict({"i": One(torch.zeros(3), batch_size=[3]), "a": torch.zeros(3)}, [3])
    with pytest.raises(KeyError):
        td.update_(TensorDict({"a": torch.ones(3), "i": {"y": torch.ones(3)}}, [3]))
    assert td["a"].sum() == 0
    td.update_(TensorDict({"i": {"x": torch.ones(3)}}, [3]))
    assert td["i"].x.sum() == 3


# -- state dicts -----------------------------------------------------------------------------------
def general(td: TensorDict, **options: Any) -> dict[str, Any]:
    """A state dict by the general way, which a destination asks for."""
    return td.state_dict(OrderedDict(), **options)


@pytest.mark.parametrize("prefix", ["", "model."])
@pytest.mark.parametrize("keep_vars", [False, True])
def test_a_plain_state_dict_is_the_general_one(prefix: str, keep_vars: bool) -> None:
    td = made()
    one = td.state_dict(prefix=prefix, keep_vars=keep_vars)
    two = general(td, prefix=prefix, keep_vars=keep_vars)
    assert type(one) is type(two) and list(one) == list(two)
    assert all(one[key].data_ptr() == two[key].data_ptr() for key in one)
    assert one._metadata == two._metadata  # type: ignore[attr-defined]


def test_keys_that_collide_are_refused_as_before() -> None:
    td = TensorDict({"a.b": torch.zeros(2), "a": {"b": torch.ones(2)}}, [2])
    with pytest.raises(StateDictError, match="two entries"):
        td.state_dict()


def test_a_plain_state_dict_is_loaded_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    source = made().apply(lambda x: x + 1)
    for short in (True, False):
        if not short:
            monkeypatch.setattr(state_dicts, "_load_plain", lambda td, state: False)
        td = made()
        leaves = list(td.values(True, True))
        assert td.load_state_dict(source.state_dict()) is td
        assert [id(leaf) for leaf in td.values(True, True)] == [id(leaf) for leaf in leaves]
        assert (td == source).all()


@pytest.mark.parametrize("change", ["missing", "extra", "shape", "no metadata", "locked", "batch size"])
def test_other_state_dicts_take_the_general_way(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def run() -> Any:
        td, state = made(), made().apply(lambda x: x + 1).state_dict()
        if change == "missing":
            del state["n.c"]
        elif change == "extra":
            state["zz"] = torch.zeros(3)
        elif change == "shape":
            state["a"] = torch.zeros(3, 5)
        elif change == "no metadata":
            state = OrderedDict(state)
        elif change == "locked":
            td.lock_()
        else:
            state._metadata["n"]["batch_size"] = torch.Size([])  # type: ignore[attr-defined]
        try:
            td.load_state_dict(state)
        except (StateDictError, BatchSizeError, LockedError) as error:
            return type(error), str(error), td.to_dict()["a"].tolist(), td["n"].batch_size
        return td["a"].tolist(), td["n", "c"].tolist(), td["n"].batch_size

    found = run()
    monkeypatch.setattr(state_dicts, "_load_plain", lambda td, state: False)
    assert run() == found


def test_structured_arrays_of_tensors_in_memory() -> None:
    td = made()
    array = td.to_struct_array()
    assert array.dtype.names == ("a", "n") and array["n"].dtype.names == ("b", "c")
    assert np.array_equal(array["a"], td["a"].numpy()) and np.array_equal(array["n"]["b"], td["n", "b"].numpy())
    grown = TensorDict({"z": torch.nn.Parameter(torch.ones(3)), "i": torch.ones(3, dtype=torch.complex64).conj()}, [3])
    assert grown.to_struct_array()["z"].tolist() == [1.0, 1.0, 1.0]
    assert grown.to_struct_array()["i"].tolist() == [1 + 0j] * 3


# -- lazy stacks -----------------------------------------------------------------------------------
def test_the_stack_dimension_is_split_into_several() -> None:
    stack = lazy_stack([TensorDict({"a": torch.full((3,), float(i))}, [3]) for i in range(4)])
    view = stack.view(2, 2, 3)
    assert view.batch_size == torch.Size([2, 2, 3])
    assert view["a"].equal(stack["a"].view(2, 2, 3))
    view[1, 0]["a"].zero_()
    assert stack[2]["a"].sum() == 0
    assert stack.lock_().view(4, 1, 3).is_locked
    with stack.unlock_().view(2, 2, 3) as inside:
        inside["b"] = torch.ones(2, 2, 3)
    assert stack["b"].shape == torch.Size([4, 3])


class Counted(torch.Tensor):
    """A tensor that counts the functions of torch that it meets."""

    met = 0

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.met += 1
        return super().__torch_function__(func, types, args, kwargs or {})


@pytest.mark.parametrize("mapped", [False, True])
def test_rows_of_mixed_entries_keep_their_order_and_values(mapped: bool, tmp_path: Any) -> None:
    entries = {
        "one": torch.arange(40),
        "small": torch.rand(40, 3),
        "half": torch.rand(40, 2).to(torch.bfloat16),
        "word": NonTensorStack(*map(str, range(40))),
        "below": {"small": torch.rand(40, 2), "steps": torch.arange(80)[::2]},
        "across": torch.rand(3, 40).t(),
        "last": torch.rand(40, 2, 2),
    }
    td = TensorDict(entries, [40])
    if mapped:
        td.memmap(tmp_path / "td")
    source = TensorDict.load_memmap(tmp_path / "td") if mapped else td
    for rows in (torch.tensor([3, 39, 3]), torch.tensor([-1, 0]), torch.empty(0, dtype=torch.int64)):
        found = source[rows]
        assert list(found.keys()) == list(source.keys())
        for key in ("one", "small", "half", ("below", "small"), ("below", "steps"), "across", "last"):
            assert torch.equal(found[key], td[key][rows])
            assert not found.is_memmap() and type(found[key]) is torch.Tensor
        assert [found[i]["word"] for i in range(len(rows))] == [str(int(i) % 40) for i in rows]
    with pytest.raises(OutOfRangeError):
        source[torch.tensor([40])]


def test_rows_of_a_tensor_with_overrides_are_taken_by_torch() -> None:
    td = TensorDict({"a": torch.rand(5, 2).as_subclass(Counted), "b": torch.rand(5, 2)}, [5])
    Counted.met = 0
    found = td[torch.tensor([4, 1])]
    assert Counted.met > 0 and isinstance(found["a"], Counted)
    assert torch.equal(found["a"].as_subclass(torch.Tensor), td["a"].as_subclass(torch.Tensor)[[4, 1]])


# -- clamp, repeat, names, keys --------------------------------------------------------------------
@pytest.mark.parametrize(
    ("low", "high"),
    [
        (1, 5),
        (1.5, 5),
        (torch.tensor([0.0, 4.0, 8.0]), 6),
        (torch.tensor(2), torch.tensor([9.0, 5.0, 1.0])),
        (made() * 0 + 2, made() * 0 + 3),
        (float("nan"), 3),
        (5, 1),
    ],
)
def test_clamp_is_both_bounds_after_one_another(low: Any, high: Any) -> None:
    for lock in (False, True):
        td = made().lock_() if lock else made()
        got, want = td.clamp(low, high), td.clamp_min(low).clamp_max(high)
        for key in want.keys(True, True):
            torch.testing.assert_close(got[key], want[key], equal_nan=True)
            assert got[key].dtype is want[key].dtype
    part = made().select("a").requires_grad_()
    part.clamp(3, 7).sum(reduce=True).backward()
    alone = part["a"].detach().clone().requires_grad_()
    alone.clamp(3, 7).sum().backward()  # at a bound 1, and 0 from torch 2.14 on
    assert torch.equal(part["a"].grad, alone.grad)


@pytest.mark.parametrize("times", [(2, 1), (1, 3), (1, 1), (2, 2), (0, 1), (40, 1)])
def test_repeated_leaves_are_copies_in_one_piece(times: tuple[int, int]) -> None:
    rows = torch.arange(24.0).reshape(4, 6).T.reshape(6, 2, 2)
    leaves = {
        "t": torch.arange(6).reshape(2, 3).T,
        "e": torch.ones(1, 1).expand(3, 2),
        "x": rows[::2],
        "b": rows[:3] > 4,
    }
    td = TensorDict({**leaves, "n": {"z": torch.zeros(3, 2, 0)}, "s": "text"}, [3, 2])
    got = td.repeat(*times)
    for key, leaf in td.items(True, True):
        want = leaf.repeat(*times, *(1,) * (leaf.ndim - 2))
        assert torch.equal(got[key], want) and got[key].stride() == want.stride()
        assert not want.numel() or got[key].untyped_storage().data_ptr() != leaf.untyped_storage().data_ptr()
    assert got["s"] == "text"


def test_clearing_names_reaches_nested_ones() -> None:
    td = TensorDict({"n": TensorDict({"a": torch.zeros(2, 3)}, [2, 3], names=["x", "y"])}, [2])
    td["s"] = lazy_stack([TensorDict({"a": torch.zeros(2)}, [2]) for _ in range(2)], 1)
    td.names = ["x"]
    td.names = None
    assert td.names == [None] and td["n"].names == [None, "y"] and td["s"].names == [None, None]
    del td["s"]
    td.names = ["x"]
    td.lock_().names = None
    assert td.names == [None] and td["n"].names == [None, "y"]


def test_sorted_keys_are_those_of_now() -> None:
    td = TensorDict({"b": torch.zeros(1), "a": torch.zeros(1)})
    keys = td.keys(sort=True)
    td["0"] = torch.zeros(1)
    assert list(keys) == ["0", "a", "b"] and "a" in keys and "c" not in keys and len(keys) == 3
    assert keys == {"0", "a", "b"} and repr(keys) == "SortedKeys(['0', 'a', 'b'])"


def test_update_by_keywords() -> None:
    td = made()
    td.update(a=torch.ones(3, 4), new=torch.zeros(3))
    assert td["a"].all() and "new" in td
    with pytest.raises(BatchSizeError):
        td.update(new=torch.zeros(4))
    td.update(a=torch.zeros(3, 4), inplace=True)
    with pytest.raises(LockedError):
        td.lock_().update(a=torch.zeros(3, 4))


def test_contiguous_tensors_are_shared_in_a_new_tree() -> None:
    for td in (made(), made().lock_()):
        got = td.contiguous()
        assert got is not td and got["n"] is not td["n"] and got["n", "c"] is td["n", "c"] and not got.is_locked
    turned = TensorDict({"a": torch.zeros(3, 4).T, "b": torch.zeros(4)}, [4])
    assert turned.contiguous()["a"].is_contiguous() and turned.contiguous()["b"] is turned["b"]


def test_exclude_of_nested_keys_that_are_not_there() -> None:
    td = made()
    assert list(td.exclude(("m", "b"), "a").keys()) == ["n"]
    assert list(td.exclude(("n", "b"), ("m", "b")).keys(True, True)) == ["a", ("n", "c")]
    with pytest.raises(TypeError):
        td.exclude(("m", 1))


# -- few rows, lazy stacks ---------------------------------------------------------------------------
@pytest.mark.parametrize("rows", [[0, 2], [2, 2, 0], [-1, 0], [], list(range(3)) * 20])
@pytest.mark.parametrize("kind", ["plain", "view", "expanded source", "other dtype", "broadcast", "itself"])
def test_few_rows_are_written_as_by_torch(rows: list[int], kind: str) -> None:
    leaf = torch.arange(12.0).reshape(3, 4).clone()
    index = torch.tensor(rows, dtype=torch.int64)
    value: torch.Tensor = torch.rand(len(rows), 4)
    if kind == "view":
        leaf = torch.arange(24.0).view(6, 4)[:3]
    elif kind == "expanded source":
        value = torch.ones(1, 4).expand(len(rows), 4)
    elif kind == "other dtype":
        value = torch.arange(len(rows) * 4).reshape(len(rows), 4)
    elif kind == "broadcast":
        value = torch.rand(4)
    elif kind == "itself":
        value = leaf[: len(rows)] if len(rows) <= 3 else torch.rand(len(rows), 4)
    want = leaf.clone()
    for number, row in enumerate(rows):  # the last of repeated rows wins
        want[row] = value.clone()[number] if kind != "broadcast" else value
    td = TensorDict({"a": leaf}, [3])
    td.set_at_("a", value, index)
    torch.testing.assert_close(td["a"], want)


def test_few_rows_out_of_range_change_nothing() -> None:
    for row in (3, -4):
        td = made()
        with pytest.raises(OutOfRangeError):
            td.set_at_("a", torch.zeros(2, 4), torch.tensor([0, row]))
        assert torch.equal(td["a"], made()["a"])
    td = TensorDict({"a": torch.zeros(2, requires_grad=True), "s": torch.zeros(())})
    with pytest.raises((RuntimeError, tdstore.errors.TDStoreError)):
        td.set_at_("a", torch.ones(1), torch.tensor([0]))


def test_values_of_a_stack_are_those_of_all_elements() -> None:
    stack = lazy_stack([TensorDict({"t": str(i), "x": torch.zeros(2)}, [2]) for i in range(2)])
    assert [key for key, _ in stack.non_tensor_items()] == ["t"]
    stack.tensordicts[1]["x"] = "text"
    assert [key for key, _ in stack.non_tensor_items()] == ["t"]
    assert stack.entry_class("t") is not torch.Tensor
    small, large = (lazy_stack([made() for _ in range(n)]) for n in (2, 8000))
    for td in (small, large):
        array = td.to_struct_array()
        assert array.shape == td.batch_size and np.array_equal(array["n"]["b"], td["n", "b"].numpy())


def test_the_options_of_update_are_those_of_its_signature():
    by_name = [p.name for p in inspect.signature(TensorDictBase.update).parameters.values() if p.kind is p.KEYWORD_ONLY]
    assert set(by_name) == UPDATE_OPTIONS


@pytest.mark.parametrize("number", [0.0, -0.0, 1.0, 5, True, 0.5, -2.0, 1000])
@pytest.mark.parametrize("index", [1, slice(1, 3), ..., [2, 0], "mask"])
def test_a_number_is_written_into_all_dtypes_as_by_torch(number: float, index: Any) -> None:
    kinds = "bool uint8 int8 int64 float16 bfloat16 float32 float64 complex64 complex128".split()
    if number in (1000, -2.0):
        kinds = [kind for kind in kinds if kind not in ("uint8", "int8")]  # which torch refuses
    at = torch.tensor([True, False, True]) if index == "mask" else index
    td = TensorDict({kind: torch.ones(3, 2).to(getattr(torch, kind)) for kind in kinds}, [3])
    want = {kind: leaf.clone() for kind, leaf in td.items()}
    td[at] = number
    for kind, leaf in want.items():
        leaf[at] = number
        assert torch.equal(td[kind], leaf), kind
        if leaf.is_floating_point():
            assert torch.equal(td[kind].signbit(), leaf.signbit()), kind


# -- dicts that are written in place -------------------------------------------------------------
def written() -> TensorDict:
    return TensorDict({"a": torch.zeros(3, 2), "i": torch.zeros(3, dtype=torch.int64), "n": {"c": torch.zeros(3)}}, [3])


FIVES, ONES = torch.full((3, 2), 5.0), torch.ones(3)
DICTS: dict[str, tuple[dict[Any, Any], tuple[float, float, float]]] = {
    "flat": ({"a": FIVES}, (5, 0, 0)),
    "nested": ({"a": FIVES, "n": {"c": ONES}}, (5, 0, 1)),
    "a path": ({"a": FIVES, ("n", "c"): ONES}, (5, 0, 1)),
    "a TensorDict": ({"n": TensorDict({"c": ONES}, [3])}, (0, 0, 1)),
    "dtypes": ({"a": FIVES.int(), "i": ONES * 1.7}, (5, 1, 0)),
    "nothing": ({"n": {}}, (0, 0, 0)),
    "shapes": ({"a": torch.ones(2), "i": ONES}, (1, 1, 0)),
    "numbers": ({"a": 3.0, "n": {"c": 1}}, (3, 0, 1)),
}
ROWS_ALIKE = ("shapes", "numbers")
"""Dicts of which an entry stands for all rows: `update` takes whole entries only."""


@pytest.mark.parametrize("name", DICTS)
@pytest.mark.parametrize("method", ["update_", "copy_", "update"])
def test_a_dict_is_written_into_the_tensors_that_are_there(name: str, method: str) -> None:
    td = written()
    tensors = [td["a"], td["i"], td["n", "c"]]
    source, numbers = DICTS[name]
    options = {"inplace": True} if method == "update" else {}
    if method == "update" and name in ROWS_ALIKE:
        with pytest.raises(BatchSizeError):
            td.update(source, inplace=True)
        numbers = (0, 0, 0)
    else:
        assert getattr(td, method)(source, **options) is td
    assert all(now is tensor for now, tensor in zip((td["a"], td["i"], td["n", "c"]), tensors, strict=True))
    assert all((tensor == number).all() for tensor, number in zip(tensors, numbers, strict=True))


@pytest.mark.parametrize("bad", [{"zz": torch.ones(3)}, {"n": {"zz": torch.ones(3)}}, {"n": {"c": torch.ones(7)}}])
def test_a_dict_that_does_not_fit_writes_nothing(bad: dict[str, Any]) -> None:
    td = written()
    with pytest.raises((KeyError, BatchSizeError)):
        td.update_({"a": torch.ones(3, 2), **bad})
    assert (td == 0).all()


def test_a_dict_is_not_written_into_an_expanded_tensor() -> None:
    td = TensorDict({"a": torch.zeros(1).expand(3)}, [3])
    for source in ({"a": torch.ones(3)}, TensorDict({"a": torch.ones(3)}, [3])):
        with pytest.raises(InvalidStateError, match=r"contiguous\(\)"):
            td.update_(source)
