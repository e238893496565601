"""Rebuild containers from pickles: as the pickle says, and safely for `torch.load(weights_only=True)`.

A stranger's file decides what the safe functions are called with. They write nothing, connect to nothing and run no
code. A dataset that was pickled as a reference (memmap, tdz, h5, zarr, ...) is opened only if it is a local one, only
for reading, and with no options. `torch.load(weights_only=False)` and pickle open it as it was.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tdstore.builtin.memmap import tensor
from tdstore.builtin.shared import store as shared
from tdstore.container.concat import opening as concat
from tdstore.container.core import one_buffer
from tdstore.container.core.locks import THROUGH
from tdstore.container.entries import unbatched
from tdstore.container.storage import handle, inline_values
from tdstore.container.storage.handle import StoreHandle
from tdstore.container.values import nontensor, typed_metadata
from tdstore.container.varlen import columns
from tdstore.errors import UntrustedDataError
from tdstore.index import plans, selection
from tdstore.pickling import register, register_class
from tdstore.tensordicts.lazystack import stack
from tdstore.tensordicts.persistent import persistent
from tdstore.tensordicts.resident import leaf_pickles, store_backed
from tdstore.tensordicts.resident.tensordict import TensorDict


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
    flags = int(flags) & THROUGH if found.store.writable else 0
    return store_backed.reopened(found, tuple(path), bool(locked), device, flags)


def _packed(offsets: Any, text: Any, trusted: Any = False) -> columns.PackedStack:
    return columns.rebuilt(offsets, text)  # whatever the file says: its values are not unpickled


def _text(data: Any, base: Any, what: Any, url: Any, trusted: Any = False) -> columns.Text:
    return columns.Text(data, base, what, url)


def _mapped(name: Any, dtype: torch.dtype, shape: Any, shared: Any) -> Tensor:
    return tensor.reopened(str(name), dtype, tuple(shape), False)


def _mapped_part(name: Any, dtype: torch.dtype, offset: Any, shape: Any, stride: Any, shared: Any) -> Tensor:
    return tensor.reopened_part(str(name), dtype, int(offset), tuple(shape), tuple(stride), False)


def register_kinds() -> None:
    """Register all kinds of objects, so that `pickle` and `torch.load` rebuild them."""
    register("TensorDict", store_backed.rebuilt, safe=store_backed.rebuilt)
    register("TensorDict.leaves", leaf_pickles.rebuilt, safe=leaf_pickles.rebuilt)
    register("bytes", leaf_pickles.from_bytes, safe=leaf_pickles.from_bytes)
    register("TensorDict.stored", store_backed.reopened, safe=_stored)
    register("LazyStackedTensorDict", stack.rebuilt, safe=stack.rebuilt)
    register("PersistentTensorDict", persistent.rebuilt, safe=persistent.rebuilt)
    register("StoreHandle", handle.reopened, safe=opened_for_reading)
    register("ConcatHandle", concat.reopened)
    register("SharedHandle", shared.found)
    register("consolidated", one_buffer.unpickled, safe=one_buffer.unpickled)
    register("MetaData.of", typed_metadata.rebuilt, safe=typed_metadata.rebuilt)
    register("NonTensorStack.of", inline_values.rebuilt, safe=inline_values.rebuilt)
    register("PackedStack", columns.rebuilt, safe=_packed)
    register("Text", columns.Text, safe=_text)
    register("UnbatchedTensor", unbatched.rebuilt, safe=unbatched.rebuilt)
    register("MemoryMappedTensor", tensor.reopened, safe=_mapped)
    register("leaf", tensor.from_copy)
    register("MemoryMappedTensor.part", tensor.reopened_part, safe=_mapped_part)
    register("Selection", selection.Selection, safe=selection.Selection)
    register("Axis", plans.Axis, safe=plans.Axis)
    register("Zipped", plans.Zipped, safe=plans.Zipped)
    for value in (nontensor.NonTensorData, nontensor.MetaData, nontensor.NonTensorStack):
        register_class(value)
    torch.serialization.add_safe_globals(
        [
            TensorDict,
            stack.LazyStackedTensorDict,
            persistent.PersistentTensorDict,
            unbatched.UnbatchedTensor,
            columns.PackedStack,
            slice,
            range,
        ]
    )
