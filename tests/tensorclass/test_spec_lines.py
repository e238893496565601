"""Lines of RL.md 0, 5 and 6 that no other file here shows: what becomes of fields, classes and values."""

from __future__ import annotations

import copy
import dataclasses
import io
import itertools
import pickle
from collections import OrderedDict
from typing import Any, NotRequired

import pytest
import tensordict as peer
import torch
from torch import Tensor

import tdstore
from tdstore import MetaData, TensorClass, TensorDict, TypedTensorDict, lazy_stack, tensorclass
from tdstore.interop import to_tensordict

from .classes import PLACES, Counted, Frozen, Inner, Outer, outer

SAVED = ["memmap", "h5", "zarr"]


# -- 5.1 -------------------------------------------------------------------------------------------
@pytest.mark.parametrize("hint", [int, str, "str", Any, str | None, Tensor | str, float | Tensor])
def test_tensor_only_takes_no_annotation_that_allows_other_things(hint):
    body = {"__annotations__": {"x": hint}}
    for make in (tensorclass, peer.tensorclass):
        with pytest.raises(TypeError, match="tensor_only"):
            make(tensor_only=True)(type("Bad", (), dict(body)))


@pytest.mark.parametrize("hint", [Tensor, Tensor | None, TensorDict, Inner | None, "NoSuchClass", None])
def test_tensor_only_takes_tensors_and_what_cannot_be_resolved(hint):
    made = tensorclass(tensor_only=True)(type("Good", (), {"__annotations__": {"x": Tensor, "y": hint}, "y": None}))
    assert made(x=torch.ones(2)).y is None


# -- 5.2 -------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "change",
    [
        lambda o: o.rename_key_("t", "zz"),
        lambda o: o.create_nested("zz"),
        lambda o: o.set_non_tensor("zz", 1),
        lambda o: o.setdefault("zz", torch.ones(3)),
        lambda o: o.load_state_dict({"zz": torch.ones(3)}, strict=False),
        lambda o: o.__setitem__(0, TensorDict({"zz": 1})),
        lambda o: o.set(("inner", "zz"), 1),
    ],
)
@pytest.mark.parametrize("kind", ["memory", "h5"])
def test_an_object_never_gets_an_entry_that_is_no_field(kind, change, tmp_path):
    """In the peer most of these hide one in it; then it cannot be loaded again."""
    obj = outer() if kind == "memory" else outer().to_h5(tmp_path / "a.h5")
    try:
        change(obj)
    except (AttributeError, ValueError) as error:
        assert "zz" in str(error)
    assert set(obj.keys(True)) == set(outer().keys(True)) and obj.t.tolist() == outer().t.tolist()
    assert obj.rename_key_("t", "opt") is obj and obj.opt.tolist() == outer().t.tolist() and obj.t is None


# -- 5.3 -------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["memory", "lazy", *SAVED])
def test_to_tensordict_leaves_no_class_at_any_level(kind, tmp_path):
    hollow = Outer(t=torch.zeros(3), inner=Inner(x=None, batch_size=[3]), batch_size=[3])
    td = TensorDict({"m": outer(), "h": hollow}, [3])
    if kind == "lazy":
        td = lazy_stack(list(td))
    elif kind != "memory":
        td.save(PLACES[kind](tmp_path)).close()
        td = tdstore.open(PLACES[kind](tmp_path))
    for of in (td, td[:2]):
        plain = of.to_tensordict()
        for key in ("m", ("m", "inner"), "h", ("h", "inner")):
            assert type(plain[key]) is TensorDict and type(plain.clone()[key]) is TensorDict
        assert ("h", "inner", "x") not in plain.keys(True) and type(of["m"]) is Outer
    full = td.to_tensordict(retain_none=True)
    assert full["h", "inner", "x"] is None and full["h", "opt"] is None and full["m", "inner", "tag"] is not None
    plain.save(tmp_path / "plain").close()
    assert type(tdstore.load(tmp_path / "plain")["m"]) is TensorDict


def test_from_dataclass_makes_nested_ones_of_the_classes_of_the_fields():
    part = dataclasses.make_dataclass("Part", [("x", Any), ("tag", str, "in")])
    whole = dataclasses.make_dataclass("Whole", [("t", Any), ("inner", Any, None)])
    for make in (Outer.from_dataclass, Outer.from_any, lambda o: tdstore.from_dataclass(o, dest_cls=Outer)):
        made = make(whole(torch.zeros(2), part(torch.ones(2))))
        assert type(made) is Outer and type(made.inner) is Inner and made.inner.tag == "in" and made.opt is None


def test_from_pytree_of_a_dict_of_fields(tmp_path):
    made = Outer.from_pytree({"t": torch.ones(2), "inner": {"x": [1, 2], "tag": "p"}})
    assert type(made) is Outer and type(made.inner) is Inner and set(made.keys()) == {"t", "inner"}
    made.save(tmp_path / "a")
    assert type(tdstore.load(tmp_path / "a").inner) is Inner and made.to_pytree() is made


def test_from_schema_says_what_it_lacks(tmp_path):
    for schema in ({"inner": {"zz": ((), "int64")}}, {("inner", "zz"): ((), "int64")}):
        with pytest.raises(ValueError, match="Inner has no field 'zz'"):
            Outer.from_schema(schema, batch_size=[2])
    for storage in ("h5", "zarr"):
        with pytest.raises(ValueError, match="needs a location"):
            Outer.from_schema({"t": ((), "int64")}, batch_size=[2], storage=storage)
    with pytest.raises(ValueError, match="installed: .*h5.*memmap.*redis.*zarr"):
        Outer.from_schema({"t": ((), "int64")}, batch_size=[2], storage="nope")


def test_dragonfly_is_a_name_of_redis(redis):
    where = {"host": "localhost", "port": redis.port}
    made = Outer.from_schema({"t": ((2,), "float32")}, batch_size=[8], storage="dragonfly", **where)
    assert type(made) is Outer and made.t.shape == (8, 2) and not made.t.any()
    made.close()


# -- 5.4 -------------------------------------------------------------------------------------------
def test_futures_of_everything_that_saves(tmp_path):
    obj, td = outer(), outer().to_tensordict()
    assert type(obj.memmap(tmp_path / "a", num_threads=2, return_early=True).result()) is Outer
    assert type(obj.memmap_like(tmp_path / "b", return_early=True).result()) is Outer
    assert obj.memmap_(tmp_path / "c", num_threads=2, return_early=True).result() is obj and obj.is_memmap()
    assert td.memmap_(tmp_path / "d", num_threads=2, return_early=True).result() is td and td.is_memmap()
    assert outer().consolidate(tmp_path / "e", return_early=True).result().is_consolidated()


def test_the_two_part_state_dict_of_older_versions():
    inner = OrderedDict(x=torch.ones(3), __batch_size=torch.Size([3]), __device=None)
    parts = OrderedDict(t=torch.ones(3, 2), __batch_size=torch.Size([3]), __device=None)
    parts["inner"] = OrderedDict(_tensordict=inner, _non_tensordict=OrderedDict(tag="L"))
    obj = outer()
    obj.load_state_dict(OrderedDict(_tensordict=parts, _non_tensordict=OrderedDict(name="N", opt=None)))
    assert obj.t.sum() == 6 and obj.inner.x.tolist() == [1, 1, 1]
    assert (obj.name, obj.inner.tag, obj.opt) == ("N", "L", None)


def through_torch(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


class State(TypedTensorDict):
    x: Tensor
    mask: NotRequired[Tensor]


@pytest.mark.parametrize(
    "make",
    [
        outer,
        lambda: TensorDict({"m": outer()}, [3])["m"],
        lambda: lazy_stack([outer()[0], outer()[1]]),
        lambda: outer().consolidate(),
        lambda: Frozen(x=torch.ones(2)),
        lambda: State(x=torch.ones(2)),
    ],
)
def test_torch_load_knows_the_classes_of_the_process(make):
    obj = make()
    made = through_torch({"o": obj})["o"]
    locked = obj.is_locked and not obj.is_consolidated()  # one buffer is unlocked where it arrives
    assert type(made) is type(obj) and made.is_locked is locked and (made == obj).all()
    again = through_torch({"o": made})["o"]
    assert type(again) is type(obj) and (again == obj).all()


class Call:
    def __init__(self, *args: Any) -> None:
        self.args = args

    def __reduce__(self) -> Any:
        return Counted, self.args


@pytest.mark.parametrize("args", [(), (torch.zeros(2),)])
def test_a_file_cannot_call_a_constructor(args):
    Counted.runs = 0
    try:
        assert not isinstance(through_torch(Call(*args)), Counted)
    except (TypeError, pickle.UnpicklingError):
        pass
    assert Counted.runs == 0


def test_a_class_of_a_dataclass_is_pickled_in_one_buffer():
    made = tdstore.from_dataclass(Kept(torch.ones(2)))
    assert type(pickle.loads(pickle.dumps(made.consolidate()))) is type(made)


@dataclasses.dataclass
class Kept:
    x: Tensor


# -- dataclass tools -------------------------------------------------------------------------------
def test_fields_that_are_not_set_are_passed_over():
    class Wide(State):
        y: Tensor

    bare, full = State(x=torch.zeros(3), batch_size=[3]), State(x=torch.zeros(3), mask=torch.ones(3), batch_size=[3])
    assert [f.name for f in dataclasses.fields(State)] == ["x", "mask"] and list(dataclasses.asdict(bare)) == ["x"]
    assert [f.name for f in dataclasses.fields(bare)] == ["x"] and list(dataclasses.asdict(full)) == ["x", "mask"]
    made = dataclasses.replace(bare, x=torch.ones(3))
    assert type(made) is State and made.batch_size == (3,) and made.x.sum() == 3 and "mask" not in made
    assert dataclasses.replace(bare, mask=torch.ones(3)).mask.sum() == 3
    assert dataclasses.replace(full, x=torch.ones(3)).mask is full.mask
    assert dataclasses.replace(Wide(x=torch.zeros(1), y=torch.ones(1)), x=torch.ones(1)).y.tolist() == [1]
    assert [_matched(o) for o in (bare, full)] == ["x", "x and mask"]


def _matched(state: State) -> str:
    match state:
        case State(x=_, mask=_):
            return "x and mask"
        case State(x=_):
            return "x"
    return ""


@pytest.mark.parametrize("kind", SAVED)
def test_dataclass_tools_of_what_is_stored(kind, tmp_path):
    outer().save(PLACES[kind](tmp_path)).close()
    with tdstore.open(PLACES[kind](tmp_path)) as obj:
        made = dataclasses.replace(obj, t=torch.ones(3, 2))
        assert type(made) is Outer and made.inner.x.tolist() == [0, 1, 2] and made.opt is None and made.t.sum() == 6
        told = dataclasses.asdict(obj)
        assert list(told) == ["t", "opt", "name", "inner"] and told["inner"]["tag"] == "in" and told["opt"] is None
        match obj:
            case Outer(t, None, "a", Inner(x=x)):
                assert t.tolist() == outer().t.tolist() and x.tolist() == [0, 1, 2]
            case _:
                pytest.fail("does not match")


def test_replace_may_take_another_batch_size():
    made = dataclasses.replace(outer(), t=torch.ones(3, 2), batch_size=[])
    assert made.batch_size == () and made.t.shape == (3, 2)
    assert dataclasses.replace(Outer(t=torch.ones(3), batch_size=[3], names=["n"]), name="q").names == ["n"]


# -- values and modules ----------------------------------------------------------------------------
@pytest.mark.parametrize("value", ["v1", None, 3, {"a": (1, 2)}])
def test_metadata_stays_metadata(value, tmp_path):
    td = TensorDict({"m": MetaData(value), "s": "plain", "x": torch.zeros(2)}, [2])
    td.consolidate(tmp_path / "one")
    live = (TensorDict.from_consolidated(tmp_path / "one"), through_torch(td))
    for made in itertools.chain(live, _saved(td, tmp_path)):
        assert type(made.get("m")) is MetaData and made["m"] == value and type(made.get("s")) is not MetaData
        assert torch.stack([made[0], made[1]])["m"] == value
    theirs = peer.TensorDict.from_consolidated(tmp_path / "one")
    assert theirs["s"] == "plain" and ("m" not in theirs.keys() or theirs["m"] == value)  # noqa: SIM118


def _saved(td, tmp_path):
    for kind in SAVED:
        td.save(PLACES[kind](tmp_path)).close()
        with tdstore.open(PLACES[kind](tmp_path)) as made:
            yield made


def test_arithmetic_with_integers_beside_parameters():
    """A RuntimeError of torch in the peer: a batch norm has such buffers."""
    td = TensorDict.from_module(torch.nn.BatchNorm1d(2))
    made = td + 1
    made["weight"].sum().backward()
    assert made["num_batches_tracked"] == 1 and td["weight"].grad.tolist() == [1, 1]
    assert type(tdstore.TensorDictParams(td) * 2) is TensorDict and (-td)["num_batches_tracked"] == 0


def test_a_folder_for_the_peer_with_the_class(tmp_path):
    """What interop gives writes the peer's own layout; ours opens that as the class again."""
    to_tensordict(outer()).memmap(tmp_path / "m")
    made = tdstore.load(tmp_path / "m")
    assert type(made) is Outer and type(made.inner) is Inner and made.name == "a" and made.opt is None
    theirs = peer.TensorDict.load_memmap(tmp_path / "m")
    assert peer.is_tensorclass(theirs) and type(theirs).__name__ == "Outer" and theirs.inner.tag == "in"


def test_vmap_runs_no_post_init():
    made = Counted(x=torch.zeros(3), batch_size=[3])
    Counted.runs = 0
    assert torch.vmap(lambda row: row.x + 1)(made).tolist() == [1, 1, 1] and copy.deepcopy(made).x.sum() == 0
    assert Counted.runs == 0


class Holds(TensorClass):
    o: State


def test_a_typed_tensordict_as_a_field_may_have_other_keys():
    made = Holds.from_schema({"o": {"x": ((), "int64"), "more": ((), "int64")}}, batch_size=[2])
    assert type(made.o) is State and "more" in made.o
    assert "mask" not in made.to_tensordict(retain_none=True)["o"]


# -- 0 ---------------------------------------------------------------------------------------------
BAD = {
    "a nested shape": lambda o: {"t": torch.ones(3, 2), "inner": {"x": torch.ones(4)}},
    "a nested name": lambda o: {"t": torch.ones(3, 2), "inner": {"zz": torch.ones(3)}},
    "the second of two": lambda o: {("inner", "x"): torch.ones(3).long(), "t": torch.ones(4, 2)},
    "a nested object": lambda o: {"t": torch.ones(3, 2), "inner": TensorDict({"x": torch.ones(3), "zz": 1}, [])},
}


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("kind", ["memory", "lazy", "h5", "zarr"])
def test_an_update_is_all_or_nothing(kind, inplace, bad, tmp_path):
    obj = lazy_stack(list(outer())) if kind == "lazy" else outer()
    if kind in SAVED:
        obj = obj.save(PLACES[kind](tmp_path))
    with pytest.raises((ValueError, AttributeError, RuntimeError)):
        obj.update(BAD[bad](obj), inplace=inplace)
    assert obj.t.tolist() == outer().t.tolist() and obj.inner.x.tolist() == [0, 1, 2]
    assert set(obj.keys(True)) == set(outer().keys(True))
