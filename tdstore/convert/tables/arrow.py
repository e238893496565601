"""From and to Arrow tables, without a copy where both have the same memory layout."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from tdstore.arguments import check_separator
from tdstore.container.core.container import GROUP, LEAF, VALUE, Container
from tdstore.container.core.paths import entry_path
from tdstore.container.functions.construct_and_join import from_dict
from tdstore.container.values.nontensor import NonTensor, NonTensorData, NonTensorStack
from tdstore.convert import packages
from tdstore.convert.tables.arrow_nulls import Nulls, fill_nulls, masks_of, refuse_nulls
from tdstore.convert.tables.row_blocks import with_jagged, with_rows
from tdstore.dtypes import is_bit_pattern
from tdstore.errors import InvalidArgumentError, InvalidTypeError, OptionError, UnsupportedError
from tdstore.types import DeviceLike, NestedKey, Path, SizeLike, path_text

if TYPE_CHECKING:
    import pyarrow as pa

    from tdstore.tensordicts.resident.tensordict import TensorDict

ColumnValues: TypeAlias = "Tensor | list[Any] | dict[str, ColumnValues]"
"""The contents of a column: a tensor, a value per row, or the columns of a struct."""
_NAT = -(2**63)
"""The number of a missing date in numpy and pandas."""
VALUES = 4096
"""The number of values that are in memory at a time while the type of a column is inferred."""


def from_arrow(
    table: Any,
    *,
    auto_batch_size: bool = False,
    batch_dims: int | None = None,
    device: DeviceLike | None = None,
    batch_size: SizeLike | None = None,
    separator: str | None = None,
    dtype: torch.dtype | None = None,
    nested: bool = False,
    copy: bool | None = None,
    nulls: Nulls | None = None,
    mask_key: NestedKey | None = None,
) -> TensorDict:
    """Make a TensorDict from the columns of a table that Arrow can import, one row per batch position.

    Numbers without gaps, in one chunk, share the table's memory (writing to them changes the table), unless that is
    read-only, as of a mapped file; lists of one length become feature dimensions of them, structs nested TensorDicts.
    Numbers with gaps become float64 with NaN, dates int64 nanoseconds; text, bytes and ragged lists are one value per
    row, None where it is missing. So are integers with gaps and dates that do not fit into those.

    Args:
        table: a table or record batch of pyarrow, or an object that exports one by the C data interface
            (`__arrow_c_stream__`, `__arrow_c_array__`): frames of polars, relations of duckdb and others.
        auto_batch_size: whether each level gets the largest batch size that its entries share, instead of one batch
            dimension over the rows.
        batch_dims: with `auto_batch_size`, the largest number of batch dimensions.
        device: the device of the tensors; default: the CPU.
        batch_size: the batch size; default: the number of rows.
        separator: splits the names of columns into nested keys.
        dtype: the dtype of every tensor; default: that of the column.
        nested: whether lists of numbers that differ in length become a nested tensor (layout `torch.jagged`).
        copy: True copies memory that would be shared. Read-only memory is copied always.
        nulls: what stands for missing values, instead of the above: "fill" puts NaN, 0, False or an empty list there
            and keeps the dtype, "mask" adds a bool tensor to each entry that lacks some, False where they were
            missing, and "raise" refuses them.
        mask_key: the entry that holds the masks; default: "_mask".

    Raises:
        InvalidArgumentError: two columns have one name, or both `batch_size` and `auto_batch_size`; a missing value,
            with `nulls="raise"`; or `mask_key` without `nulls="mask"`, or of a column.
        InvalidTypeError: `table` is no table.
        UnsupportedError: a column has a type that Arrow itself cannot convert to values, or holds Python objects.

    Example:
        >>> import pyarrow
        >>> from_arrow(pyarrow.table({"a": [1, 2], "s": ["x", "y"]}))["a"]
        tensor([1, 2])
    """
    table = _table_of(table)
    refuse_twice(table.schema.names)
    if nulls not in (None, "raise", "fill", "mask"):
        raise InvalidArgumentError(f'nulls is "raise", "fill", "mask" or None, not {nulls!r}')
    mask_path = _mask_path(nulls, mask_key, table.schema.names)
    entries, masks = {}, {}
    for i, name in enumerate(table.schema.names):
        entries[name] = _named_column(name, table.column(i), nested, nulls)
        if nulls == "mask":
            masks.update(masks_of(_one_chunk(table.column(i)), (name,)))
    made = of_columns(entries, table.num_rows, auto_batch_size, batch_dims, device, batch_size, separator, dtype)
    for path, mask in masks.items():
        made.set((*mask_path, *path), mask)
    return made.clone() if copy else made


def _mask_path(nulls: Nulls | None, mask_key: NestedKey | None, names: list[str]) -> Path:
    if mask_key is not None and nulls != "mask":
        raise InvalidArgumentError('mask_key needs nulls="mask"')
    path = entry_path("_mask" if mask_key is None else mask_key)
    if nulls == "mask" and path[0] in names:
        raise InvalidArgumentError(f"the masks would be in the column {path[0]!r}: pass another mask_key")
    return path


def refuse_twice(names: Iterable[str]) -> None:
    """Raise an error if two columns have one name, and so would be one entry."""
    names = list(names)
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise InvalidArgumentError(f"two columns have the same name, {twice!r}: rename one of {names}")


def exports_arrow(obj: object) -> bool:
    """Check whether an object exports a table or a column by Arrow's C data interface."""
    return not isinstance(obj, type) and (hasattr(obj, "__arrow_c_stream__") or hasattr(obj, "__arrow_c_array__"))


def imported(obj: Any) -> pa.Table | pa.ChunkedArray:
    """Import an object that exports by the C data interface: a table, or a chunked array if it is one column."""
    arrow = packages.pyarrow()
    _refuse_pointers(obj)
    found = arrow.chunked_array(obj if hasattr(obj, "__arrow_c_stream__") else [arrow.array(obj)])
    return arrow.Table.from_struct_array(found) if arrow.types.is_struct(found.type) else found


def _refuse_pointers(obj: Any) -> None:
    """Raise an error for columns of Python objects of polars, which it exports as the addresses of the objects."""
    polars = sys.modules.get("polars")
    if polars is None or not isinstance(obj, (polars.DataFrame, polars.Series)):
        return
    columns = obj.get_columns() if isinstance(obj, polars.DataFrame) else [obj]
    for column in columns:
        if column.dtype == polars.Object:
            raise UnsupportedError(
                f"the column {column.name!r} holds Python objects, which polars does not export",
                hint="leave it out, and set it as td[key] = column.to_list()",
            )


def _table_of(obj: Any) -> Any:
    arrow = packages.pyarrow()
    if isinstance(obj, (arrow.Table, arrow.RecordBatch)):
        return obj
    if isinstance(obj, Container) or not exports_arrow(obj):
        raise InvalidTypeError(
            f"from_arrow takes Arrow tables and objects that export one (__arrow_c_stream__), not a "
            f"{type(obj).__name__}",
            hint="tdstore.from_any converts other objects",
        )
    found = imported(obj)
    if isinstance(found, arrow.Table):
        return found
    raise InvalidTypeError(
        f"a {type(obj).__name__} is one column, and entries of a TensorDict have names",
        hint="tdstore.from_any makes a tensor of it",
    )


def _named_column(name: str, column: Any, nested: bool, nulls: Nulls | None) -> Any:
    arrow = packages.pyarrow()
    try:
        if nulls == "raise":
            refuse_nulls(_one_chunk(column), (name,))
        elif nulls is not None:
            column = fill_nulls(_one_chunk(column))
        return column_values(column, nested)
    except (arrow.ArrowInvalid, arrow.ArrowNotImplementedError) as error:
        raise UnsupportedError(
            f"the column {name!r}, of type {column.type}: {error}", hint="cast it or leave it out"
        ) from error


def of_columns(
    columns: Mapping[Any, Any],
    rows: int,
    auto_batch_size: bool,
    batch_dims: int | None,
    device: DeviceLike | None,
    batch_size: SizeLike | None,
    separator: str | None,
    dtype: torch.dtype | None,
) -> TensorDict:
    """Build a TensorDict of columns: tensors, lists of a value per row, or mappings of such."""
    if batch_size is not None and auto_batch_size:
        raise OptionError("give batch_size or auto_batch_size=True, not both")
    if separator is not None:
        check_separator(separator)
    shape = batch_size if batch_size is not None else None if auto_batch_size else (rows,)
    cls, dims = Container._resident_class, batch_dims if auto_batch_size else None
    return from_dict(cls, _entries(columns, dtype, separator), shape, auto_batch_size, dims, device, None)


def _entries(columns: Mapping[Any, Any], dtype: torch.dtype | None, separator: str | None) -> dict[Any, Any]:
    out: dict[Any, Any] = {}
    for name, column in columns.items():
        key = tuple(name.split(separator)) if separator is not None and isinstance(name, str) else name
        if isinstance(column, Tensor):
            out[key] = column if dtype is None else column.to(dtype)
        elif isinstance(column, Mapping):
            out[key] = _entries(column, dtype, None)
        else:
            out[key] = NonTensorStack._make(column, torch.arange(len(column), device="cpu"))
    return out


def column_values(column: Any, nested: bool = False) -> ColumnValues:
    """Convert a column to a tensor, a list of a value per row, or a dict of columns.

    Args:
        column: an array or a chunked array.
        nested: whether lists of numbers that differ in length become a nested tensor.
    """
    arrow = packages.pyarrow()
    column = _one_chunk(column)
    kind, types = column.type, arrow.types
    if isinstance(column, arrow.ExtensionArray):
        return _extension_values(column, arrow)
    if types.is_dictionary(kind):
        if types.is_string_view(kind.value_type) or types.is_binary_view(kind.value_type):  # Arrow decodes no views
            return _values(column)
        return column_values(column.dictionary_decode())
    if types.is_struct(kind):
        names = [kind.field(i).name for i in range(kind.num_fields)]
        refuse_twice(names)
        return {name: column_values(part, nested) for name, part in zip(names, column.flatten(), strict=True)}
    if types.is_fixed_size_list(kind) or types.is_list(kind) or types.is_large_list(kind):
        return _list_values(column, arrow, nested)
    if types.is_temporal(kind):
        return _dates(column, arrow)
    if types.is_decimal(kind):
        column = column.cast(arrow.float64())
    if types.is_boolean(kind) and not column.null_count:
        return torch.from_numpy(column.to_numpy(zero_copy_only=False))
    if not (types.is_integer(column.type) or types.is_floating(column.type)):
        return _values(column)
    if not column.null_count:
        return _shared(column)
    try:
        return torch.from_numpy(column.cast(arrow.float64()).to_numpy(zero_copy_only=False).copy())
    except arrow.ArrowInvalid:  # integers that no float64 is equal to
        return _values(column)


def _one_chunk(column: Any) -> Any:
    arrow = packages.pyarrow()
    if not isinstance(column, arrow.ChunkedArray):
        return column
    return column.chunk(0) if column.num_chunks == 1 else arrow.concat_arrays(column.chunks or [_nothing(column)])


def _shared(column: Any) -> Tensor:
    """View numbers without gaps over the column's memory. Copy read-only memory: a write to it would be a segfault."""
    tensor: Tensor = from_dlpack(column)
    memory = column.buffers()[1]
    return tensor if memory is None or memory.is_mutable else tensor.clone()


def _extension_values(column: Any, arrow: Any) -> ColumnValues:
    """Convert arrays of one shape to a tensor; other extension types to their storage or their values."""
    kind = column.type
    found = column_values(column.storage)
    if not isinstance(found, Tensor):
        return found if isinstance(found, dict) else _values(column)
    if not isinstance(kind, arrow.FixedShapeTensorType):
        return found
    if kind.permutation is not None:
        return torch.from_numpy(column.to_numpy_ndarray().copy())
    return found.reshape(len(column), *kind.shape)


def _nothing(column: Any) -> Any:
    return packages.pyarrow().array([], column.type)


def _values(column: Any) -> list[Any]:
    values: list[Any] = column.to_pylist()
    return values


def _list_values(column: Any, arrow: Any, nested: bool) -> Tensor | list[Any]:
    """Convert lists of one length to a dimension of a tensor; others to a nested tensor or to a list per row."""
    if column.null_count:
        return _values(column)
    if arrow.types.is_fixed_size_list(column.type):
        width = column.type.list_size
    else:
        widths = set(column.value_lengths().to_pylist())
        if len(widths) != 1:
            return _jagged(column, arrow) if nested and widths else _values(column)
        width = widths.pop()
    inner = column_values(column.flatten())
    return inner.reshape(len(column), width, *inner.shape[1:]) if isinstance(inner, Tensor) else _values(column)


def _jagged(column: Any, arrow: Any) -> Tensor | list[Any]:
    """Convert lists of numbers of different lengths to a nested tensor; other lists to a list per row."""
    inner = column_values(column.flatten())
    if not isinstance(inner, Tensor):
        return _values(column)
    lengths = torch.from_numpy(column.value_lengths().to_numpy(zero_copy_only=False).astype("int64"))
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    return torch.nested.nested_tensor_from_jagged(inner, offsets)


def _dates(column: Any, arrow: Any) -> Tensor | list[Any]:
    """Convert dates, times and durations to int64 nanoseconds; those out of range, and intervals, to values."""
    types, kind = arrow.types, column.type
    if types.is_interval(kind):
        return _values(column)
    if types.is_duration(kind):
        unit = arrow.duration("ns")
    elif types.is_time(kind):
        unit = arrow.time64("ns")
    else:
        unit = arrow.timestamp("ns", getattr(kind, "tz", None))
    try:
        return _shared(column.cast(unit).cast(arrow.int64()).fill_null(_NAT))
    except arrow.ArrowInvalid:  # not within 292 years of 1970
        return _values(column)


# -- and back ----------------------------------------------------------------------------------


def to_arrow(
    td: Container, separator: str | None = None, types: Mapping[Path, Any] | None = None, tensors: bool = False
) -> pa.Table:
    """Convert to an Arrow table of a row per element of the first batch dimension, see `TensorDict.to_arrow`.

    Args:
        td: the TensorDict.
        separator: joins the keys of nested entries to the names of columns; None makes structs of nested entries.
        types: the types of values that are not tensors, by path; default: inferred from these rows.
        tensors: whether rows of several dimensions are fixed-shape tensors instead of lists in lists.
    """
    td = with_rows(td, "a table")
    form = _Form(td.batch_size[0], types or {}, separator, tensors)
    return packages.pyarrow().table(_arrays(with_jagged(td), (), form))


class _Form(NamedTuple):
    """The number of rows, and the arguments of `to_arrow`."""

    rows: int
    types: Mapping[Path, Any]
    separator: str | None
    tensors: bool


def _arrays(td: Any, prefix: Path, form: _Form) -> dict[str, Any]:
    arrow = packages.pyarrow()
    out: dict[str, Any] = {}
    for key, value in td.items():
        path = (*prefix, key)
        if key in out:
            raise column_twice(key)
        if isinstance(value, Container):
            below = _arrays(value._resident(), path, form)
            if form.separator is not None:
                for name, array in below.items():
                    out[joined(out, key, name, form.separator)] = array
            elif below:  # files cannot hold a struct of nothing
                out[key] = arrow.StructArray.from_arrays(list(below.values()), list(below))
        elif td._kind(key) == VALUE and td._is_unbatched(key):
            raise UnsupportedError(
                f"entry {path_text(path)} is one tensor for all rows, and a column has a cell for each",
                hint="exclude the key, or save it beside the table",
            )
        elif isinstance(value, Tensor):
            out[key] = _array(value, path, form.tensors)
        else:
            out[key] = _value_array(value, path, form.rows, form.types.get(path))
    return out


def joined(columns: Mapping[str, Any], key: str, name: str, separator: str) -> str:
    """Return the name of a nested entry's column; raise an error if there is such a column already."""
    column = f"{key}{separator}{name}"
    if column in columns:
        raise column_twice(column)
    return column


def column_twice(column: str) -> InvalidArgumentError:
    """Create the error for two entries with the same column name."""
    return InvalidArgumentError(f"two entries would have the column {column!r}: choose another separator")


def _array(tensor: Tensor, path: Path, tensors: bool) -> Any:
    arrow = packages.pyarrow()
    tensor = exactly(tensor, path)
    if tensor.is_complex():
        raise UnsupportedError(
            f"entry {path_text(path)}: Arrow has no complex numbers", hint="torch.view_as_real() makes two of each"
        )
    if tensor.is_nested:
        rows: Any = tensor  # torch types no methods of nested tensors
        rows = rows if rows.lengths() is None else rows.contiguous()
        return arrow.LargeListArray.from_arrays(rows.offsets().numpy(), _array(rows.values(), path, tensors))
    tensor = tensor.contiguous()
    array = arrow.array(tensor.flatten().numpy())
    shape, width = tensor.shape[1:], tensor.shape[1:].numel()
    if tensors and len(shape) > 1 and width:
        cells = arrow.FixedSizeListArray.from_arrays(array, width)
        return arrow.ExtensionArray.from_storage(arrow.fixed_shape_tensor(array.type, shape), cells)
    for at in range(tensor.ndim - 1, 0, -1):
        if not math.prod(tensor.shape[: at + 1]):
            kind = arrow.list_(array.type, tensor.shape[at])
            array = arrow.array([[]] * math.prod(tensor.shape[:at]) if not tensor.shape[at] else [], kind)
        else:
            array = arrow.FixedSizeListArray.from_arrays(array, tensor.shape[at])
    return array


def exactly(tensor: Tensor, path: Path) -> Tensor:
    """Move the tensor to the CPU, in a dtype of numpy; float32 represents bfloat16 and float8 exactly."""
    tensor = tensor.detach().cpu().resolve_conj().resolve_neg()
    return tensor.float() if is_bit_pattern(tensor.dtype) and tensor.is_floating_point() else tensor


def _value_array(value: NonTensor, path: Path, rows: int, kind: Any) -> Any:
    arrow = packages.pyarrow()
    values = row_values(value, rows)
    try:
        return arrow.array(values, kind)
    except (arrow.ArrowInvalid, arrow.ArrowTypeError, arrow.ArrowNotImplementedError, OverflowError) as error:
        raise _no_column(path, error) from error


def row_values(value: NonTensor, rows: int) -> list[Any]:
    """Return one value (or list of values) per row."""
    if isinstance(value, NonTensorData):
        return [value.data] * rows
    found: list[Any] = value.tolist()
    return found


def value_types(td: Container, prefix: Path = ()) -> dict[Path, Any]:
    """Infer the Arrow types of all entries that are not tensors from all their rows. Reads no tensors."""
    out: dict[Path, Any] = {}
    for key in td._first_keys():
        kind, path = td._kind(key), (*prefix, key)
        if kind == GROUP:
            out.update(value_types(td._raw(key), path))
        elif kind != LEAF:
            out[path] = _type_of_all(td._raw(key), path)
    return out


def _type_of_all(value: NonTensor, path: Path) -> Any:
    """Infer the type that holds all values, some thousand of which are in memory at a time."""
    arrow = packages.pyarrow()
    if isinstance(value, NonTensorData) or not value.batch_dims or len(value) <= VALUES:
        return _value_array(value, path, 1, None).type
    parts = (value[at : at + VALUES] for at in range(0, len(value), VALUES))
    kinds = {_value_array(part, path, VALUES, None).type for part in parts}
    try:
        schemas = [arrow.schema([("value", kind)]) for kind in kinds]
        return arrow.unify_schemas(schemas, promote_options="permissive").field(0).type
    except arrow.ArrowException as error:
        raise _no_column(path, error) from error


def _no_column(path: Path, error: BaseException) -> UnsupportedError:
    return UnsupportedError(f"the values {path_text(path)} do not fit into one column: {error}", hint="exclude the key")
