"""Padded and nested tensors, safetensors files, storages by name, and small methods."""

from __future__ import annotations

import json
import uuid
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import tdstore
from tdstore import TensorDict, from_safetensors, lazy_stack
from tdstore.errors import CorruptStoreError, StoreError, UnsupportedError

from .conftest import rows, same

LAYOUTS = [
    torch.strided,
    torch.jagged,
]


def nested(layout: Any) -> torch.Tensor:
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(4)], layout=layout)


# -- ragged ------------------------------------------------------------------------------------
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("batch", [[2], [2, -1], []], ids=str)
def test_nested_tensors_are_padded(layout: Any, batch: Any) -> None:
    td = TensorDict({"x": nested(layout), "n": {"y": nested(layout)}}, batch)
    td["z"] = nested(layout)
    td.set(("n", "z"), nested(layout))
    assert td.get_item_shape("z") == torch.Size([2, -1])
    assert td.bytes() == 4 * (6 * 4 + (3 * 8 if layout is torch.jagged else 0))  # with the offsets
    padded = td.to_padded_tensor(-1, mask_key="mask" if -1 in batch else None)
    assert padded.batch_size == torch.Size([2, 4][: len(batch)])
    assert padded["x"].tolist() == padded["n", "z"].tolist() == [[1, 1, -1, -1], [1, 1, 1, 1]]
    if -1 in batch:
        assert padded["mask"].tolist() == [[True, True, False, False], [True] * 4]
    else:
        with pytest.raises(RuntimeError, match="mask_key"):
            td.to_padded_tensor(mask_key="mask")


def test_a_batch_that_is_ragged_elsewhere_is_refused() -> None:
    with pytest.raises(ValueError, match="'x'"):
        TensorDict({"x": torch.zeros(2, 2)}, [2, -1])


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("location", ["x", "x.h5", "x.zarr"])
def test_nested_tensors_are_stored_as_rows(layout: Any, location: str, tmp_path: Path) -> None:
    # As they are, too (tests/container/varlen/test_nested_tensors.py); but only rows can be changed and added.
    td = TensorDict({"x": nested(layout), "a": torch.arange(2)}, [2])
    saved = td.to_lazystack().save(tmp_path / location)
    assert [len(row) for row in saved.get("x", as_list=True)] == [2, 4]
    assert saved.to_padded_tensor()["x"].sum() == 6


@pytest.mark.parametrize("dim", [0, 1])
def test_lazy_stacks_are_padded(dim: int) -> None:  # the peer cannot
    parts = [
        TensorDict({"x": torch.ones(2, i), "n": {"y": torch.ones(2, 3)}, "s": ["u", "v"], "same": "w"}, [2])
        for i in (1, 3)
    ]
    td = lazy_stack(parts, dim).to_padded_tensor(-1)
    want = torch.stack([torch.tensor([[1, -1, -1]] * 2), torch.ones(2, 3)], dim)
    assert torch.equal(td["x"], want.float())
    assert td["n", "y"].shape == torch.Size([2, 2, 3])
    assert td["s"] == ([["u", "v"]] * 2 if dim == 0 else [["u", "u"], ["v", "v"]])
    assert td[0, 1]["same"] == "w"


@pytest.mark.parametrize("stored", [False, True])
def test_ragged_batches_are_padded(stored: bool, tmp_path: Path) -> None:
    parts = [TensorDict({"x": torch.ones(i), "s": ["u"] * i, "n": {"y": torch.ones(i, 2)}}, [i]) for i in (2, 3)]
    td: Any = lazy_stack(parts)
    if stored:
        td = td.save(tmp_path / "x.h5")
    padded = td.to_padded_tensor(mask_key="real")
    assert padded.batch_size == torch.Size([2, 3])
    assert padded["real"].tolist() == [[True, True, False], [True] * 3]
    assert padded["x"].tolist() == [[1, 1, 0], [1, 1, 1]]
    assert padded["n", "y"].shape == torch.Size([2, 3, 2])
    assert padded["s"] == [["u", "u", None], ["u", "u", "u"]]


def test_even_ones_stay_as_they_are(held: Any) -> None:
    same(held.to_padded_tensor(), rows())


def test_pad_sequence_of_values() -> None:  # the peer fails on them
    parts = [TensorDict({"x": torch.ones(i), "s": ["u"] * i, "one": "w"}, [i]) for i in (1, 2)]
    td = tdstore.pad_sequence(parts)
    assert td["s"] == [["u", None], ["u", "u"]]
    assert td[0, 0]["one"] == "w"
    with pytest.raises(RuntimeError, match="'x'"):
        tdstore.pad_sequence([TensorDict({"x": torch.ones(1, 2)}), TensorDict({"x": torch.ones(1, 3)})])


def test_functions_over_every_container(held: Any) -> None:
    want = rows()
    same(tdstore.pad_sequence([held, held])[0], want)
    same(tdstore.merge_tensordicts(held, want.select("a") + 5), want)
    assert tdstore.merge_tensordicts(want.select("a") + 5, held)["a"].tolist() == [5, 6, 7, 8]
    same(tdstore.dense_stack_tds([held, held], 0)[1], want)
    assert tdstore.assert_close(held, held.clone())
    other = want.clone()
    other["n", "b"][1] = True
    with pytest.raises(AssertionError, match=r"(?s)'n' / 'b' differs.*hello"):
        tdstore.assert_close(held, other, msg="hello")


def test_values_are_compared() -> None:  # the peer passes them over
    with pytest.raises(AssertionError, match="'x' is not 'y'"):
        tdstore.assert_close(TensorDict({"s": "x"}), TensorDict({"s": "y"}))
    with pytest.raises(AssertionError, match="'s'"):
        tdstore.assert_close(TensorDict({"s": "x"}), TensorDict({"s": 1}))


# -- files and storages ------------------------------------------------------------------------
def test_safetensors_of_every_container(held: Any, tmp_path: Path) -> None:
    held.to_safetensors(tmp_path / "x.safetensors", metadata={"by": "me"})
    same(from_safetensors(tmp_path / "x.safetensors"), rows())
    names = set(safetensors.torch.load_file(tmp_path / "x.safetensors"))
    assert {"a", "v", "n.b"} <= names or "0.n.b" in names
    with safetensors.safe_open(tmp_path / "x.safetensors", "pt") as file:
        assert file.metadata()["by"] == "me"


def test_safetensors_of_others(tmp_path: Path) -> None:
    state = {"layer.weight": torch.ones(2, 3), "layer.bias": torch.zeros(2).bfloat16()}
    safetensors.torch.save_file(state, tmp_path / "x.safetensors")
    td = from_safetensors(tmp_path / "x.safetensors")
    assert td["layer", "bias"].dtype == torch.bfloat16
    assert td.batch_size == torch.Size([])
    assert from_safetensors(tmp_path / "x.safetensors", auto_batch_size=True).batch_size == torch.Size([2])
    assert from_safetensors(tmp_path / "x.safetensors", separator=None)["layer.bias"].shape == torch.Size([2])


def test_safetensors_of_shared_memory_and_uneven_stacks(tmp_path: Path) -> None:
    base = torch.arange(4)
    td = TensorDict({"a": base, "b": base, "c": base[1:].expand(2, 3)})
    td.to_safetensors(tmp_path / "x.safetensors")
    same(from_safetensors(tmp_path / "x.safetensors"), td)
    stack = lazy_stack([TensorDict({"x": torch.ones(i)}) for i in (1, 2)])
    stack.to_safetensors(tmp_path / "y.safetensors")
    assert [len(x) for x in from_safetensors(tmp_path / "y.safetensors").get("x", as_list=True)] == [1, 2]
    with pytest.raises(ValueError, match=r"'a\.b'"):
        TensorDict({"a": {"b": 1}, "a.b": 2}).to_safetensors(tmp_path / "z.safetensors")


@pytest.mark.parametrize(
    "note", ["no json", "[]", '{"leaves": {}}', '{"leaves": {"a": ["a"]}, "format": 1, "groups": [[["b"], {}]]}']
)
def test_safetensors_that_lie_are_refused(note: str, tmp_path: Path) -> None:
    safetensors.torch.save_file({"a": torch.ones(2)}, tmp_path / "x.safetensors", {"tdstore": note})
    with pytest.raises(CorruptStoreError):
        from_safetensors(tmp_path / "x.safetensors")


def test_safetensors_that_lack_a_tensor_are_refused(tmp_path: Path) -> None:
    rows().to_safetensors(tmp_path / "x.safetensors")
    with safetensors.safe_open(tmp_path / "x.safetensors", "pt") as file:
        note = json.loads(file.metadata()["tdstore"])
    safetensors.torch.save_file({"a": torch.ones(4)}, tmp_path / "y.safetensors", {"tdstore": json.dumps(note)})
    with pytest.raises(StoreError):
        from_safetensors(tmp_path / "y.safetensors").to_tensordict()


@pytest.mark.parametrize("name", ["h5", "zarr"])
def test_storages_by_name(name: str, tmp_path: Path) -> None:
    td = TensorDict({"a": torch.zeros(3, 4), "n": {"b": torch.zeros(3, 4, 2)}}, [3])
    read = getattr(TensorDict, f"from_{name}")
    getattr(td, f"to_{name}")(tmp_path / "x").close()
    assert read(tmp_path / "x").batch_size == torch.Size([3])
    assert getattr(tdstore, f"from_{name}")(tmp_path / "x", batch_size=[3, 4]).batch_size == torch.Size([3, 4])
    auto = read(tmp_path / "x", auto_batch_size=True)
    assert (auto.batch_size, auto["n"].batch_size) == (torch.Size([3, 4]), torch.Size([3, 4, 2]))
    assert read(tmp_path / "x", auto_batch_size=True, batch_dims=1).batch_size == torch.Size([3])
    assert read(tmp_path / "x", device="cpu").device == torch.device("cpu")
    assert read(tmp_path / "x").batch_size == torch.Size([3])  # nobody has changed the file
    with pytest.raises(TypeError, match="not both"):
        read(tmp_path / "x", batch_size=[3], auto_batch_size=True)


def test_a_server_by_name(redis: Any) -> None:
    host, port = redis.url.split("//")[1].split("/")[0].split(":")
    where = {"host": host, "port": int(port)}
    prefix = f"convert-{uuid.uuid4().hex}"
    stored = rows().to_store(prefix=prefix, **where)
    same(stored, rows())
    stored.close()
    name = f"{prefix}/mine"
    rows().to_store(location=name, **where).close()
    with tdstore.open(name, storage="redis", **where) as td:
        same(td, rows())


# -- small methods -----------------------------------------------------------------------------
def test_as_tensor(held: Any) -> None:
    td = held.as_tensor()
    assert {type(leaf) for leaf in td.values(True, True)} == {torch.Tensor}
    same(td, rows())


def test_as_tensor_shares_memory(tmp_path: Path) -> None:
    td = TensorDict({"a": torch.zeros(2)}, [2]).memmap(tmp_path / "m")
    td.as_tensor()["a"][0] = 3
    assert td["a"][0] == 3


def test_new_tensor_of_every_container(held: Any) -> None:
    td = held.new_tensor(torch.tensor([1.5, 0.0]))
    assert (td["a"].tolist(), td["n", "b"].tolist()) == ([1, 0], [True, False])
    assert held.new_tensor(rows()[:2], requires_grad=False).batch_size == torch.Size([2])


def test_backward_names_the_entry() -> None:
    x = torch.ones(2, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"'n' / 'big' has 2 elements"):
        TensorDict({"n": {"big": 2 * x}}).backward()
    with pytest.raises(KeyError, match="big"):
        TensorDict({"big": 2 * x}).backward(TensorDict({"other": x}))


def test_streams_need_live_leaves(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="to\\(device\\)"):
        rows().save(tmp_path / "x.h5").record_stream(None)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="pins memory for a GPU")
def test_pinned(held: Any) -> None:
    td = held.pin_memory()
    assert all(leaf.is_pinned() for leaf in td.values(True, True))
    same(td, rows())
    moved = td.to("cuda", non_blocking=True).record_stream(torch.cuda.current_stream())
    same(moved.cpu(), rows())


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_nothing_to_pin_for(held: Any) -> None:
    """The peer raises, so that a program for GPUs does not run without one."""
    td = rows()
    same(held.pin_memory(), td)
    same(held.pin_memory(num_threads=2).to("cpu", non_blocking_pin=True), td)
    assert td.pin_memory_() is td and td.pin_memory_("auto") is td and td.pin_memory(inplace=True) is td


def test_default_of_get(held: Any) -> None:
    assert held.get("missing") is None
    tdstore.set_get_defaults_to_none(False)
    try:
        for get in (lambda: held.get("missing"), lambda: held.get(("n", "missing")), lambda: held.get_at("missing", 0)):
            with pytest.raises(KeyError, match="missing"):
                get()
        assert held.get("missing", None) is None
        held.setdefault("a", torch.zeros(4))
    finally:
        tdstore.set_get_defaults_to_none(True)


def test_print_options_for_good_and_of_stored_ones(tmp_path: Path) -> None:
    before = tdstore.get_printoptions()
    try:
        tdstore.set_printoptions(verbose=False, show_storage_size=True, plain=True).set()
        text = repr(rows().save(tmp_path / "x.h5"))
    finally:
        tdstore.set_printoptions(**before).set()
    assert "a: Tensor(shape=torch.Size([4]))" in text  # nothing is read to be shown
    assert "dtype" not in tdstore.set_printoptions(verbose=False)(lambda: repr(rows()))()
    assert tdstore.get_printoptions() == before
