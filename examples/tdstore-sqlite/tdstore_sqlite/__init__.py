"""`.sqlite` files for tdstore."""

from __future__ import annotations

from collections.abc import Iterable

from tdstore.hookspecs import Backend, hookimpl
from tdstore.store import Cap


@hookimpl
def tdstore_backends() -> Iterable[Backend]:
    """Declare `sqlite`. The store itself is imported when the first file is opened."""
    yield Backend(
        name="sqlite",
        opener="tdstore_sqlite.store:open_sqlite",
        summary="one SQLite file, rows in place",
        caps=Cap.WRITE
        | Cap.PARTIAL_READ
        | Cap.PARTIAL_WRITE
        | Cap.RESIZE
        | Cap.PERSISTENT
        | Cap.CONCURRENT_READ
        | Cap.DISCARD,
        suffixes=(".sqlite",),
    )
