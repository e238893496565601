"""Containers that hold leaves of a GPU: making and moving them, pinning, streams."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import torch

import tdstore
from tdstore import TensorClass, TensorDict, lazy_stack, tensorclass
from tests.conftest import assert_same

GPU = torch.device("cuda", 0)


def source(start: int = 0) -> TensorDict:
    a = torch.arange(start, start + 24.0).reshape(4, 3, 2)
    n = {"b": torch.arange(4) + start, "m": {"c": torch.arange(4) % 2 == 0}}
    return TensorDict({"a": a, "n": n, "s": "text", "rows": [f"r{i}" for i in range(4)]}, [4])


def devices(td: Any) -> set[torch.device]:
    return {leaf.device for leaf in td.values(True, True) if isinstance(leaf, torch.Tensor)}


def on_gpu(td: Any) -> bool:
    return bool(devices(td) == {GPU})


class Item(TensorClass):
    a: torch.Tensor
    s: str = "x"


@tensorclass
class Made:
    a: torch.Tensor
    inner: Any = None


def containers() -> dict[str, Any]:
    return {
        "plain": source(),
        "locked": source().lock_(),
        "lazy": lazy_stack([source(i) for i in range(3)], 1),
        "class": Item(a=torch.arange(4.0), batch_size=[4]),
        "nested class": Made(a=torch.arange(4.0), inner=source(), batch_size=[4]),
    }


KINDS = list(containers())
MOVES = {
    "to": lambda td: td.to("cuda"),
    "to device": lambda td: td.to(torch.device("cuda")),
    "to index": lambda td: td.to(torch.device("cuda", 0)),
    "not blocking": lambda td: td.to("cuda", non_blocking=True),
    "cuda": lambda td: td.cuda(),
    "cuda 0": lambda td: td.cuda(0),
    "pinned": lambda td: td.to("cuda", non_blocking_pin=True),
    "threads": lambda td: td.to("cuda", non_blocking_pin=True, num_threads=2),
}


@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize("kind", KINDS)
def test_there_and_back(kind: str, move: str) -> None:
    td = containers()[kind]
    moved = MOVES[move](td)
    torch.cuda.synchronize()
    assert type(moved) is type(td)
    assert on_gpu(moved)
    assert moved.device == GPU
    assert moved.is_cuda
    assert not moved.is_cpu
    assert moved.is_locked == td.is_locked
    back = moved.cpu()
    assert back.device == torch.device("cpu")
    assert back.is_cpu
    assert_same(inside(back), inside(td))
    assert devices(td) == {torch.device("cpu")}
    assert moved.to("cuda") is moved
    assert moved.cuda(0) is moved
    assert moved.cuda("cuda:0") is moved
    assert moved.cuda(GPU) is moved


def test_shared_memory_leaves_those_of_the_gpu() -> None:
    td = TensorDict({"a": torch.zeros(3, device="cuda"), "b": torch.zeros(3)}, [3])
    assert td.share_memory_() is td
    assert (td["a"].device, td["b"].device) == (GPU, torch.device("cpu"))
    assert td["b"].is_shared()
    assert td.is_locked


def inside(td: Any) -> Any:
    return td._tensordict if tdstore.is_tensorclass(td) else td


@pytest.mark.parametrize("kind", KINDS)
def test_copies_stay_there(kind: str) -> None:
    moved = containers()[kind].to("cuda")
    for made in (
        moved.clone(),
        copy.deepcopy(moved),
        moved.detach(),
        moved.clone(False),
        moved.contiguous(),
        moved + 0,
    ):
        assert on_gpu(made)
        assert made.device == GPU
    for made in (copy.deepcopy(moved), moved.clone()):
        assert_same(inside(made.cpu()), inside(moved.cpu()))
        made.zero_()
    assert_same(inside(moved.cpu()), inside(containers()[kind]))


def test_a_stack_of_uneven_parts() -> None:
    td = lazy_stack([TensorDict({"a": torch.arange(i + 1.0)}) for i in range(3)])
    moved = td.cuda()
    assert moved.device == GPU == moved.clone().device
    assert [t.tolist() for t in moved.get("a", as_list=True)] == [[0], [0, 1], [0, 1, 2]]
    assert {t.device for t in moved.get("a", as_list=True)} == {GPU}
    padded = moved.get("a", as_padded_tensor=True)
    assert (padded.device, padded.shape) == (GPU, (3, 3))
    assert moved.get("a", as_nested_tensor=True).device == GPU
    assert all(t.is_pinned() for t in td.pin_memory().get("a", as_list=True))
    assert_same(moved.cpu()[2], td.cpu()[2])


def test_made_with_a_device() -> None:
    td = TensorDict({"a": torch.zeros(3), "n": {"b": torch.ones(3)}}, [3], device="cuda")
    assert td.device == GPU == td["n"].device
    assert on_gpu(td)
    td["c"] = torch.zeros(3)
    td["n", "d"] = torch.zeros(3, device="cuda")
    td.set("e", [1, 2, 3])
    td.update({"f": torch.zeros(3), "m": {"g": torch.zeros(3)}})
    td["h"] = TensorDict({"x": torch.zeros(3)}, [3])
    td["i"] = np.zeros(3)
    td["s"] = "text"
    assert on_gpu(td)
    assert td["m"].device == td["h"].device == GPU
    assert td["s"] == "text"
    td.set_("a", torch.ones(3))
    assert td["a"].tolist() == [1, 1, 1]
    td.set_at_("a", torch.tensor(7.0), 1)
    assert td["a"].tolist() == [1, 7, 1]
    td.fill_("a", 2)
    assert td["a"].tolist() == [2, 2, 2]
    assert on_gpu(td)


def test_without_a_device_leaves_stay_where_they_are() -> None:
    td = TensorDict({"a": torch.zeros(3, device="cuda"), "b": torch.zeros(3)}, [3])
    assert td.device is None
    assert (td["a"].device, td["b"].device) == (GPU, torch.device("cpu"))
    assert td[1]["a"].device == GPU
    assert not td.is_cuda
    assert (td + 1)["b"].device.type == "cpu"
    cleared = td.to("cuda").clear_device_()
    assert cleared.device is None
    assert on_gpu(cleared)


def test_classes_are_made_there() -> None:
    item = Item(a=torch.zeros(4), batch_size=[4], device="cuda")
    assert item.a.device == item.device == GPU
    item.a = torch.ones(4)
    assert item.a.device == GPU
    assert item[1:].a.device == GPU
    assert torch.stack([item, item]).a.device == GPU


@pytest.mark.parametrize("make", ["zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like"])
def test_like_it(make: str) -> None:
    td = source().exclude("n", "rows").to("cuda")
    fill = (3.0,) if make == "full_like" else ()
    assert on_gpu(getattr(torch, make)(td, *fill))


@pytest.mark.parametrize("make", ["new_zeros", "new_ones", "new_empty", "new_full"])
def test_new_ones(make: str) -> None:
    td = source().exclude("n", "rows").to("cuda")
    fill = (3.0,) if make == "new_full" else ()
    made = getattr(td, make)((2,), *fill)
    assert on_gpu(made)


@pytest.mark.parametrize("kind", KINDS)
def test_pinned(kind: str) -> None:
    td = containers()[kind]
    for pinned in (td.pin_memory(), td.pin_memory(num_threads=0), td.pin_memory(num_threads=2)):
        parts = pinned.tensordicts if kind == "lazy" else [pinned]  # reading a stack makes new tensors
        leaves = [t for part in parts for t in part.values(True, True) if isinstance(t, torch.Tensor)]
        assert type(pinned) is type(td)
        assert leaves
        assert all(t.is_pinned() for t in leaves)
        moved = pinned.to("cuda", non_blocking=True)
        torch.cuda.synchronize()
        assert_same(inside(moved.cpu()), inside(td))
    assert not any(t.is_pinned() for t in td.values(True, True) if isinstance(t, torch.Tensor))


def test_pinned_in_place() -> None:
    td = source()
    assert td.pin_memory_() is td
    assert all(t.is_pinned() for t in td.values(True, True) if isinstance(t, torch.Tensor))
    assert_same(td, source())
    other = source()
    assert other.pin_memory(inplace=True) is other
    assert other["a"].is_pinned()


@pytest.mark.parametrize("kind", KINDS)
def test_used_by_another_stream(kind: str) -> None:
    want = containers()[kind]
    pinned, side = want.pin_memory(), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        moved = pinned.to("cuda", non_blocking=True)
    torch.cuda.current_stream().wait_stream(side)
    assert moved.record_stream(torch.cuda.current_stream()) is moved
    doubled = moved + moved
    torch.cuda.synchronize()
    assert_same(inside(doubled.cpu()), inside(want + want))


def test_casts_and_moves_at_once() -> None:
    td = TensorDict({"a": torch.arange(3), "b": torch.zeros(3)}, [3])
    made = td.to("cuda", torch.float64)
    assert on_gpu(made)
    assert {t.dtype for t in made.values()} == {torch.float64}
    assert made.to(torch.zeros(1)).device == torch.device("cpu")
    assert td.to(made).device == GPU
    assert td.to(other=torch.zeros(1, device="cuda"))["a"].device == GPU


def test_moved_in_place() -> None:
    td = source()
    assert td.to("cuda", inplace=True) is td
    assert td.device == td["n"].device == GPU
    assert on_gpu(td)


def test_values_pickled_and_printed() -> None:
    td = source().to("cuda")
    assert td["s"] == "text"
    assert td["rows"] == ["r0", "r1", "r2", "r3"]
    assert td[2]["rows"] == "r2"
    again = pickle.loads(pickle.dumps(td))
    assert again.device == GPU
    assert on_gpu(again)
    assert_same(again.cpu(), td.cpu())
    text = repr(td)
    assert "device=cuda:0" in text
    assert td._repr_html_()
    assert td.is_shared()
    assert td.numel() == source().numel()
    assert td.bytes() == source().bytes()


def test_copied_into_each_other() -> None:
    cpu = source().select("a", ("n", "b")).to("cpu")
    gpu = torch.zeros_like(cpu).to("cuda")
    gpu.copy_(cpu)
    assert_same(gpu.cpu(), cpu)
    gpu.mul_(2)
    back = torch.zeros_like(cpu)
    back.update_(gpu)
    assert back["n", "b"].tolist() == [0, 2, 4, 6]
    assert devices(back) == {torch.device("cpu")}
    back.update(gpu)
    joined = TensorDict({}, [4], device="cpu").update(gpu)
    assert devices(joined) == {torch.device("cpu")}


def test_arrays_and_lists() -> None:
    td = source().exclude("s", "rows").to("cuda")
    assert td.numpy()["a"].shape == td.cpu().numpy()["a"].shape == (4, 3, 2)
    assert td.to_dict()["n"]["b"].device == GPU


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
def test_nested_tensors_there(layout: Any) -> None:
    parts = [torch.arange(2.0), torch.arange(4.0), torch.arange(1.0)]
    td = TensorDict({"x": torch.nested.nested_tensor(parts, layout=layout)}, [3])
    moved = td.to("cuda")
    assert moved["x"].device == GPU
    assert [t.tolist() for t in moved["x"].unbind()] == [t.tolist() for t in parts]
    assert [t.tolist() for t in moved.cpu()["x"].unbind()] == [t.tolist() for t in parts]
    assert moved[1]["x"].tolist() == [0, 1, 2, 3]
    assert moved[1]["x"].device == GPU
    lazy = lazy_stack([TensorDict({"x": part}).to("cuda") for part in parts])
    made = lazy.densify(layout=layout) if layout is torch.jagged else lazy.get_nestedtensor("x", layout=layout)
    found = made["x"] if isinstance(made, tdstore.TensorDictBase) else made
    assert found.device == GPU
    assert [t.tolist() for t in found.unbind()] == [t.tolist() for t in parts]


def test_small_leaves_come_back_in_memory_of_their_own() -> None:
    leaves = {str(i): torch.randn(i, 3) for i in range(30)}  # one is empty
    td = TensorDict({**leaves, "flags": torch.tensor([True, False]), "n": torch.full((3,), 65535, dtype=torch.uint16)})
    back = td.to("cuda").cpu()
    for key, leaf in back.items():
        assert torch.equal(leaf.view(torch.uint8), td[key].view(torch.uint8)) if leaf.numel() else leaf.shape == (0, 3)
        assert not leaf.is_pinned()
        assert leaf.untyped_storage().nbytes() == leaf.nbytes
