"""What errors say: which class has a method, which keys there are, how a nested key looks."""

from __future__ import annotations

import inspect
import pickle
import re

import pytest
import torch

import tdstore
from tdstore import TensorClass, TensorDict, lazy_stack
from tdstore.errors import DifferentKeysError, KeyNotFoundError, NotAGroupError

KINDS = ["memory", "memmap", "h5", "zarr", "lazy", "window"]
CLASSES = [
    tdstore.TensorDict,
    tdstore.PersistentTensorDict,
    tdstore.LazyStackedTensorDict,
    tdstore.TensorDictParams,
    tdstore.TensorDictBase,
    tdstore.NonTensorData,
    tdstore.NonTensorStack,
]


def sample():
    return TensorDict({"a": torch.zeros(3), "n": {"x": torch.zeros(3), "m": {"y": torch.zeros(3)}}, "s": "text"}, [3])


@pytest.fixture(params=KINDS)
def td(request, tmp_path):
    kind = request.param
    if kind == "lazy":
        yield lazy_stack(list(sample().unbind(0)))
    elif kind == "memory":
        yield sample()
    else:
        made = sample().save(tmp_path / {"zarr": "a.zarr", "memmap": "a"}.get(kind, "a.h5"))
        yield made[:] if kind == "window" else made
        made.close()


# -- classes -------------------------------------------------------------------------------------------
@pytest.mark.parametrize("cls", CLASSES)
def test_methods_can_be_pickled_by_name(cls):
    seen = 0
    for name in dir(cls):
        fn = inspect.getattr_static(cls, name)
        if name[0] == "_" or not inspect.isfunction(fn) or not fn.__module__.startswith("tdstore"):
            continue
        if hasattr(fn, "__wrapped__"):  # a decorated inherited method has the name of the original
            continue
        assert pickle.loads(pickle.dumps(fn)) is fn, fn.__qualname__
        seen += 1
    assert seen > 30


def test_a_wrong_keyword_is_named_with_its_method(td):
    calls = {"map": (len,), "sum": (), "reshape": (3,), "to_dict": (), "clone": ()}
    for name, args in calls.items():
        with pytest.raises(TypeError, match=rf"\b{name}\(\) got an unexpected keyword argument 'num_worker'"):
            getattr(td, name)(*args, num_worker=2)
    for name in ("get", "memmap"):
        with pytest.raises(TypeError):
            getattr(td, name)(num_worker=2)


# -- keys ----------------------------------------------------------------------------------------------
def test_a_missing_key_is_told_with_those_of_its_group(td):
    with pytest.raises(KeyNotFoundError, match=r"key 'typo' not found in a \w+ with keys \['a', 'n', 's'\]"):
        td["typo"]
    with pytest.raises(KeyNotFoundError, match=r"key 'n' / 'typo' not found in 'n', a \w+ with keys \['m', 'x'\]"):
        td["n", "typo"]
    with pytest.raises(KeyNotFoundError, match=r"'n' / 'm' / 'q' not found in 'n' / 'm', a \w+ with keys \['y'\]"):
        td["n", "m", "q"]
    with pytest.raises(KeyNotFoundError, match=r"'n' / 'q' / 'y' not found in 'n', a \w+ with keys \['m', 'x'\]"):
        td["n", "q", "y"]
    with pytest.raises(NotAGroupError, match=r"key 'a' / 'x': 'a' is not a TensorDict"):
        td["a", "x"]


NESTED = re.compile(r"\('n', 'x'\)|n/x|n\.x")


def test_a_nested_key_looks_the_same_everywhere(td):
    """`'n' / 'x'`: neither a tuple nor a text that another key could be."""
    other = TensorDict({"a": torch.zeros(3), "n": {"z": torch.zeros(3)}}, [3])
    there = {"a": torch.zeros(3), "n": {"m": {"y": torch.zeros(3)}}}
    calls = {
        "set_": lambda: td.set_(("n", "x"), torch.zeros(3, 7)),
        "set below": lambda: td.set(("n", "x", "z"), torch.zeros(5)),
        "get": lambda: td.get(("n", "x", "z")),
        "+": lambda: td + other,
        "batch_size": lambda: setattr(td, "batch_size", [3, 4]),
        "schema": lambda: TensorDict.from_schema({("n", "x"): 7}),
        "schema twice": lambda: TensorDict.from_schema({("n", "x"): "int64", "n": {"x": "int64"}}),
        "stack": lambda: torch.stack([sample(), sample().exclude(("n", "x"))]),
        "read": lambda: td.read(out=TensorDict(there, [3])),
        "uneven": lambda: lazy_stack([TensorDict({"n": {"x": torch.zeros(i)}}) for i in (2, 3)]).to_tensordict(),
        "set": lambda: td.lock_().set(("n", "x"), torch.zeros(3)),
        "del": lambda: td.del_(("n", "x")),
        "pop": lambda: td.pop(("n", "x")),
    }
    for name, call in calls.items():
        try:
            call()
        except (RuntimeError, ValueError, KeyError, TypeError, NotImplementedError) as error:
            assert not NESTED.search(str(error).partition("\nHint")[0]), (name, error)
        else:
            pytest.fail(f"{name} was no error")


# -- joining -------------------------------------------------------------------------------------------
@pytest.mark.parametrize("join", [torch.stack, torch.cat, tdstore.stack, tdstore.cat])
def test_joining_different_keys_is_both_errors_of_the_peer(join):
    """`torch.cat` of the peer raises KeyError, `torch.stack` RuntimeError."""
    few = sample().exclude("a", ("n", "x"))
    with pytest.raises(DifferentKeysError, match=r"different keys: 'a' is in 2 of 3\n.*select") as caught:
        join([sample(), few, sample()])
    assert isinstance(caught.value, KeyError) and isinstance(caught.value, RuntimeError)
    below = sample().exclude(("n", "x")).set(("n", "z"), torch.zeros(3))
    with pytest.raises(DifferentKeysError, match=r"'n' / 'x' is in 1 of 2, 'n' / 'z' is in 1 of 2"):
        join([sample(), below])
    assert pickle.loads(pickle.dumps(caught.value)).message == caught.value.message


def test_fields_that_some_objects_lack_are_named():
    class Step(TensorClass):
        obs: torch.Tensor
        reward: torch.Tensor | None = None

    with pytest.raises(DifferentKeysError, match="'reward' is in 1 of 2"):
        torch.stack([Step(obs=torch.zeros(2)), Step(obs=torch.zeros(2), reward=torch.zeros(()))])
