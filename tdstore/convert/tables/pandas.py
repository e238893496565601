"""From and to pandas frames."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from tdstore.arguments import refuse_type
from tdstore.container.core.container import Container
from tdstore.convert import packages
from tdstore.convert.tables.arrow import column_twice, exactly, joined, of_columns, row_values
from tdstore.convert.tables.row_blocks import refuse_ragged, with_rows
from tdstore.dtypes import torch_ready
from tdstore.errors import InvalidArgumentError
from tdstore.types import DeviceLike, Path, SizeLike, path_text

if TYPE_CHECKING:
    import pandas as pd

    from tdstore.tensordicts.resident.tensordict import TensorDict


def from_pandas(
    dataframe: pd.DataFrame,
    *,
    auto_batch_size: bool = False,
    batch_dims: int | None = None,
    device: DeviceLike | None = None,
    batch_size: SizeLike | None = None,
    separator: str | None = None,
    dtype: torch.dtype | None = None,
) -> TensorDict:
    """Make a TensorDict from the columns of a pandas frame, one row per batch position.

    Numbers become tensors (missing ones NaN, in float64), dates int64 nanoseconds, arrays or lists of numbers of one
    shape per cell a tensor with feature dimensions, everything else one value per row, None where it is missing. So
    are integers with gaps and dates that do not fit into those.
    Categories are replaced by their values. The index is left out.

    Args:
        dataframe: the frame.
        auto_batch_size: whether each level gets the largest batch size that its entries share, instead of one batch
            dimension over the rows.
        batch_dims: with `auto_batch_size`, the largest number of batch dimensions.
        device: the device of the tensors; default: the CPU.
        batch_size: the batch size; default: the number of rows.
        separator: splits the names of columns into nested keys.
        dtype: the dtype of every tensor; default: that of the column.

    Raises:
        InvalidArgumentError: two columns have one name, or both `batch_size` and `auto_batch_size`.

    Example:
        >>> import pandas
        >>> td = from_pandas(pandas.DataFrame({"a": [1, 2], "n.s": ["x", "y"]}), separator=".")
        >>> td["a"], td["n", "s"]
        (tensor([1, 2]), LinkedList(['x', 'y']))
    """
    if not hasattr(dataframe, "iloc"):
        raise refuse_type("what from_pandas() takes", "a DataFrame", dataframe)
    columns = {_name(name): series_column(dataframe.iloc[:, i]) for i, name in enumerate(dataframe.columns)}
    if len(columns) < dataframe.shape[1]:
        raise InvalidArgumentError(f"two columns have the same name: {[str(c) for c in dataframe.columns]}")
    return of_columns(columns, len(dataframe), auto_batch_size, batch_dims, device, batch_size, separator, dtype)


def _name(name: Any) -> Any:
    """Convert the levels of a column index to levels of keys."""
    return tuple(map(str, name)) if isinstance(name, tuple) else str(name)


def series_column(series: Any) -> Tensor | list[Any]:
    """Convert a pandas series to a tensor, or a list of a value per row."""
    pandas = packages.pandas()
    dtype = series.dtype
    if isinstance(dtype, pandas.CategoricalDtype):
        whole = dtype.categories.dtype.kind in "iu" and series.hasnans
        series = series.astype("Int64" if whole else dtype.categories.dtype)
        dtype = series.dtype
    elif isinstance(dtype, pandas.SparseDtype):
        series = series.sparse.to_dense()
        dtype = series.dtype
    if dtype.kind in "mM":
        return _dates(series, pandas)
    if dtype.kind in "biufc" and not (not isinstance(dtype, np.dtype) and series.hasnans):
        return torch.from_numpy(torch_ready(series.to_numpy(getattr(dtype, "numpy_dtype", dtype), copy=True)))
    if dtype.kind in "biufc" and not (dtype.kind in "iu" and (series.abs() > _EXACT).any()):
        return torch.from_numpy(series.to_numpy(np.float64, na_value=np.nan))
    cells = series.astype(object).where(series.notna(), None).to_list()
    return _cells(cells)


_EXACT = 2**53
"""Up to here float64 has every integer."""


def _dates(series: Any, pandas: Any) -> Tensor | list[Any]:
    """Convert dates and durations to int64 nanoseconds; those out of range to values."""
    kind = series.dtype.kind
    if getattr(series.dtype, "tz", None) is not None:
        series = series.dt.tz_convert("UTC").dt.tz_localize(None)
    try:
        return torch.from_numpy(series.dt.as_unit("ns").to_numpy(f"{kind}8[ns]").astype(np.int64))
    except (pandas.errors.OutOfBoundsDatetime, pandas.errors.OutOfBoundsTimedelta):  # not within 292 years of 1970
        plain = "to_pydatetime" if kind == "M" else "to_pytimedelta"
        return [None if pandas.isna(cell) else getattr(cell, plain)() for cell in series]


def _cells(cells: list[Any]) -> Tensor | list[Any]:
    """Convert arrays, or lists of numbers, of one shape and kind to one tensor."""
    if cells and all(isinstance(cell, (list, tuple, np.ndarray)) for cell in cells):
        try:
            array = np.array(cells)
        except ValueError:
            return cells  # they differ in shape
        if array.dtype.kind in "biufc" and array.size:
            return torch.from_numpy(array)
    return cells


def to_pandas(td: Container, separator: str | None) -> pd.DataFrame:
    """Convert to a pandas frame, see `TensorDict.to_pandas`."""
    td = with_rows(td, "a frame")
    columns = columns_of(td, separator)
    return packages.pandas().DataFrame(columns, index=None if columns else range(td.batch_size[0]))


def columns_of(td: Container, separator: str | None) -> dict[str, Any]:
    """Return the columns of a TensorDict with rows: each an array of numbers, or a list of arrays or values."""
    refuse_ragged(td, "a table")
    return _columns(td._resident(), (), td.batch_size[0], separator)


def _columns(td: Any, prefix: Path, rows: int, separator: str | None) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in td.items():
        path = (*prefix, key)
        if key in out:
            raise column_twice(key)
        if isinstance(value, Container):
            if separator is None:
                raise needs_separator(path)
            for name, column in _columns(value._resident(), path, rows, separator).items():
                out[joined(out, key, name, separator)] = column
        elif isinstance(value, Tensor):
            array = exactly(value, path).numpy()
            out[key] = array if array.ndim == 1 else list(array)
        else:
            out[key] = row_values(value, rows)
    return out


def needs_separator(path: Path) -> ValueError:
    """Create the error for a nested TensorDict whose column names need a separator."""
    return ValueError(
        f"the entry {path_text(path)} is a TensorDict, whose columns need names: pass separator='.', or another"
    )
