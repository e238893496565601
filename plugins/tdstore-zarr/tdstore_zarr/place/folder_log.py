"""The redo log of a folder: objects are moved to their places by a rename, and copied by a second link."""

from __future__ import annotations

from collections.abc import Sequence

from tdstore_zarr.place.folder_engine import FolderEngine
from tdstore_zarr.place.redo_log import PREFIX, LoggedEngine


class FolderLog(LoggedEngine[FolderEngine]):
    """`LoggedEngine` over a folder."""

    def _copy(self, pairs: Sequence[tuple[str, str]]) -> None:
        for old, new in pairs:
            self.base.link(old, new)

    def _place(self, pairs: Sequence[tuple[str, str]]) -> None:
        self.base.rename_files(pairs)

    def _replaced(self, key: str) -> None:
        if key not in self._held:
            self.base.delete([key])

    def _remove(self, keys: Sequence[str]) -> None:
        self.base.delete(keys)
        self.base.prune(keys)

    def clean(self) -> None:
        """Remove log files, as `LoggedEngine.clean` does."""
        self.base.sweep_below(PREFIX, {put.key.split("/")[0] for put in self.puts.values()})
        self._held.clear()

    def abandon(self) -> None:
        """Drop the log, as `LoggedEngine.abandon` does."""
        self.restore({}, ())
        named = {at.split("/")[0] for _, at, _ in self.committed.puts}
        if self._count and self._folder not in named:
            self.base.remove(self._folder)
            self._count = 0
