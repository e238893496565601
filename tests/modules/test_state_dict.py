"""state_dict and load_state_dict on every container, and their forms."""

from __future__ import annotations

import io
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import nn

import tdstore
from tdstore import MetaData, NonTensorStack, TensorDict, UnbatchedTensor
from tdstore.errors import LockedError, ReadOnlyError, StateDictError
from tests.surface.containers import KINDS, mixed


def same(a: Any, b: Any) -> bool:
    return a.batch_size == b.batch_size and bool((a == b).all()) and a.get("s") is not None


def texts(value: Any) -> set[str]:
    """The values of an entry: one for all, or one per row where rows have their own."""
    return {value} if isinstance(value, str) else set().union(*map(texts, value))


@pytest.fixture(params=[k for k in KINDS if k != "shared"])
def place(request: Any, tmp_path: Any) -> Any:
    server = request.getfixturevalue("redis") if request.param == "redis" else None
    return KINDS[request.param](mixed(start=0), tmp_path, server)


# -- every container ---------------------------------------------------------------------------
def test_state_dict_of_every_container(place: Any) -> None:
    want, got = mixed().state_dict(), place.td.state_dict()
    assert got.keys() == want.keys() and all(torch.equal(got[k], want[k]) for k in want)
    assert {k: n["batch_size"] for k, n in got._metadata.items()} == {
        k: n["batch_size"] for k, n in want._metadata.items()
    }
    assert texts(got._metadata["s"]["_non_tensor"]["data"]) == {"text"}


@pytest.mark.parametrize("form", [{}, {"flatten": False}, {"legacy": True}, {"legacy": True, "flatten": False}])
def test_loading_writes_through(place: Any, form: dict[str, bool]) -> None:
    source = mixed(start=1)
    source["s"] = "new"
    assert place.td.load_state_dict(source.state_dict(**form)) is place.td
    seen = place.seen_by_others()
    for key, leaf in source.items(True, True):
        assert torch.equal(seen[key], leaf), key
    assert texts(seen["s"]) == {"new"}


@pytest.mark.parametrize("kind", ["TensorDict", "memmap", "h5", "window", "lazy 0"])
def test_refused_with_nothing_changed(kind: str, tmp_path: Any) -> None:
    td = KINDS[kind](mixed(), tmp_path, None).td
    state = mixed(start=1).state_dict()
    few, many, odd = dict(state), {**state, "n.q": torch.ones(4, 2)}, {**state, "b": torch.ones(5)}
    del few["n.c"]
    for bad, error in ((few, KeyError), (many, RuntimeError), (odd, ValueError)):
        with pytest.raises(error):
            td.load_state_dict(bad)
    assert same(td, mixed())


def test_a_reader_does_not_load(tmp_path: Any) -> None:
    mixed().save(tmp_path / "x.h5").close()
    with pytest.raises(ReadOnlyError):
        tdstore.open(tmp_path / "x.h5").load_state_dict(mixed(start=1).state_dict())


def test_elements_of_an_uneven_stack() -> None:
    def stack(scale: float) -> Any:
        parts = [TensorDict({"a": torch.ones(n) * scale, "s": f"{scale}{n}"}) for n in (2, 3)]
        return TensorDict({"x": tdstore.lazy_stack(parts)})

    for form in ({}, {"flatten": False}):
        state = stack(2.0).state_dict(**form)
        td = stack(0.0)
        td.load_state_dict(state)
        assert [e["a"].tolist() for e in td["x"].tensordicts] == [[2, 2], [2, 2, 2]] and td["x"][1]["s"] == "2.03"
        fresh = TensorDict().load_state_dict(state, strict=False)
        assert fresh["x"].get("a", as_list=True)[1].tolist() == [2, 2, 2]
        with pytest.raises(StateDictError, match="the 2 elements of a lazy stack"):
            TensorDict({"x": {"0": {"a": torch.ones(2)}}}).load_state_dict(state)
    alone = tdstore.lazy_stack([TensorDict({"a": torch.ones(1), "b": torch.ones(1)}), TensorDict({"a": torch.ones(1)})])
    assert list(alone.state_dict()) == ["0.a", "0.b", "1.a"]  # nothing is lost that only one has


# -- forms -------------------------------------------------------------------------------------
def test_f4_loads_back_from_every_form() -> None:
    td = TensorDict({"u": torch.tensor(4), "v": {"w": torch.tensor(5), "x": {"y": torch.tensor(6)}}})
    assert list(td.state_dict()) == ["u", "v.w", "v.x.y"]
    forms = [td.state_dict(), td.state_dict(flatten=False), dict(td.state_dict())]
    forms += [td.state_dict(legacy=True), td.state_dict(legacy=True, flatten=False)]
    for form in forms:
        back = td.clone().zero_().load_state_dict(form)
        assert back.to_dict() == td.to_dict()


def test_legacy_entries() -> None:
    td = mixed()
    flat, nested = td.state_dict(legacy=True), td.state_dict(legacy=True, flatten=False)
    assert flat["__batch_size"] == torch.Size([4, 2]) and flat["n.__device"] is None and flat["s"] == "text"
    assert list(nested["n"]) == ["c", "d", "__batch_size", "__device"]


def test_the_two_parts_of_an_older_tensorclass() -> None:
    td = TensorDict({"a": torch.zeros(2), "s": "old"}, [2])
    td.load_state_dict(
        {"_tensordict": td.clone().fill_("a", 3.0).state_dict(flatten=False), "_non_tensordict": {"s": "x"}}
    )
    assert td["a"].tolist() == [3, 3] and td["s"] == "x"


def test_keys_with_dots_lead_where_they_were() -> None:
    def build(value: float) -> TensorDict:
        t = torch.full((1,), value)
        return TensorDict({"a.b": t.clone(), "c.d": {"e.f": t.clone(), "g": {"h": t.clone()}}, "i": {"j.k": t.clone()}})

    for state in (build(1.0).state_dict(), dict(build(1.0).state_dict()), build(1.0).state_dict(legacy=True)):
        td = build(0.0).load_state_dict(state)
        assert all(v.item() == 1 for v in td.values(True, True)) and td.keys(True, True) == build(0.0).keys(True, True)
    assert list(TensorDict().load_state_dict(build(1.0).state_dict(), strict=False).keys()) == ["a.b", "c.d", "i"]
    with pytest.raises(StateDictError, match=r"two entries have the key 'a\.b'"):
        TensorDict({"a.b": torch.ones(1), "a": {"b": torch.zeros(1)}}).state_dict()


def test_the_state_dict_of_a_module() -> None:
    net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2))
    td = TensorDict.from_module(net).data.clone().zero_()
    td.load_state_dict(net.state_dict())
    assert torch.equal(td["2", "weight"], net[2].weight)
    fresh = TensorDict().load_state_dict(net.state_dict(), strict=False)
    assert fresh.keys(True, True) == td.keys(True, True)
    own = net[0].weight
    TensorDict.from_module(net).load_state_dict({k: v + 1 for k, v in net.state_dict().items()})
    assert net[0].weight is own and torch.equal(own.detach(), td["0", "weight"] + 1)


def test_names_values_and_batch_sizes_return() -> None:
    inner = TensorDict({"x": torch.ones(2, 3)}, [2, 3])
    td = TensorDict({"n": inner, "r": NonTensorStack("a", "b"), "e": {}}, [2], names=["time"])
    file = io.BytesIO()
    torch.save((td.state_dict(), td.state_dict(flatten=False)), file)
    file.seek(0)
    for state in torch.load(file, weights_only=True):
        back = TensorDict().load_state_dict(state, strict=False)
        assert back.names == ["time"] and back["n"].batch_size == torch.Size([2, 3]) and back["r"] == ["a", "b"]
        assert back["e"].batch_size == torch.Size([2]) and back["n"].names == ["time", None]
    flat = TensorDict({"u": torch.zeros(2)})
    assert flat.load_state_dict(TensorDict({"u": torch.ones(2)}, [2]).state_dict()).batch_size == torch.Size([2])


def test_not_strict() -> None:
    td = TensorDict({"u": torch.zeros(2), "v": {"w": torch.zeros(1)}})
    td.load_state_dict(OrderedDict({"v.w": torch.ones(1), "v.new": torch.ones(2), "q": torch.ones(1)}), strict=False)
    assert td["u"].tolist() == [0, 0] and td["v", "w"].item() == 1 and td["v", "new"].tolist() == [1, 1] and "q" in td
    with pytest.raises(LockedError, match="'r'"):
        td.lock_().load_state_dict({"r": torch.ones(1), "u": torch.ones(2)}, strict=False)
    assert td["u"].tolist() == [0, 0]


def test_assign() -> None:
    td = TensorDict({"u": torch.zeros(2), "n": {"x": torch.zeros(2, 3)}, "s": "a"}, [2])
    other = TensorDict({"u": torch.ones(4), "n": {"x": torch.ones(4, 3)}, "s": "b"}, [4])
    state = other.state_dict()
    with pytest.raises(ValueError, match=r"'u' has shape \[2\], and \[4\] in the state dict"):
        td.load_state_dict(state)
    td.load_state_dict(state, assign=True)
    assert td.batch_size == td["n"].batch_size == torch.Size([4]) and td["n", "x"] is state["n.x"] and td["s"] == "b"
    kept = TensorDict({"u": torch.zeros(2), "k": torch.zeros(2)}, [2])
    with pytest.raises(ValueError, match="'k' is not in the state dict"):
        kept.load_state_dict(TensorDict({"u": torch.ones(4)}, [4]).state_dict(), strict=False, assign=True)
    assert kept.batch_size == torch.Size([2])


def test_what_cannot_be_loaded() -> None:
    td = TensorDict({"u": torch.zeros(2), "n": {"x": torch.zeros(1)}})
    for bad in ({"u": {"x": torch.ones(1)}}, {"u": torch.ones(2), "n": torch.ones(1)}, {"u": "text"}):
        with pytest.raises(StateDictError, match="in the TensorDict, and a .* in the state dict"):
            td.load_state_dict(bad, strict=False)
    with pytest.raises(TypeError, match="takes a dict, not a list"):
        td.load_state_dict([])  # type: ignore[arg-type]


def test_a_destination_may_be_a_plain_dict() -> None:
    out: dict[str, Any] = {"first": torch.ones(1)}
    assert mixed().state_dict(out, "p.") is out and list(out) == ["first", "p.b", "p.a", "p.n.c", "p.n.d"]


def test_other_kinds_of_entries() -> None:
    def build(value: float) -> TensorDict:
        return TensorDict(
            {"u": UnbatchedTensor(torch.full((3,), value)), "m": MetaData(f"v{value}"), "a": torch.ones(2)}, [2]
        )

    for form in ({}, {"flatten": False}):
        state = build(1.0).state_dict(**form)
        td = build(0.0).load_state_dict(state)
        assert td.get("u").data.tolist() == [1, 1, 1] and td["m"] == "v1.0" and type(td.get("m")) is MetaData
