"""Rebuild containers from pickles: as the pickle says, and safely for `torch.load(weights_only=True)`.

A stranger's file decides what the safe functions are called with. They write nothing, connect to nothing and run no
code. A dataset that was pickled as a reference (memmap, tdz, h5, zarr, ...) is opened only if it is a local one, only
for reading, and with no options. `torch.load(weights_only=False)` and pickle open it as it was.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tdstore import indexing, plans
from tdstore.builtin import mmtensor, shared
from tdstore.container import (
    handle,
    home,
    kept,
    lazy,
    metadatakinds,
    nontensor,
    onebuffer,
    packed,
    persistent,
    unbatched,
)
from tdstore.container.handle import StoreHandle
from tdstore.container.locks import THROUGH
from tdstore.container.tensordict import TensorDict
from tdstore.errors import UntrustedDataError
from tdstore.pickling import register, register_class


def opened_for_reading(backend: Any, token: Any) -> StoreHandle:
    """Open the local dataset that a file refers to, for reading.

    Raises:
        UntrustedDataError: it refers to another machine, or to no place at all.
    """
    location = token[0] if isinstance(token, (tuple, list)) and token else None
    if not isinstance(backend, str) or not isinstance(location, str) or "://" in location or "::" in location:
        raise UntrustedDataError(
            f"the file refers to {str(location)[:200]!r}, which torch.load(weights_only=True) does not open",
            hint="open it with tdstore.open(); weights_only=False opens it too, if you trust the file",
        )
    return StoreHandle.open(location, storage=backend, mode="r")


def _stored(found: StoreHandle, path: Any, locked: Any, device: Any, flags: Any) -> Any:
    return home.reopened(found, tuple(path), bool(locked), device, int(flags) & THROUGH if found.store.writable else 0)


def _packed(spans: Any, text: Any, trusted: Any = False) -> packed.PackedStack:
    return packed.rebuilt(spans, text)  # whatever the file says: its values are not unpickled


def _text(data: Any, base: Any, what: Any, url: Any, trusted: Any = False) -> packed.Text:
    return packed.Text(data, base, what, url)


def _mapped(name: Any, dtype: torch.dtype, shape: Any, shared: Any) -> Tensor:
    return mmtensor.reopened(str(name), dtype, tuple(shape), False)


def _mapped_part(name: Any, dtype: torch.dtype, offset: Any, shape: Any, stride: Any, shared: Any) -> Tensor:
    return mmtensor.reopened_part(str(name), dtype, int(offset), tuple(shape), tuple(stride), False)


def register_kinds() -> None:
    """Register all kinds of objects, so that `pickle` and `torch.load` rebuild them."""
    register("TensorDict", home.rebuilt, safe=home.rebuilt)
    register("TensorDict.stored", home.reopened, safe=_stored)
    register("LazyStackedTensorDict", lazy.rebuilt, safe=lazy.rebuilt)
    register("PersistentTensorDict", persistent.rebuilt, safe=persistent.rebuilt)
    register("StoreHandle", handle.reopened, safe=opened_for_reading)
    register("SharedHandle", shared.found)
    register("consolidated", onebuffer.unpickled, safe=onebuffer.unpickled)
    register("MetaData.of", metadatakinds.rebuilt, safe=metadatakinds.rebuilt)
    register("NonTensorStack.of", kept.rebuilt, safe=kept.rebuilt)
    register("PackedStack", packed.rebuilt, safe=_packed)
    register("Text", packed.Text, safe=_text)
    register("UnbatchedTensor", unbatched.rebuilt, safe=unbatched.rebuilt)
    register("MemoryMappedTensor", mmtensor.reopened, safe=_mapped)
    register("MemoryMappedTensor.part", mmtensor.reopened_part, safe=_mapped_part)
    register("Selection", indexing.Selection, safe=indexing.Selection)
    register("Axis", plans.Axis, safe=plans.Axis)
    register("Zipped", plans.Zipped, safe=plans.Zipped)
    for value in (nontensor.NonTensorData, nontensor.MetaData, nontensor.NonTensorStack):
        register_class(value)
    torch.serialization.add_safe_globals(
        [
            TensorDict,
            lazy.LazyStackedTensorDict,
            persistent.PersistentTensorDict,
            unbatched.UnbatchedTensor,
            packed.PackedStack,
            slice,
            range,
        ]
    )
