"""One connection: packed commands out, replies in. Timeouts on each step, and a limit on the size of a reply."""

from __future__ import annotations

import os
import random
import socket
import ssl
import time
from collections.abc import Callable, Sequence
from threading import Lock
from typing import Any, TypeVar

import hiredis
import numpy as np

from tdstore.errors import StoreError, TransientError
from tdstore_redis.address import Address
from tdstore_redis.cells.layout import Bytes, Command
from tdstore_redis.faults import Lost, ServerError, redis_errors

T = TypeVar("T")
Reply = Any
MAX_REPLY = 128 << 20
_RECEIVE = 1 << 20
_FEED = 16 << 10
"""hiredis moves its buffer at each KiB that it returns: a small buffer is faster."""
_LINE = 4 << 10
"""Bytes that the first line of a reply may have."""
_PARTS = 512
"""How many pieces of memory one call sends; systems take 1,024."""


def pack(*parts: bytes) -> bytes:
    """Encode one command for the connection."""
    return b"*%d\r\n" % len(parts) + b"".join([b"$%d\r\n%b\r\n" % (len(p), p) for p in parts])


class Wire:
    """A connection to a server, authenticated, in its database."""

    def __init__(
        self, address: Address, *, timeout: float | None, tls: ssl.SSLContext | None, name: bytes | None = None
    ) -> None:
        self.broken = False
        self.client_id = 0
        self._reader = hiredis.Reader(replyError=ServerError)
        self._buffer = bytearray(_RECEIVE)
        self._memory = np.frombuffer(self._buffer, np.uint8)
        self._socket = _connect(address, timeout, tls)
        try:
            hello = []
            if address.password is not None:
                user = [] if address.username is None else [address.username.encode()]
                hello.append(pack(b"AUTH", *user, address.password.encode()))
            if address.db:
                hello.append(pack(b"SELECT", b"%d" % address.db))
            if name is not None:
                hello.append(pack(b"CLIENT", b"SETNAME", name))
                hello.append(pack(b"CLIENT", b"ID"))
            # The database of a server that answers PING is the requested one: no half-open state.
            for reply in self.pipe([*hello, pack(b"PING")]):
                if isinstance(reply, ServerError):
                    raise reply
                if isinstance(reply, int):
                    self.client_id = reply
        except BaseException:
            self.close()
            raise

    def call(self, *parts: bytes) -> Reply:
        """Send one command and return its reply; an error reply is raised."""
        return self.raising([pack(*parts)])[0]

    def pipe(self, commands: Sequence[Command], limit: int = MAX_REPLY) -> list[Reply]:
        """Send packed commands in one round trip; error replies are among the replies."""
        self.send(commands)
        return self.receive(len(commands), limit)

    def raising(self, commands: Sequence[Command], limit: int = MAX_REPLY) -> list[Reply]:
        """Send as `pipe` does; the first error reply is raised, after all were read."""
        replies = self.pipe(commands, limit)
        if ServerError in set(map(type, replies)):
            raise next(reply for reply in replies if isinstance(reply, ServerError))
        return replies

    def send(self, commands: Sequence[Command]) -> None:
        """Send packed commands; an error breaks the connection."""
        if self.broken:
            raise Lost("the connection was lost before")
        try:
            self._send(commands)
        except BaseException:
            self.close()  # half a command may have been sent
            raise

    def _send(self, commands: Sequence[Command]) -> None:
        parts: list[Any] = [*commands]
        large = tuple in set(map(type, parts))
        if large:
            parts = []
            for command in commands:
                parts += (command,) if isinstance(command, bytes) else (*command, b"\r\n")
        if not large or isinstance(self._socket, ssl.SSLSocket):
            data = memoryview(b"".join(parts))
            for at in range(0, len(data), _RECEIVE):  # the timeout is for each call
                self._socket.sendall(data[at : at + _RECEIVE])
            return
        left = [memoryview(part).cast("B") for part in parts]
        at = 0
        while at < len(left):
            sent = self._socket.sendmsg(left[at : at + _PARTS])
            while at < len(left) and sent >= len(left[at]):
                sent -= len(left[at])
                at += 1
            if sent:
                left[at] = left[at][sent:]

    def strings(
        self,
        commands: Sequence[bytes],
        sizes: Sequence[int],
        sink: Callable[[int, Bytes], None],
        before: Sequence[bytes] = (),
    ) -> None:
        """Send packed commands in one round trip; each reply is a string, passed on as soon as it has arrived.

        Args:
            commands: packed commands.
            sizes: largest bytes of each reply.
            sink: called with the number of a reply and its bytes, which are valid until it returns.
            before: packed commands that are sent first; `OK` is their only good reply.

        Raises:
            ServerError: an error reply; the first, after all were read.
            Lost: the connection ended, or an impossible reply came.
        """
        self.send([*before, *commands])
        need = max(sizes) + _LINE
        buffer, memory = self._buffer, self._memory
        if need > len(buffer):
            buffer = bytearray(need)
            memory = np.frombuffer(buffer, np.uint8)
        error: ServerError | None = None
        at = end = 0  # the received bytes that are not parsed yet
        try:
            for i, size in enumerate((*[-1] * len(before), *sizes), -len(before)):
                whole = b"$%d\r\n" % size
                if buffer.startswith(whole, at, end):
                    length = size
                    at += len(whole)
                else:
                    while (stop := buffer.find(b"\r\n", at, end)) < 0:
                        if end - at > _LINE:
                            raise Lost("it sent a reply without an end")
                        at, end = self._more(buffer, memory, at, end, at + _LINE)
                    head = bytes(buffer[at:stop])
                    at = stop + 2
                    if head.startswith(b"-"):
                        error = error or ServerError(head[1:].decode("utf-8", "replace"))
                        continue
                    if i < 0 and head == b"+OK":
                        continue
                    length = _length(head, size)
                while end < at + length + 2:
                    at, end = self._more(buffer, memory, at, end, at + length + 2)
                sink(i, memory[at : at + length])
                at += length + 2
                if buffer[at - 2 : at] != b"\r\n":
                    raise Lost("it sent a string without an end")
            if at != end:
                raise Lost("it sent more than was asked for")
        except BaseException:
            self.close()  # unread replies would be parsed as those of the next command
            raise
        if error is not None:
            raise error

    def _more(self, buffer: bytearray, memory: Bytes, at: int, end: int, until: int) -> tuple[int, int]:
        """Receive more bytes; those present move to the front when there is no room for all of them."""
        if at == end:
            at, end, until = 0, 0, until - at
        if until > len(buffer):
            memory[: end - at] = memory[at:end]
            at, end = 0, end - at
        got = self._socket.recv_into(memoryview(buffer)[end:])
        if not got:
            raise Lost("the server closed it")
        return at, end + got

    def receive(self, count: int, limit: int = MAX_REPLY) -> list[Reply]:
        """Return the next `count` replies.

        Raises:
            Lost: the connection ended, or a reply exceeds the limit.
        """
        replies: list[Reply] = []
        gets, feed, buffer = self._reader.gets, self._reader.feed, self._buffer
        got = 0
        try:
            while True:
                if len(replies) >= count:
                    if len(replies) > count:
                        raise Lost("it sent more than was asked for")
                    return replies
                size = self._socket.recv_into(buffer)
                if not size:
                    raise Lost("the server closed it")
                got += size
                if got > limit:
                    raise Lost(f"it sent more than {limit} bytes for an answer that should be smaller")
                for at in range(0, size, _FEED):
                    feed(buffer, at, min(_FEED, size - at))  # type: ignore[arg-type]  # any buffer will do
                    while (reply := gets()) is not False:
                        replies.append(reply)
        except BaseException:
            self.close()  # unread replies would be parsed as those of the next command
            raise

    def alive(self) -> bool:
        """Check whether the other side has not closed the connection, without a request."""
        if self.broken:
            return False
        before = self._socket.gettimeout()
        try:
            self._socket.settimeout(0)
            # No byte may be waiting: it is the end of the stream, or an unrequested reply.
            self._socket.recv(1)
        except (BlockingIOError, ssl.SSLWantReadError):
            return True
        except OSError:
            return False
        else:
            return False
        finally:
            self._socket.settimeout(before)

    def close(self) -> None:
        """Close the connection. May be repeated."""
        self.broken = True
        sock = getattr(self, "_socket", None)
        if sock is not None:
            sock.close()

    def __del__(self) -> None:
        # A store that only read may be dropped. Nothing is sent; and no global is used, for there may be none any more.
        try:
            self.close()
        except OSError:
            return  # the system has closed it


def _length(head: bytes, most: int) -> int:
    """Return the length of a string, from the first line of a reply."""
    if head[:1] != b"$" or not head[1:].isdigit() or int(head[1:]) > most:
        raise Lost(f"it sent {head[:32]!r} for a string of at most {most} bytes")
    return int(head[1:])


def _connect(address: Address, timeout: float | None, tls: ssl.SSLContext | None) -> socket.socket:
    if address.socket is not None:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.settimeout(timeout)
            sock.connect(address.socket)
        except BaseException:
            sock.close()
            raise
        return sock
    sock = socket.create_connection((address.host, address.port), timeout)
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if tls is None:
            return sock
        try:
            return tls.wrap_socket(sock, server_hostname=address.host)
        except TimeoutError:
            # A server without TLS takes the greeting for the beginning of a command, and waits for its end.
            raise ssl.SSLError("no answer to the TLS greeting") from None
    except BaseException:
        sock.close()
        raise


class Line:
    """Connections to one server: new ones, and a few idle ones for reads by several threads."""

    TRIES = 4
    IDLE = 8

    def __init__(self, address: Address, *, timeout: float | None, tls: ssl.SSLContext | None) -> None:
        self.address, self.timeout, self.tls = address, timeout, tls
        self._idle: list[Wire] = []
        self._lock = Lock()
        self._pid = os.getpid()

    def errors(self, doing: str) -> redis_errors:
        """Map errors inside `with line.errors("reading"):`."""
        return redis_errors(self.address.url, self.address.server, doing)

    def wire(self, name: bytes | None = None) -> Wire:
        """Open a new connection."""
        return Wire(self.address, timeout=self.timeout, tls=self.tls, name=name)

    def idempotent(self, work: Callable[[Wire], T]) -> T:
        """Run a repeatable action. A lost connection is reopened, with growing pauses; a timeout is final.

        So is an answer of the server that is an error of tdstore: that nothing is there is an `OSError` too.
        """
        until = time.monotonic() + (self.timeout or 30.0)
        for turn in range(1, 64):
            wire: Wire | None = None
            try:
                wire = self._take()
                result = work(wire)
            except (OSError, ServerError) as error:
                if wire is not None:
                    self._give(wire)
                loading = isinstance(error, ServerError) and error.code in ("LOADING", "TRYAGAIN")
                final = isinstance(error, (TimeoutError, socket.gaierror, ssl.SSLError, PermissionError))
                final = final or (isinstance(error, StoreError) and not isinstance(error, TransientError))
                if (isinstance(error, ServerError) or final or turn >= self.TRIES) and not loading:
                    raise
                pause = min(0.05 * 2**turn, 0.5) * random.uniform(0.5, 1)
                if time.monotonic() + pause > until:
                    raise
                time.sleep(pause)
            except BaseException:
                # Whatever stopped the work may have left replies unread.
                if wire is not None:
                    wire.close()
                raise
            else:
                self._give(wire)
                return result
        raise Lost("too many attempts")

    def _take(self) -> Wire:
        if self._pid != os.getpid():
            # After a fork: the wires are the parent's, and the lock may be held by a thread that is not here.
            self._idle, self._lock, self._pid = [], Lock(), os.getpid()
        while True:
            with self._lock:
                wire = self._idle.pop() if self._idle else None
            if wire is None:
                return self.wire()
            if wire.alive():
                return wire
            wire.close()

    def _give(self, wire: Wire) -> None:
        if wire.broken:
            return
        with self._lock:
            if len(self._idle) < self.IDLE:
                self._idle.append(wire)
                return
        wire.close()

    def close(self) -> None:
        """Close all idle connections."""
        with self._lock:
            idle, self._idle = self._idle, []
        for wire in idle:
            wire.close()
