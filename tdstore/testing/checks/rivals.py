"""The kit's tests of rivals: a writer beside a reader, two writers at once, another thread."""

from __future__ import annotations

import inspect
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import torch

from tdstore.errors import StoreBusyError, StoreError, TDStoreError
from tdstore.registry import registry
from tdstore.store import Cap, Store
from tdstore.testing.checks.sharing import SharingTests
from tdstore.testing.comparing import check_names, check_paths, check_same, difference, failure
from tdstore.testing.processes.child import Child, filled_with
from tdstore.testing.setup import Leaves, Location, fill, header_for, numbers
from tdstore.types import Mode, Read, Write, path_text

OLD: Leaves = {("a",): numbers(6, 4), ("g", "b"): numbers(5).long(), ("c",): numbers(3)}
ROUNDS = 6


class RivalTests(SharingTests):
    """Tests that a store which others use too gives whole data, or an error of tdstore."""

    def test_other_thread(self, location: Location) -> None:
        """Check that a store can be used in another thread than the one that opened it: `aread` reads there."""
        store = self.holding(location, OLD)

        def use() -> list[torch.Tensor]:
            if Cap.WRITE in self.caps:
                store.write([Write(("c",), (), numbers(3))])
            return store.read([Read(path) for path in OLD])

        with ThreadPoolExecutor(1) as pool:
            try:
                got = pool.submit(use).result()
            except Exception as error:
                raise failure(
                    f"the store cannot be used in another thread than the one that opened it: "
                    f"{type(error).__name__}: {error}"
                ) from error
        for path, tensor in zip(OLD, got, strict=True):
            check_same(tensor, OLD[path], path)

    def test_reader_while_replaced(self, location: Location) -> None:
        """Check that a reader keeps no writer out, and reads on: the old values, or an error."""
        self.needs(Cap.WRITE, Cap.PERSISTENT)
        self.needs_name(location)
        self.saved(location, OLD)
        with self.opened(location) as reader:
            check_same(reader.read([Read(("a",))])[0], OLD[("a",)], ("a",))
            # Of other shapes, so that a reader that looks at the new data with the old catalogue is seen.
            new = {path: torch.cat([value, value])[1:] + 1000 for path, value in OLD.items()}
            try:
                self.saved(location, new)
            except StoreBusyError as error:
                raise failure(f"a writer is refused because a reader has the store open: {error}") from error
            for path, old in OLD.items():
                self._check_whole(reader, path, old, new[path], "while its place was replaced")
        with self.opened(location) as store:
            check_paths(store.paths(), new, "opened after the place was replaced")
            for path, value in new.items():
                check_same(store.read([Read(path)])[0], value, path)

    def _check_whole(self, reader: Store, path: Any, old: torch.Tensor, new: torch.Tensor, when: str) -> None:
        __tracebackhide__ = True
        what = f"a reader that stayed open {when}: leaf {path_text(path)}"
        try:
            (got,) = reader.read([Read(path)])
        except StoreError as error:
            check_names(error, reader.url, what)
            return
        except TDStoreError as error:
            raise failure(f"{what}: a StoreError is expected, not {type(error).__name__}: {error}") from error
        except Exception as error:
            raise failure(f"{what}: a StoreError is expected, not {type(error).__name__}: {error}") from error
        if difference(got, old) is not None and difference(got, new) is not None:
            raise failure(f"{what} is neither the old one ({difference(got, old)}) nor the new one")

    def test_locked_place(self, location: Location) -> None:
        """Check that a place which another process writes opens, or is a `StoreBusyError` that names it."""
        self.needs(Cap.WRITE, Cap.PERSISTENT)
        self.saved(location, OLD)
        child = self.child(location, "r+")
        child.ask("hold", ("a",), 7.0)
        for mode in ("r", "r+", "w"):
            self._use_locked(location, mode)
        with suppress(AssertionError):  # its rows may be of a store that mode "w" has replaced
            child.ask("close")
        child.close()
        with self.opened(location) as store:
            for path, tensor in zip(OLD, store.read([Read(path) for path in OLD]), strict=True):
                allowed = [OLD[path], OLD[path] + 1] + [filled_with(OLD[path], 7.0)] * (path == ("a",))
                if all(difference(tensor, value) for value in allowed):
                    raise failure(
                        f"two writers, one after the other: leaf {path_text(path)} holds values of neither: "
                        f"{difference(tensor, OLD[path])}"
                    )

    def _use_locked(self, location: Location, mode: Mode) -> None:
        __tracebackhide__ = True
        doing = f"mode {mode!r} where another process writes"
        try:
            with self.made(location, mode, **self._at_once()) as store:
                if mode == "w":
                    fill(store, {path: value + 1 for path, value in OLD.items()})
                    store.save_header(header_for(OLD))
                elif mode == "r+":
                    store.write([Write(("c",), (), OLD[("c",)] + 1)])
                    store.save_header(header_for(OLD))
                else:
                    (got,) = store.read([Read(("c",))])
                    check_same(got, OLD[("c",)], f"{doing}: leaf 'c', which nobody changed")
        except StoreError as error:
            check_names(error, str(location).rpartition("://")[2], doing)
        except AssertionError:
            raise
        except Exception as error:
            raise failure(
                f"{doing}: StoreBusyError is expected, not {type(error).__module__}.{type(error).__qualname__}: {error}"
            ) from error

    def _at_once(self) -> dict[str, Any]:
        """Return the options under which an opening does not wait for a lock."""
        opener = registry()._opener(self.declaration()) if type(self).open is None else type(self).open
        assert opener is not None, "a backend has an opener"
        return {"lock_timeout": 0.2} if "lock_timeout" in inspect.signature(opener).parameters else {}

    def test_two_commits_at_once(self, location: Location) -> None:
        """Check that of two processes that commit at once each is whole or refused: no mixture, no foreign error."""
        self.needs(Cap.WRITE, Cap.PERSISTENT)
        self.saved(location, OLD)
        children = [self.child(location), self.child(location)]
        for child in children:
            child.ask("close")
        for turn in range(ROUNDS):
            command = "replace" if turn % 2 else "change"
            for number, child in enumerate(children):
                child.start(command, 10 * turn + number)
            said = [self._answer(child) for child in children]
            done = [10 * turn + number for number, error in enumerate(said) if not error]
            if not done:
                raise failure(f"two commits at once: both were refused: {'; '.join(said)}")
            self._check_winner(location, done, command)

    def _answer(self, child: Child) -> str:
        __tracebackhide__ = True
        try:
            said: str = child.result()
        except AssertionError as error:
            raise failure(f"two commits at once: a StoreError is expected, or none; {error}") from error
        return said

    def _check_winner(self, location: Location, numbers_of: list[int], command: str) -> None:
        __tracebackhide__ = True
        what = f"two commits at once ({'a save' if command == 'replace' else 'rows in place'})"
        with self.opened(location) as store:
            check_paths(store.paths(), OLD, what)
            (header,) = store.load_header().groups[()].batch_size or ()
            found = dict(zip(OLD, store.read([Read(path) for path in OLD]), strict=True))
        if header not in numbers_of:
            raise failure(f"{what}: the header is of neither writer: {header}, and {numbers_of} committed")
        if command == "change" and Cap.CONCURRENT_WRITE in self.caps:
            return  # the rows of both reach the storage at once; which rows are whose is for the writers to agree
        for path, value in OLD.items():
            if differs := difference(found[path], filled_with(value, header)):
                raise failure(
                    f"{what}: the header is that of one writer and leaf {path_text(path)} that of another: {differs}"
                )
