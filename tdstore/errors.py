"""Every exception tdstore raises.

    TDStoreError (.message, .hint)
    ├── InvalidArgumentError      (ValueError)
    ├── InvalidTypeError          (TypeError)
    │   ├── NoRowsError           (RuntimeError)
    │   ├── NoSizeError           (ValueError)
    │   ├── ArgumentKindError     (ValueError)
    │   └── DeviceError           (ValueError, RuntimeError)
    ├── InvalidStateError         (RuntimeError)
    │   └── GradientError         (ValueError)
    ├── OutOfRangeError           (IndexError)
    │   └── IndexKindError        (TypeError)
    ├── BatchSizeError            (ValueError, RuntimeError)
    ├── DimensionError            (IndexError, ValueError, RuntimeError)
    ├── LockedError               (RuntimeError)
    │   └── FrozenError
    ├── KeyExistsError            (KeyError)
    ├── NotAKeyError              (ValueError, RuntimeError)
    ├── KeyNotFoundError          (KeyError)
    │   ├── NotAGroupError        (ValueError)
    │   ├── UnknownFieldError     (ValueError)
    │   ├── DifferentKeysError    (RuntimeError)
    │   ├── StateDictError        (RuntimeError)
    │   ├── InvalidKeyError       (TypeError, ValueError, RuntimeError)
    │   └── MissingEntryError     (AssertionError)
    ├── WorkerDiedError           (RuntimeError)
    ├── MismatchError             (RuntimeError)
    ├── EmptyBufferError          (RuntimeError, AssertionError)
    ├── PluginError
    │   ├── UnknownBackendError   (LookupError, ValueError)
    │   ├── MissingDependencyError (ImportError)
    │   ├── AmbiguousBackendError
    │   └── BrokenPluginError
    └── StoreError (.url)
        ├── OptionError           (TypeError, ValueError)
        ├── StoreNotFoundError    (FileNotFoundError)
        │   └── UnknownDatasetError (KeyError)
        ├── StoreExistsError      (FileExistsError, RuntimeError)
        ├── StoreClosedError      (ValueError)
        ├── StoreBusyError        (BlockingIOError)
        │   ├── StoreTimeoutError (TimeoutError)
        │   ├── SecondWriterError (RuntimeError)
        │   └── ConflictError
        ├── ReadOnlyError         (PermissionError, RuntimeError)
        ├── UnsupportedError      (NotImplementedError)
        │   └── UnevenError
        ├── StoreIOError          (OSError)
        ├── CorruptStoreError     (ValueError)
        ├── DirtyStoreError
        ├── UntrustedDataError    (TypeError)
        └── TransientError        (OSError)

The built-in second bases are the exceptions that code written for other
libraries already catches.
"""

from __future__ import annotations

from dataclasses import FrozenInstanceError


class TDStoreError(Exception):
    """Root of every error of tdstore: what happened, and a hint that can be acted on."""

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        # KeyError would print the repr of the message and OSError its errno pair.
        return self.message if self.hint is None else f"{self.message}\nHint: {self.hint}"

    def __reduce__(self) -> tuple[object, ...]:
        state = self.__dict__.copy()
        if isinstance(self, OSError):
            state["errno"] = self.errno  # OSError keeps it outside of __dict__
        return _rebuild, (type(self), state)


def _rebuild(cls: type[TDStoreError], state: dict[str, object]) -> TDStoreError:
    error = cls.__new__(cls, state["message"])
    for name, value in state.items():
        setattr(error, name, value)
    return error


class InvalidArgumentError(TDStoreError, ValueError):
    """An argument has a value that the call cannot take; the message names the argument."""


class InvalidTypeError(TDStoreError, TypeError):
    """An argument has a type that the call cannot take; the message names the argument or the type."""


class NoRowsError(InvalidTypeError, RuntimeError):
    """A TensorDict without batch dimensions has no rows to iterate over."""


class NoSizeError(InvalidTypeError, ValueError):
    """The value that was passed as a batch size is not one."""


class ArgumentKindError(InvalidTypeError, ValueError):
    """An argument is of a kind none of whose values the call can take."""


class DeviceError(InvalidTypeError, ValueError, RuntimeError):
    """No device has that name or number: torch raises a RuntimeError for some of these and a TypeError for others."""


class InvalidStateError(TDStoreError, RuntimeError):
    """The object is in a state in which the call is not allowed; the message says which."""


class GradientError(InvalidStateError, ValueError):
    """A leaf of autograd would be written in place while gradients are recorded."""


class OutOfRangeError(TDStoreError, IndexError):
    """An index lies outside the rows, nodes or elements that there are."""


class IndexKindError(OutOfRangeError, TypeError):
    """A part of an index has a type that cannot index."""


class BatchSizeError(TDStoreError, ValueError, RuntimeError):
    """A value does not start with the batch size of the TensorDict that is to hold it."""


class DimensionError(TDStoreError, IndexError, ValueError, RuntimeError):
    """There is no such batch dimension, or none that an index fits: one out of range, or a mask of another length."""


class LockedError(TDStoreError, RuntimeError):
    """The structure of a locked TensorDict would change."""


class FrozenError(LockedError, FrozenInstanceError):
    """A field of an object of a frozen tensorclass would change."""


class KeyNotFoundError(TDStoreError, KeyError):
    """No entry of that name."""


class KeyExistsError(TDStoreError, KeyError):
    """An entry would get a name that another one has."""


class NotAKeyError(TDStoreError, ValueError, RuntimeError):
    """Something other than a string or a tuple of strings was passed as a key."""


class NotAGroupError(KeyNotFoundError, ValueError):
    """A nested key goes through an entry that is not a TensorDict."""


class UnknownFieldError(KeyNotFoundError, ValueError):
    """The key is not a field of the class of an object."""


class DifferentKeysError(KeyNotFoundError, RuntimeError):
    """TensorDicts that are to be joined have different keys."""


class StateDictError(KeyNotFoundError, RuntimeError):
    """A state dict and what it is loaded into have different keys."""


class InvalidKeyError(KeyNotFoundError, TypeError, ValueError, RuntimeError):
    """The key is neither a string nor a nested tuple of strings."""


class MissingEntryError(KeyNotFoundError, AssertionError):
    """A transition lacks an entry without which it cannot be folded."""


class WorkerDiedError(TDStoreError, RuntimeError):
    """A worker process ended in the middle of its work: killed, out of memory, or crashed."""


class MismatchError(TDStoreError, RuntimeError):
    """Structures that should be alike differ: of the ranks of a transfer, or of places that are concatenated."""


class EmptyBufferError(TDStoreError, RuntimeError, AssertionError):
    """Rows are requested from a buffer that has none."""


class PluginError(TDStoreError):
    """A backend cannot be found or used."""


class UnknownBackendError(PluginError, LookupError, ValueError):
    """No installed backend has that name, scheme or file type."""


class MissingDependencyError(PluginError, ImportError):
    """A known backend, or a package that it needs, is not installed."""


class AmbiguousBackendError(PluginError):
    """Two plugins claim the same name or location."""


class BrokenPluginError(PluginError):
    """An installed plugin failed to load; its error is the cause."""


class StoreError(TDStoreError):
    """Something about one store; `url` says which."""

    def __init__(self, message: str, *, url: str | None = None, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.url = url


class OptionError(StoreError, TypeError, ValueError):
    """An option that the backend does not have, or a value that it cannot take."""


class StoreNotFoundError(StoreError, FileNotFoundError):
    """Nothing is stored at that location."""


class UnknownDatasetError(StoreNotFoundError, KeyError):
    """A key-value server has no dataset of that name."""


class StoreExistsError(StoreError, FileExistsError, RuntimeError):
    """Something is already there and would be overwritten."""


class StoreClosedError(StoreError, ValueError):
    """The store was closed."""


class StoreBusyError(StoreError, BlockingIOError):
    """Another process holds the store."""


class StoreTimeoutError(StoreBusyError, TimeoutError):
    """Another process did not do what the caller waited for within the time that the caller allows."""


class SecondWriterError(StoreBusyError, RuntimeError):
    """Another writer has the rows of a replay storage, which takes one writer at a time."""


class ConflictError(StoreBusyError):
    """Another writer committed first; nothing of this writer was published."""

    repeated: bool = False
    """Whether an earlier commit of the same store has raised a conflict to its caller."""


class ReadOnlyError(StoreError, PermissionError, RuntimeError):
    """The store was opened for reading only."""


class UnsupportedError(StoreError, NotImplementedError):
    """The backend, or the container, has no such ability."""


class UnevenError(UnsupportedError):
    """The elements of a lazy stack differ in what is requested of all of them together."""


class StoreIOError(StoreError, OSError):
    """The storage failed: a full disk, an I/O error, a lost permission. `errno` is the system's."""

    def __init__(
        self, message: str, *, url: str | None = None, hint: str | None = None, errno: int | None = None
    ) -> None:
        super().__init__(message, url=url, hint=hint)
        self.errno = errno


class CorruptStoreError(StoreError, ValueError):
    """The stored data does not match its header."""


class DirtyStoreError(StoreError):
    """A writer ended in the middle of writing these leaves (`leaves`, a tuple of paths)."""

    def __init__(
        self,
        message: str,
        *,
        leaves: tuple[tuple[str, ...], ...] = (),
        url: str | None = None,
        hint: str | None = None,
    ) -> None:
        super().__init__(message, url=url, hint=hint)
        self.leaves = leaves


class UntrustedDataError(StoreError, TypeError):
    """A value could only be stored, or read, by running code."""


class TransientError(StoreError, OSError):
    """A fault that persisted after all retries; trying again later may succeed."""
