"""The `memory` backend: a dict of CPU tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from tdstore.builtin.resident import TensorStore
from tdstore.errors import StoreNotFoundError
from tdstore.header import Header
from tdstore.store import Cap
from tdstore.storekit.checked import full
from tdstore.types import LeafSpec, Mode, Path


def open_memory(location: str | None = None, *, mode: Mode = "w") -> MemoryStore:
    """Make an empty store in the memory of this process; it has no name and cannot be opened again."""
    if mode in ("r", "r+"):
        raise StoreNotFoundError("a memory store cannot be opened again", hint="open one with mode='w'")
    return MemoryStore()


class MemoryStore(TensorStore):
    """Leaves as tensors of this process."""

    caps = Cap.WRITE | Cap.PARTIAL_READ | Cap.PARTIAL_WRITE | Cap.RESIZE | Cap.VIEW | Cap.CONCURRENT_READ | Cap.DISCARD
    device = "cpu"

    def __init__(self) -> None:
        self.url = "ram://"
        self.writable = True
        self._leaves = {}
        self._fills: dict[Path, Any] = {}
        self._header = Header()
        self._committed: tuple[dict[Path, Tensor], dict[Path, Any]] = {}, {}

    def _save(self, header: Header) -> None:
        self._header = header
        self._committed = dict(self._leaves), dict(self._fills)

    def _discard(self) -> None:
        self._leaves, self._fills = map(dict, self._committed)

    def specs(self, paths: Sequence[Path]) -> list[LeafSpec]:
        views = [self.view(path) for path in paths]
        fills = [self._fills.get(path, 0) for path in paths]
        return [LeafSpec(t.shape, t.dtype, fill_value=fill) for t, fill in zip(views, fills, strict=True)]

    def _create(self, leaves: Mapping[Path, LeafSpec]) -> None:
        self._leaves |= {path: full(spec, self.device) for path, spec in leaves.items()}
        self._fills |= {path: spec.fill_value for path, spec in leaves.items()}

    def _rename(self, moves: Mapping[Path, Path]) -> None:
        specs = self.specs(list(moves))
        values = [self._leaves.pop(old) for old in moves]
        for new, value, spec in zip(moves.values(), values, specs, strict=True):
            self._leaves[new], self._fills[new] = value, spec.fill_value

    def _resize(self, lengths: Mapping[Path, int]) -> None:
        specs = self.specs(list(lengths))
        for spec, (path, length) in zip(specs, lengths.items(), strict=True):
            old = self._leaves[path]
            new = full(spec.replace(shape=(length, *old.shape[1:])), self.device)
            new[: len(old)] = old[:length]
            self._leaves[path] = new

    def nbytes_stored(self) -> int | None:
        self._check_open()
        return sum(t.nbytes for t in self._leaves.values())
