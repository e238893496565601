"""The kit on wrong stores: each breaks one promise, which a test must notice, and name.

The classes are built from the table in `verdicts.py`: their tests must fail with the words that stand there, which
`conftest.py` sees to. The stores that they are wrong versions of pass the whole kit.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import fsspec
import pytest
from hypothesis import Phase, settings

from tdstore.builtin.memory import MemoryStore
from tdstore.store import Store
from tdstore.testing import StoreTests
from tdstore.testing.checks.rivals.locks import LockTests
from tests.testing import wrong_files, wrong_locks, wrong_modes, wrong_places, wrong_renames, wrong_stores
from tests.testing.verdicts import CAUGHT
from tests.testing.wrong_bytestore import ByteStore, open_bytes

_count = itertools.count()


@pytest.fixture(autouse=True, scope="module")
def found_is_enough() -> Iterator[None]:
    """That an example is found is asked here; to shrink it takes Hypothesis most of the time."""
    settings.register_profile("found is enough", phases=[Phase.generate])
    settings.load_profile("found is enough")
    yield
    settings.load_profile("default")


class Memory(StoreTests):
    __test__ = False
    caps = MemoryStore.caps
    max_examples = 3

    @pytest.fixture
    def location(self):
        return None


class Bytes(StoreTests):
    __test__ = False
    caps = ByteStore.caps
    max_examples = 3
    one_process = "memory:// is the memory of one process"

    @pytest.fixture
    def location(self):
        return f"memory://wrong-{next(_count)}/store"

    def fingerprint(self, location):
        fs, root = fsspec.core.url_to_fs(location)
        return {name: fs.cat_file(name) for name in fs.find(root)}

    def corrupt(self, location):
        fs, root = fsspec.core.url_to_fs(location)
        name = max((n for n in fs.find(root) if n.endswith(".bin")), key=fs.size)
        fs.pipe_file(name, b"?" + fs.cat_file(name)[1:])

    def truncate(self, location):
        fs, root = fsspec.core.url_to_fs(location)
        name = max((n for n in fs.find(root) if n.endswith(".bin")), key=fs.size)
        fs.pipe_file(name, fs.cat_file(name)[:-9])


class Files(StoreTests):
    """Stores in a file, so that other processes find them."""

    __test__ = False
    caps = wrong_files.SqliteStore.caps
    max_examples = 3


# -- the stores that the others are wrong versions of: a kit that failed everything would catch those, too ------------
class TestByteStore(Bytes):
    __test__ = True
    open = staticmethod(open_bytes)


@pytest.mark.slow
class TestSqliteStore(Files):
    __test__ = True
    open = staticmethod(wrong_files.OPENERS["SqliteStore"])
    backend = wrong_files.BACKENDS["SqliteStore"]


@pytest.mark.slow
class TestHookedStore(Files):
    __test__ = True
    open = staticmethod(wrong_places.OPENERS["HookedStore"])
    backend = wrong_places.BACKENDS["HookedStore"]


class TestLockingStore(LockTests):
    caps = Files.caps
    open = staticmethod(wrong_locks.OPENERS["LockingStore"])


# -- wrong stores ---------------------------------------------------------------------------
FIELDS: dict[str, dict[str, Any]] = {
    "WaitsForEver": {"waiting": 2},
    "WaitsInCommit": {"waiting": 4},
    "RemoveWaits": {"waiting": 4},
    "AsyncByName": {"caps": wrong_places.AsyncByName.caps},
    "WaitingDel": {"patience": 3},
    "HiddenFlag": {"caps": wrong_stores.HiddenFlag.caps},  # its author hides it here too
    "IgnoredIndex": {"max_examples": 30},
}
"""What the test class of a store says beside the rest."""


def must_fail(base: type[StoreTests], cls: type[Store], **fields: Any) -> None:
    """Make a class of the tests of the kit that must catch a store, and of no others."""
    name = cls.__name__
    words = {case: text for store, case, text in CAUGHT if store == name}
    kept = {case.partition("[")[0] for case in words}
    rest = dict.fromkeys(test for test in dir(base) if test.startswith("test_") and test not in kept)
    body = {"__module__": __name__, "__test__": True, "must_fail": words, **rest, **fields, **FIELDS.get(name, {})}
    # Some leave a file or a connection to the garbage collector.
    quiet = pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
    globals()[f"Test{name}"] = quiet(type(f"Test{name}", (base,), body))


for _cls in (*wrong_stores.MEMORY, *wrong_stores.wrong_answers.ANSWERS, *wrong_stores.BYTES):
    _base = Bytes if issubclass(_cls, ByteStore) else Memory
    must_fail(_base, _cls, open=staticmethod(wrong_stores.OPENERS[_cls.__name__]))
for _cls in wrong_files.WRONG:
    _name = _cls.__name__
    must_fail(Files, _cls, open=staticmethod(wrong_files.OPENERS[_name]), backend=wrong_files.BACKENDS[_name])
for _cls in wrong_modes.MODES:
    must_fail(Files, _cls, open=staticmethod(wrong_modes.OPENERS[_cls.__name__]))
for _module, _classes in (
    (wrong_places, wrong_places.PLACES),
    (wrong_locks, wrong_locks.LOCKS),
    (wrong_renames, wrong_renames.RENAMES),
):
    for _cls in _classes:
        _name = _cls.__name__
        _hooks = {"backend": _module.BACKENDS[_name]} if _name in _module.BACKENDS else {}
        must_fail(Files, _cls, open=staticmethod(_module.OPENERS[_name]), **_hooks)


def test_the_table_is_about_the_wrong_stores():
    classes = {name: cls for name, cls in globals().items() if name.startswith("Test")}
    built = {name.removeprefix("Test"): cls for name, cls in classes.items() if "must_fail" in vars(cls)}
    assert built.keys() == {store for store, _, _ in CAUGHT}
    assert all(cls.must_fail for cls in built.values())


def test_each_case_is_a_test_of_the_kit():
    """A case that pytest does not collect would be no error: it would catch nothing."""
    for store, case, _ in CAUGHT:
        name, _, rest = case.partition("[")
        function = getattr(globals()[f"Test{store}"], name)
        marks = getattr(function, "pytestmark", [])
        parameters = [mark for mark in marks if mark.name == "parametrize"]
        assert bool(parameters) == bool(rest), f"{store}: {case}"
