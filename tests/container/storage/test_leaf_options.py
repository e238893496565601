"""Options of leaves, from the caller to the store and back, as docs/reference/life-of-a-store.md has them."""

from __future__ import annotations

import pytest
import torch

import tdstore
from tdstore import LeafSpec, TensorDict
from tdstore.builtin.memory import MemoryStore
from tdstore.errors import KeyNotFoundError
from tdstore.hookspecs import Backend
from tdstore.registry import registry
from tdstore.testing import WrappedStore

CREATED = {}


class Recording(WrappedStore):
    """Remembers the options that reach `create`."""

    def create(self, leaves):
        CREATED.update({path: dict(spec.options) for path, spec in leaves.items()})
        super().create({path: LeafSpec(s.shape, s.dtype, fill_value=s.fill_value) for path, s in leaves.items()})


def open_recording(location, *, mode="w", chunks=None):
    return Recording(MemoryStore())


@pytest.fixture
def recording():
    CREATED.clear()
    backend = Backend(name="recording", opener=f"{__name__}:open_recording", summary="s", schemes=("recording",))
    registry().register(backend)
    yield "recording://x"
    registry().unregister("recording")


def td():
    return TensorDict({"a": torch.zeros(8, 2), "g": {"b": torch.arange(8)}}, [8])


def test_from_the_user_to_create_and_back(recording, tmp_path):
    td().save(recording, leaf_options={"a": {"chunks": (4, 2)}, ("g", "b"): {"checksum": False}}).close()
    assert CREATED == {("a",): {"chunks": (4, 2)}, ("g", "b"): {"checksum": False}}
    td().save(tmp_path / "x.h5", leaf_options={"a": {"chunks": (4, 2)}}).close()
    with tdstore.StoreHandle.open(tmp_path / "x.h5").store as store:
        assert store.layout(("a",))["chunks"] == (4, 2)
        assert "chunks" not in store.layout(("g", "b"))
        assert [dict(spec.options) for spec in store.specs([("a",), ("g", "b")])] == [{"chunks": (4, 2)}, {}]


def test_options_of_a_schema(recording):
    schema = {"a": LeafSpec((2,), "float32", chunks=(4, 2)), "b": LeafSpec((), "int64")}
    TensorDict.from_schema(schema, location=recording, batch_size=[8]).close()
    assert CREATED == {("a",): {"chunks": (4, 2)}, ("b",): {}}


def test_an_option_of_the_opener_is_the_default(tmp_path):
    td().save(tmp_path / "x.h5", chunks=2, leaf_options={"a": {"chunks": (4, 2)}}).close()
    with tdstore.StoreHandle.open(tmp_path / "x.h5").store as store:
        assert store.layout(("a",))["chunks"] == (4, 2)
        assert store.layout(("g", "b"))["chunks"] == (2,)


def test_a_key_that_is_no_leaf(recording):
    with pytest.raises(KeyNotFoundError, match="'absent'"):
        td().save(recording, leaf_options={"absent": {"chunks": (4,)}})


@pytest.mark.parametrize("trust", [True, False, None])
def test_trust_is_about_values(recording, trust):
    td().save(recording, trust=trust).close()
    assert set(CREATED) == {("a",), ("g", "b")}
