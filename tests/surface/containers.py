"""One TensorDict in every kind of container: what a method says of one it has to say of all."""

from __future__ import annotations

import copy
import itertools
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import tdstore
from tdstore import TensorDict

BATCH = [4, 2]
_numbers = itertools.count()


def mixed(kind: Any = TensorDict, start: int = 0) -> Any:
    """Several dtypes, a nested TensorDict and a value."""
    b = torch.arange(start, start + 8).view(4, 2)
    return kind(
        {
            "b": b,
            "a": torch.stack([b, b + 3, b * 2], -1).float() / 4 - 1,
            "n": kind({"c": b % 3 == start % 2, "d": (b * 5).to(torch.int16)}, BATCH),
            "s": "text",
        },
        BATCH,
    )


def floats(kind: Any = TensorDict, start: int = 0) -> Any:
    """Floating-point leaves between 0 and 1."""
    c = (torch.arange(start + 1, start + 9) / 20).view(4, 2).double()
    return kind({"a": torch.stack([c, c * 2, c / 3], -1).float(), "n": kind({"c": c}, BATCH)}, BATCH)


def reordered(td: Any) -> Any:
    """The same entries, the last first."""
    entries = {k: reordered(v) if isinstance(v, type(td)) else v for k, v in td.items()}
    return type(td)(dict(reversed(entries.items())), td.batch_size)


class Place:
    """Where a container of a test is, and how to look at it as somebody else would."""

    def __init__(self, td: Any, reopen: Callable[[], Any] | None = None, root: Any = None) -> None:
        self.td = td
        self.reopen = reopen
        self.root = td if root is None else root

    def seen_by_others(self) -> Any:
        """What a fresh opening finds, `td` being closed; the container itself where it has no location."""
        if self.reopen is None:
            return self.td
        if isinstance(self.root, tdstore.PersistentTensorDict):
            self.root.close()
        return self.reopen()


def _saved(storage: str, suffix: str) -> Callable[..., Place]:
    def build(td: Any, folder: Path, server: Any) -> Place:
        location = str(folder / f"{next(_numbers)}{suffix}")
        td.save(location, storage=storage)
        return Place(tdstore.open(location, "r+"), lambda: tdstore.open(location))

    return build


def _memmap(td: Any, folder: Path, server: Any) -> Place:
    location = str(folder / str(next(_numbers)))
    return Place(td.memmap(location), lambda: TensorDict.load(location))


def _shared(td: Any, folder: Path, server: Any) -> Place:
    return Place(td.share_memory_())


def _window(td: Any, folder: Path, server: Any) -> Place:
    """Rows 1 to 5, every second column and column 1 of a larger file."""
    wide = torch.cat([td[:1], td, td[:1]])
    wide = torch.stack([wide, wide], 2).flatten(1, 2)
    if "s" in td:
        wide["s"] = td["s"]  # one value for all, as in the others
    location = str(folder / f"{next(_numbers)}.h5")
    wide.save(location)
    index = (slice(1, 5), slice(None, None, 2))
    root = tdstore.open(location, "r+")
    return Place(root[index], lambda: tdstore.open(location)[index], root)


def _lazy(dim: int) -> Callable[..., Place]:
    def build(td: Any, folder: Path, server: Any) -> Place:
        return Place(tdstore.lazy_stack([part.clone() for part in td.unbind(dim)], dim))

    return build


def _redis(td: Any, folder: Path, server: Any) -> Place:
    location = f"{server.url}/surface-{uuid.uuid4().hex}"
    td.save(location)
    return Place(tdstore.open(location, "r+"), lambda: tdstore.open(location))


def _remote(td: Any, folder: Path, server: Any) -> Place:
    location = f"memory://surface/{uuid.uuid4().hex}"
    td.save(location)
    return Place(tdstore.open(location, "r+"), lambda: tdstore.open(location))


KINDS: dict[str, Callable[..., Place]] = {
    "TensorDict": lambda td, folder, server: Place(td),
    "memmap": _memmap,
    "shared": _shared,
    "lazy 0": _lazy(0),
    "lazy 1": _lazy(1),
    "h5": _saved("h5", ".h5"),
    "zarr": _saved("zarr", ".zarr"),
    "window": _window,
    "redis": _redis,
    "remote": _remote,
}
LOCKED = {"memmap", "shared"}


def setitem(td: Any, key: Any, value: Any) -> Any:
    td[key] = value
    return td


def delitem(td: Any, key: Any) -> Any:
    del td[key]
    return td


def assign(td: Any, name: str, value: Any) -> Any:
    setattr(td, name, value)
    return getattr(td, name)


def iadd(td: Any, other: Any) -> Any:
    td += other
    return td


def isub(td: Any, other: Any) -> Any:
    td -= other
    return td


def imul(td: Any, other: Any) -> Any:
    td *= other
    return td


def idiv(td: Any, other: Any) -> Any:
    td /= other
    return td


def namespace(module: Any, sample: Callable[..., Any], kind: Any = None) -> dict[str, Any]:
    """What the expressions of `rows.py` may use."""
    other = sample(kind or module.TensorDict, 3)
    mask = torch.tensor([[True, False], [True, True], [False, False], [False, True]])
    names = {"M": module, "torch": torch, "np": np, "copy": copy, "other": other, "row": other[3], "mask": mask}
    tools = (setitem, delitem, assign, iadd, isub, imul, idiv, reordered)
    return names | {tool.__name__: tool for tool in tools}
