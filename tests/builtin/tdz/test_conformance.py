"""The tdz backend under the kit that every backend must pass."""

from __future__ import annotations

from tdstore.store import Cap
from tdstore.testing import StoreTests


class TestTdz(StoreTests):
    ON_DISK = True
    backend = "tdz"
    caps = (
        Cap.WRITE
        | Cap.PARTIAL_READ
        | Cap.PARTIAL_WRITE
        | Cap.RESIZE
        | Cap.VIEW
        | Cap.PERSISTENT
        | Cap.CONCURRENT_READ
        | Cap.DISCARD
    )

    # It starts a process, which takes seconds; the module is imported as memmap's is, whose kit runs it.
    test_light_import = None
