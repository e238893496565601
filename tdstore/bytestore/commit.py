"""Commits of a byte store: one conditional put of the manifest, and the interpretation of its answer."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress

import msgspec

from tdstore.bytestore.manifest import OBJECT_NAME, VERSION_NAME, decode_objects, version_name
from tdstore.engine import Blob, Buffer, Engine, EngineCap
from tdstore.errors import (
    ConflictError,
    StoreError,
    StoreIOError,
    StoreNotFoundError,
    TransientError,
    UnsupportedError,
)
from tdstore.storekit.documents import MAX_FILE_BYTES, NAME
from tdstore.threads import without_interrupts

ATTEMPTS = 3
LONG_UPLOAD = 3600.0
"""After so many seconds a writer checks, before it commits, that all its objects still exist."""

SEAL_BYTES = 14
"""The length of a manifest's first line, which holds its version and checksum."""

_GENERATION = re.compile(rb'"generation":"([0-9a-f]{32})"')


class ManifestState(msgspec.Struct, frozen=True):
    """The manifest as observed: its generation (None: none, or not readable) and tag."""

    there: bool
    generation: str | None = None
    tag: str | None = None
    seal: bytes = b""
    """Its first line, with the checksum of all bytes."""


NOTHING_THERE = ManifestState(False)


def generation_of(data: bytes) -> str | None:
    """Return the generation named by a manifest of either layout."""
    found = _GENERATION.search(data, 0, 200)
    return found[1].decode() if found else None


def state_of(blob: Blob) -> ManifestState:
    """Return the state of a manifest that was fetched."""
    head = bytes(blob.data[:400])
    return ManifestState(True, generation_of(head), blob.tag, head[:SEAL_BYTES])


def fetch_manifest(engine: Engine) -> Blob | None:
    """Fetch the manifest of either layout, by one request; None if there is none."""
    try:
        return engine.get(NAME, MAX_FILE_BYTES)
    except StoreNotFoundError:
        return None


class MaintenanceError(ConflictError):
    """The list of versions was changed since, and the data was not: commit on top of that."""


class Publisher:
    """Put manifests, one generation after the other, and remove objects that no reader needs any more.

    Args:
        engine: the engine of the store.
        seen: the manifest when the store was opened.
        single_writer: the assurance of the caller that there is no other writer; needed where the storage has no
            conditional put.
    """

    def __init__(self, engine: Engine, url: str, seen: ManifestState, *, single_writer: bool, keep_old: float) -> None:
        self.engine = engine
        self.url = url
        self.seen = seen
        self.single_writer = single_writer
        self.keep_old = keep_old
        self.mine: dict[str, None] = {}
        """Objects that were put and are named by no manifest yet."""
        self.unconfirmed = False
        """A put may have succeeded, or succeed yet: nothing that it names may be removed."""
        self._first_upload = 0.0
        self._tried: dict[str, bytes] = {}
        """Generations that were put and whose answer never came, and their seals: one may be what is there."""

    # -- objects -------------------------------------------------------------------------
    def upload(self, objects: Sequence[tuple[str, Sequence[Buffer]]]) -> None:
        """Put new objects in parallel, each from its parts."""
        if not self.mine:
            self._first_upload = time.monotonic()
        self.mine |= dict.fromkeys(name for name, _ in objects)
        self.engine.put_parts(objects)

    def discard(self) -> None:
        """Remove the objects that were put for no commit. `collect` finds those that cannot be removed now."""
        if self.mine and not self.unconfirmed:
            self.remove(list(self.mine))
        self.mine.clear()

    def remove(self, names: Sequence[str]) -> None:
        """Remove objects that no reader needs; a failure leaves them for `collect`."""
        with suppress(StoreError):
            self.engine.delete(names)

    # -- the manifest --------------------------------------------------------------------
    def check_can_commit(self) -> None:
        """Refuse to put anything where two writers could not detect one another.

        Raises:
            UnsupportedError: no conditional put, and `single_writer` is not set.
        """
        if not self.single_writer and not self.engine.conditional():
            raise UnsupportedError(
                f"{self.url} has no conditional put here: of two writers that commit at once, one would be lost "
                "unnoticed",
                url=self.url,
                hint="if no other process writes there, pass single_writer=True; a process that was forked from one "
                "that uses obstore has none either: use spawn or forkserver",
            )

    def publish(
        self, data: bytes, generation: str, names: Iterable[str], expired: Sequence[str], adopt: Callable[[], None]
    ) -> None:
        """Make this manifest the present one.

        Args:
            data: the manifest.
            generation: its generation.
            names: the objects that it names.
            expired: objects of old generations to be removed afterwards.
            adopt: called as soon as the manifest is known to be the present one, after an interrupt, too.

        Raises:
            ConflictError: another writer committed since the store was opened; nothing was published.
            MaintenanceError: the list of versions was changed; nothing was published. `rebase`, and publish again.
            TransientError: it is unknown whether the manifest was published.
        """
        self.check_can_commit()
        self._check_objects()
        used = set(names)
        gone = [*(name for name in self.mine if name not in used), *expired]
        self._put(data, generation, adopt)
        if gone:
            self.remove(gone)

    def _put(self, data: bytes, generation: str, adopt: Callable[[], None]) -> None:
        conditional = self.engine.conditional()
        tried, self._tried = self._tried, {**self._tried, generation: data[:SEAL_BYTES]}
        try:
            self._confirm(self._attempt(data, generation, conditional, tried), adopt)
        except BaseException as error:
            if not isinstance(error, Exception) and generation in self._tried:
                self._look_for(generation, adopt)
            raise

    @without_interrupts
    def _confirm(self, now: ManifestState, adopt: Callable[[], None]) -> None:
        """Take a manifest of this writer for the present one: the objects that it names are no longer uncommitted."""
        self.seen = now
        self._tried = {}
        self.unconfirmed = False
        self.mine.clear()
        adopt()

    def _look_for(self, generation: str, adopt: Callable[[], None]) -> None:
        """Find out, after an interrupt, whether a manifest was put. If not, it may arrive yet."""
        self.unconfirmed = True
        with suppress(StoreError):
            if (now := self.look()).generation == generation:
                self._confirm(now, adopt)

    def _attempt(self, data: bytes, generation: str, conditional: bool, tried: Mapping[str, bytes]) -> ManifestState:
        for attempt in range(1, ATTEMPTS + 1):
            try:
                if not conditional:
                    self._compare(self.look(), tried)
                    tag = self.engine.put(NAME, data)
                elif self.seen.there:
                    tag = self.engine.put(NAME, data, if_match=self._tag())
                else:
                    tag = self.engine.put(NAME, data, if_absent=True)
                return ManifestState(True, generation, tag, data[:SEAL_BYTES])
            except MaintenanceError:
                raise
            except ConflictError as error:
                # Perhaps our own put arrived, its answer was lost, and the engine tried again.
                now = self.look()
                if now.generation == generation:
                    return now
                if now.generation is not None and now.generation in tried and attempt < ATTEMPTS:
                    self._check_seal(now, tried[now.generation])
                    self.seen = now  # an earlier commit of this writer, which was believed lost
                    continue
                if not self._unchanged(now):
                    self.unconfirmed = False  # a put of ours can no longer become the present one
                    raise self._lost(now) from error
                if now.tag != self.seen.tag:  # the same bytes may have been put again
                    raise self._maintained() from error
                raise
            except (TransientError, StoreIOError) as error:
                self.unconfirmed = self.unconfirmed or isinstance(error, TransientError)
                try:
                    now = self.look()
                except StoreError as second:
                    self.unconfirmed = True
                    raise self._unknown(error) from second
                if now.generation == generation:
                    return now
                self._compare(now, tried)
                if attempt == ATTEMPTS:
                    raise
        raise AssertionError("unreachable")

    def look(self) -> ManifestState:
        """Fetch the present manifest and return its generation and tag."""
        blob = fetch_manifest(self.engine)
        if blob is None:
            return NOTHING_THERE
        return state_of(blob)

    def rebase(self) -> bytes:
        """Start from the manifest that is there, whose list of versions was changed; returns it.

        Raises:
            ConflictError: another writer committed meanwhile.
        """
        blob = fetch_manifest(self.engine)
        now = NOTHING_THERE if blob is None else state_of(blob)
        if blob is None or (now.generation not in self._tried and not self._unchanged(now)):
            self.unconfirmed = False
            raise self._lost(now)
        self.seen = now
        return bytes(blob.data)

    def _check_seal(self, now: ManifestState, seal: bytes) -> None:
        if now.seal != seal:
            raise self._maintained()

    def _maintained(self) -> MaintenanceError:
        return MaintenanceError(f"the list of versions of {self.url} was changed", url=self.url)

    def _unchanged(self, now: ManifestState) -> bool:
        if now.there != self.seen.there:
            return False
        if now.generation is not None or self.seen.generation is not None:
            return now.generation == self.seen.generation
        return now.tag == self.seen.tag

    def _compare(self, now: ManifestState, tried: Mapping[str, bytes]) -> None:
        if now.generation is not None and now.generation in tried:
            self._check_seal(now, tried[now.generation])
            self.seen = now
        elif not self._unchanged(now):
            self.unconfirmed = False
            raise self._lost(now)
        else:
            self._check_seal(now, self.seen.seal)

    def _tag(self) -> str | None:
        if self.seen.tag is None:
            now = self.look()
            if not self._unchanged(now):
                raise self._lost(now)
            self.seen = now
        return self.seen.tag

    def _lost(self, now: ManifestState) -> ConflictError:
        if not now.there:
            what = "it was removed"
        elif self.seen.there:
            what = f"another writer committed generation {now.generation}"
        else:
            what = f"another writer made a store there (generation {now.generation})"
        return ConflictError(
            f"{self.url} cannot be committed: since it was opened {what}; nothing of this writer was published",
            url=self.url,
            hint="open it again, repeat the changes and commit; what was written can still be read from this store",
        )

    def _unknown(self, error: StoreError) -> TransientError:
        return TransientError(
            f"{self.url}: whether the commit was published is not known, the answer was lost and nobody answers "
            f"now ({error.message})",
            url=self.url,
            hint="commit once more, or open the store again and look",
        )

    def _check_objects(self) -> None:
        """Check that the objects still exist: a collector may have removed those of a slow writer as abandoned."""
        long_ago = self.mine and time.monotonic() - self._first_upload > LONG_UPLOAD
        if not long_ago or EngineCap.LIST not in self.engine.can:
            return
        prefix = next(iter(self.mine)).rpartition("-")[0]
        there = {entry.key for entry in self.engine.list(prefix)}
        missing = [name for name in self.mine if name not in there]
        if missing:
            raise StoreError(
                f"{self.url} cannot be committed: {len(missing)} objects of this writer were deleted ({missing[0]})",
                url=self.url,
                hint="collect(older_than=...) must be given more seconds than the longest save takes",
            )

    # -- old generations -----------------------------------------------------------------
    def collect(self, older_than: float) -> list[str]:
        """Remove objects that no manifest names and that are older than `older_than` seconds; returns their names."""
        limit = time.time() - older_than
        # Listed first: objects committed between the two requests are in the manifest that is read then.
        found = [e.key for e in self.engine.list("data/") if OBJECT_NAME.fullmatch(e.key) and e.modified <= limit]
        listed = self.engine.list("versions/")
        found += [e.key for e in listed if VERSION_NAME.fullmatch(e.key) and e.modified <= limit]
        named: set[str] = set(self.mine)
        blob = fetch_manifest(self.engine)
        if blob is not None:  # else nothing was ever committed: only this writer's objects are needed
            document = decode_objects(bytes(blob.data), url=self.url)
            for items in (document.objects, document.retired, document.held):
                named |= {item.name for item in items}
            named |= {version_name(version.id) for version in document.versions}
        doomed = [name for name in found if name not in named]
        if doomed:
            self.engine.delete(doomed)
        return doomed
