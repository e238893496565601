"""Pointwise functions, arithmetic and reductions, on TensorDicts and on their twins over a store."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import tdstore
import tdstore.tensordicts.persistent.reading as stored
from tdstore.io.blocks import row_ranges

from .cases import seed
from .oracle import OURS, PEER, Values, differences, outcome

UNARY = """abs acos asin atan ceil cos cosh erf erfc exp expm1 floor frac lgamma log log10 log1p log2 neg reciprocal
round sigmoid sign sin sinh sqrt tan tanh trunc""".split()
PREDICATES = "isfinite isnan isneginf isposinf isreal".split()
BINARY = "add sub mul div pow maximum minimum clamp_max clamp_min".split()
TERNARY = "lerp addcmul addcdiv".split()
REDUCTIONS = "sum mean std var prod nansum nanmean amax amin norm logsumexp all any".split()
OVER: list[dict[str, Any]] = [
    {},
    {"dim": 0},
    {"dim": -1},
    {"dim": (0, 1)},
    {"dim": "feature"},
    {"dim": 0, "keepdim": True},
    {"reduce": True},
    {"dim": "feature", "reduce": True},
]
# What the peer has not, or gets wrong; there a loop over leaves is the judge (test_reductions_of_stored_data).
PEER_LACKS = {
    ("prod", "dim=(0, 1)"),  # reduces the first dimension only
    ("prod", "dim=0 keepdim=True"),
    *(
        (name, over)
        for name in ("amax", "amin")
        for over in ("dim=0", "dim=-1", "dim=(0, 1)", "dim='feature'", "dim=0 keepdim=True")
    ),
    *((name, f"dim={dim}{keep}") for name in ("all", "any") for dim, keep in (("(0, 1)", ""), ("'feature'", ""))),
    *((name, "dim=0 keepdim=True") for name in ("all", "any")),
    *(("logsumexp", over) for over in ("dim=0", "dim=-1", "dim='feature'", "dim=0 keepdim=True")),  # loses names
}


def label(kwargs: dict[str, Any]) -> str:
    return " ".join(f"{k}={v!r}" for k, v in kwargs.items())


def build(cls: Any, dtype: torch.dtype = torch.float32, text: bool = True) -> Any:
    seed(0)
    x = (torch.rand(6, 3, 4) * 4 - 1).to(dtype)
    y = (torch.rand(6, 3) * 4 - 1).to(torch.float64 if dtype.is_floating_point else dtype)
    nested = cls({"y": y, **({"s": "hi"} if text else {})}, [6, 3])
    return cls({"x": x, "n": nested}, [6, 3], names=["time", "env"])


def agree(program: Callable[[Any], object]) -> None:
    want, got = outcome(lambda: program(PEER.TensorDict), forgive=True), outcome(lambda: program(OURS.TensorDict))
    found = list(differences(want, got))
    assert not found, "\n".join(found[:6])


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64], ids=str)
@pytest.mark.parametrize("name", [*UNARY, *PREDICATES])
def test_unary(name: str, dtype: torch.dtype) -> None:
    agree(lambda cls: getattr(build(cls, dtype), name)())
    if name in UNARY:
        agree(lambda cls: getattr(build(cls, dtype), f"{name}_")())


@pytest.mark.parametrize("other", ["td", "number", "tensor", "0-d"])
@pytest.mark.parametrize("name", [*BINARY, *(f"{name}_" for name in BINARY)])
def test_binary(name: str, other: str) -> None:
    if other == "tensor" and name in ("clamp_max_", "clamp_min_", "maximum_", "minimum_"):
        # The peer has only numbers and TensorDicts here.
        td = build(tdstore.TensorDict)
        bound = torch.linspace(-1, 1, 18).reshape(6, 3)
        want = {
            k: getattr(v, name[:-1])(bound.reshape(6, 3, *[1] * (v.ndim - 2)).to(v)) for k, v in td.items(True, True)
        }
        assert getattr(td, name)(bound) is td
        assert all(torch.equal(td[k], v) for k, v in want.items())
        return

    def program(cls: Any) -> Any:
        td = build(cls)
        operand = {
            "td": lambda: build(cls).apply(lambda v: v.abs() + 1),
            "number": lambda: 2,
            "tensor": lambda: torch.linspace(1, 2, 18).reshape(6, 3),
            "0-d": lambda: torch.tensor(1.5),
        }[other]()
        getattr(td, name)(operand) if name.endswith("_") else None
        return td if name.endswith("_") else getattr(td, name)(operand)

    agree(program)


@pytest.mark.parametrize("name", [*TERNARY, *(f"{name}_" for name in TERNARY)])
def test_ternary_matches_leaves_by_key(name: str) -> None:
    td = build(tdstore.TensorDict, text=False)
    end = build(tdstore.TensorDict, text=False).apply(lambda v: v + 2)
    other_order = tdstore.TensorDict({"n": end["n"], "x": end["x"]}, [6, 3])
    third: Any = 0.25 if name.startswith("lerp") else end.apply(lambda v: v * 3)
    want = {
        k: getattr(v, name.rstrip("_"))(end[k], third if isinstance(third, float) else third[k])
        for k, v in td.items(True, True)
    }
    got = getattr(td, name)(other_order, third)
    assert (got is td) == name.endswith("_")
    assert all(torch.allclose(got[k], v) for k, v in want.items())


@pytest.mark.filterwarnings("ignore:.*degrees of freedom")  # the deviation of one number, as torch says it
@pytest.mark.parametrize("kwargs", OVER, ids=label)
@pytest.mark.parametrize("name", REDUCTIONS)
def test_reduction(name: str, kwargs: dict[str, Any]) -> None:
    if (name, label(kwargs)) in PEER_LACKS or (name in ("norm", "logsumexp", "all", "any") and "reduce" in kwargs):
        kwargs = {k: v for k, v in kwargs.items() if k != "reduce"}
        if name != "norm":
            by_leaf(name, kwargs)
    elif name == "norm" and kwargs:  # takes no dim
        with pytest.raises(TypeError):
            build(tdstore.TensorDict).norm(**kwargs)
    else:
        agree(lambda cls: getattr(build(cls), name)(**kwargs))


def by_leaf(name: str, kwargs: dict[str, Any]) -> None:
    """The result over a TensorDict is that of a loop over its leaves."""
    td = build(tdstore.TensorDict)
    if not kwargs:
        return
    got = getattr(td, name)(**kwargs)
    dims = kwargs["dim"]
    for key, leaf in td.items(True, True):
        want = leaf
        axes = (
            range(2, leaf.ndim)
            if dims == "feature"
            else [d % 2 for d in (dims if isinstance(dims, tuple) else (dims,))]
        )
        for axis in sorted(axes, reverse=True):
            want = getattr(torch, name)(want, axis, keepdim=kwargs.get("keepdim", False))
        if name in ("all", "any"):
            want = want.bool()
        assert Values(want) == Values(got[key]), key


def test_of_max_there_are_values_and_indices() -> None:
    td = build(tdstore.TensorDict, text=False)
    for name in ("max", "min", "cummax", "cummin"):
        best = getattr(td, name)(0)
        assert type(best) is getattr(torch.return_types, name)
        for key, leaf in td.items(True, True):
            want = getattr(torch, name)(leaf, 0)
            assert torch.equal(best.values[key], want.values)
            assert torch.equal(best.indices[key], want.indices)
        assert best.indices.batch_size == best.values.batch_size
        assert isinstance(getattr(td, name)(0, return_indices=False), tdstore.TensorDict)
    assert td.max(reduce=True) == max(v.max() for _, v in td.items(True, True))
    assert td.min()["x"] == td["x"].min()


def test_dimensions_have_names() -> None:
    td = build(tdstore.TensorDict, text=False)
    assert (td.sum("env") == td.sum(1)).all()
    assert td.mean(("time", "env")).batch_size == torch.Size([])
    with pytest.raises(ValueError, match=r"'nobody'.*'time', 'env'"):
        td.sum("nobody")


def test_bad_reductions() -> None:
    td = build(tdstore.TensorDict, text=False)
    with pytest.raises(IndexError):
        td.sum(2)
    with pytest.raises(ValueError, match="reduces nothing"):
        td.sum(())
    with pytest.raises(TypeError, match="needs dim="):
        td.sum(keepdim=True)
    with pytest.raises(TypeError, match="feature"):
        td.std(dim="feature", keepdim=True)
    with pytest.raises(RuntimeError, match="leaves of one shape"):
        td.sum(dim=0, reduce=True)
    with pytest.raises(RuntimeError, match="no leaf"):
        tdstore.TensorDict({}, [3]).sum(reduce=True)


def test_keys_of_a_reduction_can_be_renamed() -> None:
    td = build(tdstore.TensorDict, text=False)
    assert set(td.sum(key_transform=str.upper).keys(True, True)) == {"X", ("N", "Y")}
    with pytest.raises(KeyError, match="two entries"):
        td.sum(key_transform=lambda key: "same")


@pytest.fixture
def blocks_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored, "row_ranges", lambda rows, row_bytes: row_ranges(rows, row_bytes, 2 * row_bytes))


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64], ids=str)
@pytest.mark.parametrize("kwargs", OVER, ids=label)
@pytest.mark.parametrize("name", [*REDUCTIONS, "max", "min"])
@pytest.mark.usefixtures("blocks_of_two")
def test_reductions_of_stored_data_stream(
    name: str, kwargs: dict[str, Any], dtype: torch.dtype, tmp_path: Path
) -> None:
    td = build(tdstore.TensorDict, dtype)
    kept = td.to_h5(tmp_path / "a.h5")
    want, got = outcome(lambda: getattr(td, name)(**kwargs)), outcome(lambda: getattr(kept, name)(**kwargs))
    found = list(differences(want, got))
    assert not found, "\n".join(found[:6])


@pytest.mark.usefixtures("blocks_of_two")
def test_no_more_than_a_block_is_read_at_once(tmp_path: Path) -> None:
    from tdstore.testing import CountingStore

    kept = build(tdstore.TensorDict).to_h5(tmp_path / "a.h5")
    counting = CountingStore(kept._handle.store)
    kept._handle.store = counting
    kept.std(dim=0)
    assert counting.calls["read"] == 3


@pytest.mark.parametrize(
    "name",
    "bool half float double bfloat16 float16 float32 float64 complex32 complex64 complex128 int int8 int16 int32 int64 "
    "uint8 uint16 uint32 uint64".split(),
)
def test_casts(name: str) -> None:
    agree(lambda cls: getattr(build(cls).abs(), name)().apply(lambda v: v.to(torch.complex128)))
    td = build(tdstore.TensorDict, text=False)
    dtype = getattr(torch, {"half": "float16", "float": "float32", "double": "float64", "int": "int32"}.get(name, name))
    assert all(v.dtype is dtype for v in getattr(td, name)().values(True, True))


@pytest.mark.parametrize("name", ["qint8", "qint32", "quint8", "quint4x2"])
def test_a_quantized_dtype_needs_a_scale(name: str) -> None:
    with pytest.raises(tdstore.errors.UnsupportedError, match="scale"):
        getattr(build(tdstore.TensorDict), name)()
