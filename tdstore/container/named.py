"""The methods that users know by the name of a storage: each a line or two over the general ones."""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor

from tdstore.container.describe import describe
from tdstore.container.locks import LOCKED, MAPPED, SHARED
from tdstore.container.opening import allocate, open_container, over
from tdstore.container.saving import SavingMixin, later
from tdstore.errors import UnsupportedError
from tdstore.io.opening import Location
from tdstore.shapes import flat_args
from tdstore.types import LeafSpec, Mode, NestedKey


class NamedStorageMixin(SavingMixin):
    """memmap and its kin, to_h5 and from_h5, share_memory_."""

    __slots__ = ()

    # -- files -------------------------------------------------------------------------------
    def memmap(self, prefix: Location = None, copy_existing: bool = False, **kwargs: Any) -> Any:
        """Save as memory-mapped files under `prefix` (default: temporary ones); the result is locked, on the CPU.

        See `save`. A URL goes to its own backend.
        """
        _to_files(prefix, kwargs)

        def run() -> Any:
            td = self.save(prefix, copy_existing, **kwargs)
            td._set_device(torch.device("cpu"))
            td._mark_mapped()
            return td

        return later(run) if kwargs.pop("return_early", False) else run()

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
        _to_files(prefix, kwargs)
        storage = kwargs.pop("storage", None)
        early = kwargs.pop("return_early", False)
        for name in ("num_threads", "share_non_tensor", "robust_key", "archive"):
            kwargs.pop(name, None)

        def run() -> Any:
            td = over(allocate(*parts, prefix, storage, "w" if existsok else "x", kwargs))
            td._set_device(torch.device("cpu"))
            td._mark_mapped()
            return td.lock_()

        return later(run) if early else run()

    @classmethod
    def load_memmap(cls, prefix: Location, *args: Any, **kwargs: Any) -> Any:
        """As `load`."""
        return cls.load(prefix, *args, **kwargs)

    def load_memmap_(self, prefix: Location, *args: Any, **kwargs: Any) -> Self:
        """As `load_`."""
        return self.load_(prefix, *args, **kwargs)

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

    # -- others ------------------------------------------------------------------------------
    def to_h5(self, filename: Location, **kwargs: Any) -> Any:
        """Save as one HDF5 file; options such as `chunks` and `compression` go to every dataset."""
        return self.save(filename, storage="h5", **kwargs)

    def share_memory_(self) -> Self:
        """Move the leaves to shared memory that child processes see, and lock."""
        if self._device is not None and self._device.type == "cuda":
            return self
        return self._become(self.save(storage="shared"))

    @classmethod
    def from_h5(cls, filename: Location, *, mode: Mode = "r", batch_size: Any = None, **kwargs: Any) -> Any:
        """Open an HDF5 file, ours or a foreign one, as a `PersistentTensorDict`."""
        td = open_container(filename, storage="h5", mode=mode)
        if batch_size is not None:
            td.batch_size = batch_size
        return td


def _to_files(prefix: Location, options: dict[str, Any]) -> None:
    """Say which backend a `memmap` method means: files, unless the location is a URL of another."""
    if "storage" not in options and (prefix is None or "://" not in str(prefix)):
        options["storage"] = "memmap"
        # Working files, as their users expect: they outlive the process; save() makes them outlive a power cut.
        options.setdefault("durable", "none")
