"""A repository as the place of a zarr store: opening its last commit or a version, writing in a session, committing."""

from __future__ import annotations

import os
from collections.abc import Iterable

import icechunk
from tdstore_zarr.layout.document import MAX_ROOT, NAME, Document, Mark
from tdstore_zarr.place.base import Place

from tdstore.errors import ConflictError, StoreNotFoundError
from tdstore.header import Header
from tdstore.storekit import refusals
from tdstore_icechunk.engine import SessionEngine, SessionLog
from tdstore_icechunk.faults import conflict, icechunk_errors
from tdstore_icechunk.location import INITIAL, Location
from tdstore_icechunk.versions import KEY, MAIN, dropped_in, following


class RepositoryPlace(Place):
    """The branch `main` of a repository, at one snapshot.

    Attributes:
        base: the snapshot that was read, or committed last.
        repo: the repository.
        location: where it is.
        engine: its objects.
    """

    engine: SessionLog
    redo = False

    def __init__(self, location: Location, repo: icechunk.Repository, base: str) -> None:
        self.location, self.repo, self.base = location, repo, base
        self.url = location.url
        self.pid = os.getpid()
        self.pinned = False
        """Whether this is a version, which stays as it is."""
        self.lost = False
        """Whether another writer has committed."""
        self._writing = False
        self._exclusive = False
        self._root = b""
        self.version: tuple[str, Header] | None = None
        """Message and header, if the next commit is a version."""
        self.engine = SessionLog(SessionEngine(self.url, self._reading()))

    @classmethod
    def existing(cls, location: Location, version: str | None) -> RepositoryPlace:
        """Open the repository at a location.

        Args:
            location: where.
            version: a snapshot that is a version; None: the last snapshot of the branch.

        Raises:
            StoreNotFoundError: there is no repository, or nothing was committed to it.
        """
        repo = location.open()
        base = INITIAL if repo is None else tip_of(repo, location.url)
        if repo is None or base == INITIAL:
            raise refusals.not_found(location.url, "there is no icechunk repository with a commit")
        place = cls(location, repo, version or base)
        place.pinned = version is not None
        return place

    @classmethod
    def new(cls, location: Location, *, exclusive: bool) -> RepositoryPlace:
        """Begin a new dataset: in a new repository, or as the next commit of an existing one.

        Args:
            location: where.
            exclusive: refuse a repository with commits.

        Raises:
            StoreExistsError: `exclusive`, and there is one.
        """
        repo = location.open()
        if repo is None:
            repo = location.begin()
        base = tip_of(repo, location.url)
        if exclusive and base != INITIAL:
            raise refusals.place_exists(location.url)
        place = cls(location, repo, base)
        place.published, place._exclusive = False, exclusive
        place.take()
        with icechunk_errors(place.url, "replacing"):
            place.engine.base.session.store.sync_clear()
        return place

    def _reading(self) -> icechunk.Session:
        with icechunk_errors(self.url, "opening"):
            return self.repo.readonly_session(snapshot_id=self.base)

    # -- the root --------------------------------------------------------------------------
    def read_root(self) -> bytes:
        """Read the root of the snapshot."""
        try:
            self._root = bytes(self.engine.get(NAME, MAX_ROOT).data)
        except StoreNotFoundError:
            raise refusals.not_found(self.url, "the repository has no group in its root") from None
        return self._root

    def newest_root(self) -> bytes:
        """Read the root of the last commit."""
        if self.pinned:
            return self._root
        newest = tip_of(self.repo, self.url)
        if newest == self.base:
            return self._root
        with icechunk_errors(self.url, "opening"):
            session = self.repo.readonly_session(snapshot_id=newest)
        return bytes(SessionEngine(self.url, session).get(NAME, MAX_ROOT).data)

    # -- writing ---------------------------------------------------------------------------
    def take(self) -> None:
        """Begin a session of the branch, if nobody has committed since the root was read."""
        self.location.enter()
        if self._writing and not self.engine.base.session.read_only:  # Ctrl-C may come between a commit and `release`
            return
        with icechunk_errors(self.url, "opening"):
            session = self.repo.writable_session(MAIN)
        if session.snapshot_id != self.base:
            self.lost = True
            self.location.leave(littered=False, repo=self.repo)
            raise conflict(self.url)
        self.engine.base.swap(session)
        self._writing = True

    def release(self) -> None:
        """End the session: after a commit, or when its changes were discarded."""
        if not self._writing:
            return
        self._writing = False
        self._leave()
        self.engine.base.swap(self._reading())

    def _leave(self) -> None:
        littered = self.engine.littered or self.engine.nbytes > 0
        self.engine.ended()
        self.engine.littered = False
        self.location.leave(littered=littered, repo=self.repo)

    def put_root(self, data: bytes, *, sync: bool) -> None:
        """Put the root, and commit."""
        self.engine.put(NAME, data)
        self.engine.check_complete()
        with icechunk_errors(self.url, "looking at"):
            before = self.repo.lookup_snapshot(self.base).metadata
            dropped = dropped_in(self.repo) if KEY in before else ()
        metadata = following(before, self.base, self.version, self.engine.nbytes, dropped)
        message = (self.version and self.version[0]) or "tdstore"
        try:
            with self.location.committing(), icechunk_errors(self.url, "committing"):
                self.base = self.engine.base.session.commit(message, metadata)
        except ConflictError:
            self.lost = True
            raise
        self._root = data
        self.engine.ended()

    def publish(self, data: bytes, *, sync: bool) -> None:
        """Commit a new dataset: in place of what the branch had, or by making the new repository visible."""
        self.put_root(data, sync=sync)
        moved = self.location.publish(replace=not self._exclusive)
        if moved is not None:
            self.repo = moved
        self.engine.littered = True  # a writer that was killed may have left objects
        self.published = True

    def settled(self, document: Document) -> None:
        """Do nothing: what this commit replaced belongs to the history."""

    def holder(self, mark: Mark | None) -> str | None:
        """Return None: a writer does not exclude others."""
        return None

    def remove(self, node: str, keys: Iterable[str]) -> None:
        """Remove a node; its chunks go with it."""
        self.engine.delete([f"{node}/{NAME}"])

    def close(self) -> None:
        """Release the location; a repository without a commit is removed."""
        if self.pid == os.getpid():
            try:
                if self._writing:
                    self._leave()
                if not self.published:
                    self.location.give_up()
            finally:
                self._writing = False
                self.location.close()


def tip_of(repo: icechunk.Repository, url: str) -> str:
    """Return the last snapshot of the branch."""
    with icechunk_errors(url, "looking at"):
        found: str = repo.lookup_branch(MAIN)
        return found
