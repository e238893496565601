"""The parts of `tdstore.delete` and `tdstore.list_datasets` for locations on a server."""

from __future__ import annotations

import re
from typing import Any

from tdstore.errors import OptionError
from tdstore_redis.address import parse
from tdstore_redis.connection import Line, Wire, pack
from tdstore_redis.store import RedisStore, open_redis, session_of, tls_context
from tdstore_redis.transactions.removal import remove
from tdstore_redis.transactions.writer import Writer

_HEAD = re.compile(rb"tds:\{(\d{1,6}):(.*)\}:head\Z", re.DOTALL)


def remove_dataset(location: str, **options: Any) -> None:
    """Remove a dataset of tdstore from a server.

    Args:
        location: as in `open_redis`.
        **options: those of `open_redis`. `lock_timeout` is 0 unless passed.

    Raises:
        StoreNotFoundError: there is no dataset. ReadOnlyError: it is one of the tensordict package.
        StoreBusyError: others have written rows, and not committed them.
    """
    quick = {"lock_timeout": 0.0, "verify": "none", "recover": "accept"}
    store = open_redis(location, mode="r+", **{**quick, **options})
    with store:
        assert isinstance(store, RedisStore)  # a dataset of the tensordict package was refused
        writer = session_of(store)
        assert isinstance(writer, Writer)
        remove(writer)


def list_datasets(
    location: str,
    *,
    timeout: float | None = 5.0,
    ssl_ca_certs: str | None = None,
    ssl_certfile: str | None = None,
    ssl_keyfile: str | None = None,
    ssl_check_hostname: bool = True,
    **address_options: Any,
) -> list[str]:
    """List the datasets of tdstore in a database, by a scan of its keys.

    Args:
        location: `redis://host[:port]/db`, or with the beginning of their names: `redis://host/0/runs`.
        timeout: seconds for connecting, and for each reply.
        ssl_ca_certs, ssl_certfile, ssl_keyfile, ssl_check_hostname: for rediss://.
        **address_options: host, port, db, username, password, unix_socket_path.

    Raises:
        OptionError: a location with a query, which names one dataset.
    """
    if "?" in location:
        raise OptionError("a location with a query names one dataset", hint="redis://host[:port]/db")
    scheme, sep, rest = location.rstrip("/").partition("://")
    if sep and "/" not in rest:
        rest += "/0"
    whole = f"{scheme}://{rest}/" if sep else f"{scheme}/"
    address = parse(whole + "x", address_options, new=False)
    below = address.name[:-1]  # "runs/", or nothing
    tls = (ssl_ca_certs, ssl_certfile, ssl_keyfile, ssl_check_hostname)
    line = Line(address, timeout=timeout, tls=tls_context(address.url, *tls) if address.tls else None)
    try:
        with line.errors("listing"):
            names = line.idempotent(_names)
    finally:
        line.close()
    stem = whole[: len(whole) - len(below)]
    return [stem + name for name in names if name.startswith(below) or name == below[:-1]]


def _names(wire: Wire) -> list[str]:
    found: set[bytes] = set()
    cursor = b"0"
    while True:
        cursor, keys = wire.call(b"SCAN", cursor, b"MATCH", b"tds:{*:head", b"COUNT", b"10000")
        found |= {match[2] for key in keys if (match := _HEAD.match(key)) and int(match[1]) == len(match[2])}
        if cursor == b"0":
            break
    names = sorted(found)
    kinds = wire.raising([pack(b"HEXISTS", b"tds:{%d:%b}:head" % (len(name), name), b"dataset") for name in names])
    return [name.decode(errors="surrogateescape") for name, there in zip(names, kinds, strict=True) if there]
