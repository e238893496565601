"""The methods that are named after a storage: each is a line or two over the general ones."""

from __future__ import annotations

import os
import uuid
from concurrent.futures import Future
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, Literal, Self, cast, overload

import torch
from torch import Tensor

from tdstore.arguments import refuse_type
from tdstore.container.core.container import Container
from tdstore.container.core.locks import ALIAS, LOCKED, MAPPED, SHARED
from tdstore.container.core.tensorclasses import unwrap
from tdstore.container.persistence.saved_path import SavedPath
from tdstore.container.persistence.saving import absolute, later, refuse_new, trusting, unlocked
from tdstore.container.storage.describe import describe
from tdstore.container.storage.handle import StoreHandle
from tdstore.container.storage.open_and_save import allocate, open_container, over
from tdstore.container.varlen.nested_leaves import places_among
from tdstore.errors import InvalidStateError, InvalidTypeError, UnsupportedError
from tdstore.index.shapes import flat_args
from tdstore.io.opening import Location
from tdstore.keys import key_text
from tdstore.types import DeviceLike, LeafSpec, Mode, NestedKey, Path, SizeLike, StoreIndex, Write

if TYPE_CHECKING:
    from tdstore.tensordicts.base import TensorDictBase


class NamedStorageMixin(Container):
    """memmap and related methods, to_h5 and from_h5, share_memory_."""

    __slots__ = ()

    # -- files -------------------------------------------------------------------------------
    @overload
    def memmap(
        self, prefix: Location = None, copy_existing: bool = False, *, return_early: Literal[True], **kwargs: Any
    ) -> Future[Self]: ...
    @overload
    def memmap(self, prefix: Location = None, copy_existing: bool = False, **kwargs: Any) -> Self: ...
    def memmap(self, prefix: Location = None, copy_existing: bool = False, **kwargs: Any) -> Any:
        """Save as memory-mapped files under `prefix`; the result is a locked TensorDict over them, on the CPU.

        The tensors of the result *are* the files: writing into them writes to the files, and other processes that load
        the directory see the change. Without `prefix`, entries that are already mapped from files stay where they are.

        Args:
            prefix: a directory. Default: temporary files, deleted with the last tensor over them. For a URL, its own
                backend is used.
            copy_existing: copy entries that are mapped from files somewhere else, instead of refusing to.
            **kwargs: `return_early=True` returns a future at once; others are those of `save`.

        Raises:
            InvalidStateError: the entries are mapped from files somewhere else, and `copy_existing` is False.
            StoreExistsError: `existsok=False`, and something exists at `prefix`.

        Example:
            >>> td = TensorDict({"a": torch.zeros(3)}, [3]).memmap("run")
            >>> td["a"][0] = 1.0
            >>> TensorDict.load_memmap("run")["a"]
            MemoryMappedTensor([1., 0., 0.])
        """
        files = _files_of(self) if self._state & MAPPED else None
        if prefix is None and files is not None and not kwargs.keys() - {"return_early", "atomic"}:
            current = self._in_class(over(*self._binding).lock_())
            return later(lambda: current) if kwargs.get("return_early") else current
        _to_files(prefix, kwargs)
        prefix = absolute(prefix, kwargs.get("storage")) if kwargs.get("return_early") else prefix
        if self._state & MAPPED and not copy_existing and kwargs.get("storage") == "memmap" and prefix is not None:
            _refuse_copy(self, files, str(prefix))

        def run() -> Any:
            td = self.save(prefix, copy_existing, **kwargs)
            if not td._state & MAPPED:
                td._set_device(torch.device("cpu"))
                td._mark_mapped()
            return self._in_class(td)

        return later(run) if kwargs.pop("return_early", False) else run()

    def _mark_mapped(self) -> None:
        """Mark the leaves as memory-mapped files, also temporary ones."""
        if self._state & (MAPPED | SHARED):
            self._state = self._state & ~SHARED | MAPPED
        for group in self._groups():
            group._mark_mapped()

    def memmap_(self, prefix: Location = None, copy_existing: bool = False, **kwargs: Any) -> Self:
        """Save as `memmap` does, in place: the tensors of this TensorDict become the memory-mapped ones.

        Args:
            prefix: a directory. Default: temporary files, deleted with the last tensor over them.
            copy_existing: copy entries that are mapped from files somewhere else, instead of refusing to.
            **kwargs: `return_early=True` returns a future at once; others are those of `save`.

        Returns:
            This TensorDict, locked.

        Raises:
            InvalidStateError: the entries are in shared memory; or they are mapped from files somewhere else, and
                `copy_existing` is False.

        Example:
            >>> td = TensorDict({"a": torch.zeros(3)}, [3])
            >>> td.memmap_("run").is_memmap()
            True
        """
        early: Any = kwargs.pop("return_early", False)
        prefix = absolute(prefix) if early else prefix

        def run() -> Any:  # self
            if prefix is None and not kwargs.keys() - {"atomic"} and _files_of(self) is not None:
                return self.lock_()
            _refuse_other_memory(self, SHARED, "memmap_", "shared memory, where other processes see its writes")
            return self._become(self.memmap(prefix, copy_existing, **kwargs))

        return later(run) if early else run()  # type: ignore[return-value]  # or a future of self

    @overload
    def memmap_like(
        self,
        prefix: Location = None,
        copy_existing: bool = False,
        *,
        existsok: bool = True,
        return_early: Literal[True],
        **kwargs: Any,
    ) -> Future[Self]: ...
    @overload
    def memmap_like(
        self, prefix: Location = None, copy_existing: bool = False, *, existsok: bool = True, **kwargs: Any
    ) -> Self: ...
    def memmap_like(
        self, prefix: Location = None, copy_existing: bool = False, *, existsok: bool = True, **kwargs: Any
    ) -> Any:
        """Allocate memory-mapped files for the same keys, shapes and dtypes, filled with zeros.

        The tensors are not read, so an expanded TensorDict of a million rows takes no time and no memory. Values that
        are not tensors are copied. Disk space is reserved, so that later writes cannot meet a full disk; they take less
        time by as much. `preallocate=False` leaves that out, for files of which few rows are ever written.

        Args:
            prefix: a directory. Default: temporary files, deleted with the last tensor over them.
            copy_existing: accepted for compatibility.
            existsok: False refuses to replace an existing dataset.
            **kwargs: `return_early=True` returns a future at once; others are those of `save`.

        Returns:
            A locked TensorDict over the files, on the CPU.

        Raises:
            StoreExistsError: something exists at `prefix`, and `existsok` is False.

        Example:
            >>> step = TensorDict({"obs": torch.zeros(84, 84, dtype=torch.uint8)})
            >>> TensorDict.memmap_like(step.expand(1000), "buffer")["obs"].shape
            torch.Size([1000, 84, 84])
        """
        groups, specs = describe(self)
        # Where the rows of nested tensors are is no data: without it there are no rows.
        places: list[tuple[Path, StoreIndex]] = [(path, ()) for path in places_among(groups, specs)]
        writes = [Write(path, (), part) for (path, _), part in zip(places, self._read_pieces(places), strict=True)]
        _to_files(prefix, kwargs)
        storage = kwargs.pop("storage", None)
        early = kwargs.pop("return_early", False)
        prefix = absolute(prefix, storage) if early else prefix
        for name in ("num_threads", "share_non_tensor", "robust_key"):
            kwargs.pop(name, None)

        def run() -> Any:
            td = over(allocate(groups, specs, prefix, storage, "w" if existsok else "x", kwargs, writes))
            td._set_device(torch.device("cpu"))
            td._mark_mapped()
            return td.lock_()

        return later(run) if early else run()

    @classmethod
    def load_memmap(cls, prefix: Location, *args: Any, **kwargs: Any) -> TensorDictBase:
        """Load a dataset: an older name of `load`, for every backend.

        Args:
            prefix: path or URL.
            *args: those of `load`, as are `**kwargs`.

        Raises:
            StoreNotFoundError: there is no dataset at the location.
            CorruptStoreError: the dataset is damaged.

        Example:
            >>> saved = TensorDict({"a": torch.arange(3)}, [3]).memmap("run")
            >>> TensorDict.load_memmap("run").batch_size
            torch.Size([3])
        """
        td: TensorDictBase = cls.load(prefix, *args, **kwargs)
        return td

    def load_memmap_(self, prefix: Location, *args: Any, **kwargs: Any) -> Self:
        """Load in place: `load_` by its older name."""
        return self.load_(prefix, *args, **kwargs)

    def is_memmap(self) -> bool:
        """Return whether the tensors of this TensorDict are views of memory-mapped files.

        Example:
            >>> td = TensorDict({"a": torch.zeros(3)}, [3])
            >>> td.is_memmap(), td.memmap().is_memmap()
            (False, True)
        """
        return bool(self._state & MAPPED)

    def _place(self) -> tuple[StoreHandle, Path] | None:
        """Return the store that the tensors are views of, and the path in it."""
        place: tuple[StoreHandle, Path] | None = getattr(self, "_binding", None)
        return place

    @property
    def saved_path(self) -> SavedPath | None:
        """Where the memory-mapped files are: None for temporary ones; `AttributeError` if there are none.

        It is a string that has the methods of a `pathlib.Path`: `td.saved_path / "a.memmap"`.
        If a relative path was passed, it is relative as long as the working directory is the same; otherwise absolute.
        """
        binding = self._place()
        if binding is None or not self._state & MAPPED:
            raise AttributeError("saved_path: this TensorDict is not memory-mapped")
        handle, path = binding
        if handle.location is None:
            return None
        place, root, written = handle.store.group_location(path), handle.store.group_location(()), handle.location
        if written is not None and not os.path.isabs(written) and os.path.abspath(written) == root:
            return SavedPath(PurePath(written, os.path.relpath(place, root)))
        return None if place is None else SavedPath(place)

    def make_memmap(
        self, key: NestedKey, shape: SizeLike, *, dtype: torch.dtype | None = None, robust_key: bool | None = True
    ) -> Tensor:
        """Add a zero-filled entry to the dataset of this TensorDict, locked or not."""
        spec = LeafSpec(flat_args((shape,)), dtype or torch.get_default_dtype())
        return self._add_leaf(key, spec, None)

    def make_memmap_from_tensor(
        self,
        key: NestedKey,
        tensor: Tensor,
        *,
        copy_data: bool = True,
        existsok: bool = True,
        robust_key: bool | None = True,
    ) -> Tensor:
        """Add an entry with the shape and dtype of a tensor, and its data unless `copy_data=False`.

        If there is an entry of that name, it is an error, whatever `existsok` says: a file that others may have
        mapped is not replaced.
        """
        if not isinstance(tensor, Tensor):
            raise refuse_type("tensor", "a tensor", tensor)
        if tensor.is_nested:
            raise UnsupportedError(
                f"make_memmap_from_tensor makes one file, and the nested tensor {key_text(key)} needs several",
                hint="open the dataset with mode='r+', and set() it there",
            )
        return self._add_leaf(key, LeafSpec(tensor.shape, tensor.dtype), tensor if copy_data else None)

    def make_memmap_from_storage(
        self,
        key: NestedKey,
        storage: torch.UntypedStorage,
        shape: SizeLike,
        *,
        dtype: torch.dtype | None = None,
        robust_key: bool | None = True,
    ) -> Tensor:
        """Add an entry with the bytes of an `UntypedStorage`.

        Raises:
            UnsupportedError: the storage belongs to another file, whose memory the entry could not share.
        """
        if not isinstance(storage, torch.UntypedStorage):
            raise refuse_type("storage", "a torch.UntypedStorage", storage)
        mapped = getattr(storage, "tdstore_file", None)  # of a MemoryMappedTensor
        file = storage.filename if mapped is None else mapped.name
        if file is not None:
            raise UnsupportedError(
                f"the storage for {key_text(key)} is mapped from the file {file}; an entry has a file of its own",
                hint="make_memmap_from_tensor copies the values",
            )
        size = torch.Size(flat_args((shape,)))
        tensor = torch.empty(0, dtype=dtype or torch.get_default_dtype(), device="cpu")
        tensor.set_(storage, 0, size, torch.empty(size, device="meta").stride())
        return self._add_leaf(key, LeafSpec(size, tensor.dtype), tensor)

    def _add_leaf(self, key: NestedKey, spec: LeafSpec, tensor: Tensor | None) -> Tensor:
        raise UnsupportedError("make_memmap needs a TensorDict over memory-mapped files", hint="use set() here")

    def memmap_refresh_(self, *, allow_pickle: bool | None = None) -> Self:
        """Read the dataset again: entries that other processes added appear, and removed ones disappear.

        Args:
            allow_pickle: accepted for compatibility.

        Returns:
            This TensorDict.

        Raises:
            InvalidStateError: this TensorDict is not over memory-mapped files.

        Example:
            >>> td = TensorDict({"a": torch.zeros(3)}, [3]).memmap("run")
            >>> other = TensorDict.load_memmap("run", mode="r+")
            >>> other.make_memmap("b", (3,)).shape
            torch.Size([3])
            >>> list(td.memmap_refresh_().keys())
            ['a', 'b']
        """
        binding = self._place()
        if binding is None:
            raise InvalidStateError("memmap_refresh_: this TensorDict is not over memory-mapped files")
        handle, path = binding
        fresh = open_container(
            handle.location,
            storage=handle.backend,
            mode="r+" if handle.store.writable else "r",
            subpath=path or None,
            trust=handle.trusted,
        )
        locked, device = self._state & LOCKED, self._device
        self._become(fresh)
        self._set_device(device)
        return self.lock_() if locked else self

    # -- others ------------------------------------------------------------------------------
    def to_h5(self, filename: Location, **kwargs: Any) -> TensorDictBase:
        """Save as one HDF5 file. Needs `tdstore-h5`.

        Args:
            filename: the file; an existing one is replaced.
            **kwargs: those of `save`, and options that apply to every dataset in the file, such as `chunks` and
                `compression`.

        Returns:
            A `PersistentTensorDict` over the file, unlocked and writable.

        Raises:
            PluginError: the plugin is not installed.
            StoreExistsError: what is there is not a dataset; or `mode="x"`.

        Example:
            >>> with TensorDict({"a": torch.arange(3)}, [3]).to_h5("data.h5") as td:
            ...     print(td["a"])
            tensor([0, 1, 2])
        """
        made: TensorDictBase = unlocked(self.save(filename, storage="h5", **kwargs))
        return made

    def to_zarr(self, filename: object, *, allow_pickle: bool | None = None, **kwargs: Any) -> TensorDictBase:
        """Save as a zarr store. Needs `tdstore-zarr`.

        Args:
            filename: a path or URL, or a store object of zarr. A `LocalStore` or `ZipStore` stands for its path, a
                `MemoryStore` holds the data itself, and so do others, for which `single_writer=True` must promise that
                no other process writes.
            allow_pickle: accepted for compatibility: what is pickled (with `trust=True`) is read by the result.
            **kwargs: those of `save`, and options that apply to every array, such as `chunks` and `shards`.

        Returns:
            A `PersistentTensorDict` over the store, unlocked and writable.

        Raises:
            PluginError: the plugin is not installed.
            StoreExistsError: what is there is not a dataset; or `mode="x"`.

        Example:
            >>> with TensorDict({"a": torch.arange(3)}, [3]).to_zarr("data.zarr") as td:
            ...     print(td["a"])
            tensor([0, 1, 2])
        """
        trusting(allow_pickle)
        made: TensorDictBase = unlocked(self.save(cast(Location, filename), storage="zarr", **kwargs))
        return made

    def to_store(
        self,
        *,
        backend: str = "redis",
        host: str = "localhost",
        port: int = 6379,
        db: int = 0,
        unix_socket_path: str | None = None,
        prefix: str = "tensordict",
        device: DeviceLike | None = None,
        location: Location = None,
        **kwargs: Any,
    ) -> TensorDictBase:
        """Save to a key-value server; `from_store` of the returned class opens the dataset again.

        Args:
            backend: "redis", "dragonfly" or another backend.
            prefix: the beginning of the name of the dataset, if `location` does not contain the name.
            device: the device of the tensors that reads return.
            location: a URL, or the name of the dataset; default: a new name.
            **kwargs: options of the backend.

        Returns:
            A `TensorDictStore`, or for a lazy stack a `LazyStackedTensorDictStore`; for a backend that does not use
            the protocol of redis, the container over it.
        """
        server = {"host": host, "port": port, "unix_socket_path": unix_socket_path, "prefix": prefix, **kwargs}
        place = on_server(backend, uuid.uuid4().hex, {"db": db, **server})
        if location is not None:
            place["location"] = location
        td = unlocked(self.save(**place))
        if place["storage"] == "redis":
            made: TensorDictBase = Container._on_redis(td, device)
            return made
        found: TensorDictBase = td if device is None else td.to(device)
        return found

    def share_memory_(self) -> Self:
        """Move the leaves to shared memory, which other processes see without a copy, and lock this TensorDict.

        On a GPU nothing happens: CUDA memory can be sent to other processes as it is. Leaves of a GPU beside those of
        the CPU stay there, too.

        Returns:
            This TensorDict.

        If a leaf is a parameter or requires a gradient, as those of `from_module` do, each tensor is moved in place:
        it stays the same object, and its module shares it, too. The same holds for the tensors of `.data` and
        `detach()` of such a TensorDict.

        Raises:
            InvalidStateError: the leaves are in memory-mapped files, which processes already share.

        Example:
            >>> td = TensorDict({"a": torch.zeros(3)}, [3]).share_memory_()
            >>> td.is_shared(), td.is_locked
            (True, True)
        """
        _refuse_other_memory(self, MAPPED, "share_memory_", "memory-mapped files, which other processes open, too")
        if self._device is not None and self._device.type == "cuda":
            return self
        stored = isinstance(self, Container._stored_class)
        if not stored and self.is_shared():
            return self.lock_()  # other processes have this memory, and go on seeing what is written
        alias = self._state & ALIAS
        if not stored and (alias or any(leaf.requires_grad or leaf.is_cuda for leaf in self._leaf_list())):
            _share_tensors(self)
            return self.lock_()
        return self._become(self.save(storage="shared"))

    @classmethod
    def from_h5(
        cls,
        filename: Location,
        *,
        mode: Mode = "r",
        auto_batch_size: bool = False,
        batch_dims: int | None = None,
        batch_size: SizeLike | None = None,
        device: DeviceLike | None = None,
        non_tensor_as_stack: bool = False,
    ) -> TensorDictBase:
        """Open an HDF5 file, ours or a foreign one, as a `PersistentTensorDict`. Needs `tdstore-h5`.

        Only the structure is read: entries are read when they are indexed.

        Args:
            filename: the file.
            mode: "r", or "r+" to change the file.
            auto_batch_size: use the largest batch size that all entries share. This is always done for a foreign file.
            batch_dims: at most this many batch dimensions.
            batch_size: a batch size to use instead of that in the file; the file is not changed.
            device: the device of the tensors that reads return.
            non_tensor_as_stack: accepted for compatibility: rows of text have one value each.

        Raises:
            InvalidTypeError: both `batch_size` and `auto_batch_size`.
            BatchSizeError: the entries do not have that batch size.
            OptionError: mode "w" or "x", which would make a new file.
            StoreNotFoundError: there is no such file.

        Example:
            >>> TensorDict({"a": torch.arange(3)}, [3]).to_h5("data.h5").close()
            >>> with TensorDict.from_h5("data.h5") as td:
            ...     print(td[1:]["a"])
            tensor([1, 2])
        """
        made: TensorDictBase = _opened(filename, "h5", auto_batch_size, batch_dims, batch_size, device, mode=mode)
        return made

    @classmethod
    def from_zarr(
        cls,
        filename: object,
        *,
        mode: Mode = "r",
        auto_batch_size: bool = False,
        batch_dims: int | None = None,
        batch_size: SizeLike | None = None,
        device: DeviceLike | None = None,
        non_tensor_as_stack: bool = False,
        allow_pickle: bool | None = None,
    ) -> TensorDictBase:
        """Open a zarr store, ours or a foreign one, as a `PersistentTensorDict`.

        It is a path, a URL, or a store object of zarr, as for `to_zarr`; arguments as of `from_h5` and `load`.
        """
        options: dict[str, Any] = {"mode": mode, **trusting(allow_pickle)}
        place = cast(Location, filename)
        made: TensorDictBase = _opened(place, "zarr", auto_batch_size, batch_dims, batch_size, device, **options)
        return made


def _opened(
    location: Location, storage: str, auto: bool, batch_dims: int | None, batch_size: Any, device: Any, **options: Any
) -> Any:
    if batch_size is not None and auto:
        raise InvalidTypeError("give batch_size or auto_batch_size=True, not both")
    refuse_new(options["mode"], f"from_{storage}")
    if storage == "h5" and (locking := Container._stored_class.LOCKING) is not None:
        options["locking"] = locking
    td = open_container(location, storage=storage, **options)
    if batch_size is not None:
        td.batch_size = batch_size
    elif auto or batch_dims is not None:
        td.auto_batch_size_(batch_dims)
    td = unwrap(td)
    return td if device is None else td.to(device)


REDIS_LIKE = ("redis", "dragonfly", "valkey", "keydb")
"""Servers that speak the protocol of the redis backend."""


def on_server(backend: str, name: str, server: dict[str, Any]) -> dict[str, Any]:
    """Build location, backend and options of a dataset on a server from the arguments that identify it."""
    options = {"host": "localhost", "port": 6379, "db": 0, **server}
    prefix = options.pop("prefix", "tensordict")
    if options.get("unix_socket_path") is not None:
        options.pop("host")
        options.pop("port")
    else:
        options.pop("unix_socket_path", None)
    storage = "redis" if backend in REDIS_LIKE else backend
    return {"location": f"{prefix}/{name}", "storage": storage, **options}


def _files_of(td: Any) -> str | None:
    """Return the directory that exactly these entries are mapped from, or None for temporary files."""
    if not td._state & MAPPED or getattr(td, "_binding", None) is None or td._binding[0].location is None:
        return None
    return str(td.saved_path)


def _share_tensors(td: Any) -> None:
    """Move each tensor to shared memory of its own; one of a GPU is shared as it is."""
    for leaf in td._leaf_list():
        if not leaf.is_cuda:
            leaf.share_memory_()
    groups = [td]
    while groups:
        group = groups.pop()
        group._state |= SHARED
        groups += group._groups()


def _refuse_other_memory(td: Any, state: int, method: str, where: str) -> None:
    if td._state & state:
        raise InvalidStateError(
            f"{method}: memmap and shared memory are mutually exclusive: the entries are in {where}; "
            "clone() gives a copy that can be moved"
        )


def _refuse_copy(td: Any, files: str | None, prefix: str) -> None:
    """Refuse to copy mapped entries to another place."""
    part = getattr(td, "_binding", None) is None  # rows, or some of the keys, of a dataset
    if part or (files is not None and os.path.realpath(files) != os.path.realpath(prefix)):
        raise InvalidStateError(
            f"the entries are mapped from {files or 'files'} already; pass copy_existing=True to copy them to {prefix}"
        )


def _to_files(prefix: Location, options: dict[str, Any]) -> None:
    """Return the backend that a `memmap` method uses: files, unless the location is a URL of another backend."""
    archive = options.pop("archive", None)
    if archive is None:
        archive = str(prefix).lower().endswith(".tdz")
    if "storage" not in options and (prefix is None or "://" not in str(prefix)):
        options["storage"] = "tdz" if archive else "memmap"
        # Working files, as their users expect: they outlive the process; save() makes them outlive a power cut.
        options.setdefault("durable", "none")
    if options.get("storage") == "memmap":
        options.setdefault("pack", False)  # `tensordict` reads a file for each leaf
