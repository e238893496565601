"""The engine for every URL that fsspec supports: memory, ftp, sftp, webdav, hf, archives, chains of caches."""

from __future__ import annotations

import builtins
import hashlib
import os
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from datetime import datetime
from typing import Any, TypeVar

from tdstore.engine import Blob, Buffer, Engine, EngineCap, Entry
from tdstore.errors import (
    ConflictError,
    CorruptStoreError,
    InvalidTypeError,
    MissingDependencyError,
    ReadOnlyError,
    StoreNotFoundError,
    TransientError,
)
from tdstore.index.ranges import Range
from tdstore_remote.faults import Again, Call, TooShort, of_fsspec
from tdstore_remote.libraries import load_fsspec, pip_line
from tdstore_remote.options import S3, Settings, for_fsspec, unknown
from tdstore_remote.retry import Patience
from tdstore_remote.urls import scheme_of, shown

T = TypeVar("T")

CACHES = ("simplecache", "blockcache", "filecache", "cached")
READ_ONLY = frozenset(
    {*CACHES, "http", "https", "zip", "tar", "libarchive", "github", "git", "gist", "reference", "data", "hf", "jlab"}
)
"""Schemes that are read only, or that cannot put an object whole."""
HERE = frozenset({"memory", "file", "local", "data"})
"""Schemes without I/O that can block."""

_memory_lock = threading.RLock()


def _after_fork() -> None:
    global _memory_lock
    _memory_lock = threading.RLock()


os.register_at_fork(after_in_child=_after_fork)


class FsspecEngine(Engine):
    """Engine over the files below a URL of fsspec. Created by `tdstore_remote.opening.open_engine`."""

    pins = False

    def __init__(self, url: str, options: Mapping[str, Any], settings: Settings) -> None:
        self.url = shown(url).rstrip("/") if not url.endswith("://") else url
        self.settings = settings
        self._patience = Patience(settings)
        self._schemes = tuple(scheme_of(part) or part.lower() for part in url.split("::"))
        self._fs, root = self._open(url, options)
        self._root = str(root).rstrip("/")
        self._asynchronous = bool(getattr(self._fs, "async_impl", False))
        # Implementations that are not asynchronous may share one file or connection.
        self._one_at_a_time = nullcontext() if self._asynchronous or self._schemes[0] in HERE else threading.Lock()

    def __repr__(self) -> str:
        return f"FsspecEngine({self.url!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        raise InvalidTypeError("an engine is not pickled: open it again from its URL")

    def _open(self, url: str, options: Mapping[str, Any]) -> tuple[Any, str]:
        fsspec = load_fsspec()
        call = Call(self.url, "opening")
        kwargs = _arguments(url, self._schemes, options, self.settings, self.url)
        try:
            found: tuple[Any, str] = self._timed(lambda: fsspec.core.url_to_fs(url, **kwargs))
            return found
        except ImportError as error:
            raise MissingDependencyError(
                f"{self.url}: fsspec needs a package that is not installed: {error}",
                hint=pip_line(self._schemes[-1]),
            ) from error
        except TypeError as error:
            raise unknown(_unexpected(error), [], self.url) from error
        except Exception as error:  # implementations raise any exception of their libraries
            ours = of_fsspec(error, call)
            if not isinstance(ours, Again):
                raise ours from error
            if ours.missing:
                raise StoreNotFoundError(f"{self.url}: {ours.reason}", url=self.url) from error
            raise TransientError(f"{self.url}: it cannot be opened: {ours.reason}", url=self.url) from error

    @property
    def can(self) -> EngineCap:
        """Return its abilities. Only the memory of this process has conditional puts: fsspec has none elsewhere."""
        if READ_ONLY.intersection(self._schemes):
            return EngineCap.NONE if self._schemes[0] in ("http", "https") else EngineCap.LIST
        able = EngineCap.LIST | EngineCap.WRITE
        return able | EngineCap.CONDITIONAL if self._schemes == ("memory",) else able

    # -- reading -------------------------------------------------------------------------
    def get(self, key: str, limit: int | None = None) -> Blob:
        """Read an object, as `Engine.get` does."""
        call, path = self._call(key, "reading"), self._path(key)

        def once() -> Blob:
            data = self._whole(path, limit)
            if limit is not None and len(data) > limit:
                raise CorruptStoreError(f"{call.url} has more than the {limit} bytes that it may have", url=call.url)
            return Blob(data, _tag(data) if EngineCap.CONDITIONAL in self.can else None)

        return self._attempt(call, once)

    def _whole(self, path: str, limit: int | None) -> bytes:
        if limit is None or self._schemes[0] in HERE:
            return bytes(self._fs.cat_file(path))
        try:
            return bytes(self._fs.cat_file(path, start=0, end=limit + 1))
        except (ValueError, OSError) as error:
            if isinstance(error, FileNotFoundError) or self._fs.info(path).get("size", 0) > limit:
                raise
            return bytes(self._fs.cat_file(path))  # an empty object has no first byte

    def get_ranges(self, ranges: Sequence[Range]) -> list[Buffer]:
        """Read ranges, as `Engine.get_ranges` does. A file that is not found is requested again, for a second."""
        answers: list[Any] = [None] * len(ranges)
        left = []
        for at, (key, start, stop) in enumerate(ranges):
            if stop is None:
                answers[at] = self._end(key, start)
            elif stop > start:
                left.append(at)
            else:
                answers[at] = b""
        if not left:
            return answers
        call = self._call(ranges[left[0]].key, f"reading {len(left)} ranges")

        def once() -> None:
            paths = [self._path(ranges[at].key) for at in left]
            starts, stops = [ranges[at].start for at in left], [ranges[at].stop for at in left]
            more = {"batch_size": self.settings.concurrency} if self._asynchronous else {}
            found = self._fs.cat_ranges(paths, starts, stops, on_error="return", **more)
            first: Exception | None = None
            still = []
            for at, data in zip(left, found, strict=True):
                error = self._judge(ranges[at], data, answers, at)
                if error is not None:
                    still.append(at)
                    # Permanent errors are raised first.
                    if first is None or (isinstance(first, Again) and not isinstance(error, Again)):
                        first = error
            left[:] = still
            if first is not None:
                raise first

        nbytes = sum((ranges[at].stop or 0) - ranges[at].start for at in left)
        try:
            self._attempt(call, once, nbytes=nbytes, patient=True)
        except StoreNotFoundError:
            where = self.where(ranges[left[0]].key)
            raise StoreNotFoundError(f"{where} does not exist", url=where) from None
        return answers

    def _judge(self, asked: Range, data: Any, answers: list[Any], at: int) -> Exception | None:
        """Store an answer, or return its fault."""
        if isinstance(data, BaseException):
            if not isinstance(data, Exception):
                raise data
            error = of_fsspec(data, self._call(asked.key, f"reading bytes {asked.start} to {asked.stop}"))
            error.__cause__ = data
            if not isinstance(error, TooShort):
                return error
            data = b""
        wanted = (asked.stop or 0) - asked.start
        if len(data) == wanted:
            answers[at] = data
            return None
        where = self.where(asked.key)
        if len(data) > wanted and len(data) >= (asked.stop or 0):  # a server without ranges sent everything
            answers[at] = data[asked.start : asked.stop]
            return None
        size = self.size(asked.key)
        if size < (asked.stop or 0):
            return CorruptStoreError(
                f"{where} ends at byte {size}, and bytes up to {asked.stop} were expected", url=where
            )
        return Again(f"got {len(data)} of {wanted} bytes")

    def _end(self, key: str, start: int) -> bytes:
        path = self._path(key)

        def once() -> bytes:
            first = start
            if start < 0:
                self._fs.invalidate_cache(self._fs._parent(path))
                first = max(int(self._fs.info(path)["size"]) + start, 0)
            return bytes(self._fs.cat_file(path, start=first, end=None))

        return self._attempt(self._call(key, "reading its end"), once, patient=True)

    def size(self, key: str) -> int:
        """Return the size of an object, as `Engine.size` does."""
        return self._size(key)

    def _size(self, key: str) -> int:
        call, path = self._call(key, "asking for its size"), self._path(key)

        def once() -> int:
            self._fs.invalidate_cache(self._fs._parent(path))
            found = self._fs.info(path)
            if found.get("type") == "directory":
                raise Again("it is a folder", missing=True)
            if found.get("size") is None:
                return len(self._fs.cat_file(path))
            return int(found["size"])

        return self._attempt(call, once)

    def versions(self, keys: Sequence[str], *, pin: bool = False) -> builtins.list[tuple[int, str | None]]:
        """Return size and version of each: ETag, checksum or time. fsspec cannot request one version."""
        return [self._version(key) for key in keys]

    def _version(self, key: str) -> tuple[int, str | None]:
        path = self._path(key)

        def once() -> tuple[int, str | None]:
            self._fs.invalidate_cache(self._fs._parent(path))
            about = self._fs.info(path)
            tag = next((about[n] for n in ("ETag", "etag", "md5Hash", "content_md5", "mtime") if about.get(n)), None)
            tag = tag or (str(_modified(about)) if _modified(about) else None)
            return int(about["size"]), None if tag is None else str(tag)

        return self._attempt(self._call(key, "asking for its version"), once, patient=True)

    # -- writing -------------------------------------------------------------------------
    def put(self, key: str, data: Buffer, *, if_absent: bool = False, if_match: str | None = None) -> str | None:
        """Write an object, as `Engine.put` does."""
        self._check_writable()
        call, path = self._call(key, "writing", writing=True), self._path(key)
        content = bytes(memoryview(data).cast("B"))
        if self._schemes == ("memory",):
            with _memory_lock:
                self._check_condition(path, call.url, if_absent, if_match)
                self._attempt(call, lambda: self._fs.pipe_file(path, content))
                return _tag(content)
        if if_absent or if_match is not None:
            raise self.unsupported(EngineCap.CONDITIONAL)
        self._attempt(call, lambda: self._put_once(path, content), nbytes=len(content))
        return None

    def _put_once(self, path: str, content: bytes) -> None:
        if self._asynchronous:  # object stores: a put is atomic
            self._fs.pipe_file(path, content)
            return
        self._fs.makedirs(self._fs._parent(path), exist_ok=True)
        temporary = f"{path}.{uuid.uuid4().hex[:12]}.tmp"
        self._fs.pipe_file(temporary, content)
        try:
            self._fs.mv(temporary, path)
        except OSError:
            # Some refuse to replace an existing file.
            if not self._fs.exists(path):
                raise
            self._fs.rm_file(path)
            self._fs.mv(temporary, path)

    def _check_condition(self, path: str, where: str, if_absent: bool, if_match: str | None) -> None:
        if not (if_absent or if_match is not None):
            return
        there = _tag(self._fs.cat_file(path)) if self._fs.isfile(path) else None
        if (if_absent and there is not None) or (if_match is not None and there != if_match):
            raise ConflictError(f"{where} was changed by another writer", url=where)

    def put_many(self, items: Sequence[tuple[str, Buffer]]) -> None:
        """Write objects, as `Engine.put_many` does; concurrently if the file system is asynchronous."""
        self._check_writable()
        if not self._asynchronous or len(items) < 2:
            for key, data in items:
                self.put(key, data)
            return
        call = self._call(items[0][0], f"writing {len(items)} objects", writing=True)
        contents = {self._path(key): bytes(memoryview(data).cast("B")) for key, data in items}
        self._attempt(call, lambda: self._fs.pipe(contents), nbytes=sum(map(len, contents.values())))

    def delete(self, keys: Sequence[str]) -> None:
        """Delete objects, as `Engine.delete` does."""
        self._check_writable()
        for key in keys:
            path = self._path(key)

            def once(path: str = path) -> None:
                try:
                    self._fs.rm_file(path)
                except FileNotFoundError:
                    return

            self._attempt(self._call(key, "removing", writing=True), once)

    def list(self, prefix: str = "") -> Iterator[Entry]:
        """List objects, as `Engine.list` does."""
        if EngineCap.LIST not in self.can:
            raise self.unsupported(EngineCap.LIST)
        folder = prefix.rpartition("/")[0]

        def once() -> Any:
            self._fs.invalidate_cache()
            try:
                return self._fs.find(self._path(folder), detail=True)
            except FileNotFoundError:
                return {}

        found = self._attempt(self._call(prefix, "listing"), once)
        for path, about in found.items():
            key = str(path).strip("/").removeprefix(self._root.strip("/")).lstrip("/")
            if key.startswith(prefix):
                yield Entry(key, int(about.get("size") or 0), _modified(about))

    def where(self, key: str) -> str:
        """Return the URL of an object, as `Engine.where` does, without the query, which may be a signature."""
        return shown(super().where(key))

    # -- inside --------------------------------------------------------------------------
    def _path(self, key: str) -> str:
        return f"{self._root}/{key}" if key else self._root

    def _call(self, key: str, doing: str, *, writing: bool = False) -> Call:
        return Call(self.where(key), doing, writing)

    def _check_writable(self) -> None:
        if EngineCap.WRITE not in self.can:
            raise ReadOnlyError(
                f"{self.url} is read only: {self._schemes[0]}:// takes no writes",
                url=self.url,
                hint="write to s3://, gs://, az://, memory:// or a local path",
            )

    def _attempt(self, call: Call, once: Callable[[], T], *, nbytes: int = 0, patient: bool = False) -> T:
        def mapped() -> T:
            try:
                with self._one_at_a_time:
                    return once()
            except Exception as error:  # implementations raise any exception of their libraries
                raise of_fsspec(error, call) from (None if error.__cause__ is None else error)

        return self._patience.attempt_here(
            call, lambda seconds: self._timed(mapped, seconds), nbytes=nbytes, patient=patient
        )

    def _timed(self, work: Callable[[], T], seconds: float | None = None) -> T:
        """Run in a thread that is abandoned if it takes too long: a blocking call cannot be cancelled."""
        if self._schemes[0] in HERE and len(self._schemes) == 1:
            return work()
        done = threading.Event()
        outcome: builtins.list[Any] = [None, None]

        def run() -> None:
            try:
                outcome[0] = work()
            except BaseException as error:
                outcome[1] = error
            finally:
                done.set()

        threading.Thread(target=run, name="tdstore-fsspec", daemon=True).start()
        limit = self.settings.timeout if seconds is None else seconds
        if not done.wait(limit):
            raise Again(f"no answer within {limit:.3g} s")
        if outcome[1] is not None:
            raise outcome[1]
        result: T = outcome[0]
        return result

    def close(self) -> None:
        """Do nothing: fsspec caches and shares its file systems."""


def _arguments(
    url: str, schemes: tuple[str, ...], options: Mapping[str, Any], settings: Settings, where: str
) -> dict[str, Any]:
    """Return keyword arguments for `url_to_fs`: those of a chain go to the protocol that they name, or to its end."""
    last = schemes[-1]
    named = {k: v for k, v in options.items() if k in schemes and isinstance(v, Mapping)}
    flat = {k: v for k, v in options.items() if k not in named}
    if last in S3:
        flat = for_fsspec(last, {**flat, **named.pop(last, {})}, where)
        pool = {"max_pool_connections": settings.concurrency, "connect_timeout": min(10.0, settings.stall)}
        flat["config_kwargs"] = {**pool, "read_timeout": settings.stall, **flat.get("config_kwargs", {})}
        flat.setdefault("use_listings_cache", False)
    if len(schemes) == 1:
        return {**flat, **named.get(last, {})}
    return {**named, last: {**flat, **named.get(last, {})}}


def _unexpected(error: TypeError) -> str:
    text = str(error)
    return text.split("'")[1] if "unexpected keyword argument" in text and "'" in text else text


def _tag(data: Buffer) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def _modified(about: Mapping[str, Any]) -> float:
    for name in ("mtime", "LastModified", "last_modified", "modified", "updated", "created"):
        value = about.get(name)
        if isinstance(value, datetime):
            return value.timestamp()
        if isinstance(value, (int, float)):
            return float(value)
    return 0.0
