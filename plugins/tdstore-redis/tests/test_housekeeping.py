"""Datasets of a server: listed, described, moved and deleted with all their keys, and no other."""

from __future__ import annotations

from pathlib import Path as FsPath

import pytest
import torch
from redis import Redis

import tdstore
from tdstore import TensorDict
from tdstore.errors import OptionError, StoreNotFoundError


def save(place: str) -> None:
    TensorDict({"a": torch.arange(4)}, [4]).save(place).close()


def test_list_of_a_database_and_of_a_prefix(client: Redis, place: str) -> None:
    base = place.rpartition("/run ")[0]
    for name in ("runs/1", "runs/2", "runsome", "a b"):
        save(f"{base}/{name}")
    client.set("mine", "data of another program")
    client.hset("tds:{5:false}:head", "x", "1")
    assert tdstore.list_datasets(f"{base}/runs") == [f"{base}/runs/1", f"{base}/runs/2"]
    found = tdstore.list_datasets(base)
    assert len(found) == 4
    assert all(tdstore.exists(location) for location in found)
    with pytest.raises(OptionError, match="query"):
        tdstore.list_datasets(f"{base}?name=x")


def test_delete_takes_the_keys_of_one_dataset(client: Redis, place: str) -> None:
    save(f"{place}/1")
    client.set("mine", "data of another program")
    others = set(client.keys())
    save(f"{place}/2")
    tdstore.delete(f"{place}/2")
    assert {key for key in set(client.keys()) - others if b"pending" not in key} == set()
    assert others <= set(client.keys())
    assert tdstore.info(f"{place}/1").batch_size == (4,)
    with pytest.raises(StoreNotFoundError):
        tdstore.delete(f"{place}/2")


def test_move_to_a_folder_and_back(place: str, tmp_path: FsPath) -> None:
    save(place)
    tdstore.move(place, tmp_path / "run")
    assert not tdstore.exists(place)
    tdstore.move(tmp_path / "run", place)
    assert list(tmp_path.iterdir()) == []
    with tdstore.open(place) as stored:
        assert stored["a"].tolist() == [0, 1, 2, 3]
