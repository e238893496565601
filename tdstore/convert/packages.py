"""Optional packages of conversions: imported on first use, and named when they are missing."""

from __future__ import annotations

from typing import Any, NoReturn

from tdstore.errors import MissingDependencyError


def _missing(package: str, error: ImportError) -> NoReturn:
    raise MissingDependencyError(
        f"this conversion needs the package {package!r}, which is not installed", hint=f"pip install {package}"
    ) from error


def pandas() -> Any:
    """Import the module `pandas`."""
    try:
        import pandas  # type: ignore[import-untyped,import-not-found,unused-ignore]
    except ImportError as error:
        _missing("pandas", error)
    return pandas


def pyarrow() -> Any:
    """Import the module `pyarrow`."""
    try:
        import pyarrow  # type: ignore[import-untyped,import-not-found,unused-ignore]
    except ImportError as error:
        _missing("pyarrow", error)
    return pyarrow


def parquet() -> Any:
    """Import the module `pyarrow.parquet`."""
    try:
        import pyarrow.parquet  # type: ignore[import-untyped,import-not-found,unused-ignore]
    except ImportError as error:
        _missing("pyarrow", error)
    return pyarrow.parquet


def safetensors() -> Any:
    """Import the module `safetensors.torch`, and with it `safetensors`."""
    try:
        import safetensors.torch
    except ImportError as error:
        _missing("safetensors", error)
    return safetensors


def mds_writer() -> Any:
    """Import the class `streaming.MDSWriter`."""
    try:
        from streaming import MDSWriter  # type: ignore[import-untyped,import-not-found,unused-ignore]
    except ImportError as error:
        _missing("mosaicml-streaming", error)
    return MDSWriter
