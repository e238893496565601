"""PersistentTensorDict: a TensorDict whose entries stay in a store until they are asked for."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Self

from tdstore.container.core.container import GROUP, Container
from tdstore.container.core.locks import LOCKED, MAPPED
from tdstore.container.persistence.saving import require_container, unlocked
from tdstore.container.storage.handle import StoreHandle
from tdstore.container.values.nontensor import NonTensor
from tdstore.convert.opened import place_of_group
from tdstore.errors import KeyNotFoundError, OptionError, UnsupportedError
from tdstore.index.selection import Selection
from tdstore.index.shapes import as_size
from tdstore.index.tracing import keep_methods_out
from tdstore.io.opening import Location
from tdstore.pickling import rebuild
from tdstore.registry import registry
from tdstore.tensordicts.persistent.reading import StoredTree
from tdstore.tensordicts.persistent.window import View, WindowTree
from tdstore.tensordicts.persistent.writing import StoredWrites
from tdstore.types import DeviceLike, Fault, Names, NamesLike, Path, SizeLike, path_text

if TYPE_CHECKING:
    pass


class PersistentTensorDict(StoredWrites):
    """A TensorDict over a store: HDF5, zarr, a bucket, ...

    Reading a key reads that leaf into a fresh tensor. Indexing gives a *window*: lazy, chainable and
    write-through; a key of a window reads only its rows. Whatever needs many leaves (`to_tensordict()`,
    `clone()`, `to(device)`, maths, iteration) fetches them in one batched read.

    Args:
        batch_size: checked against, or replacing, the stored one.
        filename: location of the store; `location` is the same.
        group: path of a nested TensorDict to open instead of the root; or a group that h5py or zarr has opened, with
            no `filename` then. A file that h5py has open for writing is refused: close it there.
        mode: "r", "r+", "w", "x" or "a", see `tdstore.store.Store`.
        backend: name of the backend; None finds it from the location.
        device: where reads land.
        validate_batch_size: accepted for compatibility: the leaves' shapes are known, and always looked at.
        **options: of the backend, such as `chunks=` and `compression=`.

    Example:
        >>> TensorDict({"obs": torch.zeros(100, 4)}, [100]).save("data.h5")  # doctest: +SKIP
        >>> window = PersistentTensorDict(filename="data.h5")[10:20]  # doctest: +SKIP
        >>> window["obs"].shape  # doctest: +SKIP
        torch.Size([10, 4])
    """

    __slots__ = ()

    LOCKING: ClassVar[bool | None] = None
    """`locking=` of HDF5 files that are opened by this class or `from_h5`: False for file systems without locks."""

    def __init__(
        self,
        *,
        batch_size: SizeLike | None = None,
        filename: Location = None,
        group: Any = None,
        mode: Any = "r",
        backend: str | None = None,
        device: DeviceLike | None = None,
        location: Any = None,
        validate_batch_size: bool = True,
        **options: Any,
    ) -> None:
        if self.LOCKING is not None:
            options.setdefault("locking", self.LOCKING)
        location = location if location is not None else filename
        if (place := None if group is None else place_of_group(group)) is not None:
            location, group, backend = place
        handle = StoreHandle.open(location, storage=backend, mode=mode, **options)
        parts = () if group is None else filter(None, group.split("/")) if isinstance(group, str) else group
        path = tuple(parts)
        if handle.kind(path) != GROUP:
            raise KeyNotFoundError(f"no group {path_text(path)} in {handle.store.url}")
        self._setup(handle, path, None, None, device)
        if batch_size is not None and as_size(batch_size) != self._batch_size:
            if path and not handle.store.writable:  # what is above is not looked at
                self._check_batch(as_size(batch_size), ())
                self._set_batch_size(as_size(batch_size))
            else:
                self.batch_size = batch_size
        if mode in ("w", "x") and not handle.store.load_header():
            handle.commit(handle.groups)

    def _place(self) -> tuple[StoreHandle, Path] | None:
        return (self._handle, self._path) if self._state & MAPPED else None

    def _become(self, other: Any) -> Self:
        place = (other._handle, other._path) if isinstance(other, PersistentTensorDict) else other._binding
        if place is None:
            return super()._become(other)
        # The store that it was over stays open for others that look at it; it is closed with the last of them.
        (handle, path), undo = place, self._undo
        self._setup(handle, path, None, None, other._device)
        self._undo = undo  # of a `with` that runs
        self._state = other._state & ~LOCKED
        return self.lock_() if other.is_locked else self

    def load_(self, prefix: Location, *args: Any, **kwargs: Any) -> Self:
        """Write the entries of a dataset into the store, those of rows into a window; others are removed.

        Raises:
            UnsupportedError: a window cannot take entries of another batch size.
        """
        source = require_container(self.load(prefix, *args, **kwargs))
        place = (source._handle, source._path) if isinstance(source, PersistentTensorDict) else source._place()
        if place is not None and (place[0].store.url, place[1]) == (self._handle.store.url, self._path):
            return self
        locked = self.is_locked
        if locked:
            self.unlock_()
        try:
            if self._sel.is_full:
                self.clear()
            if source.batch_size != self.batch_size:
                self.batch_size = source.batch_size
            source_keys = set(source.keys())
            self.exclude(*[key for key in self.keys() if key not in source_keys], inplace=True)
            self.update(source)
        finally:
            if locked:
                self.lock_()
        return self

    @classmethod
    def from_dict(
        cls,
        input_dict: Mapping[Any, Any],
        filename: Location = None,
        *,
        auto_batch_size: bool | None = None,
        batch_size: SizeLike | None = None,
        device: DeviceLike | None = None,
        batch_dims: int | None = None,
        names: NamesLike = None,
        backend: str | None = "h5",
        **options: Any,
    ) -> Self:
        """Save nested dicts at a location, and give what is stored there; without `filename`, a TensorDict.

        Args:
            filename: replaced if it is there.
            batch_size: the largest one that all entries share by default.
            device: where reads land.
            backend: name of the backend; None finds it from the location.
            **options: of the backend, such as `chunks=` and `compression=`.

        Example:
            >>> stored = PersistentTensorDict.from_dict({"a": torch.zeros(3)}, "a.h5")  # doctest: +SKIP
            >>> stored.batch_size  # doctest: +SKIP
            torch.Size([3])
        """
        auto = True if filename is not None and batch_size is None else auto_batch_size
        td = super().from_dict(
            input_dict, auto_batch_size=auto, batch_size=batch_size, batch_dims=batch_dims, names=names
        )
        if filename is None:
            return td if device is None else td.to(device)
        td = td._stored_form() if isinstance(td, NonTensor) else td
        saved = unlocked(td.save(filename, storage=backend, **options))
        made: Self = saved if device is None else saved.to(device)
        return made

    def clone(self, recurse: bool = True, *, newfile: Location = None) -> Self:
        """Copy into the memory, or to another place; with `recurse=False` give another container over this store.

        Args:
            newfile: save the copy at that location, and return what is stored there. It has the backend of this store,
                unless the location names another.

        Raises:
            OptionError: `newfile` with `recurse=False`.
        """
        if newfile is None:
            return super().clone(recurse)
        if not recurse:
            raise OptionError("a copy at newfile= has entries of its own: recurse=False is for the same store")
        named = not isinstance(newfile, (str, os.PathLike)) or registry().resolve(newfile) is not None
        made: Self = unlocked(self.save(newfile, storage=None if named else self._handle.backend.name))
        return made

    @property
    def mode(self) -> str:
        """`"r+"` if entries can be written, `"r"` if not."""
        return "r+" if self._handle.store.writable else "r"

    @property
    def file(self) -> Any:
        """What is committed, as a read-only `h5py.File`: for attributes, chunks, filters, and `.filename`.

        Of a nested TensorDict it is the `h5py.Group`. Rows that were written are committed first. It can be read until
        the TensorDict is changed or closed; then reading it is an `OSError`, and `file` gives another one. While it is
        in use, the store is not closed for being dropped, and no other process writes the file.

        Raises:
            UnsupportedError: the backend is not h5, or the file is at a URL.

        Example:
            >>> stored = TensorDict(a=torch.zeros(3)).to_h5("a.h5", chunks=2)  # doctest: +SKIP
            >>> stored.file["a"].chunks  # doctest: +SKIP
            (2,)
        """
        self._handle.refuse_in_transaction("td.file")
        return self._handle.store.native_group(self._path, self._handle)

    def close(self) -> None:
        """Commit and close the store. Twice is fine."""
        self._handle.close()

    def verify(self) -> list[Fault]:
        """Read all data of this dataset, or group, and compare it with the checksums of its last commit.

        Returns:
            A `Fault` for each leaf that is not as it was committed: its path in the dataset, and why. Of a window, as
            of all rows and entries. Empty when all is well, and for a backend that keeps no checksums.
        """
        return self._handle.store.verify(self._handle.leaves_below(self._path))

    # -- gradients: what is read is a fresh tensor, which nothing was computed from ---------------
    @property
    def requires_grad(self) -> bool:
        """False: stored entries have no gradients."""
        return False

    @property
    def grad(self) -> None:
        """None: stored entries have no gradients."""
        return None

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Refuse to require gradients."""
        if requires_grad:
            raise UnsupportedError(
                "stored entries have no gradients", hint="td.to_tensordict().requires_grad_() reads it into memory"
            )
        return self

    def zero_grad(self, set_to_none: bool = True) -> Self:
        """Do nothing: there are no gradients."""
        return self

    def detach_(self) -> Self:
        """Do nothing: there are no gradients."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        view = None if self._view is None else self._view.parts()
        parts = (self._handle, self._path, self._window, view, self._device, self._names, self.is_locked)
        return rebuild, ("PersistentTensorDict", *parts)


def rebuilt(
    handle: StoreHandle,
    path: Path,
    sel: Selection | None,
    view: Any,
    device: Any,
    names: Names,
    locked: bool = False,
) -> PersistentTensorDict:
    """Rebuild a window on a dataset from its pickle."""
    own = None if view is None else View(*view)
    td = PersistentTensorDict._over(handle, path, sel, own, device, names)
    if locked:
        td._lock(None)
    return td


Container._stored_class = PersistentTensorDict
keep_methods_out(WindowTree, StoredTree, StoredWrites, PersistentTensorDict)
