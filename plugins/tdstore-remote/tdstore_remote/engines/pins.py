"""Reads of objects that must not have changed: each request carries `If-Match` with the tag of the version."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tdstore.engine import Buffer
from tdstore_remote.engines import loop
from tdstore_remote.engines.clients import Client

MANY = 16
"""Ranges of one read for which a client is worth while that sends the header by itself."""


class Pins:
    """The tags of pinned objects, and how their ranges are requested.

    obstore's call for many ranges has no condition. One call for each range has, and takes four times the CPU. So
    a client is built whose requests all have the header. It has connections of its own: the first large read of an
    object goes without it.

    Args:
        obstore: the module.
        build: builds a client that sends the given headers; None where requests are signed with all their headers.
    """

    def __init__(self, obstore: Any, build: Callable[[Mapping[str, str]], Client] | None) -> None:
        self._obstore = obstore
        self._build = build
        self._tags: dict[str, str] = {}
        self._clients: dict[str, asyncio.Future[Client] | None] = {}

    def __contains__(self, key: str) -> bool:
        return key in self._tags

    def pin(self, tags: Mapping[str, str | None]) -> None:
        """Pin objects to the versions with these tags; one without a tag is not pinned."""
        for key, tag in tags.items():
            self.drop(key)
            if tag:
                self._tags[key] = tag

    def drop(self, key: str) -> None:
        """Forget the version of an object."""
        self._tags.pop(key, None)
        self._clients.pop(key, None)

    async def client(self, key: str, count: int) -> Client | None:
        """Return the client for a read of so many ranges; None where each is requested with its own condition."""
        if self._build is None or count < MANY or key not in self._tags:
            return None
        if key not in self._clients:
            self._clients[key] = None
            return None
        future = self._clients[key]
        if future is None:
            work = asyncio.to_thread(self._build, {"if-match": self._tags[key]})
            future = self._clients[key] = asyncio.ensure_future(work)
        try:
            return await asyncio.shield(future)
        except Exception:
            self._clients[key] = None  # built again by the next read
            raise

    async def read(
        self, reader: Any, client: Client | None, key: str, starts: Sequence[int], ends: Sequence[int]
    ) -> Sequence[Buffer]:
        """Read ranges of a pinned object.

        Args:
            reader: the client of the engine.
            client: what `client` returned.
            key: the object.
            starts: where the ranges begin.
            ends: where they end.

        Raises:
            obstore.exceptions.PreconditionError: the object has another version.
        """
        if client is not None:
            answers: Sequence[Buffer] = await self._obstore.get_ranges_async(
                client.store, key, starts=starts, ends=ends, coalesce=0
            )
            return answers
        condition = self._tags[key]
        asked = [
            self._obstore.get_async(reader, key, options={"range": (start, stop), "if_match": condition})
            for start, stop in zip(starts, ends, strict=True)
        ]
        found = await loop.gather_all(asked)
        return await loop.gather_all([answer.bytes_async() for answer in found])
