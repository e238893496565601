"""What stands for missing values of Arrow columns in tensors, and masks of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor

from tdstore.convert import packages
from tdstore.errors import InvalidArgumentError
from tdstore.types import Path, path_text

if TYPE_CHECKING:
    import pyarrow as pa

Nulls: TypeAlias = Literal["raise", "fill", "mask"]


def refuse_nulls(column: pa.Array, path: Path) -> None:
    """Raise an error if a column lacks values, in a row or in the lists and structs of rows.

    Raises:
        InvalidArgumentError: it does; the message names the column.
    """
    types = packages.pyarrow().types
    missing = column.null_count
    if not missing and types.is_struct(column.type):
        for at, part in enumerate(column.flatten()):
            refuse_nulls(part, (*path, column.type.field(at).name))
    elif not missing and _is_list(column.type):
        missing = column.flatten().null_count
    if missing:
        raise InvalidArgumentError(
            f"the column {path_text(path)} lacks {missing} values",
            hint='nulls="fill" puts NaN, 0, False, empty lists or None there; "mask" says where, too',
        )


def fill_nulls(column: pa.Array) -> pa.Array:
    """Fill missing numbers with NaN or 0, flags with False, lists with nothing; leave the other values missing."""
    arrow = packages.pyarrow()
    kind, types = column.type, arrow.types
    if types.is_struct(kind):
        names = [kind.field(at).name for at in range(kind.num_fields)]
        parts = [fill_nulls(part) for part in column.flatten()]
        return arrow.StructArray.from_arrays(parts, names) if parts else column
    if _is_list(kind) and not _is_numeric(kind.value_type):
        return column
    if types.is_fixed_size_list(kind):
        return _filled_rows(column, arrow)
    if _is_list(kind):
        lengths = column.value_lengths().fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
        starts = arrow.array(np.concatenate([[0], np.cumsum(lengths)]), arrow.int64())
        return arrow.LargeListArray.from_arrays(starts, fill_nulls(column.flatten()))
    if not column.null_count:
        return column
    if types.is_floating(kind):
        return column.fill_null(float("nan"))
    if types.is_integer(kind):
        return column.fill_null(0)
    return column.fill_null(False) if types.is_boolean(kind) else column


def _filled_rows(column: Any, arrow: Any) -> Any:
    """Put a row of filled values wherever a row of a fixed length is missing."""
    width, inner = column.type.list_size, column.type.value_type
    values = arrow.concat_arrays([fill_nulls(column.flatten()), fill_nulls(arrow.nulls(width, inner))])
    valid = column.is_valid().to_numpy(zero_copy_only=False)
    number = np.where(valid, np.cumsum(valid) - 1, valid.sum())  # the last row is the filled one
    at = (number[:, None] * width + np.arange(width)).reshape(-1)
    return arrow.FixedSizeListArray.from_arrays(values.take(arrow.array(at, arrow.int64())), width)


def masks_of(column: pa.Array, path: Path) -> dict[Path, Tensor]:
    """Return where each entry of a column has values, by path; of entries that lack none, nothing."""
    types = packages.pyarrow().types
    if types.is_struct(column.type):
        found: dict[Path, Tensor] = {}
        for at, part in enumerate(column.flatten()):
            found.update(masks_of(part, (*path, column.type.field(at).name)))
        return found
    if not column.null_count:
        return {}
    return {path: torch.from_numpy(column.is_valid().to_numpy(zero_copy_only=False).copy())}


def _is_list(kind: Any) -> bool:
    types = packages.pyarrow().types
    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


def _is_numeric(kind: Any) -> bool:
    types = packages.pyarrow().types
    if types.is_fixed_size_list(kind):
        return _is_numeric(kind.value_type)
    return bool(types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind))
