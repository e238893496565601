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

from tdstore.testing.crash import CrashTests
from tdstore.testing.kit import StoreTests
from tdstore.testing.samples import same, sample, store_indices
from tdstore.testing.wrappers import CountingStore, FlakyStore, SlowStore, WrappedStore

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
