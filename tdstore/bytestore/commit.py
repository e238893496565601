"""Commits of a byte store: one conditional put of the manifest, and the interpretation of its answer."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from tdstore.bytestore.manifest import OBJECT_NAME, Document, Retired, decode_objects
from tdstore.engine import Blob, Engine, EngineCap
from tdstore.errors import (
    ConflictError,
    StoreError,
    StoreIOError,
    StoreNotFoundError,
    TransientError,
    UnsupportedError,
)
from tdstore.storekit.documents import MAX_FILE_BYTES, NAME

ATTEMPTS = 3
LONG_UPLOAD = 3600.0
"""After so many seconds a writer checks, before it commits, that all its objects still exist."""

_GENERATION = re.compile(rb'"generation":"([0-9a-f]{32})"')


@dataclass(frozen=True, slots=True)
class ManifestState:
    """The manifest as observed: its generation (None: none, or not readable) and tag."""

    there: bool
    generation: str | None = None
    tag: str | None = None


NOTHING_THERE = ManifestState(False)


def generation_of(data: bytes) -> str | None:
    """Return the generation named by a manifest of either layout."""
    found = _GENERATION.search(data, 0, 200)
    return found[1].decode() if found else None


def fetch_manifest(engine: Engine) -> Blob | None:
    """Fetch the manifest of either layout, by one request; None if there is none."""
    try:
        return engine.get(NAME, MAX_FILE_BYTES)
    except StoreNotFoundError:
        return None


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
        self._tried: set[str] = set()
        """Generations that were put and whose answer never came: one of them may be what is there."""

    # -- objects -------------------------------------------------------------------------
    def upload(self, objects: Sequence[tuple[str, bytes]]) -> None:
        """Put new objects in parallel."""
        if not self.mine:
            self._first_upload = time.monotonic()
        self.mine |= dict.fromkeys(name for name, _ in objects)
        self.engine.put_many(objects)

    def discard(self) -> None:
        """Remove the objects that were put for no commit. `collect` finds those that cannot be removed now."""
        if self.mine and not self.unconfirmed:
            self._remove(list(self.mine))
        self.mine.clear()

    def _remove(self, names: Sequence[str]) -> None:
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

    def publish(self, data: bytes, generation: str, names: Iterable[str], expired: Sequence[str]) -> None:
        """Make this manifest the present one.

        Args:
            data: the manifest.
            generation: its generation.
            names: the objects that it names.
            expired: objects of old generations to be removed afterwards.

        Raises:
            ConflictError: another writer committed since the store was opened; nothing was published.
            TransientError: it is unknown whether the manifest was published.
        """
        self.check_can_commit()
        self._check_objects()
        self._put(data, generation)
        used = set(names)
        gone = [name for name in self.mine if name not in used]
        self.mine.clear()
        if gone or expired:
            self._remove([*gone, *expired])

    def _put(self, data: bytes, generation: str) -> None:
        conditional = self.engine.conditional()
        tried, self._tried = self._tried, {*self._tried, generation}
        self._attempt(data, generation, conditional, tried)
        self._tried = set()
        self.unconfirmed = False

    def _attempt(self, data: bytes, generation: str, conditional: bool, tried: set[str]) -> None:
        for attempt in range(1, ATTEMPTS + 1):
            try:
                if not conditional:
                    self._compare(self.look(), tried)
                    tag = self.engine.put(NAME, data)
                elif self.seen.there:
                    tag = self.engine.put(NAME, data, if_match=self._tag())
                else:
                    tag = self.engine.put(NAME, data, if_absent=True)
                self.seen = ManifestState(True, generation, tag)
                return
            except ConflictError as error:
                # Perhaps our own put arrived, its answer was lost, and the engine tried again.
                now = self.look()
                if now.generation == generation:
                    self.seen = now
                    return
                if now.generation in tried and attempt < ATTEMPTS:
                    self.seen = now  # an earlier commit of this writer, which was believed lost
                    continue
                if not self._unchanged(now):
                    self.unconfirmed = False  # a put of ours can no longer become the present one
                    raise self._lost(now) from error
                raise
            except (TransientError, StoreIOError) as error:
                self.unconfirmed = self.unconfirmed or isinstance(error, TransientError)
                try:
                    now = self.look()
                except StoreError as second:
                    self.unconfirmed = True
                    raise self._unknown(error) from second
                if now.generation == generation:
                    self.seen = now
                    return
                self._compare(now, tried)
                if attempt == ATTEMPTS:
                    raise

    def look(self) -> ManifestState:
        """Fetch the present manifest and return its generation and tag."""
        blob = fetch_manifest(self.engine)
        if blob is None:
            return NOTHING_THERE
        return ManifestState(True, generation_of(bytes(blob.data[:400])), blob.tag)

    def _unchanged(self, now: ManifestState) -> bool:
        if now.there != self.seen.there:
            return False
        if now.generation is not None or self.seen.generation is not None:
            return now.generation == self.seen.generation
        return now.tag == self.seen.tag

    def _compare(self, now: ManifestState, tried: set[str]) -> None:
        if now.generation in tried:
            self.seen = now
        elif not self._unchanged(now):
            self.unconfirmed = False
            raise self._lost(now)

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
    def retire(
        self, before: Document | None, in_use: Iterable[str], now: float | None = None
    ) -> tuple[list[Retired], list[str]]:
        """Return the objects of earlier generations to list in the next manifest, and those that have expired."""
        if before is None:
            return [], []
        moment = int(time.time() if now is None else now)
        used = set(in_use)
        old = [Retired(o.name, o.size, moment) for o in before.objects if o.name not in used]
        old += [r for r in before.retired if r.name not in used]
        unexpired = [r for r in old if r.since + self.keep_old > moment]
        return unexpired, [r.name for r in old if r.since + self.keep_old <= moment]

    def collect(self, older_than: float) -> list[str]:
        """Remove objects that no manifest names and that are older than `older_than` seconds; returns their names."""
        limit = time.time() - older_than
        # Listed first: objects committed between the two requests are in the manifest that is read then.
        found = [e.key for e in self.engine.list("data/") if OBJECT_NAME.fullmatch(e.key) and e.modified <= limit]
        named: set[str] = set(self.mine)
        blob = fetch_manifest(self.engine)
        if blob is not None:  # else nothing was ever committed: only this writer's objects are needed
            document = decode_objects(bytes(blob.data), url=self.url)
            named |= {o.name for o in document.objects} | {r.name for r in document.retired}
        doomed = [name for name in found if name not in named]
        if doomed:
            self.engine.delete(doomed)
        return doomed
