"""The kit's tests of locks: a deletion respects them, and they last as long as the changes that need them."""

from __future__ import annotations

from contextlib import suppress
from functools import partial

import pytest

from tdstore.errors import StoreBusyError
from tdstore.io.housekeeping import delete
from tdstore.store import Cap
from tdstore.testing.checks.rivals.sharing import OLD, SharingTests
from tdstore.testing.comparing import check_equal, check_same, check_unchanged, failure, in_time
from tdstore.testing.processes.child import filled_with
from tdstore.testing.setup import Location, fill, header_for, local_path, numbers
from tdstore.types import LeafSpec, Read, Write


class LockTests(SharingTests):
    """Tests that a lock of a writer keeps a place from being removed, and ends with its changes."""

    @pytest.mark.parametrize("end", ["save_header", "discard"])
    def test_lock_ends_with_the_changes(self, location: Location, end: str) -> None:
        """Check that an open writer keeps out no more after `save_header` or `discard` than before its first change."""
        self.needs(Cap.WRITE, Cap.PERSISTENT, *([Cap.DISCARD] if end == "discard" else []))
        self.saved(location, OLD)
        child = self.child(location, **self.at_once())
        child.ask("close")
        with self.opened(location, "r+"):
            if child.ask("change", 1):
                pytest.skip("a writer keeps others out as long as it is open")
        with self.opened(location, "r+") as store:
            if end != "discard" or not self.caps & (Cap.VIEW | Cap.CONCURRENT_WRITE):  # whose rows stay
                store.write([Write(("a",), (), OLD[("a",)] + 1)])
            fill(store, {("new",): numbers(3)})
            if end == "discard":
                store.discard()
            else:
                store.save_header(header_for({**OLD, ("new",): numbers(3)}))
            if said := child.ask("change", 2):
                raise failure(
                    f"a writer is open and has no change since {end}(), and another process cannot commit, as it could "
                    f"before the first change: the lock must end with the changes. It says {said}"
                )

    def test_lock_is_not_the_childs(self, location: Location) -> None:
        """Check that `close` in a forked child releases no lock of its parent: others are still refused."""
        self.needs(Cap.WRITE, Cap.PERSISTENT)
        self.saved(location, OLD)
        child = self.child(location, "r+")
        child.ask("hold", ("a",), 7.0)
        if not self._second_refused(location):
            pytest.skip("a second writer is not refused before the commit")
        check_equal(child.ask("close_in_fork"), 0, "status of a forked child of a writer that called close()")
        if not self._second_refused(location):
            raise failure(
                "a writer no longer keeps others out after its forked child has called close(): the child released the "
                "lock of its parent"
            )

    def test_delete_while_written(self, location: Location) -> None:
        """Check that a place which another process writes is not deleted, or wholly: never in part.

        Where a second writer is refused, the deletion is, too.
        """
        self.needs(Cap.WRITE, Cap.PERSISTENT)
        self.needs_deletion(location)
        if (path := local_path(location)) is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
        before = self.fingerprint(location)
        self.saved(location, OLD)
        child = self.child(location, "r+")
        child.ask("hold", ("a",), 7.0)
        refusal = self._second_refused(location)
        backend = self.declaration()
        work = partial(delete, location, storage=backend, **self.at_once(), **self.options)
        try:
            in_time(work, "deleting a place that another process writes", self.waiting)
        except StoreBusyError:
            child.ask("close")
            with self.opened(location) as store:
                check_same(
                    store.read([Read(("a",))])[0], filled_with(OLD[("a",)], 7.0), "a place that delete() refused"
                )
        else:
            if refusal:
                raise failure(
                    f"a place that another process writes was deleted, where a second writer is refused: {refusal}"
                )
            with suppress(AssertionError):  # its rows were of a dataset that is gone
                child.ask("close")
            check_unchanged(
                before, self.fingerprint(location), "deleted while a process wrote, and created again by it"
            )

    def _second_refused(self, location: Location) -> str:
        """Return what a second writer is told at its first change."""
        try:
            with self.made(location, "r+", **self.at_once()) as store:
                store.create({("probe",): LeafSpec((1,), "int8")})
        except StoreBusyError as error:
            return str(error)
        return ""
