"""Small datasets, forked children, and a system-call injector for the tests of the memmap backend."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path as FsPath
from typing import Any

import pytest
from torch import Tensor

from tdstore.builtin.memmap.store import open_memmap
from tdstore.storekit import files
from tdstore.testing.crash import die, in_child, killed_after, small_disk
from tdstore.testing.processes.deaths import StoredFiles, copies
from tdstore.testing.samples import bits
from tdstore.testing.setup import header_for as header_of
from tdstore.testing.setup import load as load_from
from tdstore.testing.setup import read_all as content
from tdstore.testing.setup import same_leaves as same
from tdstore.testing.setup import save as save_to
from tdstore.types import Path
from tests.builtin.memmap import values

__all__ = [
    "EIO",
    "ENOSPC",
    "NEW",
    "OLD",
    "FaultyOs",
    "bits",
    "content",
    "die",
    "fail_with",
    "header_of",
    "in_child",
    "injected",
    "killed_after",
    "layout",
    "load",
    "remains",
    "same",
    "save",
    "small_disk",
]

Leaves = Mapping[Path, Tensor]
OLD: Leaves = values.OLD
NEW: Leaves = values.NEW


PACKED = [False]
"""Whether `save` packs small leaves: set by the fixture `layout`."""


@pytest.fixture(params=["files", "packed"])
def layout(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run a test with a file for each leaf, and with packed ones."""
    PACKED[0] = request.param == "packed"
    yield
    PACKED[0] = False


def save(location: FsPath | str, leaves: Leaves, *, mode: Any = "w", **options: Any) -> None:
    save_to(open_memmap, str(location), leaves, mode=mode, **{"durable": "none", "pack": PACKED[0], **options})


def load(location: FsPath | str, **options: Any) -> dict[Path, Tensor]:
    return load_from(open_memmap, str(location), **{"verify": "full", **options})


def remains(folder: FsPath) -> list[str]:
    """Temporary names anywhere below a folder."""
    return [str(p) for p in folder.rglob("*") if ".tdstore-" in p.name]


CHANGING = frozenset("open mkdir pwrite pwritev write ftruncate posix_fallocate rename unlink rmdir fsync link".split())


class FaultyOs:
    """Stands for the `os` of `tdstore.storekit.files`: counts calls that change a disk, acts from the k-th on."""

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


def at_each_change(work: Callable[[], object], folder: FsPath) -> Iterator[bool]:
    """Put what a writer leaves that is killed at a change of the disk, for one change after the other; then its end.

    These are copies of the files below the folder. Yields whether it is one of a writer that was killed.
    """

    faults = FaultyOs(1, lambda name: None)

    def arm(do: Callable[[int], object]) -> None:
        faults.act = lambda name: do(faults.count)

    def watched() -> None:
        with injected(faults):
            work()

    yield from copies(watched, arm, lambda: StoredFiles(folder), step=1, least=10)


def fail_with(code: int) -> Callable[[str], None]:
    def act(name: str) -> None:
        raise OSError(code, os.strerror(code), name)

    return act


ENOSPC = fail_with(errno.ENOSPC)
EIO = fail_with(errno.EIO)
