"""Saves over a dataset that was dropped a moment before: there is nothing to seal in what is replaced."""

from __future__ import annotations

import errno
import os
from pathlib import Path as FsPath

import pytest
import torch

import tdstore
from tdstore import TensorDict
from tdstore.builtin.memmap.resources import Hold
from tdstore.builtin.memmap.writing import LeafWriter
from tdstore.errors import StoreIOError
from tdstore.lifetime import settle
from tdstore.storekit.session import Log


@pytest.fixture
def sealed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The places of which a session that ended computed checksums again."""
    found: list[str] = []
    seal = Hold._seal

    def recorded(self: Hold, log: Log) -> None:
        found.append(self.url)
        seal(self, log)

    monkeypatch.setattr(Hold, "_seal", recorded)
    return found


def dataset() -> TensorDict:
    return TensorDict({"x": torch.arange(3.0), "y": torch.zeros(3, 2)}, [3])


def test_what_is_replaced_is_not_sealed(tmp_path: FsPath, sealed: list[str]) -> None:
    td, place = dataset(), tmp_path / "a"
    td.save(place)
    settle()
    sealed.clear()
    td.save(place)
    before = len(os.listdir("/proc/self/fd"))
    for number in range(20):
        td["x"].fill_(number)
        td.save(place)["y"].add_(1)
        with tdstore.open(place) as opened:
            assert opened["x"].tolist() == [number] * 3
    assert len(os.listdir("/proc/self/fd")) <= before
    assert sealed == [str(place)] * 20  # each before it was opened, and none before it was replaced
    sealed.clear()
    for _ in range(20):
        td.save(place)["y"].add_(1)
    assert sealed == []
    assert len(os.listdir("/proc/self/fd")) <= before
    settle()
    assert sealed == [str(place)]
    assert tdstore.verify(place) == []
    assert not (place / "tdstore.session").exists()


def test_others_that_were_dropped_are_sealed(tmp_path: FsPath, sealed: list[str]) -> None:
    td = dataset()
    td.save(tmp_path / "other")["x"].add_(1)
    td.save(tmp_path / "a")
    assert sealed[:1] == [str(tmp_path / "other")]
    with tdstore.open(tmp_path / "other", verify="full") as opened:
        assert opened["x"].tolist() == [1, 2, 3]


def test_what_could_not_be_replaced_is_sealed(tmp_path: FsPath, sealed: list[str]) -> None:
    td, place = dataset(), tmp_path / "a"
    td.save(place)["x"].numpy()[0] = 7.0  # which torch does not count

    def no_room(self: LeafWriter) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(LeafWriter, "place", no_room)
        with pytest.raises(StoreIOError):
            td.save(place)
    settle()
    assert sealed == [str(place)]
    with tdstore.open(place, verify="full") as opened:
        assert opened["x"].tolist() == [7, 1, 2]
    assert not (place / "tdstore.session").exists()
