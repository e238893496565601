"""What is mostly used through something else: `registry().engine`, `Engine.pin`, bars, the one look at a header."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path as FsPath
from typing import Any

import pytest
import torch

import tdstore
from tdstore.builtin.memmap.store import MemmapStore
from tdstore.engine import Engine
from tdstore.errors import StoreError, StoreNotFoundError, UnknownBackendError
from tdstore.index.ranges import Range
from tdstore.io import progress
from tdstore.io.progress import Progress
from tdstore.registry import registry
from tdstore.storekit.local_engine import LocalEngine

# -- engines --------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["{}", "file://{}"])
def test_a_local_path_has_the_engine_of_the_core(tmp_path: FsPath, form: str) -> None:
    with registry().engine(form.format(tmp_path)) as engine:
        assert type(engine) is LocalEngine
        engine.put("a/b", b"0123456789")
        assert bytes(engine.get_ranges([Range("a/b", 2, 4)])[0]) == b"23"
    assert (tmp_path / "a" / "b").read_bytes() == b"0123456789"


def test_other_urls_have_the_engine_of_a_plugin() -> None:
    with registry().engine("memory://engines/x", {"engine": "fsspec"}) as engine:
        assert isinstance(engine, Engine)
        assert not isinstance(engine, LocalEngine)
        engine.put("a", b"abc")
        assert bytes(engine.get("a").data) == b"abc"


def test_a_scheme_that_no_engine_knows() -> None:
    with pytest.raises(UnknownBackendError, match="no engine knows the scheme 'nosuch'") as caught:
        registry().engine("nosuch://user:secret@host/x")
    assert "secret" not in str(caught.value)


def test_pin_asks_for_all_sizes_at_once(tmp_path: FsPath) -> None:
    engine = LocalEngine(tmp_path)
    engine.put("a", b"0123456789")
    engine.put("b", b"")
    assert engine.pin(["b", "a", "a"]) == [0, 10, 10]
    assert engine.pin([]) == []
    with pytest.raises(StoreNotFoundError, match="c"):
        engine.pin(["a", "c"])


# -- progress -------------------------------------------------------------------------------


@pytest.fixture
def only(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Leave some of the libraries that draw bars installed, and no others."""

    def leave(*names: str) -> None:
        for name in {"tqdm", "rich"} - set(names):
            monkeypatch.setitem(sys.modules, name, None)
            monkeypatch.setitem(sys.modules, f"{name}.auto", None)

    return leave


def test_a_bar_of_rich(only: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    only("rich")
    made: list[Any] = []
    make = progress._make_rich
    monkeypatch.setattr(
        progress, "MAKERS", (progress._make_tqdm, lambda *a: made.append(make(*a)) or made[-1], progress._Plain)
    )
    with Progress(100, "copy", done=20) as bar:
        bar.advance(30)
        bar.advance(50)
    (rich,) = made
    (task,) = rich._bars.tasks
    assert (task.description, task.total, task.completed) == ("copy", 100, 100)
    assert rich._bars.live.is_started is False


def test_a_copy_with_a_bar_of_rich(only: Any, tmp_path: FsPath, capfd: pytest.CaptureFixture[str]) -> None:
    only("rich")
    tdstore.TensorDict({"a": torch.arange(1000)}, [1000]).save(tmp_path / "a").close()
    tdstore.copy(tmp_path / "a", tmp_path / "b", progress=True)
    assert torch.equal(tdstore.open(tmp_path / "b")["a"], torch.arange(1000))
    assert "Traceback" not in capfd.readouterr().err


def test_a_plain_line_where_nothing_is_installed(only: Any, capsys: pytest.CaptureFixture[str]) -> None:
    only()
    with Progress(4 << 20, "save", done=1 << 20) as bar:
        bar.advance(1 << 20)
    assert capsys.readouterr().err == "save: 50% of 4 MiB\n"
    with Progress(4, "save", False) as bar:
        bar.advance(4)
    assert capsys.readouterr().err == ""


# -- opening --------------------------------------------------------------------------------


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    seen: list[str] = []
    load = MemmapStore.load_header
    monkeypatch.setattr(MemmapStore, "load_header", lambda self: (seen.append(self.url), load(self))[1])
    yield seen


@pytest.mark.parametrize("mode", ["r", "r+"])
def test_opening_reads_the_header_once(tmp_path: FsPath, looks: list[str], mode: Any) -> None:
    tdstore.TensorDict({"a": torch.arange(3)}, [3]).save(tmp_path / "a").close()
    looks.clear()
    tdstore.open(tmp_path / "a", mode=mode).close()
    assert len(looks) == 1


def test_a_store_is_closed_when_its_header_cannot_be_taken(tmp_path: FsPath, monkeypatch: pytest.MonkeyPatch) -> None:
    tdstore.TensorDict({"a": torch.arange(3)}, [3]).save(tmp_path / "a").close()
    closed: list[str] = []
    close = MemmapStore.close
    monkeypatch.setattr(MemmapStore, "close", lambda self: (closed.append(self.url), close(self))[1])

    def broken(self: MemmapStore) -> Any:
        raise StoreError("broken")

    monkeypatch.setattr(MemmapStore, "load_header", broken)
    with pytest.raises(StoreError, match="broken"):
        tdstore.open(tmp_path / "a")
    assert len(closed) == 1
