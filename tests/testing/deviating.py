"""Classes of the kit with deviations, right and wrong ones. `test_kit.py` runs them, and wants what pytest says."""

from __future__ import annotations

import pytest

from tdstore.builtin.memory import MemoryStore
from tdstore.errors import StoreNotFoundError
from tdstore.store import Store
from tdstore.testing import StoreTests


class DeviatingStore(MemoryStore):
    resize = Store.resize


def open_deviating(location: str | None = None, *, mode: str = "w") -> Store:
    if mode in ("r", "r+"):
        raise StoreNotFoundError(f"{location} cannot be opened again")
    return DeviatingStore()


def open_fine(location: str | None = None, *, mode: str = "w") -> Store:
    if mode in ("r", "r+"):
        raise StoreNotFoundError(f"{location} cannot be opened again")
    return MemoryStore()


class Memory(StoreTests):
    __test__ = False
    caps = MemoryStore.caps

    @pytest.fixture
    def location(self):
        return None


class TestDeclared(Memory):
    """Deviations that are real."""

    __test__ = True
    open = staticmethod(open_deviating)
    deviations = {
        "test_resize_tells_the_truth": "no resize yet",
        "test_resize_missing": "no resize yet",
        "test_resize_is_seen_at_once": "no resize yet",
        "test_closed": "no resize yet",
    }


class TestStale(Memory):
    """A deviation that was repaired, one case of a test, and one that names no test."""

    __test__ = True
    open = staticmethod(open_fine)
    deviations = {
        "test_delete": "was broken",
        "test_round_trip_dtype[bfloat16]": "was broken",
        "test_delet_all_or_nothing": "mistyped",
    }
