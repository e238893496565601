"""The changes since the last commit: enough to discard them, or to commit the rows without the structure. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from tdstore.bytestore.table import Leaf, overlay, select
from tdstore.types import Path


class Uncommitted:
    """The leaves of the last commit, and the present name of each.

    Args:
        leaves: those of the commit. Leaves are immutable, so that this copies no data.
    """

    def __init__(self, leaves: Mapping[Path, Leaf]) -> None:
        self.saved = dict(leaves)
        self.rows = False
        """Whether values were written."""
        self._origin: dict[Path, Path] | None = None
        """Under which name the commit has each leaf of now; None while all have the same."""

    @property
    def structure(self) -> bool:
        """Check whether leaves were created, deleted, renamed or resized."""
        return self._origin is not None

    def __bool__(self) -> bool:
        return self.rows or self.structure

    def record_renamed(self, moves: Mapping[Path, Path]) -> None:
        """Record that leaves were renamed, all at once."""
        origin = self._origins()
        found = {new: origin.pop(old) for old, new in moves.items() if old in origin}
        for new in moves.values():
            origin.pop(new, None)
        origin.update(found)

    def record_removed(self, paths: Iterable[Path]) -> None:
        """Record that leaves were deleted or replaced."""
        origin = self._origins()
        for path in paths:
            origin.pop(path, None)

    def record_resized(self) -> None:
        """Record that leaves were resized."""
        self._origins()

    def _origins(self) -> dict[Path, Path]:
        if self._origin is None:
            self._origin = {path: path for path in self.saved}
        return self._origin

    def without_structure(self, leaves: Mapping[Path, Leaf]) -> dict[Path, Leaf]:
        """Return the leaves of the last commit, with the rows that were written into them since.

        Args:
            leaves: the present leaves.
        """
        if self._origin is None:
            return dict(leaves)
        found = dict(self.saved)
        for path, origin in self._origin.items():
            before, now = self.saved[origin], leaves[path]
            if now is not before:
                written = select(now.extents, np.array([[0, before.spec.nbytes]]))
                found[origin] = Leaf(before.spec, overlay(before.extents, written))
        return found
