"""A server behind a slow wire: the files of a folder, each answer a latency late, from a process of its own.

It takes some 50 us of CPU for a request, a third of what nginx and a relay before it take: on a machine of two cores,
what is measured is then the reader. It serves what readers ask web servers and buckets for: GET and HEAD, ranges,
and `If-Match`. It looks neither at signatures nor at queries.
"""

from __future__ import annotations

import heapq
import itertools
import multiprocessing
import os
import re
import select
import socket
import sys
import time
import urllib.parse
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from email.utils import formatdate
from multiprocessing.connection import Connection
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.servers import S3Server

BUCKET = "bucket"
RANGE = re.compile(rb"\r\nrange: *bytes=(\d*)-(\d*)\r\n", re.IGNORECASE)
MATCH = re.compile(rb"\r\nif-match: *([^\r]*)\r\n", re.IGNORECASE)
LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)\r\n", re.IGNORECASE)
DATE = formatdate(0, usegmt=True)


class Client:
    """One connection: what was received of its next request, and what was not sent of its answers."""

    def __init__(self, connection: socket.socket, free: float) -> None:
        self.socket = connection
        self.free = free
        """When its first request may arrive: a new connection costs a latency."""
        self.received = b""
        self.unsent: list[memoryview] = []


class Server:
    """Serve a folder, each answer so many milliseconds late.

    It is a loop over epoll in one thread: what delays an answer is a heap, not a task.
    """

    def __init__(self, folder: Path, milliseconds: float) -> None:
        self._folder, self._latency = folder, milliseconds / 1000
        self._clients: dict[int, Client] = {}
        self._due: list[tuple[float, int, Client, bytes, memoryview]] = []
        self._order = itertools.count()
        self._files: dict[bytes, tuple[memoryview, bytes] | None] = {}
        self._epoll = select.epoll()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=512)
        self._listener.setblocking(False)
        self._epoll.register(self._listener, select.EPOLLIN)
        self.port = int(self._listener.getsockname()[1])

    def run(self, until: int) -> None:
        """Serve until a file descriptor can be read."""
        while True:
            wait = max(0.0, self._due[0][0] - time.monotonic()) if self._due else None
            # `epoll.poll` waits for whole milliseconds, `select` for microseconds.
            if until in select.select([self._epoll, until], [], [], wait)[0]:
                return
            for number, event in self._epoll.poll(0):
                if number == self._listener.fileno():
                    self._accept()
                elif event & select.EPOLLOUT:
                    self._send(self._clients[number])
                else:
                    self._receive(self._clients[number])
            now = time.monotonic()
            while self._due and self._due[0][0] <= now:
                _, _, client, head, body = heapq.heappop(self._due)
                if client.socket.fileno() >= 0:
                    # Small answers leave in one packet.
                    client.unsent += [memoryview(head + body)] if len(body) < 1 << 16 else [memoryview(head), body]
                    self._send(client)

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._clients[connection.fileno()] = Client(connection, time.monotonic() + self._latency)
        self._epoll.register(connection, select.EPOLLIN)

    def _receive(self, client: Client) -> None:
        try:
            data = client.socket.recv(1 << 16)
        except ConnectionError:
            data = b""
        if not data:
            self._close(client)
            return
        client.received += data
        while (end := client.received.find(b"\r\n\r\n")) >= 0:
            request, client.received = client.received[: end + 2], client.received[end + 4 :]
            due = max(time.monotonic(), client.free) + self._latency
            heapq.heappush(self._due, (due, next(self._order), client, *self._answer(request)))

    def _send(self, client: Client) -> None:
        try:
            while client.unsent:
                sent = client.socket.send(client.unsent[0])
                client.unsent[0] = client.unsent[0][sent:]
                if not client.unsent[0]:
                    del client.unsent[0]
        except BlockingIOError:
            self._epoll.modify(client.socket, select.EPOLLIN | select.EPOLLOUT)
        except ConnectionError:
            self._close(client)
        else:
            self._epoll.modify(client.socket, select.EPOLLIN)

    def _close(self, client: Client) -> None:
        del self._clients[client.socket.fileno()]
        client.socket.close()

    # -- HTTP --------------------------------------------------------------------------------
    def _answer(self, request: bytes) -> tuple[bytes, memoryview]:
        method, path, _ = request.split(b" ", 2)
        nothing = memoryview(b"")
        found = self._file(path.partition(b"?")[0])
        if method not in (b"GET", b"HEAD"):
            return _head("405 Method Not Allowed", 0), nothing
        if found is None:
            return _head("404 Not Found", 0), nothing
        data, tag = found
        match = MATCH.search(request)
        if match is not None and match[1] != tag:
            return _head("412 Precondition Failed", 0), nothing
        more = f"ETag: {tag.decode()}\r\nLast-Modified: {DATE}\r\nAccept-Ranges: bytes\r\n"
        asked, status, size = RANGE.search(request), "200 OK", len(data)
        if asked is not None:
            if asked[1]:
                start, stop = int(asked[1]), min(int(asked[2]) + 1, size) if asked[2] else size
            else:
                start, stop = max(0, size - int(asked[2])), size
            if start >= stop:
                return _head("416 Range Not Satisfiable", 0, f"Content-Range: bytes */{size}\r\n"), nothing
            status, data = "206 Partial Content", data[start:stop]
            more += f"Content-Range: bytes {start}-{stop - 1}/{size}\r\n"
        return _head(status, len(data), more), nothing if method == b"HEAD" else data

    def _file(self, path: bytes) -> tuple[memoryview, bytes] | None:
        if path not in self._files:
            name = os.path.normpath(urllib.parse.unquote(path.decode())).lstrip("/")
            try:
                data = (self._folder / name).read_bytes()
            except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
                self._files[path] = None
            else:
                self._files[path] = memoryview(data), f'"{len(self._files):x}-{len(data):x}"'.encode()
        return self._files[path]


def _head(status: str, length: int, more: str = "") -> bytes:
    return (
        f"HTTP/1.1 {status}\r\nContent-Type: application/octet-stream\r\nContent-Length: {length}\r\n{more}\r\n"
    ).encode()


def floor_seconds(port: int, requests: Sequence[tuple[str, str, str]]) -> Callable[[], float]:
    """Return a function that sends requests at once, and returns the seconds until the last answer is there.

    It is what a reader costs that does nothing else: no client library, no checks, and connections that are open.

    Args:
        port: of the server.
        requests: method, path and range of each.
    """
    sockets = [socket.create_connection(("127.0.0.1", port)) for _ in requests]
    lines = []
    for connection, (method, path, wanted) in zip(sockets, requests, strict=True):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        lines.append(
            f"{method} {path} HTTP/1.1\r\nHost: x\r\n{f'Range: {wanted}' if wanted else 'X: x'}\r\n\r\n".encode()
        )

    def once() -> float:
        start = time.perf_counter()
        left: dict[int, tuple[socket.socket, bytearray]] = {}
        with select.epoll() as epoll:
            for connection, line in zip(sockets, lines, strict=True):
                connection.send(line)
                epoll.register(connection, select.EPOLLIN)
                left[connection.fileno()] = connection, bytearray()
            while left:
                for number, _ in epoll.poll():
                    connection, answer = left[number]
                    data = connection.recv(1 << 18)
                    if not data:
                        raise ConnectionResetError("the server closed a connection")
                    answer += data
                    if _is_whole(answer):
                        epoll.unregister(connection)
                        del left[number]
        return time.perf_counter() - start

    return once


def _is_whole(answer: bytearray) -> bool:
    end = answer.find(b"\r\n\r\n", 0, 1000)
    length = LENGTH.search(answer, 0, end + 2) if end >= 0 else None
    return length is not None and len(answer) >= end + 4 + int(length[1])


def _serve(pipe: Connection, folder: str, milliseconds: float) -> None:
    server = Server(Path(folder), milliseconds)
    pipe.send(server.port)
    server.run(pipe.fileno())


@contextmanager
def slow_server(folder: Path, milliseconds: float) -> Iterator[int]:
    """Serve a folder, read only; each request costs a latency. The files do not change meanwhile.

    Args:
        folder: what is served.
        milliseconds: what a request costs. A new connection costs as much.

    Yields:
        the port.
    """
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=_serve, args=(theirs, str(folder), milliseconds), daemon=True)
    process.start()
    theirs.close()
    try:
        yield ours.recv()
    finally:
        ours.send(None)
        process.join(10)


@contextmanager
def slow_bucket(folder: Path, milliseconds: float) -> Iterator[S3Server]:
    """Serve `folder/bucket` as an S3 bucket, as `slow_server` does."""
    with slow_server(folder, milliseconds) as port:
        yield S3Server(f"http://127.0.0.1:{port}", "key", "secret", BUCKET)
