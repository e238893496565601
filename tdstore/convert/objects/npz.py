"""Archives of numpy, `.npz`: their arrays as entries, read without pickle."""

from __future__ import annotations

import io
import math
import os
import tokenize
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from tdstore.arguments import check_separator, refuse_type
from tdstore.container.core.container import Container
from tdstore.container.functions.construct_and_join import from_dict
from tdstore.convert.tables.engine_files import is_url, open_urls
from tdstore.errors import (
    CorruptStoreError,
    InvalidArgumentError,
    OptionError,
    StoreNotFoundError,
    TDStoreError,
    UnsupportedError,
    UntrustedDataError,
)
from tdstore.io.opening import locate
from tdstore.storekit.budget import check_declared
from tdstore.types import DeviceLike, SizeLike

if TYPE_CHECKING:
    from tdstore.tensordicts.resident.tensordict import TensorDict

Array = np.ndarray[Any, Any]
READ_AHEAD = 1 << 20
"""The bytes of a request while an archive behind a URL is read."""
_OF_HEADERS = (ValueError, TypeError, KeyError, SyntaxError, tokenize.TokenError)
"""What numpy raises for a damaged array: it parses headers as Python."""


def from_npz(
    path: str | os.PathLike[str],
    *,
    auto_batch_size: bool = False,
    batch_dims: int | None = None,
    device: DeviceLike | None = None,
    batch_size: SizeLike | None = None,
    separator: str | None = None,
    keys: Sequence[str] | None = None,
    max_bytes: int | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> TensorDict:
    """Make a TensorDict from the arrays of an archive that `numpy.savez` or `numpy.savez_compressed` wrote.

    Numbers become tensors, text and bytes a value per element, dates int64 nanoseconds, structured arrays nested
    TensorDicts. Nothing is unpickled.

    Args:
        path: the file: a path, a URL or an open file object.
        auto_batch_size: whether each level gets the largest batch size that its entries share.
        batch_dims: with `auto_batch_size`, the largest number of batch dimensions.
        device: the device of the tensors; default: the CPU.
        batch_size: the batch size; default: the length of the arrays, if all have the same, else no dimension.
        separator: splits the names of arrays into nested keys.
        keys: the names of the arrays to read; default: all.
        max_bytes: the most bytes that the arrays may have together; default: any number.
        storage_options: credentials and endpoint of a `path` that is a URL.

    Raises:
        UntrustedDataError: an array holds objects, which are pickled in the file.
        UnsupportedError: an array has a dtype that is no number, text or date.
        CorruptStoreError: the file is truncated or damaged, no archive of numpy, or larger than `max_bytes`.
        StoreNotFoundError: there is no such file. InvalidArgumentError: an array of `keys` is not in it.

    Example:
        >>> np.savez("x.npz", obs=np.zeros((2, 3)), reward=np.array([1, 2]))
        >>> from_npz("x.npz")["reward"]
        tensor([1, 2])
    """
    if batch_size is not None and auto_batch_size:
        raise OptionError("give batch_size or auto_batch_size=True, not both")
    path, found = locate(path, {"storage_options": storage_options})
    storage_options = found["storage_options"]
    shown = str(path) if isinstance(path, (str, os.PathLike)) else f"the file object {path!r}"
    with _opened(path, storage_options) as file:
        arrays = _arrays(file, shown, keys, max_bytes)
    if separator is not None:
        check_separator(separator)
    lengths = {array.shape[:1] for array in arrays.values()}
    if batch_size is None and not auto_batch_size:
        batch_size = lengths.pop() if len(lengths) == 1 else ()
    entries: dict[Any, Array] = {}
    for name, array in arrays.items():
        parts = tuple(name.split(separator)) if separator is not None else (name,)
        entries[parts if len(parts) > 1 else name] = array
    cls, dims = Container._resident_class, batch_dims if auto_batch_size else None
    return from_dict(cls, entries, batch_size, auto_batch_size, dims, device, None)


@contextmanager
def _opened(path: Any, storage_options: Mapping[str, Any] | None) -> Iterator[IO[bytes]]:
    if is_url(path):
        files, (key,) = open_urls([path], storage_options)
        try:
            raw: io.RawIOBase = files.open(key)
            with io.BufferedReader(raw, READ_AHEAD) as buffered:
                yield buffered
        finally:
            files.close()
        return
    if storage_options:
        raise OptionError(f"{path}: storage_options are for URLs", hint="leave them out")
    if not isinstance(path, (str, os.PathLike)):
        if not hasattr(path, "read"):
            raise refuse_type("path", "a path or an open file", path)
        yield path
        return
    try:
        file = open(os.fspath(path).removeprefix("file://"), "rb")  # noqa: SIM115 - closed below
    except FileNotFoundError as error:
        raise StoreNotFoundError(f"there is no file {path}", url=str(path)) from error
    with file:
        yield file


def _arrays(file: IO[bytes], shown: str, keys: Sequence[str] | None, max_bytes: int | None) -> dict[str, Array]:
    """Read the arrays of an archive, once it is known that none is larger than what the archive holds for it."""
    try:
        with zipfile.ZipFile(file) as archive:
            found = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
            if any(not info.filename.endswith(".npy") for info in found.values()):
                raise CorruptStoreError(f"{shown} is no archive of numpy: it holds files that are not .npy", url=shown)
            missing = [name for name in keys or () if name not in found]
            if missing:
                raise InvalidArgumentError(f"{shown} has no array {missing[0]!r}; there are {sorted(found)}")
            wanted = {name: found[name] for name in (found if keys is None else keys)}
            check_declared(sum(info.file_size for info in wanted.values()), max_bytes, shown)
            return {name: _array(archive, info, name, shown) for name, info in wanted.items()}
    except TDStoreError:
        raise
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError) as error:
        raise CorruptStoreError(f"{shown}: {error}", url=shown, hint="the file is damaged, or no .npz") from error


def _array(archive: zipfile.ZipFile, info: zipfile.ZipInfo, name: str, shown: str) -> Array:
    try:
        with archive.open(info) as member:
            version = np.lib.format.read_magic(member)
            read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            shape, _, dtype = read(member)
            if dtype.hasobject:
                raise UntrustedDataError(
                    f"the array {name!r} of {shown} holds objects, and reading them would run code from the file",
                    url=shown,
                    hint="keys= leaves it out; save text or numbers in place of objects",
                )
            if math.prod(shape) * dtype.itemsize != info.file_size - member.tell():
                raise CorruptStoreError(
                    f"the array {name!r} of {shown} declares shape {shape}, which its {info.file_size} bytes are not",
                    url=shown,
                )
        with archive.open(info) as member:
            return _usable(np.lib.format.read_array(member, allow_pickle=False), name, shown)
    except TDStoreError:
        raise
    except _OF_HEADERS as error:
        raise CorruptStoreError(f"the array {name!r} of {shown}: {error}", url=shown) from error


def _usable(array: Array, name: str, shown: str) -> Array:
    """Convert dates to int64 nanoseconds; raise an error for what is no number, text or structure."""
    if array.dtype.kind in "mM":
        return array.astype(f"{array.dtype.kind}8[ns]").astype(np.int64)
    if (array.dtype.kind == "V" and array.dtype.names is None) or array.dtype.char in "gG":
        raise UnsupportedError(
            f"the array {name!r} of {shown} has dtype {array.dtype}, which torch has not",
            url=shown,
            hint="keys= leaves it out; save it in another dtype",
        )
    return array
