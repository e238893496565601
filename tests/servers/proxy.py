"""A proxy before a server: latency, a bandwidth, scripted faults, and a count of what went through.

The idea of its latency: each piece of data is due some time after it came, so waiting does not narrow the stream.
A request costs one latency, half of it on the way there and half on the way back; a new connection costs one more.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import socket
import struct
import termios
import threading
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Coroutine
from types import TracebackType
from typing import Any

from tests.servers.faults import Fault, Request, Script, count_rounds
from tests.servers.process import LOOPBACK
from tests.servers.wire import Head, body, read_head

REASONS = {403: "Forbidden", 404: "Not Found", 429: "Too Many Requests", 500: "Internal Server Error"}
REMEMBERED = 64  # answers kept for stale(), of at most 1 MiB each
Pair = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class _Cut(Exception):
    """This client connection ends now. `reset`: with a reset instead of an orderly end."""

    def __init__(self, *, reset: bool) -> None:
        self.reset = reset


class _Line:
    """One direction of the link, which all connections share: data are let through at so many bytes a second."""

    def __init__(self) -> None:
        self.free = 0.0

    async def wait(self, size: int, due: float, bandwidth: float) -> None:
        if bandwidth:
            self.free = max(self.free, time.monotonic()) + size / bandwidth
            due = max(due, self.free)
        wait = due - time.monotonic()
        if wait > 0:
            await asyncio.sleep(wait)


class FaultProxy:
    """Run a proxy to a loopback port in a thread: `with FaultProxy(server.port, latency_ms=20) as proxy: proxy.port`.

    `latency_ms` is what a request costs, `bandwidth` the bytes a second of each direction, all connections together
    (0: no limit); both may be set while it runs. `raw=True` is for what is not HTTP (redis): bytes both ways.

    Faults are set by methods, at any time, each returning its Fault (`.hits`); `clear()` ends all. The keywords
    `method=`, `path=` (regular expressions), `nth=`, `every=` and `times=` say which requests: see Fault.
    With raw=True only `reset`, `short` and `stall` exist; they count the bytes sent to any client since they were set.
    """

    def __init__(self, target: int, *, latency_ms: float = 0, bandwidth: float = 0, raw: bool = False) -> None:
        self.target, self.latency_ms, self.bandwidth, self.raw = target, latency_ms, bandwidth, raw
        self.requests: list[Request] = []
        self.connections = 0
        self.refusing = False
        self._script = Script()
        self._up, self._down = _Line(), _Line()
        self._raw_down = 0
        self._clients: dict[asyncio.Task[Any], asyncio.StreamWriter] = {}
        self._remembered: OrderedDict[tuple[str, str, str], tuple[Head, bytes]] = OrderedDict()

    # -- faults ------------------------------------------------------------------------------
    def answer(self, status: int, *, retry_after: float | None = None, **which: Any) -> Fault:
        """Answer with this status instead of asking the server."""
        return self._add("answer", status=status, retry_after=retry_after, **which)

    def reset(self, after: int = 0, **which: Any) -> Fault:
        """Reset the connection after so many bytes of the answer's body (0: after its headers)."""
        return self._add("reset", after=after, **which)

    def short(self, after: int = 0, **which: Any) -> Fault:
        """End the connection in order after so many bytes of the body, though Content-Length promised more."""
        return self._add("short", after=after, **which)

    def stall(self, after: int | None = None, **which: Any) -> Fault:
        """Say nothing any more after so many bytes of the body; None: ask the server nothing and never answer."""
        return self._add("stall", after=after, **which)

    def flip(self, at: int = 0, **which: Any) -> Fault:
        """Flip all bits of the body's byte at this offset."""
        return self._add("flip", after=at, **which)

    def stale(self, **which: Any) -> Fault:
        """Repeat the last answer to the same GET or HEAD (path and range) from before this was set, if there is one."""
        return self._add("stale", **which)

    def drop_ack(self, **which: Any) -> Fault:
        """Let the server do what it is asked, then reset the connection instead of answering."""
        return self._add("drop_ack", **which)

    def clear(self) -> None:
        """End all faults. What is stalled stays so; `cut()` ends it."""
        self._script.clear()

    def cut(self) -> None:
        """Reset every connection that is open now."""

        async def cut() -> None:
            for task, writer in list(self._clients.items()):
                _abort(writer)
                task.cancel()

        self._call(cut())

    def refuse(self, on: bool = True) -> None:
        """Reset new connections at once, as when the server is down."""
        self.refusing = on

    def _add(self, kind: str, **fields: Any) -> Fault:
        if self.raw and kind not in ("reset", "short", "stall"):
            raise ValueError(f"a raw proxy does not know answers: {kind} is for HTTP")
        if self.raw and fields.get("after") is None:
            fields["after"] = 0
        return self._script.add(Fault(kind, **fields))

    # -- what it saw -------------------------------------------------------------------------
    @property
    def url(self) -> str:
        return f"{'redis' if self.raw else 'http'}://{LOOPBACK}:{self.port}"

    @property
    def bytes_sent(self) -> int:
        """Bytes of bodies (raw: of everything) that went to clients."""
        return self._raw_down if self.raw else sum(r.sent for r in self.requests)

    def rounds(self) -> int:
        """Return how many rounds of requests waited for each other: see count_rounds."""
        return count_rounds(self.requests)

    def forget(self) -> None:
        """Start counting anew."""
        self.requests = []
        self._raw_down = 0
        self.connections = 0

    # -- running -----------------------------------------------------------------------------
    def __enter__(self) -> FaultProxy:
        self._loop = asyncio.new_event_loop()
        self._listener = socket.create_server((LOOPBACK, 0), backlog=512)
        # asyncio sets it only on sockets made with the protocol spelled out; accepted ones inherit it.
        self._listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.port = int(self._listener.getsockname()[1])
        self._thread = threading.Thread(target=self._run, name=f"FaultProxy:{self.port}", daemon=True)
        self._started = threading.Event()
        self._thread.start()
        self._started.wait()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._call(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _call(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        start = asyncio.start_server(self._serve, sock=self._listener, limit=1 << 20)
        self._server = self._loop.run_until_complete(start)
        self._started.set()
        self._loop.run_forever()

    async def _stop(self) -> None:
        self._server.close()
        tasks = list(self._clients)
        for writer in self._clients.values():
            _abort(writer)
        for task in tasks:
            task.cancel()
        rest = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        await asyncio.gather(*rest, return_exceptions=True)

    @property
    def _half(self) -> float:
        return self.latency_ms / 2000

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._clients[task] = writer
        self.connections += 1
        # drain() then waits until the kernel has everything
        writer.transport.set_write_buffer_limits(0)
        try:
            if self.refusing:
                raise _Cut(reset=True)
            await asyncio.sleep(2 * self._half)  # the handshake
            await (self._raw_both(reader, writer) if self.raw else self._http(reader, writer))
        except _Cut as cut:
            if cut.reset:
                await _sent(writer)
                _abort(writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            _abort(writer)  # one side is gone: so is the other
        except asyncio.CancelledError:
            if not writer.transport.is_closing():
                raise
        finally:
            writer.close()
            del self._clients[task]

    # -- HTTP --------------------------------------------------------------------------------
    async def _http(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with contextlib.AsyncExitStack() as stack:
            upstream = await self._connect(stack)
            while (head := await read_head(reader)) is not None:
                if upstream[0].at_eof():  # the server ended an idle connection: that is not the client's concern
                    upstream = await self._connect(stack)
                if not await self._request(head, reader, writer, upstream):
                    return

    async def _connect(self, stack: contextlib.AsyncExitStack) -> Pair:
        upstream = await asyncio.open_connection(LOOPBACK, self.target, limit=1 << 20)
        stack.callback(upstream[1].close)
        return upstream

    async def _request(
        self, head: Head, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, upstream: Pair
    ) -> bool:
        request = Request(head.first[0], head.first[1], head.headers.get("range", ""), time.monotonic())
        self.requests.append(request)
        try:
            if "expect" in head.headers:
                writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            sent = b"".join([piece async for piece in body(reader, head, to_end=False)])
            request.received = len(sent)
            await self._up.wait(len(sent), request.start + self._half, self.bandwidth)
            return await self._one(request, head, sent, writer, upstream)
        finally:
            request.end = time.monotonic()

    async def _one(
        self, request: Request, head: Head, sent: bytes, writer: asyncio.StreamWriter, upstream: Pair
    ) -> bool:
        """Handle one request; return whether the connections go on."""
        fault = self._script.choose(request.method, request.path)
        request.fault = fault.kind if fault else ""
        if fault and fault.kind == "answer":
            await self._answer(request, fault, writer)
            return not head.closes
        if fault and fault.kind == "stall" and fault.after is None:
            await asyncio.Event().wait()
        key = (request.method, request.path, request.range)
        if fault and fault.kind == "stale" and key in self._remembered:
            answer, old = self._remembered[key]
            request.status = int(answer.first[1])
            await self._send(request, writer, answer, _once(old), None)
            return not (answer.closes or head.closes)
        upstream[1].write(head.without("expect") + sent)
        await upstream[1].drain()
        first = await read_head(upstream[0])
        while first is not None and first.first[1] == "100":
            first = await read_head(upstream[0])
        if first is None:
            raise ConnectionResetError("the server ended the connection")
        request.status = int(first.first[1])
        bodiless = request.method == "HEAD" or request.status in (204, 304)
        data = _once(b"") if bodiless else body(upstream[0], first, to_end=True)
        if fault and fault.kind == "drop_ack":
            async for _ in data:
                pass
            raise _Cut(reset=True)
        if request.method in ("GET", "HEAD") and (fault is None or fault.kind != "stale"):
            data = self._remember(key, first, data)
        await self._send(request, writer, first, data, fault)
        endless = not bodiless and not first.chunked and first.length is None
        return not (first.closes or head.closes or endless)

    async def _answer(self, request: Request, fault: Fault, writer: asyncio.StreamWriter) -> None:
        text = f"the proxy answers {fault.status}, as it was told\n".encode()
        lines = [f"HTTP/1.1 {fault.status} {REASONS.get(fault.status, 'As Told')}", f"Content-Length: {len(text)}"]
        lines += [f"Retry-After: {fault.retry_after:g}"] if fault.retry_after is not None else []
        head = Head("\r\n".join([*lines, "", ""]).encode(), ["HTTP/1.1", str(fault.status)], {})
        request.status = fault.status
        await self._send(request, writer, head, _once(b"" if request.method == "HEAD" else text), None)

    async def _remember(
        self, key: tuple[str, str, str], head: Head, data: AsyncIterator[bytes]
    ) -> AsyncIterator[bytes]:
        kept: list[bytes] = []
        async for piece in data:
            kept.append(piece)
            if sum(map(len, kept)) > 1 << 20:
                kept = []
                yield piece
                async for rest in data:
                    yield rest
                return
            yield piece
        if head.first[1] in ("200", "206", "404"):
            self._remembered[key] = (head, b"".join(kept))
            self._remembered.move_to_end(key)
            if len(self._remembered) > REMEMBERED:
                self._remembered.popitem(last=False)

    async def _send(
        self,
        request: Request,
        writer: asyncio.StreamWriter,
        head: Head,
        data: AsyncIterator[bytes],
        fault: Fault | None,
    ) -> None:
        """Send an answer, each piece half a latency after it came, and do to its body what the fault says."""
        pieces: asyncio.Queue[tuple[float, bytes] | None] = asyncio.Queue(maxsize=256)

        async def take() -> None:
            try:
                async for piece in data:
                    await pieces.put((time.monotonic() + self._half, piece))
            finally:
                await pieces.put(None)

        due = time.monotonic() + self._half
        taking = asyncio.create_task(take())
        try:
            await self._down.wait(len(head.raw), due, self.bandwidth)
            writer.write(head.raw)
            if fault and fault.kind in ("reset", "short", "stall") and not fault.after:
                await self._break(fault, writer)
            while (item := await pieces.get()) is not None:
                due, piece = item
                end = None
                if fault and fault.kind in ("reset", "short", "stall", "flip") and fault.after is not None:
                    end = fault.after - request.sent
                if end is not None and fault is not None and fault.kind == "flip":
                    if 0 <= end < len(piece):
                        piece = piece[:end] + bytes([piece[end] ^ 0xFF]) + piece[end + 1 :]
                    end = None
                whole, piece = piece, piece if end is None else piece[:end]
                await self._down.wait(len(piece), due, self.bandwidth)
                request.sent += len(piece)  # first, for who looks as soon as the client has it
                writer.write(piece)
                if fault and end is not None and end <= len(whole):
                    await self._break(fault, writer)
                await writer.drain()
            await writer.drain()
            await taking  # its error, if the server's answer broke off
        finally:
            taking.cancel()

    async def _break(self, fault: Fault, writer: asyncio.StreamWriter) -> None:
        await writer.drain()
        if fault.kind == "stall":
            await asyncio.Event().wait()
        raise _Cut(reset=fault.kind == "reset")

    # -- bytes -------------------------------------------------------------------------------
    async def _raw_both(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        upstream = await asyncio.open_connection(LOOPBACK, self.target, limit=1 << 20)
        up = asyncio.create_task(self._pump(reader, upstream[1], self._up, down=False))
        down = asyncio.create_task(self._pump(upstream[0], writer, self._down, down=True))
        try:
            done, _ = await asyncio.wait((up, down), return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            upstream[1].close()
            up.cancel()
            down.cancel()
            await asyncio.gather(up, down, return_exceptions=True)

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, line: _Line, *, down: bool
    ) -> None:
        pieces: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(maxsize=256)

        async def take() -> None:
            try:
                while data := await reader.read(65536):
                    await pieces.put((time.monotonic() + self._half, data))
            finally:
                await pieces.put((0.0, b""))

        taking = asyncio.create_task(take())
        try:
            while (item := await pieces.get())[1]:
                due, data = item
                cut = self._script.bytes_passed(len(data)) if down else None
                data = data if cut is None else data[: cut[1]]
                await line.wait(len(data), due, self.bandwidth)
                self._raw_down += len(data) * down
                writer.write(data)
                await writer.drain()
                if cut:
                    await self._break(cut[0], writer)
            await taking  # raises what broke the connection
        finally:
            taking.cancel()


async def _once(data: bytes) -> AsyncIterator[bytes]:
    if data:
        yield data


async def _sent(writer: asyncio.StreamWriter) -> None:
    """Wait until the client's kernel has what was written: a reset throws away the rest."""
    with contextlib.suppress(OSError):
        await writer.drain()
        for _ in range(200):
            (left,) = struct.unpack("i", fcntl.ioctl(writer.get_extra_info("socket"), termios.TIOCOUTQ, b"\0" * 4))
            if not left:
                return
            await asyncio.sleep(0.005)


def _abort(writer: asyncio.StreamWriter) -> None:
    """End a connection by a reset."""
    with contextlib.suppress(OSError):
        linger = struct.pack("ii", 1, 0)
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    writer.transport.abort()
