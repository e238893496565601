"""Comparison of stored data with its checksums."""

from __future__ import annotations

import os
from typing import Any

from tdstore.arguments import check_path
from tdstore.errors import DirtyStoreError, OptionError
from tdstore.io.consolidated.file import is_consolidated_file, verify_file
from tdstore.io.opening import Location, Storage, locate, open_store
from tdstore.types import Fault


def verify(location: Location, *, storage: Storage = None, **options: Any) -> list[Fault]:
    """Read all data of a dataset and compare it with the checksums of its last commit.

    `docs/reference/verify.md` says what each backend compares. A backend that keeps no checksums finds
    no fault, nor does one that compares nothing while a writer is at work.

    Args:
        location: a path or URL; also of a file that `consolidate` wrote.
        storage: name of the backend. Default: found from the location.
        **options: of the backend.

    Returns:
        A `Fault` for each leaf that differs from what was committed: its path, and the reason. Empty if there is none.

    Raises:
        StoreNotFoundError: there is no dataset at the location.
        CorruptStoreError: it is so damaged that it cannot be opened.

    Example:
        >>> TensorDict({"a": torch.ones(3)}, [3]).save("runs/1").close()
        >>> tdstore.verify("runs/1")
        []
    """
    location, options = locate(location, options)
    if storage is None and not options and isinstance(location, (str, os.PathLike)):
        check_path(location, "location")
        place = os.path.realpath(os.fspath(location))
        if is_consolidated_file(place):
            return verify_file(place)
    try:
        # Opening compares samples, and raises at the first that differs: here all leaves are wanted.
        store, _ = open_store(location, storage=storage, mode="r", **{"verify": "none", **options})
    except OptionError:
        store, _ = open_store(location, storage=storage, mode="r", **options)
    except DirtyStoreError as error:
        return [Fault(path, error.message) for path in error.leaves]
    with store:
        return store.verify()
