"""Local files that are replaced as a whole, or stay as they are."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from uuid import uuid4

from tdstore.arguments import check_path


@contextmanager
def replacing(path: object) -> Iterator[Any]:
    """Yield the path of a temporary file that replaces a local path at the end; yield other targets unchanged."""
    if not isinstance(path, (str, os.PathLike)) or "://" in str(path):
        yield path
        return
    check_path(path, "path")
    folder, name = os.path.split(os.fspath(path))
    # The ending stays: pandas reads the compression off it.
    part = os.path.join(folder, f".{uuid4().hex[:8]}-{name}")
    try:
        yield part
        os.replace(part, path)
    except BaseException:
        if os.path.exists(part):
            os.remove(part)
        raise
