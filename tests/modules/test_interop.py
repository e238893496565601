"""tdstore.interop: to and from the containers of the tensordict package, around the same tensors."""

from __future__ import annotations

import dataclasses
import pickle
from typing import Any

import pytest
import tensordict as peer
import torch
from torch import nn

import tdstore
from tdstore import MetaData, NonTensorStack, TensorDict, TensorDictParams, UnbatchedTensor, interop
from tdstore.interop import from_tensordict, to_tensordict

pytestmark = pytest.mark.filterwarnings("error")  # who converts is not warned of what they did not write


def sample() -> Any:
    inner = TensorDict({"b": torch.zeros(2, 3, dtype=torch.bfloat16), "t": "deep"}, [2, 3])
    td = TensorDict({"a": torch.ones(2), "n": inner, "r": NonTensorStack("x", "y"), "e": {}}, [2], names=["time"])
    return td.set("grid", NonTensorStack.from_list([["a", "b"], ["c", "d"]], 2)).set_non_tensor("m", {"k": [1, (2,)]})


def test_there_and_back_around_the_same_tensors() -> None:
    ours = sample().lock_()
    theirs = to_tensordict(ours)
    assert type(theirs) is peer.TensorDict and theirs.is_locked and theirs.names == ["time"]
    assert theirs["a"] is ours["a"] and theirs["n", "b"] is ours["n", "b"] and theirs["n"].batch_size == (2, 3)
    assert theirs["r"] == ["x", "y"] and theirs[1]["r"] == "y" and theirs["grid"] == [["a", "b"], ["c", "d"]]
    assert theirs["m"] == {"k": [1, (2,)]} and theirs["n", "t"] == "deep" and theirs["e"].is_empty()
    back = from_tensordict(theirs)
    assert type(back) is TensorDict and back.is_locked and back.names == ["time"]
    assert list(back.keys(True)) == list(ours.keys(True)) and back["a"] is ours["a"]
    assert back["n"].batch_size == (2, 3) and back["grid"] == ours["grid"] and back["m"] == ours["m"]
    assert back["r"] == ["x", "y"] and type(back["n", "t"]) is str


def test_lazy_stacks_keep_their_elements() -> None:
    elements = [TensorDict({"a": torch.ones(n), "s": str(n)}) for n in (2, 3)]
    ours = TensorDict({"x": tdstore.lazy_stack(elements)})
    theirs = to_tensordict(ours)
    assert type(theirs["x"]) is peer.LazyStackedTensorDict and theirs["x"][1]["a"] is elements[1]["a"]
    back = from_tensordict(theirs)["x"]
    assert type(back) is tdstore.LazyStackedTensorDict and back[1]["a"] is elements[1]["a"] and back[0]["s"] == "2"
    assert from_tensordict(peer.lazy_stack([peer.TensorDict({"a": torch.ones(2, 1)}, [2])] * 3, 1)).stack_dim == 1


def test_parameters_stay_parameters() -> None:
    ours = TensorDictParams({"a": torch.ones(2), "n": {"b": torch.ones(1), "i": torch.arange(2)}}, lock=True)
    theirs = to_tensordict(ours)
    assert isinstance(theirs, peer.TensorDictParams) and theirs["n", "b"] is ours["n", "b"]
    assert [n for n, _ in theirs.named_parameters()] == ["a", "n.b"]
    back = from_tensordict(theirs)
    assert isinstance(back, TensorDictParams) and back["a"] is ours["a"]
    net = nn.Linear(2, 2)
    with to_tensordict(TensorDict.from_module(net).data.clone().zero_()).to_module(net):
        assert net(torch.ones(2)).tolist() == [0, 0]


def test_kinds_of_values() -> None:
    ours = TensorDict({"m": MetaData("v1", [2]), "u": UnbatchedTensor(torch.ones(7))}, [2])
    theirs = to_tensordict(ours)
    assert isinstance(theirs.get("m"), peer.MetaData) and isinstance(theirs.get("u"), peer.UnbatchedTensor)
    back = from_tensordict(theirs)
    assert type(back.get("m")) is MetaData and back["m"] == "v1"
    assert type(back.get("u")) is UnbatchedTensor and back.get("u").data.data_ptr() == ours.get("u").data.data_ptr()


def test_files_are_shared(tmp_path: Any) -> None:
    ours = TensorDict({"a": torch.zeros(3)}, [3]).memmap(tmp_path / "ours")
    theirs = to_tensordict(ours)
    theirs["a"][1] = 5
    assert theirs.is_locked and ours["a"].tolist() == [0, 5, 0]
    mapped = peer.TensorDict({"a": torch.zeros(3)}, [3]).memmap(tmp_path / "theirs")
    back = from_tensordict(mapped)
    back["a"][2] = 7
    assert mapped["a"].tolist() == [0, 0, 7] and type(back["a"]) is torch.Tensor


@pytest.mark.parametrize("location", ["x.h5", "x.zarr"])
def test_what_is_stored_is_read(tmp_path: Any, location: str) -> None:
    sample().save(tmp_path / location).close()
    stored = tdstore.open(tmp_path / location)
    theirs = to_tensordict(stored)
    assert type(theirs) is peer.TensorDict and theirs["n", "b"].dtype is torch.bfloat16 and theirs["r"] == ["x", "y"]
    assert to_tensordict(stored[1])["r"] == "y" and to_tensordict(stored[1:])["a"].shape == (1,)


def test_their_storages(tmp_path: Any) -> None:
    stored = peer.TensorDict({"a": torch.arange(3), "n": {"b": torch.ones(3)}}, [3]).to_h5(str(tmp_path / "theirs.h5"))
    assert from_tensordict(stored)["n", "b"].tolist() == [1, 1, 1]
    stored.close()


# -- tensorclasses -----------------------------------------------------------------------------
class Inner(tdstore.TensorClass["nocast"]):
    y: torch.Tensor
    count: int = 3


class Step(tdstore.TensorClass["shadow"]):
    x: torch.Tensor
    name: str = "none"
    inner: Inner | None = None
    late: torch.Tensor | None = dataclasses.field(default=None, kw_only=True)
    data: torch.Tensor | None = dataclasses.field(default=None, init=False)

    def twice(self) -> torch.Tensor:
        return self.x * 2


class TheirInner(peer.TensorClass):
    y: torch.Tensor

    def double(self) -> torch.Tensor:
        return self.y * 2


@peer.tensorclass(frozen=True)
class Theirs:
    x: torch.Tensor
    name: str
    inner: TheirInner | None = None
    late: torch.Tensor | None = None


def step(n: int = 2) -> Any:
    return Step(x=torch.ones(n), name="q", inner=Inner(y=torch.zeros(n, 3), batch_size=[n]), batch_size=[n])


def test_our_tensorclass_gets_one_of_theirs_with_its_fields() -> None:
    ours = step()
    theirs = to_tensordict(ours)
    assert peer.is_tensorclass(theirs) and type(theirs).__name__ == "Step" and not hasattr(theirs, "twice")
    assert theirs.x is ours.x and theirs.name == "q" and theirs.late is None and theirs.batch_size == (2,)
    assert theirs.inner.y is ours.inner.y and theirs.inner.count == 3 and theirs.data is None
    assert type(to_tensordict(step())) is type(theirs) is type(torch.stack([theirs, theirs])[0])
    assert type(theirs)(x=torch.ones(1), name="z", batch_size=[1]).late is None
    again = from_tensordict(theirs)
    assert type(again) is Step and type(again.inner) is Inner and again.x is ours.x and again.twice()[0] == 2
    assert from_tensordict(pickle.loads(pickle.dumps(theirs))).name == "q"


def test_tensorclasses_inside_locked_and_stacked() -> None:
    theirs = to_tensordict(TensorDict({"s": step()}, [2]).lock_())
    assert peer.is_tensorclass(theirs["s"]) and theirs["s"].is_locked
    back = from_tensordict(theirs)
    assert type(back["s"]) is Step and back["s"].is_locked
    stack = to_tensordict(tdstore.lazy_stack([step(1), step(2)]))
    assert peer.is_tensorclass(stack) and stack[1].x.shape == (2,) and stack[1].inner.y.shape == (2, 3)
    back = from_tensordict(stack)
    assert type(back) is Step and isinstance(back._tensordict, tdstore.LazyStackedTensorDict) and back[1].name == "q"


def test_a_stored_tensorclass_is_read(tmp_path: Any) -> None:
    step(3).save(tmp_path / "x.h5").close()
    stored = tdstore.open(tmp_path / "x.h5")
    rows = to_tensordict(stored[1:])
    assert peer.is_tensorclass(rows) and rows.x.shape == (2,) and rows.inner.count == 3
    stored.close()


def test_their_tensorclass_gets_one_of_ours(tmp_path: Any) -> None:
    inner = TheirInner(y=torch.ones(2), batch_size=[2])
    theirs = Theirs(x=torch.ones(2), name="w", inner=inner, batch_size=[2])
    ours = from_tensordict(theirs)
    assert tdstore.is_tensorclass(ours) and ours.x is theirs.x and ours.name == "w" and ours.late is None
    assert ours.inner.y is inner.y and type(ours[0]) is type(ours) is type(from_tensordict(theirs))
    with pytest.raises(dataclasses.FrozenInstanceError):
        ours.x = torch.zeros(2)
    back = to_tensordict(ours)
    assert type(back) is Theirs and torch.equal(back.inner.double(), torch.full((2,), 2.0))
    assert type(pickle.loads(pickle.dumps(ours))) is type(ours)
    ours.save(tmp_path / "theirs")
    assert type(tdstore.load(tmp_path / "theirs")) is type(ours)


def test_a_pair_keeps_its_methods() -> None:
    class Mine(tdstore.TensorClass):
        y: torch.Tensor

        def triple(self) -> torch.Tensor:
            return self.y * 3

    class Other(peer.TensorClass):
        y: torch.Tensor

        def triple(self) -> torch.Tensor:
            return self.y * 3

    interop.register_tensorclass(Mine, Other)
    theirs = to_tensordict(Mine(y=torch.ones(2)))
    assert type(theirs) is Other and theirs.triple()[0] == 3 and type(from_tensordict(theirs)) is Mine
    with pytest.raises(ValueError, match="Step and Other differ in the fields data, inner, late, name, x, y"):
        interop.register_tensorclass(Step, Other)
    for pair in ((Other, Mine), (Mine, int), (int, Other), (Mine(y=torch.ones(1)), Other)):
        with pytest.raises(TypeError, match="is not a tensorclass of"):
            interop.register_tensorclass(*pair)


def test_a_class_of_the_same_name_and_fields_is_taken_for_the_same(tmp_path: Any) -> None:
    def declare(base: Any, more: dict[str, Any]) -> Any:
        body = {"__annotations__": {"x": torch.Tensor, **more}, "__module__": __name__, "__qualname__": "Twin"}
        return type(base)("Twin", (base,), body)

    mine = declare(tdstore.TensorClass, {})
    assert type(from_tensordict(declare(peer.TensorClass, {})(x=torch.ones(1)))) is mine
    other = from_tensordict(declare(peer.TensorClass, {"z": torch.Tensor})(x=torch.ones(1), z=torch.tensor(3)))
    assert type(other) is not mine and other.z == 3
    mine(x=torch.ones(1)).save(tmp_path / "x").close()
    assert type(tdstore.load(tmp_path / "x")) is mine  # what the user declared, and not what was made for the other


def test_neither_takes_anything_else() -> None:
    with pytest.raises(TypeError, match="takes a container of tdstore, not a TensorDict"):
        to_tensordict(peer.TensorDict())
    with pytest.raises(TypeError, match="takes a container of tensordict, not a TensorDict"):
        from_tensordict(TensorDict())
