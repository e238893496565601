"""The address of a dataset: a server, a database of it, and a name. Passwords never occur in `url` or a repr."""

from __future__ import annotations

import os
import uuid
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs, unquote

from tdstore.errors import OptionError

DEFAULT_PORT = 6379
_TLS = ("rediss", "valkeys")
_SCHEMES = ("redis", "valkey", "dragonfly", *_TLS)
_FORM = "redis://[user:password@]host[:port]/db/name"
_UNIX_FORM = "redis+unix:///path/to/redis.sock?db=0&name=run"
MAX_NAME = 4096


@dataclass(frozen=True, slots=True)
class Address:
    """A server, a database and a name; `url` for messages."""

    host: str
    port: int
    db: int
    name: str
    url: str
    socket: str | None = None
    tls: bool = False
    username: str | None = None
    password: str | None = field(default=None, repr=False)

    @property
    def server(self) -> str:
        """Return the server, for messages."""
        return self.socket if self.socket is not None else f"{self.host}:{self.port}"


def parse(location: str | os.PathLike[str] | None, options: dict[str, Any], *, new: bool) -> Address:
    """Parse a location; the options host, port, db, username, password and unix_socket_path override it.

    Args:
        location: a URL, or only the name of the dataset; None invents a name if `new`.
        options: the options of the caller; None stands for an absent one.
        new: the dataset is to be created.

    Raises:
        OptionError: not such a URL, no name, or an impossible value. Never shows a password.
    """
    chosen = {name: value for name, value in options.items() if value is not None}
    text = os.fspath(location) if location is not None else None
    if text is None or "://" not in text:
        if text is None and new:
            text = f"tensordict:{uuid.uuid4()}"
        parts: dict[str, Any] = {"name": text or "", **chosen}
        scheme = "redis"
    else:
        scheme, _, rest = text.partition("://")
        scheme = scheme.lower()
        if scheme == "redis+unix":
            found = _parse_unix(rest)
        elif scheme in _SCHEMES:
            found = _parse_tcp(scheme, rest)
        else:
            raise OptionError(f"the 'redis' backend does not open {scheme}:// locations", hint=_FORM)
        parts = {**found, **chosen}
    return _checked(scheme, parts)


def _checked(scheme: str, parts: dict[str, Any]) -> Address:
    socket = parts.get("unix_socket_path")
    host, port = str(parts.get("host", "localhost")), _number("port", parts.get("port", DEFAULT_PORT), 65535)
    db, name = _number("db", parts.get("db", 0), 1 << 20), str(parts.get("name", ""))
    user, password = parts.get("username"), parts.get("password")
    secret = f"{user or ''}{':***' if password is not None else ''}@" if user or password is not None else ""
    if socket is not None:
        url = f"redis+unix://{secret}{os.fspath(socket)}?db={db}&name={name}"
    else:
        shown = f"[{host}]" if ":" in host else host
        # As it was written, so that users recognise it: without the port if they gave none.
        port_text = f":{port}" if "port" in parts else ""
        url = f"{scheme}://{secret}{shown}{port_text}/{db}/{name}"
    if not name:
        raise OptionError(f"{url} names no dataset", url=url, hint=_FORM if socket is None else _UNIX_FORM)
    try:
        size = len(name.encode())
    except UnicodeEncodeError:
        raise OptionError(f"{url!r}: the name has a lone surrogate", url=url) from None
    if size > MAX_NAME:
        raise OptionError(f"the name of a dataset has {size} bytes; the limit is {MAX_NAME}", url=url)
    return Address(
        host=host,
        port=port,
        db=db,
        name=name,
        url=url,
        socket=None if socket is None else os.fspath(socket),
        tls=scheme in _TLS,
        username=user,
        password=password,
    )


def _parse_tcp(scheme: str, rest: str) -> dict[str, Any]:
    authority, _, path = rest.partition("/")
    found, hostport = _userinfo(authority)
    host, port = hostport, None
    if hostport.startswith("["):
        host, _, after = hostport[1:].partition("]")
        port = after[1:] if after.startswith(":") else None
    elif ":" in hostport:
        host, _, port = hostport.rpartition(":")
    if host:
        found["host"] = host
    if port is not None:
        found["port"] = port
    db, _, name = path.partition("/")
    if db and not (db.isascii() and db.isdigit()):
        if "@" in path:  # a password with a "/" in it: none of this is to be shown
            raise OptionError(
                f"a {scheme}:// location has no number of a database after its host",
                hint=f"{_FORM}; write special characters of a password as %XX, or pass password=",
            )
        shown = f"{scheme}://{hostport}"
        raise OptionError(
            f"{shown}/{path}: {db!r} stands where the number of the database belongs", hint=f"{shown}/0/{path}"
        )
    if db:
        found["db"] = db
    if name:
        found["name"] = name
    return found


def _parse_unix(rest: str) -> dict[str, Any]:
    path, _, query = rest.partition("?")
    found, path = _userinfo(path) if "@" in path.partition("/")[0] else ({}, path)
    asked = parse_qs(query, keep_blank_values=True)
    for key in asked:
        if key not in ("db", "name"):
            raise OptionError(f"redis+unix:// takes db= and name=, not {key}=", hint=_UNIX_FORM)
    if not path.startswith("/"):
        raise OptionError("redis+unix:// needs the absolute path of a socket", hint=_UNIX_FORM)
    return {**found, "unix_socket_path": path, **{key: values[-1] for key, values in asked.items()}}


def _userinfo(authority: str) -> tuple[dict[str, Any], str]:
    info, at, hostport = authority.rpartition("@")
    if not at:
        return {}, hostport
    user, colon, password = info.partition(":")
    found: dict[str, Any] = {}
    if user:
        found["username"] = unquote(user)
    if colon:
        found["password"] = unquote(password)
    return found, hostport


def _number(what: str, value: Any, limit: int) -> int:
    try:
        number = int(value)
    except (TypeError, ValueError):
        number = -1
    if not 0 <= number <= limit or isinstance(value, (bool, float)):
        # A password with an unescaped "/" or "@" can end up here: the text is not shown.
        raise OptionError(
            f"the {what} of a redis location must be a number from 0 to {limit}",
            hint=f"{_FORM}; write special characters of a password as %XX, or pass password=",
        )
    return number
