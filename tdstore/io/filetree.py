"""The files below a folder as text."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path


def print_directory_tree(path: str | os.PathLike[str], indent: str = "", display_metadata: bool = True) -> str:
    """Print the files below a folder, one in each line in the order of their names, and return the lines.

    Args:
        path: a folder, or a file. Links are shown, not followed.
        indent: the text at the beginning of each line.
        display_metadata: print the size of all files first. It is not part of the result.

    Raises:
        FileNotFoundError: there is no such file or folder.

    Example:
        >>> print_directory_tree("runs/1")  # doctest: +SKIP
        Directory size: 672.00 B
        1/
            meta.json
            obs.memmap
    """
    root = Path(path)
    root.lstat()  # refuses what is not there
    size = sum(file.lstat().st_size for file in (root, *root.rglob("*")) if file.is_symlink() or not file.is_dir())
    text = "\n".join(_lines(root, indent))
    if display_metadata:
        print(f"{indent}Directory size: {_readable(size)}")
    print(text)
    return text


def _lines(path: Path, indent: str) -> Iterator[str]:
    if not path.is_dir() or path.is_symlink():
        yield f"{indent}{path.name}"
        return
    yield f"{indent}{path.name}/"
    for child in sorted(path.iterdir()):
        yield from _lines(child, indent + "    ")


def _readable(nbytes: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024:
            return f"{nbytes:.2f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.2f} TiB"
