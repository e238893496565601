"""Entries set through a window of stored data: the rows outside of it keep what they have, or it is refused."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tensordict
import torch

import tdstore
from tdstore import NonTensorData, NonTensorStack, PersistentTensorDict, TensorClass, TensorDict, UnbatchedTensor
from tdstore.errors import UnsupportedError
from tests.differential.oracle import differences
from tests.surface.test_surface import seen

INDICES = {
    "slice": slice(1, 3),
    "step": slice(None, None, 2),
    "list": [3, 0],
    "row": 2,
    "mask": torch.tensor([False, True, True, False, False]),
}


class Item(TensorClass):
    x: torch.Tensor
    note: str | None = None


def sample() -> TensorDict:
    rows = torch.arange(5)
    return TensorDict(
        {
            "a": rows.float().view(5, 1) + 1,
            "i": rows + 1,
            "n": TensorDict({"b": rows + 1, "m": {"c": rows.double().view(5, 1).expand(5, 3) + 1}}, [5]),
            "s": NonTensorStack(*"abcde"),
            "u": UnbatchedTensor(torch.ones(3)),
            "item": Item(x=rows.float() + 1, note="all", batch_size=[5]),
            "l": tdstore.lazy_stack([TensorDict({"x": torch.full((2,), float(k))}, []) for k in range(5)]),
        },
        [5],
    )


@pytest.fixture(params=["h5", "zarr", "remote", "redis"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    unique = uuid.uuid4().hex
    if request.param == "redis":
        location = f"{request.getfixturevalue('redis').url}/set-{unique}"
    else:
        location = f"memory://set/{unique}" if request.param == "remote" else f"{tmp_path / 'x'}.{request.param}"
    sample().save(location)
    with tdstore.open(location, "r+") as td:
        yield td


@pytest.fixture
def h5(tmp_path: Path) -> Iterator[Any]:
    sample().save(tmp_path / "y.h5").close()
    with tdstore.open(tmp_path / "y.h5", "r+") as td:
        yield td


HOWS: dict[str, Callable[[Any, Any, Any], object]] = {
    "set": lambda w, k, v: w.set(k, v),
    "item": lambda w, k, v: w.__setitem__(k, v),
    "update": lambda w, k, v: w.update({k: v}),
}


def unchanged(root: Any, but: dict[Any, Any] | None = None) -> None:
    """The store is as at the beginning, but for these entries, also when it is opened anew."""
    expected = sample()
    for key, value in (but or {}).items():
        expected[key] = value
    alike(root, expected)
    root.close()
    with tdstore.open(root.filename) as found:
        alike(found, expected)


def alike(found: Any, expected: Any) -> None:
    assert isinstance(found["item"], Item)
    problems = list(differences(*(seen(td.to_tensordict()) for td in (expected, found))))
    assert not problems, "\n".join(problems[:6])


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("index", INDICES)
def test_another_dtype_is_cast_and_the_other_rows_stay(how: str, index: str, h5: Any) -> None:
    at, expected = INDICES[index], sample()
    window = h5[at]
    changed = {}
    for key, step in {"a": 0.25, "i": 0.5, ("n", "b"): 0.75, ("n", "m", "c"): 1}.items():
        old = expected[key]
        value = (old[at] * 10 + step).to(torch.float64 if key == "a" else torch.float32)
        HOWS[how](window, key, value)
        assert window[key].dtype == old.dtype
        assert window[key].equal(value.to(old.dtype))
        changed[key] = old.clone()
        changed[key][at] = value.to(old.dtype)
    unchanged(h5, changed)


def test_as_rows_of_the_peer_are_written(h5: Any, tmp_path: Path) -> None:
    rows = {"a": torch.arange(5.0).view(5, 1), "i": torch.arange(5), "n": {"b": torch.arange(5)}}
    there = tensordict.TensorDict(rows, [5])
    peer = tensordict.PersistentTensorDict.from_dict(there, filename=str(tmp_path / "peer.h5"), batch_size=[5])
    ours = PersistentTensorDict.from_dict(rows, filename=tmp_path / "ours.h5", batch_size=[5])
    for module, window in ((tensordict, peer._get_sub_tensordict(slice(1, 3))), (tdstore, ours[1:3])):
        window["a"] = torch.full((2, 1), 7.5, dtype=torch.float64)
        window["i"] = torch.tensor([8.75, -9.5])
        window["n", "b"] = torch.tensor([True, False])
        window.update({"n": {"b": torch.tensor([2.5, 3.5])}})
        for bad in (torch.ones(2, 3), torch.ones(2)):
            with pytest.raises((TypeError, RuntimeError)):
                window["a"] = bad
        with pytest.raises(RuntimeError):
            window["a"] = module.TensorDict({"z": torch.ones(2)}, [2])
    for key in ("a", "i", ("n", "b")):
        assert ours[key].dtype == peer[key].dtype and ours[key].equal(peer[key])


REFUSED: dict[str, tuple[Any, Callable[[], Any]]] = {
    "a longer row": ("a", lambda: torch.ones(2, 3)),
    "no features": ("a", lambda: torch.ones(2)),
    "more features": ("i", lambda: torch.ones(2, 1)),
    "a group over a tensor": ("a", lambda: TensorDict({"z": torch.ones(2)}, [2])),
    "a text over a tensor": ("a", lambda: NonTensorData("text", [2])),
    "texts over a tensor": ("i", lambda: ["p", "q"]),
    "unbatched over a tensor": ("a", lambda: UnbatchedTensor(torch.ones(1))),
    "a nested tensor over a tensor": (
        "a",
        lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged),
    ),
    "a tensor over a group": ("n", lambda: torch.ones(2)),
    "a value over a group": ("n", lambda: NonTensorData("text", [2])),
    "a tensor over texts": ("s", lambda: torch.ones(2)),
    "a group over texts": ("s", lambda: TensorDict({"z": torch.ones(2)}, [2])),
    "a tensor over unbatched": ("u", lambda: torch.ones(2, 3)),
    "another shape below": ("n", lambda: TensorDict({"b": torch.ones(2), "m": {"c": torch.ones(2, 4)}}, [2])),
    "another kind below": ("n", lambda: TensorDict({"b": torch.ones(2), "m": torch.ones(2)}, [2])),
    "an object over a group": ("n", lambda: Item(x=torch.ones(2), batch_size=[2])),
    "what is no field": ("item", lambda: TensorDict({"x": torch.ones(2), "z": torch.ones(2)}, [2])),
    "other entries in a stack": ("l", lambda: tdstore.lazy_stack([TensorDict({"z": torch.ones(1)}, [])] * 2)),
    "a tensor over a stack": ("l", lambda: torch.ones(2)),
}


MERGED = ["an object over a group", "what is no field", "other entries in a stack"]
"""What `update` merges with the entries that are there, and does not set."""


@pytest.mark.parametrize(
    ("how", "case"), [(how, case) for how in HOWS for case in REFUSED if how != "update" or case not in MERGED]
)
def test_what_the_other_rows_cannot_be_is_refused(how: str, case: str, h5: Any) -> None:
    key, make = REFUSED[case]
    window = h5[1:3]
    with pytest.raises(UnsupportedError) as caught:
        HOWS[how](window, key, make())
    text = str(caught.value)
    assert "h5:" in text and f"'{key}'" in text and "on the TensorDict that was indexed" in text
    alike(window, sample()[1:3])
    unchanged(h5)


def test_every_backend(root: Any) -> None:
    window = root[1:3]
    for case, (key, make) in REFUSED.items():
        with pytest.raises(UnsupportedError, match=f"cannot set .*{key}.*{root.filename.split('://')[0]}"):
            window[key] = make()
            pytest.fail(case)
    alike(root, sample())
    window["i"] = torch.tensor([1.5, 2.5])
    window["n"] = TensorDict({"b": torch.tensor([8.5, 9.5]), "m": {"c": torch.zeros(2, 3)}}, [2])
    window["s"] = ["p", "q"]
    window["new"] = torch.ones(2)
    expected = sample()
    expected["i"][1:3] = torch.tensor([1, 2])
    expected["n", "b"][1:3] = torch.tensor([8, 9])
    expected["n", "m", "c"] = expected["n", "m", "c"].clone()
    expected["n", "m", "c"][1:3] = 0
    expected["s"] = NonTensorStack("a", "p", "q", "d", "e")
    expected["new"] = torch.tensor([0.0, 1, 1, 0, 0])
    unchanged(root, dict(expected.items()))


def test_a_nested_tensordict_shows_what_was_set_and_the_store_keeps_the_rest(h5: Any) -> None:
    window = h5[1:3]
    rows = TensorDict({"b": torch.tensor([8, 9]), "z": torch.ones(2)}, [2])
    window["n"] = rows
    assert list(window["n"].keys()) == ["b", "z"]
    assert (window["n"].to_tensordict() == rows).all()
    assert h5["n", "b"].tolist() == [1, 8, 9, 4, 5]
    assert h5["n", "z"].tolist() == [0, 1, 1, 0, 0]
    assert h5["n", "m", "c"].equal(sample()["n", "m", "c"])
    window["n"] = TensorDict({}, [2])
    assert not list(window["n"].keys())
    assert set(h5["n"].keys()) == {"b", "m", "z"}


@pytest.mark.parametrize("below", ["n", ("n", "m")])
def test_a_window_of_a_nested_one(below: Any, h5: Any) -> None:
    window = h5[below][1:3]
    window["b" if below == "n" else "c"] = torch.full((2, 3) if below != "n" else (2,), 7.75, dtype=torch.float16)
    key = "b" if below == "n" else "c"
    old = sample()[below][key].clone()
    old[1:3] = 7.75
    assert h5[below][key].dtype == old.dtype and h5[below][key].equal(old)
    with pytest.raises(UnsupportedError, match=f"'{key}'"):
        window[key] = torch.ones(2, 9)


def test_further_batch_dimensions_and_columns(tmp_path: Path) -> None:
    a = torch.arange(24).view(4, 3, 2)
    nested = TensorDict({"b": a.clone()}, [4, 3, 2])
    TensorDict({"a": a.clone(), "n": nested}, [4, 3]).save(tmp_path / "x.h5").close()
    with tdstore.open(tmp_path / "x.h5", "r+") as root:
        column = root[1:3, 1]
        column["a"] = torch.full((2, 2), 100.5)
        column["n"] = TensorDict({"b": torch.full((2, 2), 200.5)}, [2])
        for found, number in ((root["a"], 100), (root["n", "b"], 200)):
            expected = a.clone()
            expected[1:3, 1] = number
            assert found.equal(expected)
        with pytest.raises(UnsupportedError, match="'a'"):
            column["a"] = torch.ones(2)
        row = root[0]
        row.batch_size = []
        row["a"] = torch.zeros(3, 2)
        assert root["a"][0].eq(0).all() and root["a"][1:, 2].equal(a[1:, 2])


@pytest.mark.parametrize("index", [slice(None), slice(0, 5), ...])
def test_a_window_of_all_rows_replaces(index: Any, h5: Any) -> None:
    view = h5[index]
    view["a"] = torch.ones(5, 2, dtype=torch.float64)
    view["n"] = torch.arange(5)
    view["s"] = torch.zeros(5)
    assert (h5["a"].dtype, h5["a"].shape) == (torch.float64, (5, 2))
    assert h5["n"].tolist() == [0, 1, 2, 3, 4] and h5["s"].tolist() == [0] * 5


def test_an_object_of_a_class(tmp_path: Path) -> None:
    item = Item(x=torch.arange(4.0), note="all", batch_size=[4])
    item.to_h5(tmp_path / "x.h5")
    with tdstore.open(tmp_path / "x.h5", "r+") as stored:
        window = stored[1:3]
        assert isinstance(window, Item)
        window.x = torch.tensor([10, 20])
        assert stored.x.tolist() == [0, 10, 20, 3] and stored.x.dtype == torch.float32
        for bad in (torch.ones(2, 2), "text", ["p", "q"]):
            with pytest.raises(UnsupportedError, match="'x' .* in a window of h5:"):
                window.x = bad
        window.note = "two"
        assert [stored[i].note for i in range(4)] == ["all", "two", "two", "all"]
        assert stored.x.tolist() == [0, 10, 20, 3]


def test_an_object_as_an_entry(h5: Any) -> None:
    window = h5[1:3]
    window["item"] = Item(x=torch.tensor([10, 20]), batch_size=[2])
    assert isinstance(window["item"], Item) and window["item"].x.tolist() == [10, 20]
    assert window["item"].note is None
    assert h5["item"].x.tolist() == [1, 10, 20, 4, 5]
    assert h5[0]["item"].note == "all"
    window["item"] = TensorDict({"x": torch.tensor([30, 40]), "note": "two"}, [2])
    assert h5["item"].x.tolist() == [1, 30, 40, 4, 5]
    assert [h5[i]["item"].note for i in range(5)] == ["all", "two", "two", "all", "all"]


@pytest.mark.parametrize("lazy", [True, False])
def test_a_lazy_stack_is_written_element_by_element(lazy: bool, h5: Any) -> None:
    rows = tdstore.lazy_stack([TensorDict({"x": torch.full((2,), k)}, []) for k in (7, 8)])
    h5[1:3]["l"] = rows if lazy else torch.stack(list(rows))
    assert isinstance(h5["l"], tdstore.LazyStackedTensorDict)
    assert h5["l", "x"][:, 0].tolist() == [0, 7, 8, 3, 4]


def test_unbatched_tensors_belong_to_all_rows(h5: Any) -> None:
    with pytest.raises(UnsupportedError, match="the unbatched tensor 's'"):
        h5[1:3]["s"] = UnbatchedTensor(torch.ones(2))
    unchanged(h5)


def test_casting_in_place_is_refused(h5: Any) -> None:
    with pytest.raises(UnsupportedError, match="cast entries in a view of h5:"):
        h5[1:3].select("a", "i").to(torch.float64, inplace=True)
    assert h5[1:3].select("a").to("cpu", inplace=True).device == torch.device("cpu")
    unchanged(h5)


def test_results_written_into_a_window(h5: Any) -> None:
    window = h5[1:3].select("i")
    assert h5[3:].select("i").apply(lambda x: x * 1.5, out=window) is window
    assert h5["i"].dtype == torch.int64 and h5["i"].tolist() == [1, 6, 7, 4, 5]
    with pytest.raises(UnsupportedError, match="'i'"):
        h5[3:].select("i").apply(lambda x: x[:, None], out=window)
    assert h5["i"].tolist() == [1, 6, 7, 4, 5]


def test_a_hidden_entry_is_in_the_store_still(h5: Any) -> None:
    window = h5[1:3].del_("a")
    with pytest.raises(UnsupportedError, match="'a'"):
        window["a"] = torch.ones(2, 2)
    assert "a" not in window
    window["a"] = torch.ones(2, 1, dtype=torch.int8)
    assert window["a"].dtype == torch.float32
    assert h5["a"].tolist() == [[1], [1], [1], [4], [5]]


def test_rows_of_mapped_files_are_tensordicts_in_memory(tmp_path: Path) -> None:
    """An entry that replaces one in `td[1:3]` stays in memory, as one of any TensorDict: the files keep theirs."""
    TensorDict({"a": torch.arange(5.0)}, [5]).save(tmp_path / "m")
    td = tdstore.open(tmp_path / "m", "r+")
    rows = td[1:3].unlock_()
    rows["a"] = torch.ones(2, 3)
    assert rows["a"].shape == (2, 3)
    assert tdstore.open(tmp_path / "m")["a"].tolist() == [0, 1, 2, 3, 4]


def test_names_and_batch_size_of_a_nested_one_are_the_windows(h5: Any) -> None:
    window = h5[1:3]
    window["n", "m"] = TensorDict({"c": torch.ones(2, 3)}, [2, 3], names=["t", "u"])
    assert (window["n", "m"].batch_size, window["n", "m"].names) == ((2, 3), ["t", "u"])
    assert (h5["n", "m"].batch_size, h5["n", "m"].names) == ((5,), [None])
