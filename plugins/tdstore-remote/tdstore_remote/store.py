"""The `remote` backend: from a URL to a store of any format."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from tdstore.bytestore import (
    BUILD_PLAN,
    DIRECTORY_HINT,
    open_directory,
    open_objects,
    refuse_foreign_files,
    unfinished_build,
)
from tdstore.engine import Blob, Buffer, Engine, parent_and_name
from tdstore.errors import (
    CorruptStoreError,
    InvalidTypeError,
    MissingDependencyError,
    OptionError,
    ReadOnlyError,
    StoreNotFoundError,
    UnsupportedError,
)
from tdstore.index.ranges import Range
from tdstore.registry import registry, split_scheme
from tdstore.store import Store
from tdstore.storekit import check_choices, refusals
from tdstore.storekit.documents import NAME
from tdstore.threads import ThreadPool
from tdstore.types import MODES, Mode, Verify
from tdstore_remote.engines.delegating import DelegatingEngine
from tdstore_remote.faults import BucketNotFoundError
from tdstore_remote.opening import LOCAL, open_engine
from tdstore_remote.options import HTTP, StorageOptions
from tdstore_remote.urls import last_name, scheme_of, shown

Format = Literal["auto", "raw", "zarr", "h5", "icechunk"]
FORMATS = ("auto", "raw", "zarr", "h5", "icechunk")
SUFFIXES = {".zarr": "zarr", ".h5": "h5", ".hdf5": "h5", ".he5": "h5", ".icechunk": "icechunk"}
MAGIC = b"\x89HDF\r\n\x1a\n"
DIRECTORY = "meta.json"
MARKERS = (BUILD_PLAN, "zarr.json", ".zgroup", DIRECTORY)
MARKER_BYTES = 64 << 20
RAW = ("verify", "single_writer", "object_bytes", "buffer_bytes", "keep_old", "max_bytes", "version")


def open_remote(
    location: str | None,
    *,
    mode: Mode = "r",
    storage_options: Mapping[str, Any] | None = None,
    format: Format = "auto",
    engine: Literal["auto", "obstore", "fsspec"] | None = None,
    timeout: float | None = None,
    cache: str | None = None,
    cache_ram: int | None = None,
    verify: Verify | None = None,
    single_writer: bool | None = None,
    **format_options: Any,
) -> Store:
    """Open the store at a URL, or create a new one there.

    Args:
        location: a URL: `s3://bucket/run`, `https://host/x.h5`, `memory://run`, `simplecache::s3://bucket/run.zarr`.
        mode: "r", "r+", "w", "x" or "a", as in `tdstore.Store`. HDF5, web servers, archives and chains of caches
            are read only.
        storage_options: credentials, endpoint and settings, by the names of fsspec (`key`, `secret`, `endpoint_url`,
            ...) or of obstore. The defaults are the usual environment variables.
        format: by default that of the suffix (.zarr, .h5, .hdf5, .icechunk), otherwise of the files found; new stores
            are "raw".
        engine: "obstore" supports s3, gs, az and http, and is fast; "fsspec" supports everything; "auto" is the first
            that supports the URL.
        timeout: seconds for one call, including all retries.
        cache: a folder for a cache of reads, shared by every process that names it.
        cache_ram: bytes of a cache of reads in memory.
        verify: "full" compares reads with their checksums, "size" sizes only.
        single_writer: your assurance that there is no other writer; needed where the server has no conditional put.
        **format_options: `object_bytes`, `buffer_bytes`, `keep_old`, `max_bytes`, `version` of the raw format (see
            `tdstore.bytestore.open_objects`), or the options of the other format's opener.

    Raises:
        StoreNotFoundError: there is no dataset, or no such bucket.
        StoreExistsError: by the mode.
        ReadOnlyError: a write to a read-only location.
        TransientError: the server fails repeatedly.
        OptionError: an unknown option.
    """
    if location is None:
        raise OptionError("the 'remote' backend needs a location", hint="a URL, such as 's3://bucket/run'")
    if not isinstance(location, str):
        raise InvalidTypeError(
            f"a location of the 'remote' backend is a URL, not {type(location).__name__} {location!r}",
            hint="objects of fsspec, universal_pathlib and obstore are taken: (fs, path), a UPath, an S3Store",
        )
    plain = shown(location)
    check_choices(plain, mode=(mode, MODES), format=(format, FORMATS))
    settings = {"engine": engine, "timeout": timeout, "cache": cache, "cache_ram": cache_ram}
    options = StorageOptions(storage_options or {}) | {k: v for k, v in settings.items() if v is not None}
    options = StorageOptions(options)
    own = {"verify": verify, "single_writer": single_writer}
    others = {**{k: v for k, v in own.items() if v is not None}, **format_options}
    if scheme_of(location) in HTTP and "?" in location:
        options.setdefault("engine", "fsspec")  # the query belongs to one object
    chosen = format if format != "auto" else by_suffix(location)
    if chosen in ("zarr", "h5", "icechunk"):
        if chosen != "icechunk":
            _refuse_version(chosen, others, plain)
        return _other(chosen, location, mode, options, others, plain)
    _check_raw(others, plain)
    if mode != "r" and scheme_of(location) in (*HTTP, "hf"):
        raise ReadOnlyError(f"{plain} is read only", url=plain, hint="open it with mode='r'")
    return _raw_or_found(location, mode, options, others, plain, certain=format == "raw")


def by_suffix(location: str) -> str | None:
    """Return the format that the suffix of a URL names; None if it names none.

    Raises:
        UnsupportedError: the suffix belongs to a backend that only reads local files.
    """
    name = last_name(location).lower()
    for suffix, kind in SUFFIXES.items():
        if name.endswith(suffix):
            return kind
    for backend in registry().backends().values():
        if name.endswith(tuple(backend.suffixes)):
            raise UnsupportedError(
                f"{shown(location)} is a file for the {backend.name!r} backend, which reads local files",
                url=shown(location),
                hint="download it first, for instance with fsspec.get, or pass format= if it is none",
            )
    return None


def _other(name: str, location: str, mode: Mode, options: StorageOptions, others: dict[str, Any], plain: str) -> Store:
    """Open with another backend, which reads through an engine that it opens, or local files.

    Args:
        name: the backend.
        location: the URL.
        mode: the mode.
        options: the storage options.
        given: other options of the caller.
        plain: the location, for messages.
    """
    if scheme_of(location) in LOCAL and "::" not in location:
        return registry().open(registry().get(name), location.partition("://")[2] or location, mode=mode, **others)
    if name == "h5" and mode != "r":
        raise ReadOnlyError(
            f"{plain}: HDF5 files behind a URL are read only",
            url=plain,
            hint="write it locally and upload it, or save to a location without .h5",
        )
    return registry().open(registry().get(name), location, mode=mode, storage_options=options, **others)


def _refuse_version(kind: str, others: Mapping[str, Any], plain: str) -> None:
    if others.get("version") is not None:
        raise refusals.no_versions(plain, f"the 'remote' backend reads it as {kind}")


def _check_raw(others: Mapping[str, Any], plain: str) -> None:
    for name in others:
        if name not in RAW:
            known = ("storage_options", "format", "engine", "timeout", "cache", "cache_ram", *RAW)
            near = difflib.get_close_matches(name, known, 1)
            raise OptionError(
                f"{plain}: the 'remote' backend has no option {name!r}; its options are {', '.join(known)}",
                url=plain,
                hint=f"did you mean {near[0]!r}?" if near else None,
            )


def _raw_or_found(
    location: str, mode: Mode, options: StorageOptions, others: dict[str, Any], plain: str, *, certain: bool
) -> Store:
    if mode in ("w", "x", "a") and scheme_of(location) in LOCAL and "::" not in location:
        refuse_foreign_files(split_scheme(location)[1], plain)
    engine = Remembering(open_engine(location, options, writable=mode != "r"))
    own = {name: value for name, value in others.items() if name in RAW}
    reopen = (location, {"storage_options": options, "format": "raw", **_for_reading(own)})
    try:
        try:
            store = open_objects(engine, mode=mode, reopen=reopen, **own)
            engine.opened()
            return store
        except StoreNotFoundError as error:
            if engine.refused is not None:
                raise engine.refused from None
            if mode not in ("r", "r+") or (own.get("version") and engine.has(NAME)):
                raise
            if certain:
                found: str | bytes | None = BUILD_PLAN if engine.has(BUILD_PLAN) else DIRECTORY
            else:
                found = look(engine, location, options)
            if found == BUILD_PLAN:
                raise unfinished_build(plain) from None
            if found is None:
                raise _nothing(error, plain) from None
        _refuse_version("a directory of files" if found == DIRECTORY else "zarr or HDF5", others, plain)
        if found == DIRECTORY:
            if mode != "r":
                raise ReadOnlyError(f"{plain} is a directory of files", url=plain, hint=DIRECTORY_HINT)
            store = open_directory(engine, reopen=reopen, **_for_reading(own))
            engine.opened()
            return store
    except BaseException:
        engine.close()
        raise
    engine.close()
    name = "h5" if found == MAGIC else "zarr"
    return _other(name, location, mode, options, {k: v for k, v in others.items() if k == "verify"}, plain)


def _for_reading(own: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in own.items() if name in ("verify", "max_bytes", "version")}


def _nothing(error: StoreNotFoundError, plain: str) -> StoreNotFoundError:
    return StoreNotFoundError(
        f"nothing is stored at {plain}: there is no tdstore.json, zarr.json or meta.json, and it is no HDF5 file",
        url=plain,
        hint=error.hint or "check the name; mode='w' makes something new there",
    )


def look(engine: Remembering, location: str, options: Mapping[str, Any]) -> str | bytes | None:
    """Identify a store without a manifest of tdstore, in one round: a marker's name, or the first bytes of HDF5."""

    def is_h5() -> bytes | None:
        try:
            parent, name = parent_and_name(location)
        except OptionError:
            return None
        with open_engine(parent, options, writable=False) as above:
            return MAGIC if _starts_with_magic(above, name) else None

    with ThreadPool(len(MARKERS) + 1) as pool:
        h5 = pool.submit(is_h5)
        there = list(pool.map(engine.has, MARKERS))
    for marker, found in zip(MARKERS, there, strict=True):
        if found:
            return marker
    return h5.result()


def _starts_with_magic(engine: Engine, name: str) -> bool:
    try:
        if engine.size(name) < len(MAGIC):
            return False
        return bytes(engine.get_ranges([Range(name, 0, len(MAGIC))])[0]) == MAGIC
    except (StoreNotFoundError, MissingDependencyError, CorruptStoreError):  # the last is a local folder of that name
        return False


class _Answer(NamedTuple):
    """A cached answer of the engine."""

    blob: Blob | None


class Remembering(DelegatingEngine):
    """An engine that caches the requests of opening: formats are identified by the same files.

    A write clears the cache.
    """

    def __init__(self, inner: Engine) -> None:
        self._inner = inner
        self.url = inner.url
        self._answers: dict[str, _Answer] = {}
        self._opening = True
        self.refused: BucketNotFoundError | None = None
        """That there is no such bucket, which is more than that there is no such object."""

    @property
    def inner(self) -> Engine:
        """The engine that answers requests."""
        return self._inner

    def has(self, key: str) -> bool:
        """Check whether there is an object of that name."""
        try:
            self.get(key, MARKER_BYTES)
        except StoreNotFoundError:
            return False
        return True

    def get(self, key: str, limit: int | None = None) -> Blob:
        """Read an object, as `Engine.get` does; during opening, repeated requests are answered from memory."""
        if not self._opening:
            return self.inner.get(key, limit)
        if key not in self._answers:
            try:
                self._answers[key] = _Answer(self.inner.get(key, limit))
            except StoreNotFoundError as error:
                if isinstance(error, BucketNotFoundError):
                    self.refused = error
                    raise
                self._answers[key] = _Answer(None)
        blob = self._answers[key].blob
        if blob is None:
            raise StoreNotFoundError(f"{self.where(key)} does not exist", url=self.where(key))
        return blob

    def opened(self) -> None:
        """End the caching: all later requests go to the server."""
        self._opening = False
        self._answers.clear()

    def put(self, key: str, data: Buffer, *, if_absent: bool = False, if_match: str | None = None) -> str | None:
        """Write an object, as `Engine.put` does."""
        self.opened()
        return self.inner.put(key, data, if_absent=if_absent, if_match=if_match)

    def put_many(self, items: Sequence[tuple[str, Buffer]]) -> None:
        """Write objects, as `Engine.put_many` does."""
        self.opened()
        self.inner.put_many(items)

    def delete(self, keys: Sequence[str]) -> None:
        """Delete objects, as `Engine.delete` does."""
        self.opened()
        self.inner.delete(keys)
