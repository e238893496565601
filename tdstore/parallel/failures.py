"""Exceptions of worker processes, in a form that can be pickled. The death of a worker is noticed by `executors`."""

from __future__ import annotations

import copy
import traceback
from typing import NoReturn


class Failure:
    """Exception of a worker, in a form that can be pickled.

    In a thread, the error's traceback leads to the frame that returned this object: what neither raises the error nor
    forgets it keeps both alive, and all that the callers hold, until Python looks for cycles.
    """

    __slots__ = ("_error",)

    def __init__(self, error: BaseException) -> None:
        self._error: BaseException | None = error

    def reraise(self) -> NoReturn:
        """Raise the error, and forget it."""
        error, self._error = self._error, None
        assert error is not None, "raised once"
        try:
            raise error
        finally:
            del error

    def forget(self) -> None:
        """Drop the error."""
        self._error = None

    @classmethod
    def of(cls, error: Exception) -> Failure:
        """Build the failure of a call, with its traceback as a note, and of its own type if pickle can rebuild it."""
        text = "".join(traceback.format_exception(error)).rstrip()
        if not _rebuilds(error):
            what = f"{type(error).__module__}.{type(error).__qualname__}: {error}"
            stand_in = RuntimeError(what)
            stand_in.add_note(f"The exception itself cannot be pickled. In the worker:\n{text}")
            return cls(stand_in)
        error.__traceback__ = error.__cause__ = error.__context__ = None
        error.add_note(f"In the worker:\n{text}")
        return cls(error)


def _rebuilds(error: Exception) -> bool:
    """Check whether pickle can rebuild an error, whose `__init__` may have other parameters than `args`."""
    try:
        return type(copy.copy(error)) is type(error)
    except Exception:  # whatever its own code raises
        return False
