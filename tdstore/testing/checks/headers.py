"""The kit's tests of the header: a saved header is read back, whole and unchanged."""

from __future__ import annotations

from tdstore.header import Group, Header
from tdstore.store import Cap, Store
from tdstore.testing.comparing import check_header, check_paths, check_same, error_name, failure, raises
from tdstore.testing.samples import ODD_KEYS, deep_path
from tdstore.testing.setup import Location, StoreSetup, fill, numbers
from tdstore.types import Path, Read
from tdstore.values import encode_value

RICH = Header(
    {
        (): Group(
            batch_size=(3, 4),
            names=("time", None),
            device="cpu",
            keys=("obs", "next", "text", "none"),
            values={
                "text": "grüß dich 鍵",
                "none": None,
                "tagged": encode_value({"t": (1, b"\x00\xff"), 3: {1.5, 2.5}, "big": 2**80, "nan": float("nan")}),
            },
            extra={"stack_dim": 0},
        ),
        ("next",): Group(batch_size=(3,), keys=("obs", "info")),
        ("next", "info"): Group(batch_size=(), kind="LazyStack", keys=()),
        ("empty",): Group(),
    }
)


class HeaderTests(StoreSetup):
    """Tests that the header is preserved exactly."""

    def test_header_of_new_store(self, location: Location) -> None:
        """Check that a store that was never saved has an empty header, which is falsy."""
        self.needs(Cap.WRITE)
        store = self.opened(location, "w")
        for what in ("a new store, which was never saved", "a store with a leaf, which was never saved"):
            try:
                header = store.load_header()
            except Exception as error:
                name = error_name(type(error))
                raise failure(f"load_header() of {what}: Header() is expected, not {name}: {error}") from error
            check_header(header, Header(), f"load_header() of {what}")
            fill(store, {("a",): numbers(2)})

    def test_header_round_trip(self, location: Location) -> None:
        """Check nested groups, batch sizes, names, devices, kinds, values and the order of keys."""
        self._keeps_header(location, RICH)

    def test_header_minimal(self, location: Location) -> None:
        """Check that a header with one empty group is saved, and differs from an empty one."""
        store = self._keeps_header(location, Header({(): Group()}))
        assert store.load_header(), "a header with one empty group is falsy: it cannot be told from none"

    def test_header_odd_keys(self, location: Location) -> None:
        """Check that any string may name a group or a value."""
        groups: dict[Path, Group] = {(): Group(keys=ODD_KEYS, values={key: i for i, key in enumerate(ODD_KEYS)})}
        groups |= {(key,): Group(batch_size=(i,), keys=(key,)) for i, key in enumerate(ODD_KEYS)}
        self._keeps_header(location, Header(groups))

    def test_header_deep(self, location: Location) -> None:
        """Check fifty nested groups."""
        path = deep_path(50)[:-1]
        self._keeps_header(location, Header({path[:d]: Group(batch_size=(d,)) for d in range(51)}))

    def test_header_large(self, location: Location) -> None:
        """Check a thousand groups and a value of some hundred KB."""
        groups: dict[Path, Group] = {(): Group(values={"text": "ab\u20ac" * 50_000})}
        groups |= {(f"g{i}",): Group(batch_size=(i,)) for i in range(1000)}
        self._keeps_header(location, Header(groups))

    def test_header_replaced(self, location: Location) -> None:
        """Check that saving replaces the whole header: groups and values outside of the new one are gone."""
        self.needs(Cap.WRITE)
        store = self.opened(location, "w")
        store.save_header(RICH)
        small = Header({(): Group(batch_size=(1,), keys=("a",))})
        store.save_header(small)
        self._check(store, small)
        if Cap.PERSISTENT in self.caps:
            store.close()
            self._check(self.opened(location), small)

    def test_header_is_apart_from_leaves(self, location: Location) -> None:
        """Check that saving a header changes no leaf, and a leaf of any name does not change the header."""
        self.needs(Cap.WRITE)
        leaves = {("header",): numbers(2), ("__header__",): numbers(3), ("tdstore",): numbers(4)}
        store = self.opened(location, "w")
        store.save_header(RICH)
        fill(store, leaves)
        self._check(store, RICH)
        store.save_header(RICH)
        check_paths(store.paths(), leaves, "after save_header")
        for path, value in leaves.items():
            check_same(store.read([Read(path)])[0], value, path)

    def test_header_kept_by_writes(self, location: Location) -> None:
        """Check that opening to write and closing again preserves the header."""
        self.needs(Cap.WRITE, Cap.PERSISTENT)
        self.saved(location, {("a",): numbers(2)}, RICH)
        with self.opened(location, "r+") as store:
            self._check(store, RICH)
        self._check(self.opened(location), RICH)

    def test_header_without_leaves(self, location: Location) -> None:
        """Check that a store with a header and no leaf is a store."""
        self.needs(Cap.PERSISTENT)
        self.saved(location, {}, RICH)
        store = self.opened(location)
        self._check(store, RICH)
        check_paths(store.paths(), [], "a store with a header and no leaf")
        with raises(KeyError, doing="reading where no leaf is"):
            store.read([Read(("a",))])

    def _keeps_header(self, location: Location, header: Header) -> Store:
        if Cap.PERSISTENT in self.caps:
            self.saved(location, {}, header)
            store = self.opened(location)
        else:
            self.needs(Cap.WRITE)
            store = self.opened(location, "w")
            store.save_header(header)
        self._check(store, header)
        return store

    @staticmethod
    def _check(store: Store, expected: Header) -> None:
        check_header(store.load_header(), expected)
