"""TensorDicts whose data can live anywhere.

A `TensorDict` is a dictionary of tensors that share leading batch dimensions, nested at will. Where the
tensors live (memory, CUDA, shared memory, files, HDF5, ...) is one argument; nothing else changes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tdstore import errors
from tdstore.arguments import refuse_type
from tdstore.base import TensorDictBase
from tdstore.builtin.tdz.pack_unpack import is_memmap_archive, pack_memmap, refresh_archive_checksums, unpack_memmap
from tdstore.container.concat.opening import concat
from tdstore.container.core.defaults import get_defaults_to_none, set_get_defaults_to_none
from tdstore.container.core.tensor_attrs import TensorAttrs
from tdstore.container.display.options import get_printoptions, set_printoptions
from tdstore.container.distribute.build import build
from tdstore.container.entries.unbatched import UnbatchedTensor
from tdstore.container.functions.compare import assert_allclose_td, assert_close
from tdstore.container.functions.construct_and_join import (
    cat,
    lazy_legacy,
    lazy_stack,
    maybe_dense_stack,
    set_lazy_legacy,
    stack,
)
from tdstore.container.functions.grouping import group_by
from tdstore.container.functions.merge import merge_tensordicts
from tdstore.container.functions.pack_layout import PackLayout
from tdstore.container.functions.padding import dense_stack_tds, pad, pad_sequence, unpad_sequence
from tdstore.container.functions.pytree import register_nodes
from tdstore.container.functions.torch_functions import teach_collate
from tdstore.container.functions.vmap import teach_vmap
from tdstore.container.persistence.moving import move
from tdstore.container.storage.copy_dataset import copy_dataset as copy
from tdstore.container.storage.handle import StoreHandle
from tdstore.container.storage.open_and_save import open_container
from tdstore.container.values.codecs import register_codec, register_enum
from tdstore.container.values.nontensor import MetaData, NonTensorData, NonTensorStack
from tdstore.convert.checkpoints.safetensors_files import from_safetensors
from tdstore.convert.objects.arrays import from_struct_array
from tdstore.convert.objects.collate import collate
from tdstore.convert.objects.npz import from_npz
from tdstore.convert.objects.python import (
    from_any,
    from_dict,
    from_list,
    from_namedtuple,
    from_tuple,
    fromkeys,
    make_tensordict,
)
from tdstore.convert.objects.pytree import from_pytree
from tdstore.convert.objects.reprs import parse_tensor_dict_string
from tdstore.convert.tables.arrow import from_arrow
from tdstore.convert.tables.files import from_csv, from_json
from tdstore.convert.tables.pandas import from_pandas
from tdstore.convert.tables.parquet import from_parquet
from tdstore.header import Header
from tdstore.hookspecs import Backend, Codec, hookimpl
from tdstore.io.housekeeping import DatasetInfo, delete, exists, info, list_datasets
from tdstore.io.opening import Location, Storage
from tdstore.io.verifying import verify
from tdstore.io.versions import prune, tag, untag, versions
from tdstore.keys import KEY_SEPARATOR
from tdstore.memmap import MemoryMappedTensor
from tdstore.modules.methods import from_module, from_modules
from tdstore.nn import TensorDictParams
from tdstore.persistent import PersistentTensorDict
from tdstore.registry import BackendStatus, BackendTable, registry
from tdstore.settings import (
    capture_non_tensor_stack,
    list_to_stack,
    set_capture_non_tensor_stack,
    set_list_to_stack,
)
from tdstore.store import Cap, Store
from tdstore.tensorclass.base import TensorClass
from tdstore.tensorclass.making import from_dataclass, is_tensorclass, tensorclass
from tdstore.tensorclass.typeddict import TypedTensorDict
from tdstore.tensorclass.wrapping import (
    find_tensorclass,
    tensorclass_name,
    unwrap_tensorclass,
    wrap_tensorclass,
)
from tdstore.tensordicts.kinds import (
    default_is_leaf,
    is_batchedtensor,
    is_bool,
    is_floating,
    is_inexact,
    is_integer,
    is_leaf_nontensor,
    is_non_tensor,
    is_tensor_collection,
)
from tdstore.tensordicts.lazystack.stack import LazyStackedTensorDict
from tdstore.tensordicts.rebuild import register_kinds
from tdstore.tensordicts.redis_names import LazyStackedTensorDictStore, TensorDictStore
from tdstore.tensordicts.resident.tensordict import TensorDict
from tdstore.types import Fault, LeafSpec, Mode, NestedKey, Read, Version, Write
from tdstore.utils import unravel_key, unravel_key_list, unravel_key_to_tuple

if TYPE_CHECKING:
    import os

    import pyarrow as pa

__version__ = "0.1.0"

TensorCollection = TensorDictBase | TensorClass | NonTensorData | NonTensorStack
"""What `is_tensor_collection` accepts, for type hints and `isinstance`."""
NonTensorDataBase = NonTensorData  # one value for a batch, `MetaData` included; stacks of values are none

register_nodes()
register_kinds()
teach_vmap()
teach_collate()


def open(location: Location = None, mode: Mode = "r", *, storage: Storage = None, **options: Any) -> TensorDictBase:
    """Open a dataset: as a `TensorDict` over live tensors where its store has them, else as a `PersistentTensorDict`.

    Nothing is read but the structure; entries are read when they are used. A `with` block closes the dataset.

    Args:
        location: a path or URL.
        mode: "r" reads a dataset that exists, and never changes it; "r+" changes one that exists; "w" makes a new one,
            replacing what is there; "x" makes a new one and refuses what is there; "a" is "r+", or new.
        storage: name of the backend. Default: found from the location.
        **options: of the backend.

    Raises:
        StoreNotFoundError: mode "r" or "r+", and there is no dataset at the location.
        StoreExistsError: mode "x", and something is there.
        CorruptStoreError: the dataset is damaged.
        DirtyStoreError: a writer ended in the middle of a change.
        PluginError: the backend's plugin is missing or failed.
        OptionError: an option that the backend does not have.

    Example:
        >>> TensorDict({"a": torch.arange(3)}, [3]).save("runs/1").close()
        >>> with tdstore.open("runs/1", mode="r+") as td:
        ...     td["a"] += 1
        >>> tdstore.open("runs/1")["a"].tolist()
        [1, 2, 3]
    """
    return open_container(location, storage=storage, mode=mode, **options)


def _check_data(data: object) -> None:
    if not is_tensor_collection(data):
        raise refuse_type("the data to save", "a TensorDict", data)


def save(data: TensorDictBase, prefix: Location = None, copy_existing: bool = False, **kwargs: Any) -> TensorDictBase:
    """Save a container as a new dataset: `data.save(prefix, ...)`.

    Args:
        data: a TensorDict of any kind.
        prefix: path or URL.
        copy_existing: accepted for compatibility.
        **kwargs: those of `TensorDict.save`.

    Raises:
        StoreExistsError: something is there, and `mode="x"`; or what is there is not a dataset.
        OptionError: an option that the backend does not have.

    Example:
        >>> tdstore.save(TensorDict({"a": torch.arange(3)}, [3]), "runs/1").batch_size
        torch.Size([3])
    """
    _check_data(data)
    saved: TensorDictBase = data.save(prefix, copy_existing, **kwargs)
    return saved


def memmap(data: TensorDictBase, prefix: Location = None, copy_existing: bool = False, **kwargs: Any) -> TensorDictBase:
    """Save a container as memory-mapped files: `data.memmap(prefix, ...)`.

    Args:
        data: a TensorDict of any kind.
        prefix: a directory. Default: temporary files.
        copy_existing: copy entries that are mapped from files somewhere else, instead of refusing to.
        **kwargs: those of `TensorDict.memmap`.

    Raises:
        InvalidStateError: the entries are mapped from files somewhere else, and `copy_existing` is False.

    Example:
        >>> tdstore.memmap(TensorDict({"a": torch.arange(3)}, [3]), "run").is_memmap()
        True
    """
    _check_data(data)
    saved: TensorDictBase = data.memmap(prefix, copy_existing, **kwargs)
    return saved


# With the signatures and the documentation of the class methods.
load = load_memmap = TensorDict.load
from_schema = TensorDict.from_schema
from_consolidated = TensorDict.from_consolidated


def from_h5(h5_file: Any, **kwargs: Any) -> TensorDictBase:
    """Open an HDF5 file: `TensorDict.from_h5(h5_file, ...)`."""
    return TensorDict.from_h5(h5_file, **kwargs)


def from_zarr(zarr_file: Any, **kwargs: Any) -> TensorDictBase:
    """Open a zarr group: `TensorDict.from_zarr(zarr_file, ...)`."""
    return TensorDict.from_zarr(zarr_file, **kwargs)


def to_arrow(data: TensorDictBase, *, separator: str | None = None, tensors: bool = True) -> pa.Table:
    """Convert to an Arrow table: `data.to_arrow(...)`, which `from_arrow` undoes.

    Args:
        data: a TensorDict of any kind.
        separator: joins the keys of nested entries to the names of columns; None makes structs of nested entries.
        tensors: whether rows of several dimensions become Arrow's fixed-shape tensors instead of lists in lists.

    Raises:
        BatchSizeError: there is no batch dimension. UnsupportedError: an entry is complex, or has values that do not
            fit into one column.
    """
    _check_data(data)
    return data.to_arrow(separator=separator, tensors=tensors)


def to_safetensors(
    data: TensorDictBase,
    path: str | os.PathLike[str],
    *,
    separator: str = ".",
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write a `.safetensors` file: `data.to_safetensors(path, ...)`, which `from_safetensors` reads.

    Args:
        data: a TensorDict of any kind.
        path: the file. It is replaced once all is written.
        separator: joins nested keys to the names of tensors.
        metadata: further metadata of the file.

    Raises:
        UntrustedDataError: a value is not plain data. InvalidArgumentError: two entries have one name.
    """
    _check_data(data)
    data.to_safetensors(path, separator=separator, metadata=metadata)


def append_memmap(prefix: str | os.PathLike[str], rows: TensorDictBase, *, allow_pickle: bool | None = None) -> None:
    """Append rows to a dataset of memory-mapped files, along its first batch dimension: all of them, or none.

    The files are those of `memmap` and `save`, here or in the `tensordict` package. Values that are not tensors grow
    with the rows.

    Args:
        prefix: the directory.
        rows: a TensorDict or an object of a tensorclass, with the same entries.
        allow_pickle: accepted for compatibility: no pickled value is read.

    Raises:
        StoreNotFoundError: there is no dataset. KeyNotFoundError: the rows lack an entry, or have a further one.
        BatchSizeError: rows of other shapes, or without a batch dimension. InvalidArgumentError: of another dtype.

    Example:
        >>> TensorDict({"a": torch.arange(3)}, [3]).memmap("steps")["a"].tolist()
        [0, 1, 2]
        >>> append_memmap("steps", TensorDict({"a": torch.tensor([7])}, [1]))
        >>> load_memmap("steps")["a"].tolist()
        [0, 1, 2, 7]
    """
    _check_data(rows)
    if not isinstance(allow_pickle, (bool, type(None))):
        raise refuse_type("allow_pickle", "True, False or None", allow_pickle)
    with open(prefix, "r+", storage="memmap") as td:
        td.extend(rows)


def backends() -> BackendTable:
    """Return what is installed, what each backend is for, and what failed to load and why."""
    return registry().status()


def register_backend(backend: Backend) -> None:
    """Declare a backend from this process, for notebooks and tests."""
    registry().register(backend)


def unregister_backend(name: str) -> None:
    """Forget a backend that `register_backend` declared."""
    registry().unregister(name)


__all__ = [
    "KEY_SEPARATOR",
    "Backend",
    "BackendStatus",
    "Cap",
    "Codec",
    "DatasetInfo",
    "Fault",
    "Header",
    "LazyStackedTensorDict",
    "LazyStackedTensorDictStore",
    "LeafSpec",
    "MemoryMappedTensor",
    "MetaData",
    "Mode",
    "NestedKey",
    "NonTensorData",
    "NonTensorDataBase",
    "NonTensorStack",
    "PackLayout",
    "PersistentTensorDict",
    "Read",
    "Store",
    "StoreHandle",
    "TensorAttrs",
    "TensorClass",
    "TensorCollection",
    "TensorDict",
    "TensorDictBase",
    "TensorDictParams",
    "TensorDictStore",
    "TypedTensorDict",
    "UnbatchedTensor",
    "Version",
    "Write",
    "append_memmap",
    "assert_allclose_td",
    "assert_close",
    "backends",
    "build",
    "capture_non_tensor_stack",
    "cat",
    "collate",
    "concat",
    "copy",
    "default_is_leaf",
    "delete",
    "dense_stack_tds",
    "errors",
    "exists",
    "find_tensorclass",
    "from_any",
    "from_arrow",
    "from_consolidated",
    "from_csv",
    "from_dataclass",
    "from_dict",
    "from_h5",
    "from_json",
    "from_list",
    "from_module",
    "from_modules",
    "from_namedtuple",
    "from_npz",
    "from_pandas",
    "from_parquet",
    "from_pytree",
    "from_safetensors",
    "from_schema",
    "from_struct_array",
    "from_tuple",
    "from_zarr",
    "fromkeys",
    "get_defaults_to_none",
    "get_printoptions",
    "group_by",
    "hookimpl",
    "info",
    "is_batchedtensor",
    "is_bool",
    "is_floating",
    "is_inexact",
    "is_integer",
    "is_leaf_nontensor",
    "is_memmap_archive",
    "is_non_tensor",
    "is_tensor_collection",
    "is_tensorclass",
    "lazy_legacy",
    "lazy_stack",
    "list_datasets",
    "list_to_stack",
    "load",
    "load_memmap",
    "make_tensordict",
    "maybe_dense_stack",
    "memmap",
    "merge_tensordicts",
    "move",
    "open",
    "pack_memmap",
    "pad",
    "pad_sequence",
    "parse_tensor_dict_string",
    "prune",
    "refresh_archive_checksums",
    "register_backend",
    "register_codec",
    "register_enum",
    "save",
    "set_capture_non_tensor_stack",
    "set_get_defaults_to_none",
    "set_lazy_legacy",
    "set_list_to_stack",
    "set_printoptions",
    "stack",
    "tag",
    "tensorclass",
    "tensorclass_name",
    "to_arrow",
    "to_safetensors",
    "unpack_memmap",
    "unpad_sequence",
    "unravel_key",
    "unravel_key_list",
    "unravel_key_to_tuple",
    "unregister_backend",
    "untag",
    "unwrap_tensorclass",
    "verify",
    "versions",
    "wrap_tensorclass",
]


def __dir__() -> list[str]:
    return sorted(__all__)
