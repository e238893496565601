"""Connections that are opened beside the first request, for the reads that follow it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from tdstore_remote.engines import loop
from tdstore_remote.engines.clients import Client


class Preconnect:
    """Open connections once: by requests that are cheap, sent beside the first one that a reader waits for.

    A client opens a connection for each request for which it has none that is free. A new connection costs as long as
    a request, or twice as long with TLS. So reads that follow the first request would wait for theirs.

    Args:
        client: whose connections they are; those that another engine opened with it are not opened again.
        connections: how many to open, besides that of the first request.
        request: requests something small of the object with a key.
        errors: what a request may raise.
    """

    def __init__(
        self,
        client: Client,
        connections: int,
        request: Callable[[str], Awaitable[Any]],
        errors: tuple[type[BaseException], ...],
    ) -> None:
        self._client = client
        self._left = connections
        self._request, self._errors = request, errors

    def beside(self, key: str) -> None:
        """Open the connections, unless they were opened before. Nobody waits for them.

        Args:
            key: the object that the first request reads.
        """
        connections, self._left = self._left, 0
        connections -= self._client.preconnected
        self._client.preconnected += max(0, connections)
        for _ in range(connections):
            loop.submit_in_background(self._open(key))

    async def _open(self, key: str) -> None:
        try:
            await self._request(key)
        except self._errors:
            # A server that answers with an error keeps the connection; and the first request tells what is wrong.
            return
