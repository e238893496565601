"""A web server of files: nginx on a folder, read only, with ranges; its access log counts the requests."""

from __future__ import annotations

import base64
import http.client
import json
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.servers.process import LOOPBACK, Folder, Server, find_program, listens, start, wait_until

HINT = "apt install nginx-light"
MARK = "/.tdstore-mark/"
CONFIG = """\
{user}
daemon off;
worker_processes 1;
pid {folder}/nginx.pid;
error_log {folder}/nginx.log warn;
events {{ worker_connections 1024; }}
http {{
    default_type application/octet-stream;
    log_format seen escape=json '{{"method":"$request_method","path":"$uri","range":"$http_range","status":$status,'
                                '"sent":$body_bytes_sent,"user":"$remote_user"}}';
    access_log {folder}/access.log seen;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    sendfile on;
    tcp_nodelay on;
    keepalive_requests 100000;
    server {{
        listen {address}:{port};
        root "{root}";
        location {mark} {{ auth_basic off; return 204; }}
        location / {{
            limit_except GET {{ deny all; }}
{more}
        }}
    }}
}}
"""


@dataclass(frozen=True)
class Hit:
    """One request as the access log tells it. `range` is the header's text, "" without one."""

    method: str
    path: str
    range: str
    status: int
    sent: int
    user: str


class WebServer:
    """A running nginx: `url`, `port`, `folder` (what it serves), `requests()`, `auth`."""

    def __init__(self, port: int, folder: Path, log: Path, auth: tuple[str, str] | None) -> None:
        self.port, self.folder, self.auth = port, folder, auth
        self.url = f"http://{LOOPBACK}:{port}"
        self._log, self._from = log, 0

    @property
    def auth_header(self) -> dict[str, str]:
        """The Authorization header of the user that `auth=` named."""
        user, password = self.auth or ("", "")
        word = base64.b64encode(f"{user}:{password}".encode()).decode()
        return {"Authorization": f"Basic {word}"} if self.auth else {}

    def through(self, proxy_port: int) -> str:
        """Return the url of the same files seen through a proxy on another loopback port."""
        return f"http://{LOOPBACK}:{proxy_port}"

    def requests(self) -> list[Hit]:
        """Return the requests answered since the last `reset()`, in order of their ends."""
        # nginx logs a request after its last byte: a request of our own shows that what came before is in the log
        mark = f"{MARK}{uuid.uuid4().hex}"
        connection = http.client.HTTPConnection(LOOPBACK, self.port, timeout=10)
        connection.request("GET", mark)
        connection.getresponse().read()
        connection.close()
        wait_until(lambda: f'{mark}"' in self._log.read_text(), "nginx's access log", 10)
        lines = self._log.read_text()[self._from :].splitlines()
        return [Hit(**fields) for fields in map(json.loads, lines) if not fields["path"].startswith(MARK)]

    def reset(self) -> None:
        """Forget the requests so far."""
        self.requests()
        self._from = len(self._log.read_text())


@contextmanager
def http_nginx(
    root: str | os.PathLike[str],
    *,
    autoindex: str = "",
    auth: tuple[str, str] | None = None,
    ranges: bool = True,
) -> Iterator[WebServer]:
    """Serve a folder read only.

    `autoindex` is "html" or "json": folders are listed in that form. `auth=(user, password)` asks for them.
    `ranges=False` answers a request for a range with everything, as some servers do.
    """
    program = find_program("nginx", HINT)
    work = Folder("nginx")
    more = ["max_ranges 0;"] * (not ranges)
    if autoindex:
        more += ["autoindex on;", f"autoindex_format {autoindex};"]
    if auth:
        (work.path / "users").write_text(f"{auth[0]}:{{PLAIN}}{auth[1]}\n")
        more += ['auth_basic "tdstore";', f"auth_basic_user_file {work.path}/users;"]

    def attempt(port: int) -> tuple[Server, int]:
        (work.path / "nginx.conf").write_text(
            CONFIG.format(
                # its workers would be `nobody`, who may not look into our temporary folders
                user="user root;" if os.getuid() == 0 else "",
                folder=work.path,
                address=LOOPBACK,
                port=port,
                root=os.path.abspath(root),
                mark=MARK,
                more="\n".join(f"            {line}" for line in more),
            )
        )
        log = work.path / "nginx.log"
        server = Server([program, "-e", str(log), "-p", str(work.path), "-c", f"{work.path}/nginx.conf"], log)
        server.wait_until(lambda: listens(port))
        return server, port

    try:
        server, port = start(attempt)
        try:
            yield WebServer(port, Path(root), work.path / "access.log", auth)
        finally:
            server.stop()
    finally:
        work.remove()
