"""The part of `tdstore.delete` for repositories: one that nobody writes is removed with its history."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tdstore.storekit import refusals
from tdstore_icechunk.bucket import BucketLocation, location_of, own_keys, remove_objects
from tdstore_icechunk.location import FolderLocation
from tdstore_icechunk.store import open_icechunk


def remove_icechunk(
    location: str, *, storage_options: Mapping[str, Any] | None = None, lock_timeout: float = 0.0
) -> object:
    """Remove a repository.

    Args:
        location: a folder, or a URL of S3.
        storage_options: as in `open_icechunk`.
        lock_timeout: seconds to wait for a commit of another process.

    Returns:
        `NotImplemented` for a folder, which the core removes.

    Raises:
        StoreNotFoundError: there is no repository. StoreBusyError: another writer has uncommitted changes.
        StoreExistsError: there are objects of another program, or a repository without a dataset of tdstore.
    """
    place = location_of(location, storage_options, lock_timeout)
    if isinstance(place, FolderLocation):
        if place.open() is not None and place.is_written():
            raise refusals.busy(place.url, "another writer", lock_timeout)
        return NotImplemented
    assert isinstance(place, BucketLocation)
    with open_icechunk(location, storage_options=storage_options) as store:
        if not store._session.document.ours:
            raise refusals.other_kind(store.url, "a repository of another program")
    with place.engine() as engine:
        own_keys(engine, place.url)
        remove_objects(engine)
    return None
