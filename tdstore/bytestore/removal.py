"""Removal of a store of the object layout: its manifest first, so that nothing opens, then its objects."""

from __future__ import annotations

import time

from tdstore.bytestore.commit import fetch_manifest
from tdstore.bytestore.manifest import OBJECT_NAME, VERSION_NAME, decode_objects, is_object_layout, version_name
from tdstore.engine import Engine, EngineCap
from tdstore.errors import StoreNotFoundError, UnsupportedError
from tdstore.storekit.documents import NAME

ABANDONED = 24 * 3600.0
"""Objects that no manifest names are of a writer at work, or of one that ended: it had so many seconds."""


def remove_objects(engine: Engine, url: str) -> None:
    """Remove a store. A writer that has it open gets a `ConflictError` from its next commit.

    Args:
        engine: the engine, at the root of the store.
        url: the location, for messages.

    Raises:
        StoreNotFoundError: there is none. CorruptStoreError: its manifest is damaged.
        UnsupportedError: an uploaded directory, or the engine cannot delete.

    Example:
        >>> with LocalEngine(tmp_path) as engine:
        ...     open_objects(engine, mode="x", close_engine=False).save_header(Header())
        ...     remove_objects(engine, "run")
        ...     list(engine.list())
        []
    """
    blob = fetch_manifest(engine)
    if blob is None:
        raise StoreNotFoundError(f"nothing is stored at {url}: there is no {NAME}", url=url)
    if EngineCap.WRITE not in engine.can:
        raise engine.unsupported(EngineCap.WRITE)
    data = bytes(blob.data)
    if not is_object_layout(data):
        raise UnsupportedError(
            f"{url} is a directory of files that was uploaded, and cannot be deleted",
            url=url,
            hint="remove it with the tool that uploaded it",
        )
    document = decode_objects(data, url=url)
    names = dict.fromkeys([o.name for o in document.objects] + [r.name for r in document.retired])
    names |= dict.fromkeys([h.name for h in document.held] + [version_name(v.id) for v in document.versions])
    engine.delete([NAME])
    if EngineCap.LIST in engine.can:
        limit = time.time() - ABANDONED
        entries = engine.list("data/")
        names |= dict.fromkeys(e.key for e in entries if OBJECT_NAME.fullmatch(e.key) and e.modified <= limit)
        entries = engine.list("versions/")
        names |= dict.fromkeys(e.key for e in entries if VERSION_NAME.fullmatch(e.key) and e.modified <= limit)
    engine.delete(list(names))
    engine.sweep()
