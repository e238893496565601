"""PersistentTensorDict: a TensorDict whose entries stay in a store until they are asked for."""

from __future__ import annotations

from typing import Any, ClassVar, Self

from tdstore.container.core import GROUP, Container
from tdstore.container.handle import StoreHandle
from tdstore.container.locks import LOCKED
from tdstore.container.stored_writes import StoredWrites
from tdstore.errors import KeyNotFoundError, UnsupportedError
from tdstore.indexing import Selection
from tdstore.ops.base import Names
from tdstore.shapes import as_size
from tdstore.types import Path


class PersistentTensorDict(StoredWrites):
    """A TensorDict over a store: HDF5, zarr, a bucket, ...

    Reading a key reads that leaf into a fresh tensor. Indexing gives a *window*: lazy, chainable and
    write-through; a key of a window reads only its rows. Whatever needs many leaves (`to_tensordict()`,
    `clone()`, `to(device)`, maths, iteration) fetches them in one batched read.

    Args:
        batch_size: checked against, or replacing, the stored one.
        filename: location of the store; `location` is the same.
        group: path of a nested TensorDict to open instead of the root.
        mode: "r", "r+", "w", "x" or "a", see `tdstore.store.Store`.
        backend: name of the backend; None finds it from the location.
        device: where reads land.
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
        batch_size: Any = None,
        filename: Any = None,
        group: Any = None,
        mode: Any = "r",
        backend: str | None = None,
        device: Any = None,
        location: Any = None,
        **options: Any,
    ) -> None:
        if self.LOCKING is not None:
            options.setdefault("locking", self.LOCKING)
        handle = StoreHandle.open(location if location is not None else filename, storage=backend, mode=mode, **options)
        path = () if group is None else tuple(group.split("/")) if isinstance(group, str) else tuple(group)
        if handle.kind(path) != GROUP:
            raise KeyNotFoundError(f"no group {path!r} in {handle.store.url}")
        self._setup(handle, path, None, None, device)
        if batch_size is not None and as_size(batch_size) != self._batch_size:
            self.batch_size = batch_size
        if mode in ("w", "x") and not handle.store.load_header():
            handle.commit(handle.groups)

    def _become(self, other: Any) -> Self:
        place = (other._handle, other._path) if isinstance(other, PersistentTensorDict) else other._home
        if place is None:
            return super()._become(other)
        # The store that it was over stays open for others that look at it; it is closed with the last of them.
        handle, path = place
        self._setup(handle, path, None, None, None)
        self._state = other._state & ~LOCKED
        return self.lock_() if other.is_locked else self

    def popitem(self) -> tuple[str, Any]:
        """Remove and return the last entry, read into memory. A window forgets it, and the store keeps it."""
        keys = list(self._first_keys())
        if self._sel.is_full or not keys:
            return super().popitem()
        if self.is_locked:
            raise self._refuse_locked("pop an entry")
        entry: Any = self[keys[-1]]
        self._wanted = {key: (self._wanted or {}).get(key) for key in keys[:-1]}
        return keys[-1], entry._resident() if isinstance(entry, Container) else entry

    def close(self) -> None:
        """Commit and close the store. Twice is fine."""
        self._handle.close()

    # -- gradients: what is read is a fresh tensor, which nothing was computed from ---------------
    @property
    def requires_grad(self) -> bool:
        """False: what is stored carries no gradients."""
        return False

    @property
    def grad(self) -> Any:
        """None: what is stored carries no gradients."""
        return None

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Refuse to require gradients."""
        if requires_grad:
            raise UnsupportedError(
                "what is stored carries no gradients", hint="td.to_tensordict().requires_grad_() reads it into memory"
            )
        return self

    def zero_grad(self, set_to_none: bool = True) -> Self:
        """Do nothing: there are no gradients."""
        return self

    def detach_(self) -> Self:
        """Do nothing: there are no gradients."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore, (self._handle, self._path, self._own_sel(), self._wanted, self._device, self._names)


def _restore(
    handle: StoreHandle, path: Path, sel: Selection | None, wanted: Any, device: Any, names: Names
) -> PersistentTensorDict:
    return PersistentTensorDict._over(handle, path, sel, wanted, device, names)


Container._stored_class = PersistentTensorDict
