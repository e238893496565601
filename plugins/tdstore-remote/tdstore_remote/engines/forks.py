"""A check whether this process may use obstore.

obstore runs on its own threads, which a forked child does not have: any call there waits
forever, also on a store created in the child. So a child of a process that had loaded obstore must not use it.
"""

from __future__ import annotations

import os
import sys

_dead = False


def _in_child() -> None:
    global _dead
    _dead = _dead or "obstore" in sys.modules


os.register_at_fork(after_in_child=_in_child)


def obstore_is_dead() -> bool:
    """Check whether obstore would hang in this process."""
    return _dead
