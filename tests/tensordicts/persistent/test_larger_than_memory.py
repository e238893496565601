"""A dataset ten times larger than the memory that the process may take: all of it is worked on, in blocks."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ON_DISK = True  # the data is large
LIMIT = 16 << 20
BLOCK = 1 << 20
GROWING = {"memmap": LIMIT, "h5": LIMIT + 3 * (8 << 20), "zarr": LIMIT}
"""HDF5 keeps 8 MiB of chunks of each leaf that grows, here two, and the plugin copies them in blocks of 8 MiB."""
# What glibc keeps of freed memory depends on what was freed before; so pinned, the limit counts what is in use.
PINNED = {"MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072", "MALLOC_ARENA_MAX": "1"}

# The limit counts private memory (heap, anonymous mappings), not pages of mapped files. A small dataset first, so that
# what is imported and set up once is there when the limit comes.
CHILD = """
import resource, sys, threading
import torch
torch.set_num_threads(1)
threading.stack_size(512 << 10)  # the 8 MiB that a thread reserves count as data, and it uses none of them
import tdstore
from tdstore import TensorDict
import tdstore.io.blocks
where, storage = sys.argv[1:3]
limit, growing, block = map(int, sys.argv[3:])
tdstore.io.blocks.BLOCK_BYTES = block
more = dict(storage=storage, durable="none", **({"buffer_bytes": limit // 4} if storage == "zarr" else {}))

def data():
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmData"))

def allow(nbytes):
    resource.setrlimit(resource.RLIMIT_DATA, (nbytes, resource.RLIM_INFINITY))

start = 0

def work(name, rows):
    schema = {"x": ((512,), "float32"), "n": {"y": ((512,), "float32")}}
    td = TensorDict.from_schema(schema, batch_size=[rows], location=where + name, **more)
    other = TensorDict.from_schema(schema, batch_size=[rows], location=where + name + "o", **more)
    td.add_(1)
    td.apply_(lambda x: x.mul_(3))
    td[rows // 2 :] = TensorDict({"x": torch.full((512,), 5.0), "n": {"y": torch.full((512,), 5.0)}})
    for mean in (td.mean(), td.mean(dim=0)):
        assert torch.allclose(mean["x"], torch.tensor(4.0)) and torch.allclose(mean["n", "y"], torch.tensor(4.0))
    assert torch.allclose(td.std(correction=0)["x"], torch.tensor(1.0))
    mask = torch.arange(rows) % 2 == 0
    assert td.where(mask, other, out=other) is other
    assert other.mean()["x"] == 2 and other[3]["x"].sum() == 0 and other[rows - 2]["n", "y"][0] == 5
    td.apply(lambda x, y: torch.sub(x, y, out=y), other, out=other) if storage != "memmap" else None
    tdstore.copy(td, where + name + "c", block_bytes=block, **more)
    copied = tdstore.open(where + name + "c", "r+", **more)
    if start:
        allow(start + growing)
    row = TensorDict({"x": torch.full((512,), 7.0), "n": {"y": torch.full((512,), 7.0)}})
    copied.append(row)
    copied.extend(td[:rows // 4])
    assert len(copied) == rows + 1 + rows // 4 and copied[rows]["x"][0] == 7 and copied[-1]["n", "y"][0] == 3
    assert copied[rows - 1]["x"][0] == 5 and copied[0]["x"][-1] == 3
    for one in (td, other, copied):
        one.close()

work("small", 1024)
start = data()
allow(start + limit)
try:
    torch.ones(limit // 2)  # twice the limit
except RuntimeError:
    work("large", 10 * limit // (2 * 4 * 512))
    print("done")
"""


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    shutil.rmtree(tmp_path)  # pytest keeps the folders of three runs


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="RLIMIT_DATA counts mappings on Linux only")
@pytest.mark.parametrize("storage", list(GROWING))
def test_ten_times_the_limit(storage: str, place: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CHILD, f"{place}/", storage, str(LIMIT), str(GROWING[storage]), str(BLOCK)],
        env=os.environ | PINNED,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0 and done.stdout == "done\n", done.stderr[-3000:] or done.stdout
