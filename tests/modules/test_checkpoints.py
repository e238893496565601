"""A module and its optimizer saved to any backend and back, in two lines; gradients on every container."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tdstore import TensorDict
from tdstore.errors import UnsupportedError
from tests.surface.containers import KINDS, floats

Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]

ADAM: Make = lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True)  # noqa: E731
OPTIMIZERS: dict[str, Make] = {
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "lists of tensors": lambda p: torch.optim.LBFGS(p, lr=0.1, history_size=3, max_iter=2),
    "lr is a tensor": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.1)),
    "groups": lambda p: torch.optim.Adam([{"params": p[:2], "lr": 0.2}, {"params": p[2:], "betas": (0.5, 0.6)}]),
}
LOCATIONS = {"memmap": "run", "h5": "run.h5", "zarr": "run.zarr", "tdz": "run.tdz", "remote": None, "redis": None}


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def train(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    torch.manual_seed(1)

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        out = net(torch.ones(5, 3) + torch.arange(5.0)[:, None]).pow(2).sum()
        out.backward()
        return out

    for _ in range(2):
        optimizer.step(loss)  # type: ignore[arg-type]


def trained(make: Make) -> tuple[nn.Module, torch.optim.Optimizer]:
    net = network()
    optimizer = make(list(net.parameters()))
    train(net, optimizer)
    return net, optimizer


def check_that_they_go_on_alike(
    net: nn.Module, optimizer: torch.optim.Optimizer, other: nn.Module, other_optimizer: torch.optim.Optimizer
) -> None:
    assert repr(other_optimizer.state_dict()) == repr(optimizer.state_dict())
    for pair in ((net, optimizer), (other, other_optimizer)):
        train(*pair)
    state = other.state_dict()
    assert all(torch.equal(v, state[k]) for k, v in net.state_dict().items())


@pytest.mark.parametrize("kind", LOCATIONS)
def test_two_lines_there_and_two_back(kind: str, tmp_path: Any, request: Any) -> None:
    location: Any = tmp_path / (LOCATIONS[kind] or "")
    if kind == "remote":
        location = f"memory://checkpoints/{tmp_path.name}"
    elif kind == "redis":
        location = f"{request.getfixturevalue('redis').url}/checkpoint-{tmp_path.name}"
    net, optimizer = trained(ADAM)

    run = TensorDict({"net": TensorDict.from_module(net), "optimizer": TensorDict.from_optimizer(optimizer)})
    run.save(location).close()

    other = network()
    other_optimizer = ADAM(list(other.parameters()))
    with TensorDict.load(location) as run:
        run["net"].to_module(other, inplace=True)
        run["optimizer"].to_optimizer(other_optimizer)
    check_that_they_go_on_alike(net, optimizer, other, other_optimizer)


def test_one_file_there_and_back(tmp_path: Any) -> None:
    """The files that other programs read: safetensors, one buffer, torch.save."""
    net, optimizer = trained(ADAM)
    run = TensorDict({"net": TensorDict.from_module(net), "optimizer": TensorDict.from_optimizer(optimizer)})
    run.to_safetensors(tmp_path / "run.safetensors")
    run.consolidate(tmp_path / "run.td")
    torch.save(run, tmp_path / "run.pt")
    for loaded in (
        TensorDict.from_safetensors(tmp_path / "run.safetensors"),
        TensorDict.from_consolidated(tmp_path / "run.td"),
        torch.load(tmp_path / "run.pt", weights_only=True),
    ):
        other = network()
        other_optimizer = ADAM(list(other.parameters()))
        loaded["net"].to_module(other, inplace=True)
        loaded["optimizer"].to_optimizer(other_optimizer)
        state = other.state_dict()
        assert repr(other_optimizer.state_dict()) == repr(optimizer.state_dict())
        assert all(torch.equal(v, state[k]) for k, v in net.state_dict().items())


def test_states_of_every_kind_of_optimizer(tmp_path: Any) -> None:
    runs = {name: trained(make) for name, make in OPTIMIZERS.items()}
    tree = {n: {"net": TensorDict.from_module(m), "o": TensorDict.from_optimizer(o)} for n, (m, o) in runs.items()}
    TensorDict(tree).save(tmp_path / "runs.h5").close()
    with TensorDict.load(tmp_path / "runs.h5") as loaded:
        for name, make in OPTIMIZERS.items():
            other = network()
            other_optimizer = make(list(other.parameters()))
            loaded[name, "net"].to_module(other, inplace=True)
            loaded[name, "o"].to_optimizer(other_optimizer)
            check_that_they_go_on_alike(*runs[name], other, other_optimizer)


def test_the_state_of_an_optimizer_reads_well(tmp_path: Any) -> None:
    net = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.25)
    assert TensorDict.from_optimizer(optimizer)["state"].is_empty()
    net(torch.ones(2)).sum().backward()
    optimizer.step()
    td = TensorDict.from_optimizer(optimizer)
    assert td["state", "0", "exp_avg"] is optimizer.state[net.weight]["exp_avg"]
    assert td["param_groups", "0", "lr"] == 0.25 and td["param_groups", "0", "betas"] == (0.9, 0.999)
    fresh = torch.optim.Adam(net.parameters())
    td.to_optimizer(fresh)
    assert fresh.state[net.weight]["exp_avg"] is not optimizer.state[net.weight]["exp_avg"]  # copied
    with pytest.raises(KeyError, match=r"(?s)not the state of an optimizer.*from_optimizer"):
        TensorDict({"a": torch.ones(1)}).to_optimizer(fresh)
    for call in (TensorDict.from_optimizer, td.to_optimizer):
        with pytest.raises(TypeError, match=r"expected a torch\.optim\.Optimizer, not a Linear"):
            call(net)  # type: ignore[operator]
    with pytest.raises(ValueError, match="different number of parameter groups"):
        td.to_optimizer(torch.optim.Adam([{"params": [net.weight]}, {"params": [net.bias]}]))
    with pytest.raises(TypeError, match="neither names nor numbers"):
        optimizer.state[net.weight]["odd"] = {(1, 2): torch.ones(1)}
        TensorDict.from_optimizer(optimizer)


# -- gradients on every container --------------------------------------------------------------
@pytest.mark.parametrize("kind", ["TensorDict", "memmap", "shared", "lazy 0"])
def test_gradients_of_what_is_in_memory(kind: str, tmp_path: Any) -> None:
    td = KINDS[kind](floats(), tmp_path, None).td
    assert not td.requires_grad and td.grad is None and td.detach_() is td
    assert (
        td.requires_grad_() is td and td.requires_grad and not td.data.requires_grad and not td.detach().requires_grad
    )
    (td["a"] * 2).sum().backward()
    assert torch.equal(td.grad["a"], torch.full((4, 2, 3), 2.0)) and td.grad.batch_size == td.batch_size
    td.zero_grad(set_to_none=False)
    assert not td.grad["a"].any()
    assert td.zero_grad() is td and td.grad is None
    assert not td.requires_grad_(False).requires_grad


@pytest.mark.parametrize("kind", ["h5", "zarr", "window"])
def test_what_is_stored_has_no_gradients(kind: str, tmp_path: Any) -> None:
    td = KINDS[kind](floats(), tmp_path, None).td
    assert not td.requires_grad and td.grad is None and td.zero_grad() is td and td.detach_() is td
    assert td.requires_grad_(False) is td
    with pytest.raises(UnsupportedError, match=r"(?s)entries have no gradients.*to_tensordict\(\)\.requires_grad_\(\)"):
        td.requires_grad_()
    assert td.data["a"].shape == (4, 2, 3) and td.to_tensordict().requires_grad_().requires_grad


def test_requires_grad_is_all_or_nothing() -> None:
    td = TensorDict({"a": torch.ones(1), "i": torch.arange(1)})
    with pytest.raises(RuntimeError, match="not torch.int64"):
        td.requires_grad_()
    assert not td["a"].requires_grad
    assert td.grad is None
    td["s"] = "text"
    assert td.grad.to_dict() == {"s": "text"}  # values have no gradients, and stand beside them
