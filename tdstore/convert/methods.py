"""The conversions as methods: each a line over a function of this folder."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from tdstore.container.core.container import Container
from tdstore.convert.checkpoints import safetensors_files
from tdstore.convert.objects import arrays, python, pytree
from tdstore.convert.objects import padding as objects_padding
from tdstore.convert.tables import arrow, files, mds, pandas

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
    """from_any, to_pandas and their kin."""

    __slots__ = ()

    # Whatever the container, these make in-memory TensorDicts; a tensorclass makes its own of them.
    from_any = _maker(python.from_any)
    from_dataclass = _maker(python.from_dataclass)
    from_namedtuple = _maker(python.from_namedtuple)
    from_tuple = _maker(python.from_tuple)
    from_list = _maker(python.from_list)
    from_pytree = _maker(pytree.from_pytree)
    from_struct_array = _maker(arrays.from_struct_array)
    from_arrow = _maker(arrow.from_arrow)
    from_pandas = _maker(pandas.from_pandas)
    from_parquet = _maker(files.from_parquet)
    from_csv = _maker(files.from_csv)
    from_json = _maker(files.from_json)
    from_safetensors = _maker(safetensors_files.from_safetensors)

    # -- Python ------------------------------------------------------------------------------
    def from_dict_instance(
        self,
        input_dict: Mapping[Any, Any],
        *,
        auto_batch_size: bool | None = None,
        batch_size: Any = None,
        device: Any = None,
        batch_dims: int | None = None,
        names: Sequence[str | None] | None = None,
    ) -> TensorDictBase:
        """Build as `from_dict`, where nested dicts take the classes that the entries of this TensorDict have."""
        return python.from_dict_instance(self, input_dict, auto_batch_size, batch_size, device, batch_dims, names)

    def tolist(
        self,
        *,
        convert_nodes: bool = True,
        convert_tensors: bool | Literal["numpy"] = False,
        tolist_first: bool = False,
        as_linked_list: bool = False,
    ) -> Any:
        """Return nested lists over the batch dimensions, of a dict per position; without batch dimensions, that dict.

        Args:
            convert_nodes: False keeps TensorDicts instead of dicts.
            convert_tensors: tensors become (lists of) numbers, or with "numpy" arrays.
            tolist_first: nested TensorDicts with batch dimensions become lists too, and values lists of them.
            as_linked_list: taken for compatibility: the list is a plain one.

        Raises:
            TypeError: `convert_tensors` without `convert_nodes`.

        Example:
            >>> TensorDict({"a": [1, 2]}, [2]).tolist(convert_tensors=True)
            [{'a': 1}, {'a': 2}]
        """
        return python.to_list(self, convert_nodes, convert_tensors, tolist_first)

    def to_namedtuple(self, dest_cls: type | None = None) -> tuple[Any, ...]:
        """Convert to a named tuple of the entries; nested TensorDicts become named tuples too.

        Args:
            dest_cls: its class; default: one called `GenericDict` with a field per entry.

        Raises:
            ValueError: a key that cannot be the name of a field. TypeError: `dest_cls` has other fields.
        """
        return python.to_namedtuple(self, dest_cls)

    def to_pytree(self) -> Any:
        """Return the lists, tuples, dicts and named tuples that `from_pytree` was given, around tensors.

        A TensorDict that was not made by `from_pytree` is returned itself.
        """
        return pytree.to_pytree(self)

    # -- numpy -------------------------------------------------------------------------------
    def numpy(self) -> dict[str, Any]:
        """Return nested dicts of numpy arrays, which share memory with the tensors; values as they are.

        Raises:
            TypeError: a dtype that numpy lacks, such as bfloat16. RuntimeError: a tensor that requires a gradient.
        """
        return arrays.to_numpy(self)

    def to_struct_array(self) -> np.ndarray[Any, Any]:
        """Convert to a structured numpy array of the batch's shape with a field per entry, nested TensorDicts as nested
        fields.

        A stored TensorDict is read in blocks of rows.

        Raises:
            TypeError: a dtype that numpy lacks, such as bfloat16.

        Example:
            >>> TensorDict({"a": [1, 2], "b": torch.zeros(2, 3)}, [2]).to_struct_array()["a"]
            array([1, 2])
        """
        return arrays.to_struct_array(self)

    # -- tables ------------------------------------------------------------------------------
    def to_arrow(self, *, separator: str | None = None) -> pa.Table:
        """Convert to an Arrow table with a row per element of the first batch dimension.

        Contiguous tensors of one number per row share their memory with it. Further dimensions become lists of fixed
        length, nested TensorDicts structs, or with a `separator` columns. bfloat16 and float8 become float32.

        Raises:
            BatchSizeError: no rows. UnsupportedError: complex numbers, or values that do not fit into one column.
        """
        return arrow.to_arrow(self, separator)

    def to_pandas(self, *, separator: str | None = None) -> pd.DataFrame:
        """Convert to a pandas frame with a row per element of the first batch dimension.

        Args:
            separator: between the keys of nested entries in the names of their columns.

        Raises:
            ValueError: nested entries and no separator. BatchSizeError: no rows.
        """
        return pandas.to_pandas(self, separator)

    def to_parquet(self, path: Any, *, separator: str | None = None, **kwargs: Any) -> None:
        """Write a parquet file with a row per element of the first batch dimension, in blocks of bounded memory.

        A file at a local path is replaced when all is written.

        Args:
            separator: between the keys of nested entries in the names of their columns.
            **kwargs: of `pyarrow.parquet.ParquetWriter`, such as `compression`.

        Raises:
            ValueError: nested entries and no separator. BatchSizeError: no rows.
            UnsupportedError: complex numbers, or values that do not fit into one column.
        """
        files.to_parquet(self, path, separator, kwargs)

    def to_csv(self, path: Any, *, separator: str | None = None, **kwargs: Any) -> None:
        """Write a csv file, likewise; `kwargs` are those of `pandas.DataFrame.to_csv`."""
        files.to_csv(self, path, separator, kwargs)

    def to_json(self, path: Any, *, separator: str | None = None, lines: bool = False, **kwargs: Any) -> None:
        """Write a json file of records, likewise, or with `lines` of a record a line.

        Numbers are written in full, NaN as null. `kwargs` are those of `pandas.DataFrame.to_json`; with any of them
        pandas writes the file, from one frame.
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
        **kwargs: Any,
    ) -> None:
        """Write the rows as shards of MosaicML's streaming format.

        Args:
            columns: the encoding of each entry (nested keys joined by a dot); default: told from the entries.
            out: directory, or (local, remote) pair.
            writer: a `streaming.MDSWriter` to write to instead, which is left open; the other arguments are its own.

        Raises:
            MissingDependencyError: the package `mosaicml-streaming` is not installed.
        """
        mds.write(
            self,
            columns,
            writer,
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
    def to_safetensors(self, path: Any, *, separator: str = ".", metadata: Mapping[str, str] | None = None) -> None:
        """Write the tensors to a `.safetensors` file, nested keys joined by `separator`.

        Batch sizes, names and values that are plain data go along in its metadata, for `from_safetensors`; other
        readers find the tensors.

        Raises:
            UntrustedDataError: a value that is not plain data. ValueError: two entries with one name.
        """
        safetensors_files.to_safetensors(self, path, separator, metadata)

    def to_padded_tensor(self, padding: float = 0.0, mask_key: Any = None) -> TensorDict:
        """Pad the ragged entries (nested tensors, and entries of lazy stacks that differ) of a TensorDict.

        Args:
            padding: fills what is missing.
            mask_key: where to put a bool tensor that is true for what was there.

        Raises:
            RuntimeError: `mask_key`, and the batch size is not ragged.
        """
        return objects_padding.to_padded_tensor(self, padding, mask_key)
