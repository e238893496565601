"""The location of a store: how its root is read, replaced and published, and how writers exclude one another.

`FolderPlace` has locks and renames, `ObjectPlace` conditional puts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

from tdstore.engine import EngineCap
from tdstore.errors import StoreNotFoundError, UnsupportedError
from tdstore_zarr.layout.document import NAME, Document, Mark
from tdstore_zarr.place.redo_log import LoggedEngine


def no_group(url: str, is_there: Callable[[str], bool] | None) -> StoreNotFoundError:
    """Create the error for a location without a group of zarr v3, which says whether there is one of v2.

    Args:
        url: the location, for messages.
        is_there: checks for an object of a name; None: no object is checked.
    """
    message = f"{url} holds no zarr v3 group: there is no {NAME}"
    if is_there is None or not any(map(is_there, (".zgroup", ".zarray"))):
        return StoreNotFoundError(message, url=url)
    return StoreNotFoundError(
        f"{message} (but that of zarr v2)",
        url=url,
        hint="`zarr migrate v3 PLACE` (pip install 'zarr[cli]') adds documents of v3 and leaves all chunks as they are",
    )


class Place(ABC):
    """One location, opened."""

    url: str
    engine: LoggedEngine[Any]
    local: bool = False
    """Whether a request costs microseconds."""
    published: bool = True
    """False until a new store is committed for the first time."""
    redo: bool = True
    """Whether the root is put before objects come to their places; else both happen in one step."""
    keys: tuple[str, str] = ("default", "/")
    """How keys of new chunks are encoded."""

    @abstractmethod
    def read_root(self) -> bytes:
        """Read the root's `zarr.json`, and record its version.

        Raises:
            StoreNotFoundError: there is none.
        """

    @abstractmethod
    def newest_root(self) -> bytes:
        """Read the current `zarr.json` of the location, and record nothing.

        Raises:
            StoreNotFoundError: there is none.
        """

    @abstractmethod
    def take(self) -> None:
        """Become the only writer, in place.

        Raises:
            StoreBusyError: another writer is active, or has been since the root was read.
        """

    @abstractmethod
    def put_root(self, data: bytes, *, sync: bool) -> None:
        """Replace the root's `zarr.json`, in place."""

    @abstractmethod
    def publish(self, data: bytes, *, sync: bool) -> None:
        """Commit a new store for the first time: put it in the place of an earlier one."""

    def release(self) -> None:
        """Let others write, after a commit."""

    def settled(self, document: Document) -> None:
        """Clean up after a commit: the remains of the previous store can be removed."""

    def sync(self) -> None:
        """Wait until all puts are on the storage."""

    @abstractmethod
    def holder(self, mark: Mark | None) -> str | None:
        """Describe the active writer, if there is one; `mark`: the marker in the root."""

    def changed(self) -> str | None:
        """Describe a change of the store since its root was read, if that can be found without a request."""
        return None

    def stale(self) -> bool:
        """Check whether the root differs from the one that was read; may cost a request."""
        return self.changed() is not None

    def forget(self) -> None:
        """Drop caches: any object may have changed."""

    def remove(self, node: str, keys: Iterable[str]) -> None:
        """Remove a node, whose objects have these keys."""
        self.engine.delete([*keys, f"{node}/{NAME}"])

    def move(self, old: str, new: str, keys: Iterable[str]) -> bool:
        """Move a node and its objects, in an unpublished store; return whether its metadata moved, too."""
        moved = list(keys)
        for key in moved:
            self.engine.put(new + key[len(old) :], self.engine.get(key).data)
        self.engine.delete([*moved, f"{old}/{NAME}"])
        return False

    @abstractmethod
    def close(self) -> None:
        """Release the location; an unpublished store is removed."""

    def needs_list(self) -> UnsupportedError | None:
        """Build the error for a store that can only be opened if objects can be listed, when they cannot."""
        if EngineCap.LIST in self.engine.can:
            return None
        return UnsupportedError(
            f"{self.url} has no consolidated metadata, and its objects cannot be listed",
            url=self.url,
            hint="zarr.consolidate_metadata(store) where it can be written, or copy it here",
        )
