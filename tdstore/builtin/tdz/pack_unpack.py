"""Conversion of directories to archives and back: `pack_memmap`, `unpack_memmap`, and functions on closed archives."""

from __future__ import annotations

import contextlib
import os
import stat
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tdstore import lifetime
from tdstore.builtin.memmap.layout import SUFFIX
from tdstore.builtin.memmap.tensordict_layout import META
from tdstore.builtin.tdz.reading import (
    Listing,
    as_file,
    blocks_of,
    check_ratio,
    read_listing,
    read_manifest,
    zip_errors,
)
from tdstore.builtin.tdz.store import method_of, open_tdz
from tdstore.builtin.tdz.writing import copy_range, new_file, new_info
from tdstore.errors import CorruptStoreError, StoreNotFoundError
from tdstore.header import Header
from tdstore.storekit import documents, files, refusals, session
from tdstore.storekit.checksums import Summer, Sums, sums_of_part
from tdstore.storekit.documents import PACK
from tdstore.storekit.publish import remove_tree, take_mode
from tdstore.storekit.session import FileParts

Place = str | os.PathLike[str]
_MARKS = frozenset((META, PACK))
"""A memmap directory has one of them at its root."""


def is_memmap_archive(path: Place) -> bool:
    """Check whether a file is a zip with `meta.json` or `tdstore.pack` at its root: that of a memmap directory."""
    try:
        with zipfile.ZipFile(path) as archive:
            return not _MARKS.isdisjoint(archive.namelist())
    except (OSError, zipfile.BadZipFile, ValueError):
        return False


def pack_memmap(
    prefix: Place, archive_path: Place, *, compression: str | int | None = None, compresslevel: int | None = None
) -> Path:
    """Pack a memmap directory, of tdstore or of tensordict, into one archive; an existing file is replaced in one step.

    Args:
        prefix: the directory. No process should be writing to it.
        archive_path: the archive, outside of the directory.
        compression, compresslevel: as the backend `tdz` has them.

    Returns:
        The path of the archive.

    Raises:
        StoreNotFoundError: not a memmap directory.
        CorruptStoreError: links or devices in it, or a damaged manifest.

    Example:
        >>> tdstore.pack_memmap("runs/1", "runs/1.tdz")  # doctest: +SKIP
        PosixPath('runs/1.tdz')
    """
    source, target = os.path.realpath(prefix), os.path.realpath(archive_path)
    method = method_of(compression)
    lifetime.settle()  # a handle of this folder that was dropped may still be sealing its checksums
    if target == source or target.startswith(source + os.sep):
        raise refusals.other_kind(target, "inside the folder that it packs")
    with files.io_errors(source, "packing"):
        try:
            opened = files.open_dir(source)
        except NotADirectoryError as error:
            raise StoreNotFoundError(f"{source} is not a folder", url=source) from error
        with files.closing(opened) as root:
            names = sorted((p for p, is_dir in files.walk(root) if not is_dir), key=lambda p: (p[-1] != META, p))
            if not any((name,) in names for name in _MARKS):
                raise StoreNotFoundError(f"{source} has neither {META} nor {PACK}: not a memmap directory", url=source)
            names = [p for p in names if p[-1] != session.NAME and not files.is_temp(p[0])]
            _write_atomically(target, lambda fd: _pack(root, names, fd, method, compresslevel, source))
    return Path(archive_path)


def _write_atomically(target: str, write: Callable[[int], Any]) -> None:
    """Write a new file under a temporary name, and rename it once it is complete."""
    os.makedirs(os.path.dirname(target), exist_ok=True)
    with files.closing(files.open_dir(os.path.dirname(target))) as folder:
        opened, temp = new_file(folder)
        with files.closing(opened) as fd:
            try:
                write(fd)
                files.fsync(fd)
                take_mode(fd, os.path.basename(target), folder)
                files.rename(temp, folder, os.path.basename(target), folder)
            except BaseException:
                files.unlink_if_there(temp, folder)
                raise


def _pack(root: int, names: list[FileParts], fd: int, method: int, level: int | None, url: str) -> None:
    with (
        as_file(fd, "r+b") as file,
        zipfile.ZipFile(file, "w", method, compresslevel=level) as archive,
        files.Tree(root) as tree,
    ):
        for parts in names:
            with files.closing(tree.open(parts)) as source:
                size, name = os.fstat(source).st_size, "/".join(parts)
                if name != PACK and not name.endswith(SUFFIX):
                    archive.writestr(name, os.pread(source, size, 0), zipfile.ZIP_STORED)
                    continue
                info: Any = name
                if method == zipfile.ZIP_STORED:
                    info, _ = new_info(name, size, archive.start_dir)
                with archive.open(info, "w", force_zip64=True) as target:
                    copy_range(source, 0, size, target)


def unpack_memmap(archive_path: Place, prefix: Place) -> Path:
    """Unpack an archive into a memmap directory, comparing every byte with its checksum.

    Args:
        archive_path: the archive.
        prefix: the directory: a new one, an empty one, or one that holds a dataset, which is replaced in one step.

    Returns:
        The path of the directory.

    Raises:
        CorruptStoreError: a damaged archive, or one whose entries are not plain files below its root; nothing is
            written outside of the directory, whatever their names.
        StoreExistsError: the directory holds other files.
    """
    source, target = os.path.realpath(archive_path), os.path.realpath(prefix)
    lifetime.settle()
    with files.io_errors(source, "unpacking"):
        os.makedirs(os.path.dirname(target), exist_ok=True)
        with files.closing(files.open_dir(os.path.dirname(target))) as folder, files.closing(_open(source)) as fd:
            listing = read_listing(fd, source)
            if not any((name,) in listing.members for name in _MARKS):
                raise CorruptStoreError(
                    f"{source} has neither {META} nor {PACK}: not an archive of a dataset", url=source
                )
            for member in listing.members.values():
                check_ratio(member.info, source)
            there, temp = _check_target(target), files.temp_name()
            try:
                files.make_dir(temp, folder)
                with files.closing(os.open(temp, files.SAFE_DIR, dir_fd=folder)) as root:
                    _unpack(fd, listing, root, source)
                    files.fsync_tree(root)
                    take_mode(root, os.path.basename(target), folder)
                if there:
                    files.exchange(temp, os.path.basename(target), folder)
                    remove_tree(temp, folder, first=(documents.NAME,))
                else:
                    files.rename(temp, folder, os.path.basename(target), folder)
            except BaseException:
                if os.path.isdir(os.path.join(os.path.dirname(target), temp)):
                    remove_tree(temp, folder)
                raise
    return Path(prefix)


def _open(source: str) -> int:
    with files.closing(files.open_dir(os.path.dirname(source))) as folder:
        return files.open_plain(os.path.basename(source), folder)


def _check_target(target: str) -> bool:
    """Check whether the target holds a dataset that may be replaced."""
    try:
        mode = os.lstat(target).st_mode
    except FileNotFoundError:
        return False
    entries = os.listdir(target) if stat.S_ISDIR(mode) else None
    if entries is None or (entries and META not in entries and documents.NAME not in entries):
        raise refusals.other_kind(target, "not a dataset")
    return True


def _unpack(fd: int, listing: Listing, root: int, url: str) -> None:
    sums: dict[FileParts, Sums] = {}
    with files.Tree(root) as tree, zip_errors(url):
        for parts, member in listing.members.items():
            if parts == (documents.NAME,) or parts[-1] == session.NAME:
                continue
            with files.closing(tree.open(parts, os.O_RDWR | os.O_CREAT | os.O_EXCL, create=True)) as out:
                summer, at = Summer(member.info.file_size), 0
                for block in blocks_of(fd, member, url):
                    files.write_at(out, memoryview(block), at)
                    summer.add(np.frombuffer(block, np.uint8))
                    at += len(block)
                sums[parts] = summer.sums()
        manifest_member = listing.members.get((documents.NAME,))
        if manifest_member is not None:
            raw = read_manifest(fd, manifest_member, url)
            document, header = documents.decode_manifest(raw, url=url)
            files.create_file(documents.NAME, root, _with_new_checksums(document, header, sums, tree, url))


def _with_new_checksums(
    document: documents.Manifest, header: Header, sums: dict[FileParts, Sums], tree: files.Tree, url: str
) -> bytes:
    """Return the manifest with the checksums of the files: those of leaves written in place may be older."""
    records = []
    with contextlib.ExitStack() as stack:
        pack = stack.enter_context(files.closing(tree.open((PACK,)))) if (PACK,) in sums else -1
        for old in document.leaves:
            if old.file and old.file not in sums:
                raise CorruptStoreError(f"{url} lacks {'/'.join(old.file)}", url=url)
            if old.offset >= 0:
                found = sums_of_part(pack, old.nbytes, old.offset)
            else:
                found = sums[old.file] if old.file else old.sums()
            records.append(
                documents.leaf_record(old.path, old.dtype, old.shape, old.nbytes, old.file, found, old.fill, old.offset)
            )
    return documents.encode_manifest(header, records, url=url)


def refresh_archive_checksums(archive_path: Place) -> Path:
    """Rewrite an archive with the checksums of the bytes that it holds.

    tdstore writes archives whole, and never needs this. It is for archives that another program changed in place,
    as the `tensordict` package does: their checksums are older than their data.

    Returns:
        The path of the archive.
    """
    with open_tdz(os.fspath(archive_path), mode="r+", verify="none") as store, files.io_errors(store.url, "refreshing"):
        store.refresh()
    return Path(archive_path)
