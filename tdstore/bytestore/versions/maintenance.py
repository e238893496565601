"""Changes of the list of versions alone: the manifest is put again with its generation, on its condition.

A writer whose manifest was replaced so commits on top of it: see `Publisher.rebase`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import msgspec

from tdstore.bytestore.commit import ATTEMPTS, SEAL_BYTES, ManifestState, Publisher, fetch_manifest, state_of
from tdstore.bytestore.manifest import Document, decode_objects, encode_objects, version_name
from tdstore.bytestore.versions.records import split_expired, with_tag, without_versions
from tdstore.engine import Engine
from tdstore.errors import ConflictError, CorruptStoreError, StoreNotFoundError, TransientError
from tdstore.storekit import refusals
from tdstore.storekit.documents import MAX_FILE_BYTES, NAME
from tdstore.threads import ThreadPool

RIVALS = 16
"""Attempts where other writers replace the manifest meanwhile."""
Change = Callable[[Document], tuple[Document, Sequence[str]]]
"""From a manifest to the one that replaces it, and the objects to be removed afterwards."""


def load_document(engine: Engine, url: str) -> tuple[Document, ManifestState]:
    """Fetch the present manifest.

    Raises:
        StoreNotFoundError: the store was removed.
    """
    blob = fetch_manifest(engine)
    if blob is None:
        raise refusals.not_found(url)
    return decode_objects(bytes(blob.data), url=url), state_of(blob)


def maintain(publisher: Publisher, change: Change) -> tuple[Document, ManifestState]:
    """Apply a change to the current manifest, whichever writer put it.

    Raises:
        ConflictError: other writers replaced the manifest again and again.
        TransientError: it is unknown whether the change was published.
        UnsupportedError: the storage has no conditional put, and `single_writer` is not set.
    """
    publisher.check_can_commit()
    engine, url = publisher.engine, publisher.url
    for attempt in range(1, RIVALS + 1):
        document, state = load_document(engine, url)
        fresh, doomed = change(document)
        data = encode_objects(fresh, url=url)
        if data[:SEAL_BYTES] == state.seal:  # nothing changes
            return document, state
        try:
            after = _put(engine, data, state)
        except ConflictError:
            if attempt == RIVALS:
                raise
            continue
        if doomed:
            publisher.remove(doomed)
        return fresh, after
    raise AssertionError("unreachable")


def _put(engine: Engine, data: bytes, state: ManifestState) -> ManifestState:
    """Put a manifest in place of the one that was read; an answer that was lost is looked up."""
    conditional = engine.conditional()
    for attempt in range(1, ATTEMPTS + 1):
        try:
            tag = engine.put(NAME, data, if_match=state.tag) if conditional else engine.put(NAME, data)
            return ManifestState(True, state.generation, tag, data[:SEAL_BYTES])
        except (ConflictError, TransientError) as error:
            blob = fetch_manifest(engine)
            if blob is not None and bytes(blob.data[:SEAL_BYTES]) == data[:SEAL_BYTES]:
                return state_of(blob)
            if isinstance(error, ConflictError) or attempt == ATTEMPTS:
                raise
    raise AssertionError("unreachable")


def tagging(url: str, tag: str, version: str | None) -> Change:
    """Return the change that gives a tag to a version; None takes the tag away."""

    def change(document: Document) -> tuple[Document, Sequence[str]]:
        if version is not None and version not in {record.id for record in document.versions}:
            raise refusals.no_version(url, version)
        return with_tag(document, tag, version), ()

    return change


class Pruning:
    """The change that drops versions and removes what expired.

    Args:
        publisher: of the store.
        ids: the versions; those that have a tag stay.
        grace: seconds for which their objects stay.
    """

    def __init__(self, publisher: Publisher, ids: Sequence[str], grace: float) -> None:
        self.dropped: list[str] = []
        self._publisher = publisher
        self._ids = set(ids)
        self._grace = grace
        self._names: dict[str, frozenset[str]] = {}

    def __call__(self, document: Document) -> tuple[Document, Sequence[str]]:
        """Return the manifest without the versions, and what is to be removed."""
        now = time.time()
        self.dropped = [record.id for record in document.versions if record.id in self._ids and not record.tags]
        if self.dropped:
            rest = [record.id for record in document.versions if record.id not in self.dropped]
            document = without_versions(document, self.dropped, self._named(rest), grace=self._grace, now=now)
        retired, expired = split_expired(document.retired, keep_old=self._publisher.keep_old, now=now)
        return (msgspec.structs.replace(document, retired=retired) if expired else document), expired

    def _named(self, versions: Sequence[str]) -> set[str]:
        missing = [version for version in versions if version not in self._names]
        with ThreadPool(8) as pool:
            self._names |= dict(zip(missing, pool.map(self._objects, missing), strict=True))
        return set().union(*(self._names[version] for version in versions))

    def _objects(self, version: str) -> frozenset[str]:
        engine, url = self._publisher.engine, self._publisher.url
        try:
            blob = engine.get(version_name(version), MAX_FILE_BYTES)
        except StoreNotFoundError as error:
            raise CorruptStoreError(
                f"{url}: the manifest of the version {version} is missing; nothing was pruned", url=url
            ) from error
        return frozenset(record.name for record in decode_objects(bytes(blob.data), url=url).objects)
