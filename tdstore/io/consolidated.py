"""Consolidated files on the disk: written aside and renamed, mapped when they are opened."""

from __future__ import annotations

import os
from collections.abc import Iterable

import torch
from torch import Tensor

from tdstore import files
from tdstore.builtin.mmtensor import map_fd, write_tensor
from tdstore.errors import StoreExistsError
from tdstore.io import onefile


def write_file(url: str, contents: onefile.Contents, values: Iterable[tuple[int, Tensor]]) -> None:
    """Publish a file in one step: readers see the old one, or all of the new one.

    Args:
        url: absolute path.
        values: pieces of leaves, each with the byte at which it begins.
    """
    tail = onefile.encode(contents)
    size = max((slot.stop for slot in contents.every_slot()), default=0)
    with files.io_errors(url, "consolidating"):
        os.makedirs(os.path.dirname(url), exist_ok=True)
        if os.path.isdir(url):
            raise StoreExistsError(f"{url} is a folder, not a file", url=url)
        folder, temp = files.open_dir(os.path.dirname(url)), files.temp_name()
        try:
            fd = files.create_empty(temp, folder)
            try:
                files.truncate(fd, size)
                for start, value in values:
                    write_tensor(fd, value, start)
                files.write_at(fd, memoryview(tail), size)
                files.fsync(fd)
            finally:
                os.close(fd)
            files.rename(temp, folder, os.path.basename(url), folder)
        except BaseException:
            files.unlink_if_there(temp, folder)
            raise
        finally:
            os.close(folder)


def map_file(url: str, *, shared: bool) -> tuple[onefile.Contents, Tensor]:
    """What a file holds, checked, and its leaves as one mapped uint8 tensor; unless `shared`, a private one.

    Raises:
        StoreNotFoundError: no such file. CorruptStoreError: not a consolidated one, or damaged.
    """
    with files.io_errors(url, "opening", writing=shared):
        folder = files.open_dir(os.path.dirname(url))
        try:
            fd = files.open_plain(os.path.basename(url), folder, os.O_RDWR if shared else os.O_RDONLY)
        finally:
            os.close(folder)
        try:
            total = os.fstat(fd).st_size
            size, length = onefile.split_tail(os.pread(fd, onefile.TAIL, max(0, total - onefile.TAIL)), total, url)
            contents = onefile.decode(os.pread(fd, length, size), size, url)
            if not size:
                return contents, torch.empty(0, dtype=torch.uint8)
            return contents, map_fd(fd, (size,), torch.uint8, shared=shared, path=url)
        finally:
            os.close(fd)
