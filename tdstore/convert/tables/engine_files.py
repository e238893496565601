"""Files behind a URL for readers of other packages: an engine as a file system that fsspec's users understand."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

from tdstore.engine import Buffer, Engine, EngineCap, parent_and_name
from tdstore.errors import OptionError, ReadOnlyError, StoreNotFoundError
from tdstore.index.ranges import Range
from tdstore.registry import registry


def is_url(path: object) -> bool:
    """Check whether a path is reached through an engine. `file://` is not: every reader opens local files itself."""
    return isinstance(path, str) and "://" in path and not path.startswith("file://")


def open_urls(urls: Sequence[str], options: Mapping[str, Any] | None) -> tuple[EngineFiles, list[str]]:
    """Open an engine at the deepest folder that holds all URLs, and return the keys of the URLs in it.

    Args:
        urls: files or folders.
        options: credentials, endpoint and timeout, for the plugin that opens the engine.

    Raises:
        OptionError: a URL names no file, or two URLs have no folder in common.
        PluginError: no plugin knows the scheme. StoreError: as the engine says.
    """
    parent, name = parent_and_name(urls[0])
    if len(urls) == 1:
        return EngineFiles(registry().engine(parent, options)), [name]
    root = parent
    while not all(url.startswith(f"{root}/") for url in urls):
        root = root.rpartition("/")[0]
    if not root.partition("://")[2].strip("/"):
        raise OptionError(f"the URLs {urls[0]} and {max(urls)} have no folder in common", hint="read each on its own")
    return EngineFiles(registry().engine(root, options)), [url[len(root) + 1 :].rstrip("/") for url in urls]


class EngineFiles:
    """The objects of an engine under the methods of `fsspec.AbstractFileSystem` that pyarrow calls, read only.

    Args:
        engine: the engine, which `close` closes.
    """

    protocol = "tdstore"

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._sizes: dict[str, int] = {}

    def close(self) -> None:
        """Close the engine."""
        self.engine.close()

    def info(self, path: str) -> dict[str, Any]:
        """Return name, size and type of a file or folder.

        Raises:
            StoreNotFoundError: there is none, which is a FileNotFoundError.
        """
        if path not in self._sizes:
            try:
                self._sizes[path] = self.engine.size(path)
            except StoreNotFoundError:
                if EngineCap.LIST not in self.engine.can or not self.find(path):
                    raise
                return {"name": path, "size": 0, "type": "directory"}
        return {"name": path, "size": self._sizes[path], "type": "file"}

    def find(
        self, path: str, maxdepth: int | None = None, withdirs: bool = False, detail: bool = False
    ) -> dict[str, dict[str, Any]]:
        """Return the files below a folder, at any depth; folders are no objects."""
        found = {entry.key: entry.size for entry in self.engine.list(f"{path}/")}
        self._sizes.update(found)
        return {key: {"name": key, "size": found[key], "type": "file"} for key in sorted(found)}

    def exists(self, path: str) -> bool:
        """Check whether there is a file or folder."""
        try:
            self.info(path)
        except StoreNotFoundError:
            return False
        return True

    def isdir(self, path: str) -> bool:
        """Check whether there is a folder."""
        return self.exists(path) and self.info(path)["type"] == "directory"

    def isfile(self, path: str) -> bool:
        """Check whether there is a file."""
        return self.exists(path) and self.info(path)["type"] == "file"

    def open(self, path: str, mode: str = "rb") -> EngineFile:
        """Open a file for reading.

        Raises:
            ReadOnlyError: another mode.
        """
        if mode != "rb":
            raise ReadOnlyError(f"{self.engine.where(path)} is opened for reading only", url=self.engine.where(path))
        return EngineFile(self.engine, path, self.info(path)["size"])


class EngineFile(io.RawIOBase):
    """One object of an engine as a file object: each `read` is one request."""

    def __init__(self, engine: Engine, key: str, size: int) -> None:
        self._engine = engine
        self._key = key
        self._size = size
        self._at = 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return the position."""
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Set the position, and return it."""
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        """Fill a buffer with the next bytes; return how many there were."""
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def read(self, size: int | None = -1) -> bytes:  # without the copy by `readinto`
        """Read so many bytes, or up to the end."""
        stop = self._size if size is None or size < 0 else min(self._at + size, self._size)
        if stop <= self._at:
            return b""
        found: Buffer = self._engine.get_ranges([Range(self._key, self._at, stop)])[0]
        self._at = stop
        return bytes(found)
