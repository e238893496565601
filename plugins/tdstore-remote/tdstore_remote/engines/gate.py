"""A limit on the concurrent requests of an engine, which begin in the order of their calls."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

FEW = 16
"""Requests that may be under way whatever their size."""


class Gate:
    """Let requests of all threads begin in their order, as many at a time as a connection can handle.

    The first call gets its answers first: reading ahead does not delay the batch for which the caller is waiting.

    Args:
        requests: the largest number of concurrent requests.
        nbytes: about the largest number of bytes of concurrent requests.
    """

    def __init__(self, requests: int, nbytes: int) -> None:
        self._limits = requests, nbytes
        self._waiting: deque[tuple[int, int, asyncio.Future[None]]] = deque()
        self.requests = self.nbytes = 0

    @asynccontextmanager
    async def pass_(self, requests: int, nbytes: int) -> AsyncIterator[None]:
        """Wait for a turn; requests may be sent in the body.

        Args:
            requests: the number of requests.
            nbytes: the bytes of their answers.
        """
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((requests, nbytes, turn))
        self._admit()
        try:
            await turn
            yield
        finally:
            if turn.done() and not turn.cancelled():
                self.requests -= requests
                self.nbytes -= nbytes
            self._admit()

    def _admit(self) -> None:
        most, most_bytes = self._limits
        while self._waiting:
            requests, nbytes, turn = self._waiting[0]
            full = self.requests + requests > most or (self.requests >= FEW and self.nbytes + nbytes > most_bytes)
            if not turn.cancelled() and full and self.requests:
                return
            self._waiting.popleft()
            if not turn.cancelled():
                self.requests += requests
                self.nbytes += nbytes
                turn.set_result(None)
