"""Just enough of HTTP/1.1 to know where a message ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass


@dataclass
class Head:
    """The first line and the headers of a message, and their bytes as they came."""

    raw: bytes
    first: list[str]
    headers: dict[str, str]

    @property
    def chunked(self) -> bool:
        return "chunked" in self.headers.get("transfer-encoding", "").lower()

    @property
    def length(self) -> int | None:
        value = self.headers.get("content-length")
        return None if value is None else int(value)

    @property
    def closes(self) -> bool:
        connection = self.headers.get("connection", "").lower()
        return connection == "close" or ("HTTP/1.0" in self.first and connection != "keep-alive")

    def without(self, name: str) -> bytes:
        """Return the bytes but for one header."""
        lines = self.raw.split(b"\r\n")
        return b"\r\n".join(line for line in lines if not line.lower().startswith(name.encode() + b":"))


async def read_head(reader: asyncio.StreamReader) -> Head | None:
    """Read up to the empty line; None where the connection ended before a message began."""
    try:
        raw = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError as error:
        if error.partial.strip():
            raise ConnectionResetError("the connection ended within the headers") from error
        return None
    first, *lines = raw[:-4].decode("latin-1").split("\r\n")
    pairs = (line.partition(":") for line in lines)
    return Head(raw, first.split(" ", 2), {name.strip().lower(): value.strip() for name, _, value in pairs})


async def body(reader: asyncio.StreamReader, head: Head, *, to_end: bool) -> AsyncIterator[bytes]:
    """Yield the bytes of a body as they come, chunk marks and all. `to_end`: without a length, all until the end."""
    if head.chunked:
        while True:
            line = await reader.readuntil(b"\r\n")
            size = int(line.split(b";")[0], 16)
            if not size:
                # trailers, or nothing, then an empty line
                while (more := await reader.readuntil(b"\r\n")) != b"\r\n":
                    line += more
                yield line + more
                return
            yield line + await reader.readexactly(size + 2)
    left = head.length
    if left is None and not to_end:
        return
    while left is None or left > 0:
        data = await reader.read(65536 if left is None else min(left, 65536))
        if not data:
            if left is None:
                return
            raise ConnectionResetError("the connection ended within the body")
        if left is not None:
            left -= len(data)
        yield data
