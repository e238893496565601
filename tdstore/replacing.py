"""Checks before a save replaces anything: a dataset of its backend, or nothing. Called before an opener in mode "w"."""

from __future__ import annotations

import os
from collections.abc import Callable

from tdstore.errors import (
    BrokenPluginError,
    CorruptStoreError,
    DirtyStoreError,
    StoreBusyError,
    StoreExistsError,
    StoreNotFoundError,
    UnsupportedError,
)
from tdstore.header import Group, Header
from tdstore.hookspecs import Backend
from tdstore.store import Store


def check_replaceable(backend: Backend, location: str, name: str, open_it: Callable[[], Store]) -> None:
    """Look at what mode "w" would replace, unless the backend does so itself; nothing is changed.

    Args:
        backend: the backend that would replace it.
        location: where.
        name: the location as messages show it.
        open_it: opens the location in mode "r".

    Raises:
        StoreExistsError: something is there that is not a dataset of that backend. StoreError: it cannot be looked at.
    """
    try:
        with open_it() as store:
            header = store.load_header()
            was_saved = _is_dataset(header) if header else _is_empty(backend, location, store)
    except (DirtyStoreError, StoreBusyError):
        return  # somebody writes it with this backend, or died doing so
    except StoreNotFoundError as error:
        if _is_file_format(backend) and _holds_something(location):
            raise _refusal(backend, name, f"what is there is not a dataset: {error.message}") from error
    except BrokenPluginError as error:  # a bare error of its library: perhaps of what is there
        if not _is_file_format(backend):
            raise
        if _holds_something(location):
            raise _refusal(backend, name, f"what is there cannot be read as a dataset: {error.message}") from error
    except (CorruptStoreError, UnsupportedError) as error:
        if not (_is_file_format(backend) and _is_empty_file(location)):
            raise _refusal(backend, name, f"what is there cannot be read as a dataset: {error.message}") from error
    else:
        if not was_saved:
            raise _refusal(backend, name, "what is there was not saved from a TensorDict")


def _refusal(backend: Backend, name: str, reason: str) -> StoreExistsError:
    return StoreExistsError(
        f"the backend {backend.name!r} does not replace {name}: {reason}",
        url=name,
        hint="remove it if it is of no more use, or save to another place",
    )


def _is_dataset(header: Header) -> bool:
    """Check whether a header was saved: files of other programs get a generated one, whose root has no batch size."""
    root = header.groups.get((), Group())
    return root.batch_size is not None or root.kind != "TensorDict" or bool(root.values) or bool(root.extra)


def _is_empty(backend: Backend, location: str, store: Store) -> bool:
    """Check whether a store without a header has nothing else: other programs' databases may have no leaves either."""
    return next(store.paths(), None) is None and not (_is_file_format(backend) and _holds_something(location))


def _is_file_format(backend: Backend) -> bool:
    return bool(backend.suffixes or backend.markers or backend.magic)


def _holds_something(path: str) -> bool:
    if os.path.isdir(path) and not os.path.islink(path):
        with os.scandir(path) as entries:
            return next(entries, None) is not None
    return os.path.lexists(path) and not _is_empty_file(path)


def _is_empty_file(path: str) -> bool:
    return os.path.isfile(path) and os.path.getsize(path) == 0
