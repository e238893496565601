"""A conformance kit for authors of backends, and wrappers that count, slow down or break a store.

    from tdstore.testing import StoreTests

    class TestZarr(StoreTests):
        backend = "zarr"
        caps = Cap.WRITE | Cap.PARTIAL_READ | Cap.PERSISTENT

        @pytest.fixture
        def location(self, tmp_path):
            return f"{tmp_path}/t.zarr"

The kit needs pytest and hypothesis: `pip install tdstore[testing]`.
"""

import pytest

# Before the modules are imported: failures then show the values on both sides of an assert.
_SUBJECTS = "setup samples comparing catalogue reading writing headers modes discarding sharing declaration machine"
pytest.register_assert_rewrite(*(f"{__name__}.{subject}" for subject in (*_SUBJECTS.split(), "endings", "crash")))

from tdstore.testing.crash import CrashTests  # noqa: E402
from tdstore.testing.kit import StoreTests  # noqa: E402
from tdstore.testing.samples import same, sample, store_indices  # noqa: E402
from tdstore.testing.wrappers import CountingStore, FlakyStore, SlowStore, WrappedStore  # noqa: E402

__all__ = [
    "CountingStore",
    "CrashTests",
    "FlakyStore",
    "SlowStore",
    "StoreTests",
    "WrappedStore",
    "same",
    "sample",
    "store_indices",
]
