"""A bucket behind a slow wire, in a process of its own: nginx answers the GETs of S3, and a relay delays its bytes.

nginx serves a folder as buckets and keys, and does not look at signatures. It answers some thousands of requests a
second, of which an imitation of S3 in Python answers some hundreds: what is measured is then the reader.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.servers import S3Server, http_nginx

BUCKET = "bucket"


class End(asyncio.Protocol):
    """One end of a connection: what it receives, the other end sends half a latency later."""

    def __init__(self, half: float) -> None:
        self.half = half
        self.other: End | None = None
        self.transport: asyncio.Transport | None = None
        self.early: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        for data in self.early:
            transport.write(data)

    def data_received(self, data: bytes) -> None:
        assert self.other is not None
        asyncio.get_running_loop().call_later(self.half, self.other.send, data)

    def send(self, data: bytes) -> None:
        if self.transport is None:
            self.early.append(data)
        elif not self.transport.is_closing():
            self.transport.write(data)

    def connection_lost(self, error: Exception | None) -> None:
        other = self.other
        if other is not None:
            asyncio.get_running_loop().call_later(self.half, lambda: other.transport and other.transport.close())


class Client(End):
    """The end at the client, whose first bytes wait for one latency more: the handshake."""

    def __init__(self, half: float, port: int) -> None:
        super().__init__(half)
        self.port = port
        self.opened = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        loop = asyncio.get_running_loop()
        self.opened = loop.time() + 2 * self.half
        self.other = End(self.half)
        self.other.other = self
        self.connecting = loop.create_task(loop.create_connection(lambda: self.other or End(0), "127.0.0.1", self.port))

    def data_received(self, data: bytes) -> None:
        assert self.other is not None
        loop = asyncio.get_running_loop()
        loop.call_at(max(loop.time(), self.opened) + self.half, self.other.send, data)


def _serve(pipe: Connection, folder: str, milliseconds: float) -> None:
    async def run(port: int) -> None:
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: Client(milliseconds / 2000, port), "127.0.0.1", 0, backlog=512)
        pipe.send(server.sockets[0].getsockname()[1])
        await loop.run_in_executor(None, pipe.poll, None)

    with http_nginx(folder) as web:
        asyncio.run(run(web.port))


@contextmanager
def slow_bucket(folder: Path, milliseconds: float) -> Iterator[S3Server]:
    """Serve `folder/bucket` as an S3 bucket, read only, each request of which costs a latency.

    Args:
        folder: where the bucket is; others may read it.
        milliseconds: what a request costs. A new connection costs as much.
    """
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=_serve, args=(theirs, str(folder), milliseconds), daemon=True)
    process.start()
    theirs.close()
    try:
        yield S3Server(f"http://127.0.0.1:{ours.recv()}", "key", "secret", BUCKET)
    finally:
        ours.send(None)
        process.join(10)
