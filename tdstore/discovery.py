"""Plugins of this process: found by their entry points, each loaded on its own; failures are recorded.

The one place that touches pluggy and entry points. `find_plugins` gives a complete `Plugins` object or raises: an
interrupt in its middle leaves nothing behind, and the next call begins anew.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
from collections.abc import Iterator
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

import msgspec
import pluggy

from tdstore import hookspecs
from tdstore.errors import BrokenPluginError, InvalidTypeError, MissingDependencyError, PluginError, TDStoreError
from tdstore.hookspecs import Backend, Codec

GROUP = "tdstore"
BUILTIN = "tdstore.builtin"
DISABLE = "TDSTORE_DISABLE_PLUGINS"


class Unused(msgspec.Struct, frozen=True):
    """A plugin that is not in use, and what its source says that it would declare."""

    name: str
    error: PluginError
    suffixes: tuple[str, ...]
    schemes: tuple[str, ...]


class Plugins:
    """Plugins that were loaded, that failed, and that are switched off."""

    def __init__(self) -> None:
        self.manager = pluggy.PluginManager("tdstore")
        self.manager.add_hookspecs(hookspecs)
        self.broken: dict[str, BrokenPluginError] = {}
        self.off: dict[str, EntryPoint] = {}
        self.claims: dict[str, list[tuple[Backend, str]]] = {}
        self._entries: dict[str, EntryPoint] = {}

    def load(self, ep: EntryPoint) -> None:
        """Load one plugin. One that fails at import, or at pluggy's checks, must not take others down."""
        if (other := self._entries.get(ep.name)) and self.manager.has_plugin(ep.name):
            twice = PluginError(f"two distributions name their plugin {ep.name!r}: {_where(other)} and {_where(ep)}")
            hint = f"uninstall one, or leave one out: {DISABLE}={_label(other)} or {DISABLE}={_label(ep)}"
            self._entries[_label(ep)] = ep
            return self.keep_error(_label(ep), ep.value, twice, hint)
        self._entries[ep.name] = ep
        try:
            module = ep.load()
            self.manager.register(module, ep.name)
            unknown = [
                name for name, f in vars(module).items() if name.startswith("tdstore_") and _is_stray_impl(f, name)
            ]
            if unknown:
                raise PluginError(f"{unknown[0]!r} is not a hook of tdstore", hint=f"hooks: {', '.join(_HOOKS)}")
        except (Exception, SystemExit) as error:
            # pluggy writes the name before it validates: a refused plugin would stay half registered.
            if self.manager.has_plugin(ep.name):
                self.manager.unregister(name=ep.name)
            self.keep_error(ep.name, ep.value, error)
        return None

    def keep_error(self, name: str, where: str, error: BaseException, hint: str | None = None) -> None:
        """Remember why a plugin failed. The first failure is the one to report."""
        if name in self.broken:
            return
        said, remedies = (error.message, error.hint) if isinstance(error, TDStoreError) else (str(error), None)
        remedy = hint or f"repair or uninstall it; {DISABLE}={name} leaves it out"
        recorded = BrokenPluginError(
            f"plugin {name!r} of {self.distribution(name)} ({where}) failed to load: {type(error).__name__}: {said}",
            hint=remedy if remedies is None else f"{remedies}; {remedy}",
        )
        recorded.__cause__ = error
        self.broken[name] = recorded

    def call_each(self, hook: str, kind: type[Backend] | type[Codec]) -> Iterator[tuple[str, Any]]:
        """Yield the results of a hook, each with its plugin; a plugin that raises or lies is recorded as broken."""
        for impl in getattr(self.manager.hook, hook).get_hookimpls():
            try:
                items = list(impl.function())
                for item in items:
                    if not isinstance(item, kind):
                        raise InvalidTypeError(f"{hook} must yield {kind.__name__} objects, not {item!r}")
            except (Exception, SystemExit) as error:
                self.keep_error(impl.plugin_name, hook, error)
                continue
            for item in items:
                yield impl.plugin_name, item

    def describe(self, plugin: str) -> str:
        """Describe a plugin for messages: its entry point and its distribution."""
        ep = self._entries.get(plugin)
        return repr(plugin) if ep is None else f"{ep.name!r} of {_distribution(ep)}"

    def distribution(self, plugin: str) -> str:
        """Return the name of a plugin's distribution, for messages."""
        ep = self._entries.get(plugin)
        return _distribution(ep) if ep is not None else "tdstore" if plugin == BUILTIN else "this process"

    def unused(self) -> list[Unused]:
        """Return the plugins that failed to load or are switched off."""
        broken = [Unused(name, e, *_would_declare(name, self._entries.get(name))) for name, e in self.broken.items()]
        off = [Unused(name, switched_off(name), *_would_declare(name, ep)) for name, ep in self.off.items()]
        return broken + off


def find_plugins() -> Plugins:
    """Load the built-in backends and every plugin that is not switched off, and ask for their backends."""
    found = Plugins()
    found.manager.register(importlib.import_module(BUILTIN), BUILTIN)
    off = {_normal(name.strip()) for name in os.environ.get(DISABLE, "").split(",") if name.strip()}
    for ep in entry_points(group=GROUP):
        if off and (named := off & {ep.name, _label(ep)}):  # a label takes the metadata of its distribution
            found.off[named.pop()] = ep
        else:
            found.load(ep)
    for plugin, backend in found.call_each("tdstore_backends", Backend):
        found.claims.setdefault(backend.name, []).append((backend, plugin))
    return found


def switched_off(name: str) -> MissingDependencyError:
    """Create the error of a plugin that `TDSTORE_DISABLE_PLUGINS` names."""
    return MissingDependencyError(
        f"plugin {name!r} is installed but switched off",
        hint=f"take {name} out of the environment variable {DISABLE}",
    )


_HOOKS = [name for name in vars(hookspecs) if name.startswith("tdstore_")]


def _is_stray_impl(function: object, name: str) -> bool:
    return callable(function) and hasattr(function, "tdstore_impl") and name not in _HOOKS


def _distribution(ep: EntryPoint) -> str:
    return "an unknown distribution" if ep.dist is None else f"the distribution {ep.dist.name!r}"


def _where(ep: EntryPoint) -> str:
    return f"{_distribution(ep)} ({ep.value})"


def _label(ep: EntryPoint) -> str:
    """Return a plugin's name that no other distribution has."""
    return ep.name if ep.dist is None else _normal(f"{ep.dist.name}:{ep.name}")


def _normal(label: str) -> str:
    """Normalise `Tdstore_H5:h5` to `tdstore-h5:h5`: one spelling for the names of distributions."""
    distribution, colon, name = label.rpartition(":")
    return re.sub(r"[-_.]+", "-", distribution).lower() + colon + name


# -- what a plugin that cannot be imported would declare -----------------------------------------
def _would_declare(name: str, ep: EntryPoint | None) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Read suffixes and schemes from the source of a plugin, without running it; else return its name as both."""
    source = "" if ep is None else _source(ep)
    suffixes, schemes = _strings(source, "suffixes"), _strings(source, "schemes")
    if suffixes or schemes:
        # A suffix without its dot is refused when it is declared; here it must not match other names.
        return tuple(f".{s.lower().lstrip('.')}" for s in suffixes), tuple(s.lower() for s in schemes)
    own = name.rpartition(":")[2].lower()
    return (f".{own}",), (own,)


def _strings(source: str, field: str) -> list[str]:
    values = re.findall(rf"\b{field}\s*=\s*[(\[]([^)\]]*)[)\]]", source)
    return [text for value in values for text in re.findall(r"""["']([^"'\s]+)["']""", value)]


def _source(ep: EntryPoint) -> str:
    """Return the source of the module that an entry point names; nothing if there is none."""
    top, *below = ep.module.split(".")
    try:
        spec = importlib.util.find_spec(top)  # of a submodule it would import the package
    except (ImportError, ValueError):
        spec = None
    if spec is None:
        return ""
    folders = [Path(folder, *below) for folder in spec.submodule_search_locations or ()]
    files = [path for folder in folders for path in (folder.with_suffix(".py"), folder / "__init__.py")]
    if not below and spec.origin is not None:
        files = [Path(spec.origin)]
    for path in files:
        if path.suffix == ".py" and path.is_file():
            return path.read_text(errors="replace")
    return ""
