"""A writer is killed in the middle of `append`: the next reader sees the old length or the new one, of all leaves.

Where bytes that were committed are written again in place (the chunk of h5 and redis that the last old row shares
with the first new one; the text that many values lie in) it may be told so first, and then finds one of the two with
`recover="accept"`.
"""

from __future__ import annotations

import os
import signal
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import pytest
import torch
from tdstore_redis.connection import Wire

import tdstore
from tdstore import TensorDict
from tdstore.builtin.shared.store import remove
from tdstore.errors import DirtyStoreError

OPEN = {"durable": "none"}
POINTS: list[tuple[Any, str]] = [
    *((os, name) for name in ("pwrite", "pwritev", "write", "ftruncate", "posix_fallocate", "rename", "replace")),
    (os, "unlink"), (os, "link"), (h5py.File, "flush"), (h5py.Dataset, "resize"), (Wire, "pipe"), (Wire, "raising"),
]  # fmt: skip


def dataset(n: int, base: int = 0) -> TensorDict:
    n += base
    ragged = torch.nested.nested_tensor_from_jagged(torch.arange(tokens(n)), torch.tensor([*map(tokens, range(n + 1))]))
    return TensorDict(
        {
            "a": torch.arange(3.0 * n).reshape(n, 3),
            "n": {"b": torch.arange(n), "tokens": ragged},
            "each": [f"{i}" for i in range(n)],
        },
        [n],
    )


def tokens(n: int) -> int:
    """How many elements the ragged entry has in `n` rows: 1, 2, 0, 1, 2, 0, ..."""
    return sum((i + 1) % 3 for i in range(n))


def appended(location: str, options: dict[str, Any], base: int, kill_at: int) -> tuple[int, int]:
    """Append a row in a forked child that dies around the `kill_at`-th change of the medium: its code, its calls."""
    read, write = os.pipe()
    pid = os.fork()
    if pid:
        os.close(write)
        with os.fdopen(read, "rb") as pipe:
            told = pipe.read()
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), int(told or 0)
    code = 99
    try:
        torch.set_num_threads(1)
        td = tdstore.open(location, "r+", **options)
        count = [0]

        def wrap(call: Callable[..., Any]) -> Callable[..., Any]:
            def counted(*args: Any, **kwargs: Any) -> Any:
                for run in (lambda: None, lambda: call(*args, **kwargs)):
                    result = run()
                    count[0] += 1
                    if count[0] == kill_at:
                        os.kill(os.getpid(), signal.SIGKILL)
                return result

            return counted

        tell = os.write
        for owner, name in POINTS:
            setattr(owner, name, wrap(getattr(owner, name)))
        td.append(dataset(4, base)[-1])
        calls = count[0]
        td.close()
        tell(write, str(calls).encode())
        code = 0
    finally:
        os._exit(code)


def found(location: str, options: dict[str, Any], base: int) -> str:
    try:
        td = tdstore.open(location, **options)
    except DirtyStoreError as error:
        assert error.leaves and "recover='accept'" in str(error) and "recover" not in options
        tdstore.open(location, "r+", **options, recover="accept").close()
        return "accepted " + found(location, options, base)
    n = len(td)
    for key in ("a", ("n", "b")):
        assert torch.equal(td[key], dataset(4, base)[key][:n]), key
    ragged = td["n", "tokens"]
    assert ragged.size(0) == n and torch.equal(ragged.values(), torch.arange(tokens(n))), "rows that are wholly there"
    assert ragged.offsets().tolist() == [*map(tokens, range(n + 1))]
    assert td["each"] == dataset(n)["each"] and td["n"].batch_size == (n,)
    td.close()
    assert n - base in (3, 4)
    return "old" if n - base == 3 else "new"


# From COLUMN_FROM values on they are leaves: with a base of 252 the append that is killed makes these, and with 253 it
# adds to them.
PLACES = [(where, 0) for where in ("memmap", "zarr", "h5", "objects", "shm", "redis", "tdz")]
PLACES += [("memmap", 252), ("h5", 252), ("memmap", 253), ("h5", 253)]


@pytest.mark.parametrize(("where", "base"), PLACES)
def test_killed(where: str, base: int, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    options = OPEN if where in ("memmap", "zarr", "h5") else {}
    name = uuid.uuid4().hex
    at = {"objects": f"file://{tmp_path}/", "shm": f"shm://kill-{name}-"}.get(where, f"{tmp_path}/")
    if where == "redis":
        at = f"{request.getfixturevalue('redis').url}/0?name=kill-{name}-"
    kept = []
    seen = []

    def fresh(i: int) -> str:
        location = f"{at}{i}" + (f".{where}" if where in ("h5", "zarr", "tdz") else "")
        td = dataset(2, base).save(location, **options)
        td.append(dataset(3, base)[-1])  # it has grown before: chunks, spare room
        if where == "shm":
            kept.append(td)  # a store in shared memory ends with its owner
        else:
            td.close()
        return location

    location = fresh(0)
    code, calls = appended(location, options, base, 0)
    assert code == 0 and calls > 2 and found(location, options, base) == "new"
    points = sorted({round(1 + i * (calls - 1) / 7) for i in range(8)})
    for i, k in enumerate(points, 1):
        location = fresh(i)
        code, _ = appended(location, options, base, k)
        assert code == -signal.SIGKILL
        seen.append(found(location, options, base))
        if seen[-1].endswith("old") and where != "shm":
            if i % 2:  # opened and closed by a writer that does nothing
                tdstore.open(location, "r+", **options).close()
                assert found(location, options, base) == "old"
            with tdstore.open(location, "r+", **options) as td:
                td.append(dataset(4, base)[-1])
            assert found(location, options, base) == "new"
    while kept:
        kept.pop()
        remove(f"{at}{len(kept)}")
    assert "old" in seen
    assert set(seen) <= {"old", "new"} or where in ("h5", "redis") or base == 253, seen
