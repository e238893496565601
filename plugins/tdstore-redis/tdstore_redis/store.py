"""The `redis` store: leaves as blocks of checked cells on a server, under one manifest."""

from __future__ import annotations

import math
import os
import ssl
from collections.abc import Callable, Mapping, Sequence
from threading import RLock
from typing import Any, get_args

import torch
from torch import Tensor

from tdstore.dtypes import repair_bools
from tdstore.errors import (
    OptionError,
    ReadOnlyError,
    StoreError,
    StoreNotFoundError,
)
from tdstore.header import Header
from tdstore.index.ranges import index_shape
from tdstore.store import Cap, Store
from tdstore.storekit import CheckedStore, check_choices, end_writer, refusals
from tdstore.storekit.budget import allocating
from tdstore.storekit.pages import empty
from tdstore.threads import without_interrupts
from tdstore.types import MODES, Fault, LeafSpec, Mode, Path, Read, Recover, Verify, Write, path_text
from tdstore.values import encode_value
from tdstore_redis.address import parse
from tdstore_redis.cells.layout import BLOCK, MAX_VALUE, TARGET_CELL, Array, new_array
from tdstore_redis.cells.plans import Fetch, plan_read
from tdstore_redis.connection import Line, pack
from tdstore_redis.session import Session
from tdstore_redis.tensordict_datasets import TensordictStore, find_tensordict_dataset
from tdstore_redis.transactions import commit, row_writes
from tdstore_redis.transactions.writer import Writer

CAPS = (
    Cap.WRITE
    | Cap.PARTIAL_READ
    | Cap.PARTIAL_WRITE
    | Cap.RESIZE
    | Cap.SHARED
    | Cap.PERSISTENT
    | Cap.CONCURRENT_READ
    | Cap.CONCURRENT_WRITE
    | Cap.DISCARD
)


def open_redis(
    location: str | os.PathLike[str] | None,
    *,
    mode: Mode = "r",
    host: str | None = None,
    port: int | None = None,
    db: int | None = None,
    username: str | None = None,
    password: str | None = None,
    unix_socket_path: str | None = None,
    timeout: float | None = 5.0,
    lock_timeout: float = 10.0,
    verify: Verify = "size",
    recover: Recover | None = None,
    block: int = BLOCK,
    max_bytes: int | None = None,
    ssl_ca_certs: str | None = None,
    ssl_certfile: str | None = None,
    ssl_keyfile: str | None = None,
    ssl_check_hostname: bool = True,
) -> Store:
    """Open a dataset on a redis server, or on another server with its protocol.

    Args:
        location: `redis://[user:password@]host[:port]/db/name` (rediss:// for TLS), or only the name
            beside `host=`, `port=`, `db=`. The name may have slashes.
        mode: "r", "r+", "w", "x" or "a", as in `tdstore.Store`.
        host, port, db, username, password, unix_socket_path: override the location.
        timeout: seconds for connecting, and for each reply of the server; None waits forever.
        lock_timeout: seconds to wait for other writers.
        verify: "size" checks the last block of each leaf on opening, "full" reads everything, "none"
            nothing. Reads are always compared with their checksums.
        recover: "accept" reads leaves as they were left by a writer that was killed between two commits.
        block: bytes of a value on the server; leaves are cut into as many as they need.
        max_bytes: refuse a dataset that declares more data than this. Without it a dataset of any size is opened, and
            a read is refused that would allocate over 1 GiB, of which less than a hundredth is stored.
        ssl_ca_certs, ssl_certfile, ssl_keyfile, ssl_check_hostname: for rediss://.

    Raises:
        StoreNotFoundError, StoreExistsError: by the mode.
        StoreBusyError: others hold it for longer than `lock_timeout`.
        DirtyStoreError: a writer ended in the middle of a change (`leaves` names the leaves).
        CorruptStoreError: damaged, or different from its manifest.
        TransientError: no server, or no answer in time.
        StoreIOError: the server refuses.

    Example:
        >>> store = open_redis("redis://localhost:6379/0/runs/1", mode="w")  # doctest: +SKIP
    """
    address_options = {
        "host": host,
        "port": port,
        "db": db,
        "username": username,
        "password": password,
        "unix_socket_path": unix_socket_path,
    }
    address = parse(location, address_options, new=mode in ("w", "x"))
    url = address.url
    check_choices(
        url, mode=(mode, MODES), verify=(verify, get_args(Verify)), recover=(recover, (None, *get_args(Recover)))
    )
    if not isinstance(block, int) or not 64 <= block <= MAX_VALUE:
        raise OptionError(f"{url}: block must be from 64 bytes to 512 MiB, not {block!r}", url=url)
    if timeout is not None and not timeout > 0:
        raise OptionError(f"{url}: timeout must be more than 0 seconds, or None, not {timeout!r}", url=url)
    tls = tls_context(url, ssl_ca_certs, ssl_certfile, ssl_keyfile, ssl_check_hostname) if address.tls else None
    line = Line(address, timeout=timeout, tls=tls)
    arguments = {
        **address_options,
        "timeout": timeout,
        "lock_timeout": lock_timeout,
        "verify": verify,
        "recover": recover,
        "block": block,
        "max_bytes": max_bytes,
        "ssl_ca_certs": ssl_ca_certs,
        "ssl_certfile": ssl_certfile,
        "ssl_keyfile": ssl_keyfile,
        "ssl_check_hostname": ssl_check_hostname,
    }
    token = (os.fspath(location) if location is not None else address.name, arguments)
    try:
        return _open(
            line,
            mode,
            token,
            lock_timeout=lock_timeout,
            verify=verify,
            accept=recover == "accept",
            block=block,
            max_bytes=max_bytes,
        )
    except BaseException:
        line.close()
        raise


def _open(
    line: Line,
    mode: Mode,
    token: tuple[str, dict[str, Any]],
    *,
    lock_timeout: float,
    verify: str,
    accept: bool,
    block: int,
    max_bytes: int | None,
) -> Store:
    sizes = verify != "none"
    if mode == "r":
        session = Session(line, verify=sizes, max_bytes=max_bytes)
        try:
            session.load(accept=accept)
        except StoreNotFoundError:
            with line.errors("opening"):
                base = line.idempotent(lambda wire: find_tensordict_dataset(wire, line.address.name, session.url))
            if base is None:
                raise
            return TensordictStore(line, base, token)
        store = RedisStore(session, mode, token)
    else:
        writer = Writer(line, verify=sizes, lock_timeout=lock_timeout, block=block, max_bytes=max_bytes)
        if mode in ("w", "x"):
            commit.begin(writer, exclusive=mode == "x")
        else:
            try:
                writer.load(accept=accept)
            except StoreNotFoundError:
                _refuse_tensordict(line, writer.url)
                if mode == "r+":
                    raise
                commit.begin(writer, exclusive=True)
            else:
                writer.known = writer.base.header
                commit.tidy(writer)
                if accept:
                    commit.forgive(writer)
        store = RedisStore(writer, mode, token)
    if verify == "full" and session_of(store).published and (faults := store.verify()):
        store.close()
        raise session_of(store).corrupt(faults[0].path, faults[0].reason)
    return store


def _refuse_tensordict(line: Line, url: str) -> None:
    with line.errors("opening"):
        base = line.idempotent(lambda wire: find_tensordict_dataset(wire, line.address.name, url))
    if base is not None:
        raise ReadOnlyError(
            f"{url} was written by the tensordict package: it is opened for reading only",
            url=url,
            hint="open it with mode='r', and save it under another name to change it",
        )


def session_of(store: RedisStore) -> Session:
    """Return the session behind a store."""
    return store._session


def tls_context(
    url: str, ca: str | None, certificate: str | None, key: str | None, check_hostname: bool
) -> ssl.SSLContext:
    """Return the settings of an encrypted connection.

    Raises:
        OptionError: the certificates cannot be read.
    """
    try:
        context = ssl.create_default_context(cafile=ca)
        context.check_hostname = check_hostname
        if certificate is not None:
            context.load_cert_chain(certificate, key)
    except OSError as error:
        raise OptionError(f"{url}: the certificates cannot be used: {error}", url=url) from error
    return context


class RedisStore(CheckedStore[Array]):
    """Store of leaves on a server. Created by `open_redis`."""

    caps = CAPS

    def __init__(self, session: Session, mode: Mode, token: tuple[str, dict[str, Any]]) -> None:
        super().__init__(session.url, writable=mode != "r")
        self._pid = None  # a child writes by a connection of its own
        self._session = session
        self._token = token
        self._lock = RLock()

    def reopen_token(self) -> tuple[str, Mode, dict[str, Any]]:
        """Return location, mode and options to reopen with, for writing if this store may write."""
        if not self._session.published:
            raise refusals.not_saved(self.url)
        location, arguments = self._token
        return location, "r+" if self.writable else "r", {k: v for k, v in arguments.items() if v is not None}

    # -- catalogue -----------------------------------------------------------------------
    def _catalogue(self) -> Mapping[Path, Array]:
        return self._session.document.arrays

    def load_header(self) -> Header:
        return self._open().document.header

    @without_interrupts
    def _save(self, header: Header) -> None:
        writer = self._writer()
        if writer.published:
            commit.commit(writer, header)
        else:
            commit.publish(writer, header)

    # -- data ----------------------------------------------------------------------------
    @without_interrupts
    def _create(self, leaves: Mapping[Path, LeafSpec]) -> None:
        writer = self._writer()
        made: dict[Path, LeafSpec] = {}
        for path, spec in leaves.items():
            encode_value(list(path))  # refuses keys that JSON cannot hold
            plain = spec.replace(fill_value=_plain(spec, self.url, path))
            with allocating(path, (plain.nbytes // TARGET_CELL,), torch.bool, self.url):  # a flag for each cell
                tried = new_array(plain, 1, "0" * 16, block=writer.block)
            tried.fill_item()
            made[path] = plain
        if made:
            with writer.line.errors("creating leaves"):
                writer.own_structure()
                writer.make(made)

    def _read(self, wanted: Sequence[tuple[Array, Read]]) -> list[Tensor]:
        session = self._session
        arrays = [array for array, _ in wanted]
        shapes = [index_shape(array.spec.shape, r.index) for array, r in wanted]
        session.check_room(
            (r.path, array, math.prod(shape) * array.spec.dtype.itemsize)
            for (array, r), shape in zip(wanted, shapes, strict=True)
            if r.out is None
        )
        results: list[Tensor] = []
        for (array, r), shape in zip(wanted, shapes, strict=True):
            if r.out is not None:
                results.append(r.out)
                continue
            with allocating(r.path, shape, array.spec.dtype, self.url):
                results.append(empty(shape, array.spec.dtype))
        ends: list[Callable[[], None]] = []

        def plan() -> list[Fetch]:
            ends.clear()
            fetches: list[Fetch] = []
            for (array, r), out in zip(wanted, results, strict=True):
                more, end = plan_read(r.path, array, r.index, out)
                fetches += more
                if end is not None:
                    ends.append(end)
            return fetches

        if any(array.mine is not None for array in arrays):
            with self._guard, session.line.errors("reading"):
                assert isinstance(session, Writer)
                session.read(plan, session.wire())
        else:
            session.read(plan)
        for end in ends:
            end()
        for out in results:
            repair_bools(out)
        return results

    def _write(self, wanted: Sequence[tuple[Array, Write]]) -> None:
        row_writes.write(self._writer(), [w for _, w in wanted])

    @without_interrupts
    def _delete(self, paths: Sequence[Path]) -> None:
        writer = self._writer()
        gone = [self._leaf(path) for path in paths]
        if gone:
            with writer.line.errors("deleting leaves"):
                writer.own_structure()
                for path in paths:
                    del writer.document.arrays[path]
                writer.drop(gone)

    @without_interrupts
    def _resize(self, lengths: Mapping[Path, int]) -> None:
        writer = self._writer()
        with writer.line.errors("resizing"):
            writer.own_structure()
            for path, length in lengths.items():
                writer.resize(path, length)

    @without_interrupts
    def _rename(self, moves: Mapping[Path, Path]) -> None:
        writer = self._writer()
        held = {old: self._leaf(old) for old in moves}
        for new in moves.values():
            encode_value(list(new))
        with writer.line.errors("renaming leaves"):
            writer.own_structure()
            arrays = writer.document.arrays
            over = [arrays[new] for new in moves.values() if new in arrays and new not in held]
            for old in moves:
                del arrays[old]
            for old, new in moves.items():
                arrays[new] = held[old]
            writer.drop(over)

    # -- life ----------------------------------------------------------------------------
    @without_interrupts
    def _discard(self) -> None:
        """Discard changes. Rows written before a change of structure are durable, and stay."""
        commit.take_back(self._writer())

    def flush(self) -> None:
        self._check_open()

    def verify(self, paths: Sequence[Path] | None = None) -> list[Fault]:
        session = self._open()
        asked = list(session.document.arrays) if paths is None else list(paths)
        found = []
        for path in asked:
            array = self._leaf(path)
            reason = session.faults(path, array)
            if reason is not None:
                found.append(Fault(path, reason))
        return found

    def generation(self) -> object:
        """Return the dataset's name and the number of its last commit; None if there is no dataset."""
        session = self._open()
        asked = [pack(b"HMGET", session.keys.head, b"dataset", b"revision")]
        with session.line.errors("looking for commits"):
            dataset, revision = session.line.idempotent(lambda wire: wire.raising(asked))[0]
        return None if dataset is None else (dataset, revision)

    def nbytes_stored(self) -> int | None:
        session = self._open()
        arrays = list(session.document.arrays.values())
        total = 0
        with session.line.errors("measuring"):
            for array in arrays:
                for at in range(0, array.blocks, 4096):
                    asked = [pack(b"STRLEN", array.key(b)) for b in range(at, min(at + 4096, array.blocks))]
                    total += sum(session.line.idempotent(lambda wire, asked=asked: wire.raising(asked)))  # type: ignore[misc]
        return total

    @without_interrupts
    def _close(self) -> None:
        session = self._session
        if isinstance(session, Writer):
            end_writer(commit.Steps(session))
        else:
            session.end()

    def _open(self) -> Session:
        self._check_open()
        return self._session

    def _writer(self) -> Writer:
        assert isinstance(self._session, Writer)  # as the store is writable
        return self._session


def _plain(spec: LeafSpec, url: str, path: Path) -> Any:
    """Return the fill value in a form that the manifest can hold."""
    value = spec.fill_value
    if isinstance(value, Tensor):
        value = value.item()
    try:
        encode_value(value)
    except (TypeError, ValueError) as error:
        raise StoreError(f"{url}: the fill value of {path_text(path)} cannot be stored: {error}", url=url) from error
    return value
