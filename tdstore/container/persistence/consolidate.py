"""One buffer for all leaves: in memory, shared, pinned, or a file."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Literal, Self, get_args, overload

import msgspec
import torch
from torch import Tensor

from tdstore.arguments import as_device, check_path
from tdstore.container.core.container import Container
from tdstore.container.core.locks import CONSOLIDATED, SHARED, SOURCE_LOCKED
from tdstore.container.core.one_buffer import consolidated, is_one_buffer, joined, parts_of
from tdstore.container.entries.nested_tensors import ragged_dim
from tdstore.container.persistence.saving import later
from tdstore.container.storage.describe import describe
from tdstore.container.storage.handle import StoreHandle
from tdstore.container.storage.open_and_save import over, value_by_itself
from tdstore.errors import CorruptStoreError, InvalidStateError, OptionError
from tdstore.header import VALUE_KIND, Header
from tdstore.io.blocks import leaf_batches
from tdstore.io.consolidated import layout
from tdstore.io.consolidated.buffer import BufferStore, Slot, arrange
from tdstore.io.consolidated.file import map_file, write_file
from tdstore.io.opening import Location
from tdstore.registry import registry
from tdstore.storekit import files
from tdstore.threads import ThreadPool
from tdstore.types import DeviceLike, Path, Verify, path_text

if TYPE_CHECKING:
    from tdstore.tensordicts.base import TensorDictBase


class ConsolidatingMixin(Container):
    """consolidate and related methods."""

    __slots__ = ()

    @overload
    def consolidate(
        self,
        filename: Location = None,
        *,
        num_threads: int = 0,
        device: DeviceLike | None = None,
        non_blocking: bool = False,
        inplace: bool = False,
        return_early: Literal[False] = False,
        use_buffer: bool = False,
        share_memory: bool = False,
        pin_memory: bool = False,
        metadata: bool = False,
    ) -> Self: ...
    @overload
    def consolidate(
        self,
        filename: Location = None,
        *,
        num_threads: int = 0,
        device: DeviceLike | None = None,
        non_blocking: bool = False,
        inplace: bool = False,
        return_early: Literal[True],
        use_buffer: bool = False,
        share_memory: bool = False,
        pin_memory: bool = False,
        metadata: bool = False,
    ) -> Future[Self]: ...
    def consolidate(
        self,
        filename: Location = None,
        *,
        num_threads: int = 0,
        device: DeviceLike | None = None,
        non_blocking: bool = False,
        inplace: bool = False,
        return_early: bool = False,
        use_buffer: bool = False,
        share_memory: bool = False,
        pin_memory: bool = False,
        metadata: bool = False,
    ) -> Any:
        """Copy all leaves into one buffer; the result is a locked TensorDict of views of it.

        As long as it stays locked, it is moved to a device, pickled and sent as one piece. Each leaf begins at
        a multiple of 8 bytes. Containers over a store are read; with `filename`, in blocks of bounded memory.

        Args:
            filename: write the buffer to this file, which is replaced in one step, and map it: later writes into
                the leaves go to the file. `from_consolidated` opens it, here and in the `tensordict` package.
            num_threads: threads that copy into a buffer in memory.
            device: the device of the buffer. Not with `filename`.
            non_blocking: as in `Tensor.copy_`.
            inplace: let this TensorDict use the buffer, and return it.
            return_early: return a future at once.
            use_buffer: accepted; a file is never longer than its leaves and their description.
            share_memory: use a buffer that child processes share.
            pin_memory: use a buffer in pinned memory.
            metadata: accepted; the description is created when it is needed.

        Raises:
            InvalidStateError: `device` with `filename`, or `pin_memory` without an accelerator.
            UnsupportedError: a leaf that is sparse, or nested but not jagged.
            UntrustedDataError: with `filename`, a value that is not plain data.

        Example:
            >>> td = TensorDict({"a": torch.ones(3), "b": {"c": torch.zeros(3, 2, dtype=torch.int32)}}, [3])
            >>> one = td.consolidate()
            >>> one.is_consolidated(), one["a"].untyped_storage().nbytes()
            (True, 40)
            >>> one["b", "c"].data_ptr() - one["a"].data_ptr()
            16
        """
        if filename is not None and device is not None and as_device(device).type != "cpu":
            raise InvalidStateError("consolidate takes a filename or a device, not both: move the result with to()")

        if filename is not None:
            check_path(filename, "filename")
        place = None if filename is None else os.path.abspath(filename)

        def run() -> Any:
            if place is not None:
                made = written(self, place)
                if isinstance(made, Container):  # else a value by itself
                    made._set_device(torch.device("cpu"))  # as of all that is mapped
            elif self.is_consolidated() and device is None and not share_memory and not pin_memory:
                return self
            else:
                made = self._in_one_buffer(num_threads, device, non_blocking, share_memory, pin_memory)
            made.lock_()
            return self._become(made) if inplace else made

        return later(run) if return_early else run()

    def _in_one_buffer(self, num_threads: int, device: Any, non_blocking: bool, share: bool, pin: bool) -> Any:
        where = None if device is None else as_device(device)

        def new_buffer(size: int) -> Tensor:
            devices = [where] if where is not None else [leaf.device for leaf in self._leaf_list()[:1]]
            found = devices[0] if devices else torch.device("cpu")
            buffer = torch.empty(size, dtype=torch.uint8, device=found, pin_memory=pin)
            return buffer.share_memory_() if share else buffer

        def copy(targets: list[Tensor], sources: list[Tensor]) -> None:
            if num_threads > 1:
                with ThreadPool(num_threads) as pool:
                    list(pool.map(lambda target, source: target.copy_(source, non_blocking), targets, sources))
                return
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source, non_blocking=non_blocking)

        made = consolidated(self, new_buffer, copy)
        if share:
            made._state |= SHARED
        if where is not None and self._device is not None:
            made._set_device(where)
        return made

    def is_consolidated(self) -> bool:
        """Return whether all leaves are views of one buffer that `consolidate` or `from_consolidated` made."""
        return self._state & CONSOLIDATED != 0 and is_one_buffer(self)

    @classmethod
    def from_consolidated(
        cls, filename: Location, *, mode: str = "r", verify: Verify = "size", max_bytes: int | None = None
    ) -> TensorDictBase:
        """Map a file that `consolidate` wrote, with this library or with the `tensordict` package.

        The description in the file is not trusted: no name in it is imported. The result is locked if what was written
        was.

        Args:
            filename: the file.
            mode: "r" leaves the file as it is: writes into the leaves stay in this process. With "r+" they go to the
                file.
            verify: "size" compares files of up to 16 MiB with their checksums, and of larger files what `read`
                copies; "full" the whole file; "none" nothing. Files of the `tensordict` package have no checksums.
            max_bytes: refuse a file that declares more data.

        Raises:
            StoreNotFoundError: there is no such file.
            CorruptStoreError: the file is not a consolidated file, or is damaged.
            OptionError: an unknown `mode` or `verify`.

        Example:
            >>> written = TensorDict({"a": torch.arange(3)}, [3]).consolidate("batch.bin")
            >>> TensorDict.from_consolidated("batch.bin")["a"]
            tensor([0, 1, 2])
        """
        if filename is None:
            raise OptionError("from_consolidated needs the name of a file")
        check_path(filename, "filename")
        if mode not in ("r", "r+"):
            raise OptionError(f"from_consolidated takes mode 'r' or 'r+', not {mode!r}")
        if verify not in get_args(Verify):
            raise OptionError(f"verify must be 'none', 'size' or 'full', not {verify!r}")
        return opened(os.fspath(filename), shared=mode == "r+", verify=verify, max_bytes=max_bytes)


# -- files -----------------------------------------------------------------------------------
def written(td: Any, filename: str) -> TensorDictBase:
    """Write a container to a consolidated file, and map the file for reading and writing."""
    jagged: dict[Path, Tensor] = {}
    groups, specs = describe(td, jagged=jagged)
    pieces = [(path, part) for path, leaf in jagged.items() for part in parts_of(leaf)]
    facts = [(spec.dtype, spec.shape) for spec in specs.values()]
    slots = arrange([*facts, *((part.dtype, tuple(part.shape)) for _, part in pieces)])
    places = dict(zip(specs, slots, strict=False))
    parts: dict[Path, list[Slot]] = {}
    for (path, _), slot in zip(pieces, slots[len(specs) :], strict=True):
        parts.setdefault(path, []).append(slot)
    ragged = {path: layout.Ragged(tuple(parts[path]), ragged_dim(leaf)) for path, leaf in jagged.items()}

    def values() -> Iterator[tuple[int, Tensor]]:
        for batch in leaf_batches(specs):
            for (path, index), value in zip(batch, td._read_pieces(batch), strict=True):
                place, first = places[path], next((term.start for term in index if isinstance(term, slice)), 0)
                yield place.start + (first * place.nbytes // place.shape[0] if first else 0), value
        for (_, part), slot in zip(pieces, slots[len(specs) :], strict=True):
            yield slot.start, part

    url = os.path.realpath(filename)
    write_file(url, layout.Contents(Header(groups), places, ragged, locked=td.is_locked), values())
    return opened(url, shared=True)


def opened(filename: str, *, shared: bool, verify: Verify = "size", max_bytes: int | None = None) -> TensorDictBase:
    """Open a consolidated file as a container. With `shared=False` the file never changes."""
    url = os.path.realpath(filename)
    return over_buffer(url, *map_file(url, shared=shared, verify=verify, max_bytes=max_bytes))


def over_buffer(url: str, contents: layout.Contents, buffer: Tensor) -> TensorDictBase:
    """Build the container over the leaves in `buffer`, a uint8 tensor. Errors name `url`."""
    groups = dict(contents.header.groups)
    for path in contents.ragged:  # no leaf of the store below: put in afterwards
        above = groups[path[:-1]]
        groups[path[:-1]] = msgspec.structs.replace(above, keys=tuple(key for key in above.keys if key != path[-1]))
    store = BufferStore(url, Header(groups), contents.slots, buffer)
    handle = StoreHandle(store, registry().get("memory"), None, "r", {})
    td = over(handle)
    node: Any
    for path, leaf in contents.ragged.items():
        node = td
        for key in path[:-1]:
            node = node._child(key)
        try:
            node._data[path[-1]] = joined([slot.view(buffer) for slot in leaf.parts], leaf.dim)
        except CorruptStoreError as error:
            raise files.with_url(error, f"{url}: {path_text(path)}") from None
    for path in {path[:-1] for path in contents.ragged}:
        node = td
        for key in path:
            node = node._child(key)
        node._reorder(list(contents.header.groups[path].keys))
    td._state |= CONSOLIDATED | (SOURCE_LOCKED if contents.locked else 0)
    if contents.locked:
        td.lock_()
    return value_by_itself(td, handle) if groups[()].kind == VALUE_KIND else td
