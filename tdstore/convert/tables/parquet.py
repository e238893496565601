"""Read parquet files, folders and URLs, as a whole, or row group by row group into a store; `files` writes them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch

from tdstore.arguments import as_list, refuse_type
from tdstore.convert import packages
from tdstore.convert.tables import streaming
from tdstore.convert.tables.arrow import from_arrow
from tdstore.convert.tables.engine_files import is_url, open_urls
from tdstore.convert.tables.streaming import Sizes, Target, reading
from tdstore.errors import InvalidArgumentError, MismatchError, OptionError, StoreNotFoundError
from tdstore.io.blocks import BLOCK_BYTES
from tdstore.io.opening import Location, Storage, locate
from tdstore.types import DeviceLike, FileLike, SizeLike

if TYPE_CHECKING:
    import pyarrow as pa

    from tdstore.tensordicts.base import TensorDictBase

_OF_READING = ("use_threads", "use_pandas_metadata")
"""Arguments of `pyarrow.parquet.read_table` that are not of the dataset."""


def from_parquet(
    path: FileLike | Sequence[FileLike],
    *,
    auto_batch_size: bool = False,
    batch_dims: int | None = None,
    device: DeviceLike | None = None,
    batch_size: SizeLike | None = None,
    separator: str | None = None,
    dtype: torch.dtype | None = None,
    columns: list[str] | None = None,
    location: Location = None,
    storage: Storage = None,
    options: dict[str, Any] | None = None,
    storage_options: Mapping[str, Any] | None = None,
    nested: bool = False,
    **kwargs: Any,
) -> TensorDictBase:
    """Make a TensorDict from parquet files, as `from_arrow` does: a file, a folder of files, or a list of either.

    Rows come in the order of the files' names, or of the list. Fixed-shape tensors of Arrow become tensors. Folders
    named `name=value` are a column. Of a URL, the bytes of the columns are fetched, by the engine of a plugin.

    Args:
        path: the file, folder, URL or file object, or a list of files.
        auto_batch_size: whether each level gets the largest batch size that its entries share, instead of one batch
            dimension over the rows.
        batch_dims: with `auto_batch_size`, the largest number of batch dimensions.
        device: the device of the tensors; default: the CPU.
        batch_size: the batch size; default: the number of rows.
        separator: splits the names of columns into nested keys.
        dtype: the dtype of every tensor; default: that of the column.
        columns: the names of the columns to read; default: all.
        location: write the rows to a new dataset at this path or URL, and return the TensorDict over it: for files
            larger than memory. One row group is in memory at a time; each is read twice.
        storage: the name of a backend for it; default: determined by `location`.
        options: options of the backend.
        storage_options: credentials and endpoint of a `path` that is a URL.
        nested: whether lists of numbers that differ in length become a nested tensor (layout `torch.jagged`).
        **kwargs: of `pyarrow.parquet.read_table`, such as `filters`, `schema` and `filesystem`.

    Raises:
        CorruptStoreError: a file is truncated, or not a parquet file. StoreNotFoundError: there is no such file, or
            none in the folder.
        InvalidArgumentError: two columns have one name, or a column of `columns` is not there.
        MismatchError: the columns of two files differ. OptionError: `location` or `storage` with `auto_batch_size`,
            `batch_size`, `device` or `nested`.

    Example:
        >>> TensorDict({"a": [1, 2], "n": {"s": ["x", "y"]}}, [2]).to_parquet("t.parquet", separator=".")
        >>> from_parquet("t.parquet", separator=".")["n", "s"]
        LinkedList(['x', 'y'])
    """
    for name in ("engine", "index"):  # pandas' own: there is one engine, and no index
        kwargs.pop(name, None)
    sizes = Sizes(auto_batch_size, batch_dims, device, batch_size)
    target = Target(location, storage, options or {})
    of_columns: dict[str, Any] = {"separator": separator, "dtype": dtype, "nested": nested}
    if nested and target.is_set:
        raise OptionError(
            "nested=True makes nested tensors in memory only",
            hint="leave it out, for one value per row; or extend() a dataset of TensorDict.from_schema, group by group",
        )
    with _opened(path, columns, storage_options, kwargs) as source:
        if not target.is_set:
            return from_arrow(source.table(), **sizes._asdict(), **of_columns)
        return target.write(lambda: (from_arrow(batch, **of_columns) for batch in source.batches()), sizes)


@contextmanager
def _opened(
    path: Any, columns: list[str] | None, storage_options: Mapping[str, Any] | None, kwargs: dict[str, Any]
) -> Iterator[_Source]:
    """Open the files at a path, and close their engine at the end."""
    path, storage_options = _located(path, storage_options)
    paths = path
    urls = paths if isinstance(paths, list) else [paths]
    if isinstance(paths, list) and not paths:
        raise InvalidArgumentError("from_parquet was given an empty list of files")
    with ExitStack() as stack:
        if all(is_url(url) for url in urls) and "filesystem" not in kwargs:
            files, keys = open_urls(urls, storage_options)
            stack.callback(files.close)
            filesystem = packages.arrow_filesystem()
            kwargs = {**kwargs, "filesystem": filesystem.PyFileSystem(filesystem.FSSpecHandler(files))}
            paths = keys if isinstance(paths, list) else keys[0]
        elif storage_options:
            raise OptionError(f"{path}: storage_options are for URLs", hint="leave them out")
        for_reading = {name: kwargs.pop(name) for name in _OF_READING if name in kwargs}
        with reading(path):
            try:
                dataset = packages.parquet().ParquetDataset(paths, **kwargs)
            except FileNotFoundError as error:
                raise StoreNotFoundError(f"there is no parquet file at {path}", url=str(path)) from error
            source = _Source(path, dataset, columns, kwargs, for_reading)
        yield source


def _located(path: Any, storage_options: Mapping[str, Any] | None) -> tuple[Any, Mapping[str, Any] | None]:
    """Return a path, or a list of paths, for which objects of other libraries stand, and the options to open them.

    Raises:
        OptionError: the objects of a list have options of their own, which differ.
    """
    path, together = locate(path, {"storage_options": storage_options})
    options = together["storage_options"]
    if not isinstance(path, (list, tuple)):
        return path, options
    found = [locate(one, {"storage_options": options}) for one in path]
    if any(own != found[0][1] for _, own in found):
        raise OptionError("files of stores with different options cannot be read at once", hint="read each on its own")
    return [os.fspath(one) for one, _ in found], found[0][1]["storage_options"] if found else options


_COLUMNS = ("columns", "a list of names")


class _Source:
    """The opened files, and the columns to read.

    Args:
        path: what the caller named, for messages.
        dataset: a `pyarrow.parquet.ParquetDataset`.
        columns: the columns; None for all but the index of pandas.
        options: the arguments of the dataset.
        for_reading: further arguments of `ParquetDataset.read`.
    """

    def __init__(
        self,
        path: FileLike,
        dataset: Any,
        columns: list[str] | None,
        options: dict[str, Any],
        for_reading: dict[str, Any],
    ) -> None:
        self._path = path
        self._dataset = dataset
        self._reading = for_reading
        self._filters = options.get("filters")
        schema = dataset.schema
        self._fragments = dataset.fragments
        if not self._fragments and self._filters is None:
            raise StoreNotFoundError(f"there is no parquet file in {path}", url=str(path))
        stored = (schema.pandas_metadata or {}).get("index_columns", ())
        self._columns = columns if columns is not None else [name for name in schema.names if name not in stored]
        if columns is not None:
            if isinstance(columns, str) or not all(isinstance(name, str) for name in as_list(columns, *_COLUMNS)):
                raise refuse_type(*_COLUMNS, columns)
            unknown = [name for name in columns if not {name, name.partition(".")[0]} & {*schema.names}]
            if unknown:
                raise InvalidArgumentError(f"{path} has no column {unknown[0]!r}; there are {schema.names}")
        if "schema" not in options:
            self._check_alike(schema, columns)

    def _check_alike(self, schema: Any, columns: list[str] | None) -> None:
        """Raise an error for files with other columns: they would be left out, or filled with gaps."""
        first: set[str] | None = None
        for fragment in self._fragments:
            names = {name for name in fragment.physical_schema.names if columns is None or name in columns}
            first = names if first is None else first
            if names != first:
                raise MismatchError(
                    f"{fragment.path} and {self._fragments[0].path} differ in the column {min(names ^ first)!r}",
                    hint="name the columns that all have by columns=, or pass schema= for gaps in the others",
                )

    def table(self) -> pa.Table:
        """Read all rows."""
        with reading(self._path):
            found: pa.Table = self._dataset.read(columns=self._columns, **self._reading)
            return found

    def batches(self) -> Iterator[Any]:
        """Read the rows of one row group after another, in batches."""
        filters = self._filters
        rows_of = {} if filters is None else {"filter": packages.parquet().filters_to_expression(filters)}
        schema = self._dataset.schema
        with reading(self._path):
            for part in (p for f in self._fragments for p in f.split_by_row_group(schema=schema, **rows_of)):
                group = part.row_groups[0]
                rows = min(streaming.BLOCK_ROWS, max(1, BLOCK_BYTES * group.num_rows // max(group.total_byte_size, 1)))
                yield from part.to_batches(
                    schema=schema, columns=self._columns, batch_size=rows, batch_readahead=1, **rows_of
                )
