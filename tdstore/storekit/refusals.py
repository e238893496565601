"""Errors of stores: one text for one cause, whichever backend raises it.

Each function makes an error, which the caller raises: `raise refusals.closed(url)`. Messages name the place, and
hints say what to do.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence

import torch

from tdstore.errors import (
    DirtyStoreError,
    InvalidArgumentError,
    KeyExistsError,
    KeyNotFoundError,
    OptionError,
    ReadOnlyError,
    StoreBusyError,
    StoreClosedError,
    StoreError,
    StoreExistsError,
    StoreNotFoundError,
)
from tdstore.types import Path, path_text

_SHOWN = 5
"""Names that a message lists."""


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
        hint: how to write nonetheless.
        why: the reason, where it is not the mode; a clause that follows "reading only".
    """
    return ReadOnlyError(f"{url} was opened for reading only{why and f': {why}'}", url=url, hint=hint)


def forked(url: str) -> StoreBusyError:
    """Create the error for a change by the child of the process that opened the store."""
    return StoreBusyError(
        f"{url} was opened before this process was forked: its parent alone writes it",
        url=url,
        hint="close it before forking, and open it in the child",
    )


def replaced(url: str) -> StoreError:
    """Create the error for a change of a store whose place this process has saved another one to."""
    return StoreError(
        f"{url} was replaced by a save of this process; this store is of the old one", url=url, hint="open the new one"
    )


def overtaken(url: str, hint: str = "open it again") -> StoreBusyError:
    """Create the error for a commit after another writer's, which would undo that one."""
    return StoreBusyError(f"{url} was changed by another writer since it was opened here", url=url, hint=hint)


def not_saved(url: str) -> StoreNotFoundError:
    """Create the error for sending a store to another process before its first commit."""
    return StoreNotFoundError(
        f"{url} is not saved yet: no other process can open it", url=url, hint="save_header() commits it"
    )


# -- leaves -------------------------------------------------------------------------------
def no_leaf(url: str, path: Path) -> KeyNotFoundError:
    """Create the error for a path without a leaf.

    Example:
        >>> print(no_leaf("runs/a.h5", ("next", "obs")))
        no leaf 'next' / 'obs' in runs/a.h5
    """
    return KeyNotFoundError(f"no leaf {path_text(path)} in {url}")


def leaf_exists(url: str, path: Path) -> KeyExistsError:
    """Create the error for a new leaf at a path that has one, where it is not to be replaced."""
    return KeyExistsError(
        f"{path_text(path)} is already there in {url}", hint="delete it first, or write into the leaf that is there"
    )


def no_name(url: str) -> InvalidArgumentError:
    """Create the error for a leaf at the empty path, which is the root group."""
    return InvalidArgumentError(f"a leaf of {url} needs a name")


def same_name(url: str, moves: Mapping[Path, Path]) -> InvalidArgumentError:
    """Create the error for a rename that gives two leaves one name."""
    return InvalidArgumentError(f"two leaves of {url} cannot be given the same name: {dict(moves)}")


def bad_length(url: str, path: Path, length: int) -> InvalidArgumentError:
    """Create the error for a resize to a negative length, or of a leaf without dimensions."""
    return InvalidArgumentError(f"{path_text(path)} of {url} cannot have length {length}")


def leaf_option(url: str, path: Path, name: str, known: Iterable[str] = ()) -> OptionError:
    """Create the error for a layout option of a leaf that the backend does not have.

    Args:
        known: the options that there are.

    Example:
        >>> print(leaf_option("a.h5", ("obs",), "chunk", ["chunks", "shuffle"]))
        a.h5 has no leaf option 'chunk' (for 'obs')
        Hint: did you mean 'chunks'?
    """
    names = [*known]
    near = difflib.get_close_matches(name, [*names, "fill_value"], 1)
    there = f"its options are {', '.join(names)}" if names else "leaves take shape, dtype and fill_value only"
    hint = f"did you mean {near[0]!r}?" if near else there
    return OptionError(f"{url} has no leaf option {name!r} (for {path_text(path)})", url=url, hint=hint)


def wrong_out(
    path: Path, shape: Sequence[int], dtype: torch.dtype, wanted: Sequence[int], of: torch.dtype
) -> InvalidArgumentError:
    """Create the error for `out=` of another shape or dtype than what is read.

    Args:
        shape, dtype: of `out`.
        wanted, of: shape and dtype of what is read.
    """
    return InvalidArgumentError(
        f"out= for {path_text(path)} has shape {list(shape)} and dtype {dtype}, "
        f"but what is read has {list(wanted)} and {of}"
    )


# -- places -------------------------------------------------------------------------------
def place_exists(url: str) -> StoreExistsError:
    """Create the error for mode "x" where something is."""
    return StoreExistsError(f"{url} exists", url=url, hint="mode='w' replaces it, mode='r+' changes it")


def not_found(url: str, why: str = "") -> StoreNotFoundError:
    """Create the error for a place where nothing is stored.

    Args:
        why: what was looked for, as "there is no tdstore.json".
    """
    return StoreNotFoundError(f"nothing is stored at {url}{why and f': {why}'}", url=url)


def other_kind(url: str, what: str) -> StoreExistsError:
    """Create the error for a place that holds something else, which no mode replaces.

    Args:
        what: what is there, as "a folder" or "a file of another kind".
    """
    return StoreExistsError(f"{url} is {what}", url=url, hint="remove it, or choose another name")


def foreign_files(url: str, names: Sequence[str], kind: str) -> StoreExistsError:
    """Create the error for a folder that holds files of other programs, which replacing it would remove.

    Args:
        names: of these files.
        kind: what the folder holds beside them, as "a zarr group".
    """
    return StoreExistsError(
        f"{url} holds files that are not part of {kind}: {_listed(names)}",
        url=url,
        hint="nothing was deleted; move these away, or save to another place",
    )


def busy(url: str, holder: str, waited: float) -> StoreBusyError:
    """Create the error for a place that another writer holds.

    Args:
        holder: who that is, as "process 12 on host-a".
        waited: seconds.
    """
    return StoreBusyError(
        f"{url} is open for writing in {holder}; waited {waited:g} s",
        url=url,
        hint="commit or close it there, save to another place, or pass a longer lock_timeout=",
    )


def dirty(
    url: str, leaves: Sequence[Path], *, writer: str = "a writer", more: str = "", hint: str | None = None
) -> DirtyStoreError:
    """Create the error for a store whose writer ended before its commit.

    Args:
        leaves: that it was writing.
        writer: who that was.
        more: what else is known, in brackets after the names.
        hint: what to do; by default what `recover="accept"` means.

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
