"""Stacks of TensorDicts that have one text each, and other results that keep what they were made of."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import pytest
import torch

import tdstore
from tdstore import NonTensorData, TensorDict

from .programs import check, programs

PARTS = """
parts = [TensorDict({"s": name, "a": torch.ones(2), "n": {"t": name}}, [2]) for name in "xy"]
td = torch.stack(parts)
"""
FOUND = (
    'td["s"]',
    '[td[1]["s"], td[0]["n", "t"], td[:1]["s"], td[1][0]["s"], td[0, :]["s"]]',
    '[td[:, 0]["s"], td[..., 0]["s"], [part["s"] for part in td.unbind(0)], [part["s"] for part in td.unbind(1)]]',
    '[td[torch.tensor([1, 0])]["s"], td[[1, 1]]["s"], td.split(1)[0]["s"], td[torch.tensor([True, False])]["s"]]',
    '[td.permute(1, 0)["s"], td.permute(1, 0)[:, 0]["s"], td.reshape(-1)["s"], td.view(4)["s"], td.unsqueeze(0)["s"]]',
    '[td.clone()[1]["s"], td[1].clone()["s"], td[1].to_dict()["s"], td.clone(False)[1]["s"], td.lock_()[1]["s"]]',
    'copy.deepcopy(td)["s"], pickle.loads(pickle.dumps(td))["s"]',
    'td[0] = TensorDict({"s": "z", "a": torch.zeros(2), "n": {"t": "z"}}, [2]); td["s"]',
    'td[0, 1] = TensorDict({"s": "z", "a": torch.zeros(()), "n": {"t": "z"}}, []); [td["s"], td["n", "t"]]',
    'td.get("s")[0].data = "z"; td["s"]',
    'm = td.memmap(tmp + "/x"); [m["s"], TensorDict.load_memmap(tmp + "/x")["s"]]',
    'torch.stack([td, td])[0]["s"]',
    '[torch.stack(parts, 1)["s"], torch.stack(parts, 1)[:, 1]["s"], torch.stack(parts, 1)[0]["s"]]',
    'one = torch.stack([part[:1] for part in parts]); [one["s"], one[1]["s"], one[:1]["s"], one[:, 0]["s"]]',
    'wide = torch.stack([TensorDict({"s": name}, [2, 3]) for name in "xy"], 1); [wide[:, 1]["s"], wide[0]["s"]]',
)


@pytest.mark.parametrize("line", FOUND)
def test_parts_of_a_stack_have_one_text(line: str) -> None:
    check("import copy, pickle" + PARTS + line.replace("; ", "\n"))


def test_an_expanded_stack_has_a_list_at_each_of_its_rows() -> None:
    check('td = TensorDict({"s": ["a", "b"]}, [2]).expand(3, 2)\n[td["s"], td[:, 0]["s"], td[0]["s"]]')


def test_a_part_of_a_stack_of_values_is_written_in_place_and_by_position() -> None:
    stack = torch.stack([NonTensorData("x", [2]), NonTensorData("y", [2])])
    stack[0].data = "z"
    assert stack.tolist() == [["z", "z"], ["y", "y"]]
    stack[1, 0] = NonTensorData("w")
    assert stack.tolist() == [["z", "z"], ["w", "y"]]
    same = [copy.deepcopy(stack), pickle.loads(pickle.dumps(stack))]
    assert [other.tolist() for other in same] == [stack.tolist()] * 2


def test_a_stack_of_values_is_saved(tmp_path: Path) -> None:
    td = torch.stack([TensorDict({"s": name, "a": torch.ones(2)}, [2]) for name in "xy"])
    td.save(tmp_path / "x")
    assert tdstore.load(tmp_path / "x")["s"] == td["s"] == [["x", "x"], ["y", "y"]]


@programs("""
m = torch.nn.Linear(2, 2)
TensorDict.from_module(m).data.share_memory_()
[p.is_shared() for p in m.parameters()]
---
m = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
td = TensorDict.from_module(m).detach().share_memory_()
td.zero_()
[[p.is_shared() for p in m.parameters()], m[0].weight.tolist(), td.is_shared(), td.is_locked, td["0"].is_shared()]
---
td = TensorDict(a=torch.ones(3), n=TensorDict(b=torch.zeros(3)), device="cpu")
one = td.lock_().to(TensorDict(a=torch.ones(3)))
[one.device, one["n"].device, one.is_locked, td.device, td["n"].device]
---
# as since 0.15
td = TensorDict({"a": torch.ones(3)}, [3]).memmap_()
[td[True].is_memmap(), td[True].is_locked, td[:, None].is_locked]
---
td = TensorDict({"a": torch.ones(3)}, [3]).lock_()
[td[True].is_locked, td[None].is_locked, td[[0, 1]].is_locked]
---
p = TensorDictParams(TensorDict({"a": torch.ones(3), "b": torch.ones(3)}, [3]))
made = p.masked_fill(torch.tensor([True, False, True]), 2.0)
[type(made).__name__, made["a"].tolist(), p["a"].tolist(), type(made["a"]).__name__]
---
p = TensorDictParams(TensorDict({"a": torch.ones(3), "b": torch.ones(3)}, [3]))
[[type(part).__name__, sorted(part.keys())] for part in p.split_keys(["a"])]
""")
def test_what_results_are_made_of(source: str) -> None:
    check(source)
