"""Errors of stores: one text for each cause, whichever backend raises it.

Each function creates an error, which the caller raises: `raise refusals.closed(url)`. Messages name the location, and
hints say what to do. `ErrorTranslation` turns the errors of a library into these.
"""

from __future__ import annotations

import difflib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Generic, NoReturn, TypeVar

import torch

from tdstore.errors import (
    DirtyStoreError,
    InvalidArgumentError,
    KeyNotFoundError,
    OptionError,
    ReadOnlyError,
    StoreBusyError,
    StoreClosedError,
    StoreError,
    StoreExistsError,
    StoreNotFoundError,
    TDStoreError,
    UnsupportedError,
)
from tdstore.types import Path, path_text

E = TypeVar("E", bound=Exception)

_SHOWN = 5
"""Names that a message lists."""


# -- errors of libraries ------------------------------------------------------------------
class ErrorTranslation(ABC, Generic[E]):
    """Base of a `with` block that raises the errors of a library, or of the system, as those of tdstore.

    A subclass lists the classes of errors in `caught`, and raises the right `StoreError` in `translate`. Errors of
    tdstore pass unchanged.

    Args:
        url: the location, for messages.
        doing: the operation, for messages, such as "reading".

    Example:
        >>> class number_errors(ErrorTranslation[ValueError]):
        ...     caught = (ValueError,)
        ...
        ...     def translate(self, error):
        ...         raise StoreError(f"{self.url}: {self.doing}: not a number", url=self.url) from error
        >>> with number_errors("runs/1", "reading"):
        ...     int("one")
        Traceback (most recent call last):
        ...
        tdstore.errors.StoreError: runs/1: reading: not a number
    """

    __slots__ = ("doing", "url")
    caught: tuple[type[E], ...]

    def __init__(self, url: str, doing: str) -> None:
        self.url, self.doing = url, doing

    @abstractmethod
    def translate(self, error: E) -> NoReturn:
        """Raise the `StoreError` for an error of a class in `caught`."""

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and isinstance(error, self.caught) and not isinstance(error, TDStoreError):
            self.translate(error)


# -- the state of a store -----------------------------------------------------------------
def closed(url: str) -> StoreClosedError:
    """Create the error for a call after `close`.

    Example:
        >>> print(closed("runs/a.h5"))
        runs/a.h5 was closed
        Hint: open it again
    """
    return StoreClosedError(f"{url} was closed", url=url, hint="open it again")


def read_only(url: str, hint: str = "open it with mode='r+' to write", *, why: str = "") -> ReadOnlyError:
    """Create the error for a change of a store that was opened for reading.

    Args:
        url: the location.
        hint: how to write nonetheless.
        why: the reason, if it is not the mode; a clause that follows "reading only".

    Example:
        >>> print(read_only("runs/a.h5"))
        runs/a.h5 was opened for reading only
        Hint: open it with mode='r+' to write
    """
    return ReadOnlyError(f"{url} was opened for reading only{why and f': {why}'}", url=url, hint=hint)


def forked(url: str) -> StoreBusyError:
    """Create the error for a change by the child of the process that opened the store.

    Example:
        >>> print(forked("a.h5"))
        a.h5 was opened before this process was forked: its parent alone writes it
        Hint: close it before forking, and open it in the child
    """
    return StoreBusyError(
        f"{url} was opened before this process was forked: its parent alone writes it",
        url=url,
        hint="close it before forking, and open it in the child",
    )


def replaced(url: str) -> StoreError:
    """Create the error for a change of a store that a save of this process has replaced.

    Example:
        >>> print(replaced("a.h5"))
        a.h5 was replaced by a save of this process; this store is of the old one
        Hint: open the new one
    """
    return StoreError(
        f"{url} was replaced by a save of this process; this store is of the old one", url=url, hint="open the new one"
    )


def overtaken(url: str, hint: str = "open it again") -> StoreBusyError:
    """Create the error for a commit that would undo the commit of another writer.

    Args:
        url: the location.
        hint: what to do, if there is something better.

    Example:
        >>> print(overtaken("runs/a.h5"))
        runs/a.h5 was changed by another writer since it was opened here
        Hint: open it again
    """
    return StoreBusyError(f"{url} was changed by another writer since it was opened here", url=url, hint=hint)


def removed(url: str) -> StoreBusyError:
    """Create the error for a read of a store whose files a save in another process has replaced.

    Example:
        >>> print(removed("a.zarr").hint)
        open it again to read what is there now; changes in place (mode='r+') keep readers reading
    """
    return StoreBusyError(
        f"{url} was replaced as a whole by a save, or removed, since it was opened: what it held then can be read no "
        "more, but for files that are still open here",
        url=url,
        hint="open it again to read what is there now; changes in place (mode='r+') keep readers reading",
    )


def contended(url: str, waited: float | None = None) -> StoreBusyError:
    """Create the error for a step that failed at each attempt because of other writers.

    Args:
        url: the location.
        waited: seconds for which it was tried.

    Example:
        >>> print(contended("redis://host/0/run", 10.0))
        redis://host/0/run is changed by other writers again and again; tried for 10 s
        Hint: give each writer rows of its own, or pass a longer lock_timeout=
    """
    tried = "" if waited is None else f"; tried for {waited:g} s"
    return StoreBusyError(
        f"{url} is changed by other writers again and again{tried}",
        url=url,
        hint="give each writer rows of its own, or pass a longer lock_timeout=",
    )


def too_many_writers(url: str, most: int) -> StoreBusyError:
    """Create the error for one more writer than a store allows.

    Args:
        url: the location.
        most: the number of writers that it allows.

    Example:
        >>> print(too_many_writers("shm://run", 512))
        shm://run is open for writing in 512 threads, which is the limit
        Hint: close the stores of writers that have finished
    """
    return StoreBusyError(
        f"{url} is open for writing in {most} threads, which is the limit",
        url=url,
        hint="close the stores of writers that have finished",
    )


def uncommitted(url: str) -> StoreBusyError:
    """Create the error for sending another process a store that has an uncommitted change of structure.

    Example:
        >>> print(uncommitted("a.h5"))
        a.h5 has changes that are not committed: no other process can open it
        Hint: save_header() commits them, discard() drops them
    """
    return StoreBusyError(
        f"{url} has changes that are not committed: no other process can open it",
        url=url,
        hint="save_header() commits them, discard() drops them",
    )


def not_saved(url: str) -> StoreNotFoundError:
    """Create the error for sending a store to another process before its first commit.

    Example:
        >>> print(not_saved("a.h5"))
        a.h5 is not saved yet: no other process can open it
        Hint: save_header() commits it
    """
    return StoreNotFoundError(
        f"{url} is not saved yet: no other process can open it", url=url, hint="save_header() commits it"
    )


# -- leaves -------------------------------------------------------------------------------
def no_leaf(url: str, path: Path) -> KeyNotFoundError:
    """Create the error for a path without a leaf.

    Args:
        url: the location.
        path: the requested path.

    Example:
        >>> print(no_leaf("runs/a.h5", ("next", "obs")))
        no leaf 'next' / 'obs' in runs/a.h5
    """
    return KeyNotFoundError(f"no leaf {path_text(path)} in {url}")


def no_name(url: str) -> InvalidArgumentError:
    """Create the error for a leaf at the empty path, which is the root group.

    Example:
        >>> print(no_name("a.h5"))
        a leaf of a.h5 needs a name
    """
    return InvalidArgumentError(f"a leaf of {url} needs a name")


def same_name(url: str, moves: Mapping[Path, Path]) -> InvalidArgumentError:
    """Create the error for a rename that gives two leaves one name.

    Args:
        url: the location.
        moves: the new path of each leaf, by its old one.

    Example:
        >>> print(same_name("a.h5", {("a",): ("c",), ("b",): ("c",)}))
        two leaves of a.h5 cannot be given the same name: {('a',): ('c',), ('b',): ('c',)}
    """
    return InvalidArgumentError(f"two leaves of {url} cannot be given the same name: {dict(moves)}")


def bad_length(url: str, path: Path, length: int) -> InvalidArgumentError:
    """Create the error for a resize to a length below 0 or beyond any tensor, or of a leaf without dimensions.

    Args:
        url: the location.
        path: the leaf.
        length: the requested length.

    Example:
        >>> print(bad_length("a.h5", ("obs",), -1))
        'obs' of a.h5 cannot have length -1
    """
    return InvalidArgumentError(f"{path_text(path)} of {url} cannot have length {length}")


def leaf_option(url: str, path: Path | None, name: str, known: Iterable[str] = ()) -> OptionError:
    """Create the error for a layout option of a leaf that the backend does not have.

    Args:
        url: the location.
        path: the leaf; None for an option of all leaves.
        name: the option.
        known: the options that exist.

    Example:
        >>> print(leaf_option("a.h5", ("obs",), "chunk", ["chunks", "shuffle"]))
        a.h5 has no leaf option 'chunk' (for 'obs')
        Hint: did you mean 'chunks'?
    """
    names = [*known]
    near = difflib.get_close_matches(name, [*names, "fill_value"], 1)
    there = f"its options are {', '.join(names)}" if names else "leaves take shape, dtype and fill_value only"
    hint = f"did you mean {near[0]!r}?" if near else there
    of = "" if path is None else f" (for {path_text(path)})"
    return OptionError(f"{url} has no leaf option {name!r}{of}", url=url, hint=hint)


def option_value(url: str, name: str, value: object, allowed: Iterable[object]) -> OptionError:
    """Create the error for an option of an opener whose value is not one of the few that are allowed.

    Args:
        url: the location.
        name: the option.
        value: the value of the caller.
        allowed: what it may be.

    Example:
        >>> print(option_value("a.h5", "verify", "all", ("none", "size", "full")))
        a.h5: verify must be one of 'none', 'size', 'full', not 'all'
    """
    return OptionError(f"{url}: {name} must be one of {', '.join(map(repr, allowed))}, not {value!r}", url=url)


def wrong_out(
    path: Path, shape: Sequence[int], dtype: torch.dtype, wanted: Sequence[int], of: torch.dtype
) -> InvalidArgumentError:
    """Create the error for an `out=` whose shape or dtype is not that of the result.

    Args:
        path: the leaf.
        shape, dtype: of `out`.
        wanted, of: shape and dtype of the result.

    Example:
        >>> print(wrong_out(("obs",), [2], torch.int64, [3], torch.int64))
        out= for 'obs' has shape [2] and dtype torch.int64, but what is read has [3] and torch.int64
    """
    return InvalidArgumentError(
        f"out= for {path_text(path)} has shape {list(shape)} and dtype {dtype}, "
        f"but what is read has {list(wanted)} and {of}"
    )


# -- places -------------------------------------------------------------------------------
def place_exists(url: str, hint: str = "mode='w' replaces it, mode='r+' changes it") -> StoreExistsError:
    """Create the error for mode "x" at a location that exists.

    Args:
        url: the location.
        hint: what to do, if another mode does not help.

    Example:
        >>> print(place_exists("a.h5"))
        a.h5 exists
        Hint: mode='w' replaces it, mode='r+' changes it
    """
    return StoreExistsError(f"{url} exists", url=url, hint=hint)


def not_found(url: str, why: str = "") -> StoreNotFoundError:
    """Create the error for a location where nothing is stored.

    Args:
        url: the location.
        why: what is missing, such as "there is no tdstore.json".

    Example:
        >>> print(not_found("runs/1", "there is no tdstore.json"))
        nothing is stored at runs/1: there is no tdstore.json
    """
    return StoreNotFoundError(f"nothing is stored at {url}{why and f': {why}'}", url=url)


def other_kind(url: str, what: str) -> StoreExistsError:
    """Create the error for a location that holds something else, which no mode replaces.

    Args:
        url: the location.
        what: what is there, such as "a folder" or "a file of another kind".

    Example:
        >>> print(other_kind("a.h5", "a folder"))
        a.h5 is a folder
        Hint: remove it, or choose another name
    """
    return StoreExistsError(f"{url} is {what}", url=url, hint="remove it, or choose another name")


def foreign_files(url: str, names: Sequence[str], kind: str) -> StoreExistsError:
    """Create the error for a folder that holds files of other programs, which would be removed if it were replaced.

    Args:
        url: the location.
        names: of these files.
        kind: what the folder holds beside them, such as "a zarr group".

    Example:
        >>> print(foreign_files("runs/1", ["notes.txt"], "a dataset"))
        runs/1 holds files that are not part of a dataset: notes.txt
        Hint: nothing was deleted; move these away, or save to another place
    """
    return StoreExistsError(
        f"{url} holds files that are not part of {kind}: {_listed(names)}",
        url=url,
        hint="nothing was deleted; move these away, or save to another place",
    )


def damaged_place(url: str, why: str) -> StoreExistsError:
    """Create the error for replacing a dataset so damaged that its own files cannot be told from others.

    Args:
        url: the location.
        why: the damage.

    Example:
        >>> print(damaged_place("runs/1", "there is no header"))
        runs/1 holds a damaged dataset, whose files cannot be told from others: there is no header
        Hint: nothing was deleted; remove it yourself if it is of no use
    """
    return StoreExistsError(
        f"{url} holds a damaged dataset, whose files cannot be told from others: {why}",
        url=url,
        hint="nothing was deleted; remove it yourself if it is of no use",
    )


def busy(
    url: str,
    holder: str,
    waited: float | None = None,
    *,
    why: str = "",
    how: str = "open for writing in",
    hint: str | None = None,
) -> StoreBusyError:
    """Create the error for a location that another writer holds.

    Args:
        url: the location.
        holder: a description of the writer, such as "process 12 on host-a".
        waited: seconds, if any.
        why: the purpose of the wait, such as "to replace it".
        how: how the holder has opened it.
        hint: what to do, if waiting longer does not help.

    Example:
        >>> print(busy("a.h5", "process 12", 5.0))
        a.h5 is open for writing in process 12; waited 5 s
        Hint: commit or close it there, save to another place, or pass a longer lock_timeout=
    """
    seconds = "" if waited is None else f"; waited {waited:g} s{why and f' {why}'}"
    return StoreBusyError(
        f"{url} is {how} {holder}{seconds}",
        url=url,
        hint=hint or "commit or close it there, save to another place, or pass a longer lock_timeout=",
    )


def inside_open(url: str, folder: str) -> StoreBusyError:
    """Create the error for a save into a dataset that this process writes: the save would never get its lock.

    Args:
        url: the location.
        folder: the dataset.

    Example:
        >>> print(inside_open("runs/1/a", "runs/1"))
        runs/1/a is inside the dataset runs/1, which this process has open for writing
        Hint: close that dataset first, or save beside it
    """
    return StoreBusyError(
        f"{url} is inside the dataset {folder}, which this process has open for writing",
        url=url,
        hint="close that dataset first, or save beside it",
    )


def dirty(
    url: str, leaves: Sequence[Path], *, writer: str = "a writer", more: str = "", hint: str | None = None
) -> DirtyStoreError:
    """Create the error for a store whose writer ended before its commit.

    Args:
        url: the location.
        leaves: those that it was writing.
        writer: a description of the writer.
        more: further details, in brackets after the names.
        hint: what to do; by default it explains `recover="accept"`.

    Example:
        >>> print(dirty("a.h5", [("obs",)]))
        a.h5: a writer ended in the middle of writing 'obs'
        Hint: restore it from a copy, or take it as it is with recover='accept'
    """
    what = _listed([path_text(path) for path in leaves]) or "the structure"
    return DirtyStoreError(
        f"{url}: {writer} ended in the middle of writing {what}{more and f' ({more})'}",
        leaves=tuple(leaves),
        url=url,
        hint=hint or "restore it from a copy, or take it as it is with recover='accept'",
    )


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


# -- versions -----------------------------------------------------------------------------
def no_version(url: str, version: str) -> StoreNotFoundError:
    """Create the error for a version that does not exist.

    Args:
        url: the location.
        version: the id.

    Example:
        >>> print(no_version("runs/1", "7").message)
        runs/1 has no version '7'
    """
    return StoreNotFoundError(
        f"{url} has no version {version!r}", url=url, hint="tdstore.versions(location) lists those that it has"
    )


def version_read_only(url: str, version: str) -> ReadOnlyError:
    """Create the error for a version that is opened for writing.

    Args:
        url: the location.
        version: the id, tag or time.

    Example:
        >>> print(version_read_only("runs/1", "7").message)
        the version '7' of runs/1 never changes
    """
    hint = "open it with mode='r'; tdstore.copy makes a dataset of it that can be written"
    return ReadOnlyError(f"the version {version!r} of {url} never changes", url=url, hint=hint)


def no_versions(url: str, why: str) -> UnsupportedError:
    """Create the error for a location whose format has no versions.

    Args:
        url: the location.
        why: the reason, which names the format or backend.

    Example:
        >>> print(no_versions("a.h5", "the 'h5' backend has none").message)
        a.h5 has no versions: the 'h5' backend has none
    """
    hint = "tdstore.copy the dataset to a place that has them, such as s3://... or file://..., or copy each state"
    return UnsupportedError(f"{url} has no versions: {why}", url=url, hint=hint)
