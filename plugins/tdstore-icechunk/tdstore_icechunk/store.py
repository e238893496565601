"""The icechunk backend: `open_icechunk`, and its store class."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import msgspec
from tdstore_remote.options import StorageOptions
from tdstore_zarr.codec.buffers import LIMIT
from tdstore_zarr.layout import chunking as layouts
from tdstore_zarr.layout.document import NAME
from tdstore_zarr.layout.leaf import Leaf
from tdstore_zarr.session import Session
from tdstore_zarr.store import ZarrStore

from tdstore.errors import OptionError, StoreNotFoundError
from tdstore.header import Header
from tdstore.store import Cap
from tdstore.storekit import WriterState, check_choices, refusals
from tdstore.types import MODES, Mode, Path, Verify, Version
from tdstore_icechunk.bucket import location_of
from tdstore_icechunk.place import RepositoryPlace
from tdstore_icechunk.versions import drop_versions, set_tag, versions_of


def open_icechunk(
    location: str | os.PathLike[str] | None,
    *,
    mode: Mode = "r",
    version: str | None = None,
    verify: Verify = "size",
    lock_timeout: float = 10.0,
    buffer_bytes: int = LIMIT,
    max_bytes: int | None = None,
    storage_options: Mapping[str, Any] | None = None,
    layout: Literal["random", "scan"] | None = None,
    chunks: int | Sequence[int] | None = None,
    shards: bool | int | Sequence[int] | None = None,
    compressors: Any = None,
    checksum: bool | None = None,
) -> IcechunkStore:
    """Open the branch `main` of an icechunk repository as a store.

    Args:
        location: a folder, or `s3://bucket/x.icechunk`; `icechunk://` may precede each.
        mode: "r", "r+", "w", "x" or "a", as in `tdstore.Store`. "w" over a repository is its next commit.
        version: the id of a version, with mode "r".
        verify: "full" compares all chunks with their checksums on opening; chunks that are read are always compared.
        lock_timeout: seconds to wait for a commit of another process in a local folder.
        buffer_bytes: as in `open_zarr`.
        max_bytes: as in `open_zarr`.
        storage_options: credentials and endpoint of S3, by the names that the `remote` backend takes.
        layout: as in `open_zarr`, as are `chunks`, `shards`, `compressors` and `checksum`.
        chunks: shape of a chunk, or of its leading dimensions.
        shards: shape of a shard: an object of the repository.
        compressors: of new leaves.
        checksum: whether every chunk ends in its crc32c (the default).

    Raises:
        StoreNotFoundError, StoreExistsError: by the mode; or there is no such version.
        CorruptStoreError: damaged.
        UnsupportedError: this process was forked from one that had imported icechunk.

    Example:
        >>> store = open_icechunk("runs/a.icechunk", mode="w", compressors="zstd")  # doctest: +SKIP
    """
    text = "" if location is None else os.fspath(location)
    check_choices(text, mode=(mode, MODES), verify=(verify, get_args(Verify)))
    for name, number in (("buffer_bytes", buffer_bytes), ("max_bytes", 0 if max_bytes is None else max_bytes)):
        if type(number) is not int or number < 0:
            raise OptionError(f"{text}: {name} must be a number of bytes, not {number!r}", url=text)
    place_of = location_of(text, storage_options, lock_timeout)
    defaults = {"layout": layout, "chunks": chunks, "shards": shards, "compressors": compressors, "checksum": checksum}
    layout_options = {name: value for name, value in defaults.items() if value is not None}
    layouts.check_names(layout_options, place_of.url)
    shown = None if storage_options is None else StorageOptions(storage_options)  # which is pickled without secrets
    arguments: dict[str, Any] = {
        "version": version, "verify": verify, "lock_timeout": lock_timeout, "buffer_bytes": buffer_bytes,
        "max_bytes": max_bytes, "storage_options": shown, **layout_options,
    }  # fmt: skip
    if version is not None and mode != "r":
        raise refusals.version_read_only(place_of.url, version)
    place: RepositoryPlace | None = None
    try:
        if mode in ("r", "r+", "a"):
            try:
                place = RepositoryPlace.existing(place_of, None)
            except StoreNotFoundError:
                if mode != "a":
                    raise
            if place is not None and version is not None:
                if version not in {known.id for known in versions_of(place.repo, place.url)}:
                    raise refusals.no_version(place.url, version)
                place = RepositoryPlace.existing(place_of, version)
        if place is None:
            place = RepositoryPlace.new(place_of, exclusive=mode != "w")
        session = RepositorySession(
            place, writable=mode != "r", durable=False, timeout=lock_timeout, trust=False,
            buffer_bytes=buffer_bytes, max_bytes=max_bytes,
        )  # fmt: skip
        if place.published:
            session.load(verify=verify, accept=False)
    except BaseException:
        if place is not None:
            place.close()
        place_of.give_up()
        place_of.close()
        raise
    return IcechunkStore(session, text, mode, layout_options, arguments)


class RepositorySession(Session):
    """A session on a repository. icechunk takes the chunks of an array only after its metadata."""

    place: RepositoryPlace

    def put_metadata(self, leaf: Leaf) -> None:
        """Put the metadata of an array, with its current shape."""
        data = leaf.meta.to_json()
        self.document.metadata[leaf.node] = data
        self.engine.put(f"{leaf.node}/{NAME}", msgspec.json.encode(data))

    def add(self, leaf: Leaf) -> None:
        super().add(leaf)
        self.put_metadata(leaf)

    def rename(self, moves: Mapping[Path, Path]) -> None:
        super().rename(moves)
        self.place.engine.carry_out()

    def state(self) -> WriterState:
        return super().state()._replace(lost=self.place.lost)


class IcechunkStore(ZarrStore):
    """Store of leaves as the arrays of a zarr group in an icechunk repository. Created by `open_icechunk`."""

    caps = ZarrStore.caps | Cap.VERSIONS
    _session: RepositorySession

    def _resize(self, lengths: Mapping[Path, int]) -> None:
        super()._resize(lengths)
        session = self._session
        for path in lengths:
            session.put_metadata(session.leaves[path])

    # -- versions ----------------------------------------------------------------------------
    def save_version(self, header: Header, message: str) -> Version:
        """Commit and make the commit a version, as `Store.save_version` does: its metadata says so."""
        with self._guard:
            self._check_writable()
            place = self._session.place
            try:
                place.version = message, header
                self._save(header)
            finally:
                place.version = None
            return next(v for v in self.versions() if v.id == place.base)

    def versions(self) -> list[Version]:
        """List the versions, as `Store.versions` does."""
        place = self._place()
        return versions_of(place.repo, place.url) if place.published else []

    def set_tag(self, name: str, version: str | None) -> None:
        """Tag a version, as `Store.set_tag` does; open writers are not affected."""
        with self._guard:
            self._check_writable()
            set_tag(self._saved().repo, self.url, name, version)

    def drop_versions(self, versions: Sequence[str], grace: float) -> list[str]:
        """Drop versions, as `Store.drop_versions` does; open writers are not affected."""
        with self._guard:
            self._check_writable()
            place = self._saved()
            return drop_versions(place.repo, place.location, versions, grace)

    def _place(self) -> RepositoryPlace:
        self._open()
        return self._session.place

    def _saved(self) -> RepositoryPlace:
        place = self._place()
        if not place.published:
            raise refusals.not_saved(self.url)
        return place
