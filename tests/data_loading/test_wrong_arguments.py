"""Arguments that epochs and mixtures cannot take are named when these are made, not when the first batch is read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tdstore import TensorDict
from tdstore.data import Epochs, Mixture, TensorDictDataset
from tdstore.errors import (
    DeviceError,
    IndexKindError,
    InvalidArgumentError,
    InvalidTypeError,
    OutOfRangeError,
    TDStoreError,
)

DATA = TensorDict({"a": torch.arange(6)}, [6])

CALLS: dict[str, tuple[Callable[[], Any], type[TDStoreError], str]] = {
    "half a batch": (lambda: Epochs(DATA, 2.5), InvalidTypeError, "batch_size must be an int, not a float"),
    "no batch": (lambda: Epochs(DATA, None), InvalidTypeError, "batch_size must be an int, not None"),
    "a rank": (lambda: Epochs(DATA, 2, rank="0", world_size=2), InvalidTypeError, "rank must be an int, not a str"),
    "a span": (lambda: Epochs(DATA, 2, span=[1]), InvalidTypeError, "span must be an int, not a list"),
    "batches read ahead": (lambda: Epochs(DATA, 2, prefetch=None), InvalidTypeError, "prefetch must be an int"),
    "batches without end": (
        lambda: Epochs(DATA, 2, prefetch=10**30),
        InvalidArgumentError,
        "to read ahead is between 0 and 1024",
    ),
    "batches read before": (lambda: Mixture([Epochs(DATA, 2)], prefetch=-1), InvalidArgumentError, "prefetch=-1"),
    "no seed": (lambda: Epochs(DATA, 2, seed=None), InvalidTypeError, "seed must be an int, not None"),
    "a seed": (lambda: Mixture([Epochs(DATA, 2)], seed="x"), InvalidTypeError, "seed must be an int, not a str"),
    "seconds without end": (lambda: Epochs(DATA, 2, timeout=10**30), InvalidArgumentError, "at most 9223372036"),
    "rows without end": (lambda: Epochs(DATA, 10**30), InvalidArgumentError, "batch_size=1.*, and below 2"),
    "batches handed out": (lambda: Epochs(DATA, 2).state_dict("x"), InvalidTypeError, "batches must be an int"),
    "weights": (lambda: Mixture([Epochs(DATA, 2)], weights="x"), InvalidTypeError, "weights must be a sequence of num"),
    "half a row": (lambda: TensorDictDataset(DATA)[2.7], IndexKindError, "rows of a dataset are ints, not .2.7"),
    "a row as text": (lambda: TensorDictDataset(DATA)["2"], IndexKindError, "rows of a dataset are ints, not"),
    "no row": (lambda: TensorDictDataset(DATA)[None], IndexKindError, "rows of a dataset are ints, not .None"),
    "a far row": (lambda: TensorDictDataset(DATA)[10**30], OutOfRangeError, "no dataset has a row"),
    "a timeout": (lambda: Epochs(DATA, 2, timeout="1s"), InvalidTypeError, "timeout must be a number of seconds"),
    "a device": (lambda: Epochs(DATA, 2, device="gpu"), DeviceError, "'gpu' is no device"),
    "a transform": (
        lambda: Epochs(DATA, 2, transform="x"),
        InvalidTypeError,
        "transform must be a function",
    ),
    "columns": (lambda: TensorDictDataset(DATA, columns=3), InvalidTypeError, "columns must be a sequence of keys"),
    "options": (lambda: TensorDictDataset(DATA, options="x"), InvalidTypeError, "options must be a dict, not a str"),
    "a transform of a dataset": (lambda: TensorDictDataset(DATA, transform=3), InvalidTypeError, "must be a function"),
    "an epoch": (lambda: Epochs(DATA, 2).set_epoch("1"), InvalidTypeError, "epoch must be an int, not a str"),
    "no sources": (lambda: Mixture(None), InvalidTypeError, "sources must be a sequence of Epochs, not None"),
    "data as a source": (lambda: Mixture([DATA]), InvalidTypeError, "must be an Epochs, not a TensorDict"),
    "batches": (lambda: Mixture([Epochs(DATA, 2)], batches=2.5), InvalidTypeError, "batches must be an int"),
}


@pytest.mark.parametrize("name", CALLS)
def test_the_error_names_the_argument(name: str) -> None:
    call, kind, text = CALLS[name]
    with pytest.raises(kind, match=text):
        call()


def test_an_epoch_beyond_all_changes_nothing() -> None:
    epochs = Epochs(DATA, 2)
    epochs.set_epoch(3)
    before = epochs.state_dict()
    with pytest.raises(InvalidArgumentError, match="epochs are counted from 0, up to 2"):
        epochs.set_epoch(10**30)
    assert epochs.state_dict() == before


@pytest.mark.parametrize("rows", [[2, -1], torch.tensor([2, -1]), [torch.tensor(2), torch.tensor(-1)], range(5, 1, -3)])
def test_rows_of_all_kinds_of_ints(rows: Any) -> None:
    want = [2, 5] if not isinstance(rows, range) else [5, 2]
    assert TensorDictDataset(DATA).__getitems__(rows)["a"].tolist() == want


@pytest.mark.parametrize("episodes", [{}, float("nan"), 2**70, b"x", [0.0, 2.5], [True]], ids=repr)
def test_episodes_are_a_key_or_first_rows(episodes):
    with pytest.raises(TDStoreError, match="^episodes"):
        list(Epochs(DATA, 2, span=1, episodes=episodes))


def test_states_with_impossible_numbers_change_nothing():
    epochs = Epochs(DATA, 2)
    mixture = Mixture([Epochs(DATA, 2)])
    for stream, names in ((epochs, ["epoch"]), (mixture, ["epoch", "step"])):
        before = stream.state_dict()
        for name in names:
            with pytest.raises(InvalidArgumentError, match="a state with epoch"):
                stream.load_state_dict({**before, name: 2**70})
        assert stream.state_dict() == before
    for order in (None, 5):
        with pytest.raises(InvalidArgumentError, match="not a state"):
            epochs.load_state_dict({**epochs.state_dict(), "order": order})
    with pytest.raises(InvalidArgumentError, match="^batches="):
        Mixture([epochs], batches=2**70)
