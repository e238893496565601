"""Directories made by an enemy: every one a `CorruptStoreError` in no time, and nothing outside is touched."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path as FsPath
from typing import Any

import pytest
import torch

import tdstore
from tdstore.builtin.memmap.store import open_memmap
from tdstore.errors import CorruptStoreError, StoreError, StoreExistsError, UnsupportedError, UntrustedDataError
from tdstore.storekit.checksums import crc32c
from tests.builtin.memmap.support import save

Body = dict[str, Any]


@pytest.fixture
def location(tmp_path: FsPath) -> FsPath:
    save(tmp_path / "d", {("a",): torch.arange(100.0), ("n", "b"): torch.arange(100.0) + 1})
    (tmp_path / "secret.memmap").write_bytes(bytes(400))
    return tmp_path / "d"


def body_of(location: FsPath) -> Body:
    return json.loads((location / "tdstore.json").read_bytes().partition(b"\n")[2])


def put(location: FsPath, body: bytes, version: int = 1) -> None:
    (location / "tdstore.json").write_bytes(b"TDS%d %08x\n" % (version, crc32c(body)) + body)


def refused(location: FsPath, kind: type[StoreError] = CorruptStoreError) -> str:
    before = {str(p): os.lstat(p).st_mtime_ns for p in location.parent.rglob("*")}
    start = time.process_time()
    for mode in ("r", "r+"):
        with pytest.raises(kind) as caught:
            open_memmap(str(location), mode=mode, durable="none")  # type: ignore[arg-type]
    assert time.process_time() - start < 4
    after = {str(p): os.lstat(p).st_mtime_ns for p in location.parent.rglob("*") if p != location}
    before.pop(str(location))
    assert after == before, "refusing changed a file"
    return str(caught.value)


def leaf(body: Body, i: int = 0) -> Body:
    return body["leaves"][i]


def set_leaf(**changes: Any) -> Callable[[Body], None]:
    return lambda body: leaf(body).update(changes)


CHANGES: dict[str, Callable[[Body], None]] = {
    "parent folder": set_leaf(file=["..", "secret.memmap"]),
    "parent folder in one component": set_leaf(file=["../secret.memmap"]),
    "absolute": set_leaf(file=["/etc", "hostname"]),
    "absolute in one component": set_leaf(file=["/etc/hostname"]),
    "dot": set_leaf(file=[".", "a.memmap"]),
    "empty component": set_leaf(file=["", "a.memmap"]),
    "NUL": set_leaf(file=["a\0.memmap"]),
    "long component": set_leaf(file=["x" * 300]),
    "no file": set_leaf(file=[]),
    "the manifest as a leaf": set_leaf(file=["tdstore.json"]),
    "two leaves on one file": set_leaf(file=["n", "b.memmap"]),
    "a leaf twice": lambda body: body["leaves"].append(dict(leaf(body))),
    "a folder as a leaf": set_leaf(file=["n"]),
    "a file as a folder": set_leaf(file=["n", "b.memmap", "c"]),
    "negative dimension": set_leaf(shape=[-100]),
    "two negative dimensions": set_leaf(shape=[-10, -10]),
    "huge shape": set_leaf(shape=[2**62], nbytes=2**64),
    "huge shape that fits the file": set_leaf(shape=[2**62, 0, 100], nbytes=400),
    "dimension beyond 64 bits": set_leaf(shape=[2**70], nbytes=4 * 2**70),
    "many dimensions": set_leaf(shape=[1] * 5000 + [100]),
    "larger than the file": set_leaf(shape=[1000], nbytes=4000),
    "smaller than the file": set_leaf(shape=[10], nbytes=40),
    "nbytes that does not fit": set_leaf(nbytes=404),
    "float dimension": set_leaf(shape=[100.5]),
    "string dimension": set_leaf(shape=["100"]),
    "unknown dtype": set_leaf(dtype="object"),
    "dtype as a path": set_leaf(dtype="os.system"),
    "quantized dtype": set_leaf(dtype="qint8"),
    "empty path": set_leaf(path=[]),
    "deep path": set_leaf(path=["x"] * 300),
    "path of numbers": set_leaf(path=[1]),
    "bad base64": set_leaf(crc="***="),
    "sums of five bytes": set_leaf(crc="AAAAAAA="),
    "sums of six bytes": set_leaf(crc="AAAAAAAA"),
    "sums that end in the middle": set_leaf(crc="AA==AAAA"),
    "sums of other letters": set_leaf(crc="AAAAA\u00e4=="),
    "too many sums": set_leaf(crc="AAAAAAAAAAAA"),
    "unknown field": set_leaf(pickle="gASV"),
    "leaves are no list": lambda body: body.update(leaves={}),
    "no header": lambda body: body.pop("header"),
    "header of another version": lambda body: body["header"].update(format=99),
    "group twice": lambda body: body["header"]["groups"].append(body["header"]["groups"][0]),
    "group without parent": lambda body: body["header"]["groups"].append([["x", "y"], {}]),
    "negative batch size": lambda body: body["header"]["groups"][0][1].update(batch_size=[-1]),
}


@pytest.mark.parametrize("name", CHANGES)
def test_crafted_manifest(location: FsPath, name: str) -> None:
    body = body_of(location)
    CHANGES[name](body)
    put(location, json.dumps(body).encode())
    refused(location)


RAW: dict[str, bytes] = {
    "empty": b"",
    "not JSON": b"{",
    "a list": b"[]",
    "a million levels": b"[" * 1_000_000,
    "a million levels in the header": b'{"generation":"x","leaves":[],"header":' + b'{"a":' * 1_000_000,
    "a number of a million digits": b'{"generation":"x","leaves":[],"header":' + b"9" * 1_000_000 + b"}",
    "not UTF-8": b'{"generation":"\xff"}',
}


@pytest.mark.parametrize("name", RAW)
def test_crafted_bytes(location: FsPath, name: str) -> None:
    put(location, RAW[name])
    refused(location)


def test_many_groups_and_leaves(location: FsPath) -> None:
    """More than a million leaves, in less than the size limit."""
    body = b'{"generation":"x","header":{"format":1,"groups":[]},"leaves":['
    one = b'{"path":["a"],"dtype":"bool","shape":[0],"nbytes":0}'
    put(location, body + b",".join([one] * 1_000_001) + b"]}")
    refused(location)


def test_unknown_version_and_bad_sum(location: FsPath) -> None:
    raw = (location / "tdstore.json").read_bytes()
    put(location, raw.partition(b"\n")[2], version=3)
    assert "version 3" in refused(location, UnsupportedError)
    (location / "tdstore.json").write_bytes(raw[:5] + b"00000000" + raw[13:])
    assert "checksum" in refused(location)


def test_oversized_manifest(location: FsPath) -> None:
    with (location / "tdstore.json").open("r+b") as file:
        file.truncate(3 << 30)  # a sparse bomb
    assert "more than" in refused(location)


def test_symlinks_pipes_devices(location: FsPath) -> None:
    path = location / "a.memmap"
    path.unlink()
    path.symlink_to(location.parent / "secret.memmap")
    assert "'a'" in refused(location)
    path.unlink()
    os.mkfifo(path)
    assert "'a'" in refused(location)
    path.unlink()
    path.symlink_to("/dev/zero")
    refused(location)
    path.unlink()
    os.link(location / "n" / "b.memmap", path)
    refused(location)
    with pytest.raises(CorruptStoreError, match="share one file"):
        open_memmap(str(location), verify="none")


def test_symlinked_folder(location: FsPath) -> None:
    (location / "n").rename(location.parent / "elsewhere")
    (location / "n").symlink_to(location.parent / "elsewhere")
    assert "'n' / 'b'" in refused(location)


def test_special_files_for_the_manifest_and_the_log(location: FsPath) -> None:
    path = location / "tdstore.json"
    os.mkfifo(location / "tdstore.session")
    refused(location)
    (location / "tdstore.session").unlink()
    raw = path.read_bytes()
    path.unlink()
    path.symlink_to(location.parent / "elsewhere.json")
    (location.parent / "elsewhere.json").write_bytes(raw)
    refused(location)
    path.unlink()
    os.mkfifo(path)
    refused(location)


def test_crafted_log(location: FsPath) -> None:
    """A log that names files outside must not get them removed."""
    victim = location.parent / "secret.memmap"
    events = [
        {"intent": {"add": [["..", "secret.memmap"], ["../secret.memmap"], [str(victim)]], "drop": [["meta.json"]]}},
        {"open": "x", "pid": 1, "host": "h"},
        {"leave": "x", "touched": [["a"], "??", 5]},
    ]
    (location / "tdstore.session").write_text("".join(json.dumps(e) + "\n" for e in events) + "{{{")
    open_memmap(str(location), mode="r+").close()
    assert victim.exists() and (location / "meta.json").exists()


META = {
    "a": {"device": "cpu", "shape": [100], "dtype": "torch.float32", "is_nested": False},
    "shape": [],
    "device": "cpu",
    "_type": "<class 'tensordict._td.TensorDict'>",
}


@pytest.mark.parametrize(
    "change",
    [
        {"../secret": META["a"]},
        {"/etc/hostname": META["a"]},
        {"..": {"type": "TensorDict"}},
        {"a": {**META["a"], "shape": [101]}},  # type: ignore[dict-item]
        {"a": {**META["a"], "shape": [-1]}},  # type: ignore[dict-item]
        {"a": {**META["a"], "shape": [2**63, 2**63]}},  # type: ignore[dict-item]
        {"a": {**META["a"], "dtype": "torch.load"}},  # type: ignore[dict-item]
        {"a": {**META["a"], "shape": "x"}},  # type: ignore[dict-item]
        {"shape": None},
        {"_type": "os.system('true')"},
        {"missing": {"type": "TensorDict"}},
        {"_type": "<class 'tensordict._lazy.LazyStackedTensorDict'>"},
    ],
)
def test_crafted_directory_of_the_peer(tmp_path: FsPath, change: dict[str, Any]) -> None:
    location = tmp_path / "p"
    location.mkdir()
    (tmp_path / "secret.memmap").write_bytes(bytes(400))
    (location / "a.memmap").write_bytes(bytes(400))
    (location / "meta.json").write_text(json.dumps({**META, **change}))
    refused(location)


def test_pickles_are_not_touched(tmp_path: FsPath) -> None:
    location = tmp_path / "p"
    (location / "v").mkdir(parents=True)
    (location / "meta.json").write_text(
        json.dumps({**{k: v for k, v in META.items() if k != "a"}, "v": {"type": "NonTensorData"}})
    )
    (location / "v" / "meta.json").write_text(
        json.dumps(
            {"_type": "<class 'tensordict.tensorclass.NonTensorData'>", "_is_non_tensor": True, "_metadata": None}
        )
    )
    (location / "v" / "other.pickle").write_bytes(
        b"cos\nsystem\n(S'touch " + str(tmp_path / "pwned").encode() + b"'\ntR."
    )
    for how in ({}, {"mode": "r+"}):
        with pytest.raises(UntrustedDataError, match="'v'.*it is pickled"):
            tdstore.open(location, **how)
    tdstore.copy(location, tmp_path / "copy.h5")
    assert not (tmp_path / "pwned").exists()


def test_strangers_files_are_never_deleted(tmp_path: FsPath, location: FsPath) -> None:
    """Saving over a file, a folder that is no dataset, or a dataset with other things in it."""
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "thesis.txt").write_text("mine")
    (location / "n" / "notes.txt").write_text("mine")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "meta.json").write_text('{"mine": 1}')
    for target, named in (("file", "file"), ("folder", "thesis.txt"), ("d", "n/notes.txt"), ("other", "meta.json")):
        with pytest.raises(StoreExistsError, match=named):
            save(tmp_path / target, {("a",): torch.zeros(3)})
    assert (tmp_path / "file").read_text() == (tmp_path / "folder" / "thesis.txt").read_text() == "mine"
    assert (location / "n" / "notes.txt").read_text() == "mine"
    (location / "n" / "notes.txt").unlink()
    (location / "more.memmap").write_bytes(b"123")  # a leaf's name, but no leaf
    with pytest.raises(StoreExistsError, match="more.memmap"):
        save(location, {("a",): torch.zeros(3)})
