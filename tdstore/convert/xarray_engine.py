"""The engine of xarray: `xarray.open_dataset(location, engine="tdstore")` and `open_datatree` read lazily."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

import numpy as np
import torch
from xarray import Dataset, DataTree, Variable
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
from tdstore.types import Path, path_text

if TYPE_CHECKING:
    from tdstore.tensordicts.base import TensorDictBase

Array = np.ndarray[Any, Any]
Dims = tuple[str, ...]
SEPARATOR = "."
"""Joins the keys of nested entries to the names of variables."""


class OpenOptions(TypedDict, total=False):
    """Arguments by name of `xarray.open_dataset`, `open_datatree` and `open_groups` with this engine."""

    drop_variables: str | Iterable[str] | None
    """Names of variables to leave out. In a tree: in all nodes, or with the names of their nodes, "next.obs"."""
    group: str | tuple[str, ...] | None
    """The key of a nested TensorDict to open instead of all, also as "a/b"."""
    storage: str | None
    """The name of a backend; default: determined by the location."""
    options: Mapping[str, Any] | None
    """Options of the backend."""
    storage_options: Mapping[str, Any] | None
    """Credentials and endpoint of a URL."""


class TensorDictBackend(BackendEntrypoint):
    """Open stored TensorDicts as datasets and trees of xarray; entry point `tdstore` of the group `xarray.backends`.

    Entries become variables. Nested TensorDicts are nodes of a tree; in a dataset, the names of their variables have a
    dot. Dimensions of the batch keep their names, or are `dim_0` and so on; those of features are `obs_dim_0`. bfloat16
    and float8 become float32. Values per row are read at once, one value for all rows is an attribute.
    """

    description = "Open TensorDicts of any storage of tdstore"
    supports_groups = True
    open_dataset_parameters = ("filename_or_obj", *OpenOptions.__annotations__)

    def open_dataset(  # type: ignore[override]  # engines have arguments of their own
        self, filename_or_obj: str | os.PathLike[str], **options: Unpack[OpenOptions]
    ) -> Dataset:
        """Open a dataset; `chunks=` of `xarray.open_dataset` makes the variables arrays of dask.

        Args:
            filename_or_obj: a path or URL.
            **options: see `OpenOptions`.

        Raises:
            StoreError, PluginError: as `tdstore.open`. UnsupportedError: rows of an entry differ in shape.
            InvalidArgumentError: two variables would have the same name.
        """
        with _opened(filename_or_obj, options) as td:
            variables: dict[str, Variable] = {}
            attrs: dict[str, Any] = {}
            _collect(td, (), (), _dropped(options), variables, attrs)
            dataset = Dataset(variables, attrs=attrs)
        dataset.set_close(td.close)
        return dataset

    def open_datatree(  # type: ignore[override]  # engines have arguments of their own
        self, filename_or_obj: str | os.PathLike[str], **options: Unpack[OpenOptions]
    ) -> DataTree:
        """Open a tree with a node for each nested TensorDict, as `xarray.open_datatree` does.

        Args:
            filename_or_obj: a path or URL.
            **options: see `OpenOptions`.

        Raises:
            StoreError, PluginError: as `tdstore.open`. UnsupportedError: rows of an entry differ in shape.
            InvalidArgumentError: a name has a slash.
        """
        groups = self.open_groups_as_dict(filename_or_obj, **options)
        tree: DataTree = DataTree.from_dict(groups)
        tree.set_close(groups["/"]._close)
        return tree

    def open_groups_as_dict(  # type: ignore[override]  # engines have arguments of their own
        self, filename_or_obj: str | os.PathLike[str], **options: Unpack[OpenOptions]
    ) -> dict[str, Dataset]:
        """Open a dataset for each nested TensorDict, by its path: "/", "/next", as `xarray.open_groups` does.

        The dataset at "/" closes them all. Arguments and errors are those of `open_datatree`.
        """
        found: dict[str, Dataset] = {}
        with _opened(filename_or_obj, options) as td:
            _collect_groups(td, (), (), _dropped(options), found)
        found["/"].set_close(td.close)
        return found

    def guess_can_open(self, filename_or_obj: object) -> bool:
        """Return False: the engine is named, since other engines open files that tdstore opens, too."""
        return False


@contextmanager
def _opened(location: str | os.PathLike[str], options: OpenOptions) -> Iterator[TensorDictBase]:
    """Open a TensorDict, and close it only if an error follows."""
    of_backend = dict(options.get("options") or {})
    if options.get("storage_options") is not None:
        of_backend["storage_options"] = options["storage_options"]
    group = options.get("group")
    at = group.strip("/") or None if isinstance(group, str) else group  # the groups of xarray begin with a slash
    td = open_container(location, storage=options.get("storage"), mode="r", subpath=at, **of_backend)
    try:
        yield td
    except BaseException:
        td.close()
        raise


def _dropped(options: OpenOptions) -> set[str]:
    names = options.get("drop_variables")
    return {names} if isinstance(names, str) else {*(names or ())}


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


def _collect_groups(td: Any, prefix: Path, dims: Dims, dropped: set[str], found: dict[str, Dataset]) -> None:
    """Add the dataset of a TensorDict, whose batch begins with the dimensions `dims`, and those nested in it."""
    variables: dict[str, Variable] = {}
    attrs: dict[str, Any] = {}
    below: list[tuple[str, Any, Dims]] = []
    _collect(td, prefix, dims, dropped, variables, attrs, below)
    for name in (*variables, *(key for key, _, _ in below)):
        if "/" in name:
            raise InvalidArgumentError(
                f"the entry {path_text((*prefix, name))} has a slash in its name, which separates the nodes of a tree",
                hint="rename it, or use xarray.open_dataset",
            )
    found["/" + "/".join(prefix)] = Dataset(variables, attrs=attrs)
    for key, nested, its_dims in below:
        _collect_groups(nested, (*prefix, key), its_dims, dropped, found)


def _collect(
    td: Any,
    prefix: Path,
    dims: Dims,
    dropped: set[str],
    variables: dict[str, Variable],
    attrs: dict[str, Any],
    below: list[tuple[str, Any, Dims]] | None = None,
) -> None:
    """Add the entries of a TensorDict, whose batch begins with the dimensions `dims`.

    Args:
        td: the TensorDict.
        prefix: its path.
        dims: the dimensions of the batch that it is in.
        dropped: names that are left out.
        variables: where variables are added.
        attrs: where attributes are added.
        below: where nested TensorDicts are added, with the dimensions of the batch that they are in, and names are
            those in this one; None: their entries are added like its own, by dotted names.
    """
    names = td.names[len(dims) :]
    own = [name or SEPARATOR.join((*prefix, f"dim_{len(dims) + i}")) for i, name in enumerate(names)]
    dims = (*dims, *own)
    for key in td.keys():  # noqa: SIM118 - iterating a TensorDict gives its rows
        full = SEPARATOR.join((*prefix, key))
        name = full if below is None else key
        if full in dropped or name in dropped:
            continue
        if name in variables or name in attrs:
            raise InvalidArgumentError(f"two entries would be the variable {name!r}: rename one, or open one group")
        kind = td._kind(key)
        if kind == GROUP and below is not None:
            below.append((key, td.get(key), dims))
        elif kind == GROUP:
            _collect(td.get(key), (*prefix, key), dims, dropped, variables, attrs)
        elif kind == LEAF:
            if -1 in td._leaf_shape(key):
                raise UnsupportedError(
                    f"the rows of entry {full!r} differ in shape, and a variable of xarray is one array",
                    hint=f"drop_variables=[{full!r}] leaves it out; td.to_padded_tensor() makes one array",
                )
            array = StoredArray(td, key)
            variables[name] = Variable(_dims(dims, full, len(array.shape)), indexing.LazilyIndexedArray(array))
        else:
            value = td.get(key)
            if isinstance(value, UnbatchedTensor):
                tensor = exactly(value.data, (*prefix, key))
                variables[name] = Variable(_dims((), full, tensor.ndim), tensor.numpy())
            elif isinstance(value, NonTensorStack):
                cells = value_array(value)
                variables[name] = Variable(_dims(dims, full, cells.ndim), cells)
            else:
                attrs[name] = value.data if hasattr(value, "data") else value


def _dims(batch: Dims, name: str, ndim: int) -> Dims:
    return (*batch, *(f"{name}_dim_{i}" for i in range(ndim - len(batch))))
