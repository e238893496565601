"""Shared memory of parameters, writes into leaves of autograd, devices of `apply`, and values in `torch.vmap`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

import tdstore
from tdstore import NonTensorStack, TensorDict
from tdstore.errors import GradientError, UnsupportedError

from .programs import check, check_error, programs


@programs("""
m = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
w, td = m[0].weight, TensorDict.from_module(m)
shared = td.share_memory_()
[shared is td, td["0", "weight"] is w, m[0].weight is w, w.is_shared(), m[1].running_mean.is_shared(), w.requires_grad]
---
td = TensorDict.from_module(torch.nn.Linear(2, 2)).share_memory_()
[td.is_shared(), td.is_locked, [x.is_shared() for x in (td[...], td.clone(), td.data, td.detach())]]
---
m = torch.nn.Linear(2, 2)
td = TensorDict.from_module(m).share_memory_()
td.data.zero_()
m(torch.ones(1, 2)).sum().backward()
[m.weight.tolist(), td["weight"].grad.tolist(), td["weight"].is_shared()]
---
td = TensorDict(a=torch.ones(3, requires_grad=True), n=TensorDict(b=torch.zeros(3)), s="x")
td.share_memory_()
[td["a"].requires_grad, td["n", "b"].is_shared(), td["n"].is_shared(), td["n"].is_locked, td["s"], td["a"].is_leaf]
---
td = TensorDict(a=torch.ones(3, 2, requires_grad=True), batch_size=[3]).share_memory_()
[td[0].is_shared(), td[:2].is_locked, td.view(-1).is_shared(), td.select("a").is_shared()]
---
td = TensorDict(a=torch.ones(2, requires_grad=True)).share_memory_()
td.unlock_()["z"] = torch.zeros(2)
[td.is_shared(), td["a"].is_shared(), td["z"].is_shared()]
---
td = TensorDict(a=torch.ones(3), b=torch.arange(3), n={"c": torch.ones(2, dtype=torch.bool)}).share_memory_()
torch.save(td.state_dict(), f"{tmp}/state.pt")
td.clone().zero_().load_state_dict(torch.load(f"{tmp}/state.pt", weights_only=False))
---
m = torch.nn.Linear(2, 2)
td = TensorDict.from_module(m).share_memory_()
state = td.state_dict()
td.data.zero_()
state["weight"].tolist()
""")
def test_share_memory(source: str) -> None:
    check(source)


def test_tied_parameters_stay_tied_when_shared() -> None:
    net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    net[1].weight = net[0].weight
    td = TensorDict.from_module(net).share_memory_()
    td.data["0", "weight"].fill_(3.0)
    assert td["1", "weight"] is td["0", "weight"] is net[1].weight
    assert net[1].weight.tolist() == [[3.0, 3.0], [3.0, 3.0]]


IN_PLACE = [
    'td.set_("a", torch.ones(3))',
    'td.set("a", torch.ones(3), inplace=True)',
    'td.set("a", torch.ones(3, dtype=torch.float64), inplace=True)',
    'td.update({"a": torch.ones(3)}, inplace=True)',
    'td.update_({"a": torch.ones(3)})',
    "td.update_(td.clone())",
    'td.set_(("n", "c"), torch.ones(3))',
    "td.apply(lambda x: x + 1, inplace=True)",
    "td.apply_(lambda x: x * 0)",
    "td.named_apply(lambda name, x: x + 1, inplace=True)",
    "td.copy_(td.clone())",
    'td.set_at_("a", 0, 0)',
    "td.zero_()",
]
LEAVES = """
td = TensorDict(a=torch.ones(3), n={"c": torch.zeros(3)}, batch_size=[3]).requires_grad_()
td["b"] = torch.zeros(3)
"""


@pytest.mark.parametrize("call", IN_PLACE)
def test_leaves_of_autograd_are_not_written(call: str) -> None:
    check_error(LEAVES + call)


def test_one_error_for_leaves_of_autograd() -> None:
    td = TensorDict(a=torch.ones(3, requires_grad=True), batch_size=[3])
    with pytest.raises(GradientError, match="requires grad"):
        td.set_("a", torch.zeros(3))
    with torch.no_grad():
        assert td.set_("a", torch.zeros(3))["a"].sum() == 0


@pytest.mark.parametrize("call", ['td.set_("a", td["a"]) is td', "td.apply_(lambda x: x) is td"])
def test_a_tensor_is_not_written_over_itself(call: str) -> None:
    check(LEAVES + call)


@programs("""
td = TensorDict(a=torch.zeros(3, 2), n={"b": torch.ones(3)}, batch_size=[3], device="cpu")
made = td.apply(lambda x: x.to("meta"), device="meta")
[made.device, made["n"].device, made["a"].device, made["n", "b"].shape, made.batch_size]
---
td = TensorDict(a=torch.zeros(3), n={"b": torch.ones(3)}, device="cpu")
td.named_apply(lambda k, x: x.to("meta"), device="meta")["n"].device
---
TensorDict(a=torch.zeros(3), n={"b": torch.ones(3)}, device="cpu").apply(lambda x: x + 1, device=None)
---
TensorDict(a=torch.zeros(3), n={"b": torch.ones(3)}).apply(lambda x: x + 1, device="cpu")
---
td = TensorDict(a=torch.zeros(3), device="cpu").memmap()
td.apply(lambda x: x.to("meta"), device=torch.device("meta"))["a"].device.type
---
td = TensorDict(a=torch.ones(3, 2), s="x", n={"k": "y"}, batch_size=[3, 2])
td.apply(lambda x: x.sum(-1), batch_size=[3]).get("s").batch_size
---
td = TensorDict(a=torch.ones(3), n=TensorDict(k="y", batch_size=[3]), batch_size=[3])
td.apply(torch.sum, batch_size=[]).get(("n", "k"))
---
td = TensorDict({"a": torch.ones(3), "n": {"c": torch.ones(3)}}, [3]).lock_()
new = td.unflatten_keys(".")
new["n", "q"] = torch.zeros(3)
[new["n"].is_locked, td["n"].is_locked, sorted(td["n"].keys()), new["n", "c"].data_ptr() == td["n", "c"].data_ptr()]
---
td = TensorDict({"a": torch.ones(3), "n": {"c": torch.ones(3)}}, [3]).lock_()
new = merge_tensordicts(td, TensorDict(q=torch.zeros(3), batch_size=[3]))
new["n", "q"] = torch.zeros(3)
[new["n"].is_locked, td["n"].is_locked, sorted(td["n"].keys())]
""")
def test_apply_and_locks(source: str) -> None:
    check(source)


ROWS = """
td = TensorDict(a=torch.arange(6.0).view(3, 2), batch_size=[3])
td["s"] = ["u", "v", "w"]
"""


@pytest.mark.parametrize(
    "call",
    [
        'torch.vmap(lambda x: x["a"] * 2)(td)',
        'torch.vmap(lambda x: x.select("a"))(td)',
        'torch.vmap(lambda x, y: x["a"] + y["a"], (0, None))(td, td[0])',
        'torch.vmap(lambda x: TensorDict(z=x["a"].sum()))(td)',
        'seen = []\ntorch.vmap(lambda x: seen.append(x["s"]) or x["a"])(td)\nlist(seen[0])',
        'torch.vmap(lambda x: x["a"].sum(), chunk_size=2)(td)',
    ],
)
def test_vmap_beside_values_per_row(call: str) -> None:
    check(ROWS + call)


def test_values_per_row_come_back_from_vmap() -> None:
    """The other package gives them back without their values."""
    td = TensorDict(a=torch.arange(12.0).view(4, 3), batch_size=[4, 3])
    names = [[f"{i}{j}" for j in range(3)] for i in range(4)]
    td["s"] = NonTensorStack.from_list(names, 2)
    assert torch.vmap(lambda x: x.set("z", x["a"] * 2))(td)["s"] == names
    assert torch.vmap(lambda x: x.clone())(td)["s"] == names
    assert torch.vmap(torch.vmap(lambda x: x.set("z", x["a"])))(td)["s"] == names
    turned = torch.vmap(lambda x: x, in_dims=1)(td)
    assert turned.batch_size == torch.Size([3, 4])
    assert turned["s"] == [list(column) for column in zip(*names, strict=True)]
    with pytest.raises(UnsupportedError, match="differ from row to row"):
        torch.vmap(lambda x: x.unsqueeze(0))(td)


@programs("""
(TensorDict(a=torch.ones(3)).memmap(tmp).saved_path / "a.memmap").exists()
---
[p.name for p in [TensorDict(n={"a": torch.ones(3)}).memmap(tmp)["n"].saved_path]]
---
sorted(p.name for p in TensorDict(n={"a": torch.ones(3)}).memmap(tmp).saved_path.glob("n/*.memmap"))
---
TensorDict(a=torch.ones(3)).memmap(tmp).saved_path.joinpath("a.memmap").is_file()
---
td = TensorDict(a=torch.ones(3)).memmap(f"{tmp}/x/y")
[td.saved_path.parent.name, td.saved_path.stem, td.saved_path.is_dir(), str(td.saved_path) == f"{tmp}/x/y"]
---
load_memmap(TensorDict(a=torch.ones(3)).memmap(tmp).saved_path)["a"].tolist()
""")
def test_saved_path_is_a_path(source: str) -> None:
    check(source)


def test_saved_path_is_text_too(tmp_path: Path) -> None:
    path = TensorDict(a=torch.ones(3)).memmap(tmp_path / "x").saved_path
    assert path is not None and path == str(tmp_path / "x") and os.path.join(path, "y") == str(tmp_path / "x" / "y")
    assert tmp_path / path == Path(path) == path.absolute() and path.startswith(str(tmp_path))
    assert tdstore.load(path)["a"].sum() == 3
