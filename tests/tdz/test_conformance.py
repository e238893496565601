"""The tdz backend under the kit that every backend must pass."""

from __future__ import annotations

from tdstore.store import Cap
from tdstore.testing import StoreTests


class TestTdz(StoreTests):
    backend = "tdz"
    caps = (
        Cap.WRITE
        | Cap.PARTIAL_READ
        | Cap.PARTIAL_WRITE
        | Cap.RESIZE
        | Cap.VIEW
        | Cap.SHARED
        | Cap.PERSISTENT
        | Cap.CONCURRENT_READ
    )

    # Each starts a process, which takes seconds. `test_shared_writes_are_seen` starts one too, which reads what this
    # one wrote and writes what this one reads; the module is imported as memmap's is, whose kit runs the third.
    test_second_process_reads = None
    test_second_process_writes = None
    test_light_import = None
