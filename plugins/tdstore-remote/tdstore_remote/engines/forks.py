"""Whether this process may use obstore.

obstore runs on threads of its own, which a forked child does not have: whatever it calls there waits
for ever, also on a store made in the child. So a child of a process that had loaded obstore keeps away from it.
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
    """Whether obstore would hang in this process."""
    return _dead
