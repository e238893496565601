"""icechunk repositories for tdstore: the arrays of a zarr group, with transactions and versions."""

from __future__ import annotations

from collections.abc import Iterable

from tdstore.hookspecs import Backend, hookimpl
from tdstore.store import Cap


@hookimpl
def tdstore_backends() -> Iterable[Backend]:
    """Declare `icechunk`; its libraries are imported when a store is first opened."""
    yield Backend(
        name="icechunk",
        opener="tdstore_icechunk.store:open_icechunk",
        summary="icechunk repositories: a folder, or S3; every commit is a transaction",
        caps=Cap.WRITE
        | Cap.DISCARD
        | Cap.PARTIAL_READ
        | Cap.PARTIAL_WRITE
        | Cap.RESIZE
        | Cap.PERSISTENT
        | Cap.CONCURRENT_READ
        | Cap.VERSIONS,
        schemes=("icechunk",),
        suffixes=(".icechunk",),
        markers=("refs/branch.main/ref.json",),
        remove="tdstore_icechunk.housekeeping:remove_icechunk",
        install="pip install ./plugins/tdstore-icechunk   # from a clone of tdstore",
    )
