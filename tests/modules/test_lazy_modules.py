"""Ensembles of lazy modules: what the first call under `torch.vmap` makes of them (see tests/differential)."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parameter import is_lazy

from tdstore import TensorDict
from tdstore.errors import UnsupportedError


def call(module: nn.Module, params: Any, x: torch.Tensor, **how: Any) -> torch.Tensor:
    def run(params: Any, x: torch.Tensor) -> torch.Tensor:
        with params.to_module(module):
            return module(x)

    return torch.vmap(run, (0, None), **how)(params, x)


@pytest.mark.parametrize("randomness", ["error", "same", "different"])
def test_each_is_initialized_as_a_module_by_itself(randomness: str) -> None:
    """The peer takes the stack for one weight, of n times the inputs."""
    torch.manual_seed(3)
    params = TensorDict.from_modules(*(nn.LazyLinear(2) for _ in range(3)))
    net = nn.LazyLinear(2)
    x = torch.ones(5, 4)
    out = call(net, params, x, randomness=randomness)
    torch.manual_seed(3)
    alone = [nn.Linear(4, 2) for _ in range(4)]
    for i in range(3):
        assert torch.equal(params["weight"][i], alone[i].weight)
        assert torch.allclose(out[i], alone[i](x))
    assert type(net) is nn.Linear
    assert torch.equal(net.weight, alone[3].weight)  # its own, so that it can be called by itself
    assert net(x).shape == (5, 2)
    assert torch.equal(call(net, params, x), out)
    other = nn.LazyLinear(2)
    assert torch.equal(call(other, params, x), out)
    assert other(x).shape == (5, 2)


def test_buffers_and_modules_in_modules() -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.LazyConv2d(4, 3), nn.LazyBatchNorm2d())

    nets = [build(), build()]
    params = TensorDict.from_modules(*nets, as_module=True)
    assert is_lazy(params["1", "running_mean"])
    assert call(nets[0], params, torch.randn(5, 3, 8, 8)).shape == (2, 5, 4, 6, 6)
    assert params["0", "weight"].shape == (2, 4, 3, 3, 3)
    assert params["1", "running_mean"].shape == (2, 4)
    assert not params["1", "running_mean"].requires_grad
    assert params["1", "running_mean"].abs().sum() > 0
    assert params["1", "num_batches_tracked"].tolist() == [1, 1]
    assert is_lazy(nets[1][0].weight)


def test_nothing_happens_without_a_call() -> None:
    net = nn.LazyLinear(2)
    params = TensorDict.from_modules(net, nn.LazyLinear(2))

    def run(params: Any) -> torch.Tensor:
        with params.to_module(net):
            return torch.ones(())

    torch.vmap(run)(params)
    assert is_lazy(params["weight"])
    assert is_lazy(net.weight)
    assert "initialize_parameters" not in vars(net)
    with pytest.raises(IndexError):
        call(net, params, torch.ones(()))  # a shape that the module refuses
    assert is_lazy(params["weight"])
    assert call(net, params, torch.ones(3)).shape == (2, 2)


def test_they_are_printed_copied_and_pickled() -> None:
    params = TensorDict.from_modules(nn.LazyLinear(2), nn.LazyLinear(2))
    assert "weight: StackedUninitializedParameter(shape=torch.Size([2, -1]), device=cpu" in repr(params)
    again = pickle.loads(pickle.dumps(params))
    assert call(nn.LazyLinear(2), again, torch.ones(3)).shape == (2, 2)
    assert again["weight"].shape == (2, 2, 3)
    copied = copy.deepcopy(params["weight"])
    copied.materialize((5,))
    assert copied.shape == (2, 5)
    assert is_lazy(params["weight"])
    assert "weight: UninitializedParameter(shape=torch.Size([-1])" in repr(TensorDict.from_module(nn.LazyLinear(2)))


def test_what_cannot_be_is_said() -> None:
    net = nn.LazyLinear(2)
    params = TensorDict.from_modules(net, nn.LazyLinear(2))
    with pytest.raises(RuntimeError, match=r"'weight' is a stack of uninitialized parameters: .*torch\.vmap"):
        params.to_module(net)
    with pytest.raises(RuntimeError, match="Linear is not a lazy module: its 'weight'"):
        call(nn.Linear(3, 2), params, torch.ones(3))
    with pytest.raises(UnsupportedError, match="first call without chunk_size"):
        call(net, params, torch.ones(3), chunk_size=1)
    with pytest.raises(UnsupportedError, match="cannot map over the uninitialized parameter 'weight'"):
        torch.vmap(lambda x, td: td, (0, None))(torch.ones(2), params)
    with pytest.raises(RuntimeError, match="'bias' requires a gradient in some"):
        frozen = nn.LazyLinear(2)
        frozen.bias = nn.UninitializedParameter(requires_grad=False)
        TensorDict.from_modules(net, frozen)
    with pytest.raises(RuntimeError, match="several devices or dtypes"):
        TensorDict.from_modules(net, nn.LazyLinear(2, dtype=torch.float64))
    called = nn.LazyLinear(2)
    called(torch.ones(3))
    with pytest.raises(RuntimeError, match="'bias' is uninitialized in some of the modules only"):
        TensorDict.from_modules(net, called)
    assert is_lazy(net.weight)
