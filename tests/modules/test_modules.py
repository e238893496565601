"""from_module, from_modules and to_module, where they do what the peer does not (see tests/differential)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

import tdstore
from tdstore import LazyStackedTensorDict, TensorDict, TensorDictParams
from tdstore.errors import LockedError


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)
        self.b.weight = self.a.weight


def lent(net: nn.Module, value: float = 7.0) -> TensorDict:
    return TensorDict.from_module(net).data.clone().apply(lambda t: torch.full_like(t, value))


# -- out of modules ----------------------------------------------------------------------------
def test_from_module_locks_as_it_is_told() -> None:
    net = nn.Linear(1, 1)
    assert not TensorDict.from_module(net).is_locked and not TensorDict.from_module(net, as_module=True).is_locked
    assert TensorDict.from_module(net, lock=True).is_locked and tdstore.from_module(net).is_locked
    assert not tdstore.from_module(net, lock=False).is_locked
    assert type(TensorDict.from_module(nn.ReLU(), as_module=True)) is TensorDictParams
    assert type(LazyStackedTensorDict.from_module(net)) is TensorDict
    with pytest.raises(TypeError, match="takes a torch.nn.Module, not a int"):
        TensorDict.from_module(3)  # type: ignore[arg-type]


def test_a_params_in_a_module_shows_as_its_tree_and_stays_unlocked() -> None:
    net = nn.Sequential(TensorDictParams({"a": torch.ones(2), "n": {"b": torch.ones(3)}}))
    td = TensorDict.from_module(net, lock=True)
    assert type(td["0"]) is TensorDict and td["0", "n", "b"] is net[0]["n", "b"]
    assert td.is_locked and not net[0].is_locked
    with td.data.clone().zero_().to_module(net):
        assert net[0]["n", "b"].sum() == 0 and net[0].named_parameters()
    assert net[0]["n", "b"] is td["0", "n", "b"]


def test_extra_state_travels_as_a_value() -> None:
    class Counted(nn.Linear):
        count = 3

        def get_extra_state(self) -> Any:
            return {"count": self.count}

        def set_extra_state(self, state: Any) -> None:
            self.count = state["count"]

    net, other = Counted(2, 2), Counted(2, 2)
    other.count = 0
    td = TensorDict.from_module(net, use_state_dict=True)
    assert td["_extra_state"] == {"count": 3}
    td.to_module(other, use_state_dict=True)
    assert other.count == 3 and torch.equal(other.weight, net.weight)


def test_from_modules_refuses_what_is_trained_in_some() -> None:
    a, b = nn.Linear(2, 2), nn.Linear(2, 2).requires_grad_(False)
    with pytest.raises(RuntimeError, match="'weight' requires a gradient in some"):
        TensorDict.from_modules(a, b)
    lazy = TensorDict.from_modules(a, b, lazy_stack=True)
    assert [td["weight"].requires_grad for td in lazy.tensordicts] == [True, False]


def test_what_is_tied_in_each_module_is_one_parameter_of_the_ensemble() -> None:
    params = TensorDict.from_modules(Tied(), Tied(), as_module=True)
    assert params["a", "weight"] is params["b", "weight"] and len(list(params.parameters())) == 3
    assert params["a", "bias"] is not params["b", "bias"]


def test_lazy_modules_of_other_shapes() -> None:
    stack = TensorDict.from_modules(nn.Linear(3, 4), nn.Linear(3, 5), lazy_stack=True)
    assert stack.get_item_shape("weight") == torch.Size([2, -1, 3])
    net = nn.Linear(3, 5)
    with stack[1].to_module(net):
        assert net(torch.ones(3)).shape == (5,)


# -- into a module -----------------------------------------------------------------------------
def test_own_parameters_come_back_in_order_after_an_exception() -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    own, buffers = list(net.named_parameters()), list(net.named_buffers())
    with pytest.raises(ZeroDivisionError), lent(net).to_module(net):
        assert net[0].weight[0, 0] == 7
        raise ZeroDivisionError
    for before, now in ((own, net.named_parameters()), (buffers, net.named_buffers())):
        assert all(n == m and a is b for (n, a), (m, b) in zip(before, now, strict=True))


def test_nothing_changes_where_a_key_is_unknown() -> None:
    net = nn.Sequential(nn.Linear(3, 3))
    own = net[0].weight
    for td in (
        TensorDict({"0": {"weight": torch.ones(3, 3), "bia": torch.ones(3)}}),
        TensorDict({"0": {"x": {"y": 1.0}}}),
    ):
        with pytest.raises(KeyError, match=r"Linear has no .*'0\.(bia|x)': nothing was changed"):
            td.to_module(net)
    with pytest.raises(RuntimeError, match=r"cannot copy \[2, 2\] into '0.weight', of shape \[3, 3\]"):
        TensorDict({"0": {"bias": torch.zeros(3), "weight": torch.ones(2, 2)}}).to_module(net, inplace=True)
    with pytest.raises(TypeError, match="takes a tensor, or None, not 'x'"):
        TensorDict({"0": {"weight": "x"}}).to_module(net)
    with pytest.raises(KeyError, match="'0.bia'"):
        TensorDict({"0": {"weight": torch.ones(3, 3), "bia": torch.ones(3)}}).to_module(net, use_state_dict=True)
    assert net[0].weight is own and net[0].bias.any()


def test_parametrized_names_are_explained() -> None:
    net = parametrize.register_parametrization(nn.Linear(3, 3), "weight", nn.Identity())
    with pytest.raises(KeyError, match=r"use the keys below \('parametrizations', 'weight'\)"):
        TensorDict({"weight": torch.ones(3, 3)}).to_module(net)


def test_tied_parameters_stay_tied_while_their_values_agree() -> None:
    net = Tied()
    own = net.a.weight
    with lent(net).to_module(net) as swap:
        assert net.a.weight is net.b.weight and isinstance(net.a.weight, nn.Parameter)
        assert swap["a", "weight"] is own and swap["b", "weight"] is own
    assert net.a.weight is own and net.b.weight is own
    other = lent(net)
    other["b", "weight"].zero_()
    with other.to_module(net):
        assert net.a.weight[0, 0] == 7 and net.b.weight[0, 0] == 0
    assert net.b.weight is own


def test_parameters_that_go_in_stay_the_objects_that_they_are() -> None:
    net = nn.Linear(3, 4)
    frozen = nn.Parameter(torch.ones(4, 3), requires_grad=False)
    with TensorDict({"weight": frozen}).to_module(net):
        assert net.weight is frozen
    plain = torch.ones(4, 3)
    with TensorDict({"weight": plain}).to_module(net.requires_grad_(False)):
        assert isinstance(net.weight, nn.Parameter) and not net.weight.requires_grad
        assert net.weight.data_ptr() == plain.data_ptr()
    with TensorDict({"weight": plain}).to_module(net, preserve_module_state=False):
        assert net.weight is plain
    whole = torch.ones(4, 3, dtype=torch.int64)
    with TensorDict({"weight": whole}).to_module(net.requires_grad_()):
        assert net.weight.dtype is torch.int64


def test_where_there_was_no_parameter_there_is_none_again() -> None:
    net = nn.Linear(3, 4, bias=False)
    with TensorDict({"bias": torch.ones(4)}).to_module(net) as swap:
        assert net(torch.zeros(3)).sum() == 4 and swap["bias"] is None
    assert net.bias is None


@pytest.mark.parametrize("use_state_dict", [False, True])
@pytest.mark.parametrize("inplace", [None, False, True])
def test_every_way_in_leads_back(inplace: bool | None, use_state_dict: bool) -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    own, values = dict(net.named_parameters()), {k: v.clone() for k, v in net.state_dict().items()}
    with lent(net).to_module(net, inplace=inplace, use_state_dict=use_state_dict):
        assert all((v == 7).all() for v in net.state_dict().values())
        assert (net[0].weight is own["0.weight"]) == bool(inplace)
    assert all(torch.equal(v, values[k]) for k, v in net.state_dict().items())
    assert all(p is own[k] for k, p in net.named_parameters())


def test_the_hooks_of_a_state_dict_run() -> None:
    net, seen = nn.Linear(2, 2), []
    net.register_load_state_dict_pre_hook(lambda module, state, *rest: seen.append(sorted(state)))
    lent(net).to_module(net, use_state_dict=True)
    assert seen == [["bias", "weight"]] and net.weight[0, 0] == 7


def test_swap_dest_and_memo() -> None:
    net, dest, memo = nn.Linear(2, 2), TensorDict(), {}
    own = net.weight
    assert lent(net).to_module(net, swap_dest=dest, memo=memo) is dest and dest["weight"] is own
    lent(net, 1.0).to_module(net, memo=memo)
    assert net.weight[0, 0] == 7  # filled already
    assert lent(net).to_module(net, return_swap=False) is None
    own = net.weight
    with pytest.raises(LockedError, match="into swap_dest"):
        lent(net).to_module(net, swap_dest=TensorDict.from_module(nn.Linear(2, 2), lock=True))
    assert net.weight is own


@pytest.mark.parametrize("wrong", [3, nn.Linear, TensorDict()])
def test_to_module_takes_a_module(wrong: Any) -> None:
    with pytest.raises(TypeError, match="takes a torch.nn.Module, not a"):
        TensorDict({"a": 1.0}).to_module(wrong)


def test_from_any_container(tmp_path: Any) -> None:
    net = nn.Linear(3, 4)
    for location in ("a.h5", "b.zarr", "c"):
        lent(net).save(tmp_path / location).close()
        with TensorDict.load(tmp_path / location).to_module(net):
            assert net.weight[0, 0] == 7 and isinstance(net.weight, nn.Parameter)
    rows = torch.stack([lent(net, 1.0), lent(net, 2.0)]).save(tmp_path / "rows.h5")
    with rows[1].to_module(net):
        assert net.bias[0] == 2


def test_training_never_changes_a_dataset_opened_for_reading(tmp_path: Any) -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    lent(net).save(tmp_path / "net").close()
    td = TensorDict.load(tmp_path / "net")
    td.to_module(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    net(torch.randn(4, 3)).pow(2).sum().backward()
    optimizer.step()
    assert (td["0", "weight"] == 7).all() and (td["1", "num_batches_tracked"] == 7).all()
    td.close()  # would tell of changes that are lost
    mapped = TensorDict.load(tmp_path / "net")
    net.requires_grad_(False)
    mapped.to_module(net)
    assert net[0].weight.data_ptr() == mapped["0", "weight"].data_ptr()  # nothing is read before it is used


def test_free_functions() -> None:
    net = nn.Linear(2, 2)
    assert tdstore.from_module(net)["weight"] is net.weight
    assert tdstore.from_modules(net, net).batch_size == torch.Size([2])
    assert type(tdstore.from_modules(net, net, as_module=True)) is TensorDictParams
