"""Bad input: a clear error, and nothing lost."""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path

import pytest
import torch

import tdstore
from tdstore import TensorDict, errors

ODD_KEYS = [
    "../x", "a/b", "a.b", "", ".", "..", "shape", "meta.json", "tdstore.json", "device", "_type", "k" * 300,
    "Case", "case", "CASE", "sp ace", "é", "日本", "%41", "~x", "a\\b", "a:b", "con", "trailing.", "x.memmap", "x",
]  # fmt: skip


def fingerprint(root: Path) -> dict[str, str]:
    files = [root] if root.is_file() else sorted(p for p in root.rglob("*") if p.is_file())
    return {str(p.relative_to(root.parent)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


def test_odd_keys_round_trip(reopened, place):
    td = TensorDict({k: torch.full((2,), i) for i, k in enumerate(ODD_KEYS)}, [2])
    for i, key in enumerate(ODD_KEYS):
        td["group", key, "leaf"] = torch.full((2,), 100 + i)
    where = place(reopened)
    owner = td.save(**where)
    again = TensorDict.load(where["location"])
    assert list(again.keys()) == list(td.keys())
    for key in td.keys(True, True):
        assert torch.equal(again.get(key), td.get(key)), key
    again.close()
    owner.close()


def test_a_lone_surrogate_is_refused_with_the_key(tmp_path):
    for storage in ("memmap", "h5"):
        with pytest.raises((ValueError, TypeError), match="ud800"):
            TensorDict({"\ud800": torch.zeros(2)}, [2]).save(tmp_path / storage, storage=storage)
        assert not (tmp_path / storage).exists()


@pytest.mark.parametrize("storage", ["memmap", "h5"])
class TestReadOnly:
    def test_nothing_can_be_written_and_nothing_changes(self, storage, tmp_path):
        where = tmp_path / "data"
        td = TensorDict({"a": torch.arange(6.0).reshape(3, 2), "n": {"b": torch.zeros(3)}, "s": "x"}, [3])
        td.save(where, storage=storage).close()
        before = fingerprint(where)
        loaded = TensorDict.load(where)
        for write in (
            lambda: loaded.set_("a", torch.zeros(3, 2)),
            lambda: loaded.__setitem__(0, td[1]),
            lambda: loaded.__setitem__([0, 1], td[[1, 2]]),
            lambda: loaded.update_({"a": torch.zeros(3, 2)}),
            lambda: loaded.zero_(),
            lambda: loaded.add_(1),
            lambda: loaded.apply_(lambda x: x + 1),
            lambda: loaded.fill_("a", 1),
            lambda: loaded["n"].zero_(),
            lambda: loaded[1:].zero_(),
        ):
            with pytest.raises(errors.ReadOnlyError, match="reading only"):
                write()
        assert torch.equal(loaded["a"], td["a"])
        loaded.close()
        assert fingerprint(where) == before

    def test_wrong_modes(self, storage, tmp_path):
        for mode in ("q", "rw", None):
            with pytest.raises(errors.OptionError, match="mode"):
                tdstore.open(tmp_path / "x", mode, storage=storage)
        for mode in ("r", "r+"):
            with pytest.raises(errors.StoreNotFoundError):
                tdstore.open(tmp_path / "x", mode, storage=storage)
        with pytest.raises(FileNotFoundError):
            TensorDict.load(tmp_path / "x")
        assert not (tmp_path / "x").exists()

    def test_existing_targets(self, storage, tmp_path):
        where = tmp_path / "data"
        TensorDict({"a": torch.ones(3)}, [3]).save(where, storage=storage).close()
        before = fingerprint(where)
        for call in (
            lambda: TensorDict({}).save(where, storage=storage, mode="x"),
            lambda: TensorDict({}).save(where, storage=storage, existsok=False),
            lambda: tdstore.open(where, "x", storage=storage),
        ):
            with pytest.raises(errors.StoreExistsError):
                call()
        assert fingerprint(where) == before

    def test_a_failed_save_leaves_the_old(self, storage, tmp_path):
        where = tmp_path / "data"
        TensorDict({"a": torch.ones(3)}, [3]).save(where, storage=storage).close()
        before = fingerprint(where)
        bad = TensorDict({"a": torch.zeros(3), "f": tdstore.NonTensorData(object(), [3])}, [3])
        with pytest.raises(errors.UntrustedDataError, match="'f'"):
            bad.save(where, storage=storage)
        assert fingerprint(where) == before
        assert [p.name for p in tmp_path.iterdir()] == ["data"]

    def test_a_closed_one(self, storage, tmp_path):
        td = TensorDict({"a": torch.ones(3)}, [3]).save(tmp_path / "data", storage=storage)
        td.close()
        td.close()
        for call in (lambda: td["a"], lambda: td[0]["a"], lambda: td.set_("a", torch.zeros(3)), td.clone):
            with pytest.raises(errors.StoreClosedError, match="closed"):
                call()
        assert storage == "h5" or "closed" in repr(td)


def test_datasets_opened_for_writing_take_structure(tmp_path):
    for name in ("dir", "file.h5"):
        with tdstore.open(tmp_path / name, "a") as td:
            td.batch_size = [3]
            td["late", "x"] = torch.arange(3)
            td["text"] = "hi"
            td.names = ["time"]
        with tdstore.open(tmp_path / name, "r+") as td:
            td["late", "x"] = torch.ones(3, 2)
            td.rename_key_("text", "title")
            td["rows"] = ["a", "b", "c"]
        again = TensorDict.load(tmp_path / name)
        assert list(again.keys()) == ["late", "title", "rows"]
        assert (again.batch_size, again.names) == ((3,), ["time"])
        assert again["late", "x"].sum() == 6
        assert again["rows"] == ["a", "b", "c"]
        again.close()


def test_every_dtype_can_be_written_by_rows():
    for dtype in (torch.uint16, torch.uint32, torch.uint64, torch.bfloat16, torch.float8_e4m3fn, torch.bool):
        td = TensorDict({"a": torch.zeros(4).to(dtype), "b": torch.zeros(4, 2)}, [4])
        td[[3, 0]] = TensorDict({"a": torch.ones(2).to(dtype), "b": torch.ones(2, 2)}, [2])
        td[torch.tensor([False, True, False, False])] = 1
        assert td["a"].to(torch.float32).tolist() == [1, 1, 0, 1], dtype
        assert td[[2, 3]]["a"].to(torch.float32).tolist() == [0, 1], dtype


def test_what_cannot_be_stored_names_its_key(tmp_path):
    for name, leaf in (
        ("sparse", torch.eye(3).to_sparse()),
        ("meta", torch.zeros(3, device="meta")),
        ("ragged", torch.zeros(3, 2).to_mkldnn()),
    ):
        for storage in ("memmap", "h5"):
            with pytest.raises(errors.UnsupportedError, match=name):
                TensorDict({name: leaf}, [3]).save(tmp_path / "x", storage=storage)
    assert not (tmp_path / "x").exists()


def test_other_peoples_files_are_not_replaced(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    with pytest.raises(errors.StoreExistsError, match=r"thesis\.txt"):
        TensorDict({"a": torch.zeros(2)}, [2]).memmap(tmp_path / "mine")
    (tmp_path / "file.txt").write_text("x")
    with pytest.raises(errors.StoreExistsError):
        TensorDict({"a": torch.zeros(2)}, [2]).memmap(tmp_path / "file.txt")
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "years of work"
    assert (tmp_path / "file.txt").read_text() == "x"


@pytest.fixture
def only_built_in(monkeypatch):
    """As on a machine where no plugin is installed."""
    monkeypatch.setattr(sys.modules["tdstore.discovery"], "entry_points", lambda **_: [])
    tdstore.registry.cache_clear()
    yield
    tdstore.registry.cache_clear()


def test_a_plugin_that_is_switched_off_says_so(tmp_path, monkeypatch):
    monkeypatch.setenv("TDSTORE_DISABLE_PLUGINS", "h5")
    tdstore.registry.cache_clear()
    try:
        with pytest.raises(errors.MissingDependencyError, match="TDSTORE_DISABLE_PLUGINS"):
            TensorDict({}).save(tmp_path / "a.h5")
        assert any(s.name == "h5" and s.backend is None and "switched off" in str(s) for s in tdstore.backends())
    finally:
        tdstore.registry.cache_clear()


@pytest.mark.parametrize("location", ["s3://bucket/run", "gs://b/x", "https://host/x.h5", "zarr://x", "redis://h/0"])
def test_backends_that_are_not_installed_say_the_pip_line(location, tmp_path, monkeypatch, only_built_in):
    monkeypatch.chdir(tmp_path)
    for call in (
        lambda: TensorDict({}).save(location),
        lambda: TensorDict.load(location),
        lambda: tdstore.open(location),
    ):
        with pytest.raises(errors.MissingDependencyError, match="pip install"):
            call()
    assert os.listdir(tmp_path) == []


def test_unknown_schemes_backends_and_options(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    td = TensorDict({"a": torch.zeros(2)}, [2])
    with pytest.raises(errors.UnknownBackendError, match="scheme 'nope'"):
        td.save("nope://x")
    with pytest.raises(errors.UnknownBackendError, match="did you mean 'memmap'"):
        td.save("x", storage="memap")
    with pytest.raises(errors.OptionError, match="durable"):
        td.save("x", durabel="none")
    with pytest.raises(errors.UnknownBackendError, match="pathlib"):
        td.save(Path("s3://bucket/x"))
    assert os.listdir(tmp_path) == []


def test_leaves_that_do_not_start_with_the_batch_size():
    td = TensorDict({"a": torch.zeros(3)}, [3])
    with pytest.raises(errors.BatchSizeError, match=r"'b'.*\[2\].*\[3\]"):
        td["b"] = torch.zeros(2)
    with pytest.raises(errors.BatchSizeError):
        TensorDict({"a": torch.zeros(3), "n": {"b": torch.zeros(4)}}, [3])
    assert list(td.keys(True)) == ["a"]
    with pytest.raises(errors.BatchSizeError):
        td["x", "y", "z"] = torch.zeros(2)
    assert list(td.keys(True)) == ["a"], "a refused entry must not leave empty groups behind"


def test_cuda_without_a_device():
    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device: tests/builtin/test_cuda.py")
    with pytest.raises(errors.MissingDependencyError, match="CUDA"):
        TensorDict({"a": torch.zeros(2)}, [2]).save(storage="cuda")
    with pytest.raises(errors.MissingDependencyError, match="CUDA"):
        TensorDict.from_schema({"a": torch.float32}, batch_size=[2], storage="cuda")


@pytest.mark.parametrize("name", ["x.safetensors", "model.pt", "a.NPZ"])
def test_a_file_ending_that_no_backend_knows_is_no_folder(name: str, tmp_path: Path) -> None:
    td = TensorDict({"a": torch.zeros(2)}, [2])
    with pytest.raises(tdstore.errors.UnknownBackendError, match="storage='memmap'"):
        td.save(tmp_path / name)
    assert not list(tmp_path.iterdir())
    td.save(tmp_path / name, storage="memmap").close()
    assert (TensorDict.load(tmp_path / name) == td).all()
    td.save(tmp_path / "v1.2").close()
