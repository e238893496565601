"""Where a checkpoint is: one dataset with the document, and one dataset for each rank of the save."""

import os
import re
from collections.abc import Mapping
from typing import Any

import tdstore
from tdstore.errors import InvalidTypeError, OptionError, UnsupportedError
from tdstore.registry import registry

DOCUMENT = "checkpoint"
"""Name of the dataset whose header is the document."""
PACKED = 4 << 20
"""memmap: pieces of up to so many bytes share one file, instead of a file and an `fsync` for each."""
_PART = re.compile(r"([0-9a-f]{32})-[0-9]{5,}")


class Places:
    """Locations below that of a checkpoint, and how they are opened.

    Args:
        location: a folder or URL.
        storage: name of the backend; None: found from the location.
        options: of the backend.

    Raises:
        InvalidTypeError: the location is neither text nor a path.
    """

    def __init__(self, location: str | os.PathLike[str], storage: str | None, options: Mapping[str, Any]) -> None:
        location, options = registry().locate(location, dict(options))
        if not isinstance(location, (str, os.PathLike)):
            raise InvalidTypeError(f"a checkpoint is at a path or URL, not {type(location).__name__} {location!r:.100}")
        text = os.fspath(location)
        self.root = text.rstrip("/") if "://" in text else os.path.abspath(text)
        if storage is None and not self._is_url():
            found = registry().resolve(self.root)
            storage = "memmap" if found is None else found.name
        self.storage = storage
        self.options = dict(options)

    def _is_url(self) -> bool:
        return "://" in self.root

    @property
    def document(self) -> str:
        """The location of the document."""
        return self._below(DOCUMENT)

    def part(self, save: str, index: int) -> str:
        """Return the location of what one rank saved.

        Args:
            save: the name of the save.
            index: which part of it.
        """
        return self._below(f"{save}-{index:05}")

    def open(self, location: str, mode: tdstore.Mode) -> tdstore.StoreHandle:
        """Open one of the places."""
        options = {"pack": PACKED, **self.options} if self.storage == "memmap" else self.options
        return tdstore.StoreHandle.open(location, storage=self.storage, mode=mode, **options)

    def is_dataset(self) -> bool:
        """Check whether the location of the checkpoint is itself a dataset."""
        if os.path.isdir(self.root) and self.storage is not None and not registry().get(self.storage).markers:
            return False  # a folder is no dataset of a backend of single files
        return tdstore.exists(self.root, storage=self.storage, **self._credentials())

    def remove_others(self, save: str, known: list[str]) -> None:
        """Delete the parts of all saves but one.

        Args:
            save: the save that stays.
            known: parts of the one before, for backends that cannot list what is there.
        """
        try:
            found = tdstore.list_datasets(self.root, storage=self.storage, **self._credentials())
        except UnsupportedError:
            found = known
        for location in found:
            match = _PART.fullmatch(location.partition("?")[0].rstrip("/").rpartition("/")[2])
            if match is not None and match[1] != save:
                tdstore.delete(location, storage=self.storage, **self._credentials())

    def _credentials(self) -> dict[str, Any]:
        return {name: value for name, value in self.options.items() if name == "storage_options"}

    def _below(self, name: str) -> str:
        if not self._is_url():
            return os.path.join(self.root, name)
        if "::" in self.root:
            raise OptionError(f"{self.root} is a chain of URLs; a checkpoint is at a folder or a single URL")
        head, mark, query = self.root.partition("?")
        return f"{head}/{name}{mark}{query}"
