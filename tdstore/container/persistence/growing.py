"""Growing along the first batch dimension: `append`, `extend` and `resize_`, on every container.

Steps that may fail come first: rows are compared with the entries before anything changes, stored parts change before
those in memory, and each changed part can be changed back.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch

from tdstore.arguments import check_int
from tdstore.container.core.container import GROUP, LEAF, VALUE, Container, EntrySource
from tdstore.container.core.tensorclasses import unwrap
from tdstore.container.storage.growth import Growth, check_owner, place_of, step_of
from tdstore.container.values.nontensor import NonTensor
from tdstore.container.varlen.nested_rows import as_nested_rows
from tdstore.errors import BatchSizeError, InvalidArgumentError, InvalidTypeError, LockedError, UnsupportedError
from tdstore.store import Cap


class GrowingMixin(Container):
    """append, extend, resize_."""

    __slots__ = ()

    def append(self, row: EntrySource) -> None:
        """Add one row at the end of the first batch dimension, in every entry.

        In memory, entries get spare space, which doubles: appending costs no more as they get longer, and tensors
        obtained earlier stay as they are. On a dataset, the row is written and committed, completely or not at all:
        a reader in another process sees the old length or the new one. A locked TensorDict can grow, since its keys
        stay the same.

        Args:
            row: a TensorDict or a dict with the same (nested) keys, of batch size `batch_size[1:]`. (One of batch
                size `[n, *batch_size[1:]]` is treated as `n` rows, as `extend` does.) Values are cast to the dtypes
                of the entries where `torch.can_cast` allows it. The row of a nested tensor is a plain tensor, of any
                length.

        Raises:
            KeyNotFoundError: a key is missing, or there is one too many.
            BatchSizeError: a shape or the batch size does not fit, or there is no batch dimension.
            InvalidArgumentError: a dtype does not fit: floats for an entry of integers, numbers for one of booleans.
            UnsupportedError: this is a window, or the leaves of the backend have a fixed length.
            ReadOnlyError: the dataset was opened in mode "r".

        Whatever is raised, nothing has changed.

        Example:
            >>> td = TensorDict({"obs": torch.zeros(2, 3)}, batch_size=[2])
            >>> td.append({"obs": torch.ones(3)})
            >>> td.batch_size, td["obs"][-1]
            (torch.Size([3]), tensor([1., 1., 1.]))
        """
        self._check_may_grow("append")
        self._add_rows(_one_row(self, row))

    def extend(self, rows: EntrySource | Sequence[EntrySource]) -> None:
        """Add any number of rows at the end of the first batch dimension, in every entry, with one commit.

        Args:
            rows: a TensorDict or a dict of batch size `[n, *batch_size[1:]]`, or a list of rows as `append` takes
                them. A stored TensorDict is copied in blocks of bounded memory.

        Raises:
            KeyNotFoundError: a key is missing, or there is one too many.
            BatchSizeError: a shape or the batch size does not fit, or there is no batch dimension.
            InvalidArgumentError: a dtype does not fit, as of `append`.
            UnsupportedError: this is a window, or the leaves of the backend have a fixed length.
            ReadOnlyError: the dataset was opened in mode "r".

        Whatever is raised, nothing has changed.

        Example:
            >>> td = TensorDict({"obs": torch.zeros(2, 3)}, batch_size=[2])
            >>> td.extend({"obs": torch.ones(5, 3)})
            >>> len(td)
            7
        """
        self._check_may_grow("extend")
        self._add_rows(_many_rows(self, rows))

    def resize_(self, n: int) -> Self:
        """Set the length of the first batch dimension, in place; new rows are zeros (stored: the fill value).

        New rows of a nested tensor are empty. Tensors obtained earlier stay valid and keep their length.

        Args:
            n: the new length, 0 or more.

        Raises:
            InvalidArgumentError: a negative length.
            BatchSizeError: there is no batch dimension.
            UnsupportedError: this is a window, or the leaves of the backend have a fixed length; or rows would have to
                be invented for an entry that has one value per row, or for a lazy stack.
            ReadOnlyError: the dataset was opened in mode "r".

        Example:
            >>> TensorDict({"a": torch.arange(3)}, batch_size=[3]).resize_(5)["a"]
            tensor([0, 1, 2, 0, 0])
        """
        check_int(n, "the length that resize_() takes")
        length = operator.index(n)
        if length < 0:
            raise InvalidArgumentError(f"resize_ takes a length of 0 or more, not {length}")
        if length > sys.maxsize:
            raise InvalidArgumentError(f"resize_: an entry cannot have length {length}")
        self._check_may_grow("resize_")
        if length != self._batch_size[0]:
            step_of(self, Growth(self, None, length)).do()
        return self

    def refresh_(self) -> Self:
        """Read the structure of the dataset again: later commits of other processes appear, also a new length.

        Until then a reader sees the dataset as it was when it was opened. Tensors obtained earlier, and windows, stay
        as they are.

        Returns:
            This TensorDict.

        Raises:
            UnsupportedError: the data is in memory or temporary, so no other process can have changed it.

        Example:
            >>> writer = TensorDict({"a": torch.zeros(3)}, [3]).save("run")
            >>> reader = TensorDict.load("run")
            >>> writer.append({"a": torch.ones(())})
            >>> len(reader), len(reader.refresh_())
            (3, 4)
        """
        binding = place_of(self)
        if binding is None or binding[0].location is None:
            raise UnsupportedError("refresh_: this TensorDict has no location from which it could be read again")
        if Cap.VIEW in binding[0].store.caps:
            return self.memmap_refresh_()  # type: ignore[attr-defined,no-any-return]
        binding[0].reopen()
        return self

    def _add_rows(self, rows: Any) -> None:
        if len(rows):
            rows = rows if place_of(self) is not None else rows._walkable()
            step_of(self, Growth(self, rows, self._batch_size[0] + len(rows))).do()

    def _check_may_grow(self, what: str) -> None:
        """Refuse a container that has no length of its own, before anything else is checked."""
        self._catch_up()
        if not self._batch_size:
            raise BatchSizeError(
                f"{what}: a TensorDict without batch dimensions has no rows", hint="set batch_size=[n]"
            )
        if any(parent.batch_dims for parent in self._locked_parents()):
            raise LockedError(
                f"{what}: this TensorDict is part of a locked one, whose batch size it shares",
                hint="do it on the outermost one",
            )
        check_owner(self, what)

    def _refuse_part(self, what: str) -> None:
        """Refuse to grow a view of some rows of a dataset."""

    def _catch_up(self) -> None:
        """Adopt the current length of the dataset: another container over it may have grown it."""


def _one_row(td: Any, row: Any) -> Any:
    batch = td.batch_size[1:]
    if isinstance(row, Mapping) and not isinstance(row, Container):
        row = td._resident_class._from_mapping(row, batch, None, None)
    elif not isinstance(row, Container):
        raise InvalidTypeError(f"a row is a TensorDict or a dict, not a {type(row).__name__}")
    elif _are_rows(td, row):
        return row
    elif not _same_batch(batch, row.batch_size):
        raise BatchSizeError(
            f"append takes a row of batch size {list(batch)}, and this one has {list(row.batch_size)}",
            hint="set its batch_size, or pass a dict",
        )
    return row.unsqueeze(0)


def _same_batch(mine: torch.Size, theirs: torch.Size) -> bool:
    """Compare batch sizes; -1 in one of a lazy stack is any length."""
    return len(mine) == len(theirs) and all(a == b or -1 in (a, b) for a, b in zip(mine, theirs, strict=True))


def _are_rows(td: Any, candidate: Any) -> bool:
    """Return whether a TensorDict has one more dimension than a row, judging by its batch size and by a leaf."""
    if candidate.batch_dims != td.batch_dims or candidate.batch_size[1:] != td.batch_size[1:]:
        return False
    here = [k for k in td._first_keys() if td._kind(k) == LEAF and candidate._kind(k) == LEAF]
    return not here or len(candidate._leaf_shape(here[0])) == len(td._leaf_shape(here[0]))


def _many_rows(td: Any, rows: Any) -> Any:
    if isinstance(rows, Container):
        if not rows.batch_dims:
            raise BatchSizeError("extend takes rows, and a TensorDict without batch dimensions is one", hint="append()")
        if not _same_batch(td.batch_size[1:], rows.batch_size[1:]):
            raise BatchSizeError(
                f"cannot add rows of batch size {list(rows.batch_size)} to the batch size {list(td.batch_size)}: "
                "they differ beyond the first dimension"
            )
        return rows
    if isinstance(rows, Mapping):
        loose = td._resident_class._from_mapping(rows, torch.Size(()), None, None)
        lengths = _lengths(loose)
        if not lengths:
            raise BatchSizeError("extend cannot tell how many rows there are: no entry has one dimension or more")
        return td._resident_class._from_mapping(rows, torch.Size((lengths[0], *td.batch_size[1:])), None, None)
    if isinstance(rows, Sequence) and not isinstance(rows, str):
        singles = [_with_nested(td, _one_row(td, row)) for row in rows]
        return td._resident_class.cat(singles) if singles else ()
    raise InvalidTypeError(f"rows are a TensorDict, a dict or a list of rows, not a {type(rows).__name__}")


def _with_nested(td: Any, row: Any) -> Any:
    """Return a row with nested tensors where the entries have some, so that rows of different lengths can be joined."""
    changed = {}
    for key in td._first_keys():
        kind = td._kind(key)
        if kind == VALUE or row._kind(key) != kind:
            continue  # what does not fit is found when the rows are compared
        if kind == GROUP:
            below, part = unwrap(td._raw(key)), unwrap(row._raw(key))
            made = part if isinstance(below, Container._stack_class) else _with_nested(below, part)
            if made is not part:
                changed[key] = made
        elif (layout := td._nested_layout(key)) is not None and not (leaf := row._raw(key)).is_nested:
            changed[key] = as_nested_rows(leaf, *layout)
    return row.copy().update(changed) if changed else row


def _lengths(td: Any) -> list[int]:
    found = [t.shape[0] for t in td._leaf_list() if t.ndim]
    if found:
        return found
    values = [td._raw(k) for k in td._first_keys()]
    return [v.batch_size[0] for v in values if isinstance(v, NonTensor) and v.batch_size]
