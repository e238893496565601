"""Hooks of a plugin, and the declaration of a backend.

A plugin is a module named by an entry point in group `tdstore`:

    [project.entry-points.tdstore]
    zarr = "tdstore_zarr"

    # tdstore_zarr/__init__.py
    from tdstore.hookspecs import Backend, hookimpl

    @hookimpl
    def tdstore_backends():
        yield Backend(name="zarr", opener="tdstore_zarr.store:open_zarr", summary="zarr v3 arrays", schemes=("zarr",))

Declaring must stay cheap: import nothing heavy at module level.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import pluggy

from tdstore.engine import Engine
from tdstore.errors import PluginError
from tdstore.store import Cap, Store

_SCHEME = re.compile(r"[a-z][a-z0-9+.-]*")

hookspec = pluggy.HookspecMarker("tdstore")
hookimpl = pluggy.HookimplMarker("tdstore")


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """A declaration: plain data, so that declaring imports nothing heavy."""

    name: str
    opener: str
    """`"package.module:function"`, imported on first use; called as `function(location, mode=..., **options)`."""
    summary: str
    """One line for lists of backends."""
    caps: Cap = Cap.NONE
    """Abilities of its stores, for lists of backends; the core uses the `caps` of each store."""
    schemes: tuple[str, ...] = ()
    """URL schemes, in lower case and without `://`."""
    suffixes: tuple[str, ...] = ()
    """Endings of a location, in lower case and with their dot, such as `".h5"`."""
    markers: tuple[str, ...] = ()
    """Files that identify a directory of this kind, such as `"zarr.json"`."""
    magic: tuple[bytes, ...] = ()
    """First bytes of a file of this kind."""
    install: str = ""
    """The line to paste when a package that it needs is missing."""
    checks_target: bool = False
    """Whether the opener itself refuses, in mode "w", to replace what is not a dataset. Else the core opens in mode "r"
    what is there, before it calls the opener."""
    replaces_open: bool = False
    """Whether the opener, in mode "w", also replaces what this process has open, and its commit ends what was dropped
    (`lifetime.settle`). Otherwise the core ends that before it calls the opener."""
    exists: str = ""
    """`"package.module:function"`, called as `function(location, **options) -> bool`, where that is cheaper than
    opening the place. Default: the core opens it in mode "r"."""
    remove: str = ""
    """`"package.module:function"`, called as `function(location, **options)` by `tdstore.delete`. Default: the core
    removes a local file, or renames a local folder and then removes it; it also does so if this returns
    `NotImplemented`. Needed for all other places."""
    list: str = ""
    """`"package.module:function"`, called as `function(location, **options) -> Iterable[str]` by
    `tdstore.list_datasets`: the locations at and below one. Default: the core searches local folders."""

    def __post_init__(self) -> None:
        """Refuse a declaration that could match nothing, or too much.

        Raises:
            PluginError: a suffix without its dot or in capitals, a scheme with `://`, text instead of a tuple, or a
                function that is not `package.module:function`.
        """
        for field in ("schemes", "suffixes", "markers", "magic"):
            value = getattr(self, field)
            if not isinstance(value, tuple):
                raise PluginError(
                    f"backend {self.name!r} declares {field}={value!r}, which is not a tuple", hint=f"({value!r},)"
                )
        for field in ("exists", "remove", "list"):
            value = getattr(self, field)
            if value and not all(value.partition(":")[::2]):
                raise PluginError(
                    f"backend {self.name!r} declares {field}={value!r}", hint="a function is 'package.module:function'"
                )
        for suffix in self.suffixes:
            if not suffix.startswith(".") or suffix != suffix.lower() or len(suffix) < 2:
                raise PluginError(
                    f"backend {self.name!r} declares the suffix {suffix!r}",
                    hint=f"a suffix begins with a dot and is in lower case: {'.' + suffix.lower().lstrip('.')!r}",
                )
        for scheme in self.schemes:
            if not _SCHEME.fullmatch(scheme):
                raise PluginError(
                    f"backend {self.name!r} declares the scheme {scheme!r}",
                    hint="a scheme is in lower case and without '://', such as 's3'",
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class Codec:
    """Conversion of one kind of object that is not a tensor to and from plain data."""

    name: str
    """Written beside the data; must not change."""
    kind: type
    """The exact class that this codec converts."""
    encode: Callable[[Any], Any]
    """To plain data (anything that `tdstore.values.encode_value` takes)."""
    decode: Callable[[Any], Any]
    """Back from plain data; must not run code that it finds there."""


@hookspec
def tdstore_backends() -> Iterable[Backend]:  # type: ignore[empty-body]
    """Declare the storage backends that this plugin provides."""


@hookspec(firstresult=True)
def tdstore_guess_backend(location: str) -> str | None:
    """Name the backend of a location that no declaration matches. Called with local paths and URLs; must not write."""


@hookspec
def tdstore_codecs() -> Iterable[Codec]:  # type: ignore[empty-body]
    """Declare codecs: conversions of classes that are not tensors."""


@hookspec
def tdstore_store_opened(store: Store) -> None:
    """Observe a store that was opened. Read and measure only; change nothing."""


@hookspec(firstresult=True)
def tdstore_open_engine(url: str, options: Mapping[str, Any]) -> Engine | None:
    """Open an engine at a URL, so that any format can be read from it. Local paths never come here.

    Args:
        url: the URL.
        options: the user's `storage_options=`: credentials, endpoint, timeout.

    Returns:
        The engine; None for a scheme of another plugin.
    """


@hookspec(firstresult=True)
def tdstore_locate(location: object) -> tuple[str, Mapping[str, Any]] | None:
    """Name the place that an object of another library stands for, such as a file system with a path in it.

    Args:
        location: what the user passed as a location; neither text nor a path of the standard library.

    Returns:
        A path or URL, and the `storage_options` that reach it; None for an object of another plugin.
    """
