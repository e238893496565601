"""The engine of xarray, `xarray.open_dataset(location, engine="tdstore")`: any stored TensorDict, read lazily."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from xarray import Dataset, Variable
from xarray.backends import BackendArray, BackendEntrypoint
from xarray.core import indexing

from tdstore.container.core.container import GROUP, LEAF
from tdstore.container.entries.unbatched import UnbatchedTensor
from tdstore.container.storage.open_and_save import open_container
from tdstore.container.values.nontensor import NonTensorStack
from tdstore.convert.objects.arrays import value_array
from tdstore.convert.tables.arrow import exactly
from tdstore.dtypes import is_bit_pattern, numpy_dtype
from tdstore.errors import InvalidArgumentError, UnsupportedError
from tdstore.types import Path

Array = np.ndarray[Any, Any]
Dims = tuple[str, ...]
SEPARATOR = "."
"""Joins the keys of nested entries to the names of variables."""


class TensorDictBackend(BackendEntrypoint):
    """Open stored TensorDicts as datasets of xarray; entry point `tdstore` of the group `xarray.backends`.

    Entries become variables, those of nested TensorDicts with a dot in their names. Dimensions of the batch keep their
    names, or are `dim_0` and so on; those of features are `obs_dim_0`. bfloat16 and float8 become float32. Values per
    row are read at once, one value for all rows is an attribute.
    """

    description = "Open TensorDicts of any storage of tdstore"
    open_dataset_parameters = ("filename_or_obj", "drop_variables", "group", "storage", "options")

    def open_dataset(  # type: ignore[override]  # engines have arguments of their own
        self,
        filename_or_obj: str | os.PathLike[str],
        *,
        drop_variables: str | Iterable[str] | None = None,
        group: str | tuple[str, ...] | None = None,
        storage: str | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> Dataset:
        """Open a dataset; `chunks=` of `xarray.open_dataset` makes the variables arrays of dask.

        Args:
            filename_or_obj: a path or URL.
            drop_variables: names of variables to leave out.
            group: the key of a nested TensorDict to open instead of all.
            storage: the name of a backend; default: determined by the location.
            options: options of the backend, such as `storage_options`.

        Raises:
            StoreError, PluginError: as `tdstore.open`. UnsupportedError: rows of an entry differ in shape.
            InvalidArgumentError: two variables would have the same name.
        """
        dropped = {drop_variables} if isinstance(drop_variables, str) else {*(drop_variables or ())}
        td = open_container(filename_or_obj, storage=storage, mode="r", subpath=group, **(options or {}))
        try:
            variables: dict[str, Variable] = {}
            attrs: dict[str, Any] = {}
            _collect(td, (), (), dropped, variables, attrs)
            dataset = Dataset(variables, attrs=attrs)
        except BaseException:
            td.close()
            raise
        dataset.set_close(td.close)
        return dataset

    def guess_can_open(self, filename_or_obj: object) -> bool:
        """Return False: the engine is named, since other engines open files that tdstore opens, too."""
        return False


class StoredArray(BackendArray):
    """The tensor of one entry as an array that is read when it is indexed.

    Args:
        td: the TensorDict; it is pickled with its location.
        key: the key of the entry.
    """

    def __init__(self, td: Any, key: str) -> None:
        self._td = td
        self._key = key
        shape, dtype = td._leaf_shape(key), td._leaf_facts(key).dtype
        self.shape = tuple(shape)
        wide = is_bit_pattern(dtype) and dtype.is_floating_point
        self.dtype = np.dtype(np.float32) if wide else np.dtype(numpy_dtype(dtype))

    def __getitem__(self, key: indexing.ExplicitIndexer) -> Any:
        """Read a part."""
        return indexing.explicit_indexing_adapter(key, self.shape, indexing.IndexingSupport.OUTER, self._read)

    def _read(self, index: tuple[Any, ...]) -> Array:
        """Read the product of the indices of all dimensions.

        The store is asked for rows and for slices; indices of further dimensions select from what was read.
        """
        asked: list[Any] = []
        after: list[Any] = []
        for at, part in enumerate(index):
            first, then = _split(part, self.shape[at], may_gather=at == 0)
            asked.append(first)
            after.append(then)
        array = exactly(self._td.get_at(self._key, tuple(asked)), (self._key,)).numpy() if asked else self._whole()
        for at in reversed(range(len(after))):  # from the last dimension, since a number removes its own
            if after[at] is not None:
                array = array[(slice(None),) * at + (after[at],)]
        return array

    def _whole(self) -> Array:
        return exactly(self._td.get(self._key), (self._key,)).numpy()


def _split(part: Any, size: int, *, may_gather: bool) -> tuple[Any, Any]:
    """Split an index of one dimension into one for the store and one for the array that was read, None for all."""
    if isinstance(part, slice):
        start, stop, step = part.indices(size)
        if step > 0:
            return slice(start, stop, step), None
        rows = range(start, stop, step)
        return (slice(rows[-1], rows[0] + 1, -step), slice(None, None, -1)) if rows else (slice(0, 0), None)
    if isinstance(part, np.ndarray):
        places = np.where(part < 0, part + size, part)
        return (torch.from_numpy(places), None) if may_gather else (slice(None), places)
    at = int(part) + size if part < 0 else int(part)
    return slice(at, at + 1), 0


def _collect(
    td: Any, prefix: Path, dims: Dims, dropped: set[str], variables: dict[str, Variable], attrs: dict[str, Any]
) -> None:
    """Add the entries of a TensorDict, whose batch begins with the dimensions `dims`."""
    names = td.names[len(dims) :]
    own = [name or SEPARATOR.join((*prefix, f"dim_{len(dims) + i}")) for i, name in enumerate(names)]
    dims = (*dims, *own)
    for key in td.keys():  # noqa: SIM118 - iterating a TensorDict gives its rows
        name = SEPARATOR.join((*prefix, key))
        if name in dropped:
            continue
        if name in variables or name in attrs:
            raise InvalidArgumentError(f"two entries would be the variable {name!r}: rename one, or open one group")
        kind = td._kind(key)
        if kind == GROUP:
            _collect(td.get(key), (*prefix, key), dims, dropped, variables, attrs)
        elif kind == LEAF:
            if -1 in td._leaf_shape(key):
                raise UnsupportedError(
                    f"the rows of entry {name!r} differ in shape, and a variable of xarray is one array",
                    hint=f"drop_variables=[{name!r}] leaves it out; td.to_padded_tensor() makes one array",
                )
            array = StoredArray(td, key)
            variables[name] = Variable(_dims(dims, name, len(array.shape)), indexing.LazilyIndexedArray(array))
        else:
            value = td.get(key)
            if isinstance(value, UnbatchedTensor):
                tensor = exactly(value.data, (*prefix, key))
                variables[name] = Variable(_dims((), name, tensor.ndim), tensor.numpy())
            elif isinstance(value, NonTensorStack):
                cells = value_array(value)
                variables[name] = Variable(_dims(dims, name, cells.ndim), cells)
            else:
                attrs[name] = value.data if hasattr(value, "data") else value


def _dims(batch: Dims, name: str, ndim: int) -> Dims:
    return (*batch, *(f"{name}_dim_{i}" for i in range(ndim - len(batch))))
