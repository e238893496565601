"""`.safetensors` files for tdstore."""

from __future__ import annotations

from collections.abc import Iterable

from tdstore.hookspecs import Backend, hookimpl
from tdstore.store import Cap


@hookimpl
def tdstore_backends() -> Iterable[Backend]:
    """Declare `safetensors`. The store itself is imported when the first file is opened."""
    yield Backend(
        name="safetensors",
        opener="tdstore_safetensors.store:open_safetensors",
        summary="one .safetensors file, written as a whole",
        caps=Cap.WRITE | Cap.PARTIAL_READ | Cap.PARTIAL_WRITE | Cap.PERSISTENT | Cap.CONCURRENT_READ | Cap.DISCARD,
        suffixes=(".safetensors",),
    )
