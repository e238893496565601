"""The kit, on named stores."""

from __future__ import annotations

import secrets
from collections.abc import Iterator

import pytest

from tdstore.builtin.shared.store import SharedStore
from tdstore.testing import StoreTests


class TestShared(StoreTests):
    backend = "shared"
    caps = SharedStore.caps

    @pytest.fixture
    def location(self, tmp_path, monkeypatch) -> Iterator[str]:
        # A folder of its own: what a test leaves behind cannot hide, or disturb other tests.
        monkeypatch.setenv("TDSTORE_SHM_DIR", str(tmp_path))
        yield f"shm://kit-{secrets.token_hex(4)}"
