"""from_any and the conversions of Python's own containers, where ours do more than the peer's or differ on purpose."""

from __future__ import annotations

import collections
import dataclasses
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tdstore
from tdstore import LazyStackedTensorDict, NonTensorStack, PersistentTensorDict, TensorDict, from_any
from tdstore.errors import StoreError

from .conftest import rows, same

Pair = collections.namedtuple("Pair", "x y")


@dataclasses.dataclass
class Record:
    a: Any
    s: str = "text"


# The peer keeps such lists as one opaque object per row.
@pytest.mark.parametrize(
    "records",
    [
        [{"a": 1, "s": "x"}, {"a": 2, "s": "y"}],
        [Record(1, "x"), Record(2, "y")],
        [collections.namedtuple("R", "a s")(1, "x"), TensorDict({"a": 2, "s": "y"})],
    ],
    ids=["dicts", "dataclasses", "mixed"],
)
def test_a_list_of_records_is_a_lazy_stack(records: Any) -> None:
    for td in (from_any(records), from_any({"n": {"l": records}})["n", "l"]):
        assert isinstance(td, LazyStackedTensorDict)
        assert td["a"].tolist() == [1, 2]
        assert td["s"] == ["x", "y"]


def test_lists_of_lists_of_records() -> None:
    td = from_any({"l": [[{"a": 1}, {"a": 2}], [{"a": 3}]]})["l"]
    assert td.batch_size == torch.Size([2, -1])
    assert [part["a"].tolist() for part in td.unbind(0)] == [[1, 2], [3]]
    assert from_any([{"a": [1, 2]}] * 3, auto_batch_size=True).batch_size == torch.Size([3, 2])
    assert from_any([{"a": [1, 2]}] * 3, batch_size=[3, 2]).batch_size == torch.Size([3, 2])


def test_records_in_a_batch_take_its_further_dimensions() -> None:
    td = from_any({"l": [{"a": [1, 2]}] * 3, "x": torch.zeros(3, 2)}, batch_size=[3, 2])
    assert td["l"].batch_size == torch.Size([3, 2])


@pytest.mark.parametrize("top", [np.arange(3), 3, "s", {1}, None, object(), b"x"])
def test_what_has_no_entries_is_unchanged_or_refused(top: Any) -> None:
    assert from_any(top) is top
    with pytest.raises(TypeError, match="cannot become a TensorDict"):
        from_any(top, strict=True)


def test_numbers_of_any_kind_become_tensors() -> None:
    # The peer makes a value per row of the last three.
    td = from_any(
        {"i": [1, 2], "a": np.float32([1, 2]), "m": [1, 2.5], "t": [torch.zeros(2)] * 2, "p": [(1, 2), (3, 4)]}
    )
    assert [td[k].dtype for k in "iampt"] == [torch.int64, torch.float32, torch.float32, torch.int64, torch.float32]
    assert td["t"].shape == torch.Size([2, 2])


def test_text_is_one_value_per_row() -> None:
    td = from_any({"a": np.array(["x", "y"]), "l": ["u", "v"], "t": torch.zeros(2)}, auto_batch_size=True)
    assert td.batch_size == torch.Size([2])
    assert isinstance(td.get("a"), NonTensorStack)
    assert (td[1]["a"], td[1]["l"]) == ("y", "v")


def test_one_batch_size_or_the_other() -> None:  # the peer ignores one of them
    with pytest.raises(ValueError, match="not both"):
        from_any({"a": torch.zeros(2)}, batch_size=[2], auto_batch_size=True)


def test_an_open_h5_file_stays_on_disk(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "f.h5", "w") as file:
        file["a"] = np.arange(3)
        file["n/b"] = np.ones((3, 2))
    with h5py.File(tmp_path / "f.h5", "r") as file:
        td = from_any({"file": file, "group": file["n"]})
        assert isinstance(td["file"], PersistentTensorDict)
        assert td["file", "n", "b"].shape == torch.Size([3, 2])
        assert td["group"]["b"].shape == torch.Size([3, 2])
        td["file"].close()
        assert file["a"][1] == 1


def test_tables_anywhere() -> None:
    frame = pd.DataFrame({"a": [1, 2], "s": ["x", "y"]})
    td = from_any({"pandas": frame, "arrow": pa.table(frame), "column": frame["a"], "text": frame["s"]})
    for key in ("pandas", "arrow"):
        assert td[key].batch_size == torch.Size([2])
        assert td[key, "a"].tolist() == [1, 2]
        assert td[key, "s"] == ["x", "y"]
    assert td["column"].tolist() == [1, 2]
    assert td["text"] == ["x", "y"]
    assert from_any(frame)["s"] == ["x", "y"]


def test_a_stored_one_is_itself(held: Any) -> None:
    assert from_any(held) is held


@pytest.mark.parametrize("wrong", [3, Record, [1, 2]])
def test_other_things_are_no_dataclass_or_named_tuple(wrong: Any) -> None:
    with pytest.raises(TypeError, match="expected an instance of a dataclass"):
        tdstore.TensorDict.from_dataclass(wrong)
    with pytest.raises(TypeError, match="expected a named tuple"):
        tdstore.from_namedtuple(wrong)


def test_from_list_of_lists() -> None:  # the peer fails on these
    td = TensorDict.from_list([[{"a": 1}, {"a": 2}], [{"a": 3}, {"a": 4}]], names=["x", "y"])
    assert td["a"].tolist() == [[1, 2], [3, 4]]
    assert td.names == ["x", "y"]
    assert TensorDict.from_list([[{"a": 1}], [{"a": 3}, {"a": 4}]]).batch_size == torch.Size([2, -1])


def test_python_forms_of_every_container(held: Any) -> None:
    want = rows()
    assert held.tolist(convert_tensors=True) == want.tolist(convert_tensors=True)
    assert held.tolist(convert_tensors=True)[2] == {
        "a": 2,
        "v": [2.0, 2.25],
        "n": {"b": False, "s": "row 2"},
        "one": "x",
    }
    assert held.to_dict(convert_tensors=True, tolist_first=True)["n"][1] == {"b": False, "s": "row 1"}
    assert held.to_namedtuple().n.s == [f"row {i}" for i in range(4)]
    arrays = held.numpy()
    assert arrays["v"].tolist() == want["v"].tolist()
    assert arrays["n"]["s"].tolist() == want["n", "s"]


def test_from_dict_instance_of_every_container(held: Any) -> None:
    td = held.from_dict_instance({"n": {"b": torch.ones(2)}}, batch_size=[2])
    assert type(td) is TensorDict
    assert td["n"].batch_size == torch.Size([2])


def test_from_dict_instance_keeps_classes() -> None:
    @tdstore.tensorclass
    class Inner:
        b: torch.Tensor

    td = TensorDict({"n": Inner(torch.zeros(2), batch_size=[2])}, [2])
    made = td.from_dict_instance({"n": {"b": torch.ones(2)}, "m": {"c": 1}})
    assert isinstance(made["n"], Inner)
    assert made["n"].b.tolist() == [1, 1]


def test_numpy_shares_memory_and_names_what_it_cannot() -> None:
    td = TensorDict({"a": torch.zeros(2), "n": {"h": torch.zeros(2).bfloat16()}}, [2])
    td.exclude("n").numpy()["a"][0] = 5
    assert td["a"][0] == 5
    with pytest.raises(TypeError, match="'h'"):
        td.numpy()


TREES = st.recursive(
    st.none() | st.text(max_size=3) | st.integers(-5, 5).map(lambda n: torch.tensor(n)),
    lambda t: (
        st.lists(t, max_size=3)
        | st.lists(t, max_size=3).map(tuple)
        | st.tuples(t, t).map(lambda p: Pair(*p))
        | st.dictionaries(st.text(max_size=2) | st.integers() | st.tuples(st.integers()), t, max_size=3)
    ),
    max_leaves=8,
)


@settings(max_examples=40, deadline=None)
@given(TREES)
def test_pytrees_come_back_as_they_were(tree: Any) -> None:
    assert repr(tdstore.from_pytree(tree).to_pytree() if isinstance(tree, (list, tuple, dict)) else tree) == repr(tree)


def test_pytrees_are_plain_data(tmp_path: Path) -> None:
    tree = {"a": [torch.arange(2), (torch.ones(2),)], 5: "x", "_pytree_type": Pair(torch.zeros(1), None)}
    td = tdstore.from_pytree(tree)
    assert repr(td.keys()) == repr(tdstore.from_pytree(tree).keys())  # the peer's marks are random
    for location in ("t", "t.h5"):
        assert repr(td.save(tmp_path / location).to_tensordict().to_pytree()) == repr(tree)


def test_unknown_named_tuples_are_named(tmp_path: Path) -> None:
    td = tdstore.from_pytree(Pair(1, 2))
    td.set("_pytree_type", tdstore.NonTensorData({"kind": "os.system", "fields": ["x", "y"]}))
    with pytest.raises(StoreError, match="os.system"):
        td.to_pytree()


def test_the_containers_hold_the_same(held: Any) -> None:
    same(held, rows())


@tdstore.tensorclass
class Row:
    a: torch.Tensor
    s: str = "x"


def test_tensorclasses_convert_to_themselves(tmp_path: Path) -> None:
    row = Row(torch.arange(3), "y", batch_size=[3])
    row.to_safetensors(tmp_path / "r.safetensors")
    row.to_parquet(tmp_path / "r.parquet")
    made = [
        Row.from_any({"a": torch.arange(3), "s": "y"}, auto_batch_size=True),
        Row.from_pandas(row.to_pandas()),
        Row.from_arrow(row.to_arrow()),
        Row.from_struct_array(row.to_struct_array()),
        Row.from_parquet(tmp_path / "r.parquet"),
        tdstore.from_safetensors(tmp_path / "r.safetensors"),
        row.to_padded_tensor(),
        Row.from_list(row.tolist()),
        tdstore.pad_sequence([row, row])[0],
        tdstore.dense_stack_tds([row, row], 0)[0],
        from_any({"r": row})["r"],
    ]
    for one in made:
        assert isinstance(one, Row)
        assert one.a.tolist() == [0, 1, 2]
        assert one[1].s == "y"
    assert Row.from_any(row) is row
    assert row.to_namedtuple().s == "y"
