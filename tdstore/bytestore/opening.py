"""Opening of a byte store: the object at its root is read and the mode is checked."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import get_args

from tdstore.builtin.memmap.tensordict_layout import META
from tdstore.bytestore.commit import NOTHING_THERE, Publisher, fetch_manifest, state_of
from tdstore.bytestore.directory import DIRECTORY_HINT, read_uploaded
from tdstore.bytestore.manifest import VERSION_ID, Document, decode_objects, is_object_layout, version_name
from tdstore.bytestore.read import Check
from tdstore.bytestore.store import ByteStore, Limits, Reopen
from tdstore.bytestore.table import Table, check_table
from tdstore.bytestore.view import View
from tdstore.bytestore.write import DATA
from tdstore.engine import Blob, Engine, EngineCap, get_and_look
from tdstore.errors import CorruptStoreError, OptionError, ReadOnlyError, StoreNotFoundError
from tdstore.header import Header
from tdstore.storekit import check_choices, files, refusals
from tdstore.storekit.documents import MAX_FILE_BYTES, NAME
from tdstore.storekit.local_engine import LocalEngine
from tdstore.types import MODES, Mode, Verify

KIND = "a dataset of the object layout"
OTHER_FORMATS = ("zarr.json", ".zgroup", ".zarray", META)
"""Objects that show a zarr group or array, or an uploaded directory: a save beside them would hide it."""

BUILD_PLAN = "build/plan.json"
"""An object that is there from the beginning of a `tdstore.build` until its dataset is there."""


def open_objects(
    engine: Engine,
    *,
    mode: Mode = "r",
    url: str | None = None,
    verify: Verify | None = None,
    single_writer: bool = False,
    object_bytes: int = 64 << 20,
    buffer_bytes: int = 64 << 20,
    keep_old: float = 3600.0,
    max_bytes: int | None = None,
    reopen: Reopen | None = None,
    close_engine: bool = True,
    version: str | None = None,
) -> ByteStore:
    """Open what `tdstore.json` at the engine's root describes, or make a new store there. One request.

    For reading, that may also be a directory of files that was uploaded as it is (see `open_directory`).

    Args:
        engine: the engine, at the root of the store.
        mode: "r", "r+", "w", "x" or "a", as in `tdstore.Store`.
        url: the location in messages; the engine's own by default.
        verify: "full" compares all bytes that are read with their checksums, "size" and "none" only that objects
            exist and are long enough. By default "full" for the object layout and "size" for a directory (see there).
        single_writer: the assurance of the caller that there is no other writer; needed where the engine has no
            conditional put.
        object_bytes: no new object is larger than this (or than one row).
        buffer_bytes: writes are buffered in memory up to about so many bytes, then put as new objects.
        keep_old: seconds for which objects stay that only older generations need, for their readers.
        max_bytes: refuse a store that declares more data than this. Without it a store of any size is opened, and a
            read is refused that would allocate over 1 GiB, of which less than a hundredth is stored.
        reopen: the location and options with which the backend's opener opens this location again, elsewhere.
        close_engine: close the engine with the store.
        version: the id of a version, to be read as it is, whatever is committed later; in mode "r" only.

    Raises:
        StoreNotFoundError: there is no `tdstore.json`, or no such version; there may be other files.
        StoreExistsError: by the mode.
        ReadOnlyError: the engine cannot write.
        CorruptStoreError: damaged, or not as a writer would write it.

    Example:
        >>> store = open_objects(LocalEngine(tmp_path / "run"), mode="w")
        >>> store.create({("a",): LeafSpec((3, 2), "int64")})
        >>> store.write([Write(("a",), (slice(1, 2, 1),), torch.tensor([[5, 6]]))])
        >>> store.save_header(Header())
        >>> open_objects(LocalEngine(tmp_path / "run")).read([Read(("a",))])[0].tolist()
        [[0, 0], [5, 6], [0, 0]]
    """
    place = engine.url if url is None else url
    _check_options(place, mode, verify, object_bytes, buffer_bytes)
    if mode != "r" and EngineCap.WRITE not in engine.can:
        raise ReadOnlyError(f"{place} cannot be written to", url=place, hint="open it with mode='r'")
    if isinstance(engine, LocalEngine):
        if mode in ("w", "x", "a"):
            refuse_foreign_files(engine.root, place)
        elif os.path.isfile(engine.root):
            raise StoreNotFoundError(f"{place} is a file, not a folder of objects", url=place)
    if version is not None:
        return _open_version(engine, place, version, mode, check_of(verify), max_bytes, reopen, close_engine)
    if mode in ("r", "r+") or isinstance(engine, LocalEngine):
        blob = fetch_manifest(engine)
    else:
        blob, others = get_and_look(engine, NAME, MAX_FILE_BYTES, OTHER_FORMATS)
        if blob is None and others:
            raise refusals.foreign_files(place, others, KIND)
    if mode == "a":
        mode = "x" if blob is None else "r+"
    if mode == "x" and blob is not None:
        raise refusals.place_exists(place)
    seen = NOTHING_THERE if blob is None else state_of(blob)
    publisher = Publisher(engine, place, seen, single_writer=single_writer, keep_old=keep_old)
    limits = Limits(object_bytes, buffer_bytes, max_bytes)
    check = check_of(verify)
    if mode in ("w", "x"):
        before = None if blob is None else _replaced(blob, place)
        view = View(engine, place, Table.empty(), Header(), check=check)
        return ByteStore(view, publisher, before, "w", limits, reopen, close_engine)
    if blob is None:
        if isinstance(engine, LocalEngine) and os.path.exists(os.path.join(engine.root, BUILD_PLAN)):
            raise unfinished_build(place)
        raise StoreNotFoundError(f"nothing is stored at {place}: there is no {NAME}", url=place)
    data = bytes(blob.data)
    if not is_object_layout(data):
        if mode == "r+":
            raise ReadOnlyError(f"{place} is a directory of files", url=place, hint=DIRECTORY_HINT)
        return open_directory(
            engine,
            url=url,
            verify=verify or "size",
            max_bytes=max_bytes,
            reopen=reopen,
            close_engine=close_engine,
            manifest=blob,
        )
    document = decode_objects(data, url=place)
    table = Table.from_document(document)
    check_table(table, max_bytes, place)
    view = View(engine, place, table, document.header, check=check, nbytes=len(data), wary=max_bytes is None)
    return ByteStore(view, publisher, document, mode, limits, reopen, close_engine)


def check_of(verify: Verify | None) -> Check:
    """Return what of the object layout is compared."""
    return Check.NONE if verify in ("size", "none") else Check.FULL


def _open_version(
    engine: Engine,
    place: str,
    version: str,
    mode: Mode,
    check: Check,
    max_bytes: int | None,
    reopen: Reopen | None,
    close_engine: bool,
) -> ByteStore:
    if mode != "r":
        raise refusals.version_read_only(place, version)
    if VERSION_ID.fullmatch(version) is None:
        raise refusals.no_version(place, version)
    try:
        blob = engine.get(version_name(version), MAX_FILE_BYTES)
    except StoreNotFoundError as error:
        raise refusals.no_version(place, version) from error
    data = bytes(blob.data)
    document = decode_objects(data, url=place)
    if document.generation != version:
        raise CorruptStoreError(f"{place}: {version_name(version)} is {document.generation}", url=place)
    table = Table.from_document(document)
    check_table(table, max_bytes, place)
    view = View(engine, place, table, document.header, check=check, nbytes=len(data), wary=max_bytes is None)
    publisher = Publisher(engine, place, NOTHING_THERE, single_writer=False, keep_old=0.0)
    limits = Limits(1, 1, max_bytes)
    return ByteStore(view, publisher, document, "r", limits, reopen, close_engine, pinned=True)


def open_directory(
    engine: Engine,
    *,
    url: str | None = None,
    verify: Verify = "size",
    max_bytes: int | None = None,
    reopen: Reopen | None = None,
    close_engine: bool = True,
    manifest: Blob | None = None,
    no_manifest: bool = False,
) -> ByteStore:
    """Open an uploaded directory of files, of tdstore or of tensordict, for reading.

    Its checksums are of 64 KiB to 4 MiB each. "size" compares the blocks that are read whole, and the first, middle and
    last 4 KiB of each leaf; "full" fetches whole blocks and compares everything, which for scattered rows is
    many times the bytes of the rows; "none" compares nothing. Directories of tensordict have no checksums.

    Args:
        engine: the engine, at the root of the directory.
        url: the location in messages; the engine's own by default.
        verify: "full", "size" or "none", see above.
        max_bytes: refuse a store that declares more data than this.
        reopen: the location and options with which the backend's opener opens this location again, elsewhere.
        close_engine: close the engine with the store.
        manifest: its `tdstore.json`, if it was fetched already.
        no_manifest: it is known that there is no `tdstore.json`: do not request it again.

    Raises:
        StoreNotFoundError: there is neither `tdstore.json` nor `meta.json`.
        CorruptStoreError: damaged.
        UntrustedDataError: a value is pickled.
    """
    place = engine.url if url is None else url
    _check_options(place, "r", verify, 1, 1)
    blob = fetch_manifest(engine) if manifest is None and not no_manifest else manifest
    uploaded = read_uploaded(engine, place, None if blob is None else bytes(blob.data))
    check_table(uploaded.table, max_bytes, place)
    check = {"full": Check.FULL, "size": Check.COVERED, "none": Check.NONE}[verify]
    tips = {} if verify == "none" else uploaded.tips
    view = View(engine, place, uploaded.table, uploaded.header, check=check, tips=tips, wary=max_bytes is None)
    publisher = Publisher(engine, place, NOTHING_THERE, single_writer=False, keep_old=0.0)
    return ByteStore(view, publisher, uploaded, "r", Limits(1, 1, max_bytes), reopen, close_engine)


def _check_options(place: str, mode: str, verify: str | None, object_bytes: int, buffer_bytes: int) -> None:
    check_choices(place, mode=(mode, MODES), verify=(verify, (None, *get_args(Verify))))
    for name, size in (("object_bytes", object_bytes), ("buffer_bytes", buffer_bytes)):
        if size < 1:
            raise OptionError(f"{place}: {name} must be at least 1, not {size}", url=place)


def unfinished_build(place: str) -> StoreNotFoundError:
    """Return the error for a place where `tdstore.build` was begun, and has not published its dataset.

    Args:
        place: the location, for messages.
    """
    return StoreNotFoundError(
        f"nothing is stored at {place} yet: a tdstore.build is running there, or was interrupted",
        url=place,
        hint="the same call of tdstore.build finishes it, and repeats no finished task; to give it up, remove what is "
        "there",
    )


def refuse_foreign_files(root: str, place: str) -> None:
    """Refuse a local path with other contents: a file, or a folder with files and without a manifest.

    Files of a writer that ended before its first commit are no obstacle.

    Args:
        root: the path.
        place: the location, for messages.

    Raises:
        StoreExistsError: it names what is there.
    """
    try:
        names = set(os.listdir(root))
    except FileNotFoundError:
        return
    except NotADirectoryError:
        names = {os.path.basename(os.path.abspath(root))}
    if NAME in names:
        return
    if strange := sorted(name for name in names if name != DATA and not files.is_temp(name)):
        raise refusals.foreign_files(place, strange, KIND)


def _replaced(blob: Blob, place: str) -> Document | None:
    """Return the generation that mode "w" is to replace; None when it is damaged: then no reader needs its objects."""
    data = bytes(blob.data)
    if not is_object_layout(data):
        raise refusals.other_kind(place, "a dataset of another layout")
    with suppress(CorruptStoreError):
        return decode_objects(data, url=place)
    return None
