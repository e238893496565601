"""Parquet, csv and json files: written in blocks of rows, read as a whole or in blocks into a store."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date, time, timedelta
from decimal import Decimal
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, NamedTuple
from uuid import UUID

import numpy as np
import torch

from tdstore.container.core.container import GROUP, Container
from tdstore.convert import packages
from tdstore.convert.replaced_files import replacing
from tdstore.convert.tables import streaming
from tdstore.convert.tables.arrow import to_arrow, value_types
from tdstore.convert.tables.pandas import columns_of, from_pandas, needs_separator, to_pandas
from tdstore.convert.tables.row_blocks import (
    TEXT_BLOCK,
    check_ragged,
    refuse_ragged,
    row_blocks,
    with_jagged,
    with_rows,
)
from tdstore.convert.tables.streaming import Sizes, Target, reading
from tdstore.errors import InvalidArgumentError, UnsupportedError
from tdstore.io.opening import Location, Storage
from tdstore.types import DeviceLike, FileLike, SizeLike

if TYPE_CHECKING:
    from tdstore.tensordicts.base import TensorDictBase


# -- out ---------------------------------------------------------------------------------------


def to_parquet(td: Container, path: FileLike, separator: str | None, tensors: bool, options: dict[str, Any]) -> None:
    """See `TensorDict.to_parquet`."""
    td = with_rows(_without_groups(td, separator), "a file of rows")
    if check_ragged(td):
        td = with_jagged(td)
    for name in ("engine", "index"):  # pandas' own: there is one engine, and no index
        options.pop(name, None)
    rows_of_group = options.pop("row_group_size", None)
    types = value_types(td)
    writer: Any = None
    with replacing(path) as place:
        try:
            for block in _blocks(td, 32 << 20):
                table = to_arrow(block, separator, types, tensors)
                writer = writer or packages.parquet().ParquetWriter(place, table.schema, **options)
                writer.write_table(table, rows_of_group)
        finally:
            if writer is not None:
                writer.close()


def to_csv(td: Any, path: Any, separator: str | None, options: dict[str, Any]) -> None:
    """See `TensorDict.to_csv`."""
    td = _table(td, separator)
    for node, key in td._leaf_places():
        if len(node._leaf_shape(key)) > 1:
            raise InvalidArgumentError(
                f"entry {key!r} of shape {list(node._leaf_shape(key))}: a cell of a csv file holds one number; "
                "use to_parquet or to_json, or split it into columns"
            )
        _refuse_complex(node, key)
    header = options.pop("header", True)
    mode = options.pop("mode", "w")
    with replacing(path) as place:
        for i, block in enumerate(_blocks(td, TEXT_BLOCK)):
            frame = to_pandas(block, separator)
            _refuse_objects(frame)
            # A file object continues at its position; a path is opened again for each block.
            again = {} if hasattr(place, "write") else {"mode": "a" if i else mode}
            frame.to_csv(place, **{"index": False, "header": header if not i else False, **again, **options})


def to_json(td: Container, path: FileLike, separator: str | None, lines: bool, options: dict[str, Any]) -> None:
    """See `TensorDict.to_json`."""
    td = _table(td, separator)
    if options:  # pandas' own
        to_pandas(td, separator).to_json(path, **{"orient": "records", "lines": lines, **options})
        return
    with replacing(path) as place, _text_file(place) as file:
        before = "" if lines else "["
        for block in _blocks(td, TEXT_BLOCK):
            for record in _records(block, separator):
                file.write(before + _json_of(record))
                before = "\n" if lines else ","
        file.write("\n" if lines else "]" if before == "," else "[]")


def _json_of(record: dict[str, Any]) -> str:
    try:
        return json.dumps(record, ensure_ascii=False, separators=(",", ":"))
    except TypeError:
        for name, cell in record.items():
            try:
                json.dumps(cell)
            except TypeError as error:
                raise UnsupportedError(
                    f"the entry {name!r} cannot be written as JSON: {error}", hint=_INSTEAD
                ) from None
        raise


_CELLS = (str, int, float, np.generic, date, time, timedelta, Decimal, UUID, PurePath, type(None))
_INSTEAD = "exclude the key, convert it to text or numbers, or use to_parquet"


def _refuse_objects(frame: Any) -> None:
    """Raise an error for values that text cannot represent or distinguish, such as `<object at 0x7f...>`."""
    for name in frame.columns:
        if frame[name].dtype == object:
            other = next((cell for cell in frame[name] if not isinstance(cell, _CELLS)), None)
            if other is not None:
                raise UnsupportedError(
                    f"the entry {name!r} has a value of type {type(other).__name__}, which no cell of a csv file holds",
                    hint=_INSTEAD,
                )


def _refuse_complex(node: Any, key: str) -> None:
    if node._leaf_facts(key).dtype.is_complex:
        raise UnsupportedError(
            f"the entry {key!r}: no cell of a csv file holds a complex number",
            hint="torch.view_as_real() converts it to two columns",
        )


def _records(block: Any, separator: str | None) -> Iterator[dict[str, Any]]:
    columns = {name: _plain(column) for name, column in columns_of(block, separator).items()}
    for row in zip(*columns.values(), strict=True):
        yield dict(zip(columns, row, strict=True))


def _plain(column: Any) -> list[Any]:
    if not hasattr(column, "tolist"):
        column = [cell.tolist() if hasattr(cell, "tolist") else cell for cell in column]
    cells: list[Any] = _without_nan(column if isinstance(column, list) else column.tolist())
    return cells


def _without_nan(value: Any) -> Any:
    """Replace NaN by None: JSON has no NaN, and readers take null for it."""
    if isinstance(value, float):
        return None if math.isnan(value) else value
    if isinstance(value, dict):
        return {k: _without_nan(v) for k, v in value.items()}
    return [_without_nan(v) for v in value] if isinstance(value, list) else value


def _table(td: Any, separator: str | None) -> Any:
    td = _without_groups(td, separator)
    refuse_ragged(td, "a file of rows")
    return with_rows(td, "a file of rows")


def _without_groups(td: Any, separator: str | None) -> Any:
    """Return the TensorDict; raise an error for nested entries that have no separator."""
    if separator is None:
        for key in td._first_keys():
            if td._kind(key) == GROUP:
                raise needs_separator((key,))
    return td


def _blocks(td: Any, size: int) -> Iterator[Any]:
    """Yield blocks of rows; without rows, an empty block with the names of the columns."""
    empty = True
    for _, _, block in row_blocks(td, size):
        empty = False
        yield block
    if empty:
        yield td._resident()


@contextmanager
def _text_file(place: Any) -> Iterator[Any]:
    if hasattr(place, "write"):
        yield place
        return
    if "://" in str(place):
        raise UnsupportedError(f"to_json writes local files, not {place}", hint="write it to an open file object")
    with open(place, "w", encoding="utf-8") as file:
        yield file


# -- in ----------------------------------------------------------------------------------------


def from_csv(
    path: FileLike,
    *,
    auto_batch_size: bool = False,
    batch_dims: int | None = None,
    device: DeviceLike | None = None,
    batch_size: SizeLike | None = None,
    separator: str | None = None,
    dtype: torch.dtype | None = None,
    location: Location = None,
    storage: Storage = None,
    options: dict[str, Any] | None = None,
    **kwargs: Any,
) -> TensorDictBase:
    """Make a TensorDict from a csv file, as `from_pandas` does.

    Args:
        path: the file: a path, a URL or a file object.
        auto_batch_size: whether each level gets the largest batch size that its entries share, instead of one batch
            dimension over the rows.
        batch_dims: with `auto_batch_size`, the largest number of batch dimensions.
        device: the device of the tensors; default: the CPU.
        batch_size: the batch size; default: the number of rows.
        separator: splits the names of columns into nested keys.
        dtype: the dtype of every tensor; default: that of the column.
        location: write the rows to a new dataset at this path or URL, in blocks of bounded memory, and return the
            TensorDict over it: for a file larger than memory. The file is read twice.
        storage: the name of a backend for it; default: determined by `location`.
        options: options of the backend.
        **kwargs: of `pandas.read_csv`.

    Raises:
        CorruptStoreError: the file is empty, or its rows differ in length.
        OptionError: `location` or `storage` with `auto_batch_size`, `batch_size` or `device`.

    Example:
        >>> TensorDict({"a": [1, 2]}, [2]).to_csv("t.csv")
        >>> from_csv("t.csv")["a"]
        tensor([1, 2])
    """
    pandas = packages.pandas()
    if tuple(map(int, pandas.__version__.split(".")[:2])) < (3, 1):  # from then on numbers are read exactly anyway
        kwargs.setdefault("float_precision", "round_trip")
    frames = _Frames(functools.partial(pandas.read_csv, path, **kwargs), True, separator, dtype)
    return frames.collect(Sizes(auto_batch_size, batch_dims, device, batch_size), location, storage, options)


def from_json(
    path: FileLike,
    *,
    auto_batch_size: bool = False,
    batch_dims: int | None = None,
    device: DeviceLike | None = None,
    batch_size: SizeLike | None = None,
    separator: str | None = None,
    dtype: torch.dtype | None = None,
    lines: bool = False,
    location: Location = None,
    storage: Storage = None,
    options: dict[str, Any] | None = None,
    **kwargs: Any,
) -> TensorDictBase:
    """Make a TensorDict from a json file of records, as `from_pandas` does; quoted numbers stay text.

    Args:
        path: the file: a path, a URL or a file object.
        auto_batch_size: whether each level gets the largest batch size that its entries share, instead of one batch
            dimension over the rows.
        batch_dims: with `auto_batch_size`, the largest number of batch dimensions.
        device: the device of the tensors; default: the CPU.
        batch_size: the batch size; default: the number of rows.
        separator: splits the names of columns into nested keys.
        dtype: the dtype of every tensor; default: that of the column.
        lines: whether the file has one record per line; implied by the suffixes `.jsonl` and `.ndjson`.
        location: write the rows to a new dataset at this path or URL, in blocks of bounded memory, and return the
            TensorDict over it: for a file of lines larger than memory. The file is read twice.
        storage: the name of a backend for it; default: determined by `location`.
        options: options of the backend.
        **kwargs: of `pandas.read_json`.

    Raises:
        CorruptStoreError: the file is truncated, or not JSON.
        OptionError: `location` or `storage` with `auto_batch_size`, `batch_size` or `device`.

    Example:
        >>> TensorDict({"a": [1, 2], "s": ["x", "y"]}, [2]).to_json("t.jsonl", lines=True)
        >>> from_json("t.jsonl")["s"]
        LinkedList(['x', 'y'])
    """
    pandas = packages.pandas()
    lines = lines or str(path).endswith((".jsonl", ".ndjson"))
    kwargs = {"orient": "records", "lines": lines, "dtype": False, "precise_float": True, **kwargs}
    frames = _Frames(functools.partial(pandas.read_json, path, **kwargs), lines, separator, dtype)
    return frames.collect(Sizes(auto_batch_size, batch_dims, device, batch_size), location, storage, options)


class _Frames(NamedTuple):
    """The frames that a reader of pandas returns; `in_parts`: it can read them piece by piece."""

    read: functools.partial[Any]
    in_parts: bool
    separator: str | None
    dtype: torch.dtype | None

    def collect(
        self, sizes: Sizes, location: Location, storage: Storage, options: dict[str, Any] | None
    ) -> TensorDictBase:
        """Collect all rows, in memory or in the dataset at `location`."""
        target = Target(location, storage, options or {})
        if target.is_set:
            return target.write(self._blocks, sizes)
        with reading(self.read.args[0]):
            frame = self.read()
        return from_pandas(frame, **sizes._asdict(), separator=self.separator, dtype=self.dtype)

    def _blocks(self) -> Iterator[TensorDictBase]:
        convert = functools.partial(from_pandas, separator=self.separator, dtype=self.dtype)
        if not self.in_parts:
            yield convert(self.read())
            return
        with self.read(**({} if "chunksize" in self.read.keywords else {"chunksize": streaming.BLOCK_ROWS})) as frames:
            yield from map(convert, frames)
