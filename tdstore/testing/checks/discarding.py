"""The kit's tests of uncommitted changes: `discard`, and `close` without `save_header`."""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path as FsPath

import pytest
import torch

from tdstore.errors import ReadOnlyError, StoreClosedError, StoreError, StoreNotFoundError, UnsupportedError
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
from tdstore.testing.samples import assign, rows, sample
from tdstore.testing.setup import (
    Leaves,
    Location,
    StoreSetup,
    fill,
    header_for,
    local_path,
    numbers,
    read_all,
    same_leaves,
)
from tdstore.types import LeafSpec, Read, Write

OLD: Leaves = {("a",): sample("float32", (6, 4)), ("g", "b"): numbers(5).long(), ("c",): sample("bfloat16", (3,))}
HEADER = header_for(OLD, {"text": "of the last commit"})
NEW_HEADER = header_for({("z",): numbers(1)}, {"text": "newer"})
BIG = sample("uint8", (1 << 20,))
REFUSED = (1, 8)
"""MiB that a storage refuses: a library holds the one back until the commit, and writes of the other at once."""
Change = Callable[[Store], object]


def _create(store: Store) -> None:
    fill(store, {("new",): numbers(7), ("g", "n"): numbers(2)})


def _replace(store: Store) -> None:
    fill(store, {("a",): sample("int16", (2, 5)), ("g", "b"): sample("int64", (5,))})


def _write(store: Store) -> None:
    store.write([Write(("a",), (), sample("float32", (6, 4), 1)), Write(("c",), (), sample("bfloat16", (3,), 1))])


def _write_rows(store: Store) -> None:
    store.write([Write(("a",), (rows(5, 0),), numbers(2, 4)), Write(("g", "b"), (slice(1, 3, 1),), numbers(2).long())])


STRUCTURE: dict[str, Change] = {
    "create": _create,
    "replace": _replace,
    "delete": lambda store: store.delete([("a",), ("g", "b")]),
    "rename": lambda store: store.rename({("a",): ("moved", "a"), ("c",): ("g", "c")}),
    "rename-over": lambda store: store.rename({("c",): ("a",)}),
    "swap": lambda store: store.rename({("a",): ("c",), ("c",): ("a",)}),
    "longer": lambda store: store.resize({("a",): 9, ("c",): 4}),
    "shorter": lambda store: store.resize({("a",): 2, ("g", "b"): 0}),
}
"""Changes of structure, each by its name."""
ROWS: dict[str, Change] = {"write": _write, "write-rows": _write_rows}
"""Changes of values."""
EVERYTHING = (*ROWS, "longer", "create", "swap", "delete")
NEEDS = {"write-rows": Cap.PARTIAL_WRITE, "longer": Cap.RESIZE, "shorter": Cap.RESIZE}


@contextmanager
def limited(size: int) -> Iterator[None]:
    """Let no file of this process grow over a size."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def _largest(path: FsPath) -> int:
    """Return the size of the largest file beside a local place, and in it."""
    return max((file.stat().st_size for file in path.parent.rglob("*") if file.is_file()), default=0)


class DiscardTests(StoreSetup):
    """Tests that uncommitted changes can be discarded, and that `close` drops them."""

    @contextmanager
    def refusing(self, location: Location) -> Iterator[None]:
        """Make the storage refuse large writes. The default limits the size of files; override for others."""
        if local_path(location) is None:
            yield
            return
        with limited(1 << 16):
            yield

    def changed(self, store: Store, *names: str) -> None:
        """Make the changes of these names, as far as the store declares the abilities for them."""
        for name in names:
            if name not in NEEDS or NEEDS[name] in self.caps:
                {**STRUCTURE, **ROWS}[name](store)

    def committed(self, location: Location) -> Store:
        """Return a store with `OLD` and `HEADER` in its last commit, open for writing."""
        if Cap.PERSISTENT in self.caps:
            self.saved(location, OLD, HEADER)
            return self.opened(location, "r+")
        store = self.opened(location, "w")
        fill(store, OLD)
        store.save_header(HEADER)
        return store

    def check_committed(self, store: Store, what: str) -> None:
        """Check that the store holds `OLD` and `HEADER`, bit for bit."""
        __tracebackhide__ = True
        check_leaves(read_all(store), OLD, what)
        check_header(store.load_header(), HEADER, f"{what}: the header")

    def check_closed(self, store: Store, location: Location, what: str) -> None:
        """Close and reopen the store, and check that it holds `OLD` and `HEADER`."""
        __tracebackhide__ = True
        if Cap.PERSISTENT in self.caps:
            store.close()
            self.check_committed(self.opened(location), what)

    # -- discard -------------------------------------------------------------------------
    def test_discard_tells_the_truth(self, location: Location) -> None:
        """Check that `discard` without DISCARD is an `UnsupportedError` that names the location, and works with it."""
        self.needs(Cap.WRITE)
        store = self.committed(location)
        if Cap.DISCARD not in self.caps:
            with raises(UnsupportedError, match="DISCARD", doing="discard() without Cap.DISCARD") as caught:
                store.discard()
            check_names(caught.value, store.url)
            return
        for _ in range(2):
            store.discard()
            self.check_committed(store, "discard() after no change")

    @pytest.mark.parametrize("change", [*STRUCTURE, *ROWS, "everything"])
    def test_discard(self, location: Location, change: str) -> None:
        """Check that `discard` undoes every change since the last commit, bit for bit, here and for the next opener."""
        self.needs(Cap.WRITE, Cap.DISCARD, *([NEEDS[change]] if change in NEEDS else []))
        names = EVERYTHING if change == "everything" else (change,)
        if self.caps & (Cap.VIEW | Cap.CONCURRENT_WRITE):
            names = tuple(name for name in names if name not in ROWS)
        if not names:
            pytest.skip("VIEW, CONCURRENT_WRITE: others have seen the rows, and written some")
        store = self.committed(location)
        for turn in ("once", "twice"):
            self.changed(store, *names)
            store.discard()
            self.check_committed(store, f"after {change} and discard(), {turn}")
        self.check_closed(store, location, f"after {change}, discard() and close()")

    def test_discard_after_a_commit(self, location: Location) -> None:
        """Check that `discard` returns to the last `save_header`, also in a store that is new."""
        self.needs(Cap.WRITE, Cap.DISCARD)
        store = self.opened(location, "w")
        fill(store, {("first",): numbers(3), ("c",): numbers(2)})
        store.save_header(NEW_HEADER)
        store.delete([("first",)])
        fill(store, OLD)
        store.save_header(HEADER)
        self.changed(store, "create", "replace", "rename")
        store.discard()
        self.check_committed(store, "after two commits, changes and discard()")
        self.check_closed(store, location, "after two commits, changes, discard() and close()")

    def test_discard_then_change(self, location: Location) -> None:
        """Check that the store can be changed and committed after `discard`."""
        self.needs(Cap.WRITE, Cap.DISCARD)
        store = self.committed(location)
        self.changed(store, "create", "delete")
        store.discard()
        fill(store, {("new",): numbers(3, start=5)})
        store.delete([("c",)])
        store.save_header(NEW_HEADER)
        want = {**OLD, ("new",): numbers(3, start=5)}
        del want[("c",)]
        if Cap.PERSISTENT in self.caps:
            store.close()
            store = self.opened(location)
        check_leaves(read_all(store), want, "changed and committed after discard()")
        check_header(store.load_header(), NEW_HEADER)
        if Cap.PERSISTENT in self.caps and not self.caps & (Cap.VIEW | Cap.CONCURRENT_WRITE):
            store.close()
            self._close_after_discard(location)

    def _close_after_discard(self, location: Location) -> None:
        """Check that rows which `discard` took back are not among those that a later `close` commits."""
        __tracebackhide__ = True
        store = self.committed(location)
        _write(store)
        store.discard()
        rows = OLD["g", "b"] + 1
        store.write([Write(("g", "b"), (), rows)])
        store.close()
        found = read_all(self.opened(location))
        check_leaves(
            found, {**OLD, ("g", "b"): rows}, "rows of two leaves, discard(), rows of a third one, and close()"
        )

    def test_discard_of_a_new_store(self, location: Location) -> None:
        """Check that `discard` empties a store opened with "w" and never committed; the one before it stays."""
        self.needs(Cap.WRITE, Cap.DISCARD)
        if Cap.PERSISTENT in self.caps:
            self.saved(location, OLD, HEADER)
            before = self.fingerprint(location)
        store = self.opened(location, "w")
        fill(store, {("new",): numbers(3)})
        store.discard()
        check_paths(store.paths(), [], "after discard() of a new store")
        assert not store.load_header(), "discard() of a new store left a header"
        if Cap.PERSISTENT in self.caps:
            store.close()
            check_unchanged(before, self.fingerprint(location), "discard() and close() of a new store changed the old")
            self.check_committed(self.opened(location), "after discard() of a new store over it")

    def test_discard_of_a_new_store_leaves_no_trace(self, location: Location) -> None:
        """Check that `discard` and `close` of a new store leave nothing."""
        self.needs(Cap.WRITE, Cap.DISCARD, Cap.PERSISTENT)
        before = self.fingerprint(location)
        with self.opened(location, "x") as store:
            fill(store, {("new",): numbers(3)})
            store.discard()
        check_unchanged(before, self.fingerprint(location), "discard() and close() of a new store left something")
        with raises(StoreNotFoundError, doing="opening what was discarded"):
            self.opened(location)

    def test_discard_after_a_failure(self, location: Location) -> None:
        """Check that a change that failed in its middle is undone whole: the last commit is there, bit for bit."""
        self.needs(Cap.WRITE, Cap.DISCARD)
        store = self.committed(location)
        fill(store, {("new",): numbers(3)})
        with raises((KeyError, ValueError, TypeError, StoreError), doing="a batch of writes, one of them impossible"):
            store.write([Write(("new",), (), numbers(3) + 1), Write(("absent-leaf",), (), numbers(3))])
        store.discard()
        self.check_committed(store, "after a failed write and discard()")
        store.delete([("c",)])
        with self.refusing(location):
            try:
                store.create({("a",): LeafSpec(BIG.shape, BIG.dtype), ("big",): LeafSpec(BIG.shape, BIG.dtype)})
                store.write([Write(("a",), (), BIG), Write(("big",), (), BIG)])
                store.flush()
                store.save_header(NEW_HEADER)
                return  # the storage accepted it all
            except StoreError:
                store.discard()
            self.check_committed(store, "after the storage refused a change, and discard()")
        self.check_closed(store, location, "after the storage refused a change, discard() and close()")

    def test_refused_resize(self, location: Location) -> None:
        """Check that a `resize` which the storage refuses is undone: at once, by `discard`, or by `close`."""
        self.needs(Cap.WRITE, Cap.RESIZE, Cap.PERSISTENT)
        for end in ("discard", "close"):
            store = self.committed(location)
            with self.refusing(location):
                try:
                    store.resize({("c",): 4, ("a",): 1 << 16, ("g", "b"): 7})
                except StoreError as error:
                    what = f"after a resize that the storage refused ({error}), and {end}()"
                else:
                    store.close()
                    return  # which keeps unwritten rows nowhere
                if Cap.DISCARD not in self.caps:
                    self.check_committed(store, what)
                elif end == "discard":
                    store.discard()
                    self.check_committed(store, what)
            self.check_closed(store, location, what)

    def test_uncommitted_is_not_seen(self, location: Location) -> None:
        """Check that nobody sees changes that can still be discarded: a transaction that fails leaves no half."""
        self.needs(Cap.WRITE, Cap.DISCARD, Cap.PERSISTENT)
        if self.caps & (Cap.VIEW | Cap.CONCURRENT_WRITE):
            pytest.skip("VIEW, CONCURRENT_WRITE: others see rows at once")
        store = self.committed(location)
        for name in EVERYTHING:
            self.changed(store, name)
            what = f"opened while another store has changes ({name}) that it may discard"
            try:
                with self.made(location, **self.at_once()) as reader:
                    self.check_committed(reader, what)
            except StoreError as error:
                check_names(error, location, what)
        store.discard()
        self.check_closed(store, location, "after changes of every kind, discard() and close()")

    def test_write_that_the_storage_refuses(self, location: Location) -> None:
        """Check that a `write` which the storage refuses in its middle leaves no half: as before it, or the commit."""
        self.needs(Cap.WRITE)
        if Cap.VIEW in self.caps:
            pytest.skip("VIEW: rows go to live memory; test_full_disk_in_place of CrashTests fills a disk")
        self._refuse_a_write(location, lambda: self.refusing(location))
        path = local_path(location)
        if path is not None and type(self).refusing is DiscardTests.refusing:
            # Later, where a store writes over rows that no commit has.
            self._refuse_a_write(location, lambda: limited(_largest(path) + (1 << 15)))

    def _refuse_a_write(self, location: Location, refusing: Callable[[], AbstractContextManager[None]]) -> None:
        """Write four leaves, of which the storage refuses some."""
        __tracebackhide__ = True
        before = {**OLD, ("big",): torch.zeros_like(BIG)}
        now = {**before, ("c",): sample("bfloat16", (3,), 1)}
        store = self.opened(location, "w")
        fill(store, OLD)
        store.create({("big",): LeafSpec(BIG.shape, BIG.dtype)})
        store.save_header(header_for(before))
        store.write([Write(("c",), (), now["c",])])
        values = {("a",): sample("float32", (6, 4), 1), ("big",): BIG, ("g", "b"): OLD["g", "b"] + 1}
        # What is undone goes back beyond both writes of a leaf, and to rows that no commit has.
        twice = [Write(("c",), (), sample("bfloat16", (3,), 3)), Write(("a",), (), sample("float32", (6, 4), 2))]
        with refusing():
            try:
                store.write(twice + [Write(path, (), value) for path, value in values.items()])
            except StoreError as error:
                what = f"a write of four leaves that the storage refused ({error})"
                try:
                    got = read_all(store)
                except StoreError as unread:
                    raise failure(f"{what}: reading raises {error_name(type(unread))}: {unread}") from unread
                if not same_leaves(got, before):
                    check_leaves(got, now, what)
        store.close()

    @pytest.mark.parametrize("end", ["save_header", "close"])
    @pytest.mark.parametrize("mib", REFUSED)
    def test_refusal_of_the_storage_is_an_error(self, location: Location, mib: int, end: str) -> None:
        """Check that data which the storage refuses is an error of `write`, the commit or `close`: never lost."""
        self.needs(Cap.WRITE, Cap.PERSISTENT)
        big = BIG.repeat(mib).view(-1, 1 << 13)  # long rows: some stores keep each by itself
        old = OLD if end == "save_header" else {**OLD, ("big",): torch.zeros_like(big)}
        self.saved(location, old, HEADER)
        new = {**OLD, ("big",): big}
        store = self.made(location, "r+")
        refused: StoreError | None = None
        with self.refusing(location):
            try:
                if end == "save_header":
                    fill(store, {("big",): big})
                    store.save_header(header_for(new))
                else:
                    store.write([Write(("big",), (), big)])
                store.close()
            except StoreError as error:
                refused = error
                with suppress(StoreError):
                    store.close()
            except Exception as error:
                what = f"the storage refused {mib} MiB of data (EFBIG) before {end}(): a StoreError is expected"
                raise failure(f"{what}, not {error_name(type(error))}: {error}") from error
        with self.opened(location) as reader:
            if refused is None:
                what = f"the storage refused {mib} MiB of data (EFBIG) before {end}(), and no error was raised"
                check_leaves(read_all(reader), new, what)
            else:
                what = f"after the storage refused data ({refused})"
                if end == "close" and Cap.VIEW in self.caps:  # others have seen the rows before the refusal
                    old = {**OLD, ("big",): reader.read([Read(("big",))])[0]}
                check_leaves(read_all(reader), old, what)
                check_header(reader.load_header(), HEADER, f"{what}: the header")
        if mib == REFUSED[0] and type(self).refusing is DiscardTests.refusing:
            self._refuse_the_commit(location, end)

    def _refuse_the_commit(self, location: Location, end: str) -> None:
        """Let the storage take a write, and refuse whatever the commit would add to a file."""
        __tracebackhide__ = True
        path = local_path(location)
        if path is None:
            return
        self.saved(location, OLD, HEADER)
        new = {**OLD, ("a",): sample("float32", (6, 4), 1)}
        store = self.made(location, "r+")
        store.write([Write(("a",), (), new[("a",)])])
        largest = _largest(path)
        what = f"the storage took a write, and lets no file grow over {largest} bytes at {end}()"
        refused: StoreError | None = None
        with limited(largest):
            try:
                if end == "save_header":
                    store.save_header(header_for(new))
                store.close()
            except StoreError as error:
                refused = error
                with suppress(StoreError):
                    if store.load_header() == header_for(new):
                        raise failure(
                            f"{what}: save_header() raised {error}, and load_header() is the refused one"
                        ) from error
                with suppress(StoreError):
                    store.close()
            except Exception as error:
                raise failure(f"{what}: a StoreError is expected, not {error_name(type(error))}: {error}") from error
        with self.opened(location) as reader:
            got = read_all(reader)
            if refused is None:
                check_leaves(got, new, f"{what}, and no error was raised")
            elif not (Cap.VIEW in self.caps and same_leaves(got, new)):
                check_leaves(got, OLD, f"{what} ({refused})")

    def test_discard_is_refused(self, location: Location) -> None:
        """Check that a read-only store raises `ReadOnlyError`, and a closed one `StoreClosedError`."""
        self.needs(Cap.WRITE, Cap.DISCARD)
        store = self.committed(location)
        store.close()
        with raises(StoreClosedError, doing="discard() of a closed store"):
            store.discard()
        if Cap.PERSISTENT in self.caps:
            with raises(ReadOnlyError, doing="discard() in mode 'r'"):
                self.opened(location, "r").discard()

    # -- close ---------------------------------------------------------------------------
    @pytest.mark.parametrize("change", STRUCTURE)
    def test_close_drops_structure(self, location: Location, change: str) -> None:
        """Check that `close` drops uncommitted structure: leaves made, removed, moved, resized."""
        self.needs(Cap.WRITE, Cap.PERSISTENT, *([NEEDS[change]] if change in NEEDS else []))
        store = self.committed(location)
        self.changed(store, change)
        store.close()
        with self.opened(location) as reader:
            self.check_committed(reader, f"close() without save_header keeps what {change} did")
        if change == "longer":
            self._grows_by_fill_values(location)

    def _grows_by_fill_values(self, location: Location) -> None:
        """Check that rows written behind the end of the last commit, and dropped, are not there after a growth."""
        old = OLD[("a",)]
        new = torch.cat([old, torch.zeros(2, *old.shape[1:])])
        for _ in range(2):
            store = self.opened(location, "r+")
            store.resize({("a",): len(new)})
            (got,) = store.read([Read(("a",))])
            check_same(got, new, "rows that close() dropped came back with a growth: leaf 'a'")
            store.write([Write(("a",), (), torch.cat([old, torch.ones(2, *old.shape[1:])]))])
            store.close()

    def test_close_keeps_rows(self, location: Location) -> None:
        """Check that `close` keeps rows written into leaves of the last commit, also beside dropped structure."""
        self.needs(Cap.WRITE, Cap.PERSISTENT)
        store = self.committed(location)
        value = sample("float32", (6, 4), 1)
        want = {**OLD, ("a",): value}
        store.write([Write(("a",), (), value)])
        if Cap.PARTIAL_WRITE in self.caps:
            store.write([Write(("g", "b"), (rows(4, 1),), numbers(2, start=50).long())])
            want["g", "b"] = assign(OLD["g", "b"], (rows(4, 1),), numbers(2, start=50).long())
        fill(store, {("new",): numbers(3)})
        store.delete([("c",)])
        store.close()
        found = self.opened(location)
        check_leaves(read_all(found), want, "rows written in 'r+', and structure that was not committed")
        check_header(found.load_header(), HEADER)

    def test_close_of_a_new_store_drops_structure(self, location: Location) -> None:
        """Check the same in a store opened with "w", after its first `save_header`."""
        self.needs(Cap.WRITE, Cap.PERSISTENT)
        with self.opened(location, "w") as store:
            fill(store, OLD)
            store.save_header(HEADER)
            fill(store, {("new",): numbers(3)})
            store.delete([("c",)])
        self.check_committed(self.opened(location), "close() after save_header keeps what came later")
