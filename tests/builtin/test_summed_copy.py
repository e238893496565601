"""Bytes that are copied and summed in one pass."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tdstore.builtin import summedcopy
from tdstore.builtin.summedcopy import copy_summed, is_aligned
from tdstore.storekit import pages
from tdstore.storekit.checksums import crcs_of
from tests import scripts

KIB = 1 << 10


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("fresh", [True, False])
@pytest.mark.parametrize("size", [64 * KIB, 128 * KIB, 256 * KIB, 512 * KIB, 4096 * KIB])
@pytest.mark.parametrize("length", [1, 15, 64 * KIB, 448 * KIB, 448 * KIB + 7, 3 << 20, (9 << 20) + 4093])
def test_the_copy_and_its_checksums(
    length: int, size: int, fresh: bool, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(summedcopy, "SHARE", 1 << 20)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    source = np.random.default_rng(length).integers(0, 256, length, np.uint8)
    target = np.zeros(length, np.uint8)
    assert copy_summed(source, target, size, fresh=fresh) == crcs_of(source, size)
    assert np.array_equal(source, target)


def test_a_system_that_refuses_to_give_pages_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "_POPULATE_WRITE", 999)
    source, target = np.ones(1 << 20, np.uint8), np.zeros(1 << 20, np.uint8)
    assert copy_summed(source, target, 64 * KIB, fresh=True) == crcs_of(source, 64 * KIB)
    assert target.all()


def test_a_read_when_the_interpreter_ends(tmp_path: Path) -> None:
    """No thread starts any more then."""
    code = f"""
import atexit, torch, tdstore
torch.set_num_threads(2)
tdstore.TensorDict({{"x": torch.ones(5000, 1000)}}, [5000]).save({str(tmp_path / "d")!r}).close()
opened = tdstore.open({str(tmp_path / "d")!r})
atexit.register(lambda: print(int(opened.read()["x"].sum())))
"""
    ended = scripts.run(code)
    assert (ended.output, ended.errors, ended.status) == ("5000000\n", "", 0)


def test_memory_that_is_not_aligned_is_told() -> None:
    memory = np.zeros(100, np.uint8)
    aligned = memory[-memory.ctypes.data % 16 :]
    assert is_aligned(aligned, aligned[16:])
    assert not is_aligned(aligned, aligned[1:])
