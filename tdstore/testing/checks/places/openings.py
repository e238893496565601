"""The kit's tests of what openers are given, of options that all backends share, and of what calls a store."""

from __future__ import annotations

import inspect
from pathlib import Path as FsPath
from typing import Any

import pytest
import torch

from tdstore.container.storage.handle import StoreHandle
from tdstore.errors import OptionError, StoreError
from tdstore.hookspecs import Backend
from tdstore.registry import registry
from tdstore.store import Cap, Store
from tdstore.testing.checks.rivals.sharing import SharingTests
from tdstore.testing.comparing import (
    check_equal,
    check_leaves,
    check_mentions,
    check_paths,
    check_same,
    failure,
    raises,
)
from tdstore.testing.samples import sample
from tdstore.testing.setup import Leaves, Location, fill, header_for, local_path, numbers, read_all
from tdstore.testing.wrappers import CountingStore
from tdstore.types import LeafSpec, Mode, Read, Write

OLD: Leaves = {("a",): numbers(6, 4), ("g", "b"): numbers(5).long()}
SHARED: dict[str, tuple[tuple[Any, ...], tuple[Any, ...]]] = {
    "durable": (("none", "commit"), ("sometimes",)),
    "verify": (("none", "size", "full"), ("perhaps",)),
    "recover": ((None, "accept"), ("guess",)),
    "lock_timeout": ((0.0, 0.5), ()),
    "max_bytes": ((None, 1 << 30), ()),
    "layout": ((None, "random", "scan"), ("sideways",)),
}
"""Options that mean the same wherever a backend has them: values that it takes, and some that it refuses."""
WRITING = ("durable", "layout")
"""Those that say something to a writer only."""


class OpeningTests(SharingTests):
    """Tests that openers take text and paths, and that options which backends share mean the same for all of them."""

    def test_location_as_text_and_path(self, location: Location) -> None:
        """Check that a local place opens by its text and by its path; a store in memory has no location."""
        if location is None:
            check_paths(self.holding(location, OLD).paths(), OLD, "a store without a location")
            return
        self.needs(Cap.PERSISTENT)
        self.saved(location, OLD)
        text = str(location)
        places: list[Location] = [text] if "://" in text else [text, FsPath(text)]
        for place in places:
            with registry().open(self.importable(), place, **self.options) as store:
                check_leaves(read_all(store), OLD, f"opened by a {type(place).__name__}")
        if "://" not in text:
            special = FsPath(text).with_name(f"a%41 b#c?mode=memory&\u00e9{FsPath(text).name}")
            self.saved(special, OLD)
            if not special.exists():
                raise failure(
                    f"nothing is at {special}, where a store was saved: a part of the name was taken for something else"
                )
            with self.opened(special) as store:
                check_leaves(read_all(store), OLD, "a location with signs that URLs use")

    def test_relative_location(self, location: Location, monkeypatch: pytest.MonkeyPatch) -> None:
        """Check that a store which was opened by a relative path goes on after the process changed its folder."""
        self.needs(Cap.PERSISTENT)
        path = local_path(location)
        if path is None or "://" in str(location):
            pytest.skip("the location is no path")
        elsewhere = path.parent / "elsewhere"
        elsewhere.mkdir(parents=True)

        def opened_beside(mode: Mode) -> Store:
            monkeypatch.chdir(path.parent)
            store = self.opened(FsPath(path.name), mode)
            monkeypatch.chdir(elsewhere)
            return store

        what = "opened by a relative path, and used after os.chdir"
        try:
            if Cap.WRITE in self.caps:
                with opened_beside("w") as store:
                    fill(store, OLD)
                    store.save_header(header_for(OLD))
                with opened_beside("r+") as store:
                    store.write([Write(("a",), (), OLD[("a",)])])
                    store.save_header(header_for(OLD))
            else:
                self.saved(path, OLD)
            with opened_beside("r") as store:
                found = read_all(store)
        except (StoreError, OSError) as error:
            raise failure(f"{what}: {type(error).__name__}: {error}") from error
        check_leaves(found, OLD, what)
        check_equal([file.name for file in elsewhere.iterdir()], [], f"{what}: files in the new folder")
        with self.opened(path) as store:
            check_leaves(read_all(store), OLD, f"{what}, then opened by its whole path")

    def test_location_with_scheme(self, location: Location) -> None:
        """Check that a local place opens with the schemes of the backend before it, as without."""
        self.needs(Cap.PERSISTENT)
        schemes = () if self.backend is None else self.declaration().schemes
        if local_path(location) is None or not schemes or "://" in str(location):
            pytest.skip("no scheme stands for a local place")
        self.saved(location, OLD)
        for scheme in schemes:
            with registry().open(self.declaration(), f"{scheme}://{location}", **self.options) as store:
                check_leaves(read_all(store), OLD, f"opened as {scheme}://...")

    @pytest.mark.parametrize("option", SHARED)
    def test_shared_option(self, location: Location, option: str) -> None:
        """Check that an option which backends share takes the values that it has elsewhere, and refuses others."""
        self.needs(Cap.WRITE, Cap.PERSISTENT)
        backend = self.importable()
        if option not in inspect.signature(registry().opener(backend)).parameters:
            pytest.skip(f"the opener has no option {option}")
        good, bad = SHARED[option]
        mode: Any = "w" if option in WRITING else "r"
        self.saved(location, OLD)
        for value in good:
            with registry().open(backend, location, mode=mode, **{**self.options, option: value}) as store:
                if mode == "w":
                    fill(store, OLD)
                    store.save_header(header_for(OLD))
                check_leaves(read_all(store), OLD, f"opened with {option}={value!r}")
        for value in bad:
            with raises(OptionError, match=option, doing=f"opening with {option}={value!r}"):
                registry().open(backend, location, mode=mode, **{**self.options, option: value})

    def test_max_bytes(self, location: Location) -> None:
        """Check that `max_bytes` refuses a dataset that declares more, with an error that names the option."""
        self.needs(Cap.WRITE, Cap.PERSISTENT)
        backend = self.importable()
        if "max_bytes" not in inspect.signature(registry().opener(backend)).parameters:
            pytest.skip("the opener has no option max_bytes")
        self.saved(location, OLD)
        with (
            raises(StoreError, doing="opening 136 bytes of data with max_bytes=10") as caught,
            registry().open(backend, location, **{**self.options, "max_bytes": 10}) as store,
        ):
            read_all(store)
        check_mentions(caught.value, "max_bytes")

    def importable(self) -> Backend:
        """Return the backend under test, if its opener can be imported."""
        backend = self.declaration()
        if "<" in backend.opener:
            pytest.skip("the opener cannot be imported by its name; see test_opener_is_importable")
        return backend

    # -- what calls a store --------------------------------------------------------------
    def test_commit_is_save_header(self, location: Location) -> None:
        """Check that a commit is one `save_header`, and that nothing calls `flush`."""
        self.needs(Cap.WRITE, Cap.PERSISTENT)
        self.saved(location, OLD)
        store = CountingStore(self.opened(location, "r+"))
        handle = StoreHandle(store, self.declaration(), str(location), "r+", {})
        store.write([Write(("a",), (), OLD[("a",)] + 1)])
        store.reset()
        handle.commit(handle.groups)
        check_equal(dict(store.calls), {"save_header": 1}, "calls of a commit")
        handle.close()
        check_same(self.opened(location).read([Read(("a",))])[0], OLD[("a",)] + 1, "after a commit")

    def test_flush_commits_no_structure(self, location: Location) -> None:
        """Check that `flush` is no commit: new leaves are not there for others, nor after `close`."""
        self.needs(Cap.WRITE, Cap.PERSISTENT)
        self.needs_name(location)
        self.saved(location, OLD)
        with self.opened(location, "r+") as store:
            fill(store, {("new",): numbers(3)})
            store.flush()
            check_same(store.read([Read(("new",))])[0], numbers(3), "a new leaf after flush")
        with self.opened(location) as store:
            check_paths(store.paths(), OLD, "flush() committed what create did")

    def test_generation(self, location: Location) -> None:
        """Check that `generation` stays while nobody commits, and differs after each commit of another process.

        It does so in an open store, and from one opening to the next, also where mode "w" saved the same data again.
        """
        self.needs(Cap.WRITE)
        self.needs_processes(location)
        if Cap.PERSISTENT in self.caps:
            self.saved(location, OLD)
            store = self.opened(location)
        else:
            self.needs(Cap.SHARED)
            store = self.holding(location, OLD)
            store.save_header(header_for(OLD))
        before = store.generation()
        if before is None:
            pytest.skip("the store cannot tell (it does not override generation)")
        read_all(store)
        check_equal(store.generation(), before, "generation() after a read")
        check_equal(self.generation(location), before, "generation() of the next opener")
        child = self.child(location, **self.at_once())
        child.ask("close")
        seen = [before]
        for command, number in (("change", 7), ("change", 8), ("replace", 8), ("replace", 8), ("change", 9)):
            if Cap.PERSISTENT not in self.caps and command == "replace":
                continue  # the memory is of the process that made it, which would be the child
            said = child.ask(command, number)
            if said.startswith("StoreBusyError") and Cap.PERSISTENT in self.caps:
                store.close()  # where files are locked, a reader keeps writers in place out
                said = child.ask(command, number)
            elif store.generation() in seen:
                raise failure(f"generation() is the same after another process has committed ({command}, {number})")
            if said:
                raise failure(f"a writer is refused while nobody writes ({command}, {number}): {said}")
            found = self.generation(location)
            if found is None or found in seen:
                raise failure(f"generation() is {found!r} in the next opener, as of an earlier commit ({command})")
            seen.append(found)
            if Cap.PERSISTENT in self.caps:
                store.close()
                store = self.opened(location)

    def test_generation_of_this_process(self, location: Location) -> None:
        """Check that `generation` differs after each commit of this process: by `save_header`, and by `close`."""
        self.needs(Cap.WRITE, Cap.PERSISTENT)
        self.saved(location, OLD)
        seen = [self.generation(location)]
        if seen[0] is None:
            pytest.skip("the store cannot tell (it does not override generation)")
        store = self.opened(location, "r+")
        commits = ["save_header() of the same store", "another save_header()"]
        if Cap.CONCURRENT_WRITE not in self.caps:  # which shows rows at once: then they are no commit
            commits.append("close(), which commits rows")
        for commit in commits:
            store.write([Write(("a",), (), OLD[("a",)] + len(seen))])
            if commit.startswith("close"):
                store.close()
                found = self.generation(location)
            else:
                store.save_header(header_for(OLD, {"number": len(seen)}))
                found = store.generation()
            if found in seen:
                raise failure(f"generation() is the same after {commit}: {found!r}")
            seen.append(found)

    def generation(self, location: Location) -> object:
        """Open the store, and return its generation."""
        with self.opened(location) as store:
            return store.generation()

    def test_large_row(self, location: Location) -> None:
        """Check that one row may be several MiB, and is written and read alone."""
        self.needs(Cap.WRITE, Cap.PARTIAL_READ, Cap.PARTIAL_WRITE)
        row = sample("uint8", (1, 6 << 20))
        store = self.opened(location, "w")
        store.create({("a",): LeafSpec((3, 6 << 20), "uint8")})
        store.write([Write(("a",), (slice(1, 2, 1),), row)])
        check_same(store.read([Read(("a",), (torch.tensor([1]),))])[0], row, "a row of 6 MiB")
