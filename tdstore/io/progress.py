"""Progress bars: those of tqdm or rich if one is installed, and otherwise a plain line."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Protocol, Self


class Bar(Protocol):
    """Progress bar that counts bytes."""

    def advance(self, nbytes: int) -> None:
        """Count bytes that are done."""

    def close(self) -> None:
        """Leave the screen as it was."""


class Progress:
    """A bar that counts bytes. A context manager with `advance(n)`.

    Args:
        total: bytes in all.
        label: the word before the bar.
        enabled: None shows it if stderr is a terminal.
        done: bytes that an earlier run has processed already.
    """

    def __init__(self, total: int, label: str, enabled: bool | None = True, *, done: int = 0) -> None:
        self._bar: Bar | None = None
        if enabled is None:
            enabled = sys.stderr is not None and sys.stderr.isatty()
        if enabled:
            self._bar = next(bar for make in MAKERS if (bar := make(total, label, done)) is not None)

    def advance(self, nbytes: int) -> None:
        """Count bytes that are done."""
        if self._bar is not None:
            self._bar.advance(nbytes)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Leave the screen as it was."""
        if self._bar is not None:
            self._bar.close()


class _Tqdm:
    def __init__(self, bar: Any) -> None:
        self._bar = bar

    def advance(self, nbytes: int) -> None:
        self._bar.update(nbytes)

    def close(self) -> None:
        self._bar.close()


class _Rich:
    def __init__(self, bars: Any, task: Any) -> None:
        self._bars = bars
        self._task = task

    def advance(self, nbytes: int) -> None:
        self._bars.advance(self._task, nbytes)

    def close(self) -> None:
        self._bars.stop()


class _Plain:
    """One line on stderr, at most once a second, and once at the end."""

    def __init__(self, total: int, label: str, done: int) -> None:
        self._total, self._label, self._done = total, label, done
        self._printed_at = time.monotonic()

    def advance(self, nbytes: int) -> None:
        self._done += nbytes
        if time.monotonic() - self._printed_at >= 1:
            self._tell()

    def _tell(self) -> None:
        self._printed_at = time.monotonic()
        percent = 100 * self._done // max(1, self._total)
        print(f"{self._label}: {percent}% of {self._total / 2**20:.0f} MiB", file=sys.stderr)

    def close(self) -> None:
        self._tell()


def _make_tqdm(total: int, label: str, done: int) -> Bar | None:
    try:
        from tqdm.auto import tqdm
    except ImportError:
        return None
    return _Tqdm(tqdm(total=total, initial=done, desc=label, unit="B", unit_scale=True, leave=False, delay=0.5))


def _make_rich(total: int, label: str, done: int) -> Bar | None:
    try:
        from rich import progress
        from rich.console import Console
    except ImportError:
        return None
    columns = (*progress.Progress.get_default_columns(), progress.DownloadColumn(), progress.TransferSpeedColumn())
    bars = progress.Progress(*columns, console=Console(stderr=True), transient=True)
    task = bars.add_task(label, total=total, completed=done)
    bars.start()
    return _Rich(bars, task)


MAKERS: tuple[Callable[[int, str, int], Bar | None], ...] = (_make_tqdm, _make_rich, _Plain)
