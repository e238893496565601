"""Commits that only add rows are lines behind the manifest: whole or not there, checked, and folded at the end."""

from __future__ import annotations

import os
from pathlib import Path as FsPath
from typing import Any

import pytest
import torch

import tdstore
from tdstore import TensorDict, interop
from tdstore.builtin.memmap import steps
from tdstore.builtin.memmap.store import open_memmap
from tdstore.errors import CorruptStoreError, StoreBusyError, StoreError, StoreIOError, UnsupportedError
from tdstore.header import Group
from tdstore.storekit import documents
from tdstore.storekit.documents import Growth, decode_manifest, encode_step, log_start
from tdstore.types import Write
from tests.builtin.memmap.support import (
    EIO,
    ENOSPC,
    FaultyOs,
    at_each_change,
    header_of,
    in_child,
    injected,
    load,
    remains,
    save,
)  # fmt: skip


def rows(n: int) -> TensorDict:
    return TensorDict({"a": torch.arange(3.0 * n).reshape(n, 3), "n": {"b": torch.arange(n)}}, [n])


def crashed(location: FsPath, n: int, **options: Any) -> bytes:
    """A dataset of `n` rows whose writer died after the commit of the last: its manifest."""

    def body() -> None:
        td = rows(2).save(location, **{"durable": "none", **options})
        for i in range(2, n):
            td.append(rows(i + 1)[i])
        os._exit(0)

    assert in_child(body) == 0
    return (location / documents.NAME).read_bytes()


def found(location: FsPath, **options: Any) -> int:
    with tdstore.open(str(location), **{"verify": "full", **options}) as td:
        n = len(td)
        assert torch.equal(td["a"], rows(n)["a"]) and torch.equal(td["n", "b"], rows(n)["n", "b"])
        assert td["n"].batch_size == (n,)
    return n


def test_lines_are_added_and_folded(tmp_path: FsPath) -> None:
    location = tmp_path / "d"
    with rows(2).save(location) as td:
        generations = set()
        first = (location / documents.NAME).read_bytes()
        assert first.startswith(b"TDS1 ") and log_start(first) == 0
        sizes = []
        for i in range(2, 7):
            td.append(rows(i + 1)[i])
            raw = (location / documents.NAME).read_bytes()
            assert raw.startswith(documents.LOGGED) and raw.count(b"\n") == i
            sizes.append(len(raw))
            generations.add(decode_manifest(raw, url="here")[0].generation)
            assert found(location) == i + 1
        assert sizes == sorted(set(sizes)) and len(generations) == 5
    raw = (location / documents.NAME).read_bytes()
    assert raw.startswith(b"TDS1 ") and found(location) == 7
    assert interop.to_tensordict(tdstore.open(str(location))).batch_size == (7,)
    assert remains(tmp_path) == []


def test_a_commit_where_nothing_differs_adds_no_line(tmp_path: FsPath, monkeypatch: pytest.MonkeyPatch) -> None:
    location = tmp_path / "d"
    with rows(2).save(location) as td:
        td.append(rows(3)[2])
        raw = (location / documents.NAME).read_bytes()
        synced: list[int] = []
        monkeypatch.setattr("tdstore.builtin.memmap.writing.files.fsync", synced.append)
        td.commit()
        assert (location / documents.NAME).read_bytes() == raw and not synced
        td["a"][0] = td["a"][0].clone()  # the same bytes: written, and to be on the storage after the commit
        td.commit()
        assert (location / documents.NAME).read_bytes() == raw and len(synced) == 1
        td["a"][0] = 9.0
        td.commit()
        assert (location / documents.NAME).read_bytes().startswith(raw) and len(synced) == 3  # the leaf, the line
        assert len((location / documents.NAME).read_bytes()) > len(raw)
        td["a"][0] = torch.arange(3.0)
    assert found(location) == 3


def test_the_package_tensordict_reads_a_closed_dataset(tmp_path: FsPath) -> None:
    tensordict = pytest.importorskip("tensordict")
    location = tmp_path / "d"
    with rows(2).save(location) as td:
        for i in range(2, 5):
            td.append(rows(i + 1)[i])
        # Until then it finds the rows of the commit that wrote the last whole manifest.
        assert tensordict.TensorDict.load_memmap(location).batch_size == (3,)
    theirs = tensordict.TensorDict.load_memmap(location)
    assert theirs.batch_size == (5,) and torch.equal(theirs["n", "b"], torch.arange(5))
    crashed(location := tmp_path / "e", 6)
    tdstore.open(str(location), "r+").close()
    assert tensordict.TensorDict.load_memmap(location)["a"].shape == (6, 3)


@pytest.mark.parametrize("durable", ["none", "commit"])
def test_a_dead_writer_leaves_its_lines(tmp_path: FsPath, durable: str) -> None:
    location = tmp_path / "d"
    raw = crashed(location, 6, durable=durable)
    assert raw.startswith(documents.LOGGED) and raw.count(b"\n") == 5
    assert found(location) == 6 and (location / documents.NAME).read_bytes() == raw, "a reader changes nothing"
    tdstore.open(str(location), "r+").close()
    raw = (location / documents.NAME).read_bytes()
    assert raw.startswith(b"TDS1 ") and found(location) == 6
    with tdstore.open(str(location), "r+") as td:
        td.append(rows(7)[6])
        td.append(rows(8)[7])
    assert found(location) == 8


def test_a_line_that_was_cut_never_was(tmp_path: FsPath) -> None:
    location = tmp_path / "d"
    raw = crashed(location, 5)
    last = raw[:-1].rindex(b"\n") + 1
    for end in range(last, len(raw)):
        for tail in (b"", bytes(len(raw) - end)):
            (location / documents.NAME).write_bytes(raw[:end] + tail)
            assert found(location) == (5 if end == len(raw) - 1 else 4)
    raw = crashed(location := tmp_path / "e", 5)
    (location / documents.NAME).write_bytes(raw[: last + 20])  # the next writer folds what is left
    with tdstore.open(str(location), "r+") as td:
        td.append(rows(5)[4])
        td.append(rows(6)[5])
    assert found(location) == 6


def test_every_flip_is_noticed(tmp_path: FsPath) -> None:
    location = tmp_path / "d"
    raw = crashed(location, 5)
    for at in range(len(raw)):
        for bit in (1, 8, 32):
            damaged = bytearray(raw)
            damaged[at] ^= bit
            with pytest.raises((CorruptStoreError, UnsupportedError)):
                decode_manifest(bytes(damaged), url="here")
    for at in (log_start(raw) + 3, len(raw) - 1):
        damaged = bytearray(raw)
        damaged[at] ^= 4
        (location / documents.NAME).write_bytes(damaged)
        with pytest.raises(CorruptStoreError, match=r"tdstore\.json is damaged.*log"):
            tdstore.open(str(location))


@pytest.mark.parametrize(
    ("groups", "leaves"),
    [
        ([], [Growth(7, 3, "", 0)]),
        ([], [Growth(-1, 3, "", 0)]),
        ([], [Growth(0, -3, "", 0)]),
        ([], [Growth(0, 5, "", 0, 9)]),
        ([], [Growth(0, 5, "", 0, -1)]),
        ([], [Growth(0, 5, "!!!!", 0)]),
        ([], [Growth(0, 5, "AAAA", 0)]),
        ([], [Growth(0, 5, "AAAAAA==", 0, 0, 7)]),
        ([], [Growth(0, 2**61, "AAAAAA==", 0)]),
        ([(("other",), Group((5,)))], []),
        ([((), Group((-5,)))], []),
    ],
)
def test_lines_that_no_writer_writes(tmp_path: FsPath, groups: Any, leaves: Any) -> None:
    raw = crashed(tmp_path / "d", 4)
    with pytest.raises(CorruptStoreError):
        decode_manifest(raw + encode_step(groups, leaves), url="here")


def test_an_older_tdstore_says_that_it_is_too_old(tmp_path: FsPath) -> None:
    raw = crashed(tmp_path / "d", 4)
    with pytest.raises(UnsupportedError, match="format version 2"):
        documents.unseal(raw, url="here")


def test_long_logs_are_folded(tmp_path: FsPath, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "LOG_BYTES", 0)
    location = tmp_path / "d"
    with rows(2).save(location, durable="none") as td:
        lines = []
        for i in range(2, 20):
            td.append(rows(i + 1)[i])
            lines.append((location / documents.NAME).read_bytes().count(b"\n"))
            assert found(location) == i + 1
    assert max(lines) < 12 and lines.count(2) > 2, "written anew once it is longer than the manifest"
    assert found(location) == 20


def test_other_changes_write_a_manifest(tmp_path: FsPath) -> None:
    location = tmp_path / "d"
    leaves = {("a",): torch.arange(4.0), ("b",): torch.zeros(4)}
    save(location, leaves)
    with open_memmap(str(location), mode="r+", durable="none") as store:
        for n in (5, 6):
            store.resize({("a",): n, ("b",): n})
            store.write([Write(("a",), (slice(n - 1, n, 1),), torch.tensor([n - 1.0]))])
            store.save_header(store.load_header())
        assert (location / documents.NAME).read_bytes().count(b"\n") == 3
        store.delete([("b",)])
        store.save_header(header_of({("a",): torch.arange(6.0)}))
        assert (location / documents.NAME).read_bytes().startswith(b"TDS1 ")
        store.view(("a",))[0] = 7  # seen at the end: summed again
    assert load(location)[("a",)].tolist() == [7, 1, 2, 3, 4, 5]


def test_rows_of_blocks_of_a_large_leaf(tmp_path: FsPath) -> None:
    """Lines keep the checksums of whole blocks, also where the number or the size of blocks changes."""
    location = tmp_path / "d"
    value = torch.arange(1_000_000).view(100, 10_000)
    with TensorDict({"a": value[:40]}, [40]).save(location, durable="none") as td:  # 3.2 MB: one block
        for start, stop in ((40, 41), (41, 52), (52, 60), (60, 61), (61, 100)):  # beyond 4 MiB
            td.append(TensorDict({"a": value[start:stop]}, [stop - start]))
        raw = (location / documents.NAME).read_bytes()
        assert raw.startswith(documents.LOGGED)
        assert len(raw.splitlines()[-1]) > 400 > 250 > len(raw.splitlines()[-2]), "a row more repeats no checksums"
        with tdstore.open(str(location), verify="full") as other:
            assert torch.equal(other["a"], value)
    with tdstore.open(str(location), verify="full") as other:
        assert torch.equal(other["a"], value)


def two_more(location: FsPath) -> None:
    with tdstore.open(str(location), "r+", durable="commit") as td:
        n = len(td)
        for i in (n, n + 1):
            td.append(rows(i + 1)[i])


def test_killed_at_every_call(tmp_path: FsPath) -> None:
    """The second append of a session is a line: the rows are there up to one commit, and to no half of one."""
    seen = []
    location = tmp_path / "d"
    rows(3).save(location, durable="none").close()
    for killed in at_each_change(lambda: two_more(location), tmp_path):
        seen.append(found(location))
        if killed:
            two_more(location)
            assert found(location) == seen[-1] + 2
            assert remains(location) == []
    assert seen == sorted(seen) and set(seen) == {3, 4, 5}


@pytest.mark.parametrize("fault", [ENOSPC, EIO], ids=["ENOSPC", "EIO"])
@pytest.mark.parametrize("once", [False, True])
def test_failing_disk(tmp_path: FsPath, fault: Any, once: bool) -> None:
    """An append that fails is told, and is not there for the next reader, or wholly; the store goes on after it."""
    for k in range(1, 60):
        location = tmp_path / f"d{k}"
        with rows(3).save(location, durable="commit") as td:
            td.append(rows(4)[3])
            faults = FaultyOs(k, fault)
            if once:
                faults.act = lambda name, faults=faults, k=k: fault(name) if faults.count == k else None
            error = None
            with injected(faults):
                try:
                    td.append(rows(5)[4])
                except (StoreIOError, OSError) as caught:
                    error = caught
            n = found(location)
            assert n == 5 if error is None else n in (4, 5)
            if n == 4:
                td.append(rows(5)[4])
                assert found(location) == 5
        assert found(location) == 5
        if faults.count < k:
            break
    assert faults.count < k and k > 5


def test_a_writer_that_was_overtaken_by_a_line(tmp_path: FsPath) -> None:
    location = tmp_path / "d"
    rows(3).save(location, durable="none").close()
    with open_memmap(str(location), mode="r+", durable="none") as one:
        with tdstore.open(str(location), "r+", durable="none") as td:
            td.append(rows(4)[3])
            td.append(rows(5)[4])
            with pytest.raises((StoreBusyError, StoreError), match="open it again"):
                one.delete([("a",)])
                one.save_header(one.load_header())
    assert found(location) == 5
