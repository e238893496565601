"""TensorDictParams, where it does what the peer does not, and the rest of torch around it."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import nn

import tdstore
from tdstore import TensorDict, TensorDictParams
from tdstore.errors import LockedError, UnsupportedError, UntrustedDataError
from tdstore.tensordicts import params as params_module


def params(value: float = 1.0, **kwargs: Any) -> TensorDictParams:
    tree = {"a": torch.full((2,), value), "n": {"b": torch.zeros(3), "i": torch.arange(3)}, "s": "text"}
    return TensorDictParams(TensorDict(tree), **kwargs)


class Holder(nn.Module):
    def __init__(self, value: float = 1.0) -> None:
        super().__init__()
        self.p = params(value)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.p["a"].sum() + self.p["n", "b"].sum()


def test_what_it_is_made_of_keeps_its_tensors() -> None:
    td = TensorDict({"a": torch.ones(2), "n": {"b": torch.ones(2)}})
    p = TensorDictParams(td)
    assert type(td["a"]) is torch.Tensor and p["a"].data_ptr() == td["a"].data_ptr()
    p["c"] = torch.ones(1)
    p["n", "d"] = torch.ones(1)
    assert list(td.keys(True, True)) == ["a", ("n", "b")]


def test_locked_means_locked() -> None:
    p = params(lock=True)
    assert p.is_locked
    for change in (lambda: p.set("q", 1.0), lambda: p.set(("n", "q"), torch.ones(1)), lambda: p.update({"q": 1.0})):
        with pytest.raises(LockedError):
            change()
    with pytest.raises(LockedError):
        p["a"] = torch.ones(2)
    p.zero_()
    assert p.unlock_().set("q", torch.ones(1))["q"].requires_grad


def test_what_is_set_deeper_down_is_a_parameter_too() -> None:
    p = params()
    p.update({"n": {"c": torch.ones(1)}, "x": {"y": torch.ones(1), "z": torch.arange(2)}})
    p.setdefault(("n", "e"), torch.ones(1))
    p.register_parameter("r", nn.Parameter(torch.ones(1)))
    p.register_buffer("t", torch.ones(1))
    p.named = nn.Parameter(torch.ones(1))
    assert {n for n, _ in p.named_parameters()} == {"a", "n.b", "n.c", "x.y", "n.e", "r", "named"}
    assert {n for n, _ in p.named_buffers()} == {"n.i", "x.z", "t"}
    with pytest.raises(TypeError, match="no modules"):
        p.layer = nn.Linear(1, 1)
    with pytest.raises(AttributeError, match="no entry, 'nothing'"):
        p.nothing  # noqa: B018


@pytest.mark.parametrize("change", ["add_", "mul_", "exp_", "clamp_max_"])
def test_in_place_maths(change: str) -> None:
    p = params().exclude(("n", "i"))
    p = TensorDictParams(p)
    a, want = p["a"], getattr(torch.ones(2), change)(*([] if change == "exp_" else [0.5]))
    getattr(p, change)(*([] if change == "exp_" else [0.5]))
    assert p["a"] is a and torch.equal(a.detach(), want) and a.requires_grad
    assert torch.is_grad_enabled()


def test_rows_in_place() -> None:
    p = TensorDictParams(TensorDict({"a": torch.ones(2, 3)}, [2]))
    p[0] = TensorDict({"a": torch.zeros(3)})
    p[1] = 5
    p.masked_fill_(torch.tensor([True, False]), 2.0)
    assert p["a"].tolist() == [[2, 2, 2], [5, 5, 5]] and p["a"].is_leaf


def test_a_module_around_it_moves_casts_and_loads_it() -> None:
    m = Holder()
    a = m.p["a"]
    a.sum().backward()
    assert m.double().p["a"] is a and a.dtype is a.grad.dtype is torch.float64 and m.p["n", "i"].dtype is torch.int64
    assert m.float().state_dict().keys() == {"p.a", "p.n.b", "p.n.i"}
    assert m.load_state_dict(Holder(5.0).state_dict()).missing_keys == [] and m.p["a"] is a and a[0] == 5
    state = Holder(6.0).state_dict()
    state["p.zz"] = state.pop("p.n.b")
    with pytest.raises(
        RuntimeError, match=r"(?s)Missing.*p\.n\.b.*Unexpected.*p\.zz|Unexpected.*p\.zz.*Missing.*p\.n\.b"
    ):
        m.load_state_dict(state)
    with pytest.raises(RuntimeError, match=r"size mismatch for p\.a"):
        m.load_state_dict({**Holder().state_dict(), "p.a": torch.ones(3)})
    m.load_state_dict(Holder(8.0).state_dict(), assign=True)
    assert m.p["a"][0] == 8 and isinstance(m.p["a"], nn.Parameter)
    assert m.to("meta").p["a"].is_meta and m.to_empty(device="cpu").p["a"].device.type == "cpu"


def test_functional_call_by_dotted_names() -> None:
    m = Holder()
    own = m.p["n", "b"]
    out = torch.func.functional_call(m, {"p.n.b": torch.ones(3), "p.a": torch.zeros(2)}, (torch.ones(1),))
    assert out.tolist() == [3.0] and m.p["n", "b"] is own and m.p.n.b is own


def test_tied_parameters_stay_tied_in_copies() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.l = nn.Linear(2, 2)
            self.p = TensorDict.from_module(self.l, as_module=True)

    both = copy.deepcopy(Both())
    assert both.p["weight"] is both.l.weight and len(list(both.parameters())) == 2 and both.p.is_locked is False
    p, optimizer = copy.deepcopy((both.p, torch.optim.SGD(both.p.parameters())))
    assert optimizer.param_groups[0]["params"][0] is p["weight"] is not both.p["weight"]
    leaf = nn.Parameter(torch.ones(2))
    twice = TensorDictParams({"a": leaf, "n": {"b": leaf}})
    for other in (twice.clone(), copy.deepcopy(twice), pickle.loads(pickle.dumps(twice)), twice.to(torch.float64)):
        assert other["a"] is other["n", "b"] is not leaf and isinstance(other, TensorDictParams)
        assert len(list(other.parameters())) == 1


def test_pickle_and_torch_save_keep_the_class() -> None:
    p = params(lock=True).train(False)
    file = io.BytesIO()
    torch.save(p, file)
    file.seek(0)
    for other in (pickle.loads(pickle.dumps(p)), torch.load(file, weights_only=True)):
        assert type(other) is TensorDictParams and other.is_locked and not other.training
        assert isinstance(other["n", "b"], nn.Parameter) and other["s"] == "text"


def test_hooks_are_pickled_and_not_loaded_from_strangers() -> None:
    p = params()
    p.register_forward_pre_hook(torch.nn.functional.relu)
    assert pickle.loads(pickle.dumps(p))._forward_pre_hooks
    file = io.BytesIO()
    torch.save(p, file)
    file.seek(0)
    with pytest.raises(pickle.UnpicklingError, match="relu"):
        torch.load(file, weights_only=True)
    state = {"_forward_pre_hooks": {0: torch.sum}, "training": False}
    bare = params_module._rebuilt_bare(TensorDictParams, TensorDict({"a": torch.ones(1)}), False, state)
    assert not bare._forward_pre_hooks and not bare.training
    with pytest.raises(UntrustedDataError, match="something else"):
        params_module._rebuilt_bare(dict, TensorDict(), False, {})


def test_requires_grad_of_parameters_only() -> None:
    p = params()
    assert p.requires_grad_(False) is p and not p.requires_grad
    assert p.requires_grad_()["n", "b"].requires_grad and not p["n", "i"].requires_grad
    frozen = TensorDictParams({"a": nn.Parameter(torch.ones(2), requires_grad=False)})
    assert not frozen.clone()["a"].requires_grad and not frozen.to(torch.float64)["a"].requires_grad


def test_over_files_and_shared_memory_parameters_stay_the_objects(tmp_path: Any) -> None:
    p = params()
    a = p["a"]
    p.memmap_(tmp_path / "p")
    assert p["a"] is a and p.is_memmap() and isinstance(a, nn.Parameter)
    with torch.no_grad():
        a.fill_(3.0)
    p.close()
    loaded = TensorDict.load(tmp_path / "p")
    assert type(loaded) is TensorDict and loaded["a"].tolist() == [3.0, 3.0] and loaded["s"] == "text"
    q = params()
    b = q["n", "b"]
    assert not q.is_shared() and q.share_memory_().is_shared() and q["n", "b"] is b and b.is_shared() and q.is_locked
    assert params().load_(tmp_path / "p")["a"].requires_grad


@pytest.mark.parametrize("location", ["p.h5", "p.zarr"])
def test_saved_and_made_of_what_is_stored(tmp_path: Any, location: str) -> None:
    stored = params(4.0).save(tmp_path / location)
    p = TensorDictParams(stored)
    assert [n for n, _ in p.named_parameters()] == ["a", "n.b"] and p["a"].tolist() == [4.0, 4.0] and p["s"] == "text"


def test_no_lazy_stack_in_it() -> None:
    stack = TensorDict({"a": torch.ones(2)}).unsqueeze(0).to_lazystack()
    for source in (stack, {"x": stack}):
        with pytest.raises(UnsupportedError, match="a lazy stack cannot be part"):
            TensorDictParams(source)


def test_two_entries_of_one_name_are_told() -> None:
    with pytest.raises(KeyError, match=r"two entries .* have the name 'a\.b'"):
        list(TensorDictParams({"a.b": torch.ones(1), "a": {"b": torch.ones(1)}}).parameters())


def test_assign_makes_parameters() -> None:
    p = params()
    p.load_state_dict(params(9.0).data.state_dict(), assign=True)
    assert isinstance(p["a"], nn.Parameter) and isinstance(p["n", "b"], nn.Parameter) and p["a"][0] == 9


# -- torch.func and torch.compile --------------------------------------------------------------
def test_ensemble_trains_its_own_parameters() -> None:
    nets = [nn.Linear(3, 1) for _ in range(3)]
    p = TensorDict.from_modules(*nets, as_module=True)
    optimizer = torch.optim.SGD(p.parameters(), lr=0.1)
    meta = nn.Linear(3, 1, device="meta")

    def call(td: Any, x: torch.Tensor) -> torch.Tensor:
        with td.to_module(meta):
            return meta(x)

    before = p.data.clone()
    torch.vmap(call, (0, None))(p, torch.ones(4, 3)).pow(2).sum().backward()
    optimizer.step()
    assert (p["weight"] != before["weight"]).all() and nets[0].weight.grad is None
    assert meta.weight.device.type == "meta" and isinstance(meta.weight, nn.Parameter)


def test_gradients_of_functions_of_parameters() -> None:
    net, x = nn.Linear(3, 1), torch.ones(3)
    td = TensorDict.from_module(net)

    def loss(td: Any, x: torch.Tensor) -> torch.Tensor:
        with td.to_module(net):
            return net(x).sum()

    grads = torch.func.grad(loss)(td, x)
    assert grads["weight"].tolist() == [[1, 1, 1]] and grads["bias"].tolist() == [1] and net.weight.grad is None
    each = torch.vmap(torch.func.grad(loss), (None, 0))(td, torch.arange(6.0).view(2, 3))
    assert each["weight"].tolist() == [[[0, 1, 2]], [[3, 4, 5]]]
    rows = torch.func.jacrev(loss)(TensorDict.from_module(net, as_module=True), x)
    assert rows["weight"].tolist() == [[1, 1, 1]]
    assert isinstance(net.weight, nn.Parameter)


@pytest.mark.skipif(torch.__version__ < "2.11", reason="torch 2.6 cannot trace a TensorDict")
def test_compiled() -> None:
    held, linear = Holder(), nn.Linear(2, 2)
    own = linear.weight
    p = TensorDictParams({"weight": torch.ones(2, 2), "bias": torch.ones(2)})
    ensemble, target = TensorDict.from_modules(linear, linear), p.data.clone().zero_()

    def call(td: Any, x: torch.Tensor) -> torch.Tensor:
        with td.to_module(linear):
            return linear(x)

    @torch.compile(fullgraph=True, backend="eager")
    def program(p: Any, ensemble: Any, target: Any, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        target.lerp_(p.data, 0.5)
        return held(x), call(p, x), torch.vmap(call, (0, None))(ensemble, x)

    x = torch.ones(2)
    one, two, many = program(p, ensemble, target, x)
    assert torch.equal(one, held(x)) and many.shape == (2, 2) and torch.allclose(many[0], linear(x))
    two.sum().backward()
    assert p["weight"].grad.tolist() == [[1, 1], [1, 1]] and linear.weight is own
    assert target["bias"].tolist() == [0.5, 0.5]


def test_nested_objects_of_a_class_keep_it_and_hold_parameters() -> None:
    class Weights(tdstore.TensorClass):
        x: torch.Tensor
        steps: torch.Tensor

    nested = Weights(torch.ones(3), torch.arange(3), batch_size=[3])
    params = tdstore.TensorDictParams(tdstore.TensorDict({"p": nested}, [3]))
    assert isinstance(params["p"], Weights) and isinstance(params.clone()["p"], Weights)
    assert [name for name, _ in params.named_parameters()] == ["p.x"]
    assert [name for name, _ in params.named_buffers()] == ["p.steps"]
    optimizer = torch.optim.SGD(params.parameters(), lr=1.0)
    params["p"].x.sum().backward()
    optimizer.step()
    assert params["p"].x.tolist() == [0, 0, 0] and type(params["p"].x) is torch.nn.Parameter
