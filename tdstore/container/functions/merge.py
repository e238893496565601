"""Merging of several TensorDicts into one, entry by entry."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from tdstore.container.core.container import Container
from tdstore.container.core.paths import entry_path
from tdstore.container.core.tensorclasses import class_of, rewrap, unwrap
from tdstore.errors import InvalidStateError
from tdstore.ops.base import check_container
from tdstore.types import Path

if TYPE_CHECKING:
    from tdstore.tensordicts.resident.tensordict import TensorDict

Callback = Callable[..., Any]
E = TypeVar("E")


def merge_tensordicts(*tensordicts: Any, callback_exist: Callback | Mapping[Any, Callback] | None = None) -> TensorDict:
    """Make a TensorDict of all entries of several; where more than one has an entry, the first counts.

    Objects of a tensorclass give an object of the class of the first, unless the others have entries that it lacks.

    Args:
        callback_exist: gives the entry from the values of all, where every one of them has it; a dict of keys to
            such functions does for these keys only.

    Raises:
        InvalidStateError: fewer than two TensorDicts.

    Example:
        >>> a, b = TensorDict({"x": 1, "n": {"y": 1}}), TensorDict({"x": 2, "n": {"z": 2}})
        >>> merge_tensordicts(a, b, callback_exist=lambda *v: torch.stack(v)).to_dict()
        {'x': tensor([1, 2]), 'n': {'y': tensor(1), 'z': tensor(2)}}
    """
    if len(tensordicts) < 2:
        raise InvalidStateError(f"merge_tensordicts needs at least two TensorDicts, not {len(tensordicts)}")
    for td in tensordicts:
        check_container(td, "what merge_tensordicts() takes")
    if isinstance(callback_exist, Mapping):
        callback_exist = {entry_path(key): fn for key, fn in callback_exist.items()}
    made = _merged([td._resident() for td in tensordicts], len(tensordicts), callback_exist, ())
    return rewrap(class_of(unwrap(tensordicts[0])), made)  # type: ignore[no-any-return]


def unlocked_copy(entry: E) -> E:
    """Return the entry; a locked nested TensorDict as an unlocked one with the same tensors."""
    return entry.clone(False) if isinstance(entry, Container) and entry.is_locked else entry


def _merged(tds: Sequence[Any], everyone: int, callback: Any, path: Path) -> TensorDict:
    first = tds[0]
    made = Container._resident_class(batch_size=first.batch_size, device=first.device, names=first._dim_names())
    for key in dict.fromkeys(key for td in tds for key in td._first_keys()):
        column = [td._raw(key) for td in tds if td._kind(key) is not None]
        here = (*path, key)
        fn = callback.get(here) if isinstance(callback, dict) else callback
        groups = [entry._resident() for entry in column if isinstance(entry, Container)]
        if isinstance(column[0], Container):
            if len(groups) > 1:
                entry = rewrap(class_of(unwrap(column[0])), _merged(groups, everyone, callback, here))
            else:
                entry = unlocked_copy(column[0])
        elif fn is not None and len(column) == everyone:
            entry = fn(*column)
        else:
            entry = column[0]
        made.set(key, entry)
    return made
