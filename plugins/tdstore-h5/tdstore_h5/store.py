"""The `h5` store: one HDF5 file, its datasets as leaves, its manifest in one attribute."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import AbstractContextManager
from pathlib import Path as FsPath
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar, get_args

import h5py
import numpy as np
import torch
from torch import Tensor

from tdstore.dtypes import repair_bools, to_numpy
from tdstore.errors import (
    CorruptStoreError,
    OptionError,
    TDStoreError,
    UnsupportedError,
)
from tdstore.header import Header
from tdstore.index.ranges import index_shape
from tdstore.index.rows import gather
from tdstore.registry import split_scheme
from tdstore.store import Cap
from tdstore.storekit import CheckedStore, check_choices, refusals
from tdstore.storekit.budget import SUSPECT_BYTES, allocating, is_suspect, refuse_absent
from tdstore.storekit.checked import fake_mode, fill_pattern, full
from tdstore.storekit.checksums import crc32c
from tdstore.storekit.chunks import LAYOUTS
from tdstore.storekit.files import raise_io
from tdstore.storekit.foreign_strings import StringsLeaf, leaves_of_values
from tdstore.threads import without_interrupts
from tdstore.types import MODES, Durable, Fault, LeafSpec, Mode, Path, Read, Recover, Verify, Write, path_text
from tdstore_h5 import options
from tdstore_h5.faults import h5_errors, is_memory, is_system_error
from tdstore_h5.file import datasets
from tdstore_h5.file.names import encode_path
from tdstore_h5.file.opening import open_session
from tdstore_h5.file.publish import new_file
from tdstore_h5.file.tree import Leaf
from tdstore_h5.foreign import foreign_header
from tdstore_h5.remote.store import RemoteH5Store, is_url, open_remote_h5
from tdstore_h5.rows import chunked
from tdstore_h5.rows.checksums import BlockSums, constant_sums, grain_of
from tdstore_h5.rows.contiguous import Bytes, Ints, blocks_of
from tdstore_h5.rows.writing import Rows, compare_before, write_rows
from tdstore_h5.session import Session

P = ParamSpec("P")
T = TypeVar("T")


def open_h5(
    location: str | os.PathLike[str] | None,
    *,
    mode: Mode = "r",
    durable: Durable = "commit",
    verify: Verify = "size",
    recover: Recover | None = None,
    locking: bool | None = None,
    lock_timeout: float = 10.0,
    trust: Literal["h5"] | None = None,
    libver: str | tuple[str, str] | None = None,
    layout: Literal["random", "scan"] | None = None,
    chunks: bool | int | tuple[int, ...] | None = None,
    maxshape: bool | tuple[int | None, ...] | None = None,
    compression: str | int | Mapping[str, Any] | None = None,
    compression_opts: Any = None,
    shuffle: bool | None = None,
    fletcher32: bool | None = None,
    scaleoffset: int | bool | None = None,
    track_times: bool | None = None,
    track_order: bool | None = None,
    fillvalue: Any = None,
    fill_time: str | None = None,
    allow_unknown_filter: bool | None = None,
    rdcc_nslots: int | None = None,
    rdcc_nbytes: int | None = None,
    rdcc_w0: float | None = None,
    storage_options: Mapping[str, Any] | None = None,
    max_bytes: int | None = None,
) -> H5Store | RemoteH5Store:
    """Open one HDF5 file as a store.

    Args:
        location: a path, or `h5://path`; for reading also a URL with the engine of a plugin, as `s3://b/x.h5`.
        mode: "r", "r+", "w", "x" or "a", as in `tdstore.Store`.
        durable: "commit" waits for the storage at every commit; "none" survives only the death of the process.
        verify: "size" compares structure and sizes with the manifest, "full" all checksums too, "none" neither.
        recover: "accept" accepts a file as it is if a writer ended in the middle of a change, or another program
            changed it.
        locking: None locks where the file system can, True insists, False never does.
        lock_timeout: seconds to wait for other processes.
        trust: "h5" follows links and external storage, and accepts declared sizes without a check.
        libver: bounds of the HDF5 format as in h5py.
        layout: chunks that fit single rows ("random") or long runs of rows ("scan"), for leaves that are chunked
            because of another option. Contiguous leaves, the default, are best at both and stay as they are.
        chunks, maxshape, ...: layout of new leaves, as in h5py's `create_dataset`; `LeafSpec.options` override
            these. `chunks` and `maxshape` may name the leading dimensions only, and are cut to each leaf.
        max_bytes: refuse a file that declares more data than this. Without it a file of any size is opened, and a
            read is refused that would allocate over 1 GiB, of which less than a hundredth is stored.
        storage_options: for a URL: credentials, endpoint and settings of the engine.

    Raises:
        StoreNotFoundError, StoreExistsError: by the mode.
        StoreBusyError: others hold it for longer than `lock_timeout`.
        DirtyStoreError: a writer ended in the middle of a change (`leaves` names the leaves).
        CorruptStoreError: not HDF5, damaged, or different from its manifest.
        UntrustedDataError: it leads to other files.

    Example:
        >>> store = open_h5("data.h5", mode="w", chunks=64, compression="gzip")  # doctest: +SKIP
    """
    chosen = {
        "layout": layout,
        "chunks": chunks,
        "maxshape": maxshape,
        "compression": compression,
        "compression_opts": compression_opts,
        "shuffle": shuffle,
        "fletcher32": fletcher32,
        "scaleoffset": scaleoffset,
        "track_times": track_times,
        "track_order": track_order,
        "fillvalue": fillvalue,
        "fill_time": fill_time,
        "allow_unknown_filter": allow_unknown_filter,
        "rdcc_nslots": rdcc_nslots,
        "rdcc_nbytes": rdcc_nbytes,
        "rdcc_w0": rdcc_w0,
    }
    chosen = {name: value for name, value in chosen.items() if value is not None}
    remote = is_url(location)
    path = "" if remote else _local_path(location)
    url = str(location).partition("?")[0] if remote else f"h5://{path}"
    check_choices(
        url,
        mode=(mode, MODES),
        durable=(durable, get_args(Durable)),
        verify=(verify, get_args(Verify)),
        recover=(recover, (None, *get_args(Recover))),
        trust=(trust, (None, "h5")),
        layout=(layout, (None, *LAYOUTS)),
    )
    if remote:
        return open_remote_h5(
            str(location),
            mode=mode,
            storage_options=storage_options,
            verify=verify,
            recover=recover,
            trust=trust == "h5",
            max_bytes=max_bytes,
        )
    if storage_options:
        raise OptionError(f"{url}: storage_options are for URLs", url=url)
    session = Session(
        path=path,
        url=url,
        durable=durable == "commit",
        timeout=lock_timeout,
        locking=locking,
        libver=libver or ("v108", "latest"),
        trust=trust == "h5",
        verify=verify,
    )
    arguments = {
        "durable": durable,
        "verify": verify,
        "recover": recover,
        "locking": locking,
        "lock_timeout": lock_timeout,
        "trust": trust,
        "libver": libver,
        "max_bytes": max_bytes,
        **chosen,
    }
    if mode == "a":
        mode = "r+" if os.path.lexists(path) else "x"
    if mode in ("w", "x"):
        if mode == "x" and os.path.lexists(path):
            raise refusals.place_exists(url)
        if os.path.isdir(path):
            raise refusals.other_kind(url, "a folder")
        if os.path.isfile(path) and os.path.getsize(path) and not h5py.is_hdf5(path):
            raise refusals.other_kind(url, "a file of another kind")
        session.begin(new_file(path, url, timeout=lock_timeout, locking=locking), exclusive=mode == "x")
    else:
        open_session(session, write=mode == "r+", verify=verify, accept=recover == "accept", max_bytes=max_bytes)
    return H5Store(session, mode, chosen, arguments)


def _local_path(location: str | os.PathLike[str] | None) -> str:
    if location is None:
        raise OptionError("the 'h5' backend needs a location", hint="the name of a file, such as 'data.h5'")
    scheme, rest = split_scheme(os.fspath(location))
    if scheme not in ("", "h5", "file"):
        raise UnsupportedError(
            f"the 'h5' backend opens local files, not {scheme}:// locations", hint="copy the file here first"
        )
    if not rest:
        raise OptionError(f"{os.fspath(location)!r} names no file", hint="the name of a file, such as 'data.h5'")
    return os.path.realpath(FsPath(rest).expanduser())


def _one_at_a_time(method: Callable[Concatenate[H5Store, P], T]) -> Callable[Concatenate[H5Store, P], T]:
    """Serialize the threads that use the h5py handle."""

    @functools.wraps(method)
    def guarded(self: H5Store, /, *args: P.args, **options: P.kwargs) -> T:
        with self._session.handle.guard:
            return method(self, *args, **options)

    return guarded


_commit = without_interrupts(Session.commit)


def _is_plain(out: Tensor | None) -> bool:
    """Check whether the memory of a result has the bytes of its elements, in order."""
    return out is None or (out.is_contiguous() and not out.is_conj() and not out.is_neg())


DAMAGED_CHUNKS = (
    "all other rows can be read, with a leaf that was half written after recover='accept', too: accept takes the file "
    "as it is, and repairs nothing; restore these rows from a copy, or write them anew"
)
LARGE = 64 << 20
"""Leaves from here on are looked at more closely before they are read."""
_NO_BLOCKS: Ints = np.empty(0, np.int64)


Stored = Leaf | StringsLeaf


class H5Store(CheckedStore[Stored]):
    """Store of leaves as HDF5 datasets of one file. Created by `open_h5`."""

    leaf_options = None
    caps = (
        Cap.WRITE
        | Cap.PARTIAL_READ
        | Cap.PARTIAL_WRITE
        | Cap.RESIZE
        | Cap.PERSISTENT
        | Cap.CONCURRENT_READ
        | Cap.DISCARD
    )

    def __init__(self, session: Session, mode: Mode, layout: dict[str, Any], arguments: dict[str, Any]) -> None:
        super().__init__(session.url, writable=mode != "r")
        self._pid = None  # the handle records its process, and opens the file again in a child
        self._session = session
        self._mode = mode
        self._layout = layout
        self._arguments = arguments
        self._foreign: Header | None = None
        self._strings: dict[Path, StringsLeaf] = {}
        if not (self.writable or session.ours):
            found: dict[Path, Tensor] = {}
            self._foreign = self._foreign_header(found)
            self._strings = {path: StringsLeaf.over(data) for path, data in found.items()}

    def _foreign_header(self, leaves: dict[Path, Tensor] | None) -> Header:
        session = self._session
        with h5_errors(self.url, "reading values"):
            return foreign_header(
                session.handle.file, session.contents, self.url, lambda a, b: session.raw.bytes_at(a, b - a), leaves
            )

    @_one_at_a_time
    def reopen_token(self) -> tuple[str, Mode, dict[str, Any]]:
        """Return location, mode "r" and options to reopen with: this store remains the only writer."""
        if self._session.handle.temporary:
            raise refusals.not_saved(self.url)
        if self.writable:
            self._session.share()  # or other openers would wait for this store
        return self._session.path, "r", {k: v for k, v in self._arguments.items() if v is not None}

    # -- catalogue --------------------------------------------------------------------
    @property
    def _guard(self) -> AbstractContextManager[Any]:
        return self._session.handle.guard

    def _catalogue(self) -> Mapping[Path, Stored]:
        leaves = self._session.contents.leaves
        return {**leaves, **self._strings} if self._strings else leaves

    def load_header(self) -> Header:
        if self._closed:
            raise refusals.closed(self.url)
        session = self._session
        if session.ours or session.handle.temporary:
            return session.document.header
        return self._foreign_header(None) if self._foreign is None else self._foreign

    def _save(self, header: Header) -> None:
        handle = self._session.handle
        if not handle.temporary and not handle.is_at(handle.path):
            raise refusals.removed(self.url)
        if handle.temporary:  # Ctrl-C leaves nothing of it, and its first commit may take long
            self._session.commit(header)
        else:
            _commit(self._session, header)

    # -- data -------------------------------------------------------------------------
    def _create(self, leaves: Mapping[Path, LeafSpec]) -> None:
        session = self._session
        plan, columns = [], leaves_of_values(leaves)
        for path, spec in leaves.items():
            filled = options.with_fill(spec, self._layout)
            layout = options.fit(filled, self._layout, self.url, path, column=path in columns)
            plan.append((path, encode_path(path), filled, layout))
        session.check_places(leaves)
        session.begin_structure()
        session.handle.unflushed = True
        session.make_way(leaves)
        walker = session.walker()
        for path, name, spec, layout in plan:
            session.unlink(path)
            with session.handle.writing(f"creating {path_text(path)}"):
                leaf = datasets.make(session.handle, session.raw, path, name, spec, layout, walker)
            session.add(path, leaf)
            session.sums.put(path, constant_sums(spec, fill_pattern(spec, self.url), grain_of(spec)))

    def _read(self, wanted: Sequence[tuple[Stored, Read]]) -> list[Tensor]:
        index = wanted[0][1].index if wanted else ()
        if len(index) == 1 and type(index[0]) is slice and (rows := self._read_row(wanted)) is not None:
            return rows
        for leaf, _ in wanted:
            if leaf.spec.nbytes > LARGE:
                return self._read_large(wanted)
        unseen = self._unseen(wanted)
        return [self._read_one(leaf, r, r.path in unseen) for leaf, r in wanted]

    def _read_row(self, wanted: Sequence[tuple[Stored, Read]]) -> list[Tensor] | None:
        """Copy one short row of each leaf from the mapping, if all were compared before; None for other reads."""
        session, found = self._session, []
        raw, sums, compared = session.raw, session.sums, session.verify != "none"
        for leaf, r in wanted:
            term = r.index[0] if len(r.index) == 1 else None
            if type(term) is not slice or term.stop - term.start != 1 or r.out is not None or type(leaf) is not Leaf:
                return None
            if not leaf.plain or leaf.held or leaf.offset is None:
                return None
            if compared and not sums.is_row_seen(r.path, leaf.spec, term.start):
                return None
            row = raw.row(leaf.offset, leaf.spec, term.start)
            if row is None:
                return None
            if row.dtype is torch.bool:
                repair_bools(row)
            found.append(row)
        return found

    def _unseen(self, wanted: Sequence[tuple[Stored, Read]]) -> Set[Path]:
        """Return the leaves whose bytes a read must compare with checksums. A fake result has no bytes to compare."""
        session = self._session
        return set() if session.verify == "none" or fake_mode() else session.sums.unseen_leaves(wanted)

    def _read_large(self, wanted: Sequence[tuple[Stored, Read]]) -> list[Tensor]:
        """Read where results may be larger than memory, or than the stored data."""
        specs = [leaf.spec for leaf, _ in wanted]
        shapes = [index_shape(spec.shape, r.index) for spec, (_, r) in zip(specs, wanted, strict=True)]
        sizes = [math.prod(shape) * spec.dtype.itemsize for shape, spec in zip(shapes, specs, strict=True)]
        sizes = [0 if r.out is not None else size for size, (_, r) in zip(sizes, wanted, strict=True)]
        if self._arguments["max_bytes"] is None and sum(sizes) > SUSPECT_BYTES:
            by_path = {r.path: leaf.spec.nbytes if isinstance(leaf, StringsLeaf) else leaf.stored for leaf, r in wanted}
            stored = min(self._session.raw.stored(), sum(by_path.values()))
            if is_suspect(sum(sizes), stored):
                raise refuse_absent(wanted[sizes.index(max(sizes))][1].path, sum(sizes), stored, self.url)
        found, unseen = [], self._unseen(wanted)
        for (leaf, r), shape, spec in zip(wanted, shapes, specs, strict=True):
            with allocating(r.path, shape if r.out is None else (), spec.dtype, self.url):
                found.append(self._read_one(leaf, r, r.path in unseen))
        return found

    def _read_one(self, leaf: Stored, r: Read, unseen: bool) -> Tensor:
        if isinstance(leaf, StringsLeaf):
            return gather(leaf.data, r.index, r.out)
        session, spec = self._session, leaf.spec
        starts, size = _NO_BLOCKS, 0
        if unseen:
            starts, size = blocks_of(spec.shape, r.index)
            if size and len(starts) == 1:
                low, high = int(starts[0]) * spec.dtype.itemsize, (int(starts[0]) + size) * spec.dtype.itemsize
                if session.sums.is_seen(r.path, low, high):
                    starts, size = _NO_BLOCKS, 0
        after = len(starts) == 1 and (
            r.out is None or r.out.is_contiguous()
        )  # one stretch: its bytes are in the result
        if size and not after:
            with session.handle.guard:
                session.verify_read(r.path, leaf, starts, size)
        copy = None
        if size and after:
            copy = BlockSums(session.sums.leaves[r.path], spec, int(starts[0]) * spec.dtype.itemsize)
        arrived = None if copy is None else copy.add
        if leaf.plain and not leaf.held and leaf.offset is not None:
            try:
                result = session.raw.read(leaf.offset, spec, r.index, r.out, arrived)
            except TDStoreError:
                raise
            except OSError as error:
                raise_io(error, self.url, f"reading {path_text(r.path)}", writing=False)
        else:
            result = self._read_otherwise(leaf, r)
        if copy is not None:
            copy.data = to_numpy(result.reshape(-1)).view(np.uint8)
            with session.handle.guard:
                session.verify_read(r.path, leaf, starts, size, copy)
        if spec.dtype is torch.bool:  # asked here: a call for each leaf would count
            repair_bools(result)
        return result

    def _read_otherwise(self, leaf: Leaf, r: Read) -> Tensor:
        """Read a leaf whose bytes are not plain bytes of the file: through HDF5, or because they were never written."""
        session, spec = self._session, leaf.spec
        if not leaf.plain or leaf.held:
            with session.handle.guard, h5_errors(self.url, f"reading {path_text(r.path)}"):
                session.handle.check_storage()
                dataset = session.dataset(r.path)
                try:
                    return chunked.read(dataset, spec, r.index, r.out)
                except (OSError, RuntimeError) as error:
                    if is_memory(error) or (isinstance(error, OSError) and is_system_error(error)):
                        raise
                    chunked.need_memory(dataset)
                    bad = chunked.unreadable_rows(dataset, spec, r.index)
                    if not bad:
                        raise
                    rows = ", ".join(f"{a} to {b - 1}" for a, b in bad[:5]) + ("" if len(bad) < 6 else ", and more")
                    raise CorruptStoreError(
                        f"{self.url}: {path_text(r.path)} is damaged in rows {rows}: {' '.join(str(error).split())}",
                        url=self.url,
                        hint=DAMAGED_CHUNKS,
                    ) from error
        fill = full(LeafSpec((1,), spec.dtype, fill_value=spec.fill_value))
        return gather(fill.expand(spec.shape), r.index, r.out)

    def _write(self, wanted: Sequence[tuple[Stored, Write]]) -> None:
        session = self._session
        blocks = []
        for _, w in wanted:
            if w.value.numel():
                leaf = session.contents.leaves[w.path]
                starts, size = blocks_of(leaf.spec.shape, w.index)
                compare_before(session, w.path, leaf, starts, size)
                blocks.append((w, starts, size))
        session.mark([w.path for _, w in wanted])
        write_rows(session, [self._rows(*block) for block in blocks])

    def _rows(self, w: Write, starts: Ints, size: int) -> Rows:
        """Return a write into a leaf that is allocated in the file."""
        session, leaf = self._session, self._session.contents.leaves[w.path]
        if leaf.plain and leaf.offset is None and leaf.spec.nbytes:
            session.overlaid()
            datasets.allocate(session.handle, session.raw, w.path, leaf)
        return Rows(w.path, leaf, w.index, w.value, starts, size)

    @without_interrupts
    def _delete(self, paths: Sequence[Path]) -> None:
        session = self._session
        session.begin_structure()
        for path in paths:
            session.unlink(path)

    @without_interrupts
    def _resize(self, lengths: Mapping[Path, int]) -> None:
        session = self._session
        for path, length in lengths.items():
            leaf = session.contents.leaves[path]
            row = math.prod(leaf.spec.shape[1:])
            end = row * min(length, leaf.spec.shape[0])
            if end:  # the grain that the new end is in changes its length
                compare_before(session, path, leaf, np.array([end - 1]), 1)
        session.begin_structure()
        for path, length in lengths.items():
            session.resize(path, length)

    @without_interrupts
    def _rename(self, moves: Mapping[Path, Path]) -> None:
        session = self._session
        for new in moves.values():
            encode_path(new)
        session.begin_structure()
        session.rename(moves)

    @_one_at_a_time
    @without_interrupts
    def discard(self) -> None:
        """Discard changes, as `Store.discard` does.

        Raises:
            StoreError: more rows were written in place, outside of a change of structure, than are saved for undo.
        """
        session = self._open()
        if not self.writable:
            raise self._read_only()
        if not session.handle.child and not session.handle.replaced:
            session.discard()

    # -- life --------------------------------------------------------------------------
    @_one_at_a_time
    def flush(self) -> None:
        self._open().handle.flush()

    @_one_at_a_time
    def verify(self, paths: Sequence[Path] | None = None) -> list[Fault]:
        session = self._open()
        chosen = session.contents.leaves if paths is None else [p for p in paths if p not in self._strings]
        return session.faults([self._known(p) for p in chosen])

    @_one_at_a_time
    def generation(self) -> object:
        """Return the file, and the number and checksum of its manifest; None where a commit may go unnoticed.

        Our lock keeps others from writing in place. They may replace the file: then each call returns another value.
        """
        session = self._open()
        handle = session.handle
        if handle.temporary or handle.child or not handle.locked or not session.ours:
            return None
        if not handle.is_at(session.path):
            return object()
        info = os.fstat(handle.fd)
        text = session.manifest or b""
        seal = crc32c(text.encode("utf-8", "replace") if isinstance(text, str) else text)
        return info.st_dev, info.st_ino, session.document.generation, seal

    def nbytes_stored(self) -> int | None:
        return self._open().raw.size()

    @_one_at_a_time
    def native_group(self, path: Path, owner: object) -> h5py.Group:
        """Return a read-only `h5py.File` of the last commit, or a group in it. Written rows are committed first."""
        session = self._open()
        if self.writable:
            session.share()
        file = session.exported.open(session.handle, owner)
        return file[encode_path(path)] if path else file

    def _close(self) -> None:
        self._session.close()

    @_one_at_a_time
    def read_bytes(self, path: Path, start: int, stop: int) -> Bytes:
        """Read bytes of a leaf in its memory layout, C order."""
        self._open()
        self._leaf(path)
        return self._session.read_bytes(path, start, stop)

    def _known(self, path: Path) -> Path:
        self._leaf(path)
        return path

    @_one_at_a_time
    def layout(self, path: Path) -> Mapping[str, Any]:
        """Return layout options, as `Store.layout` does."""
        session, leaf = self._session, self._leaf(path)
        if isinstance(leaf, StringsLeaf) or leaf.plain:
            return {}
        dataset = session.dataset(path)
        with h5_errors(self.url, f"looking at {path_text(path)}"):
            filters = {
                "chunks": dataset.chunks,
                "compression": dataset.compression,
                "compression_opts": dataset.compression_opts,
                "shuffle": dataset.shuffle or None,
                "fletcher32": dataset.fletcher32 or None,
            }
        return {name: value for name, value in filters.items() if value is not None}

    def _open(self) -> Session:
        if self._closed:
            raise refusals.closed(self.url)
        return self._session

    def _check_writable(self) -> None:
        super()._check_writable()
        handle = self._session.handle
        if handle.child:
            raise refusals.forked(self.url)
        handle.check_storage()
        if handle.replaced:
            raise refusals.replaced(self.url)
