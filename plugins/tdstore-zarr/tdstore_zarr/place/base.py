"""Where a store is: how its root is read, replaced and published, and who may write.

`FolderPlace` (in `folderplace`) has locks and renames, `ObjectPlace` (in `objectplace`) conditional puts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any

from tdstore.engine import EngineCap
from tdstore.errors import DirtyStoreError, UnsupportedError
from tdstore_zarr.layout.document import NAME, Document, Mark
from tdstore_zarr.place.redo_log import LoggedEngine


class Place(ABC):
    """One location, opened."""

    url: str
    engine: LoggedEngine[Any]
    local: bool = False
    """Whether a request costs microseconds."""
    published: bool = True
    """False until a new store is committed for the first time: nobody sees it."""
    redo: bool = True
    """Whether the root is put before objects come to their places; else both happen in one step."""
    keys: tuple[str, str] = ("default", "/")
    """How keys of new chunks are encoded."""

    @abstractmethod
    def read_root(self) -> bytes:
        """The root's `zarr.json`; remembers which version it was.

        Raises:
            StoreNotFoundError: there is none.
        """

    @abstractmethod
    def take(self) -> None:
        """Become the one writer, in place.

        Raises:
            StoreBusyError: somebody else is, or has been since the root was read.
        """

    @abstractmethod
    def put_root(self, data: bytes, *, sync: bool) -> None:
        """Replace the root's `zarr.json`, in place."""

    @abstractmethod
    def publish(self, data: bytes, *, sync: bool) -> None:
        """Commit a new store for the first time: put it in the place of what is there."""

    def release(self) -> None:
        """Let others write: what was begun is committed."""

    def settled(self, document: Document) -> None:
        """Called after a commit: what the store before this one left can go."""

    def sync(self) -> None:
        """Wait until all that was put is on the medium."""

    @abstractmethod
    def holder(self, mark: Mark | None) -> str | None:
        """The writer that is at work now, if one is; `mark`: what the root says of one."""

    def changed(self) -> str | None:
        """What happened to the store since its root was read, where that can be told for free."""
        return None

    def stale(self) -> bool:
        """Whether the root is another one than was read; may ask for it."""
        return self.changed() is not None

    def forget(self) -> None:
        """Any object may be another one by now."""

    def remove(self, node: str, keys: Iterable[str]) -> None:
        """Remove a node, whose objects have these keys."""
        self.engine.delete([*keys, f"{node}/{NAME}"])

    def move(self, old: str, new: str, keys: Iterable[str]) -> bool:
        """Move a node and its objects, in a store that nobody sees yet; whether its metadata went along."""
        moved = list(keys)
        for key in moved:
            self.engine.put(new + key[len(old) :], self.engine.get(key).data)
        self.engine.delete([*moved, f"{old}/{NAME}"])
        return False

    @abstractmethod
    def close(self) -> None:
        """Let go; what was not published vanishes."""

    def needs_list(self) -> UnsupportedError | None:
        """The error for a store that can only be opened where objects can be listed, if they cannot."""
        if EngineCap.LIST in self.engine.can:
            return None
        return UnsupportedError(
            f"{self.url} has no consolidated metadata, and its objects cannot be listed",
            url=self.url,
            hint="zarr.consolidate_metadata(store) where it can be written, or copy it here",
        )


def dirty(url: str, mark: Mark) -> DirtyStoreError:
    """The error for a store whose writer ended in the middle."""
    leaves = tuple(mark.leaves)
    names = ", ".join(" / ".join(map(repr, leaf)) for leaf in leaves[:5])
    more = f" and {len(leaves) - 5} more" if len(leaves) > 5 else ""
    return DirtyStoreError(
        f"{url}: a writer ({mark.who}) ended while it wrote {names or 'the structure'}{more}",
        leaves=leaves,
        url=url,
        hint="restore it from a copy, or take it as it is with recover='accept'",
    )
