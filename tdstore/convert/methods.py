"""The conversions as methods, each of which calls a function of this folder."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from tdstore.arguments import check_separator
from tdstore.container.core.container import Container
from tdstore.convert.checkpoints import safetensors_files
from tdstore.convert.objects import arrays, npz, python, pytree
from tdstore.convert.objects import padding as objects_padding
from tdstore.convert.tables import arrow, arrow_stream, files, mds, pandas, parquet
from tdstore.io.blocks import BLOCK_BYTES
from tdstore.types import DeviceLike, FileLike, NamesLike, NestedKey, SizeLike

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

    from tdstore.tensordicts.base import TensorDictBase
    from tdstore.tensordicts.resident.tensordict import TensorDict


def _maker(fn: Callable[..., Any]) -> Any:
    """Build a class method from a function, with its documentation and signature."""

    @functools.wraps(fn)
    def make(cls: type, *args: Any, **kwargs: Any) -> Any:
        return fn(*args, **kwargs)

    signature = inspect.signature(fn)
    own = inspect.Parameter("cls", inspect.Parameter.POSITIONAL_ONLY)
    made: Any = make
    made.__signature__ = signature.replace(parameters=[own, *signature.parameters.values()])
    return classmethod(make)


class ConvertMixin(Container):
    """Conversions of a TensorDict: from_any, to_pandas and others."""

    __slots__ = ()

    # On every container these make in-memory TensorDicts; a tensorclass wraps the result.
    from_any = _maker(python.from_any)
    from_dataclass = _maker(python.from_dataclass)
    from_namedtuple = _maker(python.from_namedtuple)
    from_tuple = _maker(python.from_tuple)
    from_list = _maker(python.from_list)
    from_pytree = _maker(pytree.from_pytree)
    from_npz = _maker(npz.from_npz)
    from_struct_array = _maker(arrays.from_struct_array)
    from_arrow = _maker(arrow.from_arrow)
    from_pandas = _maker(pandas.from_pandas)
    from_parquet = _maker(parquet.from_parquet)
    from_csv = _maker(files.from_csv)
    from_json = _maker(files.from_json)
    from_safetensors = _maker(safetensors_files.from_safetensors)

    # -- Python ------------------------------------------------------------------------------
    def from_dict_instance(
        self,
        input_dict: Mapping[Any, Any],
        *,
        auto_batch_size: bool | None = None,
        batch_size: SizeLike | None = None,
        device: DeviceLike | None = None,
        batch_dims: int | None = None,
        names: NamesLike = None,
    ) -> TensorDictBase:
        """Build as `from_dict`; nested dicts become instances of the classes of this TensorDict's entries.

        Args:
            input_dict: nested dicts of entries, or a TensorDict.
            auto_batch_size: whether each level gets the largest batch size that its entries share.
            batch_size: the batch size; default: `[]`.
            device: the device of the tensors.
            batch_dims: with `auto_batch_size`, the largest number of batch dimensions.
            names: the names of the batch dimensions.
        """
        return python.from_dict_instance(self, input_dict, auto_batch_size, batch_size, device, batch_dims, names)

    def tolist(
        self,
        *,
        convert_nodes: bool = True,
        convert_tensors: bool | Literal["numpy"] = False,
        tolist_first: bool = False,
        as_linked_list: bool = False,
    ) -> Any:
        """Convert to nested lists over the batch dimensions, of one dict per position; without any, to a dict.

        Args:
            convert_nodes: whether the elements are dicts; False returns TensorDicts.
            convert_tensors: whether tensors become numbers or lists of numbers; "numpy" makes arrays.
            tolist_first: whether nested TensorDicts with batch dimensions become lists of dicts too.
            as_linked_list: no effect; the result is a plain list.

        Raises:
            InvalidTypeError: `convert_tensors` without `convert_nodes`.

        Example:
            >>> TensorDict({"a": [1, 2]}, [2]).tolist(convert_tensors=True)
            [{'a': 1}, {'a': 2}]
        """
        return python.to_list(self, convert_nodes, convert_tensors, tolist_first)

    def to_namedtuple(self, dest_cls: type | None = None) -> tuple[Any, ...]:
        """Convert to a named tuple of the entries; nested TensorDicts become named tuples too.

        Args:
            dest_cls: the class of the result; default: a new one called `GenericDict` with a field per entry.

        Raises:
            ValueError: a key cannot be the name of a field. TypeError: `dest_cls` has other fields.
        """
        return python.to_namedtuple(self, dest_cls)

    def to_pytree(self) -> Any:
        """Rebuild the nested lists, tuples, dicts and named tuples that were the argument of `from_pytree`.

        A TensorDict of another origin is returned unchanged.
        """
        return pytree.to_pytree(self)

    # -- numpy -------------------------------------------------------------------------------
    def numpy(self) -> dict[str, Any]:
        """Convert to nested dicts of numpy arrays, which share memory with the tensors; values are unchanged.

        Raises:
            TypeError: numpy lacks a dtype, such as bfloat16.
            RuntimeError: a tensor requires a gradient.

        Example:
            >>> TensorDict({"a": torch.arange(3), "s": "text"}, [3]).numpy()
            {'a': array([0, 1, 2]), 's': 'text'}
        """
        return arrays.to_numpy(self)

    def to_struct_array(self) -> np.ndarray[Any, Any]:
        """Convert to a structured numpy array of the batch's shape, with a field per entry.

        Nested TensorDicts become nested fields. A stored TensorDict is read in blocks of rows.

        Raises:
            TypeError: numpy lacks a dtype, such as bfloat16.

        Example:
            >>> TensorDict({"a": [1, 2], "b": torch.zeros(2, 3)}, [2]).to_struct_array()["a"]
            array([1, 2])
        """
        return arrays.to_struct_array(self)

    # -- tables ------------------------------------------------------------------------------
    def to_arrow(self, *, separator: str | None = None, tensors: bool = False) -> pa.Table:
        """Convert to an Arrow table with a row per element of the first batch dimension.

        Contiguous tensors of one number per row share their memory with it. Further dimensions become lists of fixed
        length, rows of different lengths lists, nested TensorDicts structs, or with a `separator` columns. bfloat16 and
        float8 become float32.

        Args:
            separator: joins the keys of nested entries to the names of columns.
            tensors: whether rows of several dimensions become Arrow's fixed-shape tensors instead of lists in lists.

        Raises:
            BatchSizeError: there is no batch dimension, or rows differ in more than their length.
            UnsupportedError: an entry is complex, or has values that do not fit into one column.
        """
        return arrow.to_arrow(self, separator, tensors=tensors)

    def to_arrow_reader(
        self, *, separator: str | None = None, tensors: bool = False, block_bytes: int = BLOCK_BYTES
    ) -> pa.RecordBatchReader:
        """Convert to a reader of Arrow record batches, which reads a stored TensorDict in blocks of bounded memory.

        Entries become columns as in `to_arrow`. The TensorDict must stay open while the reader is used.

        Args:
            separator: joins the keys of nested entries to the names of columns.
            tensors: whether rows of several dimensions become Arrow's fixed-shape tensors instead of lists in lists.
            block_bytes: the bytes of a batch, about.

        Raises:
            BatchSizeError: there is no batch dimension, or rows differ in more than their length.
            UnsupportedError: an entry is complex, or has values that do not fit into one column.

        Example:
            >>> [len(batch) for batch in TensorDict({"a": torch.arange(3)}, [3]).to_arrow_reader()]
            [3]
        """
        return arrow_stream.to_reader(self, separator, tensors, block_bytes)

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object:
        """Export the rows by Arrow's C data interface: polars, duckdb, pyarrow and pandas take a TensorDict as a table.

        Columns are those of `to_arrow`, in blocks as of `to_arrow_reader`.

        Args:
            requested_schema: the schema that the consumer asks for, as a capsule; columns are cast to it.

        Raises:
            MissingDependencyError: pyarrow is not installed. BatchSizeError: there is no batch dimension.
        """
        return arrow_stream.to_reader(self, None, False).__arrow_c_stream__(requested_schema)

    def to_pandas(self, *, separator: str | None = None) -> pd.DataFrame:
        """Convert to a pandas frame with a row per element of the first batch dimension.

        Args:
            separator: joins the keys of nested entries to the names of columns.

        Raises:
            InvalidArgumentError: there are nested entries and no separator. BatchSizeError: there is no batch
                dimension.
        """
        return pandas.to_pandas(self, separator)

    def to_parquet(self, path: FileLike, *, separator: str | None = None, tensors: bool = False, **kwargs: Any) -> None:
        """Write a parquet file with a row per element of the first batch dimension, in blocks of bounded memory.

        A file at a local path is replaced once all rows are written.

        Args:
            path: a path, or a file object open for writing.
            separator: joins the keys of nested entries to the names of columns.
            tensors: whether rows of several dimensions become Arrow's fixed-shape tensors instead of lists in lists.
            **kwargs: of `pyarrow.parquet.ParquetWriter`, such as `compression`; and `row_group_size`, the most rows of
                a row group.

        Raises:
            InvalidArgumentError: there are nested entries and no separator. BatchSizeError: there is no batch
                dimension, or the rows of an entry differ in more than their length.
            UnsupportedError: an entry is complex, or has values that do not fit into one column.
        """
        files.to_parquet(self, path, separator, tensors, kwargs)

    def to_csv(self, path: FileLike, *, separator: str | None = None, **kwargs: Any) -> None:
        """Write a csv file with a row per element of the first batch dimension, in blocks of bounded memory.

        A file at a local path is replaced once all rows are written.

        Args:
            path: a path, or a file object open for writing.
            separator: joins the keys of nested entries to the names of columns.
            **kwargs: of `pandas.DataFrame.to_csv`.

        Raises:
            InvalidArgumentError: there are nested entries and no separator, or an entry has several numbers in each
                row.
            BatchSizeError: there is no batch dimension. UnsupportedError: an entry is complex, or has values that are
                not text, numbers or dates.
        """
        files.to_csv(self, path, separator, kwargs)

    def to_json(self, path: FileLike, *, separator: str | None = None, lines: bool = False, **kwargs: Any) -> None:
        """Write a json file with a record per element of the first batch dimension, in blocks of bounded memory.

        Numbers are written in full, NaN as null. A file at a local path is replaced once all rows are written.

        Args:
            path: a local path, or a text file object open for writing.
            separator: joins the keys of nested entries to the names of fields.
            lines: whether to write one record per line instead of one list.
            **kwargs: of `pandas.DataFrame.to_json`; with any of them pandas writes the file, from one frame.

        Raises:
            InvalidArgumentError: there are nested entries and no separator. BatchSizeError: there is no batch
                dimension.
            UnsupportedError: JSON cannot represent a value.
        """
        files.to_json(self, path, separator, lines, kwargs)

    def to_mds(
        self,
        *,
        columns: dict[str, str] | None = None,
        out: Any = None,
        keep_local: bool = False,
        compression: str | None = None,
        hashes: list[str] | None = None,
        size_limit: int | str | None = 1 << 26,
        writer: Any = None,
        finish_writer: bool | None = None,
        **kwargs: Any,
    ) -> None:
        """Write the rows as shards of MosaicML's streaming format.

        Args:
            columns: the encoding of each entry, with nested keys joined by a dot; default: inferred from the first row.
            out: a directory, or a pair of a local and a remote directory.
            keep_local: whether to keep the local directory after the upload.
            compression: the compression of shards, such as "zstd".
            hashes: the names of hash functions for shards.
            size_limit: the largest size of a shard, in bytes.
            writer: an open `streaming.MDSWriter` to write to instead. It ignores all other arguments except `columns`
                and `finish_writer`.
            finish_writer: whether to finish this `writer`; default: it stays open.
            **kwargs: of `streaming.MDSWriter`.

        Raises:
            MissingDependencyError: the package `mosaicml-streaming` is not installed. UnsupportedError: an entry holds
                values that the format cannot encode.
        """
        mds.write(
            self,
            columns,
            writer,
            finish_writer,
            {
                "out": out,
                "keep_local": keep_local,
                "compression": compression,
                "hashes": hashes,
                "size_limit": size_limit,
                **kwargs,
            },
        )

    # -- tensors -----------------------------------------------------------------------------
    def to_safetensors(
        self, path: str | os.PathLike[str], *, separator: str = ".", metadata: Mapping[str, str] | None = None
    ) -> None:
        """Write the tensors to a `.safetensors` file.

        Batch sizes, names and values that are plain data are stored in its metadata, for `from_safetensors`; other
        readers find the tensors.

        Args:
            path: the file.
            separator: joins nested keys to the names of tensors.
            metadata: further metadata of the file.

        Raises:
            UntrustedDataError: a value is not plain data. InvalidArgumentError: two entries have one name.
        """
        check_separator(separator)
        safetensors_files.to_safetensors(self, path, separator, metadata)

    def to_padded_tensor(self, padding: float = 0.0, mask_key: NestedKey | None = None) -> TensorDict:
        """Pad the ragged entries (nested tensors, and entries of lazy stacks that differ) of a TensorDict.

        Args:
            padding: the value of added elements.
            mask_key: the key of a bool tensor of the padded batch size, which is True at the original positions.

        Raises:
            RuntimeError: `mask_key` is set, and the batch size is not ragged.
        """
        return objects_padding.to_padded_tensor(self, padding, mask_key)
