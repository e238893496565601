"""`tdstore.concat`: open several places and read them as one."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tdstore.arguments import as_list
from tdstore.container.concat.schema import Place, Structure
from tdstore.container.concat.store import MOST_THREADS, WHERE_TO_WRITE, ConcatStore
from tdstore.container.core.container import Container
from tdstore.container.storage.handle import StoreHandle
from tdstore.container.storage.open_and_save import stored
from tdstore.errors import InvalidArgumentError, InvalidTypeError, TDStoreError
from tdstore.header import Header
from tdstore.hookspecs import Backend
from tdstore.io.opening import locate
from tdstore.pickling import rebuild
from tdstore.store import Cap
from tdstore.storekit import refusals
from tdstore.threads import ThreadPool

if TYPE_CHECKING:
    from tdstore.tensordicts.base import TensorDictBase

_BACKEND = Backend(
    name="concat", opener="tdstore:concat", summary="several datasets read as one", caps=Cap.PARTIAL_READ
)
"""The backend that handles of concatenated places name. It is not in the registry: no location leads to it."""


class ConcatHandle(StoreHandle):
    """The handle of several places read as one. A pickle names the places, and opens them again.

    Args:
        locations: the places.
        options: of `tdstore.open`, for all of them.
        own: further ones, for each of them.
    """

    __slots__ = ("_locations", "_own")

    def __init__(self, locations: Sequence[str], options: Mapping[str, Any], own: Sequence[Mapping[str, Any]]) -> None:
        self._locations, self._own = tuple(locations), tuple(own)
        store = _opened(self._locations, options, self._own)
        try:
            super().__init__(store, _BACKEND, None, "r", options)
        except BaseException:
            store.close()
            raise
        self.location = store.url

    def check_writable(self) -> None:
        """Raise `ReadOnlyError`: rows are written at the place that has them."""
        raise refusals.read_only(self.store.url, WHERE_TO_WRITE)

    def reopen(self) -> None:
        """Open all places again, if another process has committed to one of them since, or nobody can tell."""
        generation = self.store.generation()
        if generation is not None and generation == self._generation:
            return
        fresh = _opened(self._locations, self.options, self._own)
        self._close_store()
        self._hold(fresh)
        self._generation = generation
        self.reload()

    def __reduce__(self) -> tuple[Any, ...]:
        return rebuild, ("ConcatHandle", self._locations, self.options, self._own)


def _opened(locations: Sequence[str], options: Mapping[str, Any], own: Sequence[Mapping[str, Any]]) -> ConcatStore:
    """Open places, several at a time."""

    def open_one(location: str, more: Mapping[str, Any]) -> StoreHandle:
        try:
            return StoreHandle.open(location, mode="r", **{**options, **more})
        except TDStoreError as error:
            if location not in str(error):
                error.add_note(f"when {location} was opened, to be concatenated")
            raise

    with ThreadPool(min(len(locations), MOST_THREADS)) as threads:
        opened = [threads.submit(open_one, *place) for place in zip(locations, own, strict=True)]
    handles = [future.result() for future in opened if future.exception() is None]
    try:
        while opened:
            opened.pop(0).result()  # a variable would hold the error, whose traceback holds this frame
        places = [Place(location, handle) for location, handle in zip(locations, handles, strict=True)]
        structure = Structure(places)
        return ConcatStore(places, structure.leaves, Header(structure.groups))
    except BaseException:
        for handle in handles:
            handle.close()
        raise


def concat(locations: Iterable[str | os.PathLike[str]], **options: Any) -> TensorDictBase:
    """Open several places as one dataset, concatenated along the first batch dimension.

    Nothing is read but the structure, of all places at the same time. Rows are read when they are used, from all places
    that have some of them at the same time: a batch costs as many rounds as one from a single place. The dataset is
    read-only, pickled as its locations, and goes where a container does: `TensorDictDataset`, `Epochs`, `map`, `save`.
    The places stay open until it is closed.

    All places need the same entries, with the same dtypes and the same shapes of rows. Values that are not tensors may
    be one for all rows in one place, and one per row in another; a tensor without rows (`UnbatchedTensor`) is compared
    when it is read.

    Args:
        locations: paths and URLs, of any backends, in the order of their rows.
        **options: of `tdstore.open`, for all of them; `storage=` is the name of their backend.

    Raises:
        InvalidArgumentError: there are no locations.
        InvalidTypeError: what is given are no locations.
        MismatchError: a place has other entries than the first one; names the place and the key.
        BatchSizeError: a place has no batch dimension.
        UnsupportedError: an entry is a lazy stack along the dimension of the rows.
        StoreNotFoundError: there is no dataset at a location. Others as of `tdstore.open`.

    Example:
        >>> for name, rows in ("a.h5", [0, 1]), ("b.h5", [2, 3, 4]):
        ...     TensorDict({"x": torch.tensor(rows)}, [len(rows)]).save(name).close()
        >>> with tdstore.concat(["a.h5", "b.h5"]) as td:
        ...     print(td.batch_size, td[torch.tensor([4, 0, 2])]["x"])
        torch.Size([5]) tensor([4, 0, 2])
    """
    if isinstance(locations, (str, os.PathLike)):
        raise InvalidTypeError(f"concat takes a list of locations, not {locations!r}", hint=f"[{str(locations)!r}]")
    places = as_list(locations, "what concat() takes", "a list of locations")
    if not places:
        raise InvalidArgumentError("concat needs at least one location")
    if isinstance(locations, tuple) and locate(locations, {})[0] is not locations:
        raise InvalidTypeError("concat takes a list of locations, not one of them", hint="[(store, path), ...]")
    paths, own = [], []
    for place in places:
        found = (place, {}) if isinstance(place, Container) else locate(place, {})
        if not isinstance(found[0], (str, os.PathLike)):
            raise InvalidTypeError(
                f"concat takes paths and URLs, not a {type(place).__name__}",
                hint="torch.cat() concatenates TensorDicts; save() gives them a location",
            )
        paths.append(os.fspath(found[0]))
        first = options.get("storage_options") or {}
        own.append({name: {**value, **first} for name, value in found[1].items()})
    for name in ("mode", "subpath"):
        if name in options:
            raise InvalidArgumentError(f"concat has no {name}=: whole datasets are opened for reading")
    td = stored(ConcatHandle(paths, options, own), ())
    td._undo = "close"
    return td


def reopened(locations: Sequence[str], options: Mapping[str, Any], own: Sequence[Mapping[str, Any]]) -> ConcatHandle:
    """Open the places that a pickle refers to."""
    return ConcatHandle(locations, options, own)
