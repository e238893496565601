"""What an error keeps alive: its traceback has the frames of all callers, and with them what they hold."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable


class _Rows:
    pass


def frees_its_caller(call: Callable[[], object], error: type[Exception]) -> bool:
    """Check that what the caller of a failing call holds is freed with the error, without the cycle collector."""

    def caller(rows: _Rows) -> weakref.ref[_Rows]:
        with contextlib.suppress(error):
            call()
        return weakref.ref(rows)

    gc.collect()
    gc.disable()
    try:
        held = caller(_Rows())
        return held() is None
    finally:
        gc.enable()
