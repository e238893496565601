"""The kit's tests of versions: what a version holds, tags, and what `drop_versions` leaves."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from tdstore.errors import ReadOnlyError, StoreNotFoundError, UnsupportedError
from tdstore.store import Cap, Store
from tdstore.testing.comparing import check_header, check_leaves, check_names, raises
from tdstore.testing.samples import sample
from tdstore.testing.setup import Leaves, Location, StoreSetup, fill, header_for, numbers, read_all
from tdstore.types import Write

OLD: Leaves = {("a",): sample("float32", (6, 4)), ("g", "b"): numbers(5).long(), ("c",): sample("bfloat16", (3,))}
HEADER = header_for(OLD, {"text": "of the first version"})
ABSENT = "0" * 32


class VersionTests(StoreSetup):
    """Tests that a version stays as it is, and that dropping others does not touch it."""

    def versioned(self, location: Location, count: int = 1) -> tuple[Store, list[str]]:
        """Return an open store with versions, of which number `i` has `i` in all elements of `("a",)`."""
        self.needs(Cap.WRITE, Cap.VERSIONS)
        self.saved(location, OLD, HEADER)
        store = self.opened(location, "r+")
        ids = [store.save_version(HEADER, "version 0").id]
        for number in range(1, count):
            store.write([Write(("a",), (), numbers(6, 4).float().fill_(number))])
            ids.append(store.save_version(HEADER, f"version {number}").id)
        return store, ids

    def check_old(self, location: Location, version: str, what: str) -> None:
        """Check that a version holds `OLD` and `HEADER`, bit for bit."""
        __tracebackhide__ = True
        store = self.opened(location, version=version)
        check_leaves(read_all(store), OLD, what)
        check_header(store.load_header(), HEADER, f"{what}: the header")

    def test_versions_tell_the_truth(self, location: Location) -> None:
        """Check that `save_version` without VERSIONS is an `UnsupportedError` that names the location."""
        self.needs(Cap.WRITE)
        if Cap.VERSIONS in self.caps:
            return
        store = self.holding(location, OLD)
        with raises(UnsupportedError, match="VERSIONS", doing="save_version() without Cap.VERSIONS") as caught:
            store.save_version(HEADER, "")
        check_names(caught.value, store.url)

    def test_a_version_stays_as_it_is(self, location: Location) -> None:
        """Check that a version reads as it was made, bit for bit, after every kind of change and commit."""
        store, (first,) = self.versioned(location)
        reader = self.opened(location, version=first)
        store.write([Write(("a",), (), sample("float32", (6, 4), 1)), Write(("c",), (), sample("bfloat16", (3,), 1))])
        store.save_header(HEADER)
        self.check_old(location, first, "a version after rows were written")
        store.delete([("g", "b")])
        store.rename({("a",): ("moved",)})
        fill(store, {("a",): numbers(7), ("new",): numbers(2)})
        if Cap.RESIZE in self.caps:
            store.resize({("c",): 1})
        store.save_header(header_for({("a",): numbers(7)}))
        self.check_old(location, first, "a version after the structure changed")
        check_leaves(read_all(reader), OLD, "a reader that opened the version before")
        store.close()
        self.check_old(location, first, "a version after its writer was closed")
        with self.opened(location, "w") as store:
            fill(store, {("other",): numbers(2)})
            store.save_header(header_for({("other",): numbers(2)}))
        self.check_old(location, first, "a version after the dataset was replaced")

    def test_versions_are_listed(self, location: Location) -> None:
        """Check that `versions` gives id, message, time and order, to any store that is open there."""
        start = datetime.now(UTC) - timedelta(seconds=2)
        store, ids = self.versioned(location, 3)
        store.save_header(HEADER)
        for one in (store, self.opened(location), self.opened(location, version=ids[0])):
            found = one.versions()
            assert [v.id for v in found] == ids, f"versions() lists {[v.id for v in found]}, not {ids}"
            assert len(set(ids)) == 3, f"two versions have one id: {ids}"
            messages = [v.message for v in found]
            assert messages == ["version 0", "version 1", "version 2"], f"versions() has the messages {messages}"
            times = [start, *(v.time for v in found), datetime.now(UTC) + timedelta(seconds=2)]
            assert times == sorted(times), f"the times of versions are not in order: {times}"

    def test_without_versions_the_list_is_empty(self, location: Location) -> None:
        """Check that a plain commit is no version."""
        self.needs(Cap.WRITE, Cap.VERSIONS)
        self.saved(location, OLD, HEADER)
        found = self.opened(location).versions()
        assert found == [], f"versions() lists {found} where only save_header() was called"

    def test_a_version_is_read_only(self, location: Location) -> None:
        """Check that a version cannot be opened for writing, and that one that is not there is not found."""
        _, (first,) = self.versioned(location)
        with raises(ReadOnlyError, match=first, doing="opening a version in mode 'r+'"):
            self.opened(location, "r+", version=first)
        with raises(StoreNotFoundError, match=ABSENT, doing="opening a version that is not there"):
            self.opened(location, version=ABSENT)

    def test_tags(self, location: Location) -> None:
        """Check that a tag is on one version, moves, and can be taken away."""
        store, ids = self.versioned(location, 2)
        for name, version, expected in (
            ("é/best", ids[0], [("é/best",), ()]),
            ("é/best", ids[1], [(), ("é/best",)]),
            ("other", ids[1], [(), ("é/best", "other")]),
            ("é/best", None, [(), ("other",)]),
            ("absent", None, [(), ("other",)]),
        ):
            store.set_tag(name, version)
            found = [tuple(sorted(v.tags)) for v in self.opened(location).versions()]
            expected = [tuple(sorted(tags)) for tags in expected]
            assert found == expected, f"after set_tag({name!r}, {version!r}) the tags are {found}, not {expected}"
        with raises(StoreNotFoundError, match=ABSENT, doing="tagging a version that is not there"):
            store.set_tag("new", ABSENT)

    def test_dropped_versions(self, location: Location) -> None:
        """Check that dropped versions are gone, tagged ones stay, and the others and the dataset read as before."""
        store, ids = self.versioned(location, 4)
        store.set_tag("keep", ids[0])
        dropped = store.drop_versions([*ids[:3], ABSENT], 0.0)
        assert dropped == ids[1:3], f"drop_versions says that it dropped {dropped}, not {ids[1:3]}"
        found = [v.id for v in store.versions()]
        assert found == [ids[0], ids[3]], f"versions() lists {found} after {ids[1:3]} were dropped"
        store.drop_versions([], 0.0)
        with raises(StoreNotFoundError, match=ids[1], doing="opening a version that was dropped"):
            self.opened(location, version=ids[1])
        self.check_old(location, ids[0], "a tagged version after others were dropped")
        for last in (self.opened(location, version=ids[3]), self.opened(location)):
            check_leaves(read_all(last), {**OLD, ("a",): numbers(6, 4).float().fill_(3)}, "after others were dropped")

    def test_readers_of_a_dropped_version_go_on(self, location: Location) -> None:
        """Check that a reader of a version reads it within its grace period, whatever is dropped and committed."""
        store, ids = self.versioned(location, 2)
        reader = self.opened(location, version=ids[0])
        assert store.drop_versions(ids, 3600.0) == ids, "drop_versions did not drop all versions"
        store.write([Write(("a",), (), sample("float32", (6, 4), 5))])
        store.save_header(HEADER)
        store.drop_versions([], 0.0)
        check_leaves(read_all(reader), OLD, "a reader of a version that was dropped within its grace period")
