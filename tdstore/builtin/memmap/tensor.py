"""`MemoryMappedTensor`: a tensor over a file, made of plain torch parts, so that its operations run at full speed."""

from __future__ import annotations

import ctypes
import math
import os
import stat
import sys
import tempfile
import weakref
from collections.abc import Sequence
from multiprocessing.context import get_spawning_popen
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from tdstore.arguments import as_device, number_like
from tdstore.builtin.mapping import map_fd
from tdstore.builtin.memmap.sizes import as_rows, parse_size, shape_text, storage_size
from tdstore.builtin.tensorbytes import write_tensor
from tdstore.dtypes import as_dtype
from tdstore.errors import (
    BatchSizeError,
    CorruptStoreError,
    InvalidArgumentError,
    InvalidStateError,
    InvalidTypeError,
    StoreNotFoundError,
)
from tdstore.index.nested import nested_over
from tdstore.pickling import rebuild
from tdstore.storekit import files, refusals
from tdstore.storekit.session import Lease
from tdstore.types import DeviceLike


class MemoryMappedTensor(Tensor):
    """A tensor whose memory is a file.

    Indexing, `split`, `chunk` and `unbind` return one too where the result shares the file: a slice, a row, a step, and
    its own slices. Results of other operations, masks and lists of rows are plain tensors. Pickling sends the name of
    the file, and for a part its offset, shape and strides, not the data; the file must exist when it is unpickled,
    and both sides see writes.

    Example:
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     mapped = MemoryMappedTensor.from_tensor(torch.zeros(1000), filename=f"{folder}/x")
        ...     row = pickle.loads(pickle.dumps(mapped[3:5]))
        ...     mapped.fill_(7).sum(), row
        (tensor(7000.), MemoryMappedTensor([7., 7.]))
    """

    # Subclasses of Tensor normally pay for a Python call around each operation.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def wrap(
        mapped: Tensor, name: str | None, *, shared: bool = True, lease: Lease | None = None, offset: int | None = None
    ) -> MemoryMappedTensor:
        """Wrap a mapped plain tensor; `lease` keeps its session alive, `offset` is its first byte in a shared file."""
        tensor: MemoryMappedTensor = Tensor._make_subclass(MemoryMappedTensor, mapped)
        if lease is not None:
            tensor._held = lease  # type: ignore[attr-defined]  # as long as this tensor, the base of its views, lives
        record = MappedFile(name, shared, None if lease is None else weakref.ref(lease), offset)
        # Every view of the memory, of any class, has this storage: `io.mapped.sent` finds the file by it.
        tensor.untyped_storage().tdstore_file = record  # type: ignore[attr-defined]
        return tensor

    def __getitem__(self, index: Any) -> Tensor:
        part = _getitem(self, index)
        return part.as_subclass(MemoryMappedTensor) if part._is_view() else part

    def split(self, split_size: Any, dim: int = 0) -> tuple[Tensor, ...]:
        """Apply [`torch.split`][]; the pieces share the file."""
        return _mapped_parts(super().split(split_size, dim))  # type: ignore[no-untyped-call]

    def chunk(self, chunks: int, dim: int = 0) -> tuple[Tensor, ...]:
        """Apply [`torch.chunk`][]; the pieces share the file."""
        return _mapped_parts(super().chunk(chunks, dim))

    def unbind(self, dim: int = 0) -> tuple[Tensor, ...]:
        """Apply [`torch.unbind`][]; the pieces share the file."""
        return _mapped_parts(super().unbind(dim))

    @property
    def _file(self) -> MappedFile:
        return getattr(self.untyped_storage(), "tdstore_file", _ANONYMOUS)

    @property
    def _filename(self) -> str | None:
        return self._file.name

    @property
    def filename(self) -> str:
        """Return the absolute name of the file.

        Raises:
            InvalidStateError: the tensor is anonymous (made without a file name).
        """
        if self._filename is None:
            raise InvalidStateError("this memory-mapped tensor has no file name: it is anonymous")
        return self._filename

    def is_shared(self) -> bool:
        """Check whether other processes can see the file; that of an anonymous tensor belongs to this process alone."""
        return self._filename is not None

    @classmethod
    def from_tensor(
        cls,
        input: Tensor,
        *,
        filename: str | os.PathLike[str] | None = None,
        existsok: bool = False,
        copy_existing: bool = False,
        shape: Sequence[int] | None = None,
        copy_data: bool = True,
    ) -> MemoryMappedTensor:
        """Copy a tensor into a new file (an anonymous one without `filename`) and map it.

        Args:
            input: any strided tensor, of any device; expanded and conjugate ones are materialised.
            filename: the new file; None for an anonymous one.
            existsok: replace an existing file (old mappings of it stay valid).
            copy_existing: allow a tensor that is mapped from another file already.
            shape: shape of the new tensor, of as many elements; that of `input` by default.
            copy_data: False leaves zeros, without touching the disk.

        Raises:
            StoreExistsError: the file exists, and `existsok` is False.
            InvalidStateError: the tensor is mapped from another file, and `copy_existing` is False.
        """
        if not isinstance(input, Tensor):
            raise InvalidTypeError(
                f"from_tensor takes a tensor, not a {type(input).__name__}: torch.as_tensor() makes one"
            )
        if input.is_nested and input.layout is torch.strided and shape is None and not input.is_meta:
            return cls._from_nested(input, filename, existsok=existsok, copy_existing=copy_existing, copy=copy_data)
        if input.layout is not torch.strided or input.is_nested or input.is_meta:
            raise InvalidTypeError(f"a tensor of layout {input.layout} on {input.device} cannot be memory-mapped")
        name = None if filename is None else os.path.abspath(os.fspath(filename))
        if isinstance(input, MemoryMappedTensor) and input._filename is not None:
            if name == input._filename and shape is None and _is_whole(input):
                return input
            if not copy_existing:
                raise InvalidStateError(
                    f"the tensor is mapped from {input._filename} already; pass copy_existing=True to copy it"
                )
        size = torch.Size(input.shape if shape is None else shape)
        if copy_data and size.numel() != input.numel():
            raise InvalidArgumentError(f"a tensor of shape {list(input.shape)} does not fit the shape {list(size)}")
        source = input.detach() if copy_data else None
        return cls._make(size, input.dtype, name, existsok=existsok, source=source)

    @classmethod
    def _from_nested(
        cls, tensor: Tensor, filename: Any, *, existsok: bool, copy_existing: bool, copy: bool
    ) -> MemoryMappedTensor:
        rows = tensor.detach().unbind()
        sizes = torch.tensor([row.shape for row in rows], dtype=torch.int64, device="cpu").reshape(
            len(rows), tensor.dim() - 1
        )
        flat = torch.cat([row.reshape(-1) for row in rows]) if rows else tensor.new_empty(0)
        made = cls.from_tensor(flat, filename=filename, existsok=existsok, copy_existing=copy_existing, copy_data=copy)
        return cls.wrap(nested_over(made.as_subclass(Tensor), sizes), made._filename)

    @classmethod
    def from_filename(
        cls,
        filename: str | os.PathLike[str],
        dtype: torch.dtype,
        shape: Sequence[int] | Tensor,
        index: Any = None,
    ) -> Tensor:
        """Map an existing file; the tensor writes through to it.

        Args:
            filename: the file.
            dtype: the dtype of its elements.
            shape: its shape; or, int64 `[rows, dims]`, the shapes of the rows of a nested tensor.
            index: an index of the tensor to return; default: all of it.

        Raises:
            StoreNotFoundError: no such file.
            CorruptStoreError: its size is not that of the shape.
        """
        name = os.path.abspath(os.fspath(filename))
        mapped: Tensor = _open_existing(name, dtype, shape, shared=True)
        return mapped if index is None else mapped[index]

    @classmethod
    def from_handler(cls, handler: Any, dtype: torch.dtype, shape: Sequence[int] | Tensor, index: Any = None) -> Tensor:
        """Map a file that is open already; the tensor writes through to it, and outlives the handler.

        Args:
            handler: an open file, for reading and writing: a descriptor, or an object with one (`fileno()` or `fd`).
            dtype: the dtype of its elements.
            shape: its shape; or, int64 `[rows, dims]`, the shapes of the rows of a nested tensor.
            index: an index of the tensor to return; default: all of it.

        Raises:
            InvalidTypeError: not an open file.
            CorruptStoreError: not a plain file, or its size is not that of the shape.

        Example:
            >>> with tempfile.TemporaryFile() as file:
            ...     _ = file.write(bytes(8)), file.flush()
            ...     MemoryMappedTensor.from_handler(file, torch.float32, [2])
            MemoryMappedTensor([0., 0.])
        """
        own = handler if type(handler) is int else getattr(handler, "fd", None)
        fd = handler.fileno() if hasattr(handler, "fileno") else own
        if type(fd) is not int:
            raise InvalidTypeError(
                f"from_handler needs an open file, not a {type(handler).__name__}; see from_filename"
            )
        name = _name_of(handler, fd)
        mapped: Tensor = _map_existing(fd, name or "the open file", dtype, shape, shared=True)
        made = cls.wrap(mapped, name)
        return made if index is None else made[index]

    @classmethod
    def from_storage(
        cls,
        storage: Any,
        *,
        shape: Sequence[int] | Tensor | None = None,
        dtype: torch.dtype | None = None,
        device: DeviceLike | None = None,
        index: Any = None,
        filename: str | os.PathLike[str] | None = None,
        handler: Any = None,
    ) -> Tensor:
        """Use a storage on the CPU, of a file or of memory, as the memory of a tensor. Nothing is copied.

        Args:
            storage: an `UntypedStorage`, or a typed one, which has a dtype.
            shape: shape of all of its elements; by default one dimension. Or shapes as in `from_filename`.
            dtype: the dtype of its elements; by default that of a typed storage.
            device: the CPU, or None.
            index: an index of the tensor to return; default: all of it.
            filename: the expected file of the storage, to be checked.
            handler: not supported; see `from_handler`.

        Raises:
            InvalidTypeError: no dtype is known, or a handler was given.
            InvalidArgumentError: another device, or a shape of another number of elements.
            InvalidStateError: the storage is not that of the file.
        """
        if handler is not None:
            raise InvalidTypeError(
                "a storage is memory already; to map an open file, use from_handler(file, dtype, shape)"
            )
        dtype = dtype or (storage.dtype if isinstance(storage, torch.TypedStorage) else None)
        if dtype is None:
            raise InvalidTypeError("an untyped storage does not say what its elements are: from_storage needs dtype=")
        for place in (device, storage.device):
            if place is not None and as_device(place).type != "cpu":
                raise InvalidArgumentError(f"a memory-mapped tensor lives on the CPU, not on {place}")
        plain = storage.untyped() if isinstance(storage, torch.TypedStorage) else storage
        mapped = None if plain.filename is None else os.path.abspath(plain.filename)
        name = mapped if filename is None else os.path.abspath(os.fspath(filename))
        if name != mapped:
            raise InvalidStateError(f"the storage is not that of the file {name}, but of {mapped or 'memory'}")
        if plain.nbytes() % dtype.itemsize:
            raise BatchSizeError(f"a storage of {plain.nbytes()} bytes does not hold elements of {dtype}")
        flat = torch.empty(0, dtype=dtype, device="cpu").set_(plain, 0, (plain.nbytes() // dtype.itemsize,), (1,))
        if shape is not None and storage_size(shape).numel() != len(flat):
            raise BatchSizeError(f"a storage of {len(flat)} elements does not fit the shape {shape_text(shape)}")
        made = cls.wrap(flat if shape is None else as_rows(flat, shape), name)
        return made if index is None else made[index]

    @classmethod
    def empty_nested(
        cls,
        shape: Tensor | Sequence[Sequence[int]],
        *,
        dtype: torch.dtype | None = None,
        device: DeviceLike | None = None,
        filename: str | os.PathLike[str] | None = None,
        existsok: bool = False,
    ) -> Self:
        """Make a nested tensor of zeros over a new file, which holds the elements row by row.

        Args:
            shape: the shapes of the rows, `[rows, dims]`.
            dtype: the dtype; torch's default dtype by default.
            device: the CPU, or None.
            filename: the new file; None for an anonymous one.
            existsok: replace an existing file.

        Example:
            >>> [row.shape for row in MemoryMappedTensor.empty_nested([[1, 2], [3, 2]]).unbind()]
            [torch.Size([1, 2]), torch.Size([3, 2])]
        """
        sizes = torch.as_tensor(shape, dtype=torch.int64)
        return cls.full(sizes, 0, dtype=dtype, device=device, filename=filename, existsok=existsok)

    @classmethod
    def empty(
        cls, *shape: Any, dtype: Any = None, device: DeviceLike | None = None, filename: Any = None, **kw: Any
    ) -> Self:
        """Make a tensor of zeros over a new file; the disk is not touched until it is written to."""
        return cls.full(*shape, fill_value=0, dtype=dtype, device=device, filename=filename, **kw)

    @classmethod
    def zeros(
        cls, *shape: Any, dtype: Any = None, device: DeviceLike | None = None, filename: Any = None, **kw: Any
    ) -> Self:
        """Make a tensor of zeros over a new file; the disk is not touched until it is written to."""
        return cls.full(*shape, fill_value=0, dtype=dtype, device=device, filename=filename, **kw)

    @classmethod
    def ones(
        cls, *shape: Any, dtype: Any = None, device: DeviceLike | None = None, filename: Any = None, **kw: Any
    ) -> Self:
        """Make a tensor of ones over a new file."""
        return cls.full(*shape, fill_value=1, dtype=dtype, device=device, filename=filename, **kw)

    @classmethod
    def full(
        cls,
        *shape: Any,
        fill_value: Any = None,
        dtype: torch.dtype | None = None,
        device: DeviceLike | None = None,
        filename: str | os.PathLike[str] | None = None,
        existsok: bool = False,
        **kw: Any,
    ) -> Self:
        """Make a tensor full of one value over a new file.

        The size is given as `full((3, 4), 2.0)`, `full(3, 4, fill_value=2.0)` or `full(shape=(3, 4), fill_value=2.0)`;
        so too for `empty`, `zeros` and `ones`. The shapes of rows, int64 `[rows, dims]`, make a nested tensor.

        Args:
            fill_value: the value of all elements.
            dtype: by default torch's default dtype for any real number.
            device: the CPU, or None.
            filename: the new file; None for an anonymous one.
            existsok: replace an existing file.

        Raises:
            InvalidTypeError: no size, no fill value, or no dtype.
            BatchSizeError: a negative size, or one beyond any tensor.
            StoreExistsError: the file exists.

        Example:
            >>> MemoryMappedTensor.full(shape=(2,), fill_value=3)
            MemoryMappedTensor([3., 3.])
        """
        sizes, fill_value = parse_size(shape, kw.pop("shape", None), fill_value)
        if kw:
            raise InvalidTypeError(f"a memory-mapped tensor is not made with {next(iter(kw))}=")
        if device is not None and as_device(device).type != "cpu":
            raise InvalidArgumentError(f"a memory-mapped tensor lives on the CPU, not on {device}")
        if isinstance(sizes, Tensor) and sizes.ndim == 2:
            flat = cls.full(
                storage_size(sizes), fill_value, dtype=dtype, device=device, filename=filename, existsok=existsok
            )
            return cls.wrap(nested_over(flat.as_subclass(Tensor), sizes), flat._filename)  # type: ignore[return-value]
        if dtype is None:
            dtype = (
                torch.tensor(fill_value, device="cpu").dtype
                if isinstance(fill_value, complex)
                else torch.get_default_dtype()
            )
        dtype = as_dtype(dtype)
        name = None if filename is None else os.path.abspath(os.fspath(filename))
        size = torch.Size(sizes)
        if any(n < 0 for n in size) or math.prod(size) * dtype.itemsize >= 2**63:
            raise BatchSizeError(f"{list(size)} is not the shape of a tensor")
        # Written to the file, not through the mapping: a full disk is an error, then.
        number = number_like(fill_value, "fill_value", torch.empty(0, dtype=dtype, device="cpu"))
        source = number.expand(size) if fill_value else None
        return cls._make(size, dtype, name, existsok=existsok, source=source)  # type: ignore[return-value]

    @classmethod
    def empty_like(cls, input: Tensor, *, filename: Any = None, **kw: Any) -> Self:
        """Make a tensor as `empty` does, with the shape and dtype of another tensor."""
        return cls.full(input.shape, **_like(input, kw), fill_value=0, filename=filename)

    @classmethod
    def zeros_like(cls, input: Tensor, *, filename: Any = None, **kw: Any) -> Self:
        """Make a tensor as `zeros` does, with the shape and dtype of another tensor."""
        return cls.full(input.shape, **_like(input, kw), fill_value=0, filename=filename)

    @classmethod
    def ones_like(cls, input: Tensor, *, filename: Any = None, **kw: Any) -> Self:
        """Make a tensor as `ones` does, with the shape and dtype of another tensor."""
        return cls.full(input.shape, **_like(input, kw), fill_value=1, filename=filename)

    @classmethod
    def full_like(cls, input: Tensor, fill_value: Any, *, filename: Any = None, **kw: Any) -> Self:
        """Make a tensor as `full` does, with the shape and dtype of another tensor."""
        return cls.full(input.shape, **_like(input, kw), fill_value=fill_value, filename=filename)

    @classmethod
    def _make(
        cls, shape: torch.Size, dtype: torch.dtype, name: str | None, *, existsok: bool, source: Tensor | None
    ) -> MemoryMappedTensor:
        url = name or "an anonymous memory-mapped tensor"
        nbytes = shape.numel() * dtype.itemsize
        with files.io_errors(url, "making the file"):
            folder = os.path.dirname(name) if name else scratch_dir()
            # Built aside and renamed: old mappings of a replaced file stay valid, a failure leaves it as it was.
            fd, temp = tempfile.mkstemp(prefix=files.TEMP_PREFIX, dir=folder)
            try:
                os.fchmod(fd, 0o666 & ~_umask())
                files.truncate(fd, nbytes)
                if source is not None:
                    write_tensor(fd, source, 0)
                mapped = _map_or_empty(fd, shape, dtype, shared=True, path=temp)
                if name is None:
                    os.unlink(temp)
                elif existsok:
                    os.replace(temp, name)
                else:
                    os.link(temp, name)
                    os.unlink(temp)
            except BaseException as error:
                os.unlink(temp)
                if isinstance(error, FileExistsError):
                    hint = "pass existsok=True to replace it, or use from_filename"
                    raise refusals.place_exists(url, hint) from error
                raise
            finally:
                os.close(fd)
        return cls.wrap(mapped, name)

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self._filename is None or self.is_conj() or self.is_neg():
            return copy_to_pickle(torch.Tensor(self.detach())).__reduce_ex__(protocol)
        file = self._file
        if file.lease is not None and (lease := file.lease()) is not None:
            if lease.ended:  # what the file has, or another one of that name, may be something else
                return copy_to_pickle(torch.Tensor(self.detach())).__reduce_ex__(protocol)
            lease.escape()
        if not self.is_nested and (file.offset is not None or not _is_whole(self)):
            start = (file.offset or 0) // self.dtype.itemsize + self.storage_offset()
            part = (start, tuple(self.shape), self.stride())
            return rebuild, ("MemoryMappedTensor.part", file.name, self.dtype, *part, file.shared)
        shape = tuple(map(tuple, self._nested_tensor_size().tolist())) if self.is_nested else tuple(self.shape)
        return rebuild, ("MemoryMappedTensor", file.name, self.dtype, shape, file.shared)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        # A copy has no file of its own: as `clone`, it is a plain tensor.
        memo[id(self)] = copy = self.clone()
        return copy


class CopiedLeaf(Tensor):
    """Leaf that is pickled as its bytes."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        leaf = self.as_subclass(Tensor)
        data = ctypes.string_at(leaf.data_ptr(), leaf.nbytes) if leaf.nbytes else b""
        return rebuild, ("leaf", leaf.dtype, tuple(leaf.shape), data)


def from_copy(dtype: torch.dtype, shape: tuple[int, ...], data: bytes) -> Tensor:
    """Rebuild a `CopiedLeaf`, in memory of its own."""
    return (
        torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape)
        if data
        else torch.empty(shape, dtype=dtype, device="cpu")
    )


def copy_to_pickle(leaf: Tensor) -> Tensor:
    """Return a copy of a leaf, to be pickled.

    For a process that starts it is pickled as its bytes. torch would give the process a file descriptor, which ends
    with the copy, before the process has it.
    """
    plain = leaf.layout is torch.strided and leaf.device.type == "cpu" and type(leaf) in (Tensor, MemoryMappedTensor)
    if get_spawning_popen() is None or not plain or leaf.is_nested or leaf.requires_grad:
        return leaf.clone()
    return leaf.detach().as_subclass(Tensor).resolve_conj().resolve_neg().contiguous().as_subclass(CopiedLeaf)


class MappedFile(NamedTuple):
    """The file of the storage of a mapped tensor."""

    name: str | None
    shared: bool
    lease: weakref.ref[Lease] | None
    offset: int | None = None
    """The byte at which the memory begins; None: it is the whole file."""


_ANONYMOUS = MappedFile(None, True, None)
_getitem = Tensor.__getitem__


def _mapped_parts(parts: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return tuple([part.as_subclass(MemoryMappedTensor) for part in parts])


def _is_whole(tensor: Tensor) -> bool:
    """Check whether a tensor is all of its memory, in order."""
    whole: bool = tensor.is_contiguous() and tensor.nbytes == tensor.untyped_storage().nbytes()
    return whole


def _like(other: Tensor, kw: dict[str, Any]) -> dict[str, Any]:
    return {"dtype": other.dtype, **kw}


def _umask() -> int:
    mask = os.umask(0o022)
    os.umask(mask)
    return mask


def reopened(name: str, dtype: torch.dtype, shape: tuple[Any, ...], shared: bool) -> Tensor:
    """Map the file of a pickled tensor."""
    nested = bool(shape) and isinstance(shape[0], tuple)
    return _open_existing(name, dtype, torch.tensor(shape, device="cpu") if nested else shape, shared=shared)


def reopened_part(
    name: str, dtype: torch.dtype, offset: int, shape: tuple[int, ...], stride: tuple[int, ...], shared: bool
) -> Tensor:
    """Map the part of a file that a pickled slice referred to.

    Raises:
        CorruptStoreError: the file ends before that part does, or no slice has such strides.
    """
    sound = len(shape) == len(stride) and offset >= 0 and all(n >= 0 for n in (*shape, *stride))
    if not sound:
        raise CorruptStoreError(f"{name}: no part of a file has shape {shape}, strides {stride}, offset {offset}")
    if 0 in shape:
        return MemoryMappedTensor.wrap(torch.empty(shape, dtype=dtype, device="cpu"), name, shared=shared)
    count = offset + 1 + sum((n - 1) * step for n, step in zip(shape, stride, strict=True))
    mapped = _open_existing(name, dtype, (count,), shared=shared, part=True)
    return mapped.as_strided(shape, stride, offset).as_subclass(MemoryMappedTensor)


def _name_of(handler: Any, fd: int) -> str | None:
    """Return the absolute name of an open file, if that is still its name."""
    name = getattr(handler, "name", None)
    try:
        same = isinstance(name, (str, os.PathLike)) and os.path.samestat(os.stat(name), os.fstat(fd))
    except OSError:
        return None
    return os.path.abspath(os.fspath(name)) if same else None  # type: ignore[arg-type]


def _open_existing(
    name: str, dtype: torch.dtype, shape: Sequence[int] | Tensor, *, shared: bool, part: bool = False
) -> MemoryMappedTensor:
    if not storage_size(shape).numel():
        empty = as_rows(torch.empty(0, dtype=dtype, device="cpu"), shape)
        return MemoryMappedTensor.wrap(empty, name, shared=shared)
    with files.io_errors(name, "mapping"):
        folder = files.open_dir(os.path.dirname(name))
        try:
            fd = files.open_plain(os.path.basename(name), folder)
        except FileNotFoundError as error:
            raise StoreNotFoundError(
                f"{name} is gone; a memory-mapped tensor was pickled by name, or is opened by it", url=name
            ) from error
        finally:
            os.close(folder)
        try:
            mapped = _map_existing(fd, name, dtype, shape, shared=shared, part=part)
        finally:
            os.close(fd)
    return MemoryMappedTensor.wrap(mapped, name, shared=shared)


def _map_existing(
    fd: int, name: str, dtype: torch.dtype, shape: Sequence[int] | Tensor, *, shared: bool, part: bool = False
) -> Tensor:
    info, size = os.fstat(fd), storage_size(shape)
    if not stat.S_ISREG(info.st_mode):
        raise CorruptStoreError(f"{name} is not a plain file, and cannot be mapped", url=name)
    nbytes = size.numel() * dtype.itemsize
    if info.st_size < nbytes if part else info.st_size != nbytes:
        raise CorruptStoreError(
            f"{name} has {info.st_size} bytes, expected {nbytes} for shape {shape_text(shape)} and {dtype}", url=name
        )
    return as_rows(_map_or_empty(fd, torch.Size((size.numel(),)), dtype, shared=shared, path=name), shape)


def _map_or_empty(fd: int, shape: torch.Size, dtype: torch.dtype, *, shared: bool, path: str) -> Tensor:
    if not shape.numel():
        return torch.empty(shape, dtype=dtype, device="cpu")
    return map_fd(fd, shape, dtype, shared=shared, path=path)


def scratch_dir() -> str:
    """Return the folder of anonymous files: one in memory where the system has it, else the temporary directory."""
    shm = "/dev/shm"
    return shm if sys.platform == "linux" and os.access(shm, os.W_OK | os.X_OK) else tempfile.gettempdir()
