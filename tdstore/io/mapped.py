"""Leaves that are mapped files: release pages after a copy, and send parts by the name of the file."""

from __future__ import annotations

import torch
from torch import Tensor

from tdstore.builtin.memmap.tensor import MappedFile, MemoryMappedTensor
from tdstore.builtin.memmap.tensor import copy_to_pickle as copy_to_pickle
from tdstore.store import Cap, Store
from tdstore.storekit.pages import drop_whole_pages
from tdstore.types import Path, StoreIndex


def drop_behind(store: Store, path: Path, index: StoreIndex) -> None:
    """Release the mapped pages of `leaf[index]`. The file and the page cache of the system are unchanged.

    Use it for stores through which only the copy writes: changed pages of a private mapping would be lost. If a leaf is
    not a mapped file, nothing happens.
    """
    if Cap.VIEW not in store.caps:
        return
    leaf = store.view(path)
    if not isinstance(leaf, MemoryMappedTensor) or not leaf.numel():
        return
    part: Tensor = leaf[index] if index else leaf
    if part.is_contiguous():
        drop_whole_pages(part.data_ptr(), part.nbytes)  # also the page that the next block shares


def sent(leaf: Tensor) -> Tensor:
    """Return a leaf in the form in which it is sent to another process.

    A view of a mapped file is sent as its position in the file, other leaves are unchanged. A view of a file without a
    name is copied, since the file ends with the process.
    """
    if type(leaf) is not Tensor or leaf.layout is not torch.strided or leaf.device.type != "cpu":
        return leaf
    if leaf.is_nested or leaf.requires_grad or leaf.is_conj() or leaf.is_neg():
        return leaf
    record: MappedFile | None = getattr(leaf.untyped_storage(), "tdstore_file", None)
    if record is None:
        return leaf
    return copy_to_pickle(leaf) if record.name is None else leaf.as_subclass(MemoryMappedTensor)


def seen_by_others(leaf: Tensor) -> bool:
    """Check whether other processes can see the memory of a leaf: a mapped file without a name is private."""
    record: MappedFile | None = getattr(leaf.untyped_storage(), "tdstore_file", None)
    return leaf.is_shared() if record is None else record.name is not None
