"""The location of a repository, such as a local folder, and how its writers exclude one another."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta

import icechunk

from tdstore.errors import StoreError
from tdstore.storekit import files, refusals
from tdstore.storekit.publish import Site
from tdstore_icechunk.faults import icechunk_errors

REF = "refs/branch.main/ref.json"
PARTS = ("refs", "snapshots", "manifests", "chunks", "transactions", "config.yaml")
"""What icechunk makes in the root of a repository."""
INITIAL = "1CECHNKREP0F1RSTCMT0"
"""The snapshot that each new repository begins with."""
UNCOMMITTED = timedelta(days=1)
"""Objects in a bucket that are younger and that no commit names may be of a writer that is about to commit."""

if "ICECHUNK_LOG" not in os.environ:  # it warns of each local folder, whose commits a lock keeps apart here
    icechunk.set_logs_filter("icechunk=error")


class Location(ABC):
    """A place for one repository.

    Attributes:
        url: for messages.
    """

    url: str

    @abstractmethod
    def storage(self) -> icechunk.Storage:
        """Return icechunk's object for the place."""

    def open(self) -> icechunk.Repository | None:
        """Open the repository; None if there is none."""
        with icechunk_errors(self.url, "opening"):
            storage = self.storage()
            return icechunk.Repository.open(storage) if icechunk.Repository.exists(storage) else None

    @abstractmethod
    def begin(self) -> icechunk.Repository:
        """Create a repository that nobody sees before `publish`, or that `give_up` removes."""

    def publish(self, *, replace: bool) -> icechunk.Repository | None:
        """Make the new repository visible; return it at its new location if it was moved."""
        return None

    @abstractmethod
    def give_up(self) -> None:
        """Remove a new repository that was never committed."""

    @contextmanager
    def committing(self) -> Iterator[None]:
        """Exclude other commits, if the storage cannot tell that it was changed meanwhile."""
        yield

    def enter(self) -> None:
        """Show others that there are objects which no commit names yet, unless the place was removed."""

    def leave(self, *, littered: bool, repo: icechunk.Repository) -> None:
        """Undo `enter`, and remove objects that no commit names, if there are any.

        Args:
            littered: whether there may be such objects.
            repo: the repository.
        """

    def collectable(self, grace: float) -> datetime:
        """Return the time before which objects that no snapshot names belong to no writer."""
        return datetime.now(UTC) - max(timedelta(seconds=grace), UNCOMMITTED)

    def close(self) -> None:
        """Release locks and descriptors."""


class FolderLocation(Location):
    """A local folder. icechunk's commits are not safe there: a lock serializes them.

    A writer with uncommitted objects holds a shared flock of the root, so that garbage is collected only while there is
    no such writer. A commit holds an exclusive flock of `refs`.
    """

    def __init__(self, path: str, timeout: float) -> None:
        self.url = self.path = path
        self.timeout = timeout
        self._site: Site | None = None
        self._lock = -1

    def storage(self) -> icechunk.Storage:
        """Return icechunk's object for the folder, or for the one that is being built."""
        path = self.path if self._site is None else os.path.join(os.path.dirname(self.path), self._site.temp)
        return icechunk.local_filesystem_storage(path)

    def open(self) -> icechunk.Repository | None:
        """Open the repository; return None for a folder without one, in which icechunk would create one."""
        return super().open() if os.path.isfile(os.path.join(self.path, REF)) else None

    def begin(self) -> icechunk.Repository:
        """Create a repository beside the folder."""
        self._site = Site(
            self.path, url=self.url, timeout=self.timeout, foreign=_foreign, first=(), kind="an icechunk repository"
        )
        self._site.check(replace=True)
        with icechunk_errors(self.url, "making"):
            return icechunk.Repository.create(self.storage())

    def publish(self, *, replace: bool) -> icechunk.Repository | None:
        """Rename the new repository to its place."""
        site = self._site
        if site is None:
            return None

        @contextmanager
        def alone(old: int) -> Iterator[None]:
            site.wait_alone(old)
            yield

        site.publish(replace=replace, sync=False, alone=alone)
        site.close()
        self._site = None
        return self.open()

    def give_up(self) -> None:
        """Remove the folder that was being built."""
        if self._site is not None:
            self._site.close()
            self._site = None

    @contextmanager
    def committing(self) -> Iterator[None]:
        """Hold the lock of commits of a folder that is still the one that was opened."""
        if self._site is not None:
            yield
            return
        if not self._is_there():
            raise refusals.removed(self.url)
        with files.io_errors(self.url, "committing"), files.closing(files.open_dir(f"{self.path}/refs")) as fd:
            files.lock(fd, exclusive=True, timeout=self.timeout, url=self.url)
            yield

    def _is_there(self) -> bool:
        try:
            return self._lock < 0 or os.path.samestat(os.stat(self.path), os.fstat(self._lock))
        except FileNotFoundError:
            return False

    def enter(self) -> None:
        """Hold the shared lock of writers."""
        if not self._is_there():
            raise refusals.removed(self.url)
        if self._site is None and self._lock < 0:
            try:
                self._lock = files.open_dir(self.path)
            except FileNotFoundError:
                raise refusals.removed(self.url) from None
            files.lock(self._lock, exclusive=False, timeout=self.timeout, url=self.url)

    def leave(self, *, littered: bool, repo: icechunk.Repository) -> None:
        """Release the lock of writers; the last one collects the garbage."""
        if self._lock < 0:
            return
        try:
            if littered and self._is_there() and files.try_lock(self._lock, exclusive=True):
                with suppress(StoreError), icechunk_errors(self.url, "tidying"):  # the next one tries again
                    repo.garbage_collect(datetime.now(UTC) + timedelta(days=1))
        finally:
            self.close()

    def collectable(self, grace: float) -> datetime:
        """Return a time to come, unless a writer has objects that are not committed."""
        probe = files.open_dir(self.path)
        with files.closing(probe):
            alone = self._lock < 0 and files.try_lock(probe, exclusive=True)
        return datetime.now(UTC) + timedelta(days=1) if alone else super().collectable(grace)

    def close(self) -> None:
        """Release locks and descriptors."""
        lock, self._lock = self._lock, -1
        if lock >= 0:
            files.unlock(lock)
            os.close(lock)

    def is_written(self) -> bool:
        """Check whether a writer has changes that are not committed."""
        with files.closing(files.open_dir(self.path)) as fd:
            return not files.try_lock(fd, exclusive=True)


def _foreign(root: int) -> list[str]:
    """Return the names in a folder that icechunk would not have created."""
    return sorted(name for name in os.listdir(root) if name not in PARTS)
