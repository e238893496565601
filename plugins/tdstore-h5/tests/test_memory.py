"""Too little memory for HDF5 or its filters: an error that says so, and none that calls the file damaged."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
from collections.abc import Callable
from pathlib import Path as FsPath
from typing import Any

import numpy as np
import pytest
import torch
from tdstore_h5.faults import h5_errors
from tdstore_h5.store import open_h5

from tdstore.errors import CorruptStoreError, StoreIOError
from tdstore.header import Group, Header
from tdstore.types import LeafSpec, Read, Write

ON_DISK = True  # a limit of memory
MIB = 1 << 20
CHUNK = 40 * MIB
"""What is freed of this size goes back to the system."""
LAYOUTS = {"gzip": {"compression": "gzip", "compression_opts": 1}, "lzf": {"compression": "lzf"}}


def _in_little_memory(work: Callable[[], None], more: int) -> str:
    """What a forked child says that has so many MiB of memory: "fine", an errno, or the error's class."""
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        said = "none"
        try:
            with open("/proc/self/statm") as file:
                size = int(file.read().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (size + 64 * MIB, size + 64 * MIB))
            held: list[np.ndarray[Any, Any]] = []
            with contextlib.suppress(MemoryError):  # also what is free in the heap by chance
                while True:
                    held.append(np.empty(MIB, np.uint8))
            del held[-more:]
            work()
            said = "fine"
        except StoreIOError as error:
            said = errno.errorcode.get(error.errno or 0, "no errno")
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        finally:
            os.write(write, said.encode())
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        said = pipe.read()
    os.waitpid(pid, 0)
    return said


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("doing", ["read", "write"])
def test_no_memory_is_no_damage(tmp_path: FsPath, layout: str, doing: str) -> None:
    file = tmp_path / "t.h5"
    with open_h5(file, mode="w", durable="none") as store:
        store.create({("a",): LeafSpec((CHUNK,), "uint8", chunks=(CHUNK,), **LAYOUTS[layout])})
        store.write([Write(("a",), (), torch.arange(CHUNK).to(torch.uint8))])
        store.save_header(Header({(): Group(batch_size=(), keys=("a",))}))
    out = torch.zeros(1000, dtype=torch.uint8)
    store = open_h5(file, mode="r" if doing == "read" else "r+", durable="none")

    def read() -> None:
        store.read([Read(("a",), (slice(5, 1005, 1),), out)])

    def write() -> None:
        with open_h5(file, mode="r+", durable="none", locking=False) as mine:
            mine.write([Write(("a",), (slice(5, 1005, 1),), out)])

    said = {_in_little_memory(read if doing == "read" else write, more) for more in (2, 20, 30, 39, 44, 60)}
    store.close()
    assert "ENOMEM" in said, said
    assert said <= {"ENOMEM", "fine"}
    with open_h5(file) as again:
        assert not again.verify()


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("Unable to allocate 4.00 MiB"),
        RuntimeError("Can't synchronously read data (memory allocation failed for raw data chunk)"),
        OSError("Can't synchronously write data (memory allocation failed for raw data chunk)"),
    ],
)
def test_what_is_raised(error: Exception) -> None:
    with pytest.raises(StoreIOError, match=r"place.*not enough memory") as caught, h5_errors("place", "reading 'a'"):
        raise error
    assert caught.value.errno == errno.ENOMEM and caught.value.hint and not isinstance(caught.value, CorruptStoreError)
