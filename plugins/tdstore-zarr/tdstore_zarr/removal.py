"""The part of `tdstore.delete` for zarr groups behind an engine. Local ones are files and folders like any other."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from tdstore.engine import EngineCap
from tdstore.errors import StoreNotFoundError, UnsupportedError
from tdstore.registry import split_scheme, without_password
from tdstore.storekit import refusals
from tdstore_zarr.layout.document import NAME
from tdstore_zarr.place.memory_engine import engine_of
from tdstore_zarr.place.objects import CLAIM, ObjectPlace
from tdstore_zarr.place.redo_log import PREFIX
from tdstore_zarr.store import open_on

_ZARR_KEY = re.compile(r"(.*/)?(zarr\.json|(c[./])?\d+([./]\d+)*|c)")


def remove_zarr(
    location: str, *, storage_options: Mapping[str, Any] | None = None, lock_timeout: float = 0.0, **options: Any
) -> object:
    """Remove a zarr group that tdstore saved behind a URL: its root first, so that nothing can be opened.

    Args:
        location: the URL; `zarr://` may precede it.
        storage_options: credentials and endpoint of the engine.
        lock_timeout: seconds to wait for another writer.
        **options: of `open_zarr`, such as `single_writer=True`.

    Returns:
        `NotImplemented` for a local path.

    Raises:
        StoreNotFoundError: there is no such group. StoreBusyError: another process writes it.
        StoreExistsError: another program saved it, or has files of its own there.
        UnsupportedError: it is a group of a larger dataset.
    """
    text = location.removeprefix("zarr://")
    if split_scheme(text)[0] in ("", "file", "local") and "::" not in text:
        return NotImplemented
    _check_whole(text, storage_options)
    quick = {"verify": "none", "lock_timeout": lock_timeout, "storage_options": storage_options}
    store = open_on(engine_of(text, storage_options), mode="r+", location=text, **{**options, **quick})
    session = store._session
    place = session.place
    assert isinstance(place, ObjectPlace)
    try:
        if not session.document.ours:
            raise refusals.other_kind(place.url, "a zarr group of another program")
        place.take()
        base = place.engine.base
        keys = [*session.written_keys(), *(f"{node}/{NAME}" for node in session.document.metadata)]
        if EngineCap.LIST in base.can:
            keys = [entry.key for entry in base.list()]
            ours = (CLAIM, NAME)
            strange = [k for k in keys if k not in ours and not k.startswith(PREFIX) and not _ZARR_KEY.fullmatch(k)]
            if strange:
                raise refusals.foreign_files(place.url, sorted(strange), "a zarr store")
        base.delete([NAME])
        base.delete([key for key in keys if key not in (NAME, CLAIM)])
    finally:
        session.close(discard=True)
    return None


def _check_whole(location: str, storage_options: Mapping[str, Any] | None) -> None:
    """Refuse a group of a zarr store: without it the store would be damaged."""
    above = location.rstrip("/").rpartition("/")[0]
    if "?" in location or above.endswith(("/", ":")) or "/" not in above:
        return  # the root of a bucket
    with engine_of(above, storage_options) as engine:
        try:
            engine.size(NAME)
        except StoreNotFoundError:
            return
    url = without_password(location)
    raise UnsupportedError(
        f"{url} is a part of what is stored at {without_password(above)}",
        url=url,
        hint="delete the entry of the TensorDict: del td[key]",
    )
