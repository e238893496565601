"""Housekeeping: check whether a dataset exists, describe it, list datasets, and delete them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, cast

from tdstore.dtypes import dtype_name
from tdstore.errors import (
    DirtyStoreError,
    InvalidTypeError,
    PluginError,
    StoreBusyError,
    StoreError,
    StoreNotFoundError,
    UnsupportedError,
)
from tdstore.header import Group
from tdstore.hookspecs import Backend
from tdstore.io.opening import Location, Storage, find_backend, locate
from tdstore.io.taking import Local, local_place
from tdstore.registry import registry, without_password
from tdstore.store import Cap
from tdstore.storekit import files
from tdstore.types import LeafSpec, Path, path_text


def exists(location: Location, *, storage: Storage = None, **options: Any) -> bool:
    """Check whether a dataset is at a location. Only the data that identifies it is read.

    Args:
        location: a path or URL.
        storage: name of the backend. Default: found from the location.
        **options: of the backend.

    Returns:
        True for a dataset, also one that a process is writing or left unfinished; False if there is nothing, or
        something that no installed backend recognises.

    Raises:
        CorruptStoreError: what is there belongs to a backend by its name or first bytes, and cannot be read.
        PluginError: the backend's plugin is missing or failed.

    Example:
        >>> TensorDict({"a": torch.arange(3)}, [3]).save("runs/1").close()
        >>> tdstore.exists("runs/1"), tdstore.exists("runs/2")
        (True, False)
    """
    location, options = locate(location, options)
    try:
        backend, text = find_backend(location, storage, "r")
    except StoreNotFoundError:
        return False
    answer = registry().call(backend, "exists", text, options)
    return _opens(backend, text, options) if answer is NotImplemented else bool(answer)


def _opens(backend: Backend, text: str | None, options: dict[str, Any]) -> bool:
    try:
        registry().open(backend, text, mode="r", **_quickly(backend, {"lock_timeout": 0.0}, options)).close()
    except StoreNotFoundError:
        return False
    except (DirtyStoreError, StoreBusyError):
        return True
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetInfo:
    """The contents of a dataset according to its header; printed as a table.

    Args:
        location: where it is, without a password.
        backend: name of the backend.
        kind: "TensorDict", "LazyStackedTensorDict", or the name of a tensorclass.
        batch_size: of the root; None for a file of another program.
        leaves: shape and dtype of each leaf, by path. A column of values per row has two leaves.
        nbytes: bytes of the leaves in memory.
        nbytes_stored: bytes on the storage; None if that is unknown.
        generation: a value that differs after the next commit; None if the backend has none.
        caps: the abilities of its store.
    """

    location: str
    backend: str
    kind: str
    batch_size: tuple[int, ...] | None
    leaves: dict[Path, LeafSpec]
    nbytes: int
    nbytes_stored: int | None
    generation: object
    caps: Cap

    def __str__(self) -> str:
        size = "no batch size" if self.batch_size is None else f"batch size {list(self.batch_size)}"
        stored = "" if self.nbytes_stored is None else f", {self.nbytes_stored} stored"
        lines = [f"{self.location}: {self.kind} of {size}  [{self.backend}]", f"{self.nbytes} bytes{stored}"]
        lines += [f"  {path_text(path)}  {dtype_name(s.dtype)} {list(s.shape)}" for path, s in self.leaves.items()]
        return "\n".join(lines)


def info(location: Location, *, storage: Storage = None, **options: Any) -> DatasetInfo:
    """Describe a dataset without reading its rows.

    Args:
        location: a path or URL.
        storage: name of the backend. Default: found from the location.
        **options: of the backend.

    Raises:
        StoreNotFoundError: there is no dataset at the location.
        CorruptStoreError: it is so damaged that it cannot be opened.
        DirtyStoreError: a writer ended in the middle of a change.

    Example:
        >>> TensorDict({"a": torch.zeros(3, 2)}, [3]).save("runs/1").close()
        >>> found = tdstore.info("runs/1")
        >>> found.backend, found.batch_size, found.nbytes
        ('memmap', (3,), 24)
    """
    location, options = locate(location, options)
    backend, text = find_backend(location, storage, "r")
    with registry().open(backend, text, mode="r", **_quickly(backend, {}, options)) as store:
        paths = sorted(store.paths())
        leaves = dict(zip(paths, store.specs(paths), strict=True))
        root = store.load_header().groups.get((), Group())
        return DatasetInfo(
            location=without_password(text or store.url),
            backend=store.opened_as or backend.name,
            kind=root.kind,
            batch_size=None if root.batch_size is None else tuple(root.batch_size),
            leaves=leaves,
            nbytes=sum(spec.nbytes for spec in leaves.values()),
            nbytes_stored=store.nbytes_stored(),
            generation=store.generation(),
            caps=store.caps,
        )


def _quickly(backend: Backend, more: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """Return options with which data is not compared with checksums, and more options that the backend may have."""
    known = {"verify": "none", **more}
    return {**{name: value for name, value in known.items() if registry().has_option(backend, name)}, **options}


def delete(location: Location, *, storage: Storage = None, **options: Any) -> None:
    """Delete a dataset. No part of it can be opened at any location, even if the process is killed in the middle.

    A local folder is renamed to a hidden name beside it, then removed; a process that has it open for reading
    can go on using what it has mapped. The lock of a writer is held meanwhile.

    Args:
        location: a path or URL.
        storage: name of the backend. Default: found from the location.
        **options: of the backend.

    Raises:
        StoreNotFoundError: there is no dataset at the location.
        StoreExistsError: what is there was not saved from a TensorDict, or a folder also holds files of other programs.
        StoreBusyError: another process writes it.
        UnsupportedError: the backend cannot delete.

    Example:
        >>> TensorDict({"a": torch.arange(3)}, [3]).save("runs/1").close()
        >>> tdstore.delete("runs/1")
        >>> tdstore.exists("runs/1")
        False
    """
    location, options = locate(location, options)
    backend, text = find_backend(location, storage, "r")
    if registry().call(backend, "remove", text, options) is NotImplemented:
        local_place(backend, text, "deleted").delete(options)


def list_datasets(location: str | os.PathLike[str] = ".", *, storage: Storage = None, **options: Any) -> list[str]:
    """List the datasets at and below a location, sorted.

    Names that begin with a dot are left out, and folders behind a link are not searched.

    Args:
        location: a folder, or a URL whose backend lists its places. A local folder is searched for datasets of all
            backends, unless `storage` names one.
        storage: name of the backend.
        **options: of the backend.

    Returns:
        Locations that open with the same `storage` and `options`. Damaged datasets are left out.

    Raises:
        StoreNotFoundError: there is no such folder.
        UnsupportedError: the backend cannot list its places.

    Example:
        >>> for name in ("runs/2", "runs/old/1"):
        ...     TensorDict({"a": torch.arange(3)}, [3]).save(name).close()
        >>> tdstore.list_datasets("runs")
        ['runs/2', 'runs/old/1']
    """
    location, options = locate(location, options)
    text = os.fspath(location) if isinstance(location, os.PathLike) else location
    if not isinstance(text, str):
        raise InvalidTypeError(f"datasets are listed at a path or URL, not {type(text).__name__} {text!r}")
    local = "://" not in text and "::" not in text
    wanted = None if local and storage is None else registry().resolve(text, storage)
    if wanted is not None:
        answer = registry().call(wanted, "list", text, options)
        if answer is not NotImplemented:
            return sorted(cast(Iterable[str], answer))
    if not local:
        backend = wanted or registry().resolve_url(text)
        raise UnsupportedError(
            f"the backend {backend.name!r} cannot list the datasets of {without_password(text)}",
            url=without_password(text),
            hint="list what is there with the tools of the storage",
        )
    if not os.path.lexists(text):
        raise StoreNotFoundError(f"there is no folder {text}", url=text)
    return sorted(_below(text, wanted, options))


def _below(place: str, wanted: Backend | None, options: dict[str, Any]) -> Iterator[str]:
    if _is_dataset(place, wanted, options):
        yield place
        return
    if not os.path.isdir(place) or os.path.islink(place):
        return
    with files.io_errors(place, "listing", writing=False), os.scandir(place) as entries:
        names = [entry.name for entry in entries if not entry.name.startswith(".")]
    for name in names:
        yield from _below(os.path.normpath(os.path.join(place, name)), wanted, options)


def _is_dataset(place: str, wanted: Backend | None, options: dict[str, Any]) -> bool:
    try:
        backend = registry().resolve(place)
        if backend is None or (wanted is not None and backend.name != wanted.name):
            return False
        return _opens(backend, place, options)
    except (StoreError, PluginError):
        return False


def check_deletable(backend: Backend, location: str | None, options: dict[str, Any]) -> None:
    """Refuse a location that `delete` would refuse, as far as this can be determined without a lock.

    Args:
        backend: the backend that recognises it.
        location: where it is.
        options: options of the opener.

    Raises:
        StoreNotFoundError: there is no such file or folder. UnsupportedError: the backend cannot delete.
        StoreExistsError: what is there was not saved from a TensorDict, or a folder also holds files of other programs.
    """
    try:
        place = local_place(backend, location, "moved")
    except UnsupportedError:
        if backend.remove:
            return
        raise
    place.check_ours(options)


def rename(backend: Backend, source: str | None, target: str) -> bool:
    """Rename a local dataset whose backend declares no removal of its own; return False if that cannot be done.

    Args:
        backend: the backend of both locations.
        source: where it is.
        target: where it is to be; nothing may be there.

    Raises:
        StoreExistsError: something is at the target. StoreBusyError: another process writes the source.
        DirtyStoreError, CorruptStoreError: the source.
    """
    if not (backend.suffixes or backend.markers or backend.magic):
        return False
    if backend.suffixes and ending(backend, source or "") != ending(backend, target):
        return False  # a format may depend on the ending: a folder `.zarr`, and a file `.zarr.zip`
    try:
        place = local_place(backend, source, "moved")
    except UnsupportedError:
        return False
    return place.rename(Local(backend, target, "moved"))


def ending(backend: Backend, location: str) -> tuple[str, str]:
    """Return the suffix of a backend that a location has, and the part after its last dot; "" if there is none."""
    lower = location.lower()
    known = [suffix for suffix in backend.suffixes if lower.endswith(suffix)]
    return max(known, key=len, default=""), os.path.splitext(lower)[1]
