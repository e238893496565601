"""A reader that opens a dataset while a writer changes the lengths of its leaves finds one commit, never an error."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path as FsPath

import pytest
import torch

import tdstore
from tdstore import TensorDict
from tdstore.errors import CorruptStoreError

ON_DISK = True  # numbers of files are used again


@pytest.mark.parametrize("pack", [False, True])
def test_readers_while_a_writer_resizes(tmp_path: FsPath, pack: bool) -> None:
    path = tmp_path / "d"
    TensorDict({"x": torch.zeros(100, 96), "y": torch.zeros(100)}, [100]).save(path, pack=pack).close()
    writer = os.fork()
    if not writer:
        try:
            while True:
                with tdstore.open(path, mode="r+", durable="none") as td:
                    for length in (150, 40, 100):
                        td.resize_(length)
        finally:
            os._exit(1)
    lengths: set[int] = set()
    try:
        begun = time.monotonic()
        while (len(lengths) < 3 or time.monotonic() - begun < 3) and time.monotonic() - begun < 60:
            with tdstore.open(path) as td:
                assert td["x"].shape[0] == td["y"].shape[0] == td.batch_size[0]
                lengths.add(td.batch_size[0])
    finally:
        os.kill(writer, signal.SIGKILL)
        os.waitpid(writer, 0)
    assert lengths == {150, 40, 100}, "or the writer did nothing meanwhile"


def test_a_small_leaf_is_compared_whole_when_it_is_opened(tmp_path: FsPath) -> None:
    path = tmp_path / "d"
    TensorDict({"x": torch.zeros(60, 1024, dtype=torch.uint8)}, [60]).save(path).close()
    with open(path / "x.memmap", "r+b") as file:
        file.seek(20_000)  # in none of the three samples
        file.write(b"\1")
    with pytest.raises(CorruptStoreError, match="'x'"):
        tdstore.open(path)
    assert tdstore.open(path, verify="none")["x"].sum() == 1
