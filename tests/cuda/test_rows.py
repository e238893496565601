"""Rows of containers on a GPU: indices of both devices, masks, writes, joining and splitting."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import tdstore
from tdstore import TensorDict, lazy_stack
from tests.conftest import assert_same
from tests.cuda.test_moves import GPU, Item, devices, on_gpu


def source(start: int = 0) -> TensorDict:
    a = torch.arange(start, start + 24.0).reshape(4, 3, 2)
    i = torch.arange(start, start + 12).reshape(4, 3)
    return TensorDict({"a": a, "n": {"i": i, "b": i % 2 == 0}, "s": "text"}, [4, 3])


CONTAINERS: dict[str, Any] = {
    "plain": lambda: source().to("cuda"),
    "lazy 0": lambda: lazy_stack([x.clone() for x in source().to("cuda").unbind(0)]),
    "lazy 1": lambda: lazy_stack([x.clone() for x in source().to("cuda").unbind(1)], 1),
    "of no device": lambda: source().to("cuda").clear_device_(),
}
INDICES: dict[str, Any] = {
    "int": 2,
    "slice": slice(1, None, 2),
    "none": None,
    "ellipsis": (..., 1),
    "list": [2, 0, 0],
    "tuple": ([0, 1], [2, 0]),
    "numpy": np.array([1, 3]),
    "tensor": torch.tensor([3, 0]),
    "two tensors": (torch.tensor([3, 0]), torch.tensor([1, 1])),
    "tensor of two dims": torch.tensor([[3, 0], [1, 1]]),
    "zero dims": torch.tensor(1),
    "mask": torch.tensor([True, False, True, False]),
    "mask of two dims": torch.arange(12).reshape(4, 3) % 5 == 0,
    "empty": torch.zeros(0, dtype=torch.int64),
    "second": (slice(None), torch.tensor([2, 2, 0])),
    "mask of the second": (slice(None), torch.tensor([True, False, True])),
    "negative": torch.tensor([-1, -4]),
    "range": range(1, 3),
    "int32": torch.tensor([1, 2], dtype=torch.int32),
}


def moved(index: Any, device: str) -> Any:
    if isinstance(index, torch.Tensor):
        return index.to(device)
    return tuple(moved(x, device) for x in index) if isinstance(index, tuple) else index


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("index", INDICES)
@pytest.mark.parametrize("kind", CONTAINERS)
def test_read(kind: str, index: str, device: str) -> None:
    at = moved(INDICES[index], device)
    got = CONTAINERS[kind]()[at]
    want = source()[INDICES[index]]
    if index == "empty" and kind.startswith("lazy"):
        assert got.batch_size == want.batch_size  # a stack of nothing has no entries
        return
    assert on_gpu(got)
    compare(got, want)


def compare(got: Any, want: Any) -> None:
    got = got.cpu()
    assert got.batch_size == want.batch_size
    for key in (("a",), ("n", "i"), ("n", "b")):
        assert torch.equal(got.get(key), want.get(key)), key


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("values", ["cpu", "cuda", "number", "dict"])
@pytest.mark.parametrize("index", [name for name in INDICES if name not in ("none", "empty", "list", "second")])
@pytest.mark.parametrize("kind", CONTAINERS)
def test_write(kind: str, index: str, values: str, device: str) -> None:
    at, td, want = moved(INDICES[index], device), CONTAINERS[kind](), source()
    if values == "number":
        td.exclude("s", inplace=True), want.exclude("s", inplace=True)
        td[at] = 1
        want[INDICES[index]] = 1
    else:
        part = torch.zeros_like(source(50)[INDICES[index]].exclude("s"))
        new: Any = part.to("cuda") if values == "cuda" else part.to_dict() if values == "dict" else part
        if values == "dict":
            part_entries = {"a": part["a"], "n": {"i": part["n", "i"], "b": part["n", "b"]}}
            new = part_entries
        td[at] = new
        want[INDICES[index]] = part
    assert on_gpu(td)
    compare(td, want)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_get_at_and_set_at(device: str) -> None:
    td, rows = source().to("cuda"), torch.tensor([1, 3], device=device)
    assert td.get_at(("n", "i"), rows).tolist() == source()["n", "i"][[1, 3]].tolist()
    td.set_at_("a", torch.zeros(2, 3, 2, device="cuda"), rows)
    assert td["a"][rows].abs().sum().item() == 0
    td.update_at_(source(50)[:2].exclude("s").to("cuda"), rows)
    assert td["n", "i"][1].tolist() == [50, 51, 52]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_masks(device: str) -> None:
    mask = (torch.arange(12).reshape(4, 3) % 5 == 0).to(device)
    td, want = source().exclude("s").to("cuda"), source().exclude("s")
    compare(td.masked_select(mask), want.masked_select(mask.cpu()))
    compare(td.masked_fill(mask.to("cuda"), 0), want.masked_fill(mask.cpu(), 0))
    compare(td.where(mask.to("cuda"), td * 0), want.where(mask.cpu(), want * 0))
    assert on_gpu(td.masked_select(mask))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_gather_split_and_joins(device: str) -> None:
    td, want = source().exclude("s").to("cuda"), source().exclude("s")
    index = torch.tensor([[2, 0, 1], [1, 1, 1]])
    compare(td.gather(0, index.to("cuda")), want.gather(0, index))
    for got, right in zip(td.split(3), want.split(3), strict=True):
        compare(got, right)
    for got, right in zip(td.chunk(2, 1), want.chunk(2, 1), strict=True):
        compare(got, right)
    compare(torch.cat(list(td.split([1, 3])), 0), want)
    compare(torch.stack(list(td.unbind(1)), 1), want)
    compare(lazy_stack(list(td.unbind(1)), 1), want)
    compare(td.repeat_interleave(2, dim=0), want.repeat_interleave(2, dim=0))
    compare(td.flip(0), want.flip(0))
    compare(td.reshape(12), want.reshape(12))
    compare(td.permute(1, 0), want.permute(1, 0))
    assert torch.stack([td, td]).device == GPU


def test_joins_of_both_devices() -> None:
    """As for tensors: they have to be on one device."""
    td = source().exclude("s")
    for join in (torch.stack, torch.cat):
        with pytest.raises(RuntimeError, match="device"):
            join([td.to("cuda"), td.to("cpu")])


def test_padding() -> None:
    td = source().exclude("s").to("cuda")
    compare(tdstore.pad(td, [1, 0, 0, 2], 7), tdstore.pad(td.cpu(), [1, 0, 0, 2], 7))
    parts = [TensorDict({"a": torch.arange(n + 1.0)}, [n + 1]).to("cuda") for n in range(3)]
    made = tdstore.pad_sequence(parts, return_mask=True)
    assert on_gpu(made)
    want = tdstore.pad_sequence([x.cpu() for x in parts], return_mask=True)
    assert_same(made.cpu(), want.to("cpu"))


@pytest.mark.parametrize("op", ["sum", "mean", "std", "amax", "prod", "isfinite", "softmax", "norm"])
def test_reductions(op: str) -> None:
    td = TensorDict({"a": torch.rand(4, 3), "n": {"b": torch.rand(4, 3)}}, [4, 3])
    call = (lambda x: x.softmax(0)) if op == "softmax" else (lambda x: getattr(x, op)())
    got, want = call(td.to("cuda")), call(td)
    if isinstance(want, TensorDict):
        assert on_gpu(got)
        for key in ("a", ("n", "b")):
            torch.testing.assert_close(got[key].cpu(), want[key])
    else:
        torch.testing.assert_close(got.cpu(), want)


def test_comparisons() -> None:
    td = source().to("cuda")
    same = td == source().to("cuda")
    assert devices(same.exclude("s")) == {GPU}
    assert same.all()
    assert not (td == source(1).to("cuda")).all()
    assert (td == td).all(0)["a"].device == GPU
    assert tdstore.assert_close(td, source().to("cuda")) in (True, None)
    with pytest.raises(AssertionError):
        tdstore.assert_close(td, source(1).to("cuda"))


def test_apply_and_named_apply() -> None:
    td = source().exclude("s").to("cuda")
    assert on_gpu(td.apply(lambda x: x + 1))
    assert on_gpu(td.named_apply(lambda name, x: x * 2))
    assert td.apply(lambda x: x.cpu(), device="cpu").device == torch.device("cpu")
    td.apply_(lambda x: x.zero_())
    assert not td["a"].any()


def test_classes() -> None:
    items = Item(a=torch.arange(4.0), batch_size=[4]).to("cuda")
    picked = items[torch.tensor([3, 1])]
    assert picked.a.tolist() == [3, 1]
    assert picked.a.device == GPU
    items[torch.tensor([0, 1], device="cuda")] = Item(a=torch.zeros(2), batch_size=[2]).to("cuda")
    assert items.a.tolist() == [0, 0, 2, 3]


def test_arithmetic_with_what_is_on_the_cpu() -> None:
    """A number and a tensor without dimensions may be anywhere; other tensors may not, as in torch."""
    td = source().exclude("s", "n").to("cuda")
    assert (td + torch.tensor(2.0))["a"].device == GPU
    with pytest.raises(RuntimeError, match="device"):
        td + source().exclude("s", "n")
    assert on_gpu(td + source().exclude("s", "n").to("cuda"))
    assert on_gpu(td.lerp(td * 2, 0.5))
    td += 1
    assert td["a"][0, 0].tolist() == [1, 2]


VALUES: dict[str, Any] = {
    "rows": lambda td, on: td[on([2, 0, 0])],
    "mask": lambda td, on: td[on([True, False, True, False])],
    "two dims": lambda td, on: td[on([[3, 0], [1, 1]])],
    "gather": lambda td, on: td.gather(0, on([2, 0])),
    "masked_select": lambda td, on: td.masked_select(on([True, False, True, False])),
    "repeat_interleave": lambda td, on: td.repeat_interleave(on([1, 0, 2, 1]), dim=0),
    "repeated": lambda td, on: td.repeat_interleave(2, dim=0),
    "where": lambda td, on: td.where(on([True, False, True, False]), td.flip(0)),
    "split": lambda td, on: torch.cat(td.split([1, 3])),
    "get": lambda td, on: td.get_at("a", on([1, 3])),
    "write": lambda td, on: written(td, on([1, 3]), td[:2].clone()),
    "write one": lambda td, on: written(td, on([1, 3]), td[0].clone()),
    "write a mask": lambda td, on: written(td, on([True, False, True, False]), td[:2].clone()),
}


def written(td: Any, index: Any, value: Any) -> Any:
    td[index] = value
    return td


@pytest.mark.parametrize("call", VALUES)
@pytest.mark.parametrize("kind", ["plain", "lazy", "stored"])
def test_values_beside_leaves(kind: str, call: str, tmp_path: Any) -> None:
    """Strings, jagged tensors and lists beside leaves of a GPU follow an index that is there."""

    def make(device: str) -> Any:
        td = TensorDict({"a": torch.arange(8.0).reshape(4, 2), "s": "text", "rows": [f"r{i}" for i in range(4)]}, [4])
        if call in ("rows", "mask") and kind == "plain":
            td["j"] = torch.nested.nested_tensor([torch.arange(i + 1.0) for i in range(4)], layout=torch.jagged)
        if kind == "lazy":
            return lazy_stack([part.clone() for part in td.to(device).unbind(0)])
        if kind == "stored":
            return td.save(tmp_path / f"{device}.h5") if "write" not in call else td.to(device)
        return td.to(device)

    want = VALUES[call](make("cpu"), torch.tensor)
    if kind == "stored" and call in ("where",):
        return
    got = VALUES[call](make("cuda"), lambda values: torch.tensor(values, device="cuda"))
    if isinstance(want, torch.Tensor):
        assert got.tolist() == want.tolist()
        return
    assert got["a"].tolist() == want["a"].tolist()
    assert got.get("rows").tolist() == want.get("rows").tolist()
    if "j" in want:
        assert [t.tolist() for t in got["j"].unbind()] == [t.tolist() for t in want["j"].unbind()]
