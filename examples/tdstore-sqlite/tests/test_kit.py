import pytest
from tdstore.testing import StoreTests

from tdstore_sqlite.store import SqliteStore, open_sqlite


class TestSqlite(StoreTests):
    open = staticmethod(open_sqlite)
    caps = SqliteStore.caps

    @pytest.fixture
    def location(self, tmp_path):
        return tmp_path / "kit" / "x.sqlite"
