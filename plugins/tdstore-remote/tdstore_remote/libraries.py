"""The libraries behind the engines, imported when a location first needs them."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from tdstore.errors import MissingDependencyError


def load_obstore() -> Any:
    """Import the `obstore` module, with `obstore.store`.

    Raises:
        MissingDependencyError: it is not installed.
    """
    try:
        import obstore
        import obstore.exceptions
        import obstore.store
    except ImportError as error:
        raise MissingDependencyError(
            "object stores and http are read with obstore, which is not installed", hint="pip install obstore"
        ) from error
    return obstore


def load_fsspec() -> Any:
    """Import the `fsspec` module.

    Raises:
        MissingDependencyError: it is not installed.
    """
    try:
        import fsspec  # type: ignore[import-untyped]
    except ImportError as error:
        raise MissingDependencyError(
            "this location is reached with fsspec, which is not installed", hint="pip install fsspec"
        ) from error
    return fsspec


def load_botocore() -> Any | None:
    """Import `botocore.session`, which reads profiles and the other sources of AWS credentials; None without it."""
    try:
        import botocore.session  # type: ignore[import-untyped]
    except ImportError:
        return None
    return botocore.session


def load_tenacity() -> ModuleType:
    """Import `tenacity`, which takes 10 ms: plugins are loaded by every process, engines are not."""
    import tenacity

    return tenacity


PACKAGES = {
    "s3": "s3fs",
    "s3a": "s3fs",
    "gs": "gcsfs",
    "gcs": "gcsfs",
    "az": "adlfs",
    "abfs": "adlfs",
    "abfss": "adlfs",
    "adl": "adlfs",
    "http": "aiohttp",
    "https": "aiohttp",
    "webhdfs": "requests",
    "webdav": "webdav4[fsspec]",
    "dav": "webdav4[fsspec]",
    "sftp": "paramiko",
    "ssh": "paramiko",
    "smb": "smbprotocol",
    "hf": "huggingface_hub",
    "github": "requests",
    "dropbox": "dropboxdrivefs",
    "oss": "ossfs",
    "hdfs": "pyarrow",
}
"""The packages that add a scheme to fsspec."""


def pip_line(scheme: str) -> str:
    """Return the command that installs support for a scheme in fsspec."""
    return f"pip install '{PACKAGES[scheme]}'" if scheme in PACKAGES else f"install the fsspec package for {scheme}://"
