"""Batches of samples by `collate`; what is pinned here is what tensordict 0.15.3 returned."""

from __future__ import annotations

import functools
from collections import OrderedDict, namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import tdstore
from tdstore import LazyStackedTensorDict, NonTensorData, TensorDict, collate
from tdstore.errors import (
    BatchSizeError,
    InvalidArgumentError,
    InvalidKeyError,
    InvalidStateError,
    InvalidTypeError,
    KeyNotFoundError,
    UnknownFieldError,
)

Pair = namedtuple("Pair", "td y")


@tdstore.tensorclass
class Step:
    a: torch.Tensor
    m: Any = None
    s: str = "x"


def samples() -> list[TensorDict]:
    return [
        TensorDict(
            {
                "ids": torch.arange(n) + 1,
                "points": torch.ones(n + 1, 3),
                "n": {"x": torch.arange(n), "y": torch.tensor(n)},
                "t": NonTensorData(f"v{n}"),
            }
        )
        for n in (3, 1, 2)
    ]


@pytest.mark.parametrize("place", ["dense", "memmap", "h5"])
def test_padding_masks_and_nested_tensors(place: str, tmp_path: Path) -> None:
    tds: list[Any] = samples()
    if place != "dense":
        end = ".h5" if place == "h5" else ""
        tds = [td.save(str(tmp_path / f"{i}{end}")) for i, td in enumerate(tds)]
    made = collate(tds, pad_keys={"ids": -1, ("n", "x"): 9}, nested_keys=["points"], mask_key=("q", "m"))
    assert type(made) is TensorDict and made.batch_size == torch.Size([3])
    assert made["ids"].tolist() == [[1, 2, 3], [1, -1, -1], [1, 2, -1]]
    assert made["n", "x"].tolist() == [[0, 1, 2], [0, 9, 9], [0, 1, 9]]
    assert made["points"].is_nested and [part.shape[0] for part in made["points"].unbind()] == [4, 2, 3]
    mask = [[True, True, True], [True, False, False], [True, True, False]]
    assert made["q", "m", "ids"].tolist() == made["q", "m", "n", "x"].tolist() == mask
    assert set(made["q", "m"].keys(True, True)) == {"ids", ("n", "x")}
    assert made["n", "y"].tolist() == [3, 1, 2] and list(made["t"]) == ["v3", "v1", "v2"]
    assert tds[0]["ids"].tolist() == [1, 2, 3] and "q" not in tds[0]  # the samples are as they were
    assert sorted(tds[0]["n"].keys()) == ["x", "y"]


def test_what_is_not_named_is_stacked_lazily_where_it_differs() -> None:
    for made in (collate(samples()), collate(samples(), pad_keys={"ids": 0}), collate(samples(), pad_keys={})):
        assert isinstance(made, LazyStackedTensorDict) and made.batch_size == torch.Size([3])
    made = collate(samples(), pad_keys={"ids": 0})
    assert made["ids"].shape == (3, 3) and [td["points"].shape[0] for td in made.unbind(0)] == [4, 2, 3]
    assert type(collate([td.select("t") for td in samples()])) is TensorDict


def test_samples_of_parts() -> None:
    pad = functools.partial(collate, pad_keys={"ids": 0, "points": 0, ("n", "x"): 0})
    td, y = pad([(td, i) for i, td in enumerate(samples())])
    assert type(td) is TensorDict and td["ids"].shape == (3, 3) and y.tolist() == [0, 1, 2]
    named = pad([Pair(td, i) for i, td in enumerate(samples())])
    assert type(named) is Pair and named.td["ids"].shape == (3, 3)
    made = pad([OrderedDict(td=td, y={"z": "a"}) for td in samples()])
    assert type(made) is dict and made["td"]["ids"].shape == (3, 3) and made["y"] == {"z": ["a"] * 3}
    assert pad([[td] for td in samples()])[0]["ids"].shape == (3, 3)  # there, lists are left to torch
    assert collate([torch.ones(2), torch.zeros(2)]).tolist() == [[1, 1], [0, 0]]
    assert collate([1, 2]).tolist() == [1, 2] and collate(["a", "b"]) == ["a", "b"]
    assert [part.tolist() for part in collate([[1, 2], [3, 4]])] == [[1, 3], [2, 4]]
    assert collate([NonTensorData("a"), NonTensorData("b")]).tolist() == ["a", "b"]


def test_what_is_a_batch_already_is_returned() -> None:
    td = samples()[0]
    assert collate(td) is td and collate(td, pad_keys={"zz": 0}) is td
    assert collate([]) == [] and collate((1, 2)) == (1, 2)


def test_tensorclasses() -> None:
    steps = [Step(torch.arange(n), batch_size=[]) for n in (1, 2)]
    made = collate(steps, pad_keys={"a": 7}, mask_key="m")
    assert type(made) is Step and made.a.tolist() == [[0, 7], [0, 1]]
    assert made.m["a"].tolist() == [[True, False], [True, True]] and list(made.s) == ["x", "x"]
    assert type(collate(steps)) is Step and collate(steps, nested_keys=["a"]).a.is_nested
    with pytest.raises(UnknownFieldError, match="zz"):
        collate(steps, pad_keys={"a": 7}, mask_key="zz")


def test_gradients_flow() -> None:
    tds = [TensorDict({"a": torch.ones(n, requires_grad=True), "b": torch.ones(n, requires_grad=True)}) for n in (1, 2)]
    made = collate(tds, pad_keys={"a": 0}, nested_keys=["b"])
    (made["a"].sum() + made["b"].values().sum()).backward()
    assert tds[1]["a"].grad.tolist() == tds[1]["b"].grad.tolist() == [1, 1]


def test_in_a_loader() -> None:
    pad = functools.partial(collate, pad_keys={"ids": 0, "points": 0, ("n", "x"): 0})
    loader = DataLoader([(td.lock_(), 1) for td in samples()], 2, collate_fn=pad)
    batches = list(loader)
    assert [len(td) for td, _ in batches] == [2, 1] and not batches[0][0].is_locked


def batched() -> list[TensorDict]:
    return [TensorDict({"a": torch.ones(2, n)}, [2]) for n in (1, 2)]


WRONG: dict[str, tuple[Any, dict[str, Any], type[Exception], str]] = {
    "masks of nothing": (samples(), {"mask_key": "m"}, InvalidArgumentError, "needs pad_keys"),
    "mask is an entry": (samples(), {"pad_keys": {"ids": 0}, "mask_key": "n"}, InvalidArgumentError, "has that entry"),
    "twice": (samples(), {"pad_keys": {"ids": 0}, "nested_keys": ["ids"]}, InvalidArgumentError, "both"),
    "missing": (samples(), {"pad_keys": {"zz": 0}}, KeyNotFoundError, "'zz'"),
    "missing nested": (samples(), {"nested_keys": ["zz"]}, KeyNotFoundError, "'zz'"),
    "others differ": (samples(), {"nested_keys": ["ids"]}, InvalidArgumentError, "one shape"),
    "a TensorDict": (samples(), {"pad_keys": {"n": 0}}, InvalidTypeError, "no tensor"),
    "a value": (samples(), {"pad_keys": {"t": 0}}, InvalidTypeError, "no tensor"),  # there, it is ignored
    "a scalar": (samples(), {"pad_keys": {("n", "y"): 0}}, InvalidArgumentError, "no dimension"),
    "a list to pad": (samples(), {"pad_keys": ["ids"]}, InvalidTypeError, "pad_keys"),
    "a string to nest": (samples(), {"nested_keys": "ids"}, InvalidTypeError, "nested_keys"),
    "no number": (samples(), {"pad_keys": {"ids": "x"}}, InvalidTypeError, "number"),
    "no key": (samples(), {"pad_keys": {3: 0}}, InvalidKeyError, "3"),
    "batch dimensions": (batched(), {"pad_keys": {"a": 0}}, BatchSizeError, "first dimension"),
    "mixed": ([samples()[0], 1], {}, InvalidTypeError, "another one a int"),
    "unequal tuples": ([(1, 2), (1,)], {}, InvalidArgumentError, "parts"),  # there, the longer is cut
    "unequal dicts": ([{"a": 1}, {"b": 1}], {}, KeyNotFoundError, "'a'"),
    "nothing torch knows": ([None], {}, InvalidTypeError, "NoneType"),
    "other widths": (
        [TensorDict({"a": torch.ones(1, n)}) for n in (2, 3)],
        {"pad_keys": {"a": 0}},
        InvalidStateError,
        "shapes",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments(case: str) -> None:
    batch, options, error, text = WRONG[case]
    with pytest.raises(error, match=text):
        collate(batch, **options)
