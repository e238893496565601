"""Checksums of new leaves are taken while they are written, and from the file where they were not written in order."""

from __future__ import annotations

import zipfile
from pathlib import Path as FsPath

import numpy as np
import pytest
import torch

import tdstore
from tdstore.builtin.tdz import leaves
from tdstore.builtin.tdz import store as tdz
from tdstore.builtin.tdz.store import TdzStore, open_tdz
from tdstore.header import Group, Header
from tdstore.storekit import files
from tdstore.storekit.checksums import BLOCK, Summer, sums_of_memory
from tdstore.types import LeafSpec, StoreIndex, Write
from tests import scripts

ROWS, WIDTH = 70, 25_000
VALUE = torch.arange(ROWS * WIDTH, dtype=torch.float32).view(ROWS, WIDTH)  # 7 MB: more than one block
ALL: StoreIndex = ()


def rows(start: int, stop: int) -> StoreIndex:
    return (slice(start, stop, 1),)


WRITES: dict[str, tuple[list[tuple[StoreIndex, torch.Tensor]], bool]] = {
    "whole": ([(ALL, VALUE)], False),
    "pieces": ([(rows(0, 3), VALUE[:3]), (rows(3, 40), VALUE[3:40]), (rows(40, ROWS), VALUE[40:])], False),
    "twice": ([(ALL, VALUE + 1), (ALL, VALUE)], False),
    "whole, then its first rows": ([(ALL, VALUE), (rows(0, 3), VALUE[:3])], True),
    "whole, then its last rows": ([(ALL, VALUE), (rows(69, 70), VALUE[69:])], True),
    "whole, then rows within": ([(ALL, VALUE + 1), (rows(0, 50), VALUE[:50]), (rows(49, 70), VALUE[49:])], True),
    "out of order": ([(rows(40, ROWS), VALUE[40:]), (rows(0, 40), VALUE[:40])], True),
    "single rows": ([(ALL, VALUE + 1), ((torch.arange(ROWS),), VALUE)], True),
    "columns": ([(ALL, VALUE + 1), ((slice(0, ROWS, 1), slice(0, WIDTH, 1)), VALUE)], True),
}


@pytest.fixture
def made(tmp_path: FsPath) -> TdzStore:
    store = open_tdz(str(tmp_path / "x.tdz"), mode="w", durable="none")
    store.create({("a",): LeafSpec((ROWS, WIDTH), "float32")})
    return store


def is_sound(store: TdzStore) -> bool:
    """Whether the archive holds `VALUE`, and fits its checksums and those of the zip."""
    store.save_header(Header({(): Group(batch_size=(ROWS,), keys=("a",))}))
    store.close()
    with zipfile.ZipFile(store.location) as archive:
        assert archive.testzip() is None
    with tdstore.open(store.location, verify="full") as td:
        return torch.equal(td["a"], VALUE) and tdstore.verify(store.location) == []


@pytest.mark.parametrize("case", WRITES)
def test_checksums_fit_however_a_leaf_was_written(case: str, made: TdzStore, monkeypatch: pytest.MonkeyPatch) -> None:
    writes, is_read_again = WRITES[case]
    read: list[int] = []
    sums_of_range = tdz.sums_of_range

    def counted(fd: int, start: int, nbytes: int, block: int | None = None) -> object:
        read.append(nbytes)
        return sums_of_range(fd, start, nbytes, block)

    for index, value in writes:
        made.write([Write(("a",), index, value)])
    with monkeypatch.context() as patched:
        patched.setattr(tdz, "sums_of_range", counted)
        made.save_header(Header({(): Group(batch_size=(ROWS,), keys=("a",))}))
    assert read == ([VALUE.nbytes] if is_read_again else [])
    assert is_sound(made)


def test_what_was_written_through_a_view_counts(made: TdzStore) -> None:
    made.write([Write(("a",), ALL, VALUE + 1)])
    made.view(("a",)).numpy()[:] = VALUE.numpy()
    assert is_sound(made)


def test_what_is_written_after_a_view_was_given_counts(made: TdzStore) -> None:
    view = made.view(("a",))
    made.write([Write(("a",), ALL, VALUE + 1)])
    view.numpy()[:] = VALUE.numpy()
    assert is_sound(made)


def test_a_failed_commit_reads_the_file_again(made: TdzStore, monkeypatch: pytest.MonkeyPatch) -> None:
    made.write([Write(("a",), ALL, VALUE)])

    def no_room(*arguments: object) -> int:
        raise OSError(28, "no room")

    with monkeypatch.context() as patched:
        patched.setattr(tdz, "finish", no_room)
        with pytest.raises(tdstore.errors.StoreIOError):
            made.save_header(Header({(): Group(batch_size=(ROWS,), keys=("a",))}))
    assert is_sound(made)


NUMBERS = torch.arange(300_000, dtype=torch.float32).view(600, 500)
VALUES: dict[str, torch.Tensor] = {
    "plain": NUMBERS,
    "transposed": NUMBERS.T,
    "expanded": torch.arange(500.0).expand(600, 500),
    "a part": torch.arange(400_000.0).view(800, 500)[100:700],
    "strided": torch.arange(600_000.0).view(1200, 500)[::2],
    "with a gradient": NUMBERS.clone().requires_grad_(),
    "bfloat16": NUMBERS.bfloat16(),
    "bits": NUMBERS > 77,
    "conjugate": torch.complex(NUMBERS, NUMBERS).conj(),
    "negative": torch.complex(NUMBERS, NUMBERS).conj().imag,
    "no rows": NUMBERS[:0],
    "no dimensions": torch.tensor(7, dtype=torch.int16),
    "long": torch.arange(3_000_000),
}


@pytest.mark.parametrize("least", [1, 1 << 60])
def test_many_kinds_of_values_at_once(least: int, tmp_path: FsPath, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a thread for their CRC-32, and without."""
    monkeypatch.setattr(leaves, "_MANY", least)
    location = tmp_path / "x.tdz"
    tdstore.save(tdstore.TensorDict(VALUES, []), location, durable="none").close()
    with zipfile.ZipFile(location) as archive:
        assert archive.testzip() is None
    with tdstore.open(location, verify="full") as td:
        for name, value in VALUES.items():
            assert torch.equal(td[name], value.detach().resolve_conj().resolve_neg()), name
    assert tdstore.verify(location) == []


def two_leaves(folder: FsPath) -> TdzStore:
    store = open_tdz(str(folder / "x.tdz"), mode="w", durable="none")
    store.create({(name,): LeafSpec((ROWS, WIDTH), "float32") for name in "ab"})
    return store


def held(store: TdzStore, length: int = ROWS) -> dict[str, torch.Tensor]:
    """What the archive holds once it is committed; its checksums fit."""
    store.save_header(Header({(): Group(batch_size=(length,), keys=("a", "b"))}))
    store.close()
    with zipfile.ZipFile(store.location) as archive:
        assert archive.testzip() is None
    assert tdstore.verify(store.location) == []
    with tdstore.open(store.location, verify="full") as td:
        return {name: td[name].clone() for name in "ab"}


def test_a_leaf_that_is_written_twice_at_once(tmp_path: FsPath) -> None:
    store = two_leaves(tmp_path)
    store.write(
        [
            Write(("a",), ALL, VALUE + 1),
            Write(("b",), rows(0, 30), VALUE[:30]),
            Write(("b",), rows(30, ROWS), VALUE[30:]),
            Write(("a",), ALL, VALUE),
        ]
    )
    found = held(store)
    assert torch.equal(found["a"], VALUE)
    assert torch.equal(found["b"], VALUE)


def test_a_value_that_is_a_leaf_which_is_written_behind_it(tmp_path: FsPath) -> None:
    store = two_leaves(tmp_path)
    before = store.view(("b",))
    before.copy_(VALUE + 1)
    store.write([Write(("a",), ALL, before), Write(("b",), ALL, VALUE)])
    found = held(store)
    assert torch.equal(found["a"], VALUE + 1)
    assert torch.equal(found["b"], VALUE)


def test_after_a_write_that_failed_leaves_are_read_again(tmp_path: FsPath, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four of seven rows were written when it failed, and their CRC-32 was that of all."""
    store = open_tdz(str(tmp_path / "x.tdz"), mode="w", durable="none")
    store.create({(name,): LeafSpec((7, 1 << 18), "float32") for name in "ab"})
    value, write_at, blocks = torch.arange(7.0 * (1 << 18)).view(7, 1 << 18), files.write_at, iter(range(9))

    def full(fd: int, data: memoryview, offset: int) -> None:
        if next(blocks) == 3:
            raise OSError(28, "No space left on device")
        write_at(fd, data, offset)

    with monkeypatch.context() as patched:
        patched.setattr(files, "write_at", full)
        with pytest.raises(tdstore.errors.StoreIOError, match="writing leaf 'b'"):
            store.write([Write(("a",), ALL, value), Write(("b",), ALL, value)])
    store.write([Write(("b",), rows(4, 7), value[4:] + 1)])
    found = held(store, 7)
    assert torch.equal(found["a"], value)
    assert torch.equal(found["b"], torch.cat([value[:4], value[4:] + 1]))


def test_a_save_when_the_interpreter_ends(tmp_path: FsPath) -> None:
    """No thread starts any more then."""
    code = f"""
import atexit, torch, tdstore
td = tdstore.TensorDict({{"x": torch.ones(5000, 1000)}}, [5000])
atexit.register(lambda: td.save({str(tmp_path / "d.tdz")!r}).close())
"""
    ended = scripts.run(code)
    assert (ended.output, ended.errors, ended.status) == ("", "", 0)
    assert tdstore.verify(tmp_path / "d.tdz") == []


@pytest.mark.parametrize("nbytes", [1, 4095, BLOCK, BLOCK + 5, 6 << 20])
def test_pieces_of_any_length_make_the_same_sums(nbytes: int) -> None:
    memory = np.random.default_rng(0).integers(0, 255, nbytes, dtype=np.uint8)
    summer, at = Summer(nbytes), 0
    for length in (0, 1, 4094, 1 << 16, 100_000, 3 << 20, nbytes):
        summer.add(memory[at : at + length])
        at += len(memory[at : at + length])
    assert summer.sums() == sums_of_memory(memory)
