import pytest
from tdstore.testing import StoreTests

from tdstore_safetensors.store import SafetensorsStore, open_safetensors


class TestSafetensors(StoreTests):
    open = staticmethod(open_safetensors)
    caps = SafetensorsStore.caps

    @pytest.fixture
    def location(self, tmp_path):
        return tmp_path / "kit" / "x.safetensors"
