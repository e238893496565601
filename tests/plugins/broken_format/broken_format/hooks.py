"""A plugin for files with the suffix `.rows`, which cannot be imported."""

from collections.abc import Iterable

import a_library_that_nobody_has  # noqa: F401

from tdstore.hookspecs import Backend, hookimpl


@hookimpl
def tdstore_backends() -> Iterable[Backend]:
    yield Backend(
        name="rowfile",
        opener="broken_format.store:open_rows",
        summary="one file of rows",
        schemes=("rowfile",),
        suffixes=(".rows", ".rows.gz"),
        magic=(b"ROWS",),
    )
