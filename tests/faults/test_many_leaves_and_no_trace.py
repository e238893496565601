"""Thousands of leaves under few descriptors; and reading a dataset changes nothing, in it or beside it."""

from __future__ import annotations

import hashlib
import os
import resource
from pathlib import Path

import pytest
import torch

from tdstore import TensorDict

from .fault_media import MEDIA, in_child, location_of

LEAVES = 5000


@pytest.fixture(autouse=True)
def shm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TDSTORE_SHM_DIR", str(tmp_path))


@pytest.mark.parametrize("medium", MEDIA)
def test_five_thousand_leaves_and_1024_descriptors(tmp_path: Path, medium: str) -> None:
    location = location_of(medium, tmp_path)

    def body() -> str:
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
        td = TensorDict({f"g{i % 50}": {} for i in range(50)}, [3])
        for i in range(LEAVES):
            td[f"g{i % 50}", f"k{i}"] = torch.full((3,), i)
        quick = {} if medium == "shared" else {"durable": "none"}
        owner = td.save(location, **quick)
        if medium != "shared":
            owner.close()
        with TensorDict.load(location) as again:
            assert len(list(again.keys(True, True))) == LEAVES
            read = again.to_tensordict()
            rows = again[1].to_tensordict()
        for i in range(LEAVES):
            assert read[f"g{i % 50}", f"k{i}"].tolist() == [i] * 3
            assert int(rows[f"g{i % 50}", f"k{i}"]) == i
        with TensorDict.load(location, mode="r+", **quick) as again:
            again.update_(again.to_tensordict().add(1))
        with TensorDict.load(location) as again:
            assert int(again["g49", "k4999"][0]) == 5000
        return f"{len(os.listdir('/proc/self/fd'))} open"

    assert in_child(body).endswith("open")


def _everything_below(folder: Path) -> dict[str, tuple[object, ...]]:
    found: dict[str, tuple[object, ...]] = {}
    for path in sorted([folder, *folder.rglob("*")]):
        info = path.lstat()
        content = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
        found[str(path)] = (info.st_ino, info.st_mode, info.st_size, info.st_mtime_ns, info.st_ctime_ns, content)
    return found


@pytest.mark.parametrize("verify", ["none", "size", "full"])
@pytest.mark.parametrize("medium", ["memmap", "h5"])
def test_reading_leaves_no_trace(tmp_path: Path, medium: str, verify: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes, times and names, in the dataset and in every folder that a reader could think of."""
    home, work, scratch = (tmp_path / name for name in ("home", "work", "scratch"))
    for folder in (home, work, scratch):
        folder.mkdir()
    location = location_of(medium, work)
    source = TensorDict({"a": torch.arange(60.0).view(20, 3), "n": {"b": torch.ones(20)}, "s": ["x"] * 20}, [20])
    source.save(location).close()
    if medium == "h5":
        TensorDict({"c": torch.arange(400).view(20, 20)}, [20]).save(work / "chunked.h5", compression="gzip").close()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("TMPDIR", str(scratch))
    monkeypatch.chdir(work)
    before = _everything_below(tmp_path)

    def body() -> str:
        for place in sorted(work.iterdir()):
            td = TensorDict.load(place, verify=verify)
            td.to_tensordict(), td[3:9].clone(), td[[5, 2, 2]].to_tensordict(), repr(td), td.to_dict()
            assert td.read(slice(0, 5)).batch_size == (5,)
            for row in td:
                row.get("a")
            if verify == "full":
                td.close()  # and closed by the collector, otherwise
            del td
        return "read"

    assert in_child(body) == "read"
    assert body() == "read"
    assert _everything_below(tmp_path) == before
    source.save(location).close()
    assert _everything_below(tmp_path) != before, "this would have noticed nothing"
