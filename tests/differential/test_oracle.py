"""The oracle itself: what it must see as different, and as equal."""

from __future__ import annotations

import importlib

import pytest
import torch

from .cases import Case, Cases
from .intended import INTENDED
from .oracle import PEER, Raised, describe, differences, outcome, raises

MODULES = ["access", "columns", "construct", "convert", "index", "lazy", "shape", "structure", "values"]


class Single(PEER.TensorClass):
    value: torch.Tensor


def single(value, batch_size):
    return Single(value, batch_size=batch_size)


def raising(error):
    def program():
        raise error

    return program


def td(**kwargs):
    return PEER.td({"a": torch.arange(3.0), "n": {"b": torch.ones(3)}}, **{"batch_size": [3], **kwargs})


def changed(change):
    other = td()
    change(other)
    return other


DIFFERENT = {
    "dtype": (torch.ones(3), torch.ones(3, dtype=torch.float64)),
    "shape": (torch.ones(3), torch.ones(3, 1)),
    "values": (torch.ones(3), torch.zeros(3)),
    "last place": (torch.ones(3), torch.ones(3) * (1 + 1e-5)),
    "nan": (torch.tensor([float("nan")]), torch.tensor([1.0])),
    "gradient": (torch.ones(3), torch.ones(3, requires_grad=True)),
    "bool and int": (True, 1),
    "tuple and list": ((1,), [1]),
    "length": ([1], [1, 2]),
    "Size and tuple": (torch.Size([1]), (1,)),
    "batch size": (td(), td(batch_size=[])),
    "names": (td(), td(names=["x"])),
    "device": (td(), td(device="cpu")),
    "lock": (td(), td().lock_()),
    "order": (td(), td().select("n", "a")),
    "an entry more": (td(), changed(lambda x: x.set("c", torch.ones(3)))),
    "a nested value": (td(), changed(lambda x: x["n"].set("b", torch.zeros(3)))),
    "a nested batch size": (td(), changed(lambda x: x.set("n", PEER.td({"b": torch.ones(3)}, [3], names=["q"])))),
    "text": (td().set("s", "x"), td().set("s", "y")),
    "text and a stack of text": (td().set("s", "x"), td().set("s", ["x", "x", "x"])),
    "a field of a tensorclass": (single(torch.ones(3), [3]), single(torch.zeros(3), [3])),
    "a field of a tensorclass without rows": (single(torch.ones(3), []), single(torch.zeros(3), [])),
    "a nested tensorclass": (td().set("o", single(torch.ones(3), [3])), td().set("o", single(torch.zeros(3), [3]))),
    "a key view in another order": (td().keys(), td().select("n", "a").keys()),
}


@pytest.mark.parametrize("name", list(DIFFERENT))
def test_sees(name: str) -> None:
    one, other = map(describe, DIFFERENT[name])
    assert list(differences(one, other))
    assert not list(differences(one, one))
    assert not list(differences(other, other))


@pytest.mark.parametrize(
    ("peer", "ours", "same"),
    [
        (KeyError("x"), KeyError("y"), True),
        (KeyError("x"), IndexError("x"), False),
        (RuntimeError("x"), ValueError("x"), True),
        (RuntimeError("x"), TypeError("x"), False),
        (AttributeError("'Tensor' object has no attribute 'del_'"), KeyError("x"), True),
        (IndexError("tuple index out of range"), TypeError("x"), True),
        (KeyError("x"), AttributeError("'Tensor' object has no attribute 'del_'"), False),
        (AttributeError("'Tensor' object has no attribute 'q'"), AttributeError("no attribute"), False),
    ],
)
def test_families(peer: Exception, ours: Exception, same: bool) -> None:
    """A stumble of the peer's may be any refusal of ours, but not a stumble."""
    want, got = outcome(raising(peer), forgive=True), outcome(raising(ours))
    assert bool(list(differences(want, got))) is not same


def test_an_error_is_not_a_result() -> None:
    assert list(differences(describe(None), Raised.of(KeyError("x"))))
    assert list(differences(raises("KeyError"), describe({})))


def test_a_case_fails_when_the_sides_differ() -> None:
    case = Case("one side", lambda M: M.is_peer if calls.append(M) is None and len(calls) > 1 else "first")
    calls: list[object] = []
    with pytest.raises(AssertionError, match="expected 'first'"):
        case.check()


def test_every_intended_difference_belongs_to_a_case() -> None:
    """An entry whose case was renamed would excuse nothing, and be believed."""
    named: set[str] = set()
    for module in MODULES:
        for cases in vars(importlib.import_module(f".test_{module}", __package__)).values():
            if isinstance(cases, Cases):
                named |= set(cases.all)
    for entry in INTENDED:
        assert any(entry.covers(name) for name in named), entry.why
