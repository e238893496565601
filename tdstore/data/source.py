"""Where rows come from: a container, or a location that each process opens once, when it is needed."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import NoneType
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

import tdstore
from tdstore import Cap, MemoryMappedTensor, PersistentTensorDict, TensorDict, TensorDictBase
from tdstore.arguments import as_list, refuse_type
from tdstore.engine import expect_ranges
from tdstore.errors import DimensionError, InvalidTypeError
from tdstore.registry import registry
from tdstore.types import NestedKey

Data: TypeAlias = TensorDictBase | str | os.PathLike[str]
Transform: TypeAlias = Callable[[TensorDictBase], TensorDictBase]
Rows: TypeAlias = NDArray[np.int64]
ALIGN = 64
Allocator: TypeAlias = Callable[[int], torch.Tensor]
"""Allocates memory of so many bytes, as a tensor of bytes."""


class Source:
    """Rows of a container or of a dataset at a location.

    It is pickled as the location and the options, or with the container. A process opens the location once: a fork
    does not use the connection of its parent.

    Args:
        data: a container with a batch dimension, or a location for `tdstore.open`.
        columns: the keys to read. Default: all.
        options: of `tdstore.open`, such as `storage`; only with a location.
        ranges: about how many ranges of bytes the first read needs. A bucket opens connections for them meanwhile.

    Raises:
        InvalidTypeError: the data is neither a container nor a location, or there are options for a container.
    """

    def __init__(
        self,
        data: Data,
        columns: Sequence[NestedKey] | None = None,
        options: Mapping[str, Any] | None = None,
        ranges: int = 0,
    ) -> None:
        if not isinstance(options, (Mapping, NoneType)):
            raise refuse_type("options", "a dict", options)
        options = dict(options or {})
        if not tdstore.is_tensor_collection(data):
            data, options = registry().locate(data, options)
        if tdstore.is_tensor_collection(data):
            if options:
                raise InvalidTypeError(f"options={options!r} are for a location, not for a {type(data).__name__}")
        elif not isinstance(data, (str, os.PathLike)):
            raise InvalidTypeError(
                f"rows of a {type(data).__name__}: `data` is a TensorDict, a path or a URL",
                hint="tdstore.from_any() makes a TensorDict of tables and other objects",
            )
        self.data = data
        if columns is not None:
            columns = [columns] if isinstance(columns, str) else as_list(columns, "columns", "a sequence of keys")
        self.columns = columns
        self.options = options
        self._ranges = ranges
        self._opened: TensorDictBase | None = None
        self._process = 0
        self._empty: tuple[tuple[NestedKey, ...], TensorDictBase | None] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": None, "_process": 0, "_empty": None}

    @property
    def place(self) -> str:
        """The location, or the class of the container, for messages."""
        if isinstance(self.data, (str, os.PathLike)):
            return os.fspath(self.data)
        return f"a {type(self.data).__name__} of {self.size} rows"

    @property
    def container(self) -> TensorDictBase:
        """The container, opened in this process."""
        if not isinstance(self.data, (str, os.PathLike)):
            return self.data
        if self._opened is None or self._process != os.getpid():
            with expect_ranges(self._ranges):
                self._opened, self._process = tdstore.open(self.data, **self.options), os.getpid()
        return self._opened

    @property
    def size(self) -> int:
        """The number of rows."""
        container = self.container
        if not container.batch_size:
            raise DimensionError(f"rows of {type(container).__name__} without batch dimensions: its first one is rows")
        return int(container.batch_size[0])

    @property
    def concurrent(self) -> bool:
        """Whether several threads may read at once: for a location as its backend declares, for a container True."""
        if not isinstance(self.data, (str, os.PathLike)):
            return True
        storage = self.options.get("storage")
        backend = registry().get(storage) if isinstance(storage, str) else registry().resolve(self.data)
        return backend is not None and Cap.CONCURRENT_READ in backend.caps

    def read(self, rows: Rows, allocator: Allocator | None = None) -> TensorDictBase:
        """Read rows of all columns into fresh memory, by one read of the store.

        Args:
            rows: int64 row numbers of any shape, which becomes the batch size.
            allocator: allocates the memory of all tensors of the batch together. It is not called where a column is no
                plain tensor, such as strings: how much memory that needs is known when it is read.
        """
        flat, container = rows.reshape(-1), self.container
        if (
            allocator is not None
            and rows.ndim == 1
            and flat.size
            and (empty := self._empty_rows(container)) is not None
        ):
            index: Any = torch.from_numpy(np.ascontiguousarray(rows))
            if flat.size > 1 and bool((np.diff(flat) == 1).all()):
                index = slice(int(flat[0]), int(flat[0]) + flat.size)
            return container.read(index, keys=self.columns, out=uninitialized_rows(empty, flat.size, allocator))
        # A slice of tensors in memory would be a view, which a transform must not change in place.
        sliced = not isinstance(container, TensorDict) or container.is_memmap()
        if sliced and flat.size > 1 and rows.ndim == 1 and bool((np.diff(flat) == 1).all()):
            return container.read(slice(int(flat[0]), int(flat[0]) + flat.size), keys=self.columns)
        return container.read(torch.from_numpy(np.ascontiguousarray(rows)), keys=self.columns)

    def _empty_rows(self, container: TensorDictBase) -> TensorDictBase | None:
        """Return no rows of all columns; None where one of them is no plain tensor, or of other containers."""
        if container is self.data and isinstance(container, TensorDict):  # it may change between two batches
            return _plain(container[:0] if self.columns is None else container[:0].select(*self.columns))
        if not isinstance(container, (TensorDict, PersistentTensorDict)):
            return None
        keys = tuple(container.keys(True, True)) if isinstance(container, PersistentTensorDict) else ()
        if self._empty is None or self._empty[0] != keys:
            self._empty = keys, _plain(container.read(slice(0, 0), keys=self.columns))
        return self._empty[1]

    def column(self, key: NestedKey) -> torch.Tensor:
        """Read one column whole.

        Raises:
            InvalidTypeError: the entry is not a tensor.
        """
        value = self.container.read(None, keys=[key]).get(key)
        if not isinstance(value, torch.Tensor):
            raise InvalidTypeError(f"{key!r} of {self.place} is a {type(value).__name__}, not a tensor")
        return value


def uninitialized_rows(empty: TensorDictBase, rows: int, allocator: Allocator) -> TensorDictBase:
    """Return a TensorDict of uninitialized rows, whose tensors share one allocation.

    Args:
        empty: no rows, of plain tensors.
        rows: the number of rows.
        allocator: allocates the memory.
    """
    places: list[tuple[int, int]] = []
    used = 0
    for leaf in empty.values(True, True):
        nbytes = rows * torch.Size(leaf.shape[1:]).numel() * leaf.dtype.itemsize
        places.append((used, used + nbytes))
        used += -(-nbytes // ALIGN) * ALIGN
    memory = allocator(used)
    made: TensorDictBase = _over(empty, rows, (memory[start:stop] for start, stop in places))
    return made


def _over(empty: Any, rows: int, parts: Iterator[torch.Tensor]) -> Any:
    # Not a function within the other: one that calls itself would hold the memory until Python looks for cycles.
    if isinstance(empty, TensorDict):
        entries = {key: _over(entry, rows, parts) for key, entry in empty.items()}
        return TensorDict(entries, (rows, *empty.batch_size[1:]), names=empty.names, device=empty.device)
    return next(parts).view(empty.dtype).view(rows, *empty.shape[1:])


def _plain(read: TensorDictBase) -> TensorDictBase | None:
    """Return a TensorDict if each of its entries is a plain tensor, or a TensorDict of such entries."""
    for value in read.values():
        if type(value) is TensorDict:
            if value.batch_size[:1] != (0,) or _plain(value) is None:
                return None
        elif not (
            type(value) in (torch.Tensor, MemoryMappedTensor)
            and value.layout is torch.strided
            and value.is_cpu
            and not (value.is_nested or value.requires_grad)
        ):
            return None
    return read
