"""Translation of h5py's exceptions into those of tdstore."""

from __future__ import annotations

import errno
import re
from typing import NoReturn

from tdstore.errors import CorruptStoreError, OptionError, StoreBusyError, StoreError, StoreIOError
from tdstore.storekit import refusals
from tdstore.storekit.files import raise_io

# HDF5 keeps the errno of a failed system call in its text only.
_ERRNO = re.compile(r"errno = (\d+)")
_MEDIUM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF, errno.EROFS, errno.EACCES, errno.EPERM}
# It has no errno for memory at all: "memory allocation failed for raw data chunk".
_MEMORY = re.compile(r"memory allocation failed|out of memory|(can't|unable to) allocate (memory|buffer)|can't malloc")
# What h5py raises for a damaged file, or an option that it cannot take.
_LIBRARY = (RuntimeError, ValueError, TypeError, KeyError, OverflowError, NotImplementedError, SystemError, MemoryError)


class h5_errors(refusals.ErrorTranslation[Exception]):  # noqa: N801 - reads as a statement: `with h5_errors(url, "reading"):`
    """Turn any exception of h5py into the corresponding `StoreError`.

    A failing storage is a `StoreIOError` with its errno, a lack of memory one with ENOMEM. All other errors are
    `otherwise`: `CorruptStoreError` when the file is read, `OptionError` when the caller's options are applied.
    """

    __slots__ = ("otherwise",)
    caught = (OSError, *_LIBRARY)

    def __init__(self, url: str, doing: str, otherwise: type[StoreError] = CorruptStoreError) -> None:
        self.url, self.doing = url, doing  # of every call: without a second one
        self.otherwise = otherwise

    def translate(self, error: Exception) -> NoReturn:
        """Raise the `StoreError` for an error."""
        raise_h5(error, self.url, self.doing, self.otherwise)


def raise_h5(error: Exception, url: str, doing: str, otherwise: type[StoreError] = CorruptStoreError) -> NoReturn:
    """Raise the `StoreError` for an exception of h5py."""
    text = " ".join(str(error).split())
    found = _ERRNO.search(text)
    code = int(found[1]) if found else getattr(error, "errno", None)
    if isinstance(error, BlockingIOError) or "locking flag values" in text or "already open" in text:
        raise StoreBusyError(
            f"{url}: {doing}: h5py has it open, here or in another process: {text}", url=url, hint="close it there"
        ) from error
    if is_memory(error):
        raise StoreIOError(
            f"{url}: {doing}: not enough memory: {text}",
            url=url,
            hint="the file is not damaged: free some memory, or take fewer rows at a time; whole chunks are decoded",
            errno=errno.ENOMEM,
        ) from error
    if code in _MEDIUM:
        full = code in (errno.ENOSPC, errno.EDQUOT)
        raise StoreIOError(
            f"{url}: {doing}: {errno.errorcode.get(code, code)}: {text}",
            url=url,
            hint="free some space and try again; what was saved before is intact" if full else None,
            errno=code,
        ) from error
    if isinstance(error, OSError) and error.errno is not None and found is None:
        raise_io(error, url, doing)
    hint = "the file is damaged, or not HDF5" if otherwise is CorruptStoreError else None
    raise otherwise(f"{url}: {doing}: {text}", url=url, hint=hint) from error


def is_memory(error: Exception) -> bool:
    """Check whether HDF5, one of its filters or numpy ran out of memory."""
    return (
        isinstance(error, MemoryError)
        or getattr(error, "errno", None) == errno.ENOMEM
        or _MEMORY.search(str(error)) is not None
    )


def is_system_error(error: OSError) -> bool:
    """Check whether the system failed, rather than the file being damaged."""
    return error.errno is not None or _ERRNO.search(str(error)) is not None


def option_error(url: str, text: str, hint: str | None = None) -> OptionError:
    """Build an `OptionError` that names the file."""
    return OptionError(f"{url}: {text}", url=url, hint=hint)
