"""Entries that are not tensors, where code goes over the entries of a TensorDict and calls the same on all of them."""

from __future__ import annotations

import pytest
import tensordict as peer
import torch

import tdstore
from tdstore import NonTensorData, TensorDict, UnbatchedTensor

from .oracle import OURS, PEER, differences, outcome

MASK = torch.tensor([True, False, True])
EXPRESSIONS = """
    x.cpu() | x.detach() | x.detach_() | x.float() | x.qint8() | x.type(torch.float64) | x.pin_memory() | x.zero_()
    | x.pin_memory_() | x.memmap_() | x.memmap() | x.requires_grad_() | x.zero_grad() | x.copy()
    | x.lock_().unlock_() | x.apply(lambda t: t + 1) | x.named_apply(lambda n, t: t) | x.apply_(lambda t: t)
    | list(x.keys()) | list(x.items(True, True)) | list(x.values()) | x.is_empty() | x.sorted_keys | x.names
    | x.size() | x.size(0) | x.size(-1) | x.ndimension() | x.bytes() | x.depth | x.dtype | x.is_cpu | x.is_cuda
    | x.is_memmap() | x.is_shared() | x.is_consolidated() | x.param_count() | x.requires_grad | x.is_locked
    | x.get("nope") | x.get("nope", 5) | x.to_tensordict() | x.to_pytree() | x.empty() | x.select() | x.exclude()
    | x.flatten_keys() | x.unflatten_keys() | x.filter_empty_() | x.filter_non_tensor_data() | x.to_padded_tensor()
    | x.auto_batch_size_() | x.clear_device_() | x.auto_device_() | x.densify() | x.consolidate()
    | x.chunk(2) | x.tensor_split(2) | x.repeat(2) | x.repeat_interleave(2) | x.swapaxes(0, 0) | x.swapdims(0, 0)
    | x.movedim(0, 0) | x.moveaxis(0, 0) | x.unflatten(0, (3, 1)) | x.expand_as(torch.zeros(2, 3)) | x.atleast_1d()
    | x.atleast_2d() | x.atleast_3d()
"""
# What gives a TensorDict without entries for a NonTensorStack of the peer.
OF_DATA = """
    x.tile(2) | x.flip(0) | x.roll(1) | x.narrow(0, 0, 2) | x.gather(0, torch.tensor([2, 0]))
    | x.masked_select(MASK) | x.is_contiguous() | x.get("data")
"""
CASES = [(kind, e.strip()) for kind in ("data", "stack") for e in EXPRESSIONS.split(" | ")]
CASES += [("data", e.strip()) for e in OF_DATA.split(" | ")]


def value(module, kind):
    return module.NonTensorData("hi", batch_size=[3]) if kind == "data" else module.NonTensorStack("a", "b", "c")


@pytest.mark.parametrize(("kind", "expression"), CASES)
def test_the_methods_of_containers(kind, expression):
    def run(side):
        return eval(expression, {"torch": torch, "MASK": MASK, "x": value(side.module, kind)})

    want, got = outcome(lambda: run(PEER), forgive=True), outcome(lambda: run(OURS))
    assert not list(differences(want, got))


def test_rows_of_a_stack_go_where_those_of_a_tensor_go():
    """The peer gives TensorDicts without entries."""
    x = tdstore.NonTensorStack.from_list([["a", "b", "c"], ["d", "e", "f"]])
    assert torch.flip(x, [0, 1]).tolist() == [["f", "e", "d"], ["c", "b", "a"]]
    assert x.roll(1, 1).tolist() == [["c", "a", "b"], ["f", "d", "e"]]
    assert x.tile(1, 2).tolist()[0] == ["a", "b", "c", "a", "b", "c"]
    assert x.gather(1, torch.tensor([[2], [0]])).tolist() == [["c"], ["d"]]
    assert x.masked_select(torch.tensor([[True, False, False], [False, False, True]])).tolist() == ["a", "f"]
    assert x.rot90().tolist() == [["c", "f"], ["b", "e"], ["a", "d"]]
    assert x.index_select(1, torch.tensor([1])).tolist() == [["b"], ["e"]]
    assert x.is_contiguous() and not x.is_floating_point() and x.numpy() == x.tolist()
    assert NonTensorData("hi", [2]).numpy() == "hi"  # the peer's is an empty dict
    assert x.share_memory_() is x  # the peer's starts a server process, which stays
    with pytest.raises(IndexError, match="[Dd]imension out of range"):
        x.flip(5)


@pytest.mark.parametrize("suffix", [None, "", ".h5", ".zarr"])
def test_a_loop_over_entries_needs_to_know_no_kinds(suffix, tmp_path):
    td = TensorDict({"x": torch.arange(3.0), "s": ["a", "b", "c"], "v": "all", "n": {"y": torch.ones(3)}}, [3])
    if suffix is not None:
        td.save(tmp_path / f"d{suffix}").close()
        td = tdstore.open(tmp_path / f"d{suffix}")
    seen = {key: entry.cpu().detach().clone().double() for key, entry in td.items()}
    assert seen["s"].tolist() == ["a", "b", "c"] and seen["v"].data == "all" and seen["x"].dtype == torch.float64
    assert [len(entry.chunk(3)) for entry in seen.values()] == [3] * 4
    assert {k: e.numpy() for k, e in td.items() if k in "sv"} == {"s": ["a", "b", "c"], "v": "all"}
    if suffix is not None:
        td.close()


def test_a_tensordict_is_not_updated_with_a_value():
    with pytest.raises(TypeError, match="update takes a TensorDict or a dict"):
        TensorDict({"x": 1}).update(NonTensorData("a"))


def test_an_unbatched_tensor_has_the_methods_of_a_tensor():
    made = []
    for module in (peer, tdstore):
        u = module.UnbatchedTensor(torch.tensor([[1.0, -2.0], [3.0, 4.0]]))
        methods = (u.abs(), u.sum(0), u.clamp(0, 2), u.mT, u.add(u), u.max(0)[0], u.cpu().double(), u.detach())
        assert all(isinstance(v, module.UnbatchedTensor) for v in methods)
        seen = [v.tolist() for v in methods]
        seen += [u.size(), u.numpy().tolist(), u.is_contiguous(), u.requires_grad, u.grad, u.element_size(), u.stride()]
        seen += [u.zero_().tolist(), u.tolist(), [part.tolist() for part in u.chunk(2)]]
        made.append(seen)
    assert made[0] == made[1] and type(made[1][8]) is torch.Size
    u = UnbatchedTensor(torch.ones(2))
    assert u.zero_() is u and u.data.tolist() == [0, 0]
    td = TensorDict({"x": torch.zeros(3), "u": u}, [3])
    assert {k: v.detach().cpu().numel() for k, v in td.items()}["x"] == 3
    with pytest.raises(AttributeError, match="'UnbatchedTensor' object has no attribute 'nope'"):
        u.nope  # noqa: B018
