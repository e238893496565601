"""Files made to harm, and rivals for one file."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path as FsPath
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from h5help import everything, header_of, load, save
from tdstore_h5.file.document import Document, decode_document, encode_document
from tdstore_h5.rows.checksums import LeafSums
from tdstore_h5.store import open_h5

from tdstore.errors import (
    CorruptStoreError,
    StoreBusyError,
    StoreError,
    StoreIOError,
    UnsupportedError,
    UntrustedDataError,
)
from tdstore.types import LeafSpec, Read, Write


def external_link(f: h5py.File, secret: FsPath) -> None:
    f["bad"] = h5py.ExternalLink(str(secret), "/x")


def soft_link(f: h5py.File, secret: FsPath) -> None:
    f["bad"] = h5py.SoftLink("/x")


def external_storage(f: h5py.File, secret: FsPath) -> None:
    f.create_dataset("bad", (8,), "u1", external=[(str(secret), 0, 8)])


def virtual(f: h5py.File, secret: FsPath) -> None:
    layout = h5py.VirtualLayout((3,), "i8")
    layout[:] = h5py.VirtualSource(str(secret), "x", (3,))
    f.create_virtual_dataset("bad", layout)


def variable_length(f: h5py.File, secret: FsPath) -> None:
    f.create_dataset("bad", (2,), h5py.vlen_dtype("i4"))


def reference(f: h5py.File, secret: FsPath) -> None:
    f["bad"] = np.array([f["x"].ref], dtype=h5py.ref_dtype)


@pytest.mark.parametrize("craft", [external_link, soft_link, external_storage, virtual, variable_length, reference])
@pytest.mark.parametrize("mode", ["r", "r+"])
def test_nothing_leads_outside(file: FsPath, craft: Callable[..., None], mode: str) -> None:
    secret = file.parent / "secret.h5"
    with h5py.File(secret, "w") as f:
        f["x"] = np.arange(3)
    with h5py.File(file, "w") as f:
        f["x"] = np.arange(3)
        craft(f, secret)
    before = file.read_bytes(), secret.read_bytes(), sorted(os.listdir(file.parent))
    with pytest.raises(UntrustedDataError, match="'bad'"):
        open_h5(file, mode=mode)
    after = file.read_bytes(), secret.read_bytes(), sorted(os.listdir(file.parent))
    assert after[1:] == before[1:]
    assert mode == "r+" or after == before
    if craft in (external_link, soft_link, external_storage, virtual):
        assert ("bad",) in load(file, trust="h5")
    else:
        with pytest.raises(UnsupportedError, match="'bad'"):
            open_h5(file, trust="h5")


def test_cycles_bombs_and_lies(file: FsPath) -> None:
    def cycle(f: h5py.File) -> None:
        f.create_group("a")["loop"] = f["/"]

    def deep(f: h5py.File) -> None:
        f.create_group("/".join("d" * 300))

    def bomb(f: h5py.File) -> None:
        f.create_dataset("x", (1 << 40,), "f8", chunks=(1024,), compression="gzip")

    def compound(f: h5py.File) -> None:
        f["x"] = np.zeros(3, [("p", "i4"), ("q", "f8")])

    def liar(f: h5py.File) -> None:
        f["x"] = np.zeros(3, "u2")
        f["x"].attrs["tdstore_dtype"] = "os.system"

    def wide(f: h5py.File) -> None:
        f["x"] = np.zeros(3, "u4")
        f["x"].attrs["tdstore_dtype"] = "bfloat16"

    def nothing(f: h5py.File) -> None:
        f["x"] = h5py.Empty("f4")

    def manifest(f: h5py.File) -> None:
        f.attrs["tdstore"] = "{}"

    def number(f: h5py.File) -> None:
        f.attrs["tdstore"] = 5

    for craft in (cycle, deep, bomb, compound, liar, wide, nothing, manifest, number):
        with h5py.File(file, "w") as f:
            craft(f)
        with pytest.raises((CorruptStoreError, UnsupportedError)) as caught:
            load(file)
        assert str(file) in str(caught.value) or craft is number, craft


@pytest.mark.parametrize("content", [b"", b"hello", b"\x89HDF\r\n\x1a\n", b"\x89HDF\r\n\x1a\n" + bytes(4000)])
def test_not_hdf5(file: FsPath, content: bytes) -> None:
    file.write_bytes(content)
    with pytest.raises(CorruptStoreError, match="opening"):
        open_h5(file)


def test_a_manifest_is_checked() -> None:
    specs = {("a",): LeafSpec((3,), "int64")}
    document = Document(3, header_of({("a",): torch.zeros(1)}), specs, {("a",): LeafSums(64, np.array([1], np.uint32))})
    text = encode_document(document, url="u")
    assert decode_document(text, {}, url="u").generation == 3
    for at in range(len(text)):
        with pytest.raises(CorruptStoreError):
            decode_document(text[:at] + bytes([text[at] ^ 1]) + text[at + 1 :], {}, url="u")
    with pytest.raises(CorruptStoreError):
        decode_document(text[:-1], {}, url="u")
    with pytest.raises(UnsupportedError, match="version 2, this tdstore reads 1") as caught:
        decode_document(text.replace(b"TDS1", b"TDS2", 1), {}, url="u")
    assert "upgrade" in str(caught.value)
    with pytest.raises(CorruptStoreError, match="0 checksums"):
        bad = Document(1, header_of({}), specs, {("a",): LeafSums(64, np.array([], np.uint32))})
        decode_document(encode_document(bad, url="u"), {}, url="u")


# -- rivals --------------------------------------------------------------------------------
def _append(path: str, number: int, count: int) -> None:
    for i in range(count):
        with open_h5(path, mode="r+", durable="none", lock_timeout=60) as store:
            store.create({(f"w{number}", str(i)): LeafSpec((4,), "int64", fill_value=number)})
            store.save_header(header_of({p: torch.zeros(1) for p in store.paths()}))


def _replace(path: str, number: int, count: int) -> None:
    for i in range(count):
        value = torch.full((2000,), number * 1000 + i)
        save(path, {("a",): value, ("b",): value}, durable="none", lock_timeout=60)


def _run(target: Callable[..., None], path: FsPath, count: int) -> list[multiprocessing.Process]:
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=target, args=(str(path), n, count)) for n in range(3)]
    for process in processes:
        process.start()
    return processes  # type: ignore[return-value]


def test_writers_lose_nothing(file: FsPath) -> None:
    save(file, {("a",): torch.zeros(1)})
    processes = _run(_append, file, 8)
    for process in processes:
        process.join()
    assert [p.exitcode for p in processes] == [0, 0, 0]
    found = load(file, verify="full")
    assert set(found) == {("a",)} | {(f"w{n}", str(i)) for n in range(3) for i in range(8)}
    assert all((value == int(path[0][1])).all() for path, value in found.items() if len(path) == 2)


def test_readers_see_one_generation(file: FsPath) -> None:
    _replace(str(file), 9, 1)
    processes = _run(_replace, file, 15)
    reads = 0
    while any(p.is_alive() for p in processes):
        found = load(file, lock_timeout=30)
        assert torch.equal(found[("a",)], found[("b",)])
        assert len(found[("a",)].unique()) == 1
        reads += 1
    for process in processes:
        process.join()
    assert [p.exitcode for p in processes] == [0, 0, 0]
    assert reads
    assert os.listdir(file.parent) == [file.name]


def test_who_is_told(file: FsPath) -> None:
    """A writer excludes all, readers exclude writers, and a refused rival changes nothing."""
    save(file, {("a",): torch.zeros(3)})
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    child = context.Process(target=_hold, args=(str(file), "r+", there))
    child.start()
    pid = here.recv()
    for mode in ("r", "r+"):
        with pytest.raises(StoreBusyError, match=f"process {pid}"):
            open_h5(file, mode=mode, lock_timeout=0.05)
    with open_h5(file, mode="w", lock_timeout=0.05) as store:
        store.create({("new",): LeafSpec((2,), "int64")})
        with pytest.raises(StoreBusyError, match="to replace it"):
            store.save_header(header_of({}))
    assert os.listdir(file.parent) == [file.name]
    with open_h5(file, locking=False) as store:
        assert everything(store)[("a",)].tolist() == [0, 0, 0]
    here.send("close")
    child.join()
    with open_h5(file), open_h5(file), pytest.raises(StoreBusyError):
        open_h5(file, mode="r+", lock_timeout=0)
    with open_h5(file, mode="r+") as store, pytest.raises(OSError, match="lock|open"):
        store.write([Write(("a",), (), torch.ones(3))])
        h5py.File(file)
    assert load(file, verify="full")[("a",)].tolist() == [1, 1, 1]


def _hold(path: str, mode: str, pipe: object) -> None:
    with open_h5(path, mode=mode):
        pipe.send(os.getpid())  # type: ignore[attr-defined]
        pipe.recv()  # type: ignore[attr-defined]


def test_errors_are_ours(file: FsPath) -> None:
    """Everything that the walk over a damaged or strange file raises is a `StoreError`."""
    save(file, {(f"k{i}", "x"): torch.zeros(3) for i in range(30)}, chunks=2)
    good = bytearray(file.read_bytes())
    for start in range(0, len(good), max(1, len(good) // 60)):
        bad = good.copy()
        bad[start : start + 64] = os.urandom(64)
        file.write_bytes(bad)
        try:
            load(file)
        except StoreError as error:
            assert error.url or str(file) in str(error)


# -- memory --------------------------------------------------------------------------------
@pytest.mark.parametrize("layout", [{}, {"chunks": 1 << 20, "compression": "gzip"}])
def test_what_is_declared_and_not_there(file: FsPath, layout: dict[str, Any]) -> None:
    """A read of very much more than is stored is refused by name; some rows of it are not."""
    with open_h5(file, mode="w", **layout) as store:
        store.create({("huge",): LeafSpec((1 << 40,), "uint8"), ("x",): LeafSpec((3,), "int64")})
        store.save_header(header_of({}))
    with open_h5(file) as store:
        assert store.read([Read(("huge",), (slice(7, 9, 1),))])[0].tolist() == [0, 0]
        with pytest.raises(CorruptStoreError, match=r"(?s)'huge' would take \d+ bytes.*max_bytes") as caught:
            store.read([Read(("x",)), Read(("huge",))])
        assert str(file) in str(caught.value)
    with open_h5(file, max_bytes=1 << 41) as store, pytest.raises(StoreIOError, match=r"no memory for 'huge'"):
        store.read([Read(("huge",))])
    with pytest.raises(CorruptStoreError, match="more than max_bytes=1000"):
        open_h5(file, max_bytes=1000)
