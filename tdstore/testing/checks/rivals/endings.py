"""The kit's tests of the end of a store: its contents after a process has written and ended, in a dozen ways."""

from __future__ import annotations

import sys
from typing import Any, ClassVar

import pytest

from tdstore.errors import DirtyStoreError, StoreError
from tdstore.store import Cap
from tdstore.testing.comparing import check_leaves, failure
from tdstore.testing.processes.events import CARRIED, HEADER, KILLS, NEW, OLD, ORDERLY, Ended, host
from tdstore.testing.setup import Leaves, Location, StoreSetup, header_for, import_root, read_all, same_leaves
from tdstore.types import Mode


class EndingTests(StoreSetup):
    """Tests that unclosed writes are committed, or the last commit remains, and that no process hangs or complains."""

    patience: ClassVar[float] = 20
    """Seconds after which a process that does not end is a deadlock."""

    def ended(self, location: Location, event: str, mode: Mode) -> Ended:
        """Write in a separate process that ends by `event`. A deadlock, a traceback or other output fails."""
        __tracebackhide__ = True
        opener = type(self).open
        roots = [] if opener is None else [import_root(opener)]
        process = host(self.declaration(), roots)
        patience = self.patience * (3 if event == "spawned" else 1)  # a fresh interpreter imports torch
        ended = process.run(location, event, mode=mode, options=self.options, patience=patience)
        if ended.stuck:
            raise failure(
                f"deadlock: the process did not end within {patience:g} s ({event}). Where its threads were:\n"
                f"{ended.errors}"
            )
        if ended.remarks:
            raise failure(f"{event}: {'; '.join(ended.remarks)}\n{ended.errors}")
        if ended.errors.strip():
            raise failure(f"{event}: the process does not end in silence, it prints:\n{ended.errors}")
        return ended

    def _needs_events(self, location: Location) -> None:
        self.needs(Cap.WRITE, Cap.PERSISTENT)
        self.needs_processes(location)
        if sys.platform == "win32":
            pytest.skip("it forks")

    @pytest.mark.parametrize("mode", ["r+", "w"])
    @pytest.mark.parametrize("event", ORDERLY)
    def test_rows_are_there_after(self, location: Location, event: str, mode: Mode) -> None:
        """Check for written rows after `close`, a dropped handle, the end of a script, of a worker."""
        self._needs_events(location)
        if mode == "r+":
            self.saved(location, OLD, HEADER)
        self.ended(location, event, mode)
        with self.opened(location) as store:
            got = read_all(store)
        what = f"written in mode {mode!r}, ended by: {event}"
        if same_leaves(got, OLD):
            raise failure(f"{what}: the rows are lost, only the last commit is there")
        check_leaves(got, NEW, what)

    @pytest.mark.parametrize("mode", ["r+", "w"])
    @pytest.mark.parametrize("event", KILLS)
    def test_last_commit_is_there_after(self, location: Location, event: str, mode: Mode) -> None:
        """Check for the last commit, or a `DirtyStoreError`, after SIGTERM, `os._exit` or `kill -9`."""
        self._needs_events(location)
        if mode == "r+":
            self.saved(location, OLD, HEADER)
        self.ended(location, event, mode)
        self.found(location, f"written in mode {mode!r}, ended by: {event}")

    def found(self, location: Location, what: str) -> str:
        """Return the state that a reader finds after a kill: "old", "new" or "dirty". Anything else fails."""
        __tracebackhide__ = True
        try:
            with self.opened(location) as store:
                got = read_all(store)
        except DirtyStoreError as error:
            if not error.leaves:
                raise failure(f"{what}: the DirtyStoreError names no leaves: {error}") from error
            return "dirty"
        if same_leaves(got, NEW):
            return "new"
        check_leaves(got, OLD, f"{what}: neither the last commit nor all that was written")
        return "old"

    def test_reader_ends_quietly(self, location: Location) -> None:
        """Check that a script that leaves a store open for reading ends without output."""
        self._needs_events(location)
        self.saved(location, OLD, HEADER)
        self.ended(location, "script", "r")

    def test_fork_commits_nothing(self, location: Location) -> None:
        """Check that a forked child that ends does not affect the open store of its parent: it commits nothing."""
        self._needs_events(location)
        outcomes: dict[str, Any] = {}
        for event in ("os._exit", "carried-killed", "carried-closed-in-child"):
            self.saved(location, OLD, HEADER)
            self.ended(location, event, "r+")
            outcomes[event] = self.found(location, event)
        alone, beside, closed = outcomes.values()
        assert alone == beside, (
            f"a process that writes and is killed leaves {alone!r}; if a forked child of it ended before, {beside!r}: "
            "the end of the child committed, or took back, what belongs to its parent"
        )
        assert alone == closed, (
            f"a process that writes and is killed leaves {alone!r}; if a forked child of it called close() before, "
            f"{closed!r}: close() in the child committed, or took back, what belongs to its parent"
        )
        large = {**OLD, **CARRIED}
        want = {**NEW, **{path: value + 1 for path, value in CARRIED.items()}}
        for event, did in (("carried-closed", "ended"), ("carried-closed-by-both", "called close() and ended")):
            self.saved(location, large, header_for(large))
            self.ended(location, event, "r+")
            self._check_found(location, want, f"closed by the parent after its forked child {did}")
            self.ended(location, event, "w")
            self._check_found(location, want, f"first saved by the parent after its forked child {did}")

    def _check_found(self, location: Location, want: Leaves, what: str) -> None:
        __tracebackhide__ = True
        try:
            with self.opened(location) as store:
                got = read_all(store)
        except StoreError as error:
            raise failure(f"{what}: {type(error).__name__}: {error}") from error
        check_leaves(got, want, what)

    def test_fork_shares_no_connection(self, location: Location) -> None:
        """Check that a parent and its forked child can read at once: they share no connection and no file position."""
        self._needs_events(location)
        self.saved(location, OLD, HEADER)
        self.ended(location, "both", "r")
