"""Objects of fsspec, universal_pathlib and obstore as locations: the URL and the options with which they were created.

The URL is opened by an engine of its own, with the retries and error messages of tdstore. So a container over it is
pickled like any other, and works in forked processes.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from tdstore.errors import InvalidTypeError, UnsupportedError

_BUCKETS = {"S3Store": "s3", "GCSStore": "gs", "AzureStore": "az"}
_BUCKET_NAMES = ("bucket", "bucket_name", "container_name")
_OF_INSTANCES = ("asynchronous", "loop", "batch_size", "auto_mkdir")
"""Options of a file system that say how an instance works, not what it reaches."""
_OVER_ANOTHER = frozenset(["fs", "fo", "target_protocol"])
"""Options of file systems over another one, or over a file."""


def locate(location: object) -> tuple[str, Mapping[str, Any]] | None:
    """Return the path or URL for which an object stands, and the storage options to open it.

    Args:
        location: a file system of fsspec with a path, as `(fs, path)` or `fs.get_mapper(path)`; what `fsspec.open`
            returns; a `UPath`; a store of obstore, alone or with a path, as `(store, path)`.

    Returns:
        Location and options; None for other objects.

    Raises:
        InvalidTypeError: a file system without a path.
        UnsupportedError: an object that has no URL, or credentials that are not options.
    """
    path = ""
    if isinstance(location, tuple) and len(location) == 2 and isinstance(location[1], str):
        location, path = location
    if _is_a(location, "fsspec.mapping", "FSMap"):
        return _of_fsspec(location.fs, _joined(location.root, path))  # type: ignore[attr-defined]
    if _is_a(location, "fsspec.core", "OpenFile"):
        return _of_fsspec(location.fs, _joined(location.path, path))  # type: ignore[attr-defined]
    if _is_a(location, "upath", "UPath"):
        return _of_fsspec(location.fs, _joined(location.path, path))  # type: ignore[attr-defined]
    if _is_a(location, "fsspec.spec", "AbstractFileSystem"):
        if not path:
            raise InvalidTypeError(
                f"{type(location).__name__} is a file system, and no place in it", hint="pass (fs, path)"
            )
        return _of_fsspec(location, path)
    if type(location).__module__.partition(".")[0] == "obstore":
        return _of_obstore(location, path)
    return None


def _is_a(location: object, module: str, name: str) -> bool:
    """Check the class of an object without importing its library: objects exist only if it was imported."""
    cls = getattr(sys.modules.get(module), name, None)
    return isinstance(cls, type) and isinstance(location, cls)


def _joined(root: str, path: str) -> str:
    return f"{root.rstrip('/')}/{path.strip('/')}" if path else root


def _of_fsspec(fs: Any, path: str) -> tuple[str, dict[str, Any]]:
    if _is_a(fs, "fsspec.implementations.dirfs", "DirFileSystem"):
        return _of_fsspec(fs.fs, _joined(fs.path, path))
    if "file" in ((fs.protocol,) if isinstance(fs.protocol, str) else fs.protocol):
        return str(fs._strip_protocol(path)), {}
    options = {name: value for name, value in fs.storage_options.items() if name not in _OF_INSTANCES}
    if _is_a(fs, "obstore.fsspec", "FsspecStore"):
        return _of_obstore_files(fs, path, options)
    if not _OVER_ANOTHER.isdisjoint(options):
        raise UnsupportedError(
            f"{type(fs).__name__} is a file system over another one, which has no URL",
            hint="pass a chained URL, such as 'simplecache::s3://bucket/run' or 'zip://run.h5::s3://bucket/runs.zip', "
            "and storage_options=",
        )
    return str(fs.unstrip_protocol(path)), options


def _of_obstore_files(fs: Any, path: str, options: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the URL and the options of obstore's own file system of fsspec."""
    if fs.protocol == "memory":
        raise _no_url("MemoryStore")
    if options.get("credential_provider") is not None:
        raise _from_function(type(fs).__name__)
    found = {**(options.get("config") or {}), **options}
    for name in ("protocol", "config", "retry_config", "credential_provider", "max_cache_size"):
        found.pop(name, None)
    return str(fs.unstrip_protocol(path)), found


def _no_url(name: str) -> UnsupportedError:
    return UnsupportedError(
        f"obstore's {name} has no URL", hint="pass a URL; 'memory://run' is in the memory of this process"
    )


def _from_function(name: str) -> UnsupportedError:
    return UnsupportedError(
        f"the credentials of this {name} come from a function",
        hint="pass the URL, with the credentials in storage_options= or in the environment",
    )


def _of_obstore(store: Any, path: str) -> tuple[str, dict[str, Any]]:
    name = type(store).__name__
    if name == "LocalStore" and store.prefix is not None:
        return _joined(str(store.prefix), path), {}
    if name == "LocalStore" and path:
        return f"/{path.lstrip('/')}", {}
    if name == "HTTPStore":
        return _joined(str(store.url), path), _client(store)
    if name not in _BUCKETS:
        raise _no_url(name)
    if store.credential_provider is not None:
        raise _from_function(name)
    config = dict(store.config)
    bucket = next(config.pop(key) for key in _BUCKET_NAMES if key in config)
    root = _joined(f"{_BUCKETS[name]}://{bucket}", store.prefix or "")
    return _joined(root, path), {**config, **_client(store)}


def _client(store: Any) -> dict[str, Any]:
    return {"client_options": dict(store.client_options)} if store.client_options else {}
