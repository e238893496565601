"""The kit's tests of modes, of closing, and of damaged storage."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from operator import methodcaller

import pytest
import torch

from tdstore.dtypes import NAME_TO_DTYPE
from tdstore.errors import (
    ReadOnlyError,
    StoreClosedError,
    StoreError,
    StoreExistsError,
    StoreNotFoundError,
    UnsupportedError,
)
from tdstore.header import Group, Header
from tdstore.hookspecs import Backend
from tdstore.io.housekeeping import delete, exists, info, list_datasets
from tdstore.registry import registry
from tdstore.store import Cap, Store
from tdstore.testing.checks.headers import RICH
from tdstore.testing.comparing import (
    check_equal,
    check_header,
    check_leaves,
    check_names,
    check_paths,
    check_same,
    check_unchanged,
    difference,
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
    largest_file,
    local_files,
    local_path,
    numbers,
    read_all,
    same_leaves,
)
from tdstore.types import LeafSpec, Mode, Path, Read, Write

OLD = {("a",): numbers(4, 3), ("g", "b"): numbers(5).long()}
NEW = {("a",): numbers(2, 2, start=70), ("c",): numbers(3, start=80)}
FLIPS = 8
"""Bytes that are flipped, one after the other, until one of them changes what is read."""
EDGE = 512
"""Bytes at each end of a file of which some are flipped, one at a time."""
CUTS = 9
"""How often a third of a file is cut off, until what is read is gone."""


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

    # -- housekeeping --------------------------------------------------------------------
    def test_exists(self, location: Location) -> None:
        """Check that `tdstore.exists`, `info` and `list_datasets` know a place from its first commit, and no other."""
        self.needs(Cap.PERSISTENT)
        backend = self.declaration()
        if (path := local_path(location)) is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
        before = self.fingerprint(location)
        check_equal(exists(location, storage=backend, **self.options), False, "exists() where nothing is")
        check_unchanged(before, self.fingerprint(location), "exists() where nothing is")
        self.saved(location, OLD)
        check_equal(exists(location, storage=backend, **self.options), True, "exists() where a dataset is")
        found = info(location, storage=backend, **self.options)
        check_equal({p: (s.shape, s.dtype) for p, s in found.leaves.items()}, _shapes(OLD), "leaves of info()")
        check_equal(found.batch_size, header_for(OLD).groups[()].batch_size, "batch size of info()")
        if found.nbytes_stored is not None and found.nbytes_stored <= 0:
            raise failure(
                f"nbytes_stored() is {found.nbytes_stored} where leaves of {found.nbytes} bytes are: "
                "the bytes on the storage are expected, or None"
            )
        with self.opened(location) as store:
            for leaf in OLD:
                try:
                    dict(store.layout(leaf))
                except Exception as error:
                    raise failure(f"layout({leaf}) of a leaf raises {type(error).__name__}: {error}") from error
        self._check_listed(location, backend)
        if path is not None and path.is_file():
            with path.open("r+b") as file:
                file.truncate(path.stat().st_size // 2)
            with suppress(StoreError):
                if not exists(location, storage=backend, **self.options):
                    raise failure(
                        "exists() is False where a dataset is that was cut short: nothing is not what is there"
                    )

    def _check_listed(self, location: Location, backend: Backend) -> None:
        """Look for what a backend lists: the place itself, and of a folder all that is in it, and below."""
        __tracebackhide__ = True
        path = local_path(location)
        if not backend.list:  # the core looks for places that it recognises
            known = None if path is None or "://" in str(location) else registry().resolve(str(path))
            if known is None or known.name != backend.name:
                return
        self._check_list(str(location), backend, OLD)
        if path is None or "://" in str(location):
            return
        for place, leaves in ((path.parent / "below" / "it" / path.name, NEW), (path.with_name(f"z-{path.name}"), OLD)):
            self.saved(place, leaves)
        for name in ("notes.txt", f"damaged{path.suffix or '.bin'}"):
            path.with_name(name).write_bytes(b"no dataset")
        self._check_list(str(path.parent), backend, NEW, OLD, OLD)
        with raises(StoreNotFoundError, doing="list_datasets() of a folder that is not there"):
            list_datasets(str(path.parent / "no such folder"), storage=backend, **self.options)

    def _check_list(self, place: str, backend: Backend, *datasets: Leaves) -> None:
        __tracebackhide__ = True
        try:
            found = list_datasets(place, storage=backend, **self.options)
        except StoreError as error:
            raise failure(f"list_datasets() of {place!r}, where {len(datasets)} datasets are: {error}") from error
        what = f"list_datasets() of {place!r}, where {len(datasets)} datasets are, gives {found}"
        held = list[dict[Path, torch.Tensor]]()
        for one in found:
            try:
                with self.opened(one) as store:
                    held.append(read_all(store))
            except StoreError as error:
                raise failure(f"{what}: {one!r} does not open: {error}") from error
        if len(set(found)) != len(found):
            raise failure(f"{what}: one of them twice")
        if len(found) != len(datasets):
            raise failure(what)
        for leaves in datasets:
            same = next((one for one in held if same_leaves(one, leaves)), None)
            if same is None:
                raise failure(f"{what}: none of these holds what was saved at one of the places")
            held.remove(same)

    def test_delete_place(self, location: Location) -> None:
        """Check that `tdstore.delete` leaves nothing and refuses what is not there; the place can be used again."""
        self.needs(Cap.PERSISTENT, Cap.WRITE)
        self.needs_deletion(location)
        if (path := local_path(location)) is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self.saved(path.with_name(f"beside-{path.name}"), NEW)
            path.with_name("notes.txt").write_text("of another program")
        before = self.fingerprint(location)
        with raises(StoreNotFoundError, doing="deleting a place where nothing is"):
            delete(location, storage=self.declaration(), **self.options)
        self.saved(location, OLD)
        delete(location, storage=self.declaration(), **self.options)
        check_unchanged(before, self.fingerprint(location), "what delete() left, or took with it")
        check_equal(exists(location, storage=self.declaration(), **self.options), False, "exists() after delete()")
        self._check_not_deleted(location)
        with raises(StoreNotFoundError, doing="opening a place that was deleted"):
            self.opened(location)
        self.saved(location, NEW)
        check_leaves(read_all(self.opened(location)), NEW, "saved where a dataset was deleted")

    def _check_not_deleted(self, location: Location) -> None:
        """Look whether a file of another program stays where a dataset of the backend could be."""
        __tracebackhide__ = True
        path = local_path(location)
        if path is None or "://" in str(location):
            return
        path.write_bytes(b"of another program " * 64)
        before, backend = self.fingerprint(location), self.declaration()
        with raises(StoreError, doing="delete() of a file of another program"):
            delete(location, storage=backend, **self.options)
        check_unchanged(before, self.fingerprint(location), "delete() of a file of another program")
        try:
            found = exists(location, storage=backend, **self.options)
        except StoreError:
            found = False
        check_equal(found, False, "exists() where a file of another program is")
        path.unlink()

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

    def test_corruption_noticed(self, location: Location) -> None:
        """Check that a flipped byte of a committed leaf is detected: by opening, by reading, or by `verify`.

        A byte that no read looks at, such as one at the unused end of a page, may be flipped.
        """
        self.needs(Cap.PERSISTENT)
        leaves = {("big",): sample("uint8", (1 << 9, 1 << 10)), ("small",): numbers(2)}
        self.saved(location, leaves)
        with self.opened(location) as store:
            if type(store).verify is Store.verify:
                pytest.skip("the store keeps no checksums (it does not override verify)")
            check_equal(store.verify(), [], "faults that verify finds in a store that has none")
        for _ in range(FLIPS):
            self.corrupt(location)
            try:
                with self.opened(location) as store:
                    if faults := self._faults(store):
                        blamed = [fault.path for fault in store.verify([("small",)])]
                        check_equal(blamed, [], "faults of leaf 'small', which is not damaged")
                        check_equal(faults, [("big",)], "leaves that verify() names where a byte of 'big' was flipped")
                        return
                    got = read_all(store)
            except StoreError:
                return
            check_leaves(got, leaves, "a flipped byte went unnoticed: no error, and verify() is []")
            if type(self).corrupt is not StoreSetup.corrupt:
                raise failure("corrupt() of the class changed nothing that is read: it must flip a byte of a leaf")
        pytest.skip(f"{FLIPS} flipped bytes changed nothing that is read: override corrupt()")

    def _faults(self, store: Store) -> list[Path]:
        """Return the leaves that `verify` names. It may raise where no leaf can be read, and not for one leaf."""
        __tracebackhide__ = True
        try:
            return [fault.path for fault in store.verify()]
        except StoreError as error:
            store.read([Read(("small",))])
            raise failure(
                f"verify() raises {error_name(type(error))}, and not a Fault for each damaged leaf: {error}"
            ) from error

    def _check_all_faults(self, location: Location, leaves: Leaves) -> None:
        """Flip a byte in the last row of each of several leaves, where these can be found: `verify` names them all."""
        __tracebackhide__ = True
        for value in leaves.values():
            row = value[-1].numpy().tobytes()
            file = next((one for one in local_files(location) if row in one.read_bytes()), None)
            if file is None:
                return
            good = file.read_bytes()
            at = good.rfind(row)
            file.write_bytes(good[:at] + bytes([good[at] ^ 0x10]) + good[at + 1 :])
        try:
            with self.opened(location) as store:
                found = sorted(fault.path for fault in store.verify())
        except StoreError:
            return  # it cannot be opened
        check_equal(found, sorted(leaves), "leaves that verify() names where a byte of each was flipped")

    def test_corruption_noticed_anywhere(self, location: Location) -> None:
        """Check that a flipped byte anywhere, also in the last row, is detected, or changes nothing that is read."""
        self.needs(Cap.PERSISTENT)
        big = sample("uint8", (1 << 9, 1 << 7))
        both = {("big",): big, ("other",): sample("uint8", (1 << 8, 1 << 7), 1)}
        self.saved(location, both)
        with self.opened(location) as store:
            if type(store).verify is Store.verify:
                pytest.skip("the store keeps no checksums (it does not override verify)")
        row = big[-1].numpy().tobytes()
        file = next((one for one in local_files(location) if row in one.read_bytes()), largest_file(location))
        good = file.read_bytes()
        last = good.rfind(row)  # -1 where rows are not stored as they are
        ends = range(0, min(len(good), EDGE), EDGE // 16)  # a header, or a catalogue, is often there
        places = {*(len(good) * i // 8 for i in range(8)), *ends, *(len(good) - 1 - at for at in ends)}
        for at in (last, *sorted(places)):
            if at < 0:
                continue
            where = ", in the last row," if at == last else ""
            file.write_bytes(good[:at] + bytes([good[at] ^ 0x10]) + good[at + 1 :])
            try:
                with self.opened(location) as store:
                    try:
                        (got,) = store.read([Read(("big",))])
                    except StoreError as error:
                        if not store.verify():
                            text = (
                                f"byte {at} of {len(good)} of {file.name}{where} was flipped: verify() finds no fault"
                            )
                            raise failure(f"{text}, and a read of leaf 'big' raises {error}") from error
                        continue
                    faults = store.verify()
            except StoreError:
                continue
            except Exception as error:
                text = f"byte {at} of {len(good)} of {file.name}{where} was flipped: a StoreError is expected"
                raise failure(f"{text}, not {error_name(type(error))}: {error}") from error
            if not faults and (differs := difference(got, big)):
                raise failure(
                    f"byte {at} of {len(good)} of {file.name}{where} was flipped, and no error was raised: "
                    f"verify() is [], and leaf 'big' is read with {differs}"
                )
        file.write_bytes(good)
        self._check_all_faults(location, both)

    def test_any_cut_noticed(self, location: Location) -> None:
        """Check that each file may be cut to any length: what is read stays the same, or it is a `StoreError`."""
        self.needs(Cap.PERSISTENT)
        self.saved(location, OLD, RICH)
        largest_file(location)  # skips what is not local
        path = local_path(location)
        assert path is not None, "largest_file has skipped it"

        def cut_all(say: Callable[[str], object]) -> None:
            for file in sorted(p for p in path.parent.rglob("*") if p.is_file()):
                good = file.read_bytes()
                for size in sorted({0, 1, len(good) // 2, len(good) * 9 // 10, len(good) - 1} - {-1, len(good)}):
                    file.write_bytes(good[:size])
                    what = f"{file.relative_to(path.parent)} was cut to {size} of {len(good)} bytes"
                    say(what)
                    self._check_cut(location, what)
                file.write_bytes(good)

        self.guarded(location, cut_all, "cutting files")

    def _check_cut(self, location: Location, what: str) -> None:
        __tracebackhide__ = True
        try:
            with self.opened(location) as store:
                check_leaves(read_all(store), OLD, f"{what}, without an error")
                check_header(store.load_header(), RICH, f"{what}, without an error: the header")
        except StoreError:
            pass
        except AssertionError:
            raise
        except Exception as error:
            raise failure(f"{what}: a StoreError is expected, not {type(error).__name__}: {error}") from error

    def test_truncation_noticed(self, location: Location) -> None:
        """Check that a truncated store is an error that names the location, never zeros and never a crash."""
        self.needs(Cap.PERSISTENT)
        big = sample("uint8", (1 << 9, 1 << 10))
        self.saved(location, {("big",): big, ("small",): numbers(2)})
        if type(self).truncate is StoreSetup.truncate:
            largest_file(location)  # skips what is not local

        def read_cut(say: Callable[[str], object]) -> None:
            for _ in range(CUTS):
                self.truncate(location)
                say("reading what was cut short")
                try:
                    with self.opened(location) as store:
                        (got,) = store.read([Read(("big",))])
                except StoreError as error:
                    check_names(error, location)
                    return
                except Exception as error:
                    name = error_name(type(error))
                    raise failure(f"reading what was cut short: StoreError is expected, not {name}: {error}") from error
                check_same(got, big, "what was cut short is read without an error: leaf 'big'")
            raise failure(f"cut short {CUTS} times, and leaf 'big' is read: truncate() must cut off what is stored")

        self.guarded(location, read_cut, "reading what was cut short")


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


def _shapes(leaves: Leaves) -> dict[Path, tuple[torch.Size, torch.dtype]]:
    return {path: (value.shape, value.dtype) for path, value in leaves.items()}
