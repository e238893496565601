"""Parameters of modules in and out, as methods."""

from __future__ import annotations

from tdstore.container.core import Container


class ModulesMixin(Container):
    """from_module, from_modules, to_module."""

    __slots__ = ()
