"""Write a new zip file: a folder beside it, packed and published in one step; `zip_engine` reads."""

from __future__ import annotations

import os
import secrets
import zipfile

from tdstore.storekit import files, refusals
from tdstore.storekit.publish import take_mode
from tdstore_zarr.layout.document import MAX_ROOT, NAME
from tdstore_zarr.place.folder import FolderPlace
from tdstore_zarr.place.zip_engine import ZipEngine


class ZipPlace(FolderPlace):
    """A folder that is packed at every commit, including objects in its log."""

    redo = False

    def __init__(self, path: str, url: str, *, timeout: float, exclusive: bool) -> None:
        super().__init__(path, url, timeout=timeout, writable=True)
        self.published = False
        self._exclusive = exclusive
        self._look()
        self._begin()

    def _look(self) -> None:
        if not os.path.lexists(self.path):
            return
        if self._exclusive:
            raise refusals.place_exists(self.url)
        if not os.path.isfile(self.path):
            raise refusals.other_kind(self.url, "a folder, not a file")
        with files.io_errors(self.url, "looking at it"), open(self.path, "rb") as file:
            head = file.read(4)
        if head and head[:2] != b"PK":
            raise refusals.other_kind(self.url, "a file of another kind")

    def newest_root(self) -> bytes:
        return newest_root_of_zip(self.path, self.url)

    def take(self) -> None:
        """Do nothing: the folder is private."""

    def release(self) -> None:
        """Do nothing: the folder is private."""

    def publish(self, data: bytes, *, sync: bool) -> None:
        """Pack the folder; it stays, for further writes. Every commit packs it again."""
        self.put_root(data, sync=sync)
        self.published = self.engine.active = True

    def put_root(self, data: bytes, *, sync: bool) -> None:
        site = self._site
        assert site is not None
        temp = f"{site.temp}-{secrets.token_hex(4)}.zip"
        with files.io_errors(self.url, "publishing"):
            try:
                self._pack(temp, site.parent, data, sync=sync)
                with site.locked():
                    if self._exclusive:
                        try:
                            files.link(temp, site.parent, site.name, site.parent)
                        except FileExistsError:
                            raise refusals.place_exists(self.url) from None
                        self._exclusive = False
                    else:
                        self._look()
                        files.rename(temp, site.parent, site.name, site.parent)
                    if sync:
                        files.fsync(site.parent)
            finally:
                files.unlink_if_there(temp, site.parent)
        site.keep_parents()

    def _pack(self, name: str, parent: int, root: bytes, *, sync: bool) -> None:
        fd = files.create_empty(name, parent)
        with open(fd, "wb") as file:
            # Stored, not deflated: chunks are compressed already, and are read by ranges.
            with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as packed:
                packed.writestr(zipfile.ZipInfo(NAME), root)
                for entry in sorted(self.engine.list()):
                    packed.writestr(zipfile.ZipInfo(entry.key), bytes(self.engine.get(entry.key).data))
            file.flush()
            take_mode(file.fileno(), os.path.basename(self.path), parent)
            if sync:
                files.fsync(file.fileno())


def newest_root_of_zip(path: str, url: str) -> bytes:
    """Read the `zarr.json` of the zip file that a path leads to now."""
    engine = ZipEngine(path, url)
    try:
        return bytes(engine.get(NAME, MAX_ROOT).data)
    finally:
        engine.close()
