"""The kit on the object layout: over local files, and over an engine in memory with tiny buffers and objects."""

from __future__ import annotations

import itertools

import pytest

from tdstore.bytestore import ByteStore
from tdstore.storekit import local_engine
from tdstore.testing import StoreTests
from tests.bytestore.support import BUCKETS, open_local, open_mem

_count = itertools.count()


class TestLocal(StoreTests):
    ON_DISK = True
    open = staticmethod(open_local)
    caps = ByteStore.caps

    @pytest.fixture(autouse=True)
    def short_waits(self, monkeypatch):
        """Of a process that was stopped in the middle of putting the manifest."""
        monkeypatch.setattr(local_engine, "LOCK_SECONDS", 0.5)


@pytest.mark.slow  # another layout: the tiers run the kit once for each backend
class TestMemoryInCrumbs(StoreTests):
    """A buffer of a few bytes: nearly every write is an object of its own."""

    open = staticmethod(open_mem)
    options = {"buffer_bytes": 700, "object_bytes": 300}
    max_examples = 30
    caps = ByteStore.caps
    one_process = "the bucket lives in one process"

    @pytest.fixture
    def location(self):
        url = f"mem://kit-{next(_count)}"
        yield url
        BUCKETS.pop(url, None)

    def fingerprint(self, location):
        bucket = BUCKETS.get(location)
        return {} if bucket is None else {key: data for key, (data, _, _) in bucket.objects.items()}

    def corrupt(self, location):
        self._damage(location, lambda data: data[:100] + bytes([data[100] ^ 1]) + data[101:])

    def truncate(self, location):
        self._damage(location, lambda data: data[: len(data) // 2])

    def _damage(self, location, change):
        objects = BUCKETS[location].objects
        name = max((n for n in objects if n.startswith("data/")), key=lambda n: len(objects[n][0]))
        data, tag, when = objects[name]
        objects[name] = change(data), tag, when
