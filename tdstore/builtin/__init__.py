"""The local backends, declared through the same hook as all others."""

from __future__ import annotations

import zipfile
from collections.abc import Iterable

from tdstore.hookspecs import Backend, hookimpl
from tdstore.store import Cap

_RESIDENT = Cap.WRITE | Cap.PARTIAL_READ | Cap.PARTIAL_WRITE | Cap.RESIZE | Cap.VIEW | Cap.CONCURRENT_READ | Cap.DISCARD


@hookimpl
def tdstore_backends() -> Iterable[Backend]:
    """Declare memory, cuda, shared, memmap and tdz."""
    yield Backend(
        name="memory",
        opener="tdstore.builtin.memory:open_memory",
        schemes=("ram",),
        summary="tensors of this process, on the CPU",
        caps=_RESIDENT,
        checks_target=True,
    )
    yield Backend(
        name="cuda",
        opener="tdstore.builtin.cuda:open_cuda",
        schemes=("cuda",),
        summary="tensors on a CUDA device",
        caps=_RESIDENT | Cap.DIRECT_DEVICE,
        checks_target=True,
    )
    yield Backend(
        name="shared",
        opener="tdstore.builtin.shared.store:open_shared",
        schemes=("shm",),
        summary="shared memory: anonymous for child processes, shm://name for unrelated ones",
        caps=_RESIDENT | Cap.SHARED | Cap.CONCURRENT_WRITE,
        remove="tdstore.builtin.shared.store:remove",
        list="tdstore.builtin.shared.store:list_stores",
    )
    yield Backend(
        name="memmap",
        opener="tdstore.builtin.memmap.store:open_memmap",
        schemes=("memmap",),
        markers=("tdstore.json", "meta.json"),
        summary="a directory of raw memory-mapped files, one per leaf",
        caps=_RESIDENT | Cap.SHARED | Cap.PERSISTENT | Cap.CONCURRENT_WRITE,
        checks_target=True,
        replaces_open=True,
    )
    yield Backend(
        name="tdz",
        opener="tdstore.builtin.tdz.store:open_tdz",
        schemes=("tdz",),
        suffixes=(".tdz",),
        magic=(b"PK\x03\x04",),
        summary="a memmap directory as one zip file, memory-mapped where it is not compressed",
        caps=_RESIDENT | Cap.PERSISTENT,
    )


@hookimpl
def tdstore_guess_backend(location: str) -> str | None:
    """Recognise a zip file that no other backend recognises: `tdz` reports its missing parts."""
    return "tdz" if zipfile.is_zipfile(location) else None
