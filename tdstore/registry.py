"""Registry of backends: resolves locations, explains unavailable backends, opens stores. `discovery` finds the
plugins.
"""

from __future__ import annotations

import difflib
import html
import os
import re
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

from tdstore import lifetime
from tdstore.discovery import DISABLE, Plugins, Unused, find_plugins, switched_off
from tdstore.engine import Engine
from tdstore.errors import (
    AmbiguousBackendError,
    BrokenPluginError,
    InvalidArgumentError,
    InvalidTypeError,
    MissingDependencyError,
    OptionError,
    PluginError,
    StoreNotFoundError,
    TDStoreError,
    UnknownBackendError,
)
from tdstore.hookspecs import Backend, Codec
from tdstore.plugin_calls import TELL, check_options, import_function, named_error, option_names
from tdstore.replacing import check_replaceable
from tdstore.store import Store
from tdstore.storekit.local_engine import LocalEngine
from tdstore.types import MODES, Mode
from tdstore.values import PICKLE


@dataclass(frozen=True, slots=True)
class _Known:
    """A backend of this project that lives in a distribution of its own."""

    install: str
    schemes: tuple[str, ...] = ()
    suffixes: tuple[str, ...] = ()


def _from_clone(name: str) -> str:
    return f"pip install ./plugins/tdstore-{name}   # from a clone of tdstore"


# What to say about our own plugins when they are not installed.
KNOWN: dict[str, _Known] = {
    "h5": _Known(_from_clone("h5"), ("h5",), (".h5", ".hdf5")),
    "zarr": _Known(_from_clone("zarr"), ("zarr",), (".zarr", ".zarr.zip")),
    "icechunk": _Known(_from_clone("icechunk"), ("icechunk",), (".icechunk",)),
    "redis": _Known(_from_clone("redis"), ("redis", "rediss", "redis+unix", "valkey", "valkeys", "dragonfly")),
    "remote": _Known(_from_clone("remote"), tuple("s3 s3a gs gcs az abfs http https hf sftp webdav".split())),
}


@dataclass(frozen=True, slots=True)
class BackendStatus:
    """One line of `tdstore.backends()`: a backend that can be used, or a plugin that failed and why.

    Args:
        name: the backend, or the plugin that failed.
        plugin: the plugin that declares it.
        backend: the declaration; None where the plugin failed.
        error: the error of the plugin.
    """

    name: str
    plugin: str
    backend: Backend | None
    error: BaseException | None = None

    def __str__(self) -> str:
        if self.backend is not None:
            able = ", ".join(str(cap.name).lower().replace("_", " ") for cap in self.backend.caps)
            return f"{self.name:<10} {self.backend.summary}  [{self.plugin}]" + (
                f"\n{'':<10} can: {able}" if able else ""
            )
        return f"{self.name:<10} failed to load: {self.error!r}  [{self.plugin}]"


class BackendTable(list[BackendStatus]):
    """The backends in a list that prints as a table, in a notebook as an HTML table.

    Example:
        >>> sorted({"cuda", "memmap"} & {status.name for status in tdstore.backends()})
        ['cuda', 'memmap']
    """

    __slots__ = ()

    def _cells(self) -> list[tuple[str, str, str]]:
        return [
            (s.name, s.plugin, s.backend.summary if s.backend is not None else f"failed to load: {s.error!r}")
            for s in self
        ]

    def __repr__(self) -> str:
        rows = [("backend", "plugin", "summary"), *self._cells()]
        first, second = (max(len(row[i]) for row in rows) for i in (0, 1))
        return "\n".join(f"{name:<{first}}  {plugin:<{second}}  {text}" for name, plugin, text in rows)

    def _repr_html_(self) -> str:
        rows = "".join("<tr>" + "".join(f"<td>{html.escape(c)}</td>" for c in row) + "</tr>" for row in self._cells())
        return f"<table><tr><th>backend</th><th>plugin</th><th>summary</th></tr>{rows}</table>"


_SEARCH = threading.RLock()  # one thread looks for plugins; a fork waits for it
os.register_at_fork(before=_SEARCH.acquire, after_in_parent=_SEARCH.release, after_in_child=_SEARCH.release)


class Registry:
    """Backends found so far. Finding a declaration never imports the store behind it."""

    def __init__(self) -> None:
        self._codecs: list[Codec] = []
        self._plugins: Plugins | None = None
        self._finding = False

    @property
    def plugins(self) -> Plugins:
        """The plugins of this process, found on first use. A search that was interrupted begins again."""
        if self._plugins is None:
            with _SEARCH:
                if self._finding:
                    raise PluginError(
                        "a plugin asked for the backends while they are being found",
                        hint="ask in the opener, not when the plugin is imported",
                    )
                self._finding = True
                try:
                    self._plugins = self._plugins or find_plugins()
                finally:
                    self._finding = False
        return self._plugins

    def _claims(self) -> dict[str, list[tuple[Backend, str]]]:
        return self.plugins.claims

    # -- finding ------------------------------------------------------------------------
    def backends(self) -> dict[str, Backend]:
        """Return every usable backend by name. A name that two plugins claim is left out until it is requested."""
        return {name: claims[0][0] for name, claims in self._claims().items() if len(claims) == 1}

    def status(self) -> BackendTable:
        """Return every backend and every plugin that failed, by name."""
        lines = [BackendStatus(b.name, plugin, b) for claims in self._claims().values() for b, plugin in claims]
        lines += [
            BackendStatus(name, name, None, PluginError("switched off by TDSTORE_DISABLE_PLUGINS"))
            for name in self.plugins.off
        ]
        broken = self.plugins.broken.items()
        lines += [BackendStatus(name, name, None, error.__cause__ or error) for name, error in broken]
        return BackendTable(sorted(lines, key=lambda line: (line.name, line.plugin)))

    def register(self, backend: Backend) -> None:
        """Declare a backend from this process, for notebooks and tests.

        Raises:
            AmbiguousBackendError: the name is taken.
        """
        claims = self._claims()
        if backend.name in claims:
            plugin = claims[backend.name][0][1]
            raise AmbiguousBackendError(
                f"backend {backend.name!r} is already declared by {plugin} of {self.plugins.distribution(plugin)}",
                hint="give yours another name, or unregister the other one",
            )
        claims[backend.name] = [(backend, "register_backend")]

    def unregister(self, name: str) -> None:
        """Forget a backend that `register` declared."""
        claims = self._claims()
        if claims.get(name, [(None, "")])[0][1] != "register_backend":
            raise UnknownBackendError(f"no backend {name!r} was registered in this process")
        del claims[name]

    def register_codec(self, codec: Codec) -> None:
        """Declare a codec from this process; one of the same name is replaced.

        Raises:
            InvalidArgumentError: the name is one of ours.
        """
        if codec.name == PICKLE:
            raise InvalidArgumentError(f"the codec {PICKLE!r} is what trust=True writes; give yours another name")
        self._codecs = [c for c in self._codecs if c.name != codec.name] + [codec]

    def unregister_codec(self, name: str) -> None:
        """Forget a codec that `register_codec` declared."""
        self._codecs = [c for c in self._codecs if c.name != name]

    def codecs(self) -> list[Codec]:
        """Return every codec that a plugin or this process declares."""
        return self._codecs + [c for _, c in self.plugins.call_each("tdstore_codecs", Codec)]

    # -- resolving ----------------------------------------------------------------------
    def get(self, name: str) -> Backend:
        """Return the backend of that name, or the only one for URLs of that scheme: "dragonfly" is redis.

        Raises:
            AmbiguousBackendError: two plugins declare it. BrokenPluginError: its plugin failed to load.
            MissingDependencyError: it is ours, but not installed. UnknownBackendError: nobody declares it.
        """
        claims = (self._plugins or self.plugins).claims.get(name, [])
        if len(claims) == 1:
            return claims[0][0]
        if claims:
            plugins = [plugin for _, plugin in claims]
            raise AmbiguousBackendError(
                f"backend {name!r} is declared by {' and '.join(map(self.plugins.describe, plugins))}",
                hint=f"uninstall one, or leave one out: {' or '.join(f'{DISABLE}={p}' for p in plugins)}",
            )
        if name in self.plugins.broken:
            raise self.plugins.broken[name].with_traceback(None)  # else each raise would add to it
        if name in self.plugins.off:
            raise switched_off(name)
        if name in KNOWN:
            raise MissingDependencyError(f"the {name!r} backend is not installed", hint=KNOWN[name].install)
        every = [b for named in self._claims().values() for b, _ in named]
        if meant := [b for b in every if name in b.schemes]:
            return self._only(meant, name)
        raise self._unknown(f"no backend is named {name!r}", name)

    def resolve(self, location: str | os.PathLike[str] | None, storage: str | Backend | None = None) -> Backend | None:
        """Resolve the backend of a location: explicit `storage`, scheme, suffix, marker, magic, then the guess hook.

        Args:
            location: a path or URL.
            storage: the name of a backend, a URL whose scheme names it, or a declaration.

        Returns:
            The backend; None for a local path that determines none, such as that of a new directory.

        Raises:
            AmbiguousBackendError: two plugins claim it. UnknownBackendError: nobody knows its scheme.
            BrokenPluginError, MissingDependencyError: it belongs to a plugin that failed, is switched off, or is ours
                and not installed.
        """
        if isinstance(storage, Backend):
            return storage
        if storage is not None:
            return self.resolve_url(str(storage)) if "://" in str(storage) else self.get(str(storage))
        if location is None:
            return None
        text = os.fspath(location)
        if "://" in text or "::" in text:
            return self.resolve_url(text)
        if squeezed := _SQUEEZED_URL.match(text):
            # pathlib makes "s3:/bucket" of a URL, and a local folder "s3:" would come of it.
            raise UnknownBackendError(
                f"{text!r} looks like a URL that went through pathlib",
                hint=f"pass {squeezed[1] + '://'!r}... as a string",
            )
        known = (self._plugins or self.plugins).claims
        lower, isfile = text.lower(), os.path.isfile
        folder = os.path.isdir(text)
        head = _first_bytes(text) if not folder and isfile(text) else None
        by_suffix: list[Backend] = []
        by_content: list[Backend] = []
        for named in known.values():
            for backend, _ in named:
                if backend.suffixes and lower.endswith(backend.suffixes):
                    by_suffix.append(backend)
                if folder:
                    for marker in backend.markers:
                        if os.access(place := f"{text}/{marker}", os.F_OK) and isfile(place):  # most are missing
                            by_content.append(backend)
                            break
                elif head is not None and backend.magic and head.startswith(tuple(backend.magic)):
                    by_content.append(backend)
        claims = by_suffix if head is None and not folder else by_content
        # What the bytes say outweighs the name, unless the bytes say nothing or two things.
        if len(claims) != 1:
            claims = [b for b in claims or by_suffix if b in by_suffix] or claims or by_suffix
        if lower.endswith(".zip") and not by_suffix:  # so many formats are zips that the bytes say little
            self._refuse_unused(text)
        if len(claims) == 1 and len(known[claims[0].name]) == 1:
            return claims[0]
        if len(claims) > 1 and (name := self._guess(text)):
            return self.get(name)
        if claims:
            return self._only(claims, text)
        # A hook that opened a named pipe would wait for its writer.
        special = os.path.exists(text) and not os.path.isfile(text) and not os.path.isdir(text)
        if not special and (name := self._guess(text)):
            return self.get(name)
        self._refuse_unused(text)
        return None

    def unused(self) -> list[Unused]:
        """Return plugins that failed to load or are switched off, and backends of ours that are not installed."""
        found = [
            Unused(p.name, p.error, KNOWN[p.name].suffixes, KNOWN[p.name].schemes) if p.name in KNOWN else p
            for p in self.plugins.unused()
        ]
        used = {plugin.name for plugin in found} | set(self._claims())
        for name, known in KNOWN.items():
            if name not in used:
                error = MissingDependencyError(f"the {name!r} backend is not installed", hint=known.install)
                found.append(Unused(name, error, known.suffixes, known.schemes))
        return found

    def failed(self) -> list[PluginError]:
        """Return the errors of plugins that failed to load or are switched off."""
        return [plugin.error for plugin in self.plugins.unused()]

    def _refuse_unused(self, path: str) -> None:
        """Raise the error of a plugin that is not in use and to which the suffix of a path belongs."""
        name = os.path.basename(path).lower()
        for plugin in self.unused():
            for suffix in plugin.suffixes:
                if name.endswith(suffix) and name != suffix:
                    raise _about(plugin, f"{path}: {suffix!r} belongs to a backend that cannot be used")

    def resolve_url(self, url: str) -> Backend:
        """Resolve the backend of a URL, by its scheme; then by suffix for schemes that several formats share."""
        scheme = url.partition("://")[0].partition("::")[0].partition(":")[0].lower()
        known = self.plugins.claims
        claims = [b for named in known.values() for b, _ in named if scheme in b.schemes]
        if len(claims) == 1 and len(known[claims[0].name]) == 1:
            return claims[0]
        if claims:
            return self._only(claims, url)
        if name := self._guess(url):
            return self.get(name)
        for plugin in self.unused():
            if scheme in plugin.schemes or (
                plugin.name == "remote" and "::" in url
            ):  # chained: a cache before a bucket
                raise _about(plugin, f"{without_password(url)}: {scheme!r} belongs to a backend that cannot be used")
        raise self._unknown_scheme("backend", scheme, url)

    def _only(self, claims: list[Backend], location: str) -> Backend:
        names = list(dict.fromkeys([b.name for b in claims]))
        if len(names) > 1:
            owners = [f"{b.name!r} ({self._origin(b)})" for b in claims]
            raise AmbiguousBackendError(
                f"{without_password(location)!r} is claimed by the backends {' and '.join(dict.fromkeys(owners))}",
                hint=f"pass {' or '.join(f'storage={name!r}' for name in names)}",
            )
        return self.get(names[0])

    def _guess(self, location: str) -> str | None:
        for impl in reversed(self.plugins.manager.hook.tdstore_guess_backend.get_hookimpls()):
            try:
                name = impl.function(location)
                if not isinstance(name, str | None):
                    raise InvalidTypeError(f"tdstore_guess_backend must return a name or None, not {name!r}")
            except Exception as error:
                self.plugins.keep_error(impl.plugin_name, "tdstore_guess_backend", error)
                continue
            if name is not None:
                return name
        return None

    def _unknown(self, message: str, name: str) -> UnknownBackendError:
        near = difflib.get_close_matches(name, sorted(self._claims()), 1)
        return self._unknown_error(message, f"did you mean {near[0]!r}?" if near else None)

    def _unknown_scheme(self, kind: str, scheme: str, url: str) -> UnknownBackendError:
        schemes = {s for claims in self._claims().values() for backend, _ in claims for s in backend.schemes}
        near = difflib.get_close_matches(scheme, sorted(schemes | self._claims().keys()), 1)
        hint = f"did you mean {near[0] + '://'!r}?" if near else None
        if near and near[0] not in schemes:
            hint = f"the backend {near[0]!r} has no URLs: pass a path, and storage={near[0]!r}"
        return self._unknown_error(f"no {kind} knows the scheme {scheme!r} of {without_password(url)!r}", hint)

    def _unknown_error(self, message: str, hint: str | None) -> UnknownBackendError:
        failed = self.plugins.broken
        broken = f"; failed to load: {', '.join(sorted(failed))}" if failed else ""
        if failed and hint is None:  # the name may be one that such a plugin would declare
            hint = "; ".join(f"{error.message}: {error.hint}" for _, error in sorted(failed.items())[:3])
        return UnknownBackendError(f"{message}; installed: {', '.join(sorted(self._claims()))}{broken}", hint=hint)

    # -- opening ------------------------------------------------------------------------
    def open(
        self,
        backend: Backend,
        location: str | os.PathLike[str] | object | None,
        *,
        mode: Mode = "r",
        **options: Any,
    ) -> Store:
        """Call the backend's opener, with its options checked by name.

        `trust=True` and `trust=False` are about values, which backends never read; any other is an option of theirs.

        Args:
            backend: the declaration.
            location: a path, a URL, or what `Store.reopen_token` returned.
            mode: see `Store`.
            **options: options of the backend's opener.

        Raises:
            StoreExistsError: mode "w", and what is there is not a dataset of that backend.
            OptionError, PluginError, StoreError: see `tdstore.store.Store`.
        """
        if isinstance(options.get("trust"), bool | None):
            options.pop("trust", None)
        if mode not in MODES:
            raise OptionError(f"mode must be one of {', '.join(map(repr, MODES))}, not {mode!r}")
        if mode != "w" or not backend.replaces_open:
            lifetime.settle()  # a handle that was dropped may still hold the lock of this place
        opener = cast("Callable[..., Store]", import_function(backend, "opener", self._origin))
        check_options(backend, opener, options)
        place = os.fspath(location) if type(location) is not str and isinstance(location, os.PathLike) else location
        if mode == "w" and isinstance(place, str) and not backend.checks_target:
            self._check_replaceable(backend, opener, place, options)
        store = self._call(backend, opener, place, mode, options)
        if store.opened_as is None:  # an opener may have handed over to that of another backend
            store.opened_as = backend.name
        for impl in (self._plugins or self.plugins).manager.hook.tdstore_store_opened.get_hookimpls():
            try:
                impl.function(store)
            except Exception as error:  # an error of a hook must not make the store unusable
                self.plugins.keep_error(impl.plugin_name, "tdstore_store_opened", error)
        return store

    def engine(self, url: str, options: Mapping[str, Any] | None = None) -> Engine:
        """Open an engine: the core's own for a local path or `file://`, a plugin's for every other URL.

        Args:
            url: the URL.
            options: credentials, endpoint and timeout, for the plugin.

        Raises:
            MissingDependencyError: the plugin for that scheme is not installed.
            UnknownBackendError: nobody knows the scheme. StoreError: as the engine says.
        """
        scheme, rest = split_scheme(url)
        if "::" not in url and (not scheme or scheme.lower() in ("file", "local")):
            return LocalEngine(rest)
        for impl in reversed(self.plugins.manager.hook.tdstore_open_engine.get_hookimpls()):
            arguments = {"url": url, "options": options or {}}
            if (found := impl.function(*(arguments[name] for name in impl.argnames))) is not None:
                if not isinstance(found, Engine):
                    raise BrokenPluginError(
                        f"plugin {impl.plugin_name!r} returned {type(found).__name__}, not a tdstore.engine.Engine"
                    )
                return found
        if "remote" not in self._claims():
            self.get("remote")  # says what to install, or why the installed one failed
        raise self._unknown_scheme("engine", scheme, url)

    def locate(self, location: Any, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Ask the plugins for the path or URL that an object of another library stands for.

        Args:
            location: a file system with a path in it, or a store of objects; anything else is returned as it is.
            options: those of the caller, which take precedence over those of the object.

        Raises:
            InvalidTypeError, UnsupportedError: a plugin knows it, and it has no place of its own.
        """
        for impl in reversed(self.plugins.manager.hook.tdstore_locate.get_hookimpls()):
            if (found := cast(Any, impl.function(location))) is not None:
                merged = {**found[1], **(options.get("storage_options") or {})}
                return found[0], {**options, "storage_options": merged} if found[1] else options
        return location, options

    def _check_replaceable(
        self, backend: Backend, opener: Callable[..., Store], place: str, options: dict[str, Any]
    ) -> None:
        # Only the header is wanted, and at once: whoever holds a lock there is a writer of that backend.
        known = option_names(opener) or ()
        quick = {name: value for name, value in (("lock_timeout", 0.0), ("verify", "none")) if name in known}

        def open_it() -> Store:
            if options:
                # Those of writing alone may be refused in mode "r": it is then opened without one, or without any.
                fewer = [{name: options[name] for name in options if name != left_out} for left_out in options]
                for asked in (options, *fewer):
                    with suppress(OptionError):
                        return self._call(backend, opener, place, "r", {**asked, **quick})
            return self._call(backend, opener, place, "r", quick)

        check_replaceable(backend, place, _shown(place), open_it)

    def _call(
        self, backend: Backend, opener: Callable[..., Store], place: object, mode: Mode, options: dict[str, Any]
    ) -> Store:
        try:
            store = opener(place, mode=mode, **options)
        except (TDStoreError, MemoryError):
            raise
        except Exception as error:
            shown = _shown(place)
            doing, url = f"open {shown} with mode {mode!r}", None if place is None else shown
            raise named_error(error, backend, self._origin, doing, url, "opener") from error
        if not isinstance(store, Store):
            raise BrokenPluginError(
                f"the opener {backend.opener} of the backend {backend.name!r} ({self._origin(backend)}) returned "
                f"{type(store).__name__}, not a tdstore.Store",
                hint=TELL,
            )
        return store

    def _origin(self, backend: Backend) -> str:
        """Return the plugin that declares a backend, and its distribution, for messages."""
        for declared, plugin in self._claims().get(backend.name, ()):
            if declared is backend:
                origin = self.plugins.distribution(plugin)
                return f"plugin {plugin!r} of {origin}" if origin not in ("tdstore", "this process") else origin
        return "this process"

    def opener(self, backend: Backend) -> Callable[..., Store]:
        """Import the opener of a backend.

        Args:
            backend: the declaration.

        Raises:
            MissingDependencyError: a package is not installed. BrokenPluginError: there is no such function.
        """
        return cast("Callable[..., Store]", import_function(backend, "opener", self._origin))

    def call(self, backend: Backend, field: str, location: str | None, options: dict[str, Any]) -> object:
        """Call an optional function of a backend.

        Args:
            backend: the declaration.
            field: the field that names the function: "exists", "remove" or "list".
            location: its first argument.
            options: its options, checked by name.

        Returns:
            What it returned; `NotImplemented` where the backend declares none.

        Raises:
            OptionError: the function has no such option. PluginError, StoreError: see `tdstore.errors`.
        """
        if not getattr(backend, field):
            return NotImplemented
        lifetime.settle()  # a handle that was dropped may still hold the lock of this place
        function = import_function(backend, field, self._origin)
        check_options(backend, function, options)
        try:
            found = function(location, **options)
            return found if found is NotImplemented or field != "list" else list(cast(Iterable[str], found))
        except (TDStoreError, MemoryError):
            raise
        except Exception as error:
            shown = None if location is None else _shown(location)
            raise named_error(error, backend, self._origin, f"{field} {shown}", shown, field) from error

    def has_option(self, backend: Backend, name: str) -> bool:
        """Check whether the opener of a backend spells out an option.

        Args:
            backend: the declaration.
            name: name of the option.
        """
        return name in (option_names(self.opener(backend)) or ())


_SQUEEZED_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/(?!/)")


def without_password(url: str) -> str:
    """Return a URL for display, without what stands before the `@` of the host."""
    return re.sub(r"//[^/@\s]*@", "//***@", url)


def _shown(place: object) -> str:
    return without_password(place) if isinstance(place, str) else repr(place)


def _about(plugin: Unused, message: str) -> PluginError:
    """Create the error of a plugin that is not in use, for one location."""
    error = type(plugin.error)(f"{message}: {plugin.error.message}", hint=plugin.error.hint)
    error.__cause__ = plugin.error.__cause__
    return error


def _first_bytes(path: str) -> bytes:
    try:
        with open(path, "rb") as f:
            return f.read(32)
    except OSError as error:
        raise StoreNotFoundError(f"cannot read {path}: {error.strerror}", url=str(path)) from error


@cache
def registry() -> Registry:
    """Return the registry of this process, filled on first use."""
    return Registry()


def split_scheme(location: str) -> tuple[str, str]:
    """Split `"h5://runs/a.h5"` into `("h5", "runs/a.h5")`; a plain path has the scheme `""`."""
    scheme, sep, rest = location.partition("://")
    return (scheme, rest) if sep else ("", location)
