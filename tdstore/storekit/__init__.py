"""Building blocks for backends: checks, error texts, documents, files, locks, checksums, and the local engine.

The names in `__all__` are public; `docs/reference/storage-protocol.md` lists them.
"""

from tdstore.storekit import refusals
from tdstore.storekit.budget import allocating, check_declared
from tdstore.storekit.checked import CheckedStore, Typed, check_choices
from tdstore.storekit.files import io_errors
from tdstore.storekit.session import WriterState, WriterSteps, accept_dirty, commit_for_readers, end_writer

__all__ = [
    "CheckedStore",
    "Typed",
    "WriterState",
    "WriterSteps",
    "accept_dirty",
    "allocating",
    "check_choices",
    "check_declared",
    "commit_for_readers",
    "end_writer",
    "io_errors",
    "refusals",
]
