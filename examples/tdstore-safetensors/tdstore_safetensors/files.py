"""One local file: read at any place, and replaced as a whole."""

from __future__ import annotations

import fcntl
import os
import secrets
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, BinaryIO

import numpy as np
from tdstore.errors import CorruptStoreError
from tdstore.storekit import io_errors

Array = np.ndarray[Any, Any]


def read_into(array: Array, file: BinaryIO, offset: int, url: str) -> Array:
    """Fill an array with the bytes at an offset."""
    # Several threads may do this at once (a seek and a read they may not), and a file that another process
    # cuts short is an error here, where a memory map would kill this process.
    raw, done = array.reshape(-1).view(np.uint8).data, 0
    with io_errors(url, "reading", writing=False):
        while done < len(raw):
            count = os.preadv(file.fileno(), [raw[done:]], offset + done)
            if not count:
                raise CorruptStoreError(f"{url} was cut short while it was open", url=url)
            done += count
    return array


def write_whole(path: str, parts: Iterable[bytes | memoryview], *, exclusive: bool) -> BinaryIO:
    """Put a new file in place of what is at `path`, in one step and for good. Return it, open for reading."""
    folder = os.path.dirname(path)
    with io_errors(path, "saving"):
        os.makedirs(folder, exist_ok=True)
        temporary, file = _make_temporary(path, folder)
        try:
            file.writelines(parts)
            file.flush()
            if os.path.exists(path):
                os.fchmod(file.fileno(), os.stat(path).st_mode & 0o777)
            os.fsync(file.fileno())
            if exclusive:
                os.link(temporary, path)  # in one step too, and it fails where a file is
            else:
                os.replace(temporary, path)
            _sync_folder(folder)
        except BaseException:
            file.close()
            raise
        finally:
            if os.path.exists(temporary):
                os.unlink(temporary)
    fcntl.flock(file, fcntl.LOCK_UN)  # of the temporary file; now it is the one that the next writer locks
    return file


def _make_temporary(path: str, folder: str) -> tuple[str, BinaryIO]:
    """Make a file beside `path`, locked while its writer runs, and remove those of writers that were killed."""
    guard = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(guard, fcntl.LOCK_EX)  # nobody takes a file for left over before its writer has locked it
        for name in os.listdir(folder):
            if name.startswith(f"{os.path.basename(path)}.") and name.endswith(".tmp"):
                with suppress(BlockingIOError, FileNotFoundError), open(os.path.join(folder, name), "rb") as left:
                    fcntl.flock(left, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    os.unlink(left.name)
        file = open(f"{path}.{secrets.token_hex(4)}.tmp", "x+b")
        fcntl.flock(file, fcntl.LOCK_EX)
        return file.name, file
    finally:
        os.close(guard)


def _sync_folder(folder: str) -> None:
    descriptor = os.open(folder, os.O_RDONLY)  # a name is data of its folder
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
