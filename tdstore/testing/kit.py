"""`StoreTests`: the whole kit, to subclass."""

from __future__ import annotations

from tdstore.testing.checks.catalogue import CatalogueTests
from tdstore.testing.checks.containers import ContainerTests
from tdstore.testing.checks.discarding import DiscardTests
from tdstore.testing.checks.headers import HeaderTests
from tdstore.testing.checks.machine import MachineTests
from tdstore.testing.checks.places.damage import DamageTests
from tdstore.testing.checks.places.declaration import DeclarationTests
from tdstore.testing.checks.places.housekeeping import HousekeepingTests
from tdstore.testing.checks.places.modes import ModeTests
from tdstore.testing.checks.places.openings import OpeningTests
from tdstore.testing.checks.reading import ReadTests
from tdstore.testing.checks.rivals.endings import EndingTests
from tdstore.testing.checks.rivals.locks import LockTests
from tdstore.testing.checks.rivals.sharing import RivalTests
from tdstore.testing.checks.versioning import VersionTests
from tdstore.testing.checks.writing import WriteTests


# pytest runs the tests of the last base first, and the state machine fails for everything: it comes last.
class StoreTests(
    MachineTests,
    ContainerTests,
    EndingTests,
    RivalTests,
    LockTests,
    DiscardTests,
    VersionTests,
    OpeningTests,
    DamageTests,
    HousekeepingTests,
    ModeTests,
    HeaderTests,
    CatalogueTests,
    WriteTests,
    ReadTests,
    DeclarationTests,
):
    """Check a store against the contract of `tdstore.store.Store`.

    Subclass it in a test file, say what is tested, and give it places of its own:

        class TestMyStore(StoreTests):
            backend = "mine"                      # or: open = staticmethod(open_mine)
            caps = Cap.WRITE | Cap.PARTIAL_READ | Cap.PERSISTENT

            @pytest.fixture
            def location(self, tmp_path):
                return f"mine://{tmp_path}/store"

            deviations = {"test_resize_survives": "needs a rewrite; issue 12"}

    Tests of abilities that `caps` does not hold are skipped; that the store does not have them
    is tested where that can be. A deviation is a strict xfail. For stores that are not local
    files override `fingerprint`, `corrupt` and `truncate`; for read-only ones, `prepare`.
    """
