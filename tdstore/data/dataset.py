"""A map-style dataset of torch over the rows of a container."""

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from tdstore import TensorDictBase
from tdstore.arguments import as_device, check_callable
from tdstore.errors import IndexKindError, OutOfRangeError
from tdstore.types import NestedKey

from .source import Allocator, Data, Source, Transform
from .transfer import allocate_pinned


class TensorDictDataset(Dataset[TensorDictBase]):
    """Rows of a container or a location, for `torch.utils.data.DataLoader`.

    A batch of a loader is one read of the store, and one TensorDict: pass `collate_fn=TensorDictDataset.collate`.
    The dataset is pickled as its location and options, and each worker process opens the location once. It has no
    `state_dict`, so that a checkpoint of torchdata's `StatefulDataLoader` holds the position and not the rows.

    Args:
        data: a container with a batch dimension, or a location for `tdstore.open`.
        columns: the keys to read. Default: all.
        transform: a function of what was read: a row, or a batch of rows.
        device: where rows are moved after the transform. In worker processes, leave it None.
        options: of `tdstore.open`, such as `storage`; only with a location.

    Raises:
        InvalidTypeError: the data is neither a container nor a location.

    Example:
        >>> from torch.utils.data import DataLoader
        >>> tdstore.TensorDict({"a": torch.arange(10)}, [10]).save("frames.h5").close()
        >>> dataset = TensorDictDataset("frames.h5")
        >>> len(dataset), dataset[3]["a"].item()
        (10, 3)
        >>> loader = DataLoader(dataset, batch_size=4, collate_fn=TensorDictDataset.collate)
        >>> [batch["a"].tolist() for batch in loader]
        [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    """

    def __init__(
        self,
        data: Data,
        columns: Sequence[NestedKey] | None = None,
        transform: Transform | None = None,
        device: torch.device | str | None = None,
        *,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self._source = Source(data, columns, options)
        if transform is not None:
            check_callable(transform, "transform")
        self.transform = transform
        self.device = None if device is None else as_device(device)

    @property
    def _allocator(self) -> Allocator | None:
        return allocate_pinned if self.device is not None and self.device.type == "cuda" else None

    def __len__(self) -> int:
        return self._source.size

    def __getitem__(self, row: int) -> TensorDictBase:
        return self._finished(self._source.read(self._checked([row]))[0])

    def __getitems__(self, rows: Sequence[int]) -> TensorDictBase:
        """Read a batch of rows at once, as a `DataLoader` requests them."""
        return self._finished(self._source.read(self._checked(rows), self._allocator))

    @staticmethod
    def collate(batch: TensorDictBase | Sequence[TensorDictBase]) -> TensorDictBase:
        """Return a batch that was read as one, or stack rows that were read one by one: a `collate_fn` for loaders.

        Rows come one by one from datasets around this one that have no `__getitems__`, such as `ConcatDataset`.
        """
        return batch if isinstance(batch, TensorDictBase) else TensorDictBase.stack(batch)

    def __repr__(self) -> str:
        return f"TensorDictDataset({self._source.place!r}, rows={len(self)})"

    def _checked(self, rows: Sequence[int]) -> np.ndarray[Any, np.dtype[np.int64]]:
        size, numbers = self._source.size, _as_numbers(rows)
        wrong = numbers[(numbers < -size) | (numbers >= size)]
        if wrong.size:
            raise OutOfRangeError(f"row {wrong[0]} of {self._source.place}, which has {size} rows")
        return np.where(numbers < 0, numbers + size, numbers)

    def _finished(self, rows: TensorDictBase) -> TensorDictBase:
        made = rows if self.transform is None else self.transform(rows)
        if self.device is None:
            return made
        return made.to(self.device, non_blocking=self._allocator is not None)


def _as_numbers(rows: Sequence[int]) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return row numbers as an array; numpy alone would cut 2.7 to 2, and read "2" as one.

    Raises:
        IndexKindError: one is no int. OutOfRangeError: no dataset has as many rows.
    """
    found = np.asarray(rows)
    if found.dtype.kind not in "iu":
        try:
            found = np.array([operator.index(row) for row in rows], dtype=np.int64)
        except TypeError:
            raise IndexKindError(f"rows of a dataset are ints, not {rows!r:.80}") from None
        except OverflowError:
            raise OutOfRangeError(f"no dataset has a row {rows!r:.80}") from None
    return found.astype(np.int64, copy=False)
