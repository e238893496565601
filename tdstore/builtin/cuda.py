"""The `cuda` backend: a dict of tensors on one CUDA device."""

from __future__ import annotations

import torch

from tdstore.builtin.memory import MemoryStore
from tdstore.errors import MissingDependencyError, OptionError, StoreNotFoundError
from tdstore.registry import split_scheme
from tdstore.store import Cap
from tdstore.types import Mode


def open_cuda(location: str | None = None, *, mode: Mode = "w", device: str | None = None) -> CudaStore:
    """Make an empty store on `device` (`"cuda"`, `"cuda:1"`), or on that of `cuda://1`.

    Args:
        location: None, or `cuda://` with the number of a device.
        mode: "w", "x" or "a": such a store is always new.
        device: the CUDA device.

    Raises:
        StoreNotFoundError: mode "r" or "r+".
        MissingDependencyError: this torch finds no CUDA device.
        OptionError: not a CUDA device, or one that does not exist.
    """
    if mode in ("r", "r+"):
        raise StoreNotFoundError("a cuda store cannot be opened again", hint="open one with mode='w'")
    number = split_scheme(location)[1] if location else ""
    target = torch.device(device or (f"cuda:{number}" if number else "cuda"))
    if target.type != "cuda":
        raise OptionError(f"the 'cuda' backend cannot hold tensors on {target}", hint="storage='memory' is for the CPU")
    if not torch.cuda.is_available():
        raise MissingDependencyError(
            "the 'cuda' backend needs a CUDA device, and torch sees none",
            hint="torch.cuda.is_available() must be True; storage='memory' works everywhere",
        )
    if (target.index or 0) >= torch.cuda.device_count():
        raise OptionError(f"there is no {target}: torch sees {torch.cuda.device_count()} CUDA device(s)")
    return CudaStore(target)


class CudaStore(MemoryStore):
    """Leaves as tensors of one CUDA device."""

    caps = MemoryStore.caps | Cap.DIRECT_DEVICE

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        index = torch.cuda.current_device() if device.index is None else device.index
        self.device = f"cuda:{index}"
        self.url = f"cuda://{index}"
