"""Entries that are not tensors, by themselves and in TensorDicts: shapes, writes, switches."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tdstore
from tdstore import MetaData, NonTensorData, NonTensorStack, TensorDict, UnbatchedTensor
from tdstore.errors import BatchSizeError, MismatchError, UnsupportedError

from .cases import Case, Cases
from .structures import t


def look(entry: Any) -> Any:
    """What a user sees of an entry."""
    if isinstance(entry, (tuple, list)):
        return [look(e) for e in entry]
    if isinstance(entry, torch.Tensor):
        return entry
    return type(entry).__name__, list(entry.batch_size), entry.tolist()


case = Cases()
MAKE = {
    "data": lambda M: M.NonTensorData("x", batch_size=[4]),
    "data 2d": lambda M: M.NonTensorData("x", batch_size=[2, 2]),
    "stack": lambda M: M.NonTensorStack("a", "b", "c", "d"),
    "stack 2d": lambda M: M.NonTensorStack.from_list([["a", "b"], ["c", "d"]]),
    "meta": lambda M: M.MetaData("x", batch_size=[4]),
}
DO = {
    "row": lambda e: e[1],
    "slice": lambda e: e[1:3],
    "list": lambda e: e[[1, 0]],
    "mask": lambda e: e[torch.tensor([True, False] * (len(e) // 2))],
    "None": lambda e: e[None],
    "unbind": lambda e: e.unbind(0),
    "unbind -1": lambda e: e.unbind(-1),
    "split": lambda e: e.split(1),
    "expand": lambda e: e.expand(3, *e.batch_size),
    "unsqueeze": lambda e: e.unsqueeze(1),
    "view": lambda e: e.view(4, 1),
    "reshape": lambda e: e.reshape(1, 4),
    "flatten": lambda e: e.unsqueeze(0).flatten(0, 1),
    "squeeze": lambda e: e.unsqueeze(0).squeeze(0),
    "permute": lambda e: e.unsqueeze(0).permute(1, 0) if len(e.batch_size) == 1 else e.permute(1, 0),
    "transpose": lambda e: e.unsqueeze(0).transpose(0, 1),
    "clone": lambda e: e.clone(),
    "contiguous": lambda e: e.contiguous(),
    "maybe_to_stack": lambda e: e.maybe_to_stack(),
    "stack": lambda e: torch.stack([e, e], 1),
    "cat": lambda e: torch.cat([e, e]),
    "iterate": lambda e: list(e),
}
# Where the peer gives a stack of equal values for one value in another shape: here it stays one value.
KEEPS = {f"data {what}" for what in ("expand", "unsqueeze", "flatten", "permute", "transpose")}
KEEPS |= {f"data 2d {what}" for what in ("expand", "unsqueeze", "flatten", "transpose")}
# The peer never ends.
KEEPS |= {"data iterate", "data 2d iterate", "meta iterate"}
# The peer refuses, and gives a TensorDict without keys.
KEEPS |= {"stack 2d view", "stack 2d reshape"}
for kind, make in MAKE.items():
    for what, do in DO.items():
        if f"{kind} {what}" not in KEEPS:
            case(f"{kind} {what}", lambda M, m=make, d=do: look(d(m(M))))
    case(f"{kind} facts", lambda M, m=make: (lambda e: (e.shape, e.ndim, e.numel(), len(e), e.batch_dims))(m(M)))
    case(f"{kind} equal", lambda M, m=make: (m(M) == m(M), m(M) != m(M).clone(), m(M) == "x"))
    case(f"{kind} to_dict", lambda M, m=make: m(M).to_dict())
case("equal rows", lambda M: M.NonTensorStack("a", "b") == M.NonTensorStack("a", "z"))
case("from_list", lambda M: look(M.NonTensorStack.from_list([["a", "b", "c"], ["d", "e", "f"]])))
case("from_list of numbers", lambda M: look(M.NonTensorStack.from_list([1, 2])))
case("from_nontensordata", lambda M: look(M.NonTensorStack.from_nontensordata(M.NonTensorData("x", batch_size=[2]))))
case("from_nontensordata of none", lambda M: look(M.NonTensorStack.from_nontensordata(M.NonTensorData("x"))))
case("data of data", lambda M: look(M.NonTensorData(M.NonTensorData("x"))))
case("update", lambda M: (lambda e: (e.update(M.NonTensorData("y")), e)[1].data)(M.NonTensorData("x")))
case("stack of unequal", lambda M: look(torch.stack([M.NonTensorData("x"), M.NonTensorData("y")])))
case("stack of equal", lambda M: look(torch.stack([M.NonTensorData("x"), M.NonTensorData("x")])))
case("cat of unequal", lambda M: look(torch.cat([M.NonTensorData(v, batch_size=[2]) for v in "xy"])))
case("stack of meta", lambda M: look(torch.stack([M.MetaData("x"), M.MetaData("x")])))
case("stack of unequal meta", lambda M: look(torch.stack([M.MetaData("x"), M.MetaData("y")])))
case(
    "write a row of a stack", lambda M: (lambda e: (e.__setitem__(0, M.NonTensorData("q")), look(e)))(MAKE["stack"](M))
)


def held(program: Any) -> Any:
    """A program on a TensorDict with one value, one per row, and metadata."""

    def run(M: Any) -> Any:
        td = M.td({"a": t(3), "s": "x", "l": ["p", "q", "r"], "m": M.MetaData({"k": 1})}, [3])
        return program(M, td)

    return run


def seen(td: Any) -> Any:
    return [look(td.get(k)) for k in ("s", "l", "m")]


WRITES = {
    "row": lambda M, td: td.__setitem__(0, M.td({"s": "y", "l": "Z"}, [])),
    "row from dict": lambda M, td: td.__setitem__(0, {"s": "y"}),
    "slice": lambda M, td: td.__setitem__(slice(0, 2), M.td({"s": "y", "l": ["1", "2"]}, [2])),
    "mask": lambda M, td: td.__setitem__(torch.tensor([True, False, True]), M.td({"l": ["1", "2"]}, [2])),
    "meta row": lambda M, td: td.__setitem__(0, M.td({"m": M.MetaData("z")}, [])),
    "set_": lambda M, td: td.set_("s", "y"),
    "set_ a stack": lambda M, td: td.set_("l", "y"),
    "set_ with a list": lambda M, td: td.set_("l", ["1", "2", "3"]),
    "update_": lambda M, td: td.update_({"s": "y", "l": "k"}),
    "update": lambda M, td: td.update({"s": "y", "l": ["1", "2", "3"]}),
    "set_at_": lambda M, td: td.set_at_("s", "y", 0),
    "set_at_ a stack": lambda M, td: td.set_at_("l", "y", 0),
    "update_at_": lambda M, td: td.update_at_(M.td({"l": "y"}, []), 0),
    "through a list": lambda M, td: td["l"].__setitem__(0, "W"),
    "through a slice": lambda M, td: td[:2].__setitem__(0, M.td({"l": "W"}, [])),
    "through a view": lambda M, td: td.view(3, 1).__setitem__((1, 0), M.td({"l": "W"}, [])),
    "all through a slice": lambda M, td: td[:2].set_("l", "W"),
    "a copy": lambda M, td: td[[0, 1]].clone().set_("l", "W"),
    "a clone": lambda M, td: td.clone().set_("l", "W"),
    "a selection": lambda M, td: td.select("l").set_("l", "W"),
    "locked": lambda M, td: td.lock_().__setitem__(0, M.td({"s": "y"}, [])),
    "the result of maths": lambda M, td: (td.select("a", "l") + 1).clone().set_("l", "W"),
}
for what, write in WRITES.items():
    case(f"write {what}", held(lambda M, td, w=write: (w(M, td), seen(td))[1]))
READS = {
    "td[key]": lambda M, td: (td["s"], td["l"], td["m"]),
    "cat": lambda M, td: seen(torch.cat([td, td])),
    "stack": lambda M, td: seen(torch.stack([td, td])),
    "stack of unequal meta": lambda M, td: look(torch.stack([td[0], td.clone().set("m", M.MetaData(2))[0]]).get("m")),
    "rows": lambda M, td: seen(td[torch.tensor([2, 0])]),
    "row": lambda M, td: seen(td[1]),
    "expand": lambda M, td: look(td.expand(2, 3).get("m")),
    "masked_select": lambda M, td: td.masked_select(torch.tensor([True, False, True]))["l"],
    "repeat_interleave": lambda M, td: td.repeat_interleave(2)["l"],
    "maths": lambda M, td: seen(td + 1),
    "is_non_tensor": lambda M, td: [M.is_non_tensor(td.get(k)) for k in "aslm"],
    "get_non_tensor": lambda M, td: (td.get_non_tensor("l"), td.get_non_tensor("zz", 5)),
    "set_non_tensor of a list": lambda M, td: look(td.set_non_tensor("s", ["a", "b", "c"]).get("s")),
    "filter_non_tensor_data": lambda M, td: list(td.filter_non_tensor_data().keys()),
    "a list of dicts": lambda M, td: look(td.set("x", [{"k": 1}, {"k": 2}, {"k": 3}]).get("x")),
    "a short list": lambda M, td: td.set("x", ["a", "b"]),
    "a value for the batch": lambda M, td: look(td.set("x", M.NonTensorData("v")).get("x")),
}
for what, read in READS.items():
    case(f"read {what}", held(read))
case("lists in two dimensions", lambda M: M.td({"l": [["a", "b"], ["c", "d"]]}, [2, 2])[0]["l"])


def captured(M: Any) -> Any:
    with M.set_capture_non_tensor_stack(True):
        one, two = M.NonTensorData("x"), M.NonTensorData("y")
        inside = M.capture_non_tensor_stack(), look(torch.stack([one, one])), look(torch.stack([one, two]))
    return M.capture_non_tensor_stack(), inside, look(torch.stack([one, one]))


case("set_capture_non_tensor_stack", captured)


@case.parametrize
def test_nontensor(case: Case) -> None:
    case.check()


# -- where ours differs --------------------------------------------------------------------------
@pytest.mark.parametrize("name", sorted(KEEPS))
def test_where_the_peer_loses_form(name: str) -> None:
    kind, what = next((k, name[len(k) + 1 :]) for k in ("data 2d", "stack 2d", "data", "meta") if name.startswith(k))
    source = MAKE[kind](tdstore)
    made, rows = DO[what](source), DO[what](source.maybe_to_stack())
    for entry, other in zip(made, rows, strict=True) if what == "iterate" else [(made, rows)]:
        assert look(entry)[1:] == look(other)[1:]
        assert type(entry) is (NonTensorStack if kind.startswith("stack") else type(source))


def test_a_row_of_one_value_can_be_written_only_as_a_stack() -> None:
    # The peer ignores `data[0] = ...` without a word.
    data = NonTensorData("x", batch_size=[2])
    with pytest.raises(UnsupportedError, match="maybe_to_stack"):
        data[0] = "y"
    assert data.tolist() == ["x", "x"]
    stack = data.maybe_to_stack()
    stack[0] = "y"  # type: ignore[index]
    assert stack.tolist() == ["y", "x"]


def test_update_at_takes_a_dict() -> None:
    # The peer raises TypeError.
    td = TensorDict({"l": ["p", "q", "r"]}, [3])
    assert td.update_at_({"l": "y"}, 1)["l"] == ["p", "y", "r"]


def test_a_locked_stack_can_be_written_in_place() -> None:
    # The peer raises ValueError, though it writes tensors in place, and rows of this stack.
    td = TensorDict({"l": ["p", "q", "r"]}, [3]).lock_()
    assert td.set_("l", "y")["l"] == ["y"] * 3


def test_lists_stay_lists_when_they_are_one_value() -> None:
    # The peer makes a numpy array of strings of it, and a tensor of numbers.
    with tdstore.set_list_to_stack(False):
        td = TensorDict({"s": ["a", "b", "c"], "n": [{"k": 1}]}, [2])
        assert not tdstore.list_to_stack()
    assert tdstore.list_to_stack()
    assert look(td.get("s")) == ("NonTensorData", [2], [["a", "b", "c"]] * 2)
    assert td[0]["n"] == [{"k": 1}]

    @tdstore.set_list_to_stack(False)
    def inside() -> bool:
        return tdstore.list_to_stack()

    assert not inside()
    tdstore.set_list_to_stack(False).set()
    assert not tdstore.list_to_stack()
    tdstore.set_list_to_stack(True).set()
    assert tdstore.list_to_stack()


def test_only_the_dimensions_of_the_batch_are_taken_apart() -> None:
    # The peer takes lists apart as deep as they are even, so that one longer list changes the shape of all.
    td = TensorDict({"l": [["a", "b"], ["c", "d"]]}, [2])
    assert td.get("l").batch_size == (2,)
    td[0] = {"l": NonTensorData(["a", "b", "c"])}
    assert td["l"] == [["a", "b", "c"], ["c", "d"]]


def test_gather_roll_and_flip_keep_rows() -> None:
    # The peer drops the entry.
    td = TensorDict({"l": ["p", "q", "r"]}, [3])
    assert td.gather(0, torch.tensor([2, 0]))["l"] == ["r", "p"]
    assert td.flip(0)["l"] == ["r", "q", "p"]
    assert td.roll(1, 0)["l"] == ["r", "p", "q"]


def test_what_an_expanded_stack_shows_twice_is_written_once() -> None:
    td = TensorDict({"l": ["a", "b"]}, [2]).expand(3, 2)
    td[0, 0] = {"l": "z"}
    assert td["l"] == [["z", "b"], ["a", "b"], ["a", "b"]]
    with pytest.raises(RuntimeError, match="clone"):
        NonTensorStack("a", "b").expand(3, 2)[0, 0] = "z"  # type: ignore[index]


@pytest.mark.parametrize(
    "make",
    [
        lambda td: td + 1,
        lambda td: td.clone(),
        lambda td: td.to_tensordict(),
        lambda td: td.apply(lambda x: x + 1),
        lambda td: torch.zeros_like(td),
        lambda td: td[[0, 1, 2]],
        lambda td: torch.stack([td, td])[0],
        lambda td: td.to(torch.float64),
    ],
)
def test_what_has_leaves_of_its_own_has_rows_of_its_own(make: Any) -> None:
    td = TensorDict({"a": t(3), "l": ["p", "q", "r"]}, [3])
    made = make(td)
    made[0] = {"l": "there"}
    td[1] = {"l": "here"}
    assert (td["l"], made["l"]) == (["p", "here", "r"], ["there", "q", "r"])


def test_a_write_that_does_not_fit_changes_nothing() -> None:
    td = TensorDict({"a": torch.zeros(3), "l": ["p", "q", "r"]}, [3])
    with pytest.raises((BatchSizeError, RuntimeError)):
        td[:2] = {"l": ["1", "2", "3"]}
    with pytest.raises((BatchSizeError, RuntimeError)):
        NonTensorStack("a", "b")[:] = NonTensorStack("1", "2", "3")
    assert td["l"] == ["p", "q", "r"]


def test_values_that_are_lists_of_a_stack_are_plain_lists_elsewhere() -> None:
    td = TensorDict({"l": ["p", "q", "r"]}, [3])
    td.set_non_tensor("whole", td["l"])
    td["l"][0:2] = ["1", "2"]
    assert td["l"] == ["1", "2", "r"]
    assert type(td["whole"]) is list
    assert td["whole"] == ["p", "q", "r"]


# -- tensors without rows --------------------------------------------------------------------------
def unbatched() -> TensorDict:
    return TensorDict({"a": torch.zeros(2, 3), "u": UnbatchedTensor(torch.arange(5.0))}, [2])


def test_an_unbatched_tensor_stays_as_it_is() -> None:
    td, want = unbatched(), torch.arange(5.0)
    made = (td[0], td[:1], td[[1, 0]], td.expand(4, 2), td.view(2, 1), td.unbind(0)[0], td.split(1)[1])
    for got in (*made, torch.stack([td, td]), torch.cat([td, td]), td.gather(0, torch.tensor([0])), td.sum(0)):
        assert torch.equal(got["u"].data, want)
        assert got.get("u").batch_size == got.batch_size
    assert td["u"].shape == (5,)
    assert not tdstore.is_non_tensor(MetaData("x").data)


def test_an_unbatched_tensor_takes_part_in_maths() -> None:
    td = unbatched()
    assert torch.equal((td + 1)["u"].data, torch.arange(5.0) + 1)
    assert torch.equal((td * td)["u"].data, torch.arange(5.0) ** 2)
    assert torch.equal(torch.add(td["u"], 1).data, torch.arange(5.0) + 1)
    assert torch.equal((1 - td["u"]).data, 1 - torch.arange(5.0))
    assert td.to(torch.float64)["u"].dtype is torch.float64
    td.zero_()
    assert not td["u"].data.any()
    copy = td.clone()
    td.add_(1)
    assert not copy["u"].data.any()


def test_unbatched_tensors_are_not_mixed_up() -> None:
    # The peer keeps the first without a word.
    td = unbatched()
    with pytest.raises(MismatchError):
        torch.stack([td, td + 1])
    with pytest.raises(UnsupportedError, match=r"td\.set"):
        td[0] = {"u": UnbatchedTensor(torch.zeros(5))}


@pytest.mark.parametrize("name", ["d", "d.h5"])
def test_unbatched_tensors_and_metadata_are_stored(tmp_path: Any, name: str) -> None:
    # The peer refuses to map them, and reads them from HDF5 as entries with rows, from pickles as their first rows.
    td = unbatched().set("m", MetaData({"k": (1, 2)}))
    td.save(tmp_path / name).close()
    with tdstore.open(tmp_path / name, mode="r+") as saved:
        assert torch.equal(saved["u"].data, torch.arange(5.0))
        assert saved[0].get("u").batch_size == ()
        assert look(saved[0].get("m")) == ("MetaData", [], {"k": (1, 2)})
        saved["u"] = UnbatchedTensor(torch.ones(2, 2))
        saved[1:].save(tmp_path / f"w-{name}").close()
        saved.rename_key_("u", "v")
    with tdstore.open(tmp_path / name) as saved:
        assert torch.equal(saved["v"].data, torch.ones(2, 2))
        assert set(saved.keys()) == {"a", "v", "m"}
    with tdstore.open(tmp_path / f"w-{name}") as saved:
        assert torch.equal(saved["u"].data, torch.ones(2, 2))
