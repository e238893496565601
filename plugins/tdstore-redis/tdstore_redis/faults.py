"""Translation of errors of the server and of the connection into those of tdstore."""

from __future__ import annotations

import errno
import socket
import ssl
from typing import NoReturn

import hiredis

from tdstore.errors import (
    CorruptStoreError,
    OptionError,
    ReadOnlyError,
    StoreError,
    StoreIOError,
    TransientError,
    UnsupportedError,
)
from tdstore.storekit import refusals


class ServerError(Exception):
    """An error reply, verbatim: `"WRONGTYPE Operation against ..."`."""

    @property
    def code(self) -> str:
        """Return the first word, by which servers identify the kind of error."""
        return str(self).partition(" ")[0]


class Lost(OSError):
    """The connection ended in the middle; the last commands may or may not have arrived."""


class redis_errors(refusals.ErrorTranslation[Exception]):  # noqa: N801 - reads as a statement: `with redis_errors(url, server, "reading"):`
    """Turn any error of the connection or the server into the `StoreError` of its kind."""

    __slots__ = ("server",)
    caught = (ServerError, OSError, hiredis.HiredisError)

    def __init__(self, url: str, server: str, doing: str) -> None:
        self.url, self.doing = url, doing  # of every call: without a second one
        self.server = server

    def translate(self, error: Exception) -> NoReturn:
        """Raise the `StoreError` for an error."""
        raise translate(error, self.url, self.server, self.doing) from error


def translate(error: Exception, url: str, server: str, doing: str) -> StoreError:
    """Return the `StoreError` for a `ServerError`, an `OSError` of the connection or an error of hiredis.

    Args:
        error: the error.
        url: the location.
        server: the server, for messages.
        doing: the action, for messages.
    """
    head = f"{url}: {doing}"
    if isinstance(error, ServerError):
        return _of_reply(error, url, server, head)
    if isinstance(error, hiredis.HiredisError):
        return StoreIOError(
            f"{head}: {server} does not speak the redis protocol ({error})",
            url=url,
            hint="is another kind of server there, or one that wants TLS (rediss://)?",
        )
    return _of_wire(error, url, server, head)


def _of_wire(error: Exception, url: str, server: str, head: str) -> StoreError:
    if isinstance(error, ConnectionRefusedError):
        return TransientError(
            f"{head}: connection refused: nothing listens at {server}",
            url=url,
            hint="is the server running? redis-server --port 6379; is the port right?",
        )
    if isinstance(error, socket.gaierror):
        return StoreIOError(f"{head}: the host of {server} is not known: {error.strerror}", url=url)
    if isinstance(error, ssl.SSLError):
        return StoreIOError(
            f"{head}: TLS with {server} failed: {getattr(error, 'reason', None) or error.args[-1]}",
            url=url,
            hint="redis:// is the scheme without TLS; pass ssl_ca_certs= for a certificate of your own",
        )
    if isinstance(error, TimeoutError):
        return TransientError(
            f"{head}: no answer from {server} in time", url=url, hint="is it overloaded? pass a longer timeout="
        )
    if isinstance(error, FileNotFoundError):
        return TransientError(f"{head}: there is no socket {server}", url=url, hint="is the server running?")
    if isinstance(error, PermissionError):
        return StoreIOError(f"{head}: no permission to use the socket {server}", url=url, errno=errno.EACCES)
    return TransientError(f"{head}: the connection to {server} was lost: {error}", url=url)


def _of_reply(error: ServerError, url: str, server: str, head: str) -> StoreError:
    code, text = error.code, str(error)
    message = f"{head}: {server} says: {text}"
    if code in ("NOAUTH", "WRONGPASS") or "invalid password" in text or "without any password configured" in text:
        what = "wants a password" if code == "NOAUTH" else "refused the user name or password"
        return StoreIOError(
            f"{head}: authentication failed: {server} {what}",
            url=url,
            hint="redis://user:password@host:port/db/name, or password=",
            errno=errno.EACCES,
        )
    if code == "NOPERM":
        return StoreIOError(
            f"{message}",
            url=url,
            hint="the user needs the keys ~tds:* and the commands @read @write @transaction",
            errno=errno.EACCES,
        )
    if code == "READONLY":
        return ReadOnlyError(
            f"{head}: {server} is a read-only replica", url=url, hint="write to its master, or open with mode='r'"
        )
    if code == "OOM" or "maxmemory" in text:
        return StoreIOError(
            f"{head}: {server} is out of memory (maxmemory): nothing of this step was written",
            url=url,
            hint="raise maxmemory or remove data",
            errno=errno.ENOSPC,
        )
    if code == "MISCONF":
        return StoreIOError(message, url=url, hint="the server cannot write its snapshots: see its log")
    if code == "WRONGTYPE":
        return CorruptStoreError(
            f"{head}: a key of this dataset has another type: another application wrote it",
            url=url,
            hint="choose another name or database",
        )
    if code in ("MOVED", "ASK", "CROSSSLOT", "CLUSTERDOWN"):
        return UnsupportedError(
            f"{message}: redis cluster is not supported",
            url=url,
            hint="use a single server, or one with replicas",
        )
    if code in ("LOADING", "BUSY", "MASTERDOWN", "TRYAGAIN", "NOREPLICAS") or "max number of clients" in text:
        return TransientError(message, url=url, hint="try again in a moment")
    if code == "DENIED":
        return StoreIOError(f"{message[:300]}", url=url, hint="the server is in protected mode: set a password there")
    if "DB index" in text or "invalid DB" in text:
        return OptionError(f"{head}: {server} has no such database: {text}", url=url, hint="db 0 is always there")
    if "unknown command" in text.lower() or "unknown subcommand" in text.lower():
        return UnsupportedError(f"{message}", url=url, hint="redis 6.2 or newer is needed")
    return StoreIOError(message, url=url)
