"""Objects of other packages: tables, labelled arrays and opened files. Packages that are not imported made none."""

from __future__ import annotations

import itertools
import math
import sys
from typing import Any, NamedTuple, cast

import numpy as np
import torch

from tdstore.container.core.container import Container
from tdstore.container.entries.unbatched import UnbatchedTensor
from tdstore.container.functions.construct_and_join import from_dict
from tdstore.container.storage.open_and_save import open_container
from tdstore.container.values.nontensor import NonTensorStack
from tdstore.convert.opened import place_of_group
from tdstore.convert.tables.arrow import column_values, exports_arrow, from_arrow, imported
from tdstore.convert.tables.pandas import from_pandas, series_column
from tdstore.dtypes import torch_ready
from tdstore.errors import InvalidTypeError, UnsupportedError
from tdstore.io.opening import Location


def from_foreign(obj: Any) -> object:
    """Convert an object of another package to a container, a tensor or a list; return any other object unchanged.

    Args:
        obj: any object.

    Raises:
        InvalidTypeError: the object is a query or a stream, which has no rows before it is run.
    """
    if (place := place_of_group(obj)) is not None:
        location, path, backend = place
        return open_container(cast(Location, location), storage=backend, mode="r", subpath=path or None)
    pandas = sys.modules.get("pandas")
    if pandas is not None and isinstance(obj, pandas.DataFrame):
        return from_pandas(obj)
    if pandas is not None and isinstance(obj, (pandas.Series, pandas.Index)):
        return series_column(obj.to_series() if isinstance(obj, pandas.Index) else obj)
    package = type(obj).__module__.partition(".")[0]
    if package == "xarray":
        return _from_xarray(obj)
    if package == "datasets" and (found := _from_hugging_face(obj)) is not None:
        return found
    for query in _QUERIES:
        if package == query.module.partition(".")[0] and _is(obj, query.module, query.name):
            raise InvalidTypeError(
                f"a {query.module}.{query.name} has no rows in memory: {query.what}", hint=query.hint
            )
    if exports_arrow(obj) and not isinstance(obj, Container):
        found = imported(obj)
        return from_arrow(found) if hasattr(found, "schema") else column_values(found)
    return obj


class _Query(NamedTuple):
    """A class of another package whose objects have rows only after a step that the caller must ask for."""

    module: str
    name: str
    what: str
    hint: str


_QUERIES = (
    _Query("pyarrow.ipc", "RecordBatchFileReader", "it is a file", "pass reader.read_all()"),
    _Query("polars", "LazyFrame", "it is a query", "pass frame.collect()"),
    _Query("datasets", "IterableDataset", "it is a stream", "pass datasets.Dataset.from_list(list(stream.take(n)))"),
    _Query("datasets.iterable_dataset", "IterableColumn", "it is a stream", "pass list(column)"),
    _Query("pyarrow.dataset", "Dataset", "it is files", "pass dataset.to_table(), or use tdstore.from_parquet"),
    _Query("pyarrow.dataset", "Scanner", "it is a query", "pass scanner.to_table()"),
)


def _is(obj: Any, module: str, name: str) -> bool:
    cls = getattr(sys.modules.get(module), name, None)
    return isinstance(cls, type) and isinstance(obj, cls)


# -- Hugging Face ------------------------------------------------------------------------------
def _from_hugging_face(obj: Any) -> object:
    """Convert a dataset as it shows its rows, one of its columns, or its table; return None for other objects."""
    if _is(obj, "datasets.table", "Table"):
        return from_arrow(obj.table)
    if _is(obj, "datasets.arrow_dataset", "Column"):
        names, source = [obj.column_name], obj.source
        while not _is(source, "datasets", "Dataset"):
            names.insert(0, source.column_name)
            source = source.source
        rows = _from_hugging_face(source if _has_transform(source) else source.select_columns(names[0]))
        return cast(Container, rows).get(tuple(names))
    if not _is(obj, "datasets", "Dataset"):
        return None
    if _has_transform(obj):  # its rows are what the function makes of those that are stored
        return from_dict(Container._resident_class, obj[:], [len(obj)], False, None, None, None)
    shown = obj.format
    return from_arrow(obj.with_format("arrow", columns=None if shown["output_all_columns"] else shown["columns"])[:])


def _has_transform(dataset: Any) -> bool:
    return bool(dataset.format["type"] == "custom")


# -- xarray --------------------------------------------------------------------------------------
def _from_xarray(obj: Any) -> Any:
    xarray = sys.modules["xarray"]
    if isinstance(obj, xarray.DataArray):
        return _values_of(obj.variable, obj.name)
    if isinstance(obj, xarray.Variable):
        return _values_of(obj, "a variable")
    if isinstance(obj, xarray.Dataset):
        return _from_dataset(obj)
    if isinstance(obj, xarray.DataTree):
        made = _from_dataset(obj.to_dataset(inherit=False))
        made = made if obj.has_data else Container._resident_class()
        for name, node in obj.children.items():
            made.set(name, _from_xarray(node))
        return made
    return obj


def _from_dataset(dataset: Any) -> Any:
    """Convert the variables and coordinates of an `xarray.Dataset`; the first dimensions that all share are the batch.

    A coordinate of other dimensions is one entry for all rows.
    """
    variables = [value.dims for value in (dataset.data_vars or dataset.coords).values()]
    dims = [names[0] for names in itertools.takewhile(lambda names: len({*names}) == 1, zip(*variables, strict=False))]
    batch = [dataset.sizes[dim] for dim in dims]
    made = Container._resident_class(batch_size=batch, names=[str(dim) for dim in dims] or None)
    for name, value in (*dataset.coords.items(), *dataset.data_vars.items()):
        found, has_rows = _values_of(value.variable, name), [*value.dims[: len(dims)]] == dims
        if has_rows and isinstance(found, list):
            rows = np.empty(math.prod(batch), object)
            rows[:] = [*itertools.chain.from_iterable(found)] if len(batch) > 1 else found
            made.set(str(name), NonTensorStack._make([*rows], torch.arange(len(rows), device="cpu").reshape(batch)))
        elif has_rows:
            made.set(str(name), found)
        elif isinstance(found, torch.Tensor):
            made.set(str(name), UnbatchedTensor(found))
        else:
            made.set_non_tensor(str(name), found)
    return made


def _values_of(variable: Any, name: Any) -> torch.Tensor | list[Any]:
    """Convert an array: numbers to a tensor, dates to int64 nanoseconds, text and objects to values."""
    array = variable.to_numpy()
    if array.dtype.kind in "mM":
        array = array.astype(f"{array.dtype.kind}8[ns]").astype(np.int64)
    if array.dtype.kind in "biufc":
        return torch.from_numpy(torch_ready(array if array.flags.writeable else array.copy()))
    if array.dtype.kind not in "OSUT":
        raise UnsupportedError(
            f"the variable {name!r} has dtype {array.dtype}, which is neither numbers nor text", hint="drop or cast it"
        )
    found: list[Any] = array.tolist()
    return found
