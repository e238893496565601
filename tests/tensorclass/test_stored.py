"""A tensorclass comes back from every storage as itself, if its class is declared in this process."""

from __future__ import annotations

import pickle
import sys
import warnings

import pytest
import tensordict
import torch

import tdstore
from tdstore import TensorDict, TensorDictBase, lazy_stack, tensorclass
from tdstore.container.core import tensorclasses
from tdstore.container.core.tensorclasses import full_name, lookup, register

from .classes import PLACES, Counted, Inner, Outer, outer

pytestmark = pytest.mark.filterwarnings("error::UserWarning:tdstore")


@pytest.fixture(params=[*PLACES, "redis"])
def place(request, tmp_path):
    if request.param == "redis":
        yield f"{request.getfixturevalue('redis').url}/{tmp_path.name}"
    else:
        yield PLACES[request.param](tmp_path)


def same(made, want):
    assert type(made) is Outer and type(made.inner) is Inner
    assert made.opt is None and made.name == "a" and type(made.name) is str and made.inner.tag == "in"
    assert made.batch_size == want.batch_size and made.t.tolist() == want.t.tolist()
    assert made.inner.x.tolist() == want.inner.x.tolist()


def test_every_storage_gives_the_class_back(place):  # C3
    obj = outer()
    with obj.save(place) as saved:
        same(saved, obj)
    with TensorDict.load(place) as loaded:
        same(loaded, obj)
        same(loaded[1:], obj[1:])
        same(loaded[0], obj[0])
        same(loaded.clone(), obj)
        same(pickle.loads(pickle.dumps(loaded)), obj)
        same(torch.cat([loaded, loaded])[:3], obj)
        assert type(loaded.to_tensordict()) is TensorDict
        assert [row.t.tolist() for row in loaded] == obj.t.tolist()
    with Outer.load(place) as loaded:
        same(loaded, obj)


def test_below_a_tensordict_and_a_lazy_stack(place):
    obj = outer()
    td = TensorDict({"m": obj, "l": lazy_stack([obj, obj + 0])})
    td.save(place).close()
    with tdstore.open(place) as loaded:
        same(loaded["m"], obj)
        same(loaded.clone()["m"], obj)
        same(loaded["l"][1], obj)
        assert type(loaded["l"]) is Outer and loaded["l"].batch_size == (2, 3)
        assert loaded["m", "inner", "tag"] == "in"
    lazy_stack([obj, obj]).save(place).close()
    with tdstore.open(place) as loaded:
        assert type(loaded) is Outer and type(loaded.inner) is Inner
        same(loaded[0], obj)


def test_written_through(place):
    outer().save(place).close()
    other = outer() * 2
    with tdstore.open(place, mode="r+") as stored:
        stored[0] = other[1]
        stored.opt = torch.ones(3)
        stored.name = "b"
        stored.inner = other.inner
    with tdstore.open(place) as stored:
        assert type(stored) is Outer and type(stored.inner) is Inner
        assert stored.t[0].tolist() == other.t[1].tolist() and stored.opt.tolist() == [1, 1, 1] and stored.name == "b"
        assert stored.inner.x.tolist() == [0, 2, 4]
    with tdstore.open(place, mode="r+") as stored:
        stored.opt = None
    with tdstore.open(place) as stored:
        assert stored.opt is None and "opt" not in stored


@pytest.mark.parametrize("storage", [None, "memmap", "h5", "zarr", "shared"])
def test_from_schema(storage, tmp_path):
    Counted.runs = 0
    where = {} if storage is None else {"location": PLACES[storage](tmp_path)}
    made = Outer.from_schema(
        {"t": ((2,), torch.float32), "inner": {"x": ((), torch.int64)}}, batch_size=[4], storage=storage, **where
    )
    assert type(made) is Outer and type(made.inner) is Inner and made.opt is None and made.batch_size == (4,)
    assert not made.t.any() and made.t.shape == (4, 2)
    if storage is not None:
        made.close()
        with tdstore.open(where["location"]) as loaded:
            assert type(loaded) is Outer and type(loaded.inner) is Inner
    with pytest.raises(ValueError, match="no field 'zz'"):
        Outer.from_schema({"zz": ((), torch.int64)})


def test_memmap_and_its_kin(tmp_path):
    obj = outer()
    saved = obj.memmap(tmp_path / "a")
    assert type(saved) is Outer and saved.is_memmap() and saved.saved_path == str(tmp_path / "a")
    with pytest.raises(RuntimeError, match="locked"):
        saved.t = torch.zeros(3)
    loaded = Outer.load_memmap(tmp_path / "a")
    assert loaded.is_memmap() and type(loaded.inner) is Inner and loaded.inner.is_memmap()
    mine = outer()
    assert mine.memmap_(tmp_path / "b") is mine and mine.is_memmap() and type(mine.inner) is Inner
    like = obj.memmap_like(tmp_path / "c")
    assert type(like) is Outer and not like.t.any() and like.name == "a"
    target = outer().zero_()
    assert target.load_memmap_(tmp_path / "a") is target
    same(target, obj)
    assert type(obj.memmap(tmp_path / "d", return_early=True, num_threads=1).result()) is Outer
    assert outer().share_memory_().is_shared()


def test_copy_keeps_the_class(tmp_path):
    outer().save(tmp_path / "a").close()
    tdstore.copy(tmp_path / "a", tmp_path / "b.h5")
    with tdstore.open(tmp_path / "b.h5") as copied:
        same(copied, outer())


def test_an_unknown_class_is_a_tensordict_and_a_warning(place, monkeypatch, tmp_path):
    """Nothing is imported for it, though the module is there to be."""
    (tmp_path / "unseen.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    body = {"__annotations__": {"x": torch.Tensor}, "__module__": "unseen"}
    made = tensorclass(type("Unseen", (), body))(x=torch.arange(2))
    made.save(place).close()
    TensorDict({"m": made}).save(f"{place}2").close()
    assert lookup("unseen.Unseen") is type(made)
    monkeypatch.delitem(tensorclasses._known, "unseen.Unseen")
    with pytest.warns(UserWarning, match="'unseen.Unseen' is not declared"), tdstore.open(place) as td:
        assert isinstance(td, TensorDictBase) and td["x"].tolist() == [0, 1]
    with pytest.warns(UserWarning, match="'unseen.Unseen' is not declared"), tdstore.open(f"{place}2") as td:
        assert isinstance(td["m"], TensorDictBase)
    assert "unseen" not in sys.modules


def test_a_class_that_lost_a_field_does_not_hide_data(tmp_path):
    Local = tensorclass(type("Local", (), {"__annotations__": {"x": torch.Tensor, "y": torch.Tensor}}))
    Local(x=torch.zeros(1), y=torch.ones(1)).save(tmp_path / "m").close()
    assert type(tdstore.load(tmp_path / "m")) is Local
    Local = tensorclass(type("Local", (), {"__annotations__": {"x": torch.Tensor}}))
    with pytest.warns(UserWarning, match="'y', which the class lacks"):
        assert type(tdstore.load(tmp_path / "m")) is TensorDict


def test_names_of_scripts_are_found_again():
    assert lookup(full_name(Outer)) is Outer and lookup("elsewhere.Outer") is None
    only = type("OnlyOnce", (Counted,), {"__module__": "here"})
    register(only)
    assert lookup("__main__.OnlyOnce") is only
    twin = type("OnlyOnce", (Counted,), {"__module__": "twin"})
    register(twin)
    assert lookup("__main__.OnlyOnce") is None and lookup("twin.OnlyOnce") is twin


@tensordict.tensorclass
class PeerInner:
    x: torch.Tensor
    tag: str = "in"


@tensordict.tensorclass
class PeerOuter:
    t: torch.Tensor
    opt: torch.Tensor | None = None
    name: str = "n"
    inner: PeerInner | None = None


def test_a_directory_of_the_peer(tmp_path, monkeypatch):
    inner = PeerInner(x=torch.arange(3), batch_size=[3])
    theirs = PeerOuter(t=torch.arange(6.0).reshape(3, 2), name="a", inner=inner, batch_size=[3])
    theirs.memmap(tmp_path / "one")
    tensordict.TensorDict({"m": theirs}, [3]).memmap(tmp_path / "two")
    with pytest.warns(UserWarning, match="test_stored.Peer(Outer|Inner)"):
        assert type(tdstore.load(tmp_path / "one")) is TensorDict
    for ours, peer in ((Outer, PeerOuter), (Inner, PeerInner)):
        monkeypatch.setitem(tensorclasses._known, full_name(peer), ours)
    same(tdstore.load(tmp_path / "one"), outer())
    same(tdstore.load(tmp_path / "two")["m"], outer())


def test_ours_is_data_for_the_peer(tmp_path):
    outer().memmap(tmp_path / "m")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = PeerOuter.from_tensordict(tensordict.TensorDict.load_memmap(tmp_path / "m"))
    assert theirs.t.tolist() == outer().t.tolist() and theirs.name == "a"
    inner = theirs.inner  # before 0.15 a TensorDict
    assert (inner.tag if tensordict.is_tensorclass(inner) else inner["tag"]) == "in"


def test_state_dicts_go_to_the_peer_and_back():
    theirs = PeerOuter(
        t=torch.zeros(3, 2), inner=PeerInner(x=torch.zeros(3).long(), tag="q", batch_size=[3]), batch_size=[3]
    )
    theirs.load_state_dict(outer().state_dict())
    assert theirs.t.tolist() == outer().t.tolist() and theirs.name == "a" and theirs.inner.tag == "in"
    ours = outer().zero_()
    ours.name = ours.inner.tag = "q"
    ours.load_state_dict(theirs.state_dict())
    same(ours, outer())
    below = TensorDict({"m": outer().zero_()}, [3])
    below.load_state_dict(TensorDict({"m": outer()}, [3]).state_dict())
    same(below["m"], outer())
    nested = outer().zero_()
    nested.load_state_dict(outer().state_dict(flatten=False))
    same(nested, outer())


def test_a_consolidated_file(tmp_path):
    same(outer().consolidate(), outer())
    same(outer().consolidate(tmp_path / "one"), outer())
    same(TensorDict.from_consolidated(tmp_path / "one"), outer())


def test_the_class_opens_plain_data(tmp_path):
    TensorDict({"t": torch.zeros(3, 2)}, [3]).to_h5(tmp_path / "a.h5").close()
    with Outer.from_h5(tmp_path / "a.h5") as made:
        assert type(made) is Outer and made[0].name is None and type(made.clone()) is Outer
    TensorDict({"zz": torch.zeros(3)}).save(tmp_path / "b")
    with pytest.raises(ValueError, match="no field 'zz'"):
        Outer.load(tmp_path / "b")


def test_map_in_a_worker_gives_objects(tmp_path):
    with outer().save(tmp_path / "a.h5") as stored:
        made = stored.map(_named, num_workers=1, chunksize=2)
    assert type(made) is Outer and made.t.tolist() == (outer().t * 2).tolist()


def _named(rows):
    assert rows.name == "a" and type(rows.inner) is Inner
    return rows * 2
