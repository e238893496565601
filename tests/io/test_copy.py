"""`tdstore.copy`: everything arrives, damage is found on both sides, rules and layouts reach the target."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

import h5py
import pytest
import torch
from tdstore_h5.options import preset_chunks

import tdstore
from tdstore import LeafSpec, StoreHandle, TensorDict
from tdstore.builtin.memmap.store import MemmapStore
from tdstore.errors import CorruptStoreError, KeyNotFoundError, OptionError, StoreExistsError
from tdstore.io.progress import MAKERS, Progress, _make_rich, _make_tqdm, _Plain
from tests.conftest import assert_same

TARGETS = ["memmap", "h5"]


@pytest.mark.parametrize("block_bytes", [1, 64, 1 << 20])
@pytest.mark.parametrize("target", TARGETS)
def test_all_arrives_whatever_the_block(reopened, target, place, rich, tmp_path, block_bytes):
    rich["n", "deep"] = TensorDict({}, [4])
    rich["tall"] = torch.arange(4 * 3 * 7).reshape(4, 3, 7)
    where = place(reopened)
    owner = rich.save(**where)
    tdstore.copy(where["location"], tmp_path / "copy", storage=target, block_bytes=block_bytes)
    with TensorDict.load(tmp_path / "copy") as copied:
        assert_same(copied, rich)
        assert copied["plain"] == {"lr": 1e-3, "tags": ("a", 1)}
    owner.close()


@pytest.mark.parametrize("target", TARGETS)
def test_leaves_without_a_batch_dimension_and_fill_values_arrive(target, tmp_path):
    from_store = TensorDict({"x": torch.tensor(3.5), "none": torch.zeros(0)}, [])
    from_store.save(tmp_path / "a").close()
    tdstore.copy(tmp_path / "a", tmp_path / "b", storage=target)
    with TensorDict.load(tmp_path / "b") as copied:
        assert_same(copied, from_store)
    schema = {"y": tdstore.LeafSpec((2,), "float32", fill_value=7)}
    TensorDict.from_schema(schema, batch_size=[3], location=tmp_path / "c.h5").close()
    tdstore.copy(tmp_path / "c.h5", tmp_path / "d", storage=target)
    with TensorDict.load(tmp_path / "d") as copied:
        assert (copied["y"] == 7).all()
        assert StoreHandle.open(tmp_path / "d").specs["y",].fill_value == 7


@pytest.mark.parametrize("block_bytes", [100, 1 << 20])
def test_an_open_container_and_its_windows(backend, place, rich, tmp_path, block_bytes):
    saved = rich.save(**place(backend))
    tdstore.copy(saved, tmp_path / "whole.h5", block_bytes=block_bytes)
    with TensorDict.load(tmp_path / "whole.h5") as copied:
        assert_same(copied, rich)
    tdstore.copy(saved[[3, 1]], tmp_path / "part", block_bytes=block_bytes)
    with TensorDict.load(tmp_path / "part") as copied:
        assert_same(copied, rich[[3, 1]])
    saved.close()


def test_into_named_shared_memory(place, rich, tmp_path):
    rich.save(tmp_path / "a").close()
    where = place("named shared")
    tdstore.copy(tmp_path / "a", where["location"])
    with TensorDict.load(where["location"]) as copied:
        assert_same(copied, rich)


def test_what_is_there_is_kept_until_the_end(tmp_path, rich, monkeypatch):
    rich.save(tmp_path / "a").close()
    old = TensorDict({"x": torch.arange(3)}, [3])
    old.save(tmp_path / "b").close()
    with pytest.raises(StoreExistsError):
        tdstore.copy(tmp_path / "a", tmp_path / "b")
    with monkeypatch.context() as m:
        m.setattr(MemmapStore, "write", _raise(RuntimeError("unplugged")))
        with pytest.raises(RuntimeError, match="unplugged"):
            tdstore.copy(tmp_path / "a", tmp_path / "b", mode="w", checkpoint=0, block_bytes=1)
    with TensorDict.load(tmp_path / "b") as kept:
        assert_same(kept, old)
    tdstore.copy(tmp_path / "a", tmp_path / "b", mode="w")
    with TensorDict.load(tmp_path / "b") as replaced:
        assert_same(replaced, rich)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b"]


def _raise(error: BaseException) -> Any:
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise error

    return fail


# -- choosing ------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("keys", "there"),
    [
        (["a", "hello"], {"a", "hello"}),
        ("next", {"next"}),
        (("next", "obs"), {"next"}),
        ([("next", "why"), "wide"], {"next", "wide"}),
    ],
)
def test_some_keys(keys, there, rich, tmp_path):
    rich.save(tmp_path / "a").close()
    tdstore.copy(tmp_path / "a", tmp_path / "b.h5", keys=keys)
    with TensorDict.load(tmp_path / "b.h5") as copied:
        chosen = [keys] if isinstance(keys, (str, tuple)) else keys
        assert set(copied.keys()) == there
        assert_same(copied, rich.select(*chosen))


def test_a_key_that_is_not_there_is_told_with_the_nearest(rich, tmp_path):
    rich.save(tmp_path / "a").close()
    with pytest.raises(KeyNotFoundError, match=r"'next' / 'obz'.*\n.*did you mean \('next', 'obs'\)"):
        tdstore.copy(tmp_path / "a", tmp_path / "b", keys=[("next", "obz")])
    with pytest.raises(KeyNotFoundError, match="matches no tensor"):
        tdstore.copy(tmp_path / "a", tmp_path / "b", rules={"hello": {}})
    assert not (tmp_path / "b").exists()


def _images() -> TensorDict:
    data = {"obs": torch.randint(0, 255, (64, 40, 40), dtype=torch.uint8), "r": torch.randn(64)}
    return TensorDict({**data, "next": dict(data)}, [64])


def test_rules_rechunk_and_recompress_at_every_depth(tmp_path):
    td = _images()
    td.save(tmp_path / "a.h5", chunks=5, compression="gzip").close()
    rules: Any = {
        "*": {"compression": "lzf", "layout": "random"},
        "*.obs": {"layout": "scan"},
        ("next", "r"): {"chunks": 3, "compression": None},
    }
    tdstore.copy(tmp_path / "a.h5", tmp_path / "b.h5", rules=rules, block_bytes=5000)
    with h5py.File(tmp_path / "b.h5") as f:
        found = {name: (f[name].chunks, f[name].compression) for name in ("obs", "r", "next/obs", "next/r")}
    assert found == {
        "obs": ((20, 40, 40), "lzf"),
        "r": ((64,), "lzf"),
        "next/obs": ((64, 40, 40), "lzf"),
        "next/r": ((3,), None),
    }
    with TensorDict.load(tmp_path / "b.h5", verify="full") as copied:
        assert_same(copied, td)


@pytest.mark.parametrize(("layout", "rows"), [("random", 1), ("scan", 64)])
def test_layout_is_an_option_of_the_target(tmp_path, layout, rows):
    big = TensorDict({"obs": torch.zeros(64, 4096)}, [64])
    big.save(tmp_path / "a").close()
    tdstore.copy(tmp_path / "a", tmp_path / "b.h5", layout=layout, compression="gzip")
    with h5py.File(tmp_path / "b.h5") as f:
        assert f["obs"].chunks == (rows, 4096)
    tdstore.copy(tmp_path / "a", tmp_path / "c.h5", layout=layout, compression="gzip", chunks=7)
    with h5py.File(tmp_path / "c.h5") as f:
        assert f["obs"].chunks == (7, 4096)
    with pytest.raises(OptionError, match="no option 'layout'"):
        tdstore.copy(tmp_path / "a", tmp_path / "d", layout=layout)
    with pytest.raises(OptionError, match="layout"):
        tdstore.copy(tmp_path / "a", tmp_path / "d.h5", layout="randon")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b.h5", "c.h5"]


@pytest.mark.parametrize(
    ("preset", "shape", "most", "chunks"),
    [
        ("random", (1000, 84, 84), 1000, (1, 84, 84)),
        ("random", (100000,), 100000, (8192,)),
        ("random", (10,), 10, (10,)),
        ("random", (10,), None, (8192,)),
        ("scan", (100000,), 100000, (100000,)),
        ("scan", (0, 1024), None, (256, 1024)),
        ("scan", (9, 1 << 20), 9, (1, 1 << 20)),
        ("scan", (2, 64, 1 << 20), 2, (1, 16, 1 << 20)),
        ("random", (2, 3, 1 << 26), 2, (1, 1, 1 << 24)),
    ],
)
def test_presets_of_hdf5_keep_rows_whole_and_chunks_below_64_mib(preset, shape, most, chunks):
    spec = LeafSpec(shape, "float32")
    assert preset_chunks(preset, spec, most) == chunks


# -- damage --------------------------------------------------------------------------------
def test_a_damaged_source_is_found_and_named(tmp_path):
    # smaller datasets are compared whole when they are opened
    td = TensorDict({"x": torch.zeros(4, 5 << 20, dtype=torch.uint8), "y": torch.ones(4)}, [4])
    td.save(tmp_path / "a").close()
    with open(tmp_path / "a" / "x.memmap", "r+b") as f:
        f.seek(1_000_000)
        f.write(b"\x01")
    with pytest.raises(CorruptStoreError, match="'x' is damaged"):
        tdstore.copy(tmp_path / "a", tmp_path / "b")
    assert not (tmp_path / "b").exists()
    tdstore.copy(tmp_path / "a", tmp_path / "b", keys="y")
    with pytest.raises(CorruptStoreError, match="'x' is damaged"):  # reading compares, too
        tdstore.copy(tmp_path / "a", tmp_path / "c", verify="target")
    tdstore.copy(tmp_path / "a", tmp_path / "c", verify="target", src_options={"verify": "none"})
    with TensorDict.load(tmp_path / "c") as copied:
        assert int(copied["x"].sum()) == 1


@pytest.mark.parametrize("whole", [True, False])
def test_a_target_that_loses_a_row_is_found_and_not_published(tmp_path, monkeypatch, whole):
    TensorDict({"a": torch.ones(3), "x": torch.arange(100 * 50).reshape(100, 50)}).save(tmp_path / "a").close()
    real = MemmapStore.write

    def forgetful(self: MemmapStore, writes: Any) -> None:
        real(self, writes)
        if any(w.path == ("x",) and (not w.index or w.index[0].start <= 42 < w.index[0].stop) for w in writes):
            self.view(("x",))[42, 7] = -1

    monkeypatch.setattr(MemmapStore, "write", forgetful)
    more: dict[str, Any] = {} if whole else {"block_bytes": 4000, "checkpoint": 0}
    with pytest.raises(CorruptStoreError, match="'x' rows 42 to 42 reads back other than it was written"):
        tdstore.copy(tmp_path / "a", tmp_path / "b", **more)
    if whole:
        assert not (tmp_path / "b").exists()
    else:
        with pytest.raises(tdstore.errors.DirtyStoreError, match="incomplete copy"):
            tdstore.load(tmp_path / "b")
    monkeypatch.undo()
    tdstore.copy(tmp_path / "a", tmp_path / "b", **more)
    with TensorDict.load(tmp_path / "b", verify="full") as copied:
        assert int(copied["x"][42, 7]) == 42 * 50 + 7


def test_options_are_checked(tmp_path, rich):
    rich.save(tmp_path / "a").close()
    with pytest.raises(OptionError, match="mode"):
        tdstore.copy(tmp_path / "a", tmp_path / "b", mode="r+")
    with pytest.raises(OptionError, match="verify"):
        tdstore.copy(tmp_path / "a", tmp_path / "b", verify="twice")
    with pytest.raises(OptionError, match="block_bytes"):
        tdstore.copy(tmp_path / "a", tmp_path / "b", block_bytes=0)
    with pytest.raises(OptionError, match="src_options"):
        tdstore.copy(rich, tmp_path / "b", src_options={"verify": "full"})
    with pytest.raises(OptionError, match="no option 'verfy'"):
        tdstore.copy(tmp_path / "a", tmp_path / "b", src_options={"verfy": "full"})
    with pytest.raises(OptionError, match="'memmap' backend has no option 'chunks'"):
        tdstore.copy(tmp_path / "a", tmp_path / "b", chunks=3)
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


# -- the bar -------------------------------------------------------------------------------
@pytest.mark.parametrize("make", [_make_tqdm, _make_rich, _Plain])
def test_bars_count_to_the_end_on_stderr(make, monkeypatch, capsys):
    monkeypatch.setattr("tdstore.io.progress.MAKERS", (make,))
    with Progress(1 << 20, "copy", True, done=1 << 19) as bar:
        bar.advance(1 << 19)
    shown = capsys.readouterr()
    assert shown.out == ""
    if make is _Plain:
        assert shown.err == "copy: 100% of 1 MiB\n"


def test_a_bar_shows_by_itself_on_a_terminal_only(monkeypatch, capsys):
    monkeypatch.setattr("tdstore.io.progress.MAKERS", (_Plain,))
    with Progress(10, "copy", None):
        pass
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    with Progress(10, "copy", None):
        pass
    assert "copy" in capsys.readouterr().err
    assert MAKERS[0] is _make_tqdm


def test_no_thread_stays(tmp_path, rich):
    rich.save(tmp_path / "a").close()
    tdstore.copy(tmp_path / "a", tmp_path / "b", block_bytes=1)
    assert not [t.name for t in threading.enumerate() if t.name.startswith("tdstore-copy")]


def test_a_relative_path_and_a_url(tmp_path, rich, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rich.save("a").close()
    tdstore.copy("a", "h5://b.h5")
    tdstore.copy("h5://b.h5", Path("c"))
    with TensorDict.load("c") as copied:
        assert_same(copied, rich)
