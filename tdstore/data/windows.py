"""Windows of consecutive rows, which do not cross the bounds of episodes."""

import numpy as np
from numpy.typing import NDArray

from tdstore.errors import InvalidArgumentError

from .source import Rows


class Windows:
    """Windows of `span` rows, `stride` rows apart, in a dataset or in each episode of it.

    Rows left at the end of the dataset, or of an episode, that are too few for a window are in none.

    Args:
        rows: the number of rows of the dataset.
        span: the number of rows of a window.
        stride: the number of rows from one window to the next.
        starts: int64, the first rows of episodes, ascending from 0. Default: one episode.
    """

    def __init__(self, rows: int, span: int, stride: int, starts: NDArray[np.int64] | None = None) -> None:
        self.span, self.stride = span, stride
        self._starts = np.zeros(1, np.int64) if starts is None else starts
        lengths = np.diff(np.append(self._starts, rows))
        counts = np.maximum((lengths - span) // stride + 1, 0)
        self._ends = np.cumsum(counts)
        self._before = self._ends - counts
        self.size = int(self._ends[-1]) if counts.size else 0

    def __call__(self, items: Rows) -> Rows:
        """Return the rows of windows: int64 `[items]` for windows of one row, `[items, span]` for longer ones."""
        if self._starts.size == 1:
            first = items * self.stride
        else:
            episodes = np.searchsorted(self._ends, items, side="right")
            first = self._starts[episodes] + (items - self._before[episodes]) * self.stride
        return first if self.span == 1 else first[:, None] + np.arange(self.span)


def episode_starts(marks: NDArray[np.generic], rows: int, name: str) -> NDArray[np.int64]:
    """Find the first rows of episodes.

    Args:
        marks: one mark per row: bool, True at the last row of each episode, or an integer number of the episode.
        rows: the number of rows of the dataset.
        name: the key of the marks, for messages.

    Raises:
        InvalidArgumentError: there is not one bool or integer per row.
    """
    flat = marks.reshape(-1)
    if flat.shape != (rows,) or not (flat.dtype == np.bool_ or np.issubdtype(flat.dtype, np.integer)):
        raise InvalidArgumentError(
            f"episodes={name}: {flat.dtype} of shape {list(marks.shape)}, for {rows} rows",
            hint="one bool per row, True at the last one of an episode, or one number of the episode per row",
        )
    if not rows:
        return np.zeros(1, np.int64)
    changes = flat[:-1] if flat.dtype == np.bool_ else flat[1:] != flat[:-1]
    return np.concatenate([np.zeros(1, np.int64), np.flatnonzero(changes).astype(np.int64) + 1])
