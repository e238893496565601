"""`TensorAttrs`, and a TensorDict of them as the target of `to`."""

from __future__ import annotations

import pickle

import pytest
import tensordict
import torch

import tdstore
from tdstore import TensorAttrs, TensorDict, lazy_stack

from .classes import Inner, outer


def sample(m, dtype=torch.float64):
    nested = m.TensorDict({"b": torch.ones(3, 2, dtype=torch.int32)}, [3])
    return m.TensorDict({"a": torch.zeros(3, 4, dtype=dtype), "n": nested, "s": "x"}, [3])


def facts(attrs):
    return (attrs.tgt_device, attrs.tgt_dtype, attrs.tgt_shape, tuple(attrs.batch_size))


@pytest.mark.parametrize("fields", [("device", "dtype", "shape"), ("dtype",), (), "shape"])
def test_says_what_the_peer_says(fields):
    ours, theirs = (sample(m).attrs(fields=fields) for m in (tdstore, tensordict))
    assert ours.batch_size == theirs.batch_size == ours["n"].batch_size == torch.Size([])
    assert set(ours.keys(True)) == {"a", "n", "s", ("n", "b")} and set(theirs.keys()) == set(ours.keys())
    for key in ("a", ("n", "b")):
        assert type(ours[key]) is TensorAttrs and facts(ours[key]) == facts(theirs[key])
        assert ours.get(key) is ours[key]
    assert ours["s"] == theirs["s"] == "x"
    assert not ours.is_locked


@pytest.mark.parametrize("m", [tdstore, tensordict])
def test_each_leaf_becomes_as_told(m):
    td = sample(m)
    like = m.TensorDict({"a": m.TensorAttrs(tgt_dtype=torch.int8, batch_size=[])}, [])
    made = td.to(like)
    assert (made["a"].dtype, made["n", "b"].dtype, made["s"]) == (torch.int8, torch.int32, "x")
    assert made.batch_size == td.batch_size and td["a"].dtype is torch.float64
    assert made["n", "b"] is td["n", "b"]
    made = sample(m, torch.float16).to(td.attrs())
    assert made["a"].dtype is torch.float64 and made["a"].shape == (3, 4)


def test_the_device_is_that_of_all_leaves_or_none():
    td = TensorDict(a=torch.zeros(2), b=torch.zeros(2), device="cpu")
    made = td.to(TensorDict(a=TensorAttrs("meta")))  # the peer stumbles over the string
    assert (made["a"].device.type, made["b"].device.type, made.device) == ("meta", "cpu", None)
    assert td.to(td.attrs()).device == torch.device("cpu")
    assert td.device == td["a"].device == torch.device("cpu")
    assert td.to(TensorAttrs("meta", torch.int8)).device == torch.device("meta")
    assert td.to(TensorDict(a=TensorAttrs(tgt_dtype=torch.int8)), inplace=True) is td and td["a"].dtype is torch.int8


@pytest.mark.parametrize("place", ["memmap", "h5", "window", "zarr"])
def test_of_what_is_stored(place, tmp_path):
    suffix = {"h5": ".h5", "window": ".h5", "zarr": ".zarr"}.get(place, "")
    with sample(tdstore).save(tmp_path / f"m{suffix}") as stored:
        td = stored[1:] if place == "window" else stored
        attrs = td.attrs()
        assert attrs["n", "b"].tgt_dtype is torch.int32 and attrs["a"].tgt_shape == (len(td), 4)
        made = td.to(TensorDict(n=TensorDict(b=TensorAttrs(tgt_dtype=torch.float16))))
        assert type(made) is TensorDict and made["n", "b"].tolist() == [[1.0, 1.0]] * len(td)
        assert (made["n", "b"].dtype, made["a"].dtype, made["s"]) == (torch.float16, torch.float64, "x")


def test_of_a_lazy_stack_whose_elements_differ():
    stack = lazy_stack([TensorDict(x=torch.zeros(2)), TensorDict(x=torch.zeros(3, dtype=torch.float64))])
    attrs = stack.attrs()["x"]  # the peer cannot say
    assert (attrs.tgt_shape, attrs.tgt_dtype) == (torch.Size([2, -1]), torch.float64)
    assert [td["x"].dtype for td in stack.to(stack.attrs())] == [torch.float64] * 2


def test_of_a_tensorclass():
    obj = outer()
    attrs = obj.attrs()
    assert type(attrs) is type(obj) and type(attrs.inner) is Inner and attrs.t.tgt_dtype is torch.float32
    attrs.inner.x = TensorAttrs(tgt_dtype=torch.int8)
    made = obj.to(attrs)
    assert type(made) is type(obj) and made.inner.x.dtype is torch.int8 and made.t is obj.t and made.name == "a"


def test_travels_and_is_kept_as_a_value(tmp_path):
    attrs = sample(tdstore).attrs()
    assert facts(pickle.loads(pickle.dumps(attrs))["a"]) == facts(attrs["a"])
    both = torch.stack([attrs, attrs])["a"]
    assert type(both) is TensorAttrs and facts(both)[:3] == facts(attrs["a"])[:3] and both.batch_size == (2,)
    with attrs.save(tmp_path / "a.h5") as loaded:
        assert type(loaded.get("a")) is TensorAttrs and facts(loaded["a"])[:3] == facts(attrs["a"])[:3]


def test_errors():
    with pytest.raises(ValueError, match="device, dtype, shape, not 'x'"):
        TensorDict(a=torch.zeros(2)).attrs(fields=["x"])
    assert facts(TensorAttrs.from_tensor(torch.zeros(2), fields=["shape"])) == (None, None, torch.Size([2]), ())
