"""Dicts that are written at an index are written as their tensors are, one by one: all of them, or none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import tdstore
from tdstore import TensorDict
from tdstore.errors import BatchSizeError, GradientError, InvalidStateError, ReadOnlyError

INDICES: dict[str, Any] = {
    "int": 2,
    "negative": -1,
    "slice": slice(1, 3),
    "steps": slice(0, 4, 2),
    "list": [3, 0],
    "tensor": torch.tensor([3, 0]),
    "repeated": torch.tensor([1, 1]),
    "mask": torch.tensor([True, False, False, True]),
    "tuple": (slice(1, 3), 0),
    "ellipsis": ...,
}
DICTS: dict[str, dict[Any, Any]] = {
    "all": {"a": (3,), "i": (), "n": {"c": (2, 2)}},
    "some": {"n": {"c": (2, 2)}},
    "another order": {"n": {"c": (2, 2)}, "i": (), "a": (3,)},
    "one": {"i": ()},
}


def target() -> TensorDict:
    return TensorDict(
        {
            "a": torch.arange(24.0).reshape(4, 2, 3),
            "i": torch.arange(8).reshape(4, 2),
            "n": {"c": torch.zeros(4, 2, 2, 2)},
        },
        [4, 2],
    )


def filled(shapes: dict[Any, Any], lead: torch.Size, kind: torch.dtype | None = None) -> dict[Any, Any]:
    """The same dict with numbers in tensors of these shapes behind `lead`."""
    made: dict[Any, Any] = {}
    for key, shape in shapes.items():
        if isinstance(shape, dict):
            made[key] = filled(shape, lead, kind)
        else:
            dtype = kind or (torch.int64 if key == "i" else torch.float32)
            made[key] = (torch.rand((*lead, *shape)) * 9 + 1).to(dtype)
    return made


def leaves(td: Any) -> dict[Any, Tensor]:
    return {key: leaf.clone() for key, leaf in td.items(True, True)}


def flat(entries: dict[Any, Any], path: tuple[str, ...] = ()) -> dict[Any, Tensor]:
    found: dict[Any, Tensor] = {}
    for key, value in entries.items():
        here = (*path, key)
        found |= flat(value, here) if isinstance(value, dict) else {here if len(here) > 1 else key: value}
    return found


@pytest.mark.parametrize("kind", [None, torch.float64, torch.int32], ids=["", "float64", "int32"])
@pytest.mark.parametrize("entries", DICTS)
@pytest.mark.parametrize("index", INDICES)
@pytest.mark.parametrize("method", ["[]", "update_at_"])
def test_tensors_of_a_dict_are_written_at_an_index(method: str, index: str, entries: str, kind: Any) -> None:
    td, at = target(), INDICES[index]
    lead = torch.empty(td.batch_size)[at].shape
    source = filled(DICTS[entries], lead, kind)
    if index == "repeated":  # which of two rows wins is not asked here
        source = {k: v[:1].expand_as(v) if isinstance(v, Tensor) else v for k, v in source.items()}
        source |= {"n": {"c": source["n"]["c"][:1].expand(2, 2, 2, 2)}} if "n" in source else {}
    want, tensors = leaves(td), dict(td.items(True, True))
    for key, value in flat(source).items():
        want[key][at] = value.to(want[key].dtype)
    if method == "[]":
        td[at] = source
    else:
        td.update_at_(source, at)
    for key, leaf in td.items(True, True):
        assert leaf is tensors[key]
        assert torch.equal(leaf, want[key]), key


@pytest.mark.parametrize("index", ["int", "slice", "list", "tensor", "mask"])
@pytest.mark.parametrize(
    "bad",
    [{"a": (2,)}, {"n": {"c": (2, 3)}}, {"a": (9, 9, 9, 3)}],
    ids=["a shape", "a nested shape", "too many dimensions"],
)
def test_nothing_of_a_dict_is_written_where_an_entry_does_not_fit(index: str, bad: dict[str, Any]) -> None:
    td, at = target(), INDICES[index]
    lead = torch.empty(td.batch_size)[at].shape
    before = leaves(td)
    for write in (td.__setitem__, lambda at, source: td.update_at_(source, at)):
        with pytest.raises((BatchSizeError, RuntimeError)):
            write(at, filled({"i": (), **bad}, lead))  # type: ignore[no-untyped-call]
        assert all(torch.equal(leaf, before[key]) for key, leaf in td.items(True, True))


@pytest.mark.parametrize("index", ["int", "slice", "list", "tensor"])
def test_a_new_entry_of_a_dict_is_zeros_in_other_rows(index: str) -> None:
    td, at = target(), INDICES[index]
    lead = torch.empty(td.batch_size)[at].shape
    td[at] = {"i": torch.ones(lead).long(), "new": torch.ones((*lead, 5))}
    want = torch.zeros(4, 2, 5)
    want[at] = 1
    assert torch.equal(td["new"], want) and (td["i"][at] == 1).all()
    with pytest.raises(KeyError, match="newer"):
        td.update_at_({"i": torch.zeros(lead).long(), "newer": torch.ones(lead)}, at)
    assert (td["i"][at] == 1).all()


@pytest.mark.parametrize("index", ["int", "slice", "list", "tensor"])
def test_rows_of_a_dict_may_be_views_of_what_is_written(index: str) -> None:
    td, at = target(), INDICES[index]
    lead = torch.empty(td.batch_size)[at].shape
    rows = td["a"].flip(0)[: lead[0]] if len(lead) > 1 else td["a"][0]
    want = td["a"].clone()
    want[at] = rows.clone()
    td[at] = {"a": rows}
    assert torch.equal(td["a"], want)


def test_a_dict_is_not_written_where_its_tensors_could_not_be() -> None:
    td = TensorDict({"x": torch.zeros(3), "w": torch.nn.Parameter(torch.zeros(3)), "e": torch.zeros(1).expand(3)}, [3])
    ones = torch.ones(())
    for source, error in (({"x": ones, "w": ones}, GradientError), ({"x": ones, "e": ones}, InvalidStateError)):
        with pytest.raises(error):
            td[1] = source
        assert (td["x"] == 0).all()
    with torch.no_grad():
        td[1] = {"x": ones, "w": ones}
    assert td["x"].tolist() == td["w"].tolist() == [0, 1, 0]


def test_a_dict_is_written_through_views_of_files_and_refused_where_they_are_read(tmp_path: Any) -> None:
    """A large block goes through the store, in the order of its entries."""
    big = torch.rand(4096, 300)
    td = TensorDict({"a": torch.zeros(4096, 300), "b": torch.zeros(4096, 300)}, [4096]).save(tmp_path / "rows")
    td[:] = {"b": big, "a": -big}
    td[7] = {"b": torch.full((300,), 7.0)}
    td.close()
    with tdstore.open(tmp_path / "rows") as read:
        assert torch.equal(read["a"], -big) and (read["b"][7] == 7).all() and torch.equal(read["b"][8:], big[8:])
        td = TensorDict({"x": torch.zeros(4096), "n": read}, [4096])
        with pytest.raises(ReadOnlyError):
            td[3] = {"x": torch.ones(()), "n": {"a": torch.ones(300)}}
        assert (td["x"] == 0).all()


def test_a_group_is_written_by_set_() -> None:
    td = target().lock_()
    leaf = td["n", "c"]
    for source in (TensorDict({"c": torch.ones(4, 2, 2, 2)}, [4, 2]), {"c": torch.full((4, 2, 2, 2), 2.0)}):
        assert td.set_("n", source) is td
        assert td["n", "c"] is leaf and (leaf == source["c"]).all()
    with pytest.raises(KeyError, match="zz"):
        td.set_("n", {"c": torch.zeros(4, 2, 2, 2), "zz": torch.zeros(4, 2)})
    with pytest.raises(BatchSizeError):
        td.set_("n", {"c": torch.zeros(3, 2, 2, 2)})
    assert (leaf == 2).all()
