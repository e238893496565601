"""Groups that another library has opened: the location of their file, to open a store there."""

from __future__ import annotations

import sys

from tdstore.errors import UnsupportedError
from tdstore.types import Path


def place_of_group(group: object) -> tuple[object, Path, str] | None:
    """Return the location, the inner path, and the backend of an open h5py or zarr group; None for other objects.

    The location of a zarr group is its store object.

    Raises:
        UnsupportedError: the file is open for writing in h5py, so that no other can open it.
    """
    h5py, zarr = sys.modules.get("h5py"), sys.modules.get("zarr")  # a library not imported made none of it
    if h5py is not None and isinstance(group, h5py.Group):
        if group.file.mode != "r":
            raise UnsupportedError(
                f"{group.file.filename} is open for writing in h5py, which then holds the file for itself",
                url=group.file.filename,
                hint=f"close it, and pass filename={group.file.filename!r}, group={group.name!r} and mode='r+'",
            )
        return group.file.filename, _parts(group.name), "h5"
    if zarr is not None and isinstance(group, zarr.Group):
        return group.store, _parts(group.path), "zarr"
    return None


def _parts(name: str) -> Path:
    return tuple(part for part in name.split("/") if part)
