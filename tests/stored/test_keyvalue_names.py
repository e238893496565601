"""TensorDictStore and LazyStackedTensorDictStore: users' names for a redis server."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch

import tdstore
from tdstore import LazyStackedTensorDict, PersistentTensorDict, TensorDict
from tdstore.container.keyvalue import LazyStackedTensorDictStore, TensorDictStore
from tdstore.errors import (
    BatchSizeError,
    OptionError,
    StoreBusyError,
    StoreNotFoundError,
    UnknownDatasetError,
    UnsupportedError,
)


@pytest.fixture
def server(redis: Any) -> dict[str, Any]:
    return {"host": "127.0.0.1", "port": redis.port}


def test_a_new_one_is_found_again_by_its_id(server: dict[str, Any]) -> None:
    td = TensorDictStore(**server, batch_size=[100])
    td["obs"] = torch.ones(100, 4)
    td["n", "x"] = torch.arange(100)
    td[3:5] = TensorDict(obs=torch.zeros(2, 4), n={"x": torch.tensor([7, 8])}, batch_size=[2])
    ident = td.td_id
    td.close()
    again = TensorDictStore.from_store(**server, td_id=ident)
    assert type(again) is TensorDictStore
    assert again.td_id == ident
    assert again.batch_size == (100,)
    assert again["n", "x"][2:6].tolist() == [2, 7, 8, 5]
    local = again.to_local()
    assert type(local) is TensorDict
    assert local["obs"].sum() == 98 * 4
    with pytest.raises(BatchSizeError):
        TensorDictStore(**server, td_id=ident, batch_size=[99, 2])
    again.clear_redis()
    assert TensorDictStore.from_store(**server, td_id=ident).is_empty()


def test_made_of_what_is_there(server: dict[str, Any]) -> None:
    source = TensorDict(a=torch.arange(6.0).view(3, 2), s="text", batch_size=[3])
    td = TensorDictStore.from_tensordict(source, **server, backend="valkey", prefix="runs")
    assert type(td) is TensorDictStore
    assert (td.to_local() == source).all()
    assert type(td[1:]) is TensorDictStore
    assert td["s"] == "text"
    made = TensorDictStore.from_dict({"x": torch.zeros(3, 2)}, auto_batch_size=True, **server)
    assert made.batch_size == (3, 2)
    zeros = TensorDictStore.from_schema({"obs": ((4,), torch.uint8)}, batch_size=[10], **server)
    zeros[2] = {"obs": torch.ones(4, dtype=torch.uint8)}
    assert zeros["obs"].sum() == 4


def test_a_lazy_stack_of_other_shapes(server: dict[str, Any]) -> None:
    stack = tdstore.lazy_stack([TensorDict(x=torch.zeros(2)), TensorDict(x=torch.ones(3))])
    stored = LazyStackedTensorDictStore.from_lazy_stack(stack, **server)
    ident = stored.td_id
    assert isinstance(stored, LazyStackedTensorDict)
    assert stored[1]["x"].tolist() == [1, 1, 1]
    assert stored[1:][0]["x"].tolist() == stored[[1]][0]["x"].tolist() == [1, 1, 1]
    stored[0]["x"] = torch.full((2,), 5.0)
    stored.close()
    again = LazyStackedTensorDictStore.from_store(td_id=ident, **server)
    local = again.to_local()
    assert type(local) is LazyStackedTensorDict
    assert [td["x"].tolist() for td in local.unbind(0)] == [[5, 5], [1, 1, 1]]


def test_what_is_wrong_is_said(server: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedError, match="client"):
        TensorDictStore(client=object(), **server)
    with pytest.raises(OptionError, match="memcached"):
        TensorDictStore(backend="memcached", **server)
    for cls in (TensorDictStore, LazyStackedTensorDictStore):
        with pytest.raises(KeyError, match="no dataset of the name 'nobody'") as caught:
            cls.from_store(td_id="nobody", **server)
        assert isinstance(caught.value, StoreNotFoundError)
        again = pickle.loads(pickle.dumps(caught.value))
        assert type(again) is UnknownDatasetError and again.url == caught.value.url
    plain = TensorDictStore.from_dict({"x": torch.zeros(1)}, **server)
    name = plain.td_id
    plain.close()
    with pytest.raises(UnsupportedError, match="not a lazy stack"):
        LazyStackedTensorDictStore.from_store(td_id=name, **server)


def test_files_on_systems_without_locks(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """PersistentTensorDict.LOCKING, for HDF5 files."""
    TensorDict(x=torch.zeros(3)).save(tmp_path / "x.h5").close()
    writer = PersistentTensorDict(filename=tmp_path / "x.h5", mode="r+", backend="h5")
    with pytest.raises(StoreBusyError):
        tdstore.open(tmp_path / "x.h5", lock_timeout=0.1)
    writer.close()
    monkeypatch.setattr(PersistentTensorDict, "LOCKING", False)
    writer = PersistentTensorDict(filename=tmp_path / "x.h5", mode="r+", backend="h5")
    assert TensorDict.from_h5(tmp_path / "x.h5")["x"].tolist() == [0, 0, 0]
    writer.close()
