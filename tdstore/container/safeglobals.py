"""What `torch.load(weights_only=True)` may call to rebuild a container: nothing that writes, connects or runs code.

A file from a stranger decides what these functions are called with. Values are rebuilt from what torch's own loader
allows. A dataset that was pickled as a reference (memmap, tdz, h5, zarr, ...) is opened only if it is a local one,
only for reading, and with no options; torch.load(weights_only=False) and pickle open it as it was.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tdstore import indexing, plans
from tdstore.builtin import mmtensor
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
from tdstore.container.lazy import LazyStackedTensorDict
from tdstore.container.locks import THROUGH
from tdstore.container.persistent import PersistentTensorDict
from tdstore.container.tensordict import TensorDict
from tdstore.errors import UntrustedDataError


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


def _reopened(found: StoreHandle, path: Any, locked: Any, device: Any, flags: Any) -> Any:
    return home._reopened(found, tuple(path), bool(locked), device, int(flags) & THROUGH if found.store.writable else 0)


def _packed(spans: Any, text: Any, trusted: Any = False) -> packed.PackedStack:
    return packed._packed(spans, text)  # whatever the file says: its values are not unpickled


def _text(data: Any, base: Any, what: Any, url: Any, trusted: Any = False) -> packed.Text:
    return packed.Text(data, base, what, url)


def _mapped(name: Any, dtype: torch.dtype, shape: Any, shared: Any) -> Tensor:
    return mmtensor._reopen(str(name), dtype, tuple(shape), False)


def _mapped_part(name: Any, dtype: torch.dtype, offset: Any, shape: Any, stride: Any, shared: Any) -> Tensor:
    return mmtensor._reopen_part(str(name), dtype, int(offset), tuple(shape), tuple(stride), False)


def _as_is(function: Callable[..., Any]) -> tuple[Callable[..., Any], str]:
    return function, f"{function.__module__}.{function.__qualname__}"


def safe_globals() -> list[Any]:
    """What to give to `torch.serialization.add_safe_globals`: classes, and functions by the names in files."""
    values = [
        kind for kind in vars(nontensor).values() if isinstance(kind, type) and kind.__module__ == nontensor.__name__
    ]
    return [
        TensorDict,
        LazyStackedTensorDict,
        PersistentTensorDict,
        indexing.Selection,
        plans.Axis,
        plans.Zipped,
        slice,
        range,
        *values,
        unbatched.UnbatchedTensor,
        _as_is(unbatched._rebuilt),
        _as_is(home._rebuilt),
        _as_is(metadatakinds._rebuilt),
        _as_is(lazy._rebuilt),
        _as_is(kept._stack),
        (_packed, _as_is(packed._packed)[1]),
        (_text, _as_is(packed.Text)[1]),
        packed.PackedStack,
        _as_is(onebuffer.unpickled),
        _as_is(persistent._restore),
        (_reopened, _as_is(home._reopened)[1]),
        (opened_for_reading, _as_is(handle._reopen)[1]),
        (_mapped, _as_is(mmtensor._reopen)[1]),
        (_mapped_part, _as_is(mmtensor._reopen_part)[1]),
    ]


def register_safe_globals() -> None:
    """Let `torch.load(weights_only=True)` rebuild containers."""
    torch.serialization.add_safe_globals(safe_globals())
