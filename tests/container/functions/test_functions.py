"""torch functions on TensorDicts: what the peer has, as it has it; what users expect beyond; on every container."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import tdstore
from tdstore import TensorDict
from tdstore.container.functions import torch_functions
from tests.peer import is_adopted, tensordict
from tests.torch_integration.containers import CONTAINERS, content, sample

MASK = torch.tensor([[True, False], [False, True], [True, True]])
ROWS = torch.tensor([[1, 0], [0, 0], [1, 1]])

# (name, function of a TensorDict, whether the peer is right too)
PROGRAMS: dict[str, tuple[Callable[[Any], Any], bool]] = {
    "atleast_1d": (lambda td: torch.atleast_1d(td), True),
    "atleast_3d": (lambda td: torch.atleast_3d(td), True),
    "atleast_3d of two": (lambda td: torch.atleast_3d(td, td), False),
    "broadcast_to": (lambda td: torch.broadcast_to(td, (2, 3, 2)), True),
    "cat": (lambda td: torch.cat([td, td], dim=1), True),
    "clone": (lambda td: torch.clone(td), True),
    "empty_like": (lambda td: torch.zeros_like(torch.empty_like(td)), True),
    "flatten": (lambda td: torch.flatten(td), True),
    "flip": (lambda td: torch.flip(td, dims=(0, 1)), True),
    "fliplr": (lambda td: torch.fliplr(td), True),
    "flipud": (lambda td: torch.flipud(td), True),
    "full_like": (lambda td: torch.full_like(td, 2), True),
    "full_like of a dtype": (lambda td: torch.full_like(td, 2, dtype=torch.int32), True),
    "gather": (lambda td: torch.gather(td, 1, ROWS), True),
    "masked_select": (lambda td: torch.masked_select(td, MASK), True),
    "maximum": (lambda td: torch.maximum(td, td * 0 + 1), True),
    "mean": (lambda td: torch.mean(td), True),
    "mean of a dim": (lambda td: torch.mean(td, dim=0, keepdim=True), True),
    "movedim": (lambda td: torch.movedim(td, 0, 1), True),
    "moveaxis": (lambda td: torch.moveaxis(td, 0, 1), True),
    "narrow": (lambda td: torch.narrow(td, 0, 1, 2), True),
    "ones_like": (lambda td: torch.ones_like(td), True),
    "permute": (lambda td: torch.permute(td, (1, 0)), True),
    "rand_like": (lambda td: torch.zeros_like(torch.rand_like(td)), True),
    "randn_like": (lambda td: torch.zeros_like(torch.randn_like(td)), True),
    "roll": (lambda td: torch.roll(td, 1, 0), True),
    "rot90": (lambda td: torch.rot90(td), True),
    "split": (lambda td: torch.split(td, 2), True),
    "split by name": (lambda td: torch.split(tensor=td, split_size_or_sections=[1, 2]), True),
    "squeeze": (lambda td: torch.squeeze(td[:1]), True),
    "stack": (lambda td: torch.stack([td, td], 1), True),
    "std": (lambda td: torch.std(td, 0), True),
    "std without correction": (lambda td: torch.std(td, 0, unbiased=False), False),  # the peer: keepdim=False
    "sum": (lambda td: torch.sum(td, (0, 1)), True),
    "sum of a dtype": (lambda td: torch.sum(td, 0, dtype=torch.float64), True),
    "swapaxes": (lambda td: torch.swapaxes(td, 0, 1), True),
    "swapdims": (lambda td: torch.swapdims(td, 0, 1), True),
    "tile": (lambda td: torch.tile(td, (2, 1)), False),  # the peer repeats the features of some leaves
    "transpose": (lambda td: torch.transpose(td, 0, 1), True),
    "unbind": (lambda td: torch.unbind(td, 1), True),
    "unflatten": (lambda td: torch.unflatten(td, 0, sizes=(3, 1)), False),
    "unsqueeze": (lambda td: torch.unsqueeze(td, -1), True),
    "unsqueeze by name": (lambda td: torch.unsqueeze(input=td, dim=0), False),
    "var": (lambda td: torch.var(td, 0, correction=0), True),
    "where two TensorDicts": (lambda td: torch.where(MASK, td, td + 1), True),
    "where a number": (lambda td: torch.where(MASK, td, 0.5), True),
    "where a number first": (lambda td: torch.where(MASK, 0.5, td), False),
    "where a tensor": (lambda td: torch.where(MASK, td, torch.ones(3, 2)), False),
    "where a tensor first": (lambda td: torch.where(MASK, torch.ones(3, 2), td), False),
    "zeros_like": (lambda td: torch.zeros_like(td), True),
    "l1_loss": (lambda td: F.l1_loss(td, td + 1), True),
    "mse_loss summed": (lambda td: F.mse_loss(td, td * 2, reduction="sum"), True),
    "smooth_l1_loss unreduced": (lambda td: F.smooth_l1_loss(td, td * 3, reduction="none"), True),
    "smooth_l1_loss with beta": (lambda td: F.smooth_l1_loss(td, td * 3, beta=3.0), False),  # the peer drops beta
    "mse_loss to a number": (lambda td: F.mse_loss(td, 0), False),
    "mse_loss to a tensor": (lambda td: F.mse_loss(torch.ones(3, 2), td), False),
    "mse_loss weighted": (lambda td: F.mse_loss(td, td * 3, weight=td), False),
    # What the peer has as methods only.
    "add": (lambda td: torch.add(td, td, alpha=2), False),
    "sub from a tensor": (lambda td: torch.sub(torch.ones(3, 2), td, alpha=2), False),
    "exp": (lambda td: torch.exp(td), False),
    "clamp": (lambda td: torch.clamp(td, 0.3, max=1), False),
    "lerp": (lambda td: torch.lerp(td, td + 1, 0.5), False),
    "amax": (lambda td: torch.amax(td, 0), False),
    "max": (lambda td: torch.max(td, 0).indices, False),
    "softmax": (lambda td: torch.softmax(td, 0), False),
    "reshape": (lambda td: torch.reshape(td, shape=(6,)), False),
    "chunk": (lambda td: torch.chunk(td, 2), False),
    "tensor_split": (lambda td: torch.tensor_split(td, 2), False),
    "repeat_interleave": (lambda td: torch.repeat_interleave(td, 2, dim=0), False),
    "eq": (lambda td: torch.eq(td, td), False),
    "le of a tensor": (lambda td: torch.le(torch.ones(3, 2), td), False),
    "operators of a tensor": (
        lambda td: (lambda t: (t + td, t - td, t * td, t / td, t**td, t < td))(MASK + 1.5),
        False,
    ),
}
# Those in which the peer does right since 0.15.
ADOPTED = "add exp clamp lerp reshape chunk tensor_split repeat_interleave tile".split() + ["where a number first"]


@pytest.mark.parametrize("name", PROGRAMS)
def test_as_the_peer(name):
    program, same = PROGRAMS[name]
    if same or is_adopted(name, ADOPTED):
        assert content(program(sample())) == content(program(sample(tensordict)))
        return
    try:
        theirs = content(program(sample(tensordict)))
    except Exception:
        theirs = None
    assert content(program(sample())) != theirs, "the peer came right: list it as such"


@pytest.mark.parametrize("place", list(CONTAINERS)[1:])
def test_on_every_container(place, tmp_path):
    td = CONTAINERS[place](tmp_path)
    assert content(td) == content(sample())
    for name, (program, _) in PROGRAMS.items():
        assert content(program(td)) == content(program(sample())), name


def test_what_they_give_on_one_leaf():
    """Against torch itself, where the peer is no witness."""
    td, a = sample(), sample()["a"]
    wide = MASK.unsqueeze(-1)
    assert torch.equal(torch.where(MASK, 0.5, td)["a"], torch.where(wide, torch.tensor(0.5), a))
    assert torch.equal(torch.where(MASK, torch.ones(3, 2), td)["a"], torch.where(wide, torch.ones(()), a))
    assert torch.equal(F.smooth_l1_loss(td, td * 3, beta=3.0)["a"], F.smooth_l1_loss(a, a * 3, beta=3.0))
    assert torch.equal(F.mse_loss(td, td * 3, weight=td)["a"], F.mse_loss(a, a * 3, weight=a))
    assert torch.equal(torch.std(td, 0, unbiased=False)["a"], torch.std(a, 0, unbiased=False))
    assert torch.equal(torch.tile(td, (2, 1))["a"], torch.cat([a, a]))
    assert torch.equal(torch.sub(torch.ones(3, 2), td, alpha=2)["a"], 1 - 2 * a)
    assert torch.equal(torch.add(td, td, alpha=2)["a"], a + 2 * a)
    assert F.mse_loss(td, 0).batch_size == torch.Size([])


def test_leaves_are_matched_by_key():
    td = sample()
    turned = TensorDict({"n": td["n"] + 1, "a": td["a"]}, [3, 2])
    assert F.l1_loss(td, turned)["a"] == 0
    with pytest.raises(KeyError, match="'a'"):
        F.l1_loss(td, turned.exclude("a"))


@pytest.mark.parametrize("place", ["TensorDict", "memmap", "h5"])
def test_out_is_written(place, tmp_path):
    td = sample()
    makers = {
        "stack": (lambda out: torch.stack([td, td + 1], out=out), torch.stack([td, td + 1])),
        "cat": (lambda out: torch.cat([td, td + 1], out=out), torch.cat([td, td + 1])),
        "gather": (lambda out: torch.gather(td, 1, ROWS, out=out), td.gather(1, ROWS)),
        "where": (lambda out: torch.where(MASK, td, td + 1, out=out), td.where(MASK, td + 1)),
        "add": (lambda out: torch.add(td, 1, out=out), td + 1),
    }
    for name, (make, want) in makers.items():
        out = torch.zeros_like(want)
        if place == "memmap":
            out = out.memmap(tmp_path / name)
        elif place == "h5":
            out = out.save(tmp_path / f"{name}.h5")
        replaced = place == "h5" or (place, name) == ("TensorDict", "where")  # as by `apply(out=)`
        kept = None if replaced else out["a"]
        assert make(out) is out
        assert content(out) == content(want), name
        assert kept is None or torch.equal(kept, want["a"]), name


@pytest.mark.parametrize("place", ["TensorDict", "lazy stack", "lazy inside"])
def test_autograd_grad(place, tmp_path):
    td = CONTAINERS[place](tmp_path).requires_grad_()
    grads = torch.autograd.grad((td * 2).sum(), td)
    assert type(grads) is type(td)
    assert content(grads) == content(torch.full_like(sample(), 2))
    grads = torch.autograd.grad([(td**2).sum(reduce=True)], td)  # the peer: ValueError
    assert content(grads) == content(sample() * 2)
    grads = torch.autograd.grad(td * 2, td, grad_outputs=torch.ones_like(sample()) * 3)
    assert content(grads) == content(torch.full_like(sample(), 6))


def test_autograd_grad_of_leaves_that_take_no_part():
    td = sample().requires_grad_()
    with pytest.raises(RuntimeError, match="not have been used"):
        torch.autograd.grad(td["a"].sum(), td)
    used = torch.autograd.grad(td["a"].sum(), td, allow_unused=True)
    assert list(used.keys(True, True)) == ["a"]
    zeros = torch.autograd.grad(td["a"].sum(), td, materialize_grads=True)
    assert not zeros["n", "b"].any()


def test_what_is_not_known_is_refused():
    with pytest.raises(TypeError, match="no implementation found|Multiple dispatch failed"):
        torch.fft.fft(sample())
    with pytest.raises(TypeError):
        torch.stack([sample(), object()])


def test_the_table_holds_what_the_peer_lists():
    names = (
        "atleast_1d atleast_2d atleast_3d broadcast_to cat clone empty_like flatten flip fliplr flipud full_like "
        "gather movedim moveaxis narrow ones_like permute rand_like randn_like roll rot90 split squeeze stack swapaxes "
        "swapdims tile unbind unflatten unsqueeze zeros_like masked_select maximum mean sum std var where transpose"
    ).split()
    known = {getattr(torch, name) for name in names} | {F.l1_loss, F.mse_loss, F.smooth_l1_loss, torch.autograd.grad}
    assert known <= set(torch_functions.TABLE)
    assert len(known) == 44


def test_subclasses_of_tensors_take_part():
    parameter = torch.nn.Parameter(torch.ones(3, 2))
    assert content(parameter * sample()) == content(sample())
    assert tdstore.TensorDict({"x": parameter}, [3])["x"] is parameter
