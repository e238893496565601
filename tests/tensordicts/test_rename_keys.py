"""`rename_keys`: what tensordict 0.15.3 does, on every container, and on stored data and tensorclasses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tdstore import LazyStackedTensorDict, TensorDict, TensorDictParams, lazy_stack, tensorclass
from tdstore.errors import InvalidArgumentError, InvalidKeyError, InvalidTypeError, KeyNotFoundError, NotAGroupError
from tests.surface.containers import KINDS, mixed


@tensorclass
class Fields:
    a: torch.Tensor
    b: torch.Tensor | None = None
    n: Any = None


def sample() -> TensorDict:
    inner = TensorDict({"c": torch.ones(3, 2), "e": TensorDict({}, [3])}, [3])
    return TensorDict({"a": torch.zeros(3), "b": torch.ones(3), "n": inner, "s": "x"}, [3], names=["x"])


def keys(td: Any) -> list[Any]:
    return list(td.keys(True))


N = [("n", "c"), ("n", "e"), "n"]


@pytest.mark.parametrize(
    ("mapping", "after"),
    [
        ({"a": "b", "b": "a"}, [*N, "s", "b", "a"]),
        ({"a": "b", "b": "c"}, [*N, "s", "b", "c"]),
        ({"b": "c", "a": "b"}, [*N, "s", "c", "b"]),
        ({"a": "z"}, ["b", *N, "s", "z"]),
        ({"a": ("n", "z")}, ["b", ("n", "c"), ("n", "e"), ("n", "z"), "n", "s"]),
        ({("n", "c"): "z"}, ["a", "b", ("n", "e"), "n", "s", "z"]),
        ({("n", "c"): "z", ("n", "e"): "y"}, ["a", "b", "s", "z", "y"]),
        ({"n": "m"}, ["a", "b", "s", ("m", "c"), ("m", "e"), "m"]),
        ({"n": ("a", "m"), "a": "q"}, ["b", "s", ("a", "m", "c"), ("a", "m", "e"), ("a", "m"), "a", "q"]),
        ({"a": ("a", "m")}, ["b", *N, "s", ("a", "m"), "a"]),
        ({"n": ("n", "m")}, ["a", "b", "s", ("n", "m", "c"), ("n", "m", "e"), ("n", "m"), "n"]),
        ({"a": ("p", "q", "r")}, ["b", *N, "s", ("p", "q", "r"), ("p", "q"), "p"]),
        ({"s": "t"}, ["a", "b", *N, "t"]),
        ({"a": "a"}, ["a", "b", *N, "s"]),
        ({}, ["a", "b", *N, "s"]),
    ],
)
def test_keys(mapping: Any, after: list[Any]) -> None:
    td = sample()
    assert keys(td.rename_keys(mapping)) == after
    assert keys(td) == keys(sample())
    stack = lazy_stack([td, sample()])
    made = stack.rename_keys(mapping)
    assert type(made) is LazyStackedTensorDict
    assert keys(made) == after
    assert keys(stack) == keys(sample())


@pytest.mark.parametrize(
    ("mapping", "error"),
    [
        ({"n": ("a", "m")}, NotAGroupError),
        ({"a": ("s", "x")}, NotAGroupError),
        ({("n", "c"): "n"}, InvalidArgumentError),
        ({("n", "c"): "n", "n": "q"}, InvalidArgumentError),
        ({"a": "b"}, InvalidArgumentError),
        ({"a": "x", "b": "x"}, InvalidArgumentError),
        ({"a": "x", "b": ("x", "y")}, InvalidArgumentError),
        ({"a": "x", ("a",): "y"}, InvalidArgumentError),
        ({"q": "x"}, KeyNotFoundError),
        ({("a", "q"): "x"}, KeyNotFoundError),
        ({"q": "q"}, KeyNotFoundError),
        ({"a": 1}, InvalidKeyError),
        ({1: "a"}, InvalidKeyError),
        ({"a": ()}, InvalidKeyError),
        ([("a", "b")], InvalidTypeError),
        (None, InvalidTypeError),
    ],
)
def test_refused(mapping: Any, error: type[Exception]) -> None:
    td = sample()
    for container in (td, lazy_stack([td, sample()])):
        with pytest.raises(error):
            container.rename_keys(mapping)
        assert keys(container) == keys(sample())


def test_not_strict() -> None:
    td = sample()
    assert keys(td.rename_keys({"q": "x", ("a", "q"): "y", "b": "z"}, strict=False)) == ["a", *N, "s", "z"]
    with pytest.raises(InvalidArgumentError, match="two entries"):
        td.rename_keys({"q": "x", "a": "x"}, strict=False)
    more = sample().set(("n", "q"), torch.zeros(3))
    made = lazy_stack([td, more]).rename_keys({("n", "q"): "z"}, strict=False)
    assert ["z" in part for part in made.tensordicts] == [False, True]  # type: ignore[attr-defined]
    with pytest.raises(KeyNotFoundError):
        lazy_stack([td, more]).rename_keys({("n", "q"): "z"})


def test_a_nested_tensordict_goes_when_all_elements_lose_it() -> None:
    one, more = TensorDict({"n": {"c": torch.zeros(3)}}, [3]), TensorDict({"n": {"c": torch.zeros(3)}}, [3])
    assert keys(lazy_stack([one, more]).rename_keys({("n", "c"): "n"})) == ["n"]
    more["n", "q"] = torch.zeros(3)
    made = lazy_stack([one, more]).rename_keys({("n", "c"): "z"})
    assert keys(made) == ["n", "z"]
    assert keys(TensorDict({"l": lazy_stack([one, more])}, [2]).rename_keys({("l", "n", "c"): "z"})) == [
        ("l", "n"),
        "l",
        "z",
    ]


def test_entries_are_shared_and_groups_are_not() -> None:
    td = sample().lock_()
    made = td.rename_keys({"a": "z", "b": ("p", "q")})
    assert made["z"] is td["a"] and made["n", "c"] is td["n", "c"] and made["n"] is not td["n"]
    assert not made.is_locked and not made["n"].is_locked
    assert made.names == ["x"] and made["p"].names == ["x"] and made["p"].batch_size == torch.Size([3])


def test_tensorclass() -> None:
    obj = Fields(a=torch.zeros(3), b=torch.ones(3), batch_size=[3])
    made = obj.rename_keys({"a": "b", "b": "a"})
    assert type(made) is Fields and made.a is obj.b and made.b is obj.a
    moved = obj.rename_keys({"b": ("n", "b")})
    assert moved.b is None and moved.n["b"] is obj.b
    with pytest.raises(AttributeError, match="no field 'q'"):
        obj.rename_keys({"a": "q"})
    outer = TensorDict({"f": Fields(a=torch.zeros(3), batch_size=[3])}, [3])
    kept = outer.rename_keys({("f", "a"): "z"})
    assert type(kept["f"]) is Fields and kept["f"].a is None  # the object of a class is never left out
    with pytest.raises(AttributeError, match="no field 'no'"):
        outer.rename_keys({("f", "a"): ("f", "no")})


def test_parameters() -> None:
    params = TensorDictParams(TensorDict({"a": torch.zeros(3), "n": {"b": torch.ones(2)}}))
    made = params.rename_keys({"a": "q"})
    assert type(made) is TensorDict and made["q"] is params["a"]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "redis"])
def test_every_container(kind: str, tmp_path: Path) -> None:
    td = KINDS[kind](mixed(), tmp_path, None).td
    before = list(td.keys(True))
    made = td.rename_keys({"a": ("n", "c"), ("n", "c"): "a"})
    assert torch.equal(made["a"], mixed()["n", "c"]) and torch.equal(made["n", "c"], mixed()["a"])
    assert list(td.keys(True)) == before
    with pytest.raises(InvalidArgumentError):
        td.rename_keys({"a": "s"})
