"""Small datasets, forked children, and a system-call injector for the tests of the memmap backend."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path as FsPath
from typing import Any

import torch
from torch import Tensor

from tdstore import files
from tdstore.builtin.memmap import MemmapStore, open_memmap
from tdstore.header import Group, Header
from tdstore.types import LeafSpec, Path, Read, Write

Leaves = Mapping[Path, Tensor]

OLD: Leaves = {("a",): torch.arange(2000.0), ("n", "b"): torch.arange(600).view(30, 20), ("s",): torch.tensor(7)}
NEW: Leaves = {
    ("a",): torch.arange(2000.0) * 3 + 1,
    ("n", "c"): torch.ones(40, 3).to(torch.bfloat16),
    ("z",): torch.zeros(0, 4),
}


def header_of(leaves: Leaves) -> Header:
    below: dict[Path, dict[str, None]] = {(): {}}
    for path in leaves:
        for depth in range(1, len(path) + 1):
            below.setdefault(path[: depth - 1], {})[path[depth - 1]] = None
    return Header({path: Group(batch_size=(), keys=tuple(keys)) for path, keys in sorted(below.items())})


def save(location: FsPath | str, leaves: Leaves, *, mode: Any = "w", **options: Any) -> None:
    with open_memmap(str(location), mode=mode, **{"durable": "none", **options}) as store:
        store.create({path: LeafSpec(v.shape, v.dtype) for path, v in leaves.items()})
        store.write([Write(path, (), v) for path, v in leaves.items()])
        store.save_header(header_of(leaves))


def content(store: MemmapStore) -> dict[Path, Tensor]:
    paths = list(store.paths())
    return dict(zip(paths, store.read([Read(p) for p in paths]), strict=True))


def load(location: FsPath | str, **options: Any) -> dict[Path, Tensor]:
    with open_memmap(str(location), **{"verify": "full", **options}) as store:
        return content(store)


def same(got: Leaves, expected: Leaves) -> bool:
    return got.keys() == expected.keys() and all(
        got[k].dtype == v.dtype and got[k].shape == v.shape and torch.equal(bits(got[k]), bits(v))
        for k, v in expected.items()
    )


def bits(value: Tensor) -> Tensor:
    return value.contiguous().view(-1).view(torch.uint8) if value.numel() else value


def remains(folder: FsPath) -> list[str]:
    """Temporary names anywhere below a folder."""
    return [str(p) for p in folder.rglob("*") if ".tdstore-" in p.name]


def in_child(body: Callable[[], object]) -> int:
    """Run in a forked child; its exit code, or minus the signal that ended it. An exception is code 1."""
    pid = os.fork()
    if not pid:
        code = 1
        try:
            torch.set_num_threads(1)  # OpenMP's threads are not there in a forked child: it would wait for ever
            body()
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status)


CHANGING = frozenset("open mkdir pwrite write ftruncate posix_fallocate rename unlink rmdir fsync link".split())


class FaultyOs:
    """Stands for the `os` of `tdstore.files`: counts the calls that change a disk, and acts from the k-th on."""

    def __init__(self, at: int, act: Callable[[str], None], only: frozenset[str] = CHANGING) -> None:
        self.at = at
        self.act = act
        self.only = only
        self.count = 0

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        if name not in self.only:
            return real

        def call(*args: Any, **kwargs: Any) -> Any:
            if name != "open" or args[1] & (os.O_CREAT | os.O_WRONLY | os.O_RDWR):
                self.hit(name)
            return real(*args, **kwargs)

        return call

    def hit(self, name: str) -> None:
        self.count += 1
        if self.count >= self.at:
            self.act(name)


@contextmanager
def injected(faults: FaultyOs) -> Iterator[FaultyOs]:
    real_rename2 = files._rename2

    def rename2(*args: Any) -> int:
        if "rename" in faults.only:
            faults.hit("renameat2")
        return real_rename2(*args)

    files.os, files._rename2 = faults, rename2  # type: ignore[assignment]
    try:
        yield faults
    finally:
        files.os, files._rename2 = os, real_rename2  # type: ignore[assignment]


def die(name: str) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fail_with(code: int) -> Callable[[str], None]:
    def act(name: str) -> None:
        raise OSError(code, os.strerror(code), name)

    return act


ENOSPC = fail_with(errno.ENOSPC)
EIO = fail_with(errno.EIO)
