"""A plugin in whose import the user presses Ctrl-C, the first time; a variable says where."""

import os

from tdstore.hookspecs import Backend, hookimpl


def _interrupt(where: str) -> None:
    if os.environ.get("INTERRUPT") == where:
        del os.environ["INTERRUPT"]
        raise KeyboardInterrupt


_interrupt("import")


@hookimpl
def tdstore_backends():
    yield Backend(name="patient", opener="interrupts_plugin:open_it", summary="was interrupted", schemes=("patient",))
    _interrupt("hook")
