"""Calls of the functions that backends declare: imported by name, options checked by name, errors named."""

from __future__ import annotations

import difflib
import importlib
import inspect
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

from tdstore.errors import (
    BrokenPluginError,
    MissingDependencyError,
    OptionError,
    StoreIOError,
)
from tdstore.hookspecs import Backend

TELL = "tell the authors of the plugin"
_imported: set[str] = set()
"""Modules whose import has ended: `import_module` asks for locks each time."""


def import_function(backend: Backend, field: str, origin: Callable[[Backend], str]) -> Callable[..., object]:
    """Import a function that a declaration names.

    Args:
        backend: the declaration.
        field: the field that names the function, such as "opener".
        origin: names the plugin that declares it, for messages.

    Raises:
        MissingDependencyError: a package is not installed. BrokenPluginError: there is no such function.
    """
    module, _, attribute = getattr(backend, field).partition(":")
    what = "an opener" if field == "opener" else f"a function {field!r}"
    try:
        known = sys.modules.get(module) if module in _imported else None
        found: Callable[..., object] = getattr(known or importlib.import_module(module), attribute)
        _imported.add(module)
    except ImportError as error:
        raise MissingDependencyError(
            f"the {backend.name!r} backend ({origin(backend)}) needs {error.name or error!s}, which is not installed",
            hint=backend.install or None,
        ) from error
    except (AttributeError, ValueError) as error:
        raise BrokenPluginError(
            f"backend {backend.name!r} ({origin(backend)}) names {what} that is not there: {error}", hint=TELL
        ) from error
    return found


def named_error(
    error: Exception, backend: Backend, origin: Callable[[Backend], str], doing: str, url: str | None, field: str
) -> Exception:
    """Return what an error of a plugin's function is raised as, with the names that a user needs.

    Args:
        error: what was raised, none of `tdstore.errors`.
        backend: the declaration.
        origin: names the plugin that declares it.
        doing: what failed, as "open runs/a with mode 'r'".
        url: the location; None for a store in memory.
        field: the field that names the function.

    Returns:
        A MissingDependencyError for an ImportError, a StoreIOError for an OSError, a BrokenPluginError for any other.
    """
    message = f"the backend {backend.name!r} ({origin(backend)}) failed to {doing}: {type(error).__name__}: {error}"
    if isinstance(error, ImportError):
        return MissingDependencyError(message, hint=backend.install or None)
    if isinstance(error, OSError):
        return StoreIOError(message, url=url, errno=error.errno)
    what = "the opener" if field == "opener" else f"its function {field!r}"
    return BrokenPluginError(message, hint=f"{what} should raise an error of tdstore.errors: {TELL}")


def check_options(backend: Backend, function: Callable[..., object], options: dict[str, Any]) -> None:
    """Refuse options that a function does not spell out.

    Args:
        backend: the declaration, for the message.
        function: the opener, or another function that the backend declares.
        options: by name.

    Raises:
        OptionError: it names the option, and those that there are.
    """
    known = option_names(function)
    if known is None:
        return
    for name in options:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            raise OptionError(
                f"the {backend.name!r} backend has no option {name!r}; its options are {', '.join(known) or 'none'}",
                hint=f"did you mean {near[0]!r}?" if near else None,
            )


@cache
def option_names(function: Callable[..., object]) -> tuple[str, ...] | None:
    """Return the options that a function spells out; None when it takes any and checks them itself."""
    parameters = inspect.signature(function).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return None
    return tuple(name for name, p in parameters.items() if p.kind is p.KEYWORD_ONLY and name != "mode")
