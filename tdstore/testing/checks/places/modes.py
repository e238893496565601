"""The kit's tests of modes, and of closing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from operator import methodcaller

import pytest

from tdstore.dtypes import NAME_TO_DTYPE
from tdstore.errors import (
    ReadOnlyError,
    StoreBusyError,
    StoreClosedError,
    StoreError,
    StoreExistsError,
    StoreNotFoundError,
    UnsupportedError,
)
from tdstore.header import Group, Header
from tdstore.store import Cap, Store
from tdstore.testing.comparing import (
    check_header,
    check_leaves,
    check_names,
    check_paths,
    check_same,
    check_unchanged,
    error_name,
    failure,
    raises,
)
from tdstore.testing.samples import sample
from tdstore.testing.setup import (
    Leaves,
    Location,
    StoreSetup,
    fill,
    header_for,
    local_path,
    numbers,
    read_all,
)
from tdstore.types import LeafSpec, Mode, Read, Write

OLD = {("a",): numbers(4, 3), ("g", "b"): numbers(5).long()}
NEW = {("a",): numbers(2, 2, start=70), ("c",): numbers(3, start=80)}


class ModeTests(StoreSetup):
    """Tests that old data stays until new data is committed, and that a reader changes nothing."""

    def test_reopen(self, location: Location) -> None:
        """Check that everything is preserved by a close, leaf by leaf and bit by bit."""
        self.needs(Cap.PERSISTENT)
        leaves = {("a",): sample("float32", (4, 3)), ("g", "b"): sample("bfloat16", (5,)), ("s",): sample("bool", ())}
        names = sorted(NAME_TO_DTYPE.keys() - self.dtypes_refused)
        leaves |= {("dtypes", name): sample(name, (3,)) for name in names}
        leaves |= {("no rows",): sample("float32", (0, 3)), ("empty rows",): sample("int64", (4, 0))}
        self.saved(location, leaves)
        for _ in range(2):
            with self.opened(location) as store:
                got = read_all(store)
                check_paths(got, leaves, "saved, and opened again")
                for path, value in leaves.items():
                    check_same(got[path], value, path)
                check_header(store.load_header(), header_for(leaves))
            self.check_let_go(location, "all leaves read")

    @pytest.mark.parametrize("mode", ["r", "r+"])
    def test_must_exist(self, location: Location, mode: Mode) -> None:
        """Check that "r" and "r+" on nothing raise `StoreNotFoundError` and make nothing."""
        if mode == "r+":
            self.needs(Cap.WRITE)
        before = self.fingerprint(location) if Cap.PERSISTENT in self.caps else None
        with raises(StoreNotFoundError, doing=f"mode {mode!r} where nothing is") as caught:
            self.opened(location, mode)
        if Cap.PERSISTENT in self.caps:
            check_names(caught.value, location)
            check_unchanged(before, self.fingerprint(location), "the storage was changed")

    def test_write_in_place(self, location: Location) -> None:
        """Check that "r+" changes written rows and keeps the rest, header included."""
        self.needs(Cap.WRITE, Cap.PERSISTENT)
        self.saved(location, OLD)
        with self.opened(location, "r+") as store:
            assert store.writable, "`writable` is False in mode 'r+'"
            store.write([Write(("a",), (), OLD[("a",)] + 1)])
        self.check_let_go(location, "rows written in mode 'r+'")
        with self.opened(location) as store:
            got = store.read([Read(("a",))])[0]
            check_same(got, OLD[("a",)] + 1, "what was written in mode 'r+' is gone: close() must commit it")
            check_same(
                store.read([Read(("g", "b"))])[0], OLD["g", "b"], "a leaf beside one that was written in mode 'r+'"
            )
            check_header(store.load_header(), header_for(OLD))

    def test_add_leaf_in_place(self, location: Location) -> None:
        """Check that "r+" can add a leaf to an existing store."""
        self.needs(Cap.WRITE, Cap.PERSISTENT)
        self.saved(location, OLD)
        with self.opened(location, "r+") as store:
            fill(store, {("new",): numbers(7)})
            store.save_header(header_for({**OLD, ("new",): numbers(7)}))
        got = read_all(self.opened(location))
        check_paths(got, [*OLD, ("new",)], "opened with 'r+', a leaf added, and opened again")
        check_same(got[("new",)], numbers(7), "a leaf that was added in mode 'r+'")

    def test_w_replaces_when_committed(self, location: Location) -> None:
        """Check that "w" shows a reader the old store until `save_header`, then the new one, without the old."""
        self.needs(Cap.WRITE, Cap.PERSISTENT)
        self.saved(location, OLD)
        store = self.opened(location, "w")
        check_paths(store.paths(), [], "a store opened with mode 'w' shows the leaves of the old one")
        fill(store, NEW)
        try:
            with self.opened(location) as reader:
                check_leaves(read_all(reader), OLD, "mode 'w' changed the old store before save_header")
                check_header(reader.load_header(), header_for(OLD))
        except StoreError as error:
            raise failure(f"mode 'w' took the old store away before save_header: {error}") from error
        store.save_header(header_for(NEW))
        store.close()
        with self.opened(location) as reader:
            got = read_all(reader)
            check_paths(got, NEW, "after mode 'w' and save_header")
            check_leaves(got, NEW, "after mode 'w' and save_header")
            check_header(reader.load_header(), header_for(NEW))
        self._save_side_by_side(location)

    def _save_side_by_side(self, location: Location) -> None:
        """Build two stores with "w" at one place: each is committed, unless the second could not begin."""
        __tracebackhide__ = True
        what = "two stores are built with mode 'w' at one place, and"
        with self.made(location, "w") as first:
            fill(first, NEW)
            try:
                with self.made(location, "w", **self.at_once()) as second:
                    fill(second, OLD)
                    self._commit_one(first, NEW, f"{what} the first one commits")
                    check_leaves(read_all(self.opened(location)), NEW, f"{what} the first one has committed")
                    self._commit_one(second, OLD, f"{what} the second one commits")
            except StoreBusyError:
                return  # one writer at a time
        check_leaves(read_all(self.opened(location)), OLD, f"{what} the second one has committed")

    def _commit_one(self, store: Store, leaves: Leaves, what: str) -> None:
        __tracebackhide__ = True
        try:
            store.save_header(header_for(leaves))
        except StoreBusyError:
            raise
        except StoreError as error:
            raise failure(f"{what}: {error_name(type(error))}: {error}") from error

    def test_w_after_commit(self, location: Location) -> None:
        """Check that a store opened with "w" can be written after `save_header`."""
        self.needs(Cap.WRITE, Cap.PERSISTENT)
        with self.opened(location, "w") as store:
            store.create({("a",): LeafSpec((3,), "float32")})
            store.save_header(header_for({("a",): numbers(3)}))
            store.write([Write(("a",), (), numbers(3, start=5))])
            fill(store, {("b",): numbers(2)})
            store.save_header(header_for({("a",): numbers(3), ("b",): numbers(2)}))
        got = read_all(self.opened(location))
        check_same(got[("a",)], numbers(3, start=5), "a leaf written after the first save_header")
        check_same(got[("b",)], numbers(2), "a leaf created after the first save_header")

    @pytest.mark.parametrize("mode", ["w", "x", "a"])
    def test_abandoned_leaves_no_trace(self, location: Location, mode: Mode) -> None:
        """Check that a new store closed before the first `save_header` leaves nothing."""
        self.needs(Cap.WRITE, Cap.PERSISTENT)
        before = self.fingerprint(location)
        with self.opened(location, mode) as store:
            fill(store, NEW)
        check_unchanged(before, self.fingerprint(location), f"mode {mode!r}, closed before save_header, left something")
        with raises(StoreNotFoundError, doing=f"opened after mode {mode!r}, closed before save_header"):
            self.opened(location)

    def test_abandoned_keeps_the_old(self, location: Location) -> None:
        """Check that "w", closed before the first `save_header`, leaves the old store as it was, to the byte."""
        self.needs(Cap.WRITE, Cap.PERSISTENT)
        self.saved(location, OLD)
        before = self.fingerprint(location)
        with self.opened(location, "w") as store:
            fill(store, NEW)
        check_unchanged(
            before, self.fingerprint(location), "mode 'w', closed before save_header, changed the old store"
        )
        check_same(
            self.opened(location).read([Read(("a",))])[0], OLD[("a",)], "after mode 'w', closed before save_header"
        )

    def test_x_refuses(self, location: Location) -> None:
        """Check that "x" makes a new store, and refuses an existing one."""
        self.needs(Cap.WRITE, Cap.PERSISTENT)
        with self.opened(location, "x") as store:
            fill(store, OLD)
            store.save_header(header_for(OLD))
        before = self.fingerprint(location)
        with raises(StoreExistsError, doing="mode 'x' where a store is") as caught:
            self.opened(location, "x")
        check_names(caught.value, location)
        check_unchanged(before, self.fingerprint(location), "the storage was changed")
        self.x_at_once(location)

    def x_at_once(self, location: Location) -> None:
        """Open two stores with "x" at a place where nothing is: the second to commit is refused."""
        __tracebackhide__ = True
        path = local_path(location)
        if path is None:
            return
        place = path.with_name(f"other-{path.name}")
        both = "two stores were opened with mode 'x' where nothing was, and both commit"
        with self.made(place, "x") as first:
            try:
                second = self.made(place, "x", **self.at_once())
            except StoreError:
                return  # the first one has taken the place
            fill(first, OLD)
            first.save_header(header_for(OLD))
            fill(second, NEW)
            with raises(StoreError, doing=both):
                try:
                    second.save_header(header_for(NEW))
                finally:
                    second.close()
        check_leaves(read_all(self.opened(place)), OLD, both)

    def test_a_makes_then_opens(self, location: Location) -> None:
        """Check that "a" makes a missing store and opens an existing one."""
        self.needs(Cap.WRITE, Cap.PERSISTENT)
        with self.opened(location, "a") as store:
            check_header(store.load_header(), Header(), "the header of a new store, made with mode 'a'")
            fill(store, OLD)
            store.save_header(header_for(OLD))
        with self.opened(location, "a") as store:
            check_paths(store.paths(), OLD, "opened with mode 'a' where a store is")
            check_header(store.load_header(), header_for(OLD))
            store.write([Write(("a",), (), OLD[("a",)] + 1)])
        check_same(
            self.opened(location).read([Read(("a",))])[0], OLD[("a",)] + 1, "rows written in mode 'a', opened again"
        )

    def test_read_only(self, location: Location) -> None:
        """Check that a store opened with "r" refuses every change with `ReadOnlyError` and stays unchanged."""
        self.needs(Cap.PERSISTENT)
        self.saved(location, OLD)
        before = self.fingerprint(location)
        store = self.opened(location, "r")
        assert not store.writable, "`writable` is True in mode 'r'"
        # What cannot write at all may say so instead.
        refusal = (ReadOnlyError,) if Cap.WRITE in self.caps else (ReadOnlyError, UnsupportedError)
        for name, change in _changes(self.caps).items():
            with raises(refusal, doing=f"{name} in mode 'r'") as caught:
                change(store)
            check_names(caught.value, store.url, name)
        check_leaves(read_all(store), OLD, "after refused changes in mode 'r'")
        store.flush()
        store.verify()
        store.close()
        check_unchanged(before, self.fingerprint(location), "reading changed the storage")

    def test_closed(self, location: Location) -> None:
        """Check that after `close` every method raises `StoreClosedError`, and a second `close` is fine."""
        store = self.holding(location, OLD)
        url = store.url
        facts = [name for name in ("generation", "nbytes_stored") if methodcaller(name)(store) is not None]
        store.close()
        try:
            store.close()
        except Exception as error:
            raise failure(f"a second close() raises {type(error).__name__}: {error}") from error
        calls: dict[str, Callable[[Store], object]] = {
            "paths": lambda s: list(s.paths()),
            "specs": lambda s: s.specs([("a",)]),
            "load_header": lambda s: s.load_header(),
            "read": lambda s: s.read([Read(("a",))]),
            "aread": lambda s: asyncio.run(s.aread([Read(("a",))])),
        }
        if Cap.WRITE in self.caps:
            calls |= _changes(self.caps)
        if Cap.VIEW in self.caps:
            calls["view"] = lambda s: s.view(("a",))
        calls |= {name: methodcaller(name) for name in facts}
        for name, call in calls.items():
            with raises(StoreClosedError, doing=f"{name} of a closed store") as caught:
                call(store)
            check_names(caught.value, url, name)

    def test_context_manager(self, location: Location) -> None:
        """Check that `with` returns the store itself and closes it, also when the body raises."""
        first = self.holding(location, OLD)
        with first as store:
            assert store is first, "`with store as it` gives another object than the store"
        with raises(StoreClosedError, doing="load_header after the end of `with`"):
            first.load_header()
        second = self.holding(location, OLD)
        with raises(ZeroDivisionError, doing="an error in the body of `with`"), second:
            1 / 0  # noqa: B018
        with raises(StoreClosedError, doing="load_header after an error ended `with`"):
            second.load_header()


def _changes(caps: Cap) -> dict[str, Callable[[Store], object]]:
    changes: dict[str, Callable[[Store], object]] = {
        "create": lambda s: s.create({("n",): LeafSpec((2,), "int8")}),
        "write": lambda s: s.write([Write(("a",), (), numbers(4, 3) + 1)]),
        "delete": lambda s: s.delete([("a",)]),
        "rename": lambda s: s.rename({("a",): ("z",)}),
        "save_header": lambda s: s.save_header(Header({(): Group(batch_size=(9,))})),
    }
    if Cap.RESIZE in caps:
        changes["resize"] = lambda s: s.resize({("a",): 1})
    return changes
