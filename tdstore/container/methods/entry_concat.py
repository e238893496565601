"""Several entries as one: concatenated, stacked, separated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor

from tdstore.container.core.container import Container
from tdstore.container.core.paths import entry_path
from tdstore.container.methods.access import NO_DEFAULT
from tdstore.errors import InvalidArgumentError
from tdstore.types import NestedKey


class ColumnsMixin(Container):
    """cat_tensors, stack_tensors, separates, ..."""

    __slots__ = ()

    def cat_tensors(self, *keys: NestedKey, out_key: NestedKey, dim: int = 0, keep_entries: bool = False) -> Self:
        """Concatenate entries along `dim` into a new one, which replaces them.

        Args:
            keys: the entries, in order.
            out_key: the key of the result.
            dim: a dimension of the leaves; the result must still start with the batch size.
            keep_entries: leave the entries where they are.

        Raises:
            KeyNotFoundError: no such entry. BatchSizeError: the batch would change; nothing is changed then.

        Example:
            >>> td = TensorDict({"a": torch.ones(2, 3), "b": torch.zeros(2, 1)}, [2])
            >>> td.cat_tensors("a", "b", out_key="ab", dim=1)["ab"].shape
            torch.Size([2, 4])
        """
        return self._joined(torch.cat, keys, out_key, dim, keep_entries)

    def stack_tensors(self, *keys: NestedKey, out_key: NestedKey, dim: int = 0, keep_entries: bool = False) -> Self:
        """Stack entries along a new dimension into an entry that replaces them; arguments as `cat_tensors`."""
        return self._joined(torch.stack, keys, out_key, dim, keep_entries)

    def _joined(self, fn: Any, keys: tuple[NestedKey, ...], out_key: NestedKey, dim: int, keep: bool) -> Self:
        if not keys:
            raise InvalidArgumentError("pass the keys of the entries to join")
        gone = [] if keep else [key for key in dict.fromkeys(keys) if key != out_key]
        self.set(out_key, fn([self[key] for key in keys], dim))
        for key in gone:
            self.del_(key)
        return self

    def cat_from_tensordict(
        self, dim: int = 0, *, sorted: bool | Sequence[NestedKey] | None = None, out: Tensor | None = None
    ) -> Tensor:
        """Concatenate all leaves along `dim` into one tensor.

        Args:
            sorted: True for the alphabetical order of first-level keys, or the keys in the desired order.
            out: a tensor to write into.
        """
        return torch.cat(self._in_order(sorted), dim, out=out)

    def stack_from_tensordict(
        self, dim: int = 0, *, sorted: bool | Sequence[NestedKey] | None = None, out: Tensor | None = None
    ) -> Tensor:
        """Stack all leaves, which have one shape, along a new dimension `dim`. Arguments as `cat_from_tensordict`."""
        return torch.stack(self._in_order(sorted), dim, out=out)

    def _in_order(self, sorted: bool | Sequence[NestedKey] | None) -> list[Tensor]:
        if isinstance(sorted, (bool, type(None))):
            td = self._resident()
            return [td[key] for key in td.keys(True, True, sort=bool(sorted))]
        return [self[key] for key in sorted]

    def separates(
        self, *keys: NestedKey, default: object = NO_DEFAULT, strict: bool = True, filter_empty: bool = True
    ) -> Self:
        """Take entries out of this TensorDict, and return them as a separate one.

        Args:
            default: used for keys that do not exist.
            strict: without `default`, refuse keys that do not exist. False makes them entries of the value None.
            filter_empty: drop nested TensorDicts that become empty.

        Raises:
            KeyNotFoundError: no such entry. LockedError: this TensorDict is locked.
        """
        held = [] if filter_empty else [path for path in map(entry_path, keys) if len(path) > 1]
        missing = [path for path in map(entry_path, keys) if self._find(path) is None]
        changes = len(missing) < len(keys)  # a locked one refuses only what changes it
        selected = self.split_keys(keys, inplace=changes, default=default, strict=strict)[0]
        if default is None or default is NO_DEFAULT:  # strict, and one is missing: an error already
            for path in missing:
                selected.set_non_tensor(path, None)
        for path in held:
            if self._find(path[:-1]) is None:
                self.create_nested(path[:-1])
        return selected
