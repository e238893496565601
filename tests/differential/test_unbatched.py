"""Tensors without rows, by themselves and as entries: both packages run the same expressions."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import tdstore
from tdstore import TensorDict, UnbatchedTensor, lazy_stack, pad
from tdstore.errors import BatchSizeError

from .oracle import OURS, PEER

ALONE = """
    u | str(u) | repr(u) | f"{u}" | u.batch_size | u.shape | u.ndim | u.dim() | u.numel() | len(u) | u[0] | u[..., None]
    | u.reshape(-1) | u.view(3, 2) | u.unsqueeze(0) | u.permute(1, 0) | u.expand(4, 2, 3) | u.unbind(0) | u.split(1)
    | u.sum() | u.sum(0) | u.max(0) | u + 1 | 1 - u | u @ torch.ones(3) | u == 3 | u != u | u < 2 | -u | ~u.bool()
    | abs(u) | u ** 2 | 2 ** u | u.to(torch.int) | u.clone() | u.detach() | u.data | u.contiguous() | u.numpy()
    | np.asarray(u) | u.tolist() | torch.add(1, u) | torch.stack([u, u]) | torch.cat([u, u]) | torch.zeros_like(u)
    | torch.where(u > 1, u, 0) | torch.nn.functional.relu(u) | torch.as_tensor(u) | u.add_(1)
    | u.copy_(torch.ones(2, 3)) | u.new_zeros(2) | u.is_floating_point() | u.stride() | u.nbytes | u.is_shared()
    | u.requires_grad | u.grad | isinstance(u, Tensor) | M.is_tensor_collection(u) | M.is_non_tensor(u) | list(u)
    | bool((u == u).all()) | hash(u) == hash(u) | pickle.loads(pickle.dumps(u)) | copy.copy(u) | U(u) is u
    | U(torch.tensor(3)) == 3 | str(U(3)) | repr([U(3)]) | int(U(3)) | float(U(3)) | bool(U(3)) | [10, 20][U(1)]
    | format(U(3.14), ".1f") | U(3).item() | torch.equal(u, u) | torch.testing.assert_close(u, u) | bool(u)
    | U("a") | U(None) | U(torch.ones(2), [3]).batch_size | U([1, 2]) | U(np.ones(2)) | u.nope | u.topk(1)
    | torch.utils._pytree.tree_map(lambda x: x + 1, u) | u.data_ptr() == u.data.data_ptr() | u.softmax(-1)
"""
ENTRY = """
    td["u"] | td["u"] is td["u"] | td.get("u") is td["u"] | td["u"].batch_size | td["n", "v"].batch_size | td[0]
    | td[:2] | td[torch.tensor([0, 1])] | td[torch.ones(4, 5).bool()] | td[None] | td.reshape(-1) | td.view(20)
    | td.permute(1, 0)
    | td.unsqueeze(0) | td.squeeze() | td.expand(2, 4, 5) | td.unflatten(0, (2, 2)) | td.unbind(0)[0]
    | td.split(2)[1]
    | td.gather(0, torch.zeros(1, 5).long()) | torch.stack([td, td]) | torch.cat([td, td]) | td.repeat(2, 1)
    | L([td, td]).contiguous() | L([td, td])["u"] | L([td, td])[:, 0]["u"] | L([td, td]).get("u", as_list=True)
    | L([td, td]).all() | L([td, td]).any() | L([td, td]).reshape(-1)["u"].batch_size
    | list(td.keys(True, True)) | [k for k, _ in td.items(True, True)] | list(td.values(True, True))
    | td.non_tensor_items()
    | ("n", "v") in td.keys(True, True) | list(L([td, td]).keys(True, True)) | td.is_empty() | td.get_item_shape("u")
    | td.entry_class("u").__name__ | td.filter_non_tensor_data() | td.clone() | td.apply(lambda x: x + 1)
    | td.clone()["u"].data_ptr() == td["u"].data_ptr() | td.copy()["u"] is td["u"] | td.select("u")["u"] is td["u"]
    | td.apply(lambda x: x.sum(), batch_size=[]) | td.apply(lambda x, y: x + y, td) | td.apply_(lambda x: x + 1)
    | td.named_apply(lambda k, x: x * 0 if k == "u" else x) | td.apply(lambda x: None if x.ndim < 2 else x)
    | td + 1 | td * td | -td | td.zero_() | td.add_(1) | td.clamp(0, 1)
    | torch.zeros_like(td) | torch.full_like(td, 2) | td.to(torch.float64) | td.bool() | td.detach() | td.data
    | td.sum() | td.sum(0) | td.sum("feature") | td.mean(0)["u"] | td.amax(0)["u"] | td.all() | td.any()
    | (td <= 1).all() | td.isfinite().all() | td.bool().all() | (td == td).all() | td == td | td == 0 | (td == 0).any()
    | td.to_dict() | td.to_tensordict() | td.numpy() | td.to_dict(convert_tensors=True) | td.flatten_keys(".")
    | td.update({"u": torch.zeros(4, 5)}) | td.update({"u": U(3)}) | td.update_({"u": U(torch.ones(2, 3))})
    | td.set_("u", U(torch.ones(2, 3))) | td.set_("u", U(torch.ones(3))) | td.set_("u", torch.ones(2, 3))
    | td.set_("u", 3) | td.update_({"u": torch.ones(4, 5)}) | td.lock_().update({"u": U(0)}) | td.replace(u=U(1))
    | td.setdefault("w", U(0)) | td.pop("u") | td.rename_key_("u", "w") | td.param_count() | td.requires_grad
    | repr(td) | td.state_dict()["u"] | list(td.state_dict()) | pickle.loads(pickle.dumps(td)) | copy.deepcopy(td)
    | pad(td, [0, 1, 0, 0])["u"] is td["u"] | td.split_keys(["u"])[0] | td.new_zeros(3)["u"].batch_size
    | torch.utils._pytree.tree_map(lambda x: x + 1, td) | len(torch.utils._pytree.tree_leaves(td)) | td.device
    | T(u=U(0), b=torch.ones(2, 3)).auto_batch_size_(2).batch_size
    | T(u=U(torch.zeros(5))).auto_batch_size_().batch_size
    | T.from_dict({"a": torch.ones(3, 4), "u": U(3)}, auto_batch_size=True).batch_size | T({"u": u}, [2], device="meta")
    | M.assert_close(td, td.clone()) | td.share_memory_()["u"].is_shared()
"""
MAPPED = """
    v(lambda x: x)(td) | v(lambda x: x["u"])(td) | v(lambda x: x["u"] * 1)(td) | v(lambda x: x.set("u", x["u"] + 1))(td)
    | v(lambda x: x + 1)(td) | v(lambda x: x, in_dims=1)(wide)["u"] | v(lambda x: x, out_dims=1)(wide)["u"]
    | v(v(lambda x: x + 1))(wide)["u"] | v(lambda x, y: x + y, (0, None))(td, td[0])["u"] | v(lambda x: x)(td["u"])
    | v(lambda x: x + 1)(td["u"]) | v(lambda x, y: (x + 1, y + 1))(torch.ones(3), td["u"]) | v(lambda x: x)(td["n"])
    | v(lambda x: U(torch.ones(2)))(torch.ones(3)) | v(lambda x: T(q=U(torch.ones(2)), r=x["a"]))(td)["q"]
    | v(lambda x: x["a"] + len(x["u"].batch_size))(td) | v(lambda x: x)(L([td, td]))["u"]
    | v(lambda x, y: y.shape[0] + x)(torch.ones(3), td["u"])
"""


EXPRESSIONS = [e.strip() for part in (ALONE, ENTRY, MAPPED) for e in part.split(" | ")]


def look(value: Any) -> Any:
    """What a value is, so that those of both packages compare."""
    if isinstance(value, Tensor) and hasattr(value, "batch_size"):
        return ["unbatched", list(value.batch_size), value.tolist(), str(value.dtype), value.device.type]
    if isinstance(value, Tensor):
        return [list(value.shape), value.tolist() if value.device.type == "cpu" else None, str(value.dtype)]
    if isinstance(value, np.ndarray):
        return ["array", value.tolist()]
    if isinstance(value, dict):
        return {k: look(v) for k, v in value.items()}
    if hasattr(value, "batch_size"):
        return [list(value.batch_size), {k: look(v) for k, v in value.items()}]
    if isinstance(value, (list, tuple)) or (hasattr(value, "__len__") and not isinstance(value, str)):
        return [look(part) for part in value]
    return value


def of(side: Any, expression: str) -> Any:
    M = side.module
    u = M.UnbatchedTensor(torch.arange(6.0).reshape(2, 3))
    names = {"M": M, "U": M.UnbatchedTensor, "T": M.TensorDict, "L": M.lazy_stack, "pad": M.pad, "u": u, "torch": torch}
    names |= {"np": np, "pickle": pickle, "copy": copy, "Tensor": Tensor, "v": torch.vmap}
    inner = {"v": M.UnbatchedTensor(torch.tensor(7)), "b": torch.ones(4, 5, 2)}
    names["td"] = names["wide"] = M.TensorDict({"a": torch.zeros(4, 5), "u": u, "n": inner}, [4, 5])
    if "v(" in expression:
        names["td"] = M.TensorDict({"a": torch.zeros(3, 2), "u": M.UnbatchedTensor(torch.ones(2))}, [3])
    try:
        return look(eval(expression, names))
    except Exception as error:
        return {c for c in (TypeError, RuntimeError, KeyError, AttributeError, ValueError) if isinstance(error, c)}


def alike(want: Any, got: Any) -> bool:
    if isinstance(want, set):
        return isinstance(got, set) and bool(want & got)
    return bool(want == got) or str(want).replace("-0.0", "0.0") == str(got).replace("-0.0", "0.0")


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_both_packages_agree(expression: str) -> None:
    want, got = of(PEER, expression), of(OURS, expression)
    assert alike(want, got), f"{expression}: want {want}, got {got}"


def test_gradients_flow_into_the_tensor_that_was_given() -> None:
    """There, none arrives."""
    w, x = torch.ones(2, requires_grad=True), torch.ones(3, requires_grad=True)
    td = TensorDict(u=UnbatchedTensor(w), x=x) * 2
    td.backward(torch.ones_like(td))
    assert w.grad.tolist() == [2, 2] and x.grad.tolist() == [2, 2, 2]
    td = TensorDict({"u": UnbatchedTensor(torch.ones(2))}, [3]).requires_grad_()
    td.sum(reduce=True).backward()
    assert td["u"].grad.tolist() == [1, 1] and td.grad["u"].tolist() == [1, 1] and td["u"].is_leaf


def test_numbers_written_to_the_whole_entry_go_into_its_memory() -> None:
    td = TensorDict({"u": UnbatchedTensor(torch.zeros(2, 3)), "a": torch.zeros(4)}, [4])
    place = td["u"].data_ptr()
    td.set_("u", UnbatchedTensor(torch.ones(3)))
    td.update_(td + 1)
    assert td["u"].tolist() == [[2.0] * 3] * 2 and td["u"].data_ptr() == place
    with pytest.raises(BatchSizeError, match="unbatched tensor 'u'"):
        td.set_("u", UnbatchedTensor(torch.ones(5)))
    td[0] = 7
    assert td["a"].tolist() == [7, 1, 1, 1] and td["u"].tolist() == [[2.0] * 3] * 2


def test_what_differs_from_row_to_row_in_vmap_comes_out_with_rows() -> None:
    """There, it is a tensor that cannot even be printed."""
    td = TensorDict({"a": torch.arange(6.0).reshape(3, 2), "u": UnbatchedTensor(torch.ones(2))}, [3])
    assert torch.vmap(lambda x: x["u"].sum() + x["a"])(td).tolist() == [[2, 3], [4, 5], [6, 7]]
    made = torch.vmap(lambda x: TensorDict(q=UnbatchedTensor(x["a"].sum()), u=x["u"]))(td)
    assert made["q"].tolist() == [1, 5, 9] and made["u"].tolist() == [1, 1] and made.batch_size == (3,)
    assert torch.func.grad(lambda x: x["u"].sum() + x["a"].sum())(td)["u"].tolist() == [1, 1]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_unbatched_tensors_are_compiled(backend: str) -> None:
    td = TensorDict({"a": torch.zeros(3, 2), "u": UnbatchedTensor(torch.ones(2))}, [3])

    def program(td: TensorDict, x: Tensor) -> Any:
        fresh = TensorDict({"x": x, "w": UnbatchedTensor(x.sum())}, [3])
        return (td + 1)[0], torch.stack([td, td]), fresh.apply(lambda leaf: leaf * 2), td["u"] + 1

    torch._dynamo.reset()
    made = torch.compile(program, backend=backend, fullgraph=True)(td, torch.ones(3))
    for got, want in zip(made, program(td, torch.ones(3)), strict=True):
        assert look(got) == look(want)


@pytest.mark.parametrize("name", ["d", "d.h5", "d.zarr", "d.tdz", "memory"])
def test_every_backend_keeps_it(tmp_path: Any, name: str) -> None:
    u = UnbatchedTensor(torch.arange(6.0).reshape(2, 3))
    td = TensorDict({"a": torch.zeros(4, 5), "u": u, "n": {"v": UnbatchedTensor(7)}}, [4, 5])
    both = lazy_stack([td, td.clone()])
    place = "memory://" if name == "memory" else tmp_path / name
    stored = td.save(place)
    assert isinstance(stored["u"], Tensor) and stored["u"].tolist() == u.tolist()
    assert list(stored.keys(True, True)) == ["a", "u", ("n", "v")] and "UnbatchedTensor(shape=" in repr(stored)
    assert stored[0].get("u").batch_size == (5,) and stored.get_item_shape("u") == (2, 3)
    assert (stored + 1).to_tensordict()["u"].tolist() == (u + 1).tolist()
    assert stored.param_count() == 27
    if name != "d.tdz":
        stored.update_({"u": UnbatchedTensor(torch.ones(2, 3))})
        assert stored["u"].tolist() == [[1.0] * 3] * 2
    stored.close()
    if name != "memory":
        with tdstore.open(place) as back:
            assert back["u"].tolist() == ([[1.0] * 3] * 2 if name != "d.tdz" else u.tolist())
            assert look(back.to_tensordict()["n"]) == [[4, 5], {"v": look(UnbatchedTensor(7, [4, 5]))}]
        with both.save(tmp_path / f"both-{name}") as saved:
            assert saved["u"].tolist() == u.tolist() and saved["u"].batch_size == (2, 4, 5)


def test_containers_with_one_travel() -> None:
    td = TensorDict({"a": torch.zeros(4), "u": UnbatchedTensor(torch.arange(3))}, [4]).consolidate()
    back = pickle.loads(pickle.dumps(td))
    assert look(back) == look(td) and back.is_consolidated()
    assert pad(td, [0, 2])["u"].tolist() == [0, 1, 2]


@tdstore.tensorclass
class Batch:
    a: Tensor
    u: UnbatchedTensor
    s: str = "x"


def test_a_tensorclass_has_them_as_fields() -> None:
    batch: Any = Batch(a=torch.zeros(3, 2), u=UnbatchedTensor(torch.ones(2)), batch_size=[3])  # type: ignore[call-arg]
    assert batch[0].u.batch_size == () and (batch + 1).u.tolist() == [2, 2]
    assert (batch == 0).u.tolist() == [False, False]
    assert torch.stack([batch, batch]).u.batch_size == (2, 3) and "u=UnbatchedTensor(shape=" in repr(batch)
    batch.u = UnbatchedTensor(torch.zeros(5))
    assert batch.u.shape == (5,) and batch.u.batch_size == (3,)
