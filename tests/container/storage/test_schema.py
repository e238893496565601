"""from_schema: every form of a schema, allocated on every backend, zero-filled, never reused silently."""

from __future__ import annotations

import resource

import numpy as np
import pytest
import torch

import tdstore
from tdstore import LeafSpec, NonTensorData, TensorDict
from tdstore.errors import BatchSizeError

ON_DISK = True  # files with large holes


def test_every_form_of_a_leaf(backend, place):
    td = TensorDict.from_schema(
        {
            "pair": ((2, 3), torch.int16),
            "name": ((2,), "bfloat16"),
            "torch name": ((2,), "torch.float64"),
            "numpy": ((), np.uint8),
            "number of rows": (5, torch.float32),
            "dtype": torch.bool,
            "spec": LeafSpec((4,), "float32", fill_value=7),
            "nested": {"a": ((1,), "int64"), "deeper": {"b": ((), "float16")}},
            ("tuple", "key"): ((2,), "uint8"),
        },
        batch_size=[3],
        **place(backend),
    )
    assert {k: (tuple(td.get_item_shape(k)), td.get(k).dtype) for k in td.keys(True, True)} == {
        "pair": ((3, 2, 3), torch.int16),
        "name": ((3, 2), torch.bfloat16),
        "torch name": ((3, 2), torch.float64),
        "numpy": ((3,), torch.uint8),
        "number of rows": ((3, 5), torch.float32),
        "dtype": ((3,), torch.bool),
        "spec": ((3, 4), torch.float32),
        ("nested", "a"): ((3, 1), torch.int64),
        ("nested", "deeper", "b"): ((3,), torch.float16),
        ("tuple", "key"): ((3, 2), torch.uint8),
    }
    assert torch.equal(td["spec"], torch.full((3, 4), 7.0))
    for key in td.keys(True, True):
        if key != "spec":
            assert not td.get(key).to(torch.float64).any(), key
    assert td.batch_size == (3,)
    assert td["nested", "deeper"].batch_size == (3,)
    td.close()


def test_in_memory_by_default():
    td = TensorDict.from_schema({"a": ((2,), "float32")}, batch_size=3, device="cpu", names=["t"])
    assert (type(td), td.batch_size, td.device, td.names) == (TensorDict, (3,), torch.device("cpu"), ["t"])
    assert TensorDict.from_schema({"a": torch.float32}, batch_size=[2], device="meta")["a"].device.type == "meta"


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        ({"a": ((2,), "floaty32")}, "'a'"),
        ({"a": "no dtype"}, "'a'"),
        ({"n": {"b": ((-1, -1), "float32")}}, "'n' / 'b'"),
        ({"a": object()}, "'a'"),
        ({"a": {"b": torch.int8}, ("a", "b"): torch.int8}, "twice"),
        ({"a": torch.int8, ("a", "b"): torch.int8}, "'a'"),
    ],
)
def test_bad_schemas_name_the_key(schema, says):
    with pytest.raises((TypeError, ValueError), match=says):
        TensorDict.from_schema(schema, batch_size=[2])


@pytest.mark.parametrize("storage", [None, "memmap", "h5", "zarr", "tdz", "shared"])
@pytest.mark.parametrize("rows", [1 << 61, 10**30])
def test_more_rows_than_a_tensor_has_name_the_key(storage, rows, tmp_path):
    more = {"location": tmp_path / "data"} if storage not in (None, "shared") else {}
    for entry in (torch.float32, ((-1,), "int8"), str):
        with pytest.raises(BatchSizeError, match="schema entry 'a': no tensor has"):
            TensorDict.from_schema({"a": entry}, batch_size=[rows], storage=storage, **more)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("storage", ["memmap", "h5"])
def test_an_existing_target_is_not_reused(storage, tmp_path):
    where = tmp_path / "data"
    schema = {"a": ((2,), "float32")}
    first = TensorDict.from_schema(schema, batch_size=[3], storage=storage, prefix=where)
    first["a"].fill_(1) if storage == "memmap" else first.fill_("a", 1)
    first.close()
    with pytest.raises(tdstore.errors.StoreExistsError, match="mode='w'"):
        TensorDict.from_schema(schema, batch_size=[3], storage=storage, filename=where)
    assert TensorDict.load(where)["a"].sum() == 6
    replaced = TensorDict.from_schema(schema, batch_size=[3], storage=storage, location=where, mode="w")
    assert replaced["a"].sum() == 0
    replaced.close()


@pytest.mark.parametrize("storage", ["memmap", "h5"])
def test_a_huge_one_costs_no_memory(storage, tmp_path):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    td = TensorDict.from_schema(
        {"obs": ((84, 84, 3), "uint8")}, batch_size=[1_000_000], storage=storage, location=tmp_path / "huge"
    )
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) < 300_000  # KiB, of 21 GB
    td[999_999] = {"obs": torch.full((84, 84, 3), 9, dtype=torch.uint8)}
    assert td[999_998:]["obs"].sum() == 9 * 84 * 84 * 3
    assert td[[5, 999_999]]["obs"].sum() == 9 * 84 * 84 * 3


@pytest.mark.parametrize("storage", ["memmap", "memory", "shared"])
def test_options_a_backend_does_not_have(storage, tmp_path):
    where = {"location": tmp_path / "x"} if storage == "memmap" else {}
    with pytest.raises(tdstore.errors.OptionError, match="chunks"):
        TensorDict.from_schema({"a": LeafSpec((2,), "int8", chunks=(1, 2))}, batch_size=[2], storage=storage, **where)
    with pytest.raises(tdstore.errors.OptionError, match="chunks"):
        TensorDict.from_schema({"a": torch.int8}, batch_size=[2], storage=storage, chunks=True, **where)
    assert not (tmp_path / "x").exists()


def test_per_leaf_options_reach_h5(tmp_path):
    import h5py

    TensorDict.from_schema(
        {"a": LeafSpec((6,), "int8", chunks=(1, 6), compression="gzip"), "b": ((3,), "float32")},
        batch_size=[4],
        storage="h5",
        location=tmp_path / "x.h5",
        chunks=(2, 3),
    ).close()
    with h5py.File(tmp_path / "x.h5") as f:
        assert (f["a"].chunks, f["a"].compression) == ((1, 6), "gzip")
        assert (f["b"].chunks, f["b"].compression) == ((2, 3), None)


def test_declared_abilities_are_those_of_the_stores(backend, place):
    name = "shared" if backend == "named shared" else backend
    declared = next(line.backend for line in tdstore.backends() if line.name == name)
    td = TensorDict.from_schema({"a": torch.int8}, batch_size=[2], **place(backend))
    store = td.store if hasattr(td, "store") else td._binding[0].store if td._binding else None
    assert declared is not None
    if store is not None:
        assert declared.caps == store.caps
    assert "can: " in str(next(line for line in tdstore.backends() if line.name == name))
    td.close()


@pytest.mark.parametrize("rows", [0, 3, 2000])
def test_strings_values_and_ragged_rows(backend, place, rows):
    """They are there before any row is, and grow: a few values lie in the header, many in leaves."""
    schema = {
        "x": ((2,), "float32"),
        "text": str,
        "n": {"tokens": ((-1, 2), "int64"), "any": object},
        "config": NonTensorData("adam"),
    }
    td = TensorDict.from_schema(schema, batch_size=[rows], **place(backend))
    assert list(td.keys()) == ["x", "text", "n", "config"] and td["config"] == "adam"
    assert td["text"] == td["n", "any"] == [None] * rows
    assert td["n", "tokens"].dtype == torch.int64 and td["n", "tokens"].size(0) == rows
    for count in (1, 3):
        row = {"x": torch.ones(2), "text": str(count), "n": {"tokens": torch.ones(count, 2).long(), "any": str(count)}}
        td.append({**row, "config": "adam"})
    assert td.batch_size == (rows + 2,) and td["text"] == [None] * rows + ["1", "3"]
    assert td["n", "any"][-2:] == ["1", "3"]
    assert [len(row) for row in td["n", "tokens"].unbind()] == [0] * rows + [1, 3]
    td.close()


def test_ragged_rows_need_a_batch_dimension():
    with pytest.raises(BatchSizeError, match="'a'"):
        TensorDict.from_schema({"a": ((-1,), "float32")})
    two = TensorDict.from_schema({"a": ((-1, 5), "float32")}, batch_size=[3, 2])["a"]
    assert two.unbind()[0].shape == (2, 0, 5)
