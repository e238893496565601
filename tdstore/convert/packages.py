"""Optional packages of conversions: imported on first use, and named when they are missing."""

from __future__ import annotations

from types import ModuleType
from typing import Any, NoReturn

from tdstore.errors import MissingDependencyError


def _missing(package: str, error: ImportError) -> NoReturn:
    raise MissingDependencyError(
        f"this conversion needs the package {package!r}, which is not installed", hint=f"pip install {package}"
    ) from error


def pandas() -> ModuleType:
    """Import the module `pandas`."""
    try:
        import pandas  # type: ignore[import-untyped,import-not-found,unused-ignore]
    except ImportError as error:
        _missing("pandas", error)
    made: ModuleType = pandas
    return made


def pyarrow() -> ModuleType:
    """Import the module `pyarrow`."""
    try:
        import pyarrow  # type: ignore[import-untyped,import-not-found,unused-ignore]
    except ImportError as error:
        _missing("pyarrow", error)
    made: ModuleType = pyarrow
    return made


def parquet() -> ModuleType:
    """Import the module `pyarrow.parquet`."""
    try:
        import pyarrow.parquet  # type: ignore[import-untyped,import-not-found,unused-ignore]
    except ImportError as error:
        _missing("pyarrow", error)
    made: ModuleType = pyarrow.parquet
    return made


def arrow_filesystem() -> ModuleType:
    """Import the module `pyarrow.fs`."""
    try:
        import pyarrow.fs  # type: ignore[import-untyped,import-not-found,unused-ignore]
    except ImportError as error:
        _missing("pyarrow", error)
    made: ModuleType = pyarrow.fs
    return made


def safetensors() -> ModuleType:
    """Import the module `safetensors.torch`, and with it `safetensors`."""
    try:
        import safetensors.torch
    except ImportError as error:
        _missing("safetensors", error)
    return safetensors


def mds_writer() -> type[Any]:
    """Import the class `streaming.MDSWriter`."""
    try:
        from streaming import MDSWriter  # type: ignore[import-untyped,import-not-found,unused-ignore]
    except ImportError as error:
        _missing("mosaicml-streaming", error)
    made: type[Any] = MDSWriter
    return made
