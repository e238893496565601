"""Ragged data, the same calls on both packages: lazy stacks of uneven elements, padded, nested, made dense, as lists.

Results are compared as plain data, exceptions by whether there is one. `OURS` lists where ours differs, and why.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import tensordict
import torch

import tdstore

from .programs import check, programs

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")


def package(of: Any) -> Any:
    names = "TensorDict LazyStackedTensorDict lazy_stack NonTensorStack NonTensorData pad pad_sequence"
    made = SimpleNamespace(**{name: getattr(of, name) for name in names.split()})
    made.td = lambda data, batch=(): made.TensorDict(data, list(batch))
    return made


OUR, PEER = package(tdstore), package(tensordict)


def plain(value: Any) -> Any:
    """Nested lists, dicts and tuples that compare equal where the data is the same."""
    if isinstance(value, torch.Tensor) and value.is_nested:
        return "nested", str(value.layout), str(value.dtype), [part.tolist() for part in value.unbind(0)]
    if isinstance(value, torch.Tensor):
        return "tensor", list(value.shape), str(value.dtype), value.tolist()
    if isinstance(value, torch.Size):
        return list(value)
    if type(value).__name__ in ("NonTensorData", "NonTensorStack"):
        return plain(value.tolist())
    if hasattr(value, "batch_size"):
        entries = {}
        for key in sorted(value.keys()):
            try:
                entries[key] = plain(value.get(key))
            except (RuntimeError, ValueError, IndexError):
                entries[key] = "refused"
        return type(value).__name__, list(value.batch_size), entries
    if isinstance(value, dict):
        return {key: plain(part) for key, part in value.items()}
    return [plain(part) for part in value] if isinstance(value, (list, tuple)) else value


def outcome(run: Callable[[], Any]) -> Any:
    try:
        return plain(run())
    except (RuntimeError, ValueError, TypeError, IndexError, KeyError, NotImplementedError, AttributeError):
        return "refused"


def rows(n: int, *more: int) -> torch.Tensor:
    return torch.arange(float(torch.Size((n, *more)).numel())).reshape(n, *more)


STACKS: dict[str, Callable[[Any], list[Any]]] = {
    "one key": lambda M: [M.td({"x": rows(2), "y": torch.ones(3)}), M.td({"x": rows(4), "y": torch.zeros(3)})],
    "two dimensions": lambda M: [M.td({"x": rows(2, 3)}), M.td({"x": rows(4, 2)})],
    "ranks": lambda M: [M.td({"x": rows(2)}), M.td({"x": rows(2, 2)})],
    "keys": lambda M: [M.td({"x": rows(2), "y": torch.ones(3)}), M.td({"x": rows(2), "z": torch.ones(3)})],
    "batch": lambda M: [M.td({"x": rows(2), "y": rows(2, 2)}, [2]), M.td({"x": rows(3), "y": rows(3, 4)}, [3])],
    "nested": lambda M: [M.td({"s": M.td({"x": rows(2)})}), M.td({"s": M.td({"x": rows(3)})})],
    "nested batch": lambda M: [M.td({"s": M.td({"x": rows(n)}, [n])}) for n in (2, 3)],
    "even": lambda M: [M.td({"x": rows(3)}, [3]), M.td({"x": rows(3)}, [3])],
    "dtypes": lambda M: [M.td({"x": rows(2)}), M.td({"x": torch.arange(3)})],
    "stacks": lambda M: [M.lazy_stack([M.td({"x": rows(a)}), M.td({"x": rows(b)})]) for a, b in ((2, 3), (4, 1))],
    "stacks of batches": lambda M: [
        M.lazy_stack([M.td({"x": rows(a)}, [a]), M.td({"x": rows(b)}, [b])]) for a, b in ((2, 3), (4, 1))
    ],
    "stacks of 2 and 3": lambda M: [M.lazy_stack([M.td({"x": rows(n)}) for n in size]) for size in ((2, 3), (4, 1, 5))],
    "lists": lambda M: [M.td({"x": ["a"], "y": "p"}), M.td({"x": ["b", "c"], "y": "q"})],
    "lists of lists": lambda M: [M.td({"x": [["a"], ["b"]]}), M.td({"x": [["c", "d", "e"]]})],
    "values per row": lambda M: [M.td({"x": M.NonTensorStack(*text)}, [len(text)]) for text in ("ab", "cde")],
    "one value and more": lambda M: [
        M.td({"x": M.NonTensorData("a", [2])}, [2]),
        M.td({"x": M.NonTensorStack("b", "c", "d")}, [3]),
    ],
}
CALLS = """
td.batch_size; td.get_item_shape(KEY); td.get(KEY); td[KEY]; td.get(KEY, as_list=True)
td.get(KEY, as_padded_tensor=True); td.get(KEY, as_padded_tensor=True, padding_side="left", padding_value=-1)
td.get(KEY, as_nested_tensor=True); td.get(KEY, as_nested_tensor=True, layout=torch.strided)
td.get_nestedtensor(KEY); td.get_nestedtensor(KEY, layout=torch.jagged)
td.densify(); td.densify(layout=torch.strided); td.densify(layout=torch.jagged); M.td({"l": td}).densify()
td.densify().to_padded_tensor(padding=-1); td.to_padded_tensor(); td.to_padded_tensor(padding=-1, mask_key="m")
td.to_dict(); td.tolist(); list(td); td[1]; td[:, 0]; td[1, 0]; td[0:1]; td[[1, 0]]
M.LazyStackedTensorDict.maybe_dense_stack(tds, dim); M.TensorDict.maybe_dense_stack(tds, dim)
M.LazyStackedTensorDict.lazy_stack(tds, dim); torch.stack(tds, dim); td.clone(); td.contiguous()
td.apply(lambda x: x + 1); td + 1; td == td; sorted(map(str, td.keys(True, True))); td.unbind(dim); td.split(1, dim)
torch.cat([td, td]); torch.stack([td, td]); len(td)
M.pad_sequence(tds, padding_value=-1); M.pad_sequence(tds, return_mask=True); M.pad_sequence(tds, pad_dim=1)
"""
CALLS = [call.strip() for call in CALLS.replace("\n", ";").split(";") if call.strip()]

# (stack, call): why ours is another. Patterns.
OURS: dict[tuple[str, str], str] = {
    (".*", r"td.to_padded_tensor\(\)"): "pads; the peer gives the lazy stack back, or fails",
    (".* 1", r"td.get\(KEY, as_padded.*"): "has the stack dimension where the batch size says; the peer has it first",
    ("values per row 0|one value and more 0", r".*densify\(.*"): "no batch size beyond what each entry has",
    (
        "values per row 0|one value and more 0",
        r"td.contiguous\(\)",
    ): "a TensorDict that is ragged, without tensors",
    ("lists.*|values.*|one value.*", r"td == td|td.get\(KEY, as_(padded|nested).*|td.get_nested.*"): "of no tensors",
    ("one value and more 0", r"td.get\(KEY, as_list=True\)"): "what stands for all rows of an element is one value",
    ("lists of lists 0", r"td.get_item_shape\(KEY\)"): "a list in a batch of none has one dimension, of lists",
    ("lists.*|values.*|one value.*", r".*return_mask=True\)"): "there are masks, if of nothing",
}


def build(M: Any, name: str, dim: int) -> tuple[Any, list[Any]]:
    return M.LazyStackedTensorDict(*STACKS[name](M), stack_dim=dim), STACKS[name](M)


def cases() -> list[Any]:
    found = []
    for name, make in STACKS.items():
        for dim in (0, 1):
            values = name.startswith(("lists", "values", "one value"))
            if dim <= len(make(OUR)[0].batch_size) and not (values and dim):  # there the peer refuses everything
                found.append(pytest.param(name, dim, id=f"{name} {dim}"))
    return found


@pytest.mark.parametrize(("name", "dim"), cases())
def test_as_the_peer(name: str, dim: int) -> None:
    key = ("s", "x") if name.startswith("nested") else "x"
    odd = []
    for call in CALLS:
        results = []
        for M in (PEER, OUR):
            td, tds = build(M, name, dim)
            names = {"td": td, "tds": tds, "M": M, "torch": torch, "KEY": key, "dim": dim}
            results.append(outcome(lambda call=call, names=names: eval(call, names)))
        theirs, mine = results
        excused = any(re.fullmatch(a, f"{name} {dim}") and re.fullmatch(b, call) for a, b in OURS)
        if theirs != mine and theirs != "refused" and not excused:
            odd.append(f"{call}\n  peer {theirs}\n  ours {mine}")
    assert not odd, "\n".join(odd)


@pytest.mark.parametrize("pads", [[1, 2], [0, 1], [1, 0], [0, 0]])
@pytest.mark.parametrize("inner", [False, True])
def test_values_are_padded_with_none(pads: list[int], inner: bool) -> None:
    """A value for the whole batch stays one, here; the peer makes rows of it."""

    def run(M: Any) -> Any:
        td = M.td({"x": rows(3), "s": M.NonTensorStack("a", "b", "c")}, [3])
        td = M.td({"in": td}, [3]) if inner else td
        return M.pad(td, pads, value=-1)

    assert plain(run(OUR)) == plain(run(PEER))


def test_values_of_two_dimensions_and_many_are_padded(tmp_path: Any) -> None:
    def run(M: Any) -> Any:
        stack = M.NonTensorStack(M.NonTensorStack("a", "b"), M.NonTensorStack("c", "d"))
        return M.pad(M.td({"x": rows(2, 2), "s": stack}, [2, 2]), [0, 1, 1, 0])

    assert plain(run(OUR)) == plain(run(PEER))
    text = [f"row {i}" for i in range(300)]
    for where in ("many", "many.h5"):  # where they lie in leaves of their own
        td = tdstore.TensorDict({"s": text}, [300]).save(tmp_path / where)
        assert td.pad([1, 1])["s"] == [None, *text, None]
        td.close()


def test_uneven_values_are_stored(tmp_path: Any) -> None:
    for name in ("lists", "lists of lists", "values per row", "one value and more"):
        td, _ = build(OUR, name, 0)
        for where in ("x", "x.h5"):
            saved = td.save(tmp_path / where)
            assert saved["x"] == td["x"] and saved.get_item_shape("x") == td.get_item_shape("x")
            saved.close()
    dense = build(OUR, "lists of lists", 0)[0].to_tensordict().save(tmp_path / "dense.h5")
    assert dense["x"] == [[["a"], ["b"]], [["c", "d", "e"]]] and dense[1]["x"] == [["c", "d", "e"]]
    dense.close()
    mixed = tdstore.lazy_stack([tdstore.TensorDict({"x": "a"}), tdstore.TensorDict({"x": ["b", "c"]})])
    assert mixed["x"] == mixed.to_dict()["x"] == ["a", ["b", "c"]]  # the peer fails


def test_nested_stacks_are_dense_where_they_can_be() -> None:
    tds = [tdstore.TensorDict({"y": rows(2), "s": {"x": rows(n)}, "z": "v"}) for n in (2, 3)]
    made = tdstore.TensorDict.maybe_dense_stack(tds)
    assert type(made) is tdstore.TensorDict and list(made.keys()) == ["y", "s", "z"]
    assert made["y"].shape == (2, 2) and isinstance(made["s"], tdstore.LazyStackedTensorDict)
    other = tdstore.TensorDict.maybe_dense_stack([tds[0], tds[1].exclude("z")])
    assert isinstance(other, tdstore.LazyStackedTensorDict)


def test_a_ragged_stack_along_another_dimension_is_not_made_dense() -> None:
    td, _ = build(OUR, "batch", 1)
    with pytest.raises(tdstore.errors.UnsupportedError, match="first dimension"):
        td.densify()
    assert tdstore.LazyStackedTensorDict(*td.tensordicts).densify().batch_size == (2, -1)


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
def test_nested_tensors_in_memory(layout: torch.layout) -> None:
    def make(M: Any) -> Any:
        return M.td({"n": torch.nested.nested_tensor([rows(2), rows(3)], layout=layout), "x": rows(2)}, [2])

    for call in (
        lambda M: make(M).apply(lambda x: x * 2),
        lambda M: make(M).clone().apply_(lambda x: x * 3),
        lambda M: list(make(M)),
        lambda M: make(M).to_dict(),
        lambda M: make(M).to(torch.float64),
        lambda M: make(M).to_padded_tensor(-1),
    ):
        assert plain(call(OUR)) == plain(call(PEER))
    td = make(OUR)
    changed = td.apply(lambda x: x + 1)
    assert plain(td.update_(changed)) == plain(changed) and plain(td.set_("n", changed["n"])) == plain(changed)
    with pytest.raises(RuntimeError):
        td.set_("n", torch.nested.nested_tensor([rows(2), rows(4)], layout=layout))
    before = [row.tolist() for row in td["n"].unbind()]
    td.append(td[0])
    assert [row.tolist() for row in td["n"].unbind()] == [*before, before[0]]


@programs("""
stack(1).get_nestedtensor("x")
---
stack(-1).get_nestedtensor("x")
---
stack(1).get_nestedtensor("x", layout=torch.jagged)
---
stack(1).get_nestedtensor("y", 3)
---
stack(0).get_nestedtensor("x").is_nested, stack(0).get_nestedtensor("x", layout=torch.jagged).is_nested
---
stack(0).get_nestedtensor("y")
---
stack(0).get_nestedtensor("y", None), stack(0).get_nestedtensor("y", 3)
---
stack(1).get("x", as_nested_tensor=True).is_nested
---
stack(1)["n"].get_nestedtensor("z")
---
stack(1).get_nestedtensor(("n", "z"))
---
stack(0).get_nestedtensor(("n", "z")).is_nested
""")
def test_a_nested_tensor_is_stacked_along_the_first_dimension(source: str) -> None:
    elements = 'TensorDict({"x": torch.zeros(2, n), "n": {"z": torch.zeros(2, n)}}, [2]) for n in (1, 2)'
    check(f"stack = lambda dim: lazy_stack([{elements}], dim)\n{source}")
