"""What cannot be is told at once, and changes nothing: rivals in one thread, and the shape of what is only read."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tdstore import TensorDict
from tdstore.errors import ReadOnlyError, StoreBusyError


@pytest.mark.parametrize(("first", "second"), [("r+", "r+"), ("r+", "r"), ("r", "r+")])
def test_nobody_waits_for_himself(tmp_path: Path, first: Any, second: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that this thread has open stays open while it waits: there is nothing to wait for."""
    location = tmp_path / "data.h5"
    TensorDict({"a": torch.zeros(3)}, [3]).save(location).close()

    def no_waiting(seconds: float) -> None:
        raise AssertionError("it waits")

    with TensorDict.load(location, mode=first) as td:
        monkeypatch.setattr(time, "sleep", no_waiting)
        with pytest.raises(StoreBusyError, match="this process"):
            TensorDict.load(location, mode=second)
        assert td["a"].tolist() == [0, 0, 0]
    TensorDict.load(location, mode=second).close()


def test_another_thread_is_waited_for(tmp_path: Path) -> None:
    location = tmp_path / "data.h5"
    TensorDict({"a": torch.zeros(3)}, [3]).save(location).close()
    opened, done = threading.Event(), []

    def hold() -> None:
        with TensorDict.load(location, mode="r+") as td:
            opened.set()
            time.sleep(0.2)
            td["a"] = torch.ones(3)
            done.append(True)

    thread = threading.Thread(target=hold)
    thread.start()
    opened.wait(200)
    with TensorDict.load(location, mode="r+") as td:
        assert done and td["a"].tolist() == [1, 1, 1]
    thread.join()


def test_the_shape_of_what_is_only_read(tmp_path: Path) -> None:
    """Nor as part of another TensorDict, which stays as it was; copies and views are their own."""
    TensorDict({"a": torch.zeros(3, 4), "n": {"b": torch.zeros(3, 4)}}, [3]).save(tmp_path / "d").close()
    td = TensorDict.load(tmp_path / "d")
    parent = TensorDict({"td": td, "z": torch.zeros(3, 4)}, [3])
    for change in (
        lambda: setattr(td, "batch_size", [3, 4]),
        lambda: setattr(td, "names", ["time"]),
        lambda: setattr(td["n"], "batch_size", [3, 4]),
        lambda: td.auto_batch_size_(),
        lambda: setattr(parent, "batch_size", [3, 4]),
        lambda: setattr(parent, "names", ["time"]),
    ):
        with pytest.raises(ReadOnlyError):
            change()
        assert td.batch_size == td["n"].batch_size == parent.batch_size == (3,)
        assert td.names == parent.names == [None]
    for own in (td.copy(), td[:2]):
        own.batch_size = own["a"].shape
        own.names = ["time", "x"]
