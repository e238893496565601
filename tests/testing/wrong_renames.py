"""Stores in one SQLite file that are wrong about leaves of another name: what a TensorDict over them changes."""

from __future__ import annotations

from typing import Any

from tdstore.types import Mode
from tests.testing.wrong_files import SqliteStore, opening


class RenamesOverCommitted(SqliteStore):
    """Commits the old leaf where another one was renamed over it."""

    def rename(self, moves):
        super().rename(moves)
        self._stay = getattr(self, "_stay", {}) | {
            new: self._saved[new] for new in moves.values() if new in self._saved
        }

    def _put_leaves(self, connection, leaves):
        stay = {path: leaf for path, leaf in getattr(self, "_stay", {}).items() if path in leaves}
        super()._put_leaves(connection, {**leaves, **stay})


class CachesByName(SqliteStore):
    """Keeps what was read by the name of its leaf, which another leaf may get."""

    def read(self, reads):
        cache = self.__dict__.setdefault("_cache", {})
        values = super().read(reads)
        for at, r in enumerate(reads):
            if not r.index and r.out is None:
                values[at] = cache.setdefault(r.path, values[at].clone()).clone()
        return values

    def rename(self, moves):
        self._check(writing=True)
        moved = {new: self._leaf(old) for old, new in moves.items()}
        for old in moves:
            del self._leaves[old]
        self._leaves |= moved

    def _forget(self, paths):
        for path in paths:
            self.__dict__.setdefault("_cache", {}).pop(path, None)

    def write(self, writes):
        super().write(writes)
        self._forget(w.path for w in writes)

    def create(self, leaves):
        super().create(leaves)
        self._forget(leaves)

    def delete(self, paths):
        super().delete(paths)
        self._forget(paths)

    def resize(self, lengths):
        super().resize(lengths)
        self._forget(lengths)

    def discard(self):
        super().discard()
        self._forget(list(self.__dict__.get("_cache", ())))


class KeepsRenamesOver(SqliteStore):
    """Takes all back but what was renamed over another leaf."""

    def rename(self, moves):
        over = {new for new in moves.values() if new in self._leaves and new not in moves}
        super().rename(moves)
        self._over = getattr(self, "_over", set()) | over

    def discard(self):
        kept = {path: self._leaves[path] for path in getattr(self, "_over", ()) if path in self._leaves}
        super().discard()
        self._leaves |= kept


def _opener(cls: type[SqliteStore]) -> Any:
    def open_it(location: str, *, mode: Mode = "r") -> SqliteStore:
        return opening(cls, location, mode)

    open_it.__qualname__ = open_it.__name__ = f"open_{cls.__name__}"
    globals()[open_it.__name__] = open_it
    return open_it


RENAMES: tuple[type[SqliteStore], ...] = (RenamesOverCommitted, CachesByName, KeepsRenamesOver)
OPENERS = {cls.__name__: _opener(cls) for cls in RENAMES}
BACKENDS: dict[str, Any] = {}
