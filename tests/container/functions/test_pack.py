"""`pack` and `PackLayout`: what tensordict 0.15.3 does, on every container."""

from __future__ import annotations

import pickle
from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any

import pytest
import torch

from tdstore import PackLayout, TensorDict, TensorDictParams, UnbatchedTensor, lazy_stack, tensorclass
from tdstore.errors import (
    DeviceError,
    DifferentKeysError,
    DimensionError,
    InvalidArgumentError,
    InvalidTypeError,
    UnevenError,
)
from tests.surface.containers import KINDS, floats


@tensorclass
class Fields:
    a: torch.Tensor
    b: torch.Tensor | None = None


def sample(**more: Any) -> TensorDict:
    nested = {"stress": torch.arange(45.0).view(5, 3, 3)}
    return TensorDict({"v": torch.ones(5, 3), "p": torch.arange(5.0), "nested": nested, **more}, [5])


def test_columns() -> None:
    td = sample()
    flat, layout = td.pack()
    assert flat.shape == (5, 13) and flat.is_contiguous()
    assert layout.keys == (("nested", "stress"), "p", "v")
    assert layout.shapes == (torch.Size([3, 3]), torch.Size([]), torch.Size([3]))
    assert layout.nested == (("nested", torch.Size([]), None),)
    assert (layout.dim, layout.device, layout.cls, layout.offsets, layout.numel) == (-1, None, None, (0, 9, 10), 13)
    assert torch.equal(flat, torch.cat([td["nested", "stress"].flatten(1), td["p"][:, None], td["v"]], 1))
    first, other = td.pack(0)
    assert torch.equal(first, flat.T) and first.is_contiguous() and other.dim == -2 and other != layout
    assert td.pack(1)[1] == layout and hash(td.pack(1)[1]) == hash(layout)
    assert td[0].pack(0)[1] == layout == pickle.loads(pickle.dumps(layout))
    order = TensorDict({"a": {"x": td["p"]}, "a0": td["p"], "a-b": td["p"]}, [5]).pack()[1].keys
    assert order == ("a-b", ("a", "x"), "a0")  # as dotted names


def test_unpack() -> None:
    td = sample()
    flat, layout = td.pack()
    back = layout.unpack(flat)
    assert (back == td).all() and list(back.keys()) == ["nested", "p", "v"]
    assert back["p"].untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()
    assert layout.unpack(torch.zeros(2, 5, 13))["nested"].batch_size == (2, 5)
    assert layout.unpack(torch.zeros(13, dtype=torch.int32))["v"].dtype == torch.int32
    flat, layout = td.pack(0)
    assert (layout.unpack(flat) == td).all()
    deeper = TensorDict({"a": torch.zeros(2, 3), "n": TensorDict({"b": torch.zeros(2, 3, 4)}, [2, 3])}, [2])
    flat, layout = deeper.pack()
    assert layout.nested == (("n", torch.Size([3]), None),)
    assert layout.unpack(flat[:1])["n"].batch_size == (1, 3)
    on = TensorDict({"a": torch.zeros(3, 2)}, [3], device="cpu")
    flat, layout = on.pack()
    assert layout.unpack(flat).device == torch.device("cpu")
    assert layout.unpack(flat.to("meta")).device == torch.device("meta")


@pytest.mark.parametrize("data", [{}, {"a": {}}], ids=["empty", "empty nested"])
def test_no_leaves(data: Any) -> None:
    flat, layout = TensorDict(data, [3]).pack()
    assert flat.shape == (3, 0) and (layout.numel, layout.offsets) == (0, ())
    assert list(layout.unpack(flat).keys(True)) == list(data)
    flat, layout = TensorDict({"a": torch.zeros(3, 0), "b": torch.ones(3, 2)}, [3]).pack()
    assert layout.unpack(flat)["a"].shape == (3, 0)


def test_layout_is_followed() -> None:
    td = sample()
    layout = PackLayout(["v", ("nested", "stress"), "p"], [[3], [3, 3], []])  # type: ignore[arg-type]
    flat, made = td.double().pack(layout=layout)
    assert torch.equal(flat[:, :3], td["v"].double()) and made.keys == layout.keys and made is not layout
    assert td[0].pack(layout=layout)[0].shape == (13,)
    with pytest.raises(DifferentKeysError, match="none is missing, 'z' is not in the layout"):
        sample(z=torch.zeros(5)).pack(layout=layout)
    with pytest.raises(DifferentKeysError, match="'p' is missing"):
        td.exclude("p").pack(layout=layout)
    with pytest.raises(InvalidArgumentError, match="features of 'p' have the shape"):
        sample(p=torch.zeros(5, 2)).pack(layout=layout)
    with pytest.raises(InvalidArgumentError, match="dimension -1, not -2"):
        td.pack(0, layout=layout)
    with pytest.raises(InvalidTypeError, match="layout must be a PackLayout"):
        td.pack(layout=3)  # type: ignore[arg-type]


def test_layouts_are_values() -> None:
    layout = PackLayout(("a",), ((2,),), dim=0)  # type: ignore[arg-type]
    assert layout.unpack(torch.zeros(2, 3))["a"].shape == (3, 2)
    assert PackLayout((("a", "b"),), ((2,),)).unpack(torch.zeros(3, 2))["a"].batch_size == (3,)  # type: ignore[arg-type]
    with pytest.raises(FrozenInstanceError):
        layout.dim = 1  # type: ignore[misc]
    for keys, shapes in ((("a", "b"), ((),)), (("a", "a"), ((), ())), (("a", ("a", "b")), ((), ()))):
        with pytest.raises(InvalidArgumentError):
            PackLayout(keys, shapes)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match="13 columns"):
        sample().pack()[1].unpack(torch.zeros(2, 12))
    with pytest.raises(DimensionError):
        layout.unpack(torch.tensor(1.0))
    with pytest.raises(InvalidTypeError, match="flat must be a tensor"):
        layout.unpack([1])  # type: ignore[arg-type]


@pytest.mark.parametrize("dim", [2, -3])
def test_no_such_dimension(dim: int) -> None:
    with pytest.raises(DimensionError):
        sample().pack(dim)


def test_what_cannot_be_packed() -> None:
    with pytest.raises(InvalidTypeError, match="dim must be an int"):
        sample().pack("a")  # type: ignore[arg-type]
    with pytest.raises(InvalidTypeError, match="dtypes: 'nested' / 'stress' is torch.float32, 'p' torch.int32"):
        sample(p=torch.zeros(5, dtype=torch.int32)).pack()
    with pytest.raises(InvalidTypeError, match="'s', which is no tensor"):
        sample(s="x").pack()
    with pytest.raises(InvalidTypeError, match="'u', which is no tensor"):
        sample(u=UnbatchedTensor(torch.zeros(4))).pack()
    ragged = torch.nested.nested_tensor([torch.zeros(i + 1) for i in range(5)], layout=torch.jagged)
    with pytest.raises(InvalidTypeError, match="no dense tensor"):
        sample(r=ragged).pack()
    with pytest.raises(DeviceError, match="'z' on meta"):
        sample(z=torch.zeros(5, device="meta")).pack()


def test_lazy_stacks() -> None:
    td, layout = sample(), sample().pack()[1]
    flat, same = lazy_stack([td, td.clone()]).pack()
    assert flat.shape == (2, 5, 13) and same == layout
    flat, same = lazy_stack([td, td.clone()], 1).pack()
    assert flat.shape == (5, 2, 13) and same.unpack(flat).batch_size == (5, 2)
    nested = TensorDict({"l": lazy_stack([td, td.clone()])}, [2]).pack()[1]
    assert nested.shapes[0] == (5, 3, 3)
    assert nested.nested == (("l", torch.Size([5]), None), (("l", "nested"), torch.Size([5]), None))
    for other in (sample(q=torch.zeros(5)), sample(p=torch.zeros(5, 2))):
        with pytest.raises(UnevenError):
            lazy_stack([td, other]).pack()
        with pytest.raises(UnevenError):
            TensorDict({"l": lazy_stack([td, other])}, [2]).pack()


def test_tensorclasses() -> None:
    obj = Fields(a=torch.zeros(3), batch_size=[3])
    flat, layout = obj.pack()
    back = layout.unpack(flat)
    assert layout.cls is Fields and type(back) is Fields and back.b is None and torch.equal(back.a, obj.a)
    flat, layout = TensorDict({"c": obj}, [3]).pack()
    assert layout.nested == (("c", torch.Size([]), Fields),) and type(layout.unpack(flat)["c"]) is Fields
    assert TensorDict({"c": {"a": torch.zeros(3)}}, [3]).pack(layout=layout)[1].nested[0][2] is None


def test_gradients() -> None:
    params = TensorDictParams(TensorDict({"a": torch.zeros(3), "n": {"b": torch.ones(2)}}))
    flat, layout = params.pack()
    (layout.unpack(flat * 2)["n", "b"].sum() + flat.sum()).backward()
    assert params["a"].grad.tolist() == [1, 1, 1] and params["n", "b"].grad.tolist() == [3, 3]  # type: ignore[union-attr]
    assert type(layout.unpack(flat)) is TensorDict


def test_compiles() -> None:
    td = sample()
    layout = td.pack()[1]

    def twice(td: TensorDict, layout: PackLayout) -> Any:
        flat, made = td.pack(layout=layout)
        return made.unpack(flat * 2)

    compiled = torch.compile(twice, fullgraph=True, backend="eager")
    assert (compiled(td, layout) == td * 2).all()


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "redis"])
def test_every_container(kind: str, tmp_path: Path) -> None:
    td = KINDS[kind](floats().float(), tmp_path, None).td
    flat, layout = td.pack()
    want, same = floats().float().pack()
    assert torch.equal(flat, want) and layout.keys == same.keys == ("a", ("n", "c"))
