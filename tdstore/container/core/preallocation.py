"""Record of TensorDicts that were allocated and not written: replay buffers over them have no rows yet."""

from __future__ import annotations

from typing import Any

from tdstore.container.core.container import Container

_VERSION = "tdstore_allocated_version"


def mark_allocated(td: Any) -> None:
    """Say that the rows of a TensorDict were not written yet."""
    if isinstance(td, Container._stored_class):
        td._handle.blank = True
        return
    for leaf in td._leaf_list():
        if not leaf.is_inference():
            setattr(leaf, _VERSION, leaf._version)  # torch counts what is written in place, through views too


def is_blank(td: Any) -> bool | None:
    """Check whether an allocated TensorDict is still unwritten; None for one that was not allocated in this process.

    What other processes write, and what is written through numpy, is not seen.
    """
    if isinstance(td, Container._stored_class):
        handle = td._handle
        return None if handle.blank is None else handle.blank and not handle.store.uncommitted
    versions = [(getattr(leaf, _VERSION, None), leaf._version) for leaf in td._leaf_list() if not leaf.is_inference()]
    if all(then is None for then, _ in versions):
        return None
    return all(then == now for then, now in versions)
