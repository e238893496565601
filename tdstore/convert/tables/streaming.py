"""Streaming of row blocks into a store, for files larger than memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from tdstore.container.core.container import Container
from tdstore.container.core.locks import MAPPED, SHARED
from tdstore.container.storage.describe import describe
from tdstore.container.storage.handle import StoreHandle
from tdstore.container.storage.open_and_save import over
from tdstore.container.values.nontensor import NonTensor, NonTensorData, NonTensorStack
from tdstore.errors import CorruptStoreError, MismatchError, OptionError, StoreError, TDStoreError
from tdstore.header import Header
from tdstore.io.opening import Location, Storage, find_backend, open_store
from tdstore.store import Cap
from tdstore.types import Path, Write, path_text

if TYPE_CHECKING:
    from tdstore.tensordicts.base import TensorDictBase

Blocks = Callable[[], Iterator[Any]]
"""Returns a new iterator over TensorDicts in memory; the first batch dimension of each is its rows."""
BLOCK_ROWS = 1 << 16
"""The most rows of a block that is read for a store."""


def into_store(blocks: Blocks, location: Location, storage: Storage, options: dict[str, Any]) -> TensorDictBase:
    """Write blocks of rows as a new dataset and return the TensorDict over it.

    The blocks are iterated twice. The first iteration determines the number of rows, the dtypes that hold all rows, and
    the values that are not tensors, which stay in memory. Until the commit readers see the previous dataset.

    Args:
        blocks: returns an iterator over the blocks, at each call from the start.
        location: a path or URL; None for a temporary place.
        storage: the name of a backend; default: determined by the location.
        options: options of the backend.

    Raises:
        MismatchError: the shape of an entry differs between blocks, or it is a tensor in some blocks only.
    """
    form = _form(blocks())
    groups, specs = describe(form)
    backend, text = find_backend(location, storage, "w")
    store, backend = open_store(text, storage=backend, mode="w", **options)
    try:
        store.create(specs)
        if Cap.PARTIAL_WRITE in store.caps:
            at = 0
            for block in blocks():
                rows = slice(at, at + block.batch_size[0], 1)
                store.write([Write(p, (rows,), _leaf(block, p).to(s.dtype)) for p, s in specs.items()])
                at = rows.stop
        else:
            whole = [*blocks()]
            for path, spec in specs.items():
                store.write([Write(path, (), torch.cat([_leaf(b, path).to(spec.dtype) for b in whole]))])
        store.save_header(Header(groups))
        td = over(StoreHandle(store, backend, text, "w", options))
    except BaseException:
        store.close()
        raise
    td._undo = "close"  # with from_parquet(..., location=...) as td: closes it
    return td.lock_() if td._state & (MAPPED | SHARED) else td


def _leaf(block: Any, path: Path) -> Tensor:
    leaf: Tensor = block.get(path)
    return leaf.contiguous()


def _form(blocks: Iterator[Any]) -> Any:
    """Build a TensorDict with the form of all blocks together, whose tensors have no memory."""
    rows = 0
    entries: dict[Path, Any] = {}
    for block in blocks:
        found = dict(_flat(block, ()))
        if rows and found.keys() != entries.keys():
            mismatched = sorted(found.keys() ^ entries.keys())[0]
            raise MismatchError(f"the column {path_text(mismatched)} is in some of the rows only")
        for path, value in found.items():
            entries[path] = _joined(entries.get(path), value, path, rows)
        rows += block.batch_size[0]
    if not entries:
        raise StoreError("there are no rows to store")
    form = Container._resident_class(batch_size=(rows,))
    for path, entry in entries.items():
        if isinstance(entry, list):
            form.set(path, NonTensorStack._make(entry, torch.arange(rows, device="cpu")))
        else:
            form.set(path, entry.expand(rows, *entry.shape[1:]))
    return form


def _flat(td: Any, prefix: Path) -> Iterator[tuple[Path, Any]]:
    for key, value in td.items():
        if isinstance(value, Container):
            yield from _flat(value, (*prefix, key))
        else:
            yield (*prefix, key), value


def _joined(known: Any, value: Any, path: Path, rows: int) -> Any:
    """Merge the facts of an entry: an expanded row with its shape and dtype, or the list of its values."""
    if isinstance(value, NonTensor):
        values = value.tolist() if not isinstance(value, NonTensorData) else [value.data] * len(value)
        if isinstance(known, Tensor):
            raise MismatchError(
                f"the column {path_text(path)} has numbers before row {rows}, and none there",
                hint="say what it is: dtype=, or a converter of the reader",
            )
        return [*known, *values] if known else values
    if isinstance(known, list):
        raise MismatchError(f"the column {path_text(path)} has text before row {rows}, and numbers there")
    if known is not None and known.shape[1:] != value.shape[1:]:
        raise MismatchError(
            f"the column {path_text(path)} has cells of {list(known.shape[1:])} before row {rows}, "
            f"of {list(value.shape[1:])} there"
        )
    dtype = value.dtype if known is None else torch.promote_types(known.dtype, value.dtype)
    return torch.zeros((), dtype=dtype, device="cpu").expand(1, *value.shape[1:])


class Sizes(NamedTuple):
    """The arguments of readers that determine batch size and device, under their names."""

    auto_batch_size: bool
    batch_dims: int | None
    device: Any
    batch_size: Any


class Target(NamedTuple):
    """The dataset to write rows to, if there is one."""

    location: Location
    storage: Storage
    options: dict[str, Any]

    @property
    def is_set(self) -> bool:
        """Check whether rows go to a dataset."""
        return self.location is not None or self.storage is not None

    def write(self, blocks: Blocks, sizes: Sizes) -> TensorDictBase:
        """Write blocks of rows.

        Raises:
            OptionError: another batch size than the rows, or a device, was requested.
        """
        if sizes.auto_batch_size or sizes.batch_size is not None or sizes.device is not None:
            raise OptionError(
                "rows that go into a store have one batch dimension and no device",
                hint="leave out batch_size, auto_batch_size and device, and change them on the result",
            )
        return into_store(blocks, self.location, self.storage, self.options)


@contextmanager
def reading(path: object) -> Iterator[None]:
    """Name the file in the error of a reader that cannot parse it."""
    try:
        yield
    except (ValueError, OSError) as error:
        numbered = (
            getattr(error, "errno", None) is not None
        )  # those of Arrow and of the JSON reader of pandas have none
        if numbered or isinstance(error, (TDStoreError, FileNotFoundError)):
            raise
        raise CorruptStoreError(
            f"{path}: {error}", url=str(path), hint="the file is damaged, or does not fit the arguments"
        ) from error
