"""Identity of processes, which distinguishes the remains of one that ended from the memory of a running one.

The clean-up after an owner that ended is in `named_files`.
"""

from __future__ import annotations

import os
from functools import lru_cache
from typing import NamedTuple

from tdstore.errors import UnsupportedError


class Process(NamedTuple):
    """The identity of a process, distinct from that of a later one with the same pid."""

    pid: int
    start: int
    """Clock ticks between boot and the start of the process."""
    namespace: int
    """The pid namespace: a pid means nothing in another container."""


def this_process() -> Process:
    """Return the calling process."""
    return _identify(os.getpid())


def alive(process: Process) -> bool:
    """Check whether the process still runs; True where that is unknown (another pid namespace)."""
    if process.namespace != this_process().namespace:
        return True
    found = _stat(process.pid)
    return found is not None and found[0] not in "ZX" and found[1] == process.start


@lru_cache(1)
def boot_id() -> bytes:
    """Return 16 bytes that change with every boot."""
    with open("/proc/sys/kernel/random/boot_id") as f:
        return bytes.fromhex(f.read().strip().replace("-", ""))


@lru_cache(1)
def _identify(pid: int) -> Process:
    # Keyed by pid: after a fork the child looks it up again.
    found = _stat(pid)
    if found is None:
        raise UnsupportedError(
            f"/proc/{pid}/stat cannot be read, and shared stores need it to find out which processes still run",
            hint="mount /proc, or keep the data in a memmap store",
        )
    return Process(pid, found[1], os.stat("/proc/self/ns/pid").st_ino)


def _stat(pid: int) -> tuple[str, int] | None:
    """Return state letter and start time of a process; None when there is none."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as f:
            # The command name, in parentheses, may hold anything: fields count from the last one.
            fields = f.read().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return fields[0].decode(), int(fields[19])
