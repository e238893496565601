"""The path of a dataset, as text and as a `pathlib.Path`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any


class SavedPath(str):
    """A path that is a string, and has the methods and attributes of a `pathlib.Path`.

    Those that both have (`replace`, `encode`, ...) are those of the string.

    Example:
        >>> path = SavedPath("/data/runs/1")
        >>> path == "/data/runs/1", str(path / "meta.json"), path.parent.name, path.exists()
        (True, '/data/runs/1/meta.json', 'runs', False)
    """

    __slots__ = ()

    def __truediv__(self, other: str | os.PathLike[str]) -> Path:
        return Path(self) / other

    def __rtruediv__(self, other: str | os.PathLike[str]) -> Path:
        return Path(other) / Path(self)

    def __fspath__(self) -> str:
        return str(self)

    def __getattr__(self, name: str) -> Any:
        return getattr(Path(self), name)
