"""Copying a dataset many times larger than its blocks takes the memory of a few blocks, mapped pages included."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tdstore
from tdstore import LeafSpec, TensorDict

ON_DISK = True  # a file in memory would count as the memory of the process
MIB = 1 << 20
BLOCK = 8 * MIB
ALLOWED = 18 * BLOCK
"""Three blocks of memory, mapped pages of two more, HDF5's and torch's own, and room for noise: 45 to 118 MiB were seen
of h5, the most on a busy machine, where what was freed is given back later."""

# A small copy first, so that what is imported and set up once does not count.
CHILD = """
import json, sys
import torch
torch.set_num_threads(1)
import tdstore
def status(name):
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name))
small, source, target, options = *sys.argv[1:4], json.loads(sys.argv[4])
tdstore.copy(small, target + ".small", **options)
with open("/proc/self/clear_refs", "w") as f:
    f.write("5")  # the peak begins anew
before = status("VmRSS:")
tdstore.copy(source, target, block_bytes=%d, durable="none", **options)
print(status("VmHWM:") - before)
"""


def dataset(location: Path, nbytes: int, storage: str) -> None:
    """Holes, and a row here and there."""
    row = 64 << 10
    rows = nbytes // row // 2
    schema = {"a": LeafSpec((row,), "uint8"), "n": {"b": LeafSpec((row // 4,), "float32")}}
    td = TensorDict.from_schema(schema, batch_size=[rows], location=location, storage=storage, durable="none")
    for at in range(0, rows, rows // 4):
        td[at] = TensorDict(
            {"a": torch.full((row,), at % 251, dtype=torch.uint8), "n": {"b": torch.full((row // 4,), at + 0.5)}}
        )
    td.close()


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    shutil.rmtree(tmp_path)  # pytest keeps the folders of three runs


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peaks are read from Linux's /proc")
@pytest.mark.parametrize(
    ("source", "target", "nbytes", "options"),
    [
        ("memmap", "memmap", 320 * MIB, {}),
        ("h5", "h5", 256 * MIB, {"compression": "lzf", "layout": "scan"}),
    ],
)
def test_memory_stays_at_a_few_blocks(place, source, target, nbytes, options: dict[str, Any]):
    dataset(place / "source", nbytes, source)
    TensorDict({"a": torch.zeros(64, 1000)}, [64]).save(place / "small", storage=source).close()
    given = json.dumps({**options, "storage": target})
    command = [sys.executable, "-c", CHILD % BLOCK, *(str(place / n) for n in ("small", "source", "target")), given]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < ALLOWED, f"{int(done.stdout) / MIB:.0f} MiB more at the peak"
    with tdstore.load(place / "source") as a, tdstore.load(place / "target") as b:
        for at in (0, len(a) // 4, len(a) - 1):
            assert torch.equal(a[at]["a"], b[at]["a"])
            assert torch.equal(a[at]["n", "b"], b[at]["n", "b"])
