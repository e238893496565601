"""Saving and loading: one way in and out for every backend, and the names that users of memory maps know."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Self

import torch
from torch import Tensor

from tdstore.container.describe import describe
from tdstore.container.filling import FillingMixin
from tdstore.container.locks import LOCKED, MAPPED, SHARED
from tdstore.container.making import flat_schema
from tdstore.container.opening import allocate, open_container, over, write
from tdstore.errors import OptionError, StoreError, StoreExistsError, UnsupportedError
from tdstore.header import Group
from tdstore.io.opening import Location, Storage
from tdstore.shapes import as_size, flat_args
from tdstore.types import LeafSpec, Mode, NestedKey, Path

_LOCATION_NAMES = ("location", "prefix", "filename", "url")


class SavingMixin(FillingMixin):
    """save, load, from_schema; memmap and its kin; to_h5 and from_h5."""

    __slots__ = ()

    _home: Any

    # -- out ---------------------------------------------------------------------------------
    def save(
        self,
        prefix: Location = None,
        copy_existing: bool = False,
        *,
        location: Location = None,
        storage: Storage = None,
        mode: Mode = "w",
        existsok: bool = True,
        num_threads: int = 0,
        return_early: bool = False,
        share_non_tensor: bool = False,
        robust_key: bool = True,
        archive: Any = None,
        progress: bool = False,
        **options: Any,
    ) -> Any:
        """Save as a new dataset, and return the TensorDict over it.

        A save is all or nothing: until its last step the old dataset, if there is one, is what readers see.

        Args:
            prefix: path or URL; `location` is the same. A plain path is a memory-mapped directory.
            storage: name of the backend; default: found from the location.
            mode: "w" replaces an existing dataset, "x" refuses to.
            existsok: False is `mode="x"`.
            return_early: return a future at once.
            progress: show a bar.
            **options: of the backend.

        Raises:
            StoreExistsError: something is there, and `mode="x"`; or it is not a dataset.
            UntrustedDataError: a value that is not plain data.

        Example:
            >>> TensorDict({"a": torch.arange(3)}, [3]).save("runs/1")  # doctest: +SKIP
            >>> TensorDict.load("runs/1")["a"]  # doctest: +SKIP
            tensor([0, 1, 2])
        """
        if archive:
            raise UnsupportedError("archives (.tdz) are not supported", hint="save to a directory instead")
        where = prefix if prefix is not None else location
        if mode not in ("w", "x"):
            raise OptionError(f"save takes mode 'w' or 'x', not {mode!r}")
        how: Mode = mode if existsok else "x"

        def run() -> Any:
            td = over(write(self, where, storage, how, options, progress))
            if td._state & (MAPPED | SHARED):
                td.lock_()
            td._undo = "close"  # with td.save(...) as saved: closes it
            return td

        return _later(run) if return_early else run()

    dumps = save

    def memmap(self, prefix: Location = None, copy_existing: bool = False, **kwargs: Any) -> Any:
        """Save as memory-mapped files under `prefix` (default: temporary ones); the result is locked, on the CPU.

        See `save`. A URL goes to its own backend.
        """
        text = None if prefix is None else str(prefix)
        if "storage" not in kwargs and (text is None or "://" not in text):
            kwargs["storage"] = "memmap"
            # Working files, as their users expect: they outlive the process; save() makes them outlive the power.
            kwargs.setdefault("durable", "none")

        def run() -> Any:
            td = self.save(prefix, copy_existing, **kwargs)
            td._set_device(torch.device("cpu"))
            td._mark_mapped()
            return td

        return _later(run) if kwargs.pop("return_early", False) else run()

    def _mark_mapped(self) -> None:
        """Say that the leaves are memory-mapped files, temporary ones too."""
        if self._state & (MAPPED | SHARED):
            self._state = self._state & ~SHARED | MAPPED
        for group in self._groups():
            group._mark_mapped()

    def memmap_(self, prefix: Location = None, copy_existing: bool = False, **kwargs: Any) -> Self:
        """As `memmap`, and this TensorDict becomes the one over the files."""
        return self._become(self.memmap(prefix, copy_existing, **kwargs))

    def memmap_like(
        self, prefix: Location = None, copy_existing: bool = False, *, existsok: bool = True, **kwargs: Any
    ) -> Any:
        """Allocate files for the same shapes, filled with zeros, without touching the data; values are kept.

        An expanded TensorDict of a million rows takes no time and no memory.
        """
        parts = describe(self)
        storage = kwargs.pop("storage", "memmap")
        if storage == "memmap":
            kwargs.setdefault("durable", "none")
        early = kwargs.pop("return_early", False)
        for name in ("num_threads", "share_non_tensor", "robust_key", "archive"):
            kwargs.pop(name, None)

        def run() -> Any:
            td = over(allocate(*parts, prefix, storage, "w" if existsok else "x", kwargs))
            td._set_device(torch.device("cpu"))
            td._mark_mapped()
            return td.lock_()

        return _later(run) if early else run()

    def to_h5(self, filename: Location, **kwargs: Any) -> Any:
        """Save as one HDF5 file; options such as `chunks` and `compression` go to every dataset."""
        return self.save(filename, storage="h5", **kwargs)

    def share_memory_(self) -> Self:
        """Move the leaves to shared memory that child processes see, and lock."""
        if self._device is not None and self._device.type == "cuda":
            return self
        return self._become(self.save(storage="shared"))

    def _become(self, other: Any) -> Self:
        raise UnsupportedError(
            f"a {type(self).__name__} stays where it is stored", hint="use the form that returns a new TensorDict"
        )

    # -- in ----------------------------------------------------------------------------------
    @classmethod
    def load(
        cls,
        location: Location = None,
        *args: Any,
        storage: Storage = None,
        mode: Mode = "r",
        prefix: Location = None,
        **kwargs: Any,
    ) -> Any:
        """Open a dataset of any backend. In mode "r" nothing is ever changed; "r+" writes through.

        Raises:
            StoreNotFoundError, CorruptStoreError, DirtyStoreError, PluginError.
        """
        return cls.load_memmap(
            location if location is not None else prefix, *args, storage=storage, mode=mode, **kwargs
        )

    @classmethod
    def load_memmap(
        cls,
        prefix: Location,
        device: Any = None,
        non_blocking: bool = False,
        *,
        out: Any = None,
        robust_key: bool = True,
        subpath: Any = None,
        mode: Mode = "r",
        num_threads: int = 0,
        allow_pickle: bool | None = None,
        storage: Storage = None,
        **options: Any,
    ) -> Any:
        """Open a dataset.

        Args:
            device: move leaves there; `"meta"` gives shapes and dtypes, and maps no file.
            out: a TensorDict that takes over what is loaded; keys that are not there leave it.
            subpath: open a nested TensorDict only.
            mode: "r" (private mapping, never changed on disk) or "r+" (writes go through).
        """
        td = open_container(prefix, storage=storage, mode=mode, subpath=subpath, **options)
        if device is not None and torch.device(device).type == "meta":
            td = td._as_meta()
        elif device is not None:
            td = td.to(device)
        return td if out is None else out._become(td)

    def load_(self, prefix: Location, *args: Any, **kwargs: Any) -> Self:
        """Load a dataset into this TensorDict; see `load_memmap_`."""
        return self.load_memmap_(prefix, *args, **kwargs)

    def load_memmap_(self, prefix: Location, robust_key: bool = True, **kwargs: Any) -> Self:
        """Take over the entries of a dataset; entries that it does not have are removed."""
        return self._become(self.load_memmap(prefix, **kwargs))

    @classmethod
    def from_h5(cls, filename: Location, *, mode: Mode = "r", batch_size: Any = None, **kwargs: Any) -> Any:
        """Open an HDF5 file, ours or a foreign one, as a `PersistentTensorDict`."""
        td = open_container(filename, storage="h5", mode=mode)
        if batch_size is not None:
            td.batch_size = batch_size
        return td

    @classmethod
    def from_schema(
        cls,
        schema: Mapping[Any, Any],
        *,
        batch_size: Any = None,
        storage: Storage = None,
        device: Any = None,
        names: Any = None,
        mode: Mode | None = None,
        existsok: bool = False,
        **options: Any,
    ) -> Any:
        """Allocate a dataset from shapes and dtypes, filled with zeros, without holding it in memory.

        Args:
            schema: `key -> (shape, dtype)`, a dtype, or a `LeafSpec` with options of its own; nested
                dicts and tuple keys make nested TensorDicts. Shapes are without the batch size.
            batch_size: leading shape of every leaf.
            storage: backend name or URL; None: in memory.
            mode: "x" (default: an existing target is an error) or "w" (replace it).
            **options: `location=` (or `prefix=`, `filename=`), and options of the backend.

        Example:
            >>> td = TensorDict.from_schema({"obs": ((4,), "uint8"), ("next", "obs"): ((4,), "uint8")}, batch_size=[8])
            >>> td["next", "obs"].shape
            torch.Size([8, 4])
        """
        batch = as_size(batch_size)
        specs = {path: spec.replace(shape=(*batch, *spec.shape)) for path, spec in flat_schema(schema).items()}
        location = next((options.pop(n) for n in _LOCATION_NAMES if options.get(n) is not None), None)
        for name in _LOCATION_NAMES:
            options.pop(name, None)
        if storage is None and location is None:
            if options:
                raise OptionError(f"an in-memory TensorDict has no option {next(iter(options))!r}")
            return _in_memory(cls._resident_class, specs, batch, device, names)
        where = None if device is None else str(torch.device(device))
        groups = _groups_of(specs, batch, where, None if names is None else tuple(names))
        how: Mode = mode or ("w" if existsok else "x")
        if how not in ("w", "x"):
            raise OptionError(f"from_schema takes mode 'x' or 'w', not {how!r}")
        try:
            td = over(allocate(groups, specs, location, storage, how, options))
        except StoreExistsError as error:
            error.hint = "pass mode='w' to replace it"
            raise
        return td.lock_() if td._state & (MAPPED | SHARED) else td

    # -- over a store ------------------------------------------------------------------------
    def is_memmap(self) -> bool:
        """Whether the entries are views of memory-mapped files."""
        return bool(self._state & MAPPED)

    @property
    def saved_path(self) -> str:
        """Where the memory-mapped files are; `AttributeError` if there are none."""
        home = getattr(self, "_home", None)
        if home is None or not self._state & MAPPED:
            raise AttributeError("saved_path: this TensorDict is not memory-mapped")
        handle, path = home
        return str(handle.store.group_location(path))

    def _owned(self, what: str) -> tuple[Any, Path]:
        home = getattr(self, "_home", None)
        if home is None:
            raise StoreError(
                f"{what}: this TensorDict is not the one over a dataset",
                hint="use the TensorDict that save(), memmap() or load(mode='r+') returned",
            )
        handle, path = home
        handle.check_writable()
        return handle, path

    def make_memmap(
        self, key: NestedKey, shape: Any, *, dtype: torch.dtype | None = None, robust_key: bool = True
    ) -> Tensor:
        """Add a zero-filled entry to the dataset that this TensorDict is over, locked or not."""
        spec = LeafSpec(flat_args((shape,)), dtype or torch.get_default_dtype())
        return self._add_leaf(key, spec, None)

    def make_memmap_from_tensor(
        self, key: NestedKey, tensor: Tensor, *, copy_data: bool = True, robust_key: bool = True
    ) -> Tensor:
        """Add an entry with the shape and dtype of a tensor, and its data unless `copy_data=False`."""
        return self._add_leaf(key, LeafSpec(tensor.shape, tensor.dtype), tensor if copy_data else None)

    def make_memmap_from_storage(
        self,
        key: NestedKey,
        storage: Any,
        shape: Any,
        *,
        dtype: torch.dtype | None = None,
        robust_key: bool = True,
    ) -> Tensor:
        """Add an entry with the bytes of an `UntypedStorage`."""
        size = torch.Size(flat_args((shape,)))
        tensor = torch.empty(0, dtype=dtype or torch.get_default_dtype())
        tensor.set_(storage, 0, size, torch.empty(size, device="meta").stride())
        return self._add_leaf(key, LeafSpec(size, tensor.dtype), tensor)

    def _add_leaf(self, key: NestedKey, spec: LeafSpec, tensor: Tensor | None) -> Tensor:
        raise UnsupportedError("make_memmap needs a TensorDict over memory-mapped files", hint="use set() here")

    def memmap_refresh_(self, *, allow_pickle: bool | None = None) -> Self:
        """Read the dataset again: entries that other processes added appear, removed ones go."""
        home = getattr(self, "_home", None)
        if home is None:
            raise RuntimeError("memmap_refresh_: this TensorDict is not over memory-mapped files")
        handle, path = home
        fresh = open_container(
            handle.location, storage=handle.backend, mode="r+" if handle.store.writable else "r", subpath=path or None
        )
        locked = self._state & LOCKED
        self._become(fresh)
        return self.lock_() if locked else self

    def close(self) -> None:
        """Commit in-place writes and let go of the dataset, if this TensorDict is over one. Twice is fine."""
        home = getattr(self, "_home", None)
        if home is not None:
            home[0].store.close()

    def commit(self) -> Self:
        """Make in-place writes to the dataset durable and checked now, instead of at `close()`."""
        handle, _ = self._owned("commit")
        handle.commit(handle.groups)
        return self

    # -- reading -----------------------------------------------------------------------------
    def read(self, index: Any = None, keys: Any = None, out: Any = None) -> Any:
        """Read rows now, all entries in one batch, into fresh memory or the caller's buffers.

        Args:
            index: a batch index; default: everything.
            keys: only these (nested) keys.
            out: a TensorDict of buffers with the result's shapes and dtypes, filled and returned.
        """
        td = self if index is None else self._at(index)
        if keys is not None:
            td = td.select(*([keys] if isinstance(keys, str) else keys))
        if out is not None:
            return td._read_into(out)
        return td.clone() if td._state & ~LOCKED or index is None else td._resident()

    def _read_into(self, out: Any) -> Any:
        raise NotImplementedError

    def _read_pieces(self, batch: Any) -> list[Tensor]:
        raise NotImplementedError

    def _as_meta(self) -> Any:
        raise NotImplementedError


def _later(run: Any) -> Future[Any]:
    pool = ThreadPoolExecutor(1)
    future = pool.submit(run)
    pool.shutdown(wait=False)
    return future


def _groups_of(specs: Mapping[Path, LeafSpec], batch: torch.Size, device: str | None, names: Any) -> dict[Path, Group]:
    keys: dict[Path, dict[str, None]] = {(): {}}
    for path in specs:
        for i in range(len(path)):
            keys.setdefault(path[:i], {})[path[i]] = None
    return {
        path: Group(batch_size=tuple(batch), names=names, device=device, keys=tuple(below))
        for path, below in sorted(keys.items(), key=lambda item: len(item[0]))
    }


def _in_memory(cls: Any, specs: Mapping[Path, LeafSpec], batch: torch.Size, device: Any, names: Any) -> Any:
    td = cls({}, batch_size=batch, device=device, names=names)
    for path, spec in specs.items():
        if spec.options:
            raise OptionError(f"an in-memory leaf has no option {next(iter(spec.options))!r} (entry {path!r})")
        td.set(path, torch.full(spec.shape, spec.fill_value, dtype=spec.dtype, device=device))
    return td
