"""Lazy storages under the names of torchrl: in memory-mapped files, and in tensors of the process."""

from __future__ import annotations

from typing import Any

from tdstore.arguments import check_flags
from tdstore.rl.storages.lazy import LazyStorage
from tdstore.rl.storages.tabular import OnMismatch
from tdstore.rl.types import PathLike
from tdstore.types import DeviceLike


class LazyMemmapStorage(LazyStorage):
    """Rows in memory-mapped files, one for each tensor, in a folder: `LazyStorage` with `storage="memmap"`.

    Args:
        max_size: number of slots.
        scratch_dir: the folder; a temporary one by default, which is removed at the end.
        device, ndim, existsok, shared_init, auto_cleanup, on_mismatch, **options: as of `LazyStorage`.
        compilable: no effect; accepted for callers of torchrl.

    Example:
        >>> storage = LazyMemmapStorage(100)
        >>> storage.set(0, TensorDict({"obs": torch.ones(4)}))
        >>> storage.get(0)["obs"]
        MemoryMappedTensor([1., 1., 1., 1.])
    """

    def __init__(
        self,
        max_size: int,
        *,
        scratch_dir: PathLike | None = None,
        device: DeviceLike | None = "cpu",
        ndim: int = 1,
        existsok: bool = False,
        compilable: bool = False,
        shared_init: bool = False,
        auto_cleanup: bool | None = None,
        on_mismatch: OnMismatch = "raise",
        **options: Any,
    ) -> None:
        super().__init__(
            max_size, "memmap", path=scratch_dir, device=device, ndim=ndim, existsok=existsok, compilable=compilable,
            shared_init=shared_init, auto_cleanup=auto_cleanup, on_mismatch=on_mismatch, **options,
        )  # fmt: skip

    @property
    def scratch_dir(self) -> str | None:
        """The folder of the rows."""
        return self._place.location


class LazyTensorStorage(LazyStorage):
    """Rows in tensors of this process: `LazyStorage` with `storage=None`.

    Args:
        max_size: number of slots.
        device: of the tensors; "auto" is that of the first data.
        ndim, consolidated, on_mismatch: as of `LazyStorage`.
        compilable: no effect; accepted for callers of torchrl.
        shared_init: keep the rows in shared memory, where other processes of this host read and write them.
        cleanup_memmap: remove shared rows at the end.

    Raises:
        ValueError: torch knows no such device, or this machine does not have it.

    Example:
        >>> storage = LazyTensorStorage(100)
        >>> storage.set(0, torch.ones(4))
        >>> storage[0]
        tensor([1., 1., 1., 1.])
    """

    def __init__(
        self,
        max_size: int,
        *,
        device: DeviceLike | None = "cpu",
        ndim: int = 1,
        compilable: bool = False,
        consolidated: bool = False,
        shared_init: bool = False,
        cleanup_memmap: bool = True,
        on_mismatch: OnMismatch = "raise",
    ) -> None:
        check_flags(shared_init=shared_init, cleanup_memmap=cleanup_memmap)
        # What several processes share lies in shared memory: files of a folder that has no disk behind it.
        super().__init__(
            max_size, "shared" if shared_init else None, device="cpu" if shared_init else device, ndim=ndim,
            compilable=compilable, consolidated=consolidated, shared_init=shared_init, on_mismatch=on_mismatch,
            auto_cleanup=cleanup_memmap if shared_init else None,
        )  # fmt: skip
