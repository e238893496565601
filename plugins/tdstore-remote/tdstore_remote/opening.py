"""Construction of an engine from a URL and the user's options."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from tdstore.engine import Engine, EngineCap, expect_ranges
from tdstore.errors import InvalidTypeError, MissingDependencyError, OptionError, UnsupportedError
from tdstore.registry import split_scheme
from tdstore.storekit.local_engine import LocalEngine
from tdstore_remote.cache.cached_engine import CachedEngine
from tdstore_remote.engines.delegating import DelegatingEngine
from tdstore_remote.engines.forks import obstore_is_dead
from tdstore_remote.engines.fsspec_engine import FsspecEngine
from tdstore_remote.engines.obstore_engine import ObstoreEngine
from tdstore_remote.libraries import PACKAGES, load_fsspec, pip_line
from tdstore_remote.options import HTTP, OBSTORE, Settings, for_obstore, split_settings
from tdstore_remote.urls import scheme_of, shown, split_url

LOCAL = ("", "file", "local")


def open_engine(url: str, options: Mapping[str, Any] | None = None, *, writable: bool = True) -> Engine:
    """Open the engine for a URL: obstore if possible, otherwise fsspec; inside a cache if one is requested.

    Args:
        url: the URL.
        options: credentials and endpoint, by the names of fsspec or of obstore, and the fields of
            `tdstore_remote.options.Settings`.
        writable: False never probes abilities other than reading.

    Raises:
        OptionError: an unknown option.
        MissingDependencyError: a package is not installed.
    """
    settings, rest = split_settings(options or {}, shown(url))
    if "::" not in url and scheme_of(url) in LOCAL:
        if rest:
            raise OptionError(f"{url}: a local folder has no option {next(iter(rest))!r}", url=url)
        return LocalEngine(split_scheme(url)[1], writable=writable)
    return ForkSafeEngine(lambda: _build(url, settings, rest), writable=writable)


def knows(url: str) -> bool:
    """Check whether there may be an engine for a URL. Imports fsspec only for schemes that are not well known."""
    scheme = scheme_of(url)
    if scheme in OBSTORE or scheme in PACKAGES or "::" in url:
        return True
    return bool(scheme) and scheme in load_fsspec().available_protocols()


def _build(url: str, settings: Settings, options: Mapping[str, Any]) -> Engine:
    if settings.cache is None and not settings.cache_ram:
        return _bare(url, settings, options)
    with expect_ranges(0):  # a cache may answer what is read
        inner = _bare(url, settings, options)
    return CachedEngine(inner, folder=settings.cache, most=settings.cache_bytes, ram=settings.cache_ram)


def _bare(url: str, settings: Settings, options: Mapping[str, Any]) -> Engine:
    scheme, plain = scheme_of(url), shown(url)
    fits = scheme in OBSTORE and "::" not in url and not (scheme in HTTP and "?" in url)
    if settings.engine == "obstore" and not fits:
        raise OptionError(f"{plain}: engine='obstore' reaches {', '.join(OBSTORE)} only", url=plain)
    if not fits or settings.engine == "fsspec":
        return FsspecEngine(url, options, settings)
    if not obstore_is_dead():
        return ObstoreEngine(url, split_url(url), for_obstore(scheme, options, plain), settings)
    advice = "DataLoader(..., multiprocessing_context='forkserver'), or open the location in the worker only"
    if settings.engine == "obstore":
        raise UnsupportedError(
            f"{plain}: obstore cannot be used in a forked child of a process that used it", url=plain, hint=advice
        )
    try:
        return FsspecEngine(url, options, settings)
    except MissingDependencyError as error:
        raise UnsupportedError(
            f"{plain} cannot be read in this process: it was forked from one that uses obstore, "
            "which would block forever here, and fsspec cannot take its place",
            url=plain,
            hint=f"{advice}; or {pip_line(scheme)}, which forked workers can use",
        ) from error


class ForkSafeEngine(DelegatingEngine):
    """An engine that is rebuilt in each process. Event loops, threads and connections do not survive a fork."""

    def __init__(self, build: Callable[[], Engine], *, writable: bool) -> None:
        self._build = build
        self._writable = writable
        self._engine, self._pid = build(), os.getpid()
        self.url = self._engine.url

    def __repr__(self) -> str:
        return repr(self._engine)

    def __reduce__(self) -> tuple[Any, ...]:
        raise InvalidTypeError("an engine is not pickled: open it again from its URL")

    @property
    def inner(self) -> Engine:
        """Return the engine of this process."""
        if self._pid != os.getpid():
            self._engine, self._pid = self._build(), os.getpid()
        return self._engine

    @property
    def can(self) -> EngineCap:
        """Return the abilities of the engine; only those for reading if it was opened for reading."""
        able = self.inner.can
        return able if self._writable else able & (EngineCap.LIST | EngineCap.ASYNC)

    def conditional(self) -> bool:
        """Check whether the engine has conditional puts."""
        return self._writable and self.inner.conditional()

    def probed(self) -> tuple[bool, ...] | None:
        """Return what was found out about the server; nothing if the engine only reads."""
        return self.inner.probed() if self._writable else None

    def where(self, key: str) -> str:
        """Return the URL of an object, as `Engine.where` does."""
        return self._engine.where(key)

    def close(self) -> None:
        """Close the engine of this process, as `Engine.close` does."""
        if self._pid == os.getpid():
            self._engine.close()
