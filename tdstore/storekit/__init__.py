"""Building blocks for backends: checks, error texts, documents, files, locks, checksums, and engines over them.

The names in `__all__` are public; `docs/reference/storage-protocol.md` lists them.
"""

from tdstore.storekit import refusals
from tdstore.storekit.budget import allocating, check_declared
from tdstore.storekit.checked import CheckedStore, Typed
from tdstore.storekit.files import io_errors

__all__ = ["CheckedStore", "Typed", "allocating", "check_declared", "io_errors", "refusals"]
