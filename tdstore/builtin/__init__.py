"""The local backends, declared through the same hook as everyone else's."""

from __future__ import annotations

from collections.abc import Iterable

from tdstore.hookspecs import Backend, hookimpl


@hookimpl
def tdstore_backends() -> Iterable[Backend]:
    """Declare memory, cuda, shared and memmap."""
    yield Backend(
        name="memory",
        opener="tdstore.builtin.memory:open_memory",
        schemes=("ram",),
        summary="tensors of this process, on the CPU",
    )
    yield Backend(
        name="cuda",
        opener="tdstore.builtin.cuda:open_cuda",
        schemes=("cuda",),
        summary="tensors on a CUDA device",
    )
    yield Backend(
        name="shared",
        opener="tdstore.builtin.shared:open_shared",
        schemes=("shm",),
        summary="shared memory: anonymous for child processes, shm://name for unrelated ones",
    )
    yield Backend(
        name="memmap",
        opener="tdstore.builtin.memmap:open_memmap",
        schemes=("memmap",),
        markers=("tdstore.json", "meta.json"),
        summary="a directory of raw memory-mapped files, one per leaf",
    )
