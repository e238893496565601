"""Rows of a lazy stack written with other rows of it, and what nested classes and values lose in joint operations."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch

from tdstore import TensorDict, lazy_stack

from .oracle import OURS, differences
from .programs import check, check_error, programs, result

START = """
class Inner(TensorClass):
    u: torch.Tensor
    w: torch.Tensor = None
class Outer(TensorClass):
    a: torch.Tensor
    n: Inner
def shown(x):
    return [type(x).__name__, {str(k): shown(v) if is_tensor_collection(v) else v for k, v in sorted(x.items())}]
def outer(n):
    return Outer(a=torch.arange(2.0 * n).view(n, 2), n=Inner(u=torch.arange(float(n)), batch_size=[n]), batch_size=[n])
"""

LAZY = """lazy_stack(
    [TensorDict({"a": torch.full((3,), i), "n": {"b": torch.full((3, 2), 5.0 * i)}}, [3]) for i in range(4)]
)"""
STACKS = {
    "lazy": f"td = {LAZY}",
    "dense": f"td = {LAZY}.contiguous()",
    "inner": f"td = TensorDict({{'l': {LAZY}, 'c': torch.arange(4)}}, [4])",
    "views": f"td = lazy_stack(list({LAZY}.contiguous()))",
    "wide": f"td = lazy_stack(list({LAZY}), 1)",
}
OVERLAPS = ("td[[3, 2, 1, 0]] = td[:]", "td[1:3] = td[:2]", "td[:2] = td[1:3]")  # within one tensor torch refuses it
WRITES = (
    "td[[0, 1]] = td[[1, 0]]",
    "td[[2, 0, 1]] = td[[0, 1, 2]]",
    "td[...] = td[torch.arange(len(td) - 1, -1, -1)]",
)


@pytest.mark.parametrize(("stack", "write"), [*product(STACKS, WRITES), *product(("lazy", "views"), OVERLAPS)])
def test_rows_are_exchanged_as_they_were_before(stack: str, write: str) -> None:
    """The peer, too, reads what it has written, at slices that overlap: the rows of a copy are what is meant."""
    target, source = write.split(" = ")
    copied = source.replace("td", "old")
    at = f"np.s_{target[2:]}"
    for text in (f"{target} = {source}", *([f"td.update_at_({source}, {at})"] if stack != "dense" else [])):
        ours, meant = (
            result(f"{STACKS[stack]}\nold = td.clone()\n{line}\ntd.to_tensordict()", OURS)
            for line in (text, text.replace(source, copied))
        )
        assert not list(differences(meant, ours)), text


def test_a_stack_is_updated_with_its_own_elements_in_another_order() -> None:
    moved = lazy_rows()
    moved.update(moved[[1, 0, 3, 2]])
    assert moved["a"][:, 0].tolist() == [1, 0, 3, 2]
    moved = lazy_rows()
    moved.update_(moved[[1, 2, 3, 0]])
    assert moved["a"][:, 0].tolist() == [1, 2, 3, 0]


@programs("""
a, b = NonTensorStack("a", "b"), NonTensorStack("c", "d", "e")
[x.tolist() for x in (torch.stack([a, b]), lazy_stack([a, b]), NonTensorStack(a, b), torch.cat([a, b]))]
---
torch.stack([NonTensorStack("a", "b"), NonTensorStack("c")]).tolist()
---
lazy_stack([NonTensorStack("a", "b"), NonTensorStack("c", "d")])
---
td = lazy_stack([TensorDict({"s": NonTensorStack(*text)}, [len(text)]) for text in ("ab", "cde")])
[td["s"], td[1]["s"], td.get("s").tolist()]
---
td = lazy_stack([TensorDict({"a": torch.zeros(3)}, [3]) for _ in range(2)])
td["z"] = ["x", "y"]
[td[0]["z"], td[1]["z"]]
---
td = lazy_stack([TensorDict({"a": torch.zeros(3)}, [3]) for _ in range(2)], 1)
len(td)
---
td = lazy_stack([TensorDict({"a": torch.zeros(3)}, [3]) for _ in range(2)])
M.attempt(lambda: td.set("z", ["x", "y", "z"]))
---
td = lazy_stack([TensorDict({"b": torch.zeros(3), "s": str(i)}, [3]) for i in range(2)])
torch.vmap(lambda x: x.set("zz", x["b"] + 1))(td).get("s").tolist()
---
td = lazy_stack([TensorDict({"a": torch.zeros(3), name: torch.zeros(3)}, [3]) for name in "bq"])
td.update_at_(td[:1] + 5, slice(0, 1))
td.update_at_(td[1] + 6, 1)
[dict(part.items()) for part in td.tensordicts]
""")
def test_values_and_entries_of_single_elements(source: str) -> None:
    check(source)


@pytest.mark.parametrize(
    "line",
    [
        "outer(4).cummax(0, return_indices=False)",
        "outer(4).cummin(0, return_indices=False)",
        "TensorDict({'k': outer(4)}, [4]).cummax(0, return_indices=False)",
        "[x['k', 'n', 'u'] for x in TensorDict({'k': outer(4)}, [4]).cummin(0)]",
        "[x['l', 'n', 'u'] for x in TensorDict({'l': lazy_stack([outer(4)] * 2)}, [2]).cummax(0)]",
        "merge_tensordicts(outer(3), outer(3) * 2)",
        "merge_tensordicts(Inner(torch.ones(2), batch_size=[2]), Inner(torch.zeros(2), torch.ones(2), batch_size=[2]))",
        "merge_tensordicts(TensorDict({'k': outer(3)}, [3]), TensorDict({'k': outer(3) * 2}, [3]))",
        "merge_tensordicts(TensorDict({'u': torch.ones(3)}, [3]), outer(3).n)",
        "M.pad_sequence([TensorDict({'k': outer(n)}, [n]) for n in (2, 3)])",
        "TensorDict({'k': outer(3)}, [3]).densify()",
    ],
)
def test_nested_classes_stay_with_their_own_tensors(line: str) -> None:
    check(f"{START}shown({line})" if line[0] != "[" else START + line)


@programs("""
class Row(TensorClass["autocast"]):
    a: torch.Tensor
    i: int = 1
    s: str = "q"
row = Row(a=torch.zeros(4, 2), i=4, batch_size=[4])
[(row == row.to_dict()).all(), (row == {"a": torch.ones(4, 2), "i": 4, "s": "q"}).any()]
---
td = TensorDict({"n": {"i": NonTensorData(3)}}, [2])
[(td == {"n": {"i": 3}}).all(), (td != {"n": {"i": 3}}).any()]
""")
def test_numbers_that_are_values_equal_those_of_a_dict(source: str) -> None:
    check(source)


@pytest.mark.parametrize(
    "line",
    ["outer(3).rename_key_('nope', 'c')", "outer(3).rename_key_(('n', 'nope'), 'c')", "locked.rename_key_('a', 'c')"],
)
def test_a_name_that_is_no_field_is_not_what_is_wrong_first(line: str) -> None:
    check_error(f"{START}locked = outer(3).lock_()\n{line}")


def lazy_rows() -> Any:
    return lazy_stack([TensorDict({"a": torch.full((3,), i)}, [3]) for i in range(4)])
