"""The zarr backend: `open_zarr`, and its store class."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path as FsPath
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor
from zarr.abc.store import Store as ZarrPythonStore

from tdstore.dtypes import to_numpy
from tdstore.engine import Engine, EngineCap, expect_ranges, expected_ranges
from tdstore.errors import (
    CorruptStoreError,
    KeyNotFoundError,
    OptionError,
    StoreBusyError,
    StoreNotFoundError,
    UnsupportedError,
)
from tdstore.header import Header
from tdstore.index.ranges import index_shape
from tdstore.index.rows import gather
from tdstore.lifetime import Ending
from tdstore.registry import registry, split_scheme
from tdstore.replacing import check_replaceable
from tdstore.store import Cap
from tdstore.storekit import CheckedStore, Typed, check_choices, refusals
from tdstore.storekit.budget import allocating
from tdstore.storekit.foreign_strings import StringsLeaf, leaves_of_values
from tdstore.storekit.pages import empty
from tdstore.types import MODES, Durable, Fault, LeafSpec, Mode, Path, Read, Recover, Verify, Write
from tdstore_zarr import store_objects
from tdstore_zarr.codec.buffers import LIMIT
from tdstore_zarr.layout import chunking as layouts
from tdstore_zarr.layout.document import generation_of
from tdstore_zarr.layout.grid import full_index
from tdstore_zarr.layout.leaf import Leaf
from tdstore_zarr.place.base import Place
from tdstore_zarr.place.folder import FolderPlace
from tdstore_zarr.place.memory_engine import MemoryEngine, engine_of
from tdstore_zarr.place.objects import ObjectPlace
from tdstore_zarr.place.zip_engine import ZipEngine
from tdstore_zarr.place.zipfile import ZipPlace, newest_root_of_zip
from tdstore_zarr.reading.reader import Job
from tdstore_zarr.reading.row_slices import MANY, RowSlices, read_together
from tdstore_zarr.resizing import resize
from tdstore_zarr.session import Session

LOOKS = 100
"""How often a reader looks again because a writer committed meanwhile."""
INDICES = 16
"""Connections that are opened beside the first request for a store behind a URL."""
FEW_BYTES = 1 << 20
"""Results of up to so many bytes are allocated without a look at the memory of the machine."""


def open_zarr(
    location: str | os.PathLike[str] | ZarrPythonStore | None,
    *,
    mode: Mode = "r",
    durable: Durable = "commit",
    verify: Verify = "size",
    recover: Recover | None = None,
    trust: Literal["zarr"] | None = None,
    lock_timeout: float = 10.0,
    buffer_bytes: int = LIMIT,
    max_bytes: int | None = None,
    single_writer: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    layout: Literal["random", "scan"] | None = None,
    chunks: int | Sequence[int] | None = None,
    shards: bool | int | Sequence[int] | None = None,
    compressors: Any = None,
    checksum: bool | None = None,
) -> ZarrStore:
    """Open a zarr v3 group as a store.

    Args:
        location: a folder, a `.zip` file, any URL that an engine reaches (`s3://bucket/x.zarr`), or
            `memory://name`; `zarr://` may precede each. Or a store of zarr-python: a `LocalStore` or `ZipStore`
            stands for its path, a `MemoryStore` itself is read and written, and so are others, with
            `single_writer=True`.
        mode: "r", "r+", "w", "x" or "a", as in `tdstore.Store`. A zip file is written whole ("w", "x").
        durable: "commit" waits for the storage at every commit; "none" survives only the death of the process.
        verify: "size" compares sizes with the manifest (over a network, or if there are more than 20,000 objects, as
            they are read), "full" all checksums and metadata too, "none" neither.
        recover: "accept" accepts a store as it is if a writer ended in the middle of a change, or another program
            changed it.
        trust: "zarr" accepts declared sizes without a check, and lets zarr-python apply any installed codec.
        lock_timeout: seconds to wait for other writers.
        buffer_bytes: writes are held in memory until their shard is complete, up to this many bytes and one shard. With
            less memory, shards are rewritten more often if rows come in no order.
        max_bytes: refuse a store that declares more data than this. Without it a store of any size is opened, and a
            read is refused that would allocate over 1 GiB, of which less than a hundredth is stored.
        single_writer: the assurance of the caller that there is no other writer; needed for writing if the engine
            has no conditional put.
        storage_options: credentials, endpoint, ... of the engine that reaches a URL.
        layout: "random" (the default) makes each row of 4 KiB or more a chunk, "scan" chunks of 1 MiB.
        chunks: shape of a chunk, or of its leading dimensions. Without `shards`, chunks are not put into shards.
        shards: shape of a shard, or of its leading dimensions; True picks one, False stores every chunk by itself.
        compressors: "lz4" (blosc, the default), "zstd", "blosc-zstd", "lz4hc", "gzip", "none", zarr codecs or
            their metadata, or a list of these.
        checksum: whether every chunk ends in its crc32c (the default).

    The last five are defaults for new leaves; `LeafSpec.options` override them.

    Raises:
        StoreNotFoundError, StoreExistsError: by the mode.
        StoreBusyError: another writer is active, or changed the store meanwhile.
        DirtyStoreError: a writer ended in the middle of a change (`leaves` names the leaves).
        CorruptStoreError: damaged, or different from its manifest.
        UntrustedDataError: the store leads out of its folder, or holds values that could only be read by running code.

    Example:
        >>> store = open_zarr("runs/a.zarr", mode="w", compressors="zstd")  # doctest: +SKIP
    """
    defaults = {"layout": layout, "chunks": chunks, "shards": shards, "compressors": compressors, "checksum": checksum}
    arguments: dict[str, Any] = {
        "durable": durable, "verify": verify, "recover": recover, "trust": trust, "lock_timeout": lock_timeout,
        "buffer_bytes": buffer_bytes, "max_bytes": max_bytes, "single_writer": single_writer,
        "storage_options": storage_options, **defaults,
    }  # fmt: skip
    text = "" if location is None else os.fspath(location) if isinstance(location, os.PathLike) else str(location)
    check_choices(
        text,
        mode=(mode, MODES),
        durable=(durable, get_args(Durable)),
        verify=(verify, get_args(Verify)),
        recover=(recover, (None, *get_args(Recover))),
        trust=(trust, (None, "zarr")),
    )
    for name, number in (("buffer_bytes", buffer_bytes), ("max_bytes", 0 if max_bytes is None else max_bytes)):
        if type(number) is not int or number < 0:
            raise OptionError(f"{text}: {name} must be a number of bytes, not {number!r}", url=text)
    if not isinstance(location, str | os.PathLike | None):
        return _open_object(location, mode, defaults, arguments)
    scheme, rest = split_scheme(text)
    if scheme == "zarr":
        text = rest
        scheme, rest = split_scheme(text)
    if scheme in ("", "file", "local") and "::" not in text:
        return _open_local(rest if scheme else text, mode, defaults, arguments)
    # The indices of shards follow the root: their connections are opened beside it.
    with expect_ranges(max(expected_ranges(), INDICES if mode == "r" else 0)):
        engine = engine_of(text, storage_options)
    return open_on(engine, mode=mode, location=text, **arguments)


def _open_object(location: object, mode: Mode, defaults: dict[str, Any], arguments: dict[str, Any]) -> ZarrStore:
    place, mode = store_objects.place_of(location, mode)
    if mode == "w":  # the registry looks at paths and URLs only

        def look() -> ZarrStore:
            quick: dict[str, Any] = {"verify": "none", "lock_timeout": 0.0, "trust": arguments["trust"]}
            return open_zarr(place, **quick) if isinstance(place, str) else open_on(place, **quick)

        path = place if isinstance(place, str) else ""
        check_replaceable(registry().get("zarr"), path, str(location), look)
    if not isinstance(place, str):
        return open_on(place, mode=mode, **arguments)
    try:
        store = _open_local(place, mode, defaults, arguments)
    except CorruptStoreError as error:
        error.hint = store_objects.hint_of(location) or error.hint
        raise
    if store.writable:
        store.after_commit = partial(store_objects.open_zip, location, replaced=True)
    else:
        store_objects.open_zip(location, replaced=False)
    return store


def open_on(
    engine: Engine,
    *,
    mode: Mode = "r",
    location: str | None = None,
    durable: Durable = "commit",
    verify: Verify = "size",
    recover: Recover | None = None,
    trust: Literal["zarr"] | None = None,
    lock_timeout: float = 10.0,
    buffer_bytes: int = LIMIT,
    max_bytes: int | None = None,
    single_writer: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    **defaults: Any,
) -> ZarrStore:
    """Open a zarr group on an open engine; options as for `open_zarr`. The store closes the engine."""
    url = engine.url
    layouts.check_names(defaults, url)
    defaults = {k: v for k, v in defaults.items() if v is not None}
    arguments = {
        "durable": durable, "verify": verify, "recover": recover, "trust": trust, "lock_timeout": lock_timeout,
        "buffer_bytes": buffer_bytes, "max_bytes": max_bytes, "single_writer": single_writer,
        "storage_options": storage_options, **defaults,
    }  # fmt: skip
    place: ObjectPlace
    if mode in ("r", "r+", "a"):
        place = ObjectPlace.existing(
            engine, url, timeout=lock_timeout, take_over=recover == "accept", single=single_writer
        )
        place.explains = verify != "none"  # so a save asks whether there is a store to replace
        session = _session(place, arguments, writable=mode != "r")
        try:
            session.load(verify=verify, accept=recover == "accept")
            if mode != "r" and EngineCap.WRITE not in engine.can:
                raise engine.unsupported(EngineCap.WRITE)
            return _kind(engine)(session, location, mode, defaults, arguments)
        except StoreNotFoundError:
            if mode != "a":
                engine.close()
                raise
        except BaseException:
            engine.close()
            raise
    place = ObjectPlace.new(
        engine, url, timeout=lock_timeout, exclusive=mode != "w", take_over=recover == "accept", single=single_writer
    )
    session = _session(place, arguments, writable=True)
    place.wrote(session.written_keys)
    return _kind(engine)(session, location, mode, defaults, arguments)


def _kind(engine: Engine) -> type[ZarrStore]:
    if isinstance(engine, ZipEngine):
        return ZippedZarrStore
    return MemoryZarrStore if isinstance(engine, MemoryEngine) else ZarrStore


def _session(place: Place, arguments: Mapping[str, Any], *, writable: bool) -> Session:
    return Session(
        place,
        writable=writable,
        durable=arguments["durable"] == "commit",
        timeout=arguments["lock_timeout"],
        trust=arguments["trust"] == "zarr",
        buffer_bytes=arguments["buffer_bytes"],
        max_bytes=arguments["max_bytes"],
    )


def _open_local(text: str, mode: Mode, defaults: dict[str, Any], arguments: dict[str, Any]) -> ZarrStore:
    if not text:
        raise OptionError("the 'zarr' backend needs a location", hint="the name of a folder, such as 'data.zarr'")
    path = os.path.realpath(FsPath(text).expanduser())
    defaults = {k: v for k, v in defaults.items() if v is not None}
    timeout = arguments["lock_timeout"]
    zipped = path.lower().endswith(".zip") or os.path.isfile(path)
    url = f"zarr://{path}"
    if mode == "a":
        there = os.path.lexists(path) and not (os.path.isdir(path) and not os.listdir(path))
        mode = "r+" if there else "x"
    if mode in ("w", "x"):
        if zipped:
            place: Place = ZipPlace(path, url, timeout=timeout, exclusive=mode == "x")
        else:
            if mode == "x" and os.path.lexists(path) and not (os.path.isdir(path) and not os.listdir(path)):
                raise refusals.place_exists(url)
            new = FolderPlace.new(path, url, timeout=timeout, exclusive=mode == "x")
            place = new
            try:
                old = new.check_target()
            except BaseException:
                new.close()
                raise
            if old >= 0:
                os.close(old)
        return ZarrStore(_session(place, arguments, writable=True), path, mode, defaults, arguments)
    if zipped:
        if not os.path.lexists(path):
            raise refusals.not_found(url)
        if mode == "r+":
            raise UnsupportedError(
                f"{url} is a zip file, which is written whole: it cannot be changed in place",
                url=url,
                hint="mode='w' replaces it; or copy it to a folder, change that, and copy it back",
            )
        store = open_on(ZipEngine(path, url), mode="r", location=path, **{**arguments, **defaults})
        store._session.reader.local = True
        return store
    for attempt in range(LOOKS):
        folder = FolderPlace.existing(path, url, timeout=timeout, writable=mode == "r+")
        session = _session(folder, arguments, writable=mode == "r+")
        try:
            session.load(verify=arguments["verify"], accept=arguments["recover"] == "accept")
            return ZarrStore(session, path, mode, defaults, arguments)
        except (StoreNotFoundError, CorruptStoreError):
            moved = folder.stale()
            session.close(discard=True)
            if not moved or attempt == LOOKS - 1:  # else it was replaced while we looked
                raise
        except BaseException:
            session.close(discard=True)
            raise
    raise AssertionError("unreachable")


Stored = Leaf | StringsLeaf


class ZarrStore(CheckedStore[Stored]):
    """Store of leaves as the arrays of a zarr v3 group. Created by `open_zarr`."""

    leaf_options = None
    caps = (
        Cap.WRITE | Cap.DISCARD | Cap.PARTIAL_READ | Cap.PARTIAL_WRITE | Cap.RESIZE | Cap.PERSISTENT
        | Cap.CONCURRENT_READ
    )  # fmt: skip

    def __init__(
        self, session: Session, location: str | None, mode: Mode, layout: dict[str, Any], arguments: dict[str, Any]
    ) -> None:
        super().__init__(session.url, writable=mode != "r")
        self._session = session
        self._location = location
        self._mode = mode
        self._layout = layout
        self._arguments = arguments
        self._lock: threading.RLock = threading.RLock()
        self.after_commit: Callable[[], None] | None = None
        """Called once, after the first commit."""
        # The unpublished objects, and the claim on a place, are removed also when nothing was ever written.
        self._ending = None if session.place.published else Ending(self, session.close, self.url)
        layouts.check_names(layout, self.url)

    def reopen_token(self) -> tuple[str, Mode, dict[str, Any]]:
        """Return location, mode "r" and options to reopen with: this store remains the only writer."""
        session = self._session
        if not session.place.published:
            raise refusals.not_saved(self.url)
        if self._location is None:
            raise UnsupportedError(f"{self.url} has no name by which another process could open it", url=self.url)
        if self.writable and session.pid == os.getpid() and not self._closed:
            session.settle_rows()
        return self._location, "r", {k: v for k, v in self._arguments.items() if v is not None}

    # -- catalogue -------------------------------------------------------------------------
    def _catalogue(self) -> Mapping[Path, Stored]:
        session = self._session
        leaves = session.document.leaves
        return leaves if session.foreign is None else {**leaves, **session.strings}

    def _typed(self, leaf: Stored) -> Typed:
        return leaf.spec if isinstance(leaf, StringsLeaf) else self._session.opened_spec(leaf)

    def load_header(self) -> Header:
        return self._open().header()

    def _save(self, header: Header) -> None:
        self._session.commit(header)
        if self.after_commit is not None:
            done, self.after_commit = self.after_commit, None
            done()

    # -- data ------------------------------------------------------------------------------
    def read(self, reads: Sequence[Read]) -> list[Tensor]:
        session = self._open()
        if self.writable:
            with self._guard:
                return self._read_changed(reads)
        for _ in range(LOOKS):
            version = session.version
            try:
                found = super().read(reads)
                # The version last: another thread may have been following a commit while this one read.
                if not session.follow(ask=False) and session.version == version:
                    return found
            except (CorruptStoreError, KeyNotFoundError):
                if not session.follow(ask=True) and session.version == version:
                    if session.place.stale():  # its folder was replaced as a whole
                        raise self._changed() from None
                    raise
            # A writer committed meanwhile: all is read again, unless a leaf is another one by now.
            if not all(map(session.is_as_opened, (r.path for r in reads))):
                break
        raise self._changed()

    def _read_changed(self, reads: Sequence[Read]) -> list[Tensor]:
        """Read with uncommitted writes; chunks that do not fit show that another writer committed."""
        try:
            return super().read(reads)
        except CorruptStoreError:
            if self._session.place.stale():
                raise self._changed() from None
            raise

    def _changed(self) -> StoreBusyError:
        place = self._session.place
        if isinstance(place, FolderPlace) and place.moved():
            return refusals.removed(self.url)
        return refusals.overtaken(self.url)

    def _read(self, wanted: Sequence[tuple[Stored, Read]]) -> list[Tensor]:
        session = self._session
        jobs: list[Job] = []
        results: list[Tensor] = []
        session.check_room([r for _, r in wanted])
        groups: Iterable[tuple[Any, ...]] = wanted
        if len(wanted) >= MANY:
            groups = read_together(wanted, session.opened_spec)
        for leaf, r, *slices in groups:
            if slices:
                sizes = [stop - start for start, stop in slices]
                room = self._room(leaf, (sum(sizes), *leaf.meta.shape[1:]))
                jobs.append(Job(leaf, (), to_numpy(room), rows=RowSlices.of(slices, leaf)))
                results += room.split(sizes)
                continue
            if isinstance(leaf, StringsLeaf):
                results.append(gather(leaf.data, r.index, r.out))
                continue
            known = session.opened_spec(leaf).shape
            index = r.index if known == leaf.meta.shape else tuple(full_index(known, r.index))
            target = r.out
            if target is None or not _is_plain(target):  # then the caller copies it
                target = self._room(leaf, index_shape(known, r.index))
            jobs.append(Job(leaf, index, to_numpy(target)))
            results.append(target)
        session.read(jobs)
        for job in jobs:
            if job.leaf.meta.dtype is torch.bool:
                bits = job.out.view("u1") if job.out.flags.c_contiguous else job.out
                if bits.dtype != bool:
                    np.minimum(bits, np.uint8(1), out=bits)  # numpy 1 widens an array without dimensions by an int
        return results

    def _room(self, leaf: Leaf, shape: tuple[int, ...]) -> Tensor:
        if leaf.spec.nbytes <= FEW_BYTES and math.prod(shape) * leaf.spec.dtype.itemsize <= FEW_BYTES:
            return torch.empty(shape, dtype=leaf.meta.dtype, device="cpu")
        with allocating(leaf.path, shape, leaf.meta.dtype, self.url):
            return empty(shape, leaf.meta.dtype)

    def _create(self, leaves: Mapping[Path, LeafSpec]) -> None:
        session = self._session
        keys = session.place.keys
        columns = leaves_of_values(leaves)
        plan = [
            (p, layouts.fit(spec, self._layout, self.url, p, keys, column=p in columns)) for p, spec in leaves.items()
        ]
        session.check_places(leaves)
        for path in leaves:
            session.names.node(path)
        session.restructure(leaves)
        for path, meta in plan:
            session.unlink(path)
            session.add(Leaf(path, session.names.node(path), meta))

    def _write(self, wanted: Sequence[tuple[Stored, Write]]) -> None:
        session = self._session
        session.touch([w.path for _, w in wanted])
        session.write(*[(session.leaves[w.path], w.index, w.value) for _, w in wanted])

    def _delete(self, paths: Sequence[Path]) -> None:
        self._session.restructure(paths)
        for path in paths:
            self._session.unlink(path)

    def _resize(self, lengths: Mapping[Path, int]) -> None:
        session = self._session
        session.restructure(lengths)
        for path, length in lengths.items():
            resize(session, session.leaves[path], length)

    def _rename(self, moves: Mapping[Path, Path]) -> None:
        self._session.rename(moves)

    # -- life --------------------------------------------------------------------------------
    def flush(self) -> None:
        session = self._open()
        if self.writable:
            with self._guard:
                session.buffers.flush()

    def verify(self, paths: Sequence[Path] | None = None) -> list[Fault]:
        session = self._open()
        chosen = list(session.leaves if paths is None else (p for p in paths if p not in session.strings))
        self._check_all(chosen)
        with self._guard:
            session.buffers.flush()
            return session.faults(chosen)

    def generation(self) -> object:
        """Return the name of the newest commit; None in a group of another program, whose writers leave no trace."""
        session = self._open()
        if not session.place.published:
            return None
        with suppress(StoreNotFoundError):
            return generation_of(self._newest_root())
        return None

    def _newest_root(self) -> bytes:
        return self._session.place.newest_root()

    def group_location(self, path: Path) -> str:
        node = self._open().names.nodes.get(path, "")
        return self._session.place.engine.where(node) if node else self.url

    def nbytes_stored(self) -> int | None:
        session = self._open()
        return sum(leaf.stored for leaf in session.leaves.values()) + len(session.root)

    def _close(self) -> None:
        if self._ending is not None:
            self._ending.cancel()
        self._session.close()

    def _discard(self) -> None:
        self._session.discard()

    def layout(self, path: Path) -> Mapping[str, Any]:
        """Return layout options, as `Store.layout` does: chunks are encoded as one, shards are stored as one object."""
        leaf = self._leaf(path)
        if isinstance(leaf, StringsLeaf):
            return {}
        meta = leaf.meta
        inner = next((c for c in meta.codecs if c.get("name") == "sharding_indexed"), None)
        codecs = inner["configuration"]["codecs"] if inner else meta.codecs
        names = [str(codec.get("name")) for codec in codecs if codec.get("name") != "bytes"]
        shards = {"shards": meta.chunks} if meta.sharded else {}
        return {"chunks": meta.inner, **shards, "codecs": ", ".join(names) or None}

    def _open(self) -> Session:
        if self._closed:
            raise refusals.closed(self.url)
        return self._session

    def _check_writable(self) -> None:
        super()._check_writable()
        place = self._session.place
        if isinstance(place, FolderPlace) and place.replaced:
            raise refusals.replaced(self.url)


def _is_plain(out: Tensor) -> bool:
    """Check whether chunks can be decoded into the memory of `out`."""
    return out.is_contiguous() and not out.is_conj() and not out.is_neg() and not out.requires_grad


class ZippedZarrStore(ZarrStore):
    """An existing zip file, which is read-only."""

    caps = Cap.PARTIAL_READ | Cap.PERSISTENT | Cap.CONCURRENT_READ

    def _newest_root(self) -> bytes:
        assert self._location is not None, "a zip file has a path"
        return newest_root_of_zip(self._location, self.url)


class MemoryZarrStore(ZarrStore):
    """A store in the memory of this process."""

    caps = ZarrStore.caps & ~Cap.PERSISTENT
