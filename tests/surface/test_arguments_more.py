"""Arguments and edges that a suite written from the published text alone found wrong: each was, once."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tensordict
import torch

import tdstore
from tdstore import LazyStackedTensorDict, MemoryMappedTensor, NonTensorStack, PersistentTensorDict, TensorDict
from tdstore.errors import BatchSizeError, UntrustedDataError

from .containers import KINDS, Place, floats, mixed

Build = Callable[..., Place]


@pytest.fixture(params=["TensorDict", "memmap", "lazy 0", "lazy 1", "h5", "zarr", "remote", "window"])
def build(request: pytest.FixtureRequest, tmp_path: Path) -> Build:
    return lambda td=None: KINDS[request.param](floats() if td is None else td, tmp_path, None)


def wide() -> Any:
    """A nested TensorDict of a larger batch size."""
    n = TensorDict(c=torch.arange(12).view(4, 3), e=torch.ones(4, 3, 2), batch_size=[4, 3])
    return TensorDict(a=torch.ones(4, 3), n=n, batch_size=[4])


# -- with -----------------------------------------------------------------------------------------
def test_with_where_there_is_nothing_to_do(build: Build) -> None:
    td = build().td
    td.unlock_()
    with td.unlock_() as same:
        assert same is td
        with td.unlock_():
            assert not td.is_locked
    assert not td.is_locked
    with td.lock_():
        with td.lock_(), td.unlock_():
            assert not td.is_locked
        assert td.is_locked
    assert not td.is_locked
    assert torch.equal(td["a"], floats()["a"])  # and nothing was closed


@pytest.mark.parametrize(
    "move",
    [
        lambda td: td.permute(0, 1),
        lambda td: td.transpose(1, 1),
        lambda td: td.view(4, 2),
        lambda td: td.reshape(4, 2),
        lambda td: td.squeeze(),
    ],
)
def test_with_a_move_that_moves_nothing(move: Callable[[Any], Any]) -> None:
    td = floats().lock_()
    with move(td) as same:
        assert same is td
    assert td.is_locked  # what lock_() had offered to undo is not
    with td.unlock_(), move(td):
        td["new"] = torch.ones(4, 2)
    assert td.is_locked


def test_with_a_reshaped_batch(build: Build) -> None:
    td = build().td
    td.unlock_()
    with td.reshape(8) as flat:
        flat["a"] = flat["a"] + 1
    assert torch.equal(td["a"], floats()["a"] + 1)
    one = TensorDict(x=torch.tensor(3.0))
    with one.unsqueeze(0) as row:
        row["y"] = torch.ones(1)
    assert one["y"].shape == one.unsqueeze(0).reshape(()).batch_size == ()


# -- shapes and dtypes ----------------------------------------------------------------------------
def test_bytes_seen_as_another_dtype(build: Build) -> None:
    td = build().td.select("a")
    seen = td.view(torch.uint8)
    assert seen["a"].shape == (4, 2, 12)
    assert torch.equal(seen["a"], floats()["a"].view(torch.uint8))
    assert td.view(torch.int32, batch_size=[4]).batch_size == (4,)
    with pytest.raises(BatchSizeError, match="viewed as torch.int32"):
        build().td.select(("n", "c")).view(torch.int32)


def test_bytes_seen_in_place() -> None:
    td = floats().select("a")
    with td.view(torch.int32) as seen:
        seen["a"].zero_()
        seen["b"] = torch.ones(4, 2)
    assert td["a"].sum() == 0
    assert td["a"].dtype == torch.float32
    assert td["b"].sum() == 8


KEYWORDS = {
    "swapdims": lambda td: (td.swapdims(axis0=0, axis1=1), td.transpose(0, 1)),
    "tile": lambda td: (td.tile(dims=(2, 1)), td.tile(2, 1)),
    "flip": lambda td: (td.flip(dims=(0,)), td.flip(0)),
    "broadcast_to": lambda td: (td.broadcast_to(shape=(3, 4, 2)), td.expand(3, 4, 2)),
    "reshape": lambda td: (td.reshape(size=(2, 4)), td.reshape(shape=(2, 4))),
    "sub_": lambda td: (td.clone().sub_(floats(), 2), td - floats() * 2),
}


@pytest.mark.parametrize("name", KEYWORDS)
def test_keywords(name: str, build: Build) -> None:
    found, want = KEYWORDS[name](build().td)
    assert found.batch_size == want.batch_size
    assert (found == want).all()


def test_leaves_of_another_batch_on_a_device() -> None:
    td = TensorDict(floats(), floats().batch_size, names=["time", "env"])
    assert td.device is None
    assert td.new_zeros(3, device="cpu", empty_lazy=True).device == torch.device("cpu")
    assert td.new_full([], 7).names == []
    assert td.new_ones(5, 3).names == ["time", "env"]
    assert td.to("cpu").apply(lambda x: x, device=None).device is None


# -- nested batch sizes that are larger ----------------------------------------------------------
@pytest.mark.parametrize("M", [tdstore, tensordict], ids=["ours", "peer"])
def test_a_nested_batch_that_the_results_lack(M: Any) -> None:
    nested = M.TensorDict({"c": torch.arange(12).view(4, 3)}, [4, 3])
    td = M.TensorDict({"a": torch.ones(4, 3), "n": nested}, [4])
    assert td.apply(lambda x: x.sum(), batch_size=[])["n"].batch_size == ()
    assert td.apply(lambda x: x, batch_size=[])["n", "c"].shape == (4, 3)
    if M is tdstore:  # the peer's warns
        assert td.new_tensor(torch.zeros(5))["n", "c"].shape == (5,)
    features = td.sum(dim="feature")
    assert features["n"].batch_size == (4, 3)
    assert features["a"].shape == (4,)
    assert features["n", "c"].shape == (4, 3)


@pytest.mark.parametrize("kind", ["TensorDict", "memmap", "lazy 0", "h5", "zarr"])
def test_features_below_a_larger_batch(kind: str, tmp_path: Path) -> None:
    found = KINDS[kind](wide(), tmp_path, None).td.sum(dim="feature")
    assert found["n"].batch_size == (4, 3)
    assert found["n", "e"].tolist() == [[2.0] * 3] * 4


@pytest.mark.parametrize("M", [tdstore, tensordict], ids=["ours", "peer"])
def test_the_batch_of_what_holds_no_tensors(M: Any) -> None:
    assert M.TensorDict({}, [4, 3]).auto_batch_size_(1).batch_size == (4,)
    td = M.TensorDict({"a": torch.ones(4), "n": M.TensorDict({"t": "text"}, [4])}, [4])
    assert td.auto_batch_size_().batch_size == (4,)


# -- values ---------------------------------------------------------------------------------------
def with_values() -> Any:
    entries = {"a": torch.ones(4), "s": NonTensorStack("w", "x", "y", "z"), "n": {"t": "in"}}
    return TensorDict(entries, batch_size=[4])


@pytest.mark.parametrize("kind", ["TensorDict", "memmap", "lazy 0", "h5", "zarr"])
@pytest.mark.parametrize("pad", [None, 0])
def test_where_chooses_values_too(kind: str, pad: Any, tmp_path: Path) -> None:
    td = with_values()
    other = td.clone().update({"a": torch.zeros(4), "s": NonTensorStack("1", "2", "3", "4"), "n": {"t": "out"}})
    mask = torch.tensor([True, False, True, False])
    place = KINDS[kind](td, tmp_path, None)
    found = place.td.where(mask, other, pad=pad)
    assert found["a"].tolist() == [1, 0, 1, 0]
    assert list(found["s"]) == ["w", "2", "y", "4"]
    assert list(found["n", "t"]) == ["in", "out", "in", "out"]
    assert list(place.td["s"]) == ["w", "x", "y", "z"]


@pytest.mark.parametrize("kind", ["TensorDict", "memmap", "lazy 0", "h5", "zarr"])
def test_values_of_rows_in_a_state_dict(kind: str, tmp_path: Path) -> None:
    td = KINDS[kind](with_values(), tmp_path, None).td
    found = with_values().exclude("s").load_state_dict(td.to_tensordict().state_dict(), strict=False)
    assert list(found["s"]) == ["w", "x", "y", "z"]
    if kind == "memmap":
        assert list(TensorDict({}).load_state_dict(td.state_dict(), strict=False)["s"]) == ["w", "x", "y", "z"]


def test_values_come_wrapped_wherever_they_are_got(build: Build) -> None:
    td = build(mixed()).td
    td.unlock_()
    assert tdstore.is_non_tensor(td.get_at("s", 0))
    assert tdstore.is_non_tensor(td.get("s"))
    popped = td.pop("s")
    assert popped.tolist() == [["text"] * 2] * 4
    assert "s" not in td.keys()


# -- stores ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["x.h5", "x.zarr"])
def test_a_group_of_groups_is_replaced(name: str, tmp_path: Path) -> None:
    deep = TensorDict(d=torch.ones(4, 1), t="deep", batch_size=[4])
    td = TensorDict(n={"deep": deep, "c": torch.ones(4), "t": "text"}, m={"deep": deep}, batch_size=[4])
    with td.save(tmp_path / name) as stored:
        stored.unlock_()
        stored.update({"n": torch.zeros(4)})
        stored.set("m", "text")
    with tdstore.open(tmp_path / name) as again:
        assert again["n"].tolist() == [0] * 4
        assert again["m"] == "text"


@pytest.mark.parametrize("name", ["x", "x.h5", "x.zarr"])
@pytest.mark.parametrize("old", ["a", "n", "s"])
def test_a_renamed_entry_takes_the_place_of_the_other(name: str, old: str, tmp_path: Path) -> None:
    want = list(mixed().rename_key_(old, "b").keys())
    mixed().save(tmp_path / name).close()
    with tdstore.open(tmp_path / name, "r+") as stored:
        assert list(stored.rename_key_(old, "b").keys()) == want
    with tdstore.open(tmp_path / name) as again:
        assert list(again.keys()) == want


def test_dicts_saved_as_one_file(tmp_path: Path) -> None:
    entries = {"a": torch.ones(3, 2), "n": {"c": torch.zeros(3)}, "s": "text"}
    stored = PersistentTensorDict.from_dict(entries, tmp_path / "x.h5", compression="gzip")
    assert isinstance(stored, PersistentTensorDict)
    assert stored.batch_size == (3,)
    stored["a"] = torch.zeros(3, 2)
    stored["late"] = torch.ones(3)  # as with `to_h5`, it is not locked
    stored.close()
    again = PersistentTensorDict(filename=tmp_path / "x.h5", batch_size=[3], validate_batch_size=True)
    assert again["a"].sum() == 0
    assert again["s"] == "text"
    there = PersistentTensorDict.from_dict(entries, tmp_path / "y.zarr", batch_size=[], backend="zarr", device="cpu")
    assert there.batch_size == ()
    assert there.device == torch.device("cpu")
    assert isinstance(PersistentTensorDict.from_dict(entries), TensorDict)


@pytest.mark.parametrize("kind", ["h5", "zarr", "remote"])
def test_load_writes_into_the_store(kind: str, tmp_path: Path) -> None:
    TensorDict(z=torch.ones(3), n={"q": torch.zeros(3)}, batch_size=[3]).save(tmp_path / "other").close()
    place = KINDS[kind](mixed(), tmp_path, None)
    assert place.td.lock_().load_memmap_(tmp_path / "other") is place.td
    assert place.td.is_locked
    assert place.td.load_(place.td._handle.location) is place.td if kind == "remote" else True  # its own: untouched
    seen = place.seen_by_others()
    assert seen.batch_size == seen["n"].batch_size == (3,)
    assert set(seen.keys(True, True)) == {"z", ("n", "q")}
    assert seen["z"].sum() == 3


def test_load_writes_into_a_window(tmp_path: Path) -> None:
    mixed(start=3).save(tmp_path / "other").close()
    place = KINDS["window"](mixed(), tmp_path, None)
    place.td.load_(tmp_path / "other")
    seen = place.seen_by_others()
    assert torch.equal(seen["a"], mixed(start=3)["a"])


@pytest.mark.parametrize("kind", ["TensorDict", "h5", "window"])
def test_what_moved_to_files_knows_where(kind: str, tmp_path: Path) -> None:
    td = KINDS[kind](mixed(), tmp_path, None).td.memmap_(tmp_path / "files")
    assert td.saved_path == str(tmp_path / "files")
    assert td.memmap_refresh_() is td
    assert td.device == torch.device("cpu")
    assert td.is_memmap()
    assert td.is_locked


def test_loading_weights_opens_no_urls(tmp_path: Path) -> None:
    td = KINDS["remote"](mixed(), tmp_path, None).td
    buffer = io.BytesIO()
    torch.save(td, buffer)
    buffer.seek(0)
    with pytest.raises(UntrustedDataError, match="refers to 'memory:"):
        torch.load(buffer, weights_only=True)


# -- lazy stacks ----------------------------------------------------------------------------------
def test_a_lazy_stack_loses_no_entry_to_another_batch() -> None:
    td = tdstore.lazy_stack(list(floats().unbind(0)))
    for dim, size in ((0, [9]), (1, [9]), (1, [])):
        stack = tdstore.lazy_stack(list(floats().unbind(dim)), dim)
        with pytest.raises(BatchSizeError):
            stack.update(TensorDict(a=torch.ones(*size, 9), batch_size=size), update_batch_size=True)
        with pytest.raises(BatchSizeError):
            stack.update(TensorDict(a=torch.ones(*size, 9), batch_size=size))
        assert (stack == floats()).all()
    with pytest.raises(IndexError, match="too many"):
        td[:, :, :, :]
    mask = torch.tensor([[True], [False], [True], [False]])
    for dim in (0, 1):
        stack = tdstore.lazy_stack(list(floats().unbind(dim)), dim)
        assert (stack.where(mask, floats(start=3)) == floats().where(mask, floats(start=3))).all()


@pytest.mark.parametrize("M", [tdstore, tensordict], ids=["ours", "peer"])
def test_a_lazy_stack_of_dicts(M: Any) -> None:
    entries = [{"x": torch.ones(2)}, {"x": torch.ones(3)}]
    for given in (entries, dict(enumerate_as_text(entries))):
        stack = M.LazyStackedTensorDict.from_dict(given, stack_dim=0, stack_dim_name="step")
        assert isinstance(stack, M.LazyStackedTensorDict)
        assert stack.names == ["step"]
        assert stack.get("x", as_list=True)[1].shape == (3,)


def enumerate_as_text(entries: list[Any]) -> Any:
    return ((str(i), entry) for i, entry in enumerate(entries))


def test_any_other_dict_is_no_stack() -> None:
    assert isinstance(LazyStackedTensorDict.from_dict({"a": {"x": torch.ones(2)}}), TensorDict)


# -- functions ----------------------------------------------------------------------------------
def test_functions_by_the_names_that_users_know(tmp_path: Path) -> None:
    td = floats()
    assert tdstore.memmap(td).is_memmap()
    assert tdstore.memmap(data=td, prefix=tmp_path / "x", copy_existing=True).device == torch.device("cpu")
    assert tdstore.save(td, prefix=tmp_path / "y") is not None
    assert tdstore.load_memmap(tmp_path / "x", "meta", True)["a"].is_meta
    assert tdstore.load(prefix=tmp_path / "y")["a"].shape == (4, 2, 3)
    for join in (tdstore.stack, tdstore.lazy_stack, tdstore.maybe_dense_stack):
        assert join(input=[td, td], dim=1).batch_size == (4, 2, 2)
    assert tdstore.cat(input=[td, td], dim=0).batch_size == (8, 2)
    assert MemoryMappedTensor.from_tensor(input=torch.ones(3)).sum() == 3


def test_sets_of_keys_with_new_names_of_a_lazy_stack():
    td = tdstore.lazy_stack([TensorDict({"a": torch.ones(3), "b": torch.ones(3)}, [3]) for _ in range(2)])
    first, second, rest = td.split_keys({"a": "z"}, (key for key in ["b"]))
    assert (list(first.keys()), list(second.keys()), list(rest.keys())) == (["z"], ["b"], [])
