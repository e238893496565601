"""Arrays with codecs that only zarr-python has: it accesses one node of the store, through the engine of tdstore."""

from __future__ import annotations

import asyncio
import threading
import warnings
from collections.abc import AsyncIterator, Iterable
from typing import Any, Literal, NoReturn

import msgspec
import numpy as np
import zarr
from torch import Tensor
from zarr.abc.buffer import Buffer, BufferPrototype
from zarr.abc.store import ByteRequest, OffsetByteRequest, RangeByteRequest, Store, SuffixByteRequest

from tdstore.engine import Engine
from tdstore.errors import CorruptStoreError, StoreError, StoreNotFoundError, UnsupportedError
from tdstore.index.ranges import Range
from tdstore.storekit import refusals
from tdstore.types import StoreIndex, path_text
from tdstore_zarr.layout.document import NAME
from tdstore_zarr.layout.leaf import Leaf, Stored, seal


class LeafView(Store):
    """One leaf as a zarr store of one array. Objects that were written must exist; others read as absent."""

    supports_writes = True
    supports_deletes = True
    supports_listing = False
    supports_partial_writes = False  # zarr 3.1.0 wants it, and `set_partial_values`

    def __init__(self, engine: Engine, leaf: Leaf, *, read_only: bool) -> None:
        super().__init__(read_only=read_only)
        self._engine = engine
        self._leaf = leaf

    def __eq__(self, other: object) -> bool:
        return self is other

    __hash__ = object.__hash__

    async def get(self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None) -> Buffer | None:
        """Return the bytes of a key."""
        if key == NAME:
            data = msgspec.json.encode(self._leaf.meta.to_json())
            return prototype.buffer.from_bytes(data)
        number = self._leaf.meta.number_of(key)
        if number is None or (self._leaf.complete and number not in self._leaf.objects):
            return None
        try:
            found = await asyncio.to_thread(self._read, self._leaf.key(number), byte_range)
        except StoreNotFoundError:
            if not self._leaf.complete:
                return None
            raise
        return prototype.buffer.from_bytes(bytes(found))

    def _read(self, key: str, wanted: ByteRequest | None) -> Any:
        if wanted is None:
            return self._engine.get(key).data
        if isinstance(wanted, RangeByteRequest):
            return self._engine.get_ranges([Range(key, wanted.start, wanted.end)])[0]
        if isinstance(wanted, OffsetByteRequest):
            return self._engine.get_ranges([Range(key, wanted.offset, None)])[0]
        assert isinstance(wanted, SuffixByteRequest)
        return self._engine.get_ranges([Range(key, -wanted.suffix, None)])[0]

    async def get_partial_values(
        self, prototype: BufferPrototype, key_ranges: Iterable[tuple[str, ByteRequest | None]]
    ) -> list[Buffer | None]:
        """Return the bytes of many keys."""
        return [await self.get(key, prototype, wanted) for key, wanted in key_ranges]

    async def set_partial_values(self, key_start_values: Iterable[tuple[str, int, bytes]]) -> NoReturn:
        """Refuse to write parts of chunks, which nobody does where `supports_partial_writes` is False."""
        raise UnsupportedError(f"parts of chunks are not written: {[key for key, *_ in key_start_values]}")

    async def exists(self, key: str) -> bool:
        """Check whether a key was written."""
        return key == NAME or self._leaf.meta.number_of(key) in self._leaf.objects

    async def set(self, key: str, value: Buffer) -> None:
        """Write a chunk, and record its size and checksum."""
        number = self._leaf.meta.number_of(key)
        if number is None:
            return  # the metadata is ours to write
        data = value.to_bytes()
        await asyncio.to_thread(self._engine.put, self._leaf.key(number), data)
        self._leaf.objects[number] = Stored(len(data), seal(data))

    async def delete(self, key: str) -> None:
        """Remove a chunk that holds only the fill value."""
        number = self._leaf.meta.number_of(key)
        if number is not None:
            await asyncio.to_thread(self._engine.delete, [self._leaf.key(number)])
            self._leaf.objects.pop(number, None)

    async def list(self) -> AsyncIterator[str]:
        """Yield the keys that were written."""
        for number in list(self._leaf.objects):
            yield self._leaf.meta.chunk_key(number)

    async def list_prefix(self, prefix: str) -> AsyncIterator[str]:
        """Yield the written keys that start with `prefix`."""
        for number in list(self._leaf.objects):
            key = self._leaf.meta.chunk_key(number)
            if key.startswith(prefix):
                yield key

    async def list_dir(self, prefix: str) -> AsyncIterator[str]:
        """Yield nothing: there is one array."""
        if not prefix:
            yield NAME


class zarr_errors(refusals.ErrorTranslation[Exception]):  # noqa: N801 - reads as a statement: `with zarr_errors(url, "reading"):`
    """Turn any exception of zarr-python and its codecs into a `StoreError`."""

    __slots__ = ("otherwise",)
    caught = (Exception,)

    def __init__(self, url: str, doing: str, otherwise: type[StoreError] = CorruptStoreError) -> None:
        self.url, self.doing = url, doing  # of every call: without a second one
        self.otherwise = otherwise

    def translate(self, error: Exception) -> NoReturn:
        """Raise the `StoreError` for an error."""
        raise self.otherwise(
            f"{self.url}: {self.doing}: {type(error).__name__}: {' '.join(str(error).split())[:300]}", url=self.url
        ) from error


def _array(engine: Engine, leaf: Leaf, *, read_only: bool) -> Any:
    view = LeafView(engine, leaf, read_only=read_only)
    mode: Literal["r", "r+"] = "r" if read_only else "r+"
    with _LOCK, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that numcodecs' codecs are not in zarr's specification
        return zarr.open_array(store=view, mode=mode, zarr_format=3, config={"write_empty_chunks": True})


_LOCK = threading.Lock()


def _selection(leaf: Leaf, index: StoreIndex) -> tuple[Any, ...]:
    terms = [*index, *(slice(0, n, 1) for n in leaf.meta.shape[len(index) :])]
    return tuple(term.numpy() if isinstance(term, Tensor) else term for term in terms)


def read(engine: Engine, leaf: Leaf, index: StoreIndex, out: np.ndarray[Any, Any], url: str) -> None:
    """Fill `out` with `leaf[index]`."""
    if not out.size:
        return
    with zarr_errors(url, f"reading {path_text(leaf.path)}"):
        array = _array(engine, leaf, read_only=True)
        selection = _selection(leaf, index)
        out[...] = array.oindex[selection] if leaf.meta.shape else array[()]


def write(engine: Engine, leaf: Leaf, index: StoreIndex, value: np.ndarray[Any, Any], url: str) -> None:
    """Write `value` to `leaf[index]`."""
    if not value.size:
        return
    with zarr_errors(url, f"writing {path_text(leaf.path)}"):
        array = _array(engine, leaf, read_only=False)
        if leaf.meta.shape:
            array.oindex[_selection(leaf, index)] = value
        else:
            array[()] = value
