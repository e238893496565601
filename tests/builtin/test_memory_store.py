"""The kit on the `memory` backend, and what is particular to it."""

from __future__ import annotations

import pytest
import torch

from tdstore.builtin.memory import MemoryStore, open_memory
from tdstore.errors import StoreNotFoundError
from tdstore.store import Cap, Store
from tdstore.storekit.checked import full
from tdstore.testing import StoreTests, same
from tdstore.types import LeafSpec, Read, Write


class TestMemory(StoreTests):
    backend = "memory"
    caps = Cap.WRITE | Cap.PARTIAL_READ | Cap.PARTIAL_WRITE | Cap.RESIZE | Cap.VIEW | Cap.CONCURRENT_READ | Cap.DISCARD

    @pytest.fixture
    def location(self) -> None:
        return None


def test_cannot_be_opened_again():
    with pytest.raises(StoreNotFoundError, match="cannot be opened again"):
        open_memory(mode="r")


def test_rename_keeps_the_view():
    store = open_memory()
    store.create({("a",): LeafSpec((3,), "float32", fill_value=2)})
    view = store.view(("a",))
    store.rename({("a",): ("b",)})
    assert store.view(("b",)) is view
    assert store.specs([("b",)])[0].fill_value == 2


def test_rename_two_to_one_is_refused():
    store = open_memory()
    store.create({("a",): LeafSpec((1,), "int8"), ("b",): LeafSpec((2,), "int8")})
    with pytest.raises(ValueError, match="same name"):
        store.rename({("a",): ("c",), ("b",): ("c",)})
    assert sorted(store.paths()) == [("a",), ("b",)]


def test_default_rename_agrees_with_the_native_one():
    class Copying(MemoryStore):
        rename = Store.rename

    for moves in ({"a": "b", "b": "a"}, {"a": "b", "b": "c", "c": "a"}, {"a": "b", "b": "z"}, {"a": "a"}, {"b": "c"}):
        stores = [MemoryStore(), Copying()]
        for store in stores:
            for i, name in enumerate("abc"):
                store.create({(name,): LeafSpec((i + 1,), "int64", fill_value=i)})
                store.write([Write((name,), (), torch.arange(i + 1) + 10 * i)])
            store.rename({(old,): (new,) for old, new in moves.items()})
        one, two = ({p: s.read([Read(p)])[0] for p in s.paths()} for s in stores)
        assert sorted(one) == sorted(two)
        assert all(same(one[p], two[p]) for p in one), moves
        assert all(stores[0].specs([p])[0].fill_value == stores[1].specs([p])[0].fill_value for p in one)


@pytest.mark.parametrize("bad", [{("s",): 2}, {("v",): -1}])
def test_resize_refuses(bad):
    store = open_memory()
    store.create({("s",): LeafSpec((), "int8"), ("v",): LeafSpec((3,), "int8")})
    with pytest.raises(ValueError, match="cannot have length"):
        store.resize({("v",): 5, **bad})
    assert store.specs([("v",)])[0].shape == (3,)


def test_delete_the_same_twice_in_one_call():
    store = open_memory()
    store.create({("a",): LeafSpec((1,), "int8")})
    store.delete([("a",), ("a",)])
    assert list(store.paths()) == []


def test_negative_zero_fill():
    assert bool(torch.signbit(full(LeafSpec((2,), "float32", fill_value=-0.0))).all())


def test_nbytes_stored():
    store = open_memory()
    store.create({("a",): LeafSpec((3, 2), "float64")})
    assert store.nbytes_stored() == 48
