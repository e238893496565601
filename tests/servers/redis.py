"""A redis server of our own: Debian's redis-server on a loopback port, nothing of it on disk unless asked."""

from __future__ import annotations

import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.servers.process import LOOPBACK, Folder, Server, find_program, start

HINT = "apt install redis-server"


class RedisServer:
    """A running redis: `url`, `port`, `folder`; `restart()`, `pause()`, `resume()`, `kill()`, `log`."""

    def __init__(self, program: str, port: int, folder: Path, options: dict[str, str]) -> None:
        self.port, self.folder, self.log = port, folder, folder / "redis.log"
        self.url = f"redis://{LOOPBACK}:{port}/0"
        self._command = [program, "--port", str(port), "--bind", LOOPBACK, "--dir", str(folder), "--save", ""]
        for name, value in options.items():
            self._command += [f"--{name.replace('_', '-')}", value]
        self.start()

    def start(self) -> None:
        """Start it (again) on the same port. With appendonly="yes" its data are back, else it is empty."""
        self._server = Server(self._command, self.log)
        # "loading" while it reads its file: no PONG yet. Where a password is asked for, the question is an answer.
        self._server.wait_until(lambda: self._ask(b"PING\r\n").startswith((b"+PONG", b"-NOAUTH")))

    def _ask(self, command: bytes) -> bytes:
        with socket.create_connection((LOOPBACK, self.port), timeout=1) as connection:
            connection.sendall(command)
            return connection.recv(4096)

    def kill(self) -> None:
        """End it at once by SIGKILL. `start()` brings it back."""
        self._server.kill()

    def stop(self) -> None:
        """Shut it down in order (SIGTERM)."""
        self._server.stop()

    def restart(self) -> None:
        """Stop it in order and start it on the same port."""
        self.stop()
        self.start()

    def pause(self) -> None:
        """Freeze it: it accepts connections and answers nothing until `resume()`."""
        self._server.signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let a paused server go on."""
        self._server.signal(signal.SIGCONT)

    @property
    def pid(self) -> int:
        return self._server.pid


@contextmanager
def redis_server(**options: str) -> Iterator[RedisServer]:
    """Run a redis; options are those of redis.conf with `_` for `-`, as in `appendonly="yes"`, `maxmemory="10mb"`."""
    program = find_program("redis-server", HINT)
    folder = Folder("redis")
    try:
        server = start(lambda port: RedisServer(program, port, folder.path, options))
        try:
            yield server
        finally:
            server.stop()
    finally:
        folder.remove()
