"""HDF5 storage for tdstore: groups are nested TensorDicts, datasets are leaves."""

from __future__ import annotations

from collections.abc import Iterable

from tdstore.hookspecs import Backend, hookimpl
from tdstore.store import Cap


@hookimpl
def tdstore_backends() -> Iterable[Backend]:
    """Declare `h5`; h5py is imported when a file is first opened."""
    yield Backend(
        name="h5",
        opener="tdstore_h5.store:open_h5",
        summary="one HDF5 file",
        caps=(
            Cap.WRITE
            | Cap.PARTIAL_READ
            | Cap.PARTIAL_WRITE
            | Cap.RESIZE
            | Cap.PERSISTENT
            | Cap.CONCURRENT_READ
            | Cap.DISCARD
        ),
        schemes=("h5",),
        suffixes=(".h5", ".hdf5"),
        magic=(b"\x89HDF\r\n\x1a\n",),
        install="pip install ./plugins/tdstore-h5   # from a clone of tdstore",
    )
