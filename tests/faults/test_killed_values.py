"""A child dies at the k-th write to the medium while it writes values per row: old, new, an error; no other text."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import pytest
import torch

import tdstore
from tdstore import TensorDict
from tdstore.container.varlen.columns import COLUMN_FROM
from tdstore.errors import TDStoreError

ROWS = COLUMN_FROM
PRIMITIVES = ("pwrite", "pwritev", "rename", "replace", "unlink", "write", "ftruncate", "fsync", "posix_fallocate")


def words(k: int, rows: int = ROWS) -> list[str]:
    return [f"{k}:{i} " + "ü" * 150 for i in range(rows)]


def one_row(td: Any) -> None:
    td[7] = {"c": "z" * 90_000}  # more than there is room for


def growing(td: Any) -> None:
    td.extend(TensorDict({"c": words(1, 400)}, [400]))


def packing(td: Any) -> None:
    td[:] = {"c": words(1)}
    td[:] = {"c": words(2)}
    td[:] = {"c": words(3)}


def is_sound(rows: list[Any], change: Callable[[Any], None]) -> bool:
    """Whether every row is one that was there at some time."""
    known = [set(options) for options in zip(*(words(k) for k in range(4)), strict=True)]
    if change is one_row:
        known[7].add("z" * 90_000)
    if len(rows) == ROWS + 400:
        return rows == words(0) + words(1, 400)
    return len(rows) == ROWS and all(row in options for row, options in zip(rows, known, strict=True))


def run(path: Path, change: Callable[[Any], None], at: int) -> int:
    """How many writes a forked child made; -9 if it was killed at one."""
    out, into = os.pipe()
    child = os.fork()
    if not child:
        try:
            torch.set_num_threads(1)
            count = 0

            def wrap(real: Any) -> Any:
                def counted(*args: Any, **kwargs: Any) -> Any:
                    nonlocal count
                    count += 1
                    if count == at:
                        os.kill(os.getpid(), signal.SIGKILL)
                    return real(*args, **kwargs)

                return counted

            td = tdstore.open(path, mode="r+")
            tell = os.write
            for name in PRIMITIVES:
                setattr(os, name, wrap(getattr(os, name)))
            h5py.File.flush = wrap(h5py.File.flush)
            change(td)
            td.close()
            tell(into, str(count).encode())
        finally:
            os._exit(1)
    os.close(into)
    with os.fdopen(out) as end:
        told = end.read()
    _, status = os.waitpid(child, 0)
    assert told or os.WIFSIGNALED(status)
    return int(told or -9)


@pytest.mark.parametrize("change", [one_row, growing, packing])
@pytest.mark.parametrize("name", ["d", "d.h5", "d.zarr"])
def test_killed_while_values_are_written(tmp_path: Path, name: str, change: Callable[[Any], None]) -> None:
    path = tmp_path / name
    made = TensorDict({"c": words(0)}, [ROWS])
    made.save(path).close()
    calls = run(path, change, 0)
    assert calls > 0
    with tdstore.open(path) as td:
        assert is_sound(td["c"], change)
    for at in sorted({1, 2, calls // 3, calls // 2, (2 * calls) // 3, (5 * calls) // 6, calls - 1, calls}):
        made.save(path).close()
        if at < 1:
            continue
        # A run may need one or two writes less than the one that was counted; then the last ones are not reached.
        assert run(path, change, at) in ((-9, *range(calls - 2, at)) if at > calls - 2 else (-9,))
        for mode in ("r", "r+"):  # the writer that comes next mends what it can
            try:
                with tdstore.open(path, mode=mode) as td:
                    rows = td["c"]
            except TDStoreError as error:
                assert str(path) in str(error)
                continue
            assert is_sound(list(rows), change), at
