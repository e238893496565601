"""Rows that are objects of tensorclasses, in state dicts of storages of each kind."""

from __future__ import annotations

import pytest
import torch

import tdstore
from tdstore import TensorClass, errors
from tdstore.rl.buffers import ReplayBuffer
from tdstore.rl.storages import LazyMemmapStorage, LazyStackStorage, LazyTensorStorage, ListStorage


class Inner(TensorClass):
    """A part of a row, of a class of its own."""

    y: torch.Tensor


class Outer(TensorClass):
    """A row with such a part, and with a text."""

    inner: Inner
    text: str


@pytest.mark.parametrize("saved", [False, True])
@pytest.mark.parametrize("make", [LazyTensorStorage, LazyMemmapStorage, ListStorage, LazyStackStorage])
def test_state_dicts_keep_the_classes_of_rows(make, saved, tmp_path):
    data = Outer(Inner(torch.arange(3), batch_size=[3]), ["a", "b", "c"], batch_size=[3])
    buffer, again = ReplayBuffer(storage=make(4)), ReplayBuffer(storage=make(4))
    buffer.extend(list(data.unbind(0)) if issubclass(make, ListStorage) else data)
    state = buffer.state_dict()
    if saved:
        torch.save(state, tmp_path / "state.pt")
        state = torch.load(tmp_path / "state.pt", weights_only=True)
    again.load_state_dict(state)
    row = again[1]
    assert type(row) is Outer and type(row.inner) is Inner and row.inner.y == 1 and row.text == "b"


@pytest.mark.parametrize("classes", [5, [5], [(["no"], "class")], [(["inner", 7], "class")]])
def test_malformed_classes_of_a_state_change_nothing(classes):
    storage = LazyTensorStorage(4)
    storage.set([0], Outer(Inner(torch.zeros(1), batch_size=[1]), ["a"], batch_size=[1]))
    name = tdstore.tensorclass_name(Inner)
    classes = [(path, name) for path, _ in classes] if isinstance(classes, list) and classes != [5] else classes
    again = LazyTensorStorage(4)
    with pytest.raises(errors.StateDictError, match="_classes"):
        again.load_state_dict({**storage.state_dict(), "_classes": classes})
    assert not len(again) and not again.initialized


@pytest.mark.parametrize("classes", [5, None, [[]], [[]] * 3, [5, 5], [[(["no"], "class")], []]])
def test_malformed_classes_of_listed_rows_change_nothing(classes):
    name = tdstore.tensorclass_name(Inner)
    row = Outer(Inner(torch.zeros(()), batch_size=[]), "a", batch_size=[])
    storage, again = ListStorage(4), ListStorage(4)
    storage.set([0, 1], [row, row])
    if isinstance(classes, list):
        classes = [[(path, name) for path, _ in one] if isinstance(one, list) else one for one in classes]
    with pytest.raises(errors.StateDictError, match="_classes"):
        again.load_state_dict({**storage.state_dict(), "_classes": classes})
    assert not len(again)
