"""Stores in the cloud for tdstore: engines for every URL, and the `remote` backend over them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from tdstore.engine import Engine
from tdstore.hookspecs import Backend, hookimpl
from tdstore.store import Cap
from tdstore_remote.opening import knows, open_engine
from tdstore_remote.ready_made import locate

SCHEMES = (
    *("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "http", "https"),
    *("memory", "file", "ftp", "sftp", "ssh", "webdav", "dav", "smb", "hf", "hdfs", "webhdfs", "github", "dropbox"),
    *("oss", "zip", "tar"),
)


@hookimpl
def tdstore_backends() -> Iterable[Backend]:
    """Declare `remote`; obstore and fsspec are imported when a location needs them."""
    yield Backend(
        name="remote",
        opener="tdstore_remote.store:open_remote",
        summary="S3, GCS, Azure, http, and every URL that fsspec knows",
        caps=Cap.WRITE
        | Cap.PARTIAL_READ
        | Cap.PARTIAL_WRITE
        | Cap.RESIZE
        | Cap.PERSISTENT
        | Cap.CONCURRENT_READ
        | Cap.DISCARD
        | Cap.VERSIONS,
        schemes=SCHEMES,
        remove="tdstore_remote.housekeeping:remove_remote",
        list="tdstore_remote.housekeeping:list_remote",
        install="pip install ./plugins/tdstore-remote   # from a clone of tdstore",
        checks_target=True,
    )


@hookimpl
def tdstore_guess_backend(location: str) -> str | None:
    """Recognise chained URLs (`simplecache::s3://...`), and schemes that an fsspec package adds."""
    if "::" in location or ("://" in location and knows(location)):
        return "remote"
    return None


@hookimpl
def tdstore_open_engine(url: str, options: Mapping[str, Any]) -> Engine | None:
    """Open any URL that obstore or fsspec supports."""
    return open_engine(url, options) if knows(url) else None


@hookimpl
def tdstore_locate(location: object) -> tuple[str, Mapping[str, Any]] | None:
    """Accept file systems of fsspec with a path, UPaths, and stores of obstore."""
    return locate(location)
