"""Engines that stand before another engine."""

from __future__ import annotations

import builtins
from abc import abstractmethod
from collections.abc import Iterator, Sequence

from tdstore.engine import Blob, Buffer, Ends, Engine, EngineCap, Entry
from tdstore.index.ranges import Range


class DelegatingEngine(Engine):
    """An engine that passes every request to `inner`; subclasses override what differs."""

    @property
    @abstractmethod
    def inner(self) -> Engine:
        """The engine that answers requests."""

    @property
    def can(self) -> EngineCap:
        """The abilities of the inner engine."""
        return self.inner.can

    @property
    def lanes(self) -> int:
        """The number of objects that the inner engine sends at once."""
        return self.inner.lanes

    def conditional(self) -> bool:
        """Check whether the inner engine has conditional puts."""
        return self.inner.conditional()

    def probed(self) -> tuple[bool, ...] | None:
        """Return what was found out about the server, as `Engine.probed` does."""
        return self.inner.probed()

    def accept_probed(self, found: tuple[bool, ...]) -> None:
        """Accept what another process found out, as `Engine.accept_probed` does."""
        self.inner.accept_probed(found)

    def sweep(self) -> None:
        """Remove what killed processes left, as `Engine.sweep` does."""
        self.inner.sweep()

    def get(self, key: str, limit: int | None = None) -> Blob:
        """Read an object, as `Engine.get` does."""
        return self.inner.get(key, limit)

    def get_ranges(self, ranges: Sequence[Range]) -> list[Buffer]:
        """Read ranges, as `Engine.get_ranges` does."""
        return self.inner.get_ranges(ranges)

    async def aget_ranges(self, ranges: Sequence[Range]) -> Sequence[Buffer]:
        """Read ranges, as `Engine.aget_ranges` does."""
        return await self.inner.aget_ranges(ranges)

    def size(self, key: str) -> int:
        """Return the size of an object, as `Engine.size` does."""
        return self.inner.size(key)

    def pin(self, keys: Sequence[str]) -> builtins.list[int]:
        """Pin objects, as `Engine.pin` does."""
        return self.inner.pin(keys)

    def pin_ends(self, key: str, nbytes: int) -> Ends:
        """Pin an object and read its ends, as `Engine.pin_ends` does."""
        return self.inner.pin_ends(key, nbytes)

    def put(self, key: str, data: Buffer, *, if_absent: bool = False, if_match: str | None = None) -> str | None:
        """Write an object, as `Engine.put` does."""
        return self.inner.put(key, data, if_absent=if_absent, if_match=if_match)

    def put_many(self, items: Sequence[tuple[str, Buffer]]) -> None:
        """Write objects, as `Engine.put_many` does."""
        self.inner.put_many(items)

    def put_parts(self, items: Sequence[tuple[str, Sequence[Buffer]]]) -> None:
        """Write objects, as `Engine.put_parts` does."""
        self.inner.put_parts(items)

    def delete(self, keys: Sequence[str]) -> None:
        """Delete objects, as `Engine.delete` does."""
        self.inner.delete(keys)

    def list(self, prefix: str = "") -> Iterator[Entry]:
        """List objects, as `Engine.list` does."""
        return self.inner.list(prefix)

    def where(self, key: str) -> str:
        """Return the URL of an object, as `Engine.where` does."""
        return self.inner.where(key)

    def close(self) -> None:
        """Close the inner engine, as `Engine.close` does."""
        self.inner.close()
