"""TensorDictStore and LazyStackedTensorDictStore: users' names for a redis server."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch

import tdstore
from tdstore import LazyStackedTensorDict, PersistentTensorDict, TensorDict
from tdstore.errors import (
    BatchSizeError,
    OptionError,
    StoreBusyError,
    StoreError,
    StoreNotFoundError,
    UnknownDatasetError,
    UnsupportedError,
)
from tdstore.tensordicts.redis_names import LazyStackedTensorDictStore, TensorDictStore


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


def test_a_lazy_stack_that_was_saved_by_to_store(server: dict[str, Any]) -> None:
    stack = tdstore.lazy_stack([TensorDict(a=torch.full((4, 2), float(i)), s="t", batch_size=[4]) for i in range(5)])
    with stack.to_store(**server, device="cpu") as stored:
        assert type(stored) is LazyStackedTensorDictStore
        assert stored.device == torch.device("cpu")
        stored["b"] = torch.ones(5, 4)  # its keys are free
        stored.append(TensorDict(a=torch.full((4, 2), 5.0), s="t", b=torch.ones(4), batch_size=[4]))
        local = stored.to_local()
        assert type(local) is TensorDict
        assert local.batch_size == (6, 4)
        assert local["a"][:, 0, 0].tolist() == [0, 1, 2, 3, 4, 5]
        assert local["s"][1] == ["t"] * 4
        # parts of it, and results in memory, are no dataset of that name
        assert type(stored[1:3]) is type(stored.select("a") + 1) is LazyStackedTensorDict
    again = LazyStackedTensorDictStore.from_store(td_id=stored.td_id, **server)
    assert again.batch_size == (6, 4)
    again.clear_redis()
    again.close()
    left = LazyStackedTensorDictStore.from_store(td_id=stored.td_id, **server)
    assert left.batch_size == (6, 4)
    assert left.to_local().is_empty()


def test_local_elements_that_differ_stay_side_by_side(server: dict[str, Any]) -> None:
    elements = [TensorDict(x=torch.ones(4), batch_size=[4]), TensorDict(x=torch.ones(4), y="only", batch_size=[4])]
    stored = tdstore.lazy_stack(elements, 1).to_store(**server)
    local = stored.to_local()
    assert type(local) is LazyStackedTensorDict
    assert local.batch_size == (4, 2)
    assert local.tensordicts[1]["y"] == "only"
    stored.clear_redis()  # what only one of them has, too
    left = LazyStackedTensorDictStore.from_store(td_id=stored.td_id, **server)
    assert [list(td.keys()) for td in left.tensordicts] == [[], []]


def test_what_to_store_gives_keeps_its_class(server: dict[str, Any]) -> None:
    @tdstore.tensorclass
    class Step:
        obs: torch.Tensor

    step = Step(obs=torch.zeros(3, 2), batch_size=[3])
    stored = step.to_store(**server)
    assert type(stored) is Step
    stacked = tdstore.lazy_stack([step, Step(obs=torch.zeros(3, 4), batch_size=[3])]).to_store(**server)
    assert type(stacked) is Step
    assert type(stacked[1]) is Step
    future = TensorDict(x=torch.ones(3), batch_size=[3]).to_store(**server, return_early=True)
    saved = future.result()
    assert type(saved) is TensorDictStore
    assert (saved.is_locked, saved.to_local()["x"].tolist()) == (False, [1, 1, 1])


def test_what_they_print(server: dict[str, Any]) -> None:
    source = TensorDict(a=torch.zeros(5, 3), n={"x": torch.zeros(5)}, batch_size=[5])
    td = source.to_store(**server)
    lines = repr(td).splitlines()
    assert lines[-3:] == ["    is_shared=False,", "    backend='redis',", f"    td_id='{td.td_id}')"]
    assert (repr(td).count("backend='redis'"), repr(td).count("td_id=")) == (2, 1)
    assert repr(td["n"]).endswith("    backend='redis')")
    read_back = tdstore.utils.parse_tensor_dict_string(repr(td))
    assert repr(read_back) == repr(source)
    stack = tdstore.lazy_stack([TensorDict(x=torch.zeros(i + 1)) for i in range(5)]).to_store(**server)
    expected = ["    stack_dim=0,", "    count=5,", "    backend='redis',", f"    td_id='{stack.td_id}')"]
    assert repr(stack).splitlines()[-4:] == expected
    stack.close()
    assert repr(stack).splitlines()[-4:] == expected
    assert "count" not in repr(stack[1:])
    assert repr(LazyStackedTensorDictStore(TensorDict(x=torch.zeros(1)))).endswith("    count=1)")


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
    with pytest.raises(StoreError, match="td_id: .*not the one over a dataset"):
        _ = LazyStackedTensorDictStore(TensorDict(x=torch.zeros(1))).td_id
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
