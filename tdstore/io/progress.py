"""Progress bars: tqdm where it is installed, nothing otherwise."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self


class Progress:
    """A bar that counts bytes. A context manager with `advance(n)`."""

    def __init__(self, total: int, label: str, enabled: bool = True) -> None:
        self._bar: Any = None
        if enabled:
            try:
                from tqdm.auto import tqdm
            except ImportError:
                return
            self._bar = tqdm(total=total, desc=label, unit="B", unit_scale=True, leave=False, delay=0.5)

    def advance(self, nbytes: int) -> None:
        """Count bytes that are done."""
        if self._bar is not None:
            self._bar.update(nbytes)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()
