"""Where rows come from: a container, or a location that each process opens once, when it is needed."""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

import tdstore
from tdstore import Cap, TensorDict, TensorDictBase
from tdstore.engine import expect_ranges
from tdstore.errors import DimensionError, InvalidTypeError
from tdstore.registry import registry
from tdstore.types import NestedKey

Data: TypeAlias = TensorDictBase | str | os.PathLike[str]
Transform: TypeAlias = Callable[[TensorDictBase], TensorDictBase]
Rows: TypeAlias = NDArray[np.int64]


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
        if tdstore.is_tensor_collection(data):
            if options:
                raise InvalidTypeError(f"options={dict(options)!r} are for a location, not for a {type(data).__name__}")
        elif not isinstance(data, (str, os.PathLike)):
            raise InvalidTypeError(f"rows of a {type(data).__name__}: `data` is a TensorDict, a path or a URL")
        self.data = data
        self.columns = None if columns is None else [columns] if isinstance(columns, str) else list(columns)
        self.options = dict(options or {})
        self._ranges = ranges
        self._opened: TensorDictBase | None = None
        self._process = 0

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": None, "_process": 0}

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

    def read(self, rows: Rows) -> TensorDictBase:
        """Read rows of all columns into fresh memory, by one read of the store.

        Args:
            rows: int64 row numbers of any shape, which becomes the batch size.
        """
        flat, container = rows.reshape(-1), self.container
        # A slice of tensors in memory would be a view, which a transform must not change in place.
        sliced = not isinstance(container, TensorDict) or container.is_memmap()
        if sliced and flat.size > 1 and rows.ndim == 1 and bool((np.diff(flat) == 1).all()):
            return container.read(slice(int(flat[0]), int(flat[0]) + flat.size), keys=self.columns)
        return container.read(torch.from_numpy(np.ascontiguousarray(rows)), keys=self.columns)

    def column(self, key: NestedKey) -> torch.Tensor:
        """Read one column whole.

        Raises:
            InvalidTypeError: the entry is not a tensor.
        """
        value = self.container.read(None, keys=[key]).get(key)
        if not isinstance(value, torch.Tensor):
            raise InvalidTypeError(f"{key!r} of {self.place} is a {type(value).__name__}, not a tensor")
        return value
