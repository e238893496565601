"""The primitives that a container must provide for the mixins of this folder."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Self, TypeAlias

import numpy as np
import torch
from torch import Tensor

from tdstore.arguments import refuse_type
from tdstore.types import Names, Number

Operand: TypeAlias = "Tensor | Number | np.number[Any] | OpsBase"
"""What is combined with every leaf: a number, a tensor that broadcasts with the batch, or a TensorDict whose leaves are
matched by key."""


# Not an ABC: `isinstance` would go through its hook, and the walks over trees ask at every entry.
class OpsBase:
    """The primitives. If they change the batch shape, `fn` gets tensors whose leading dimensions are the batch."""

    __slots__ = ()

    @property
    @abstractmethod
    def batch_size(self) -> torch.Size:
        """Shape of the batch."""

    @abstractmethod
    def _dim_names(self) -> Names:
        """Return the names of the batch dimensions."""

    @abstractmethod
    def _foreach(self, fn: Callable[..., Sequence[Tensor]], *operands: Any) -> Self:
        """Build a new container whose leaves are `fn(leaves, *operands)`, operands matched to leaves by key."""

    @abstractmethod
    def _aligned(self, other: Any, default: Any) -> tuple[Any, Any]:
        """Align this container and another to one set of keys: those of both, with `default` for what one lacks."""

    @abstractmethod
    def _foreach_(self, fn: Callable[..., object], *operands: Any) -> Self:
        """Run `fn(leaves, *operands)`, which changes the leaves in place."""

    @abstractmethod
    def _move(
        self,
        fn: Callable[[Tensor], Tensor],
        batch_size: torch.Size,
        names: Names,
        undo: Callable[[Any], Any] | None = None,
        *,
        keep_lock: bool = True,
        views: bool = False,
    ) -> Self:
        """Build a new container with `fn` applied to every entry; the batch becomes `batch_size`.

        `undo` reverses the change; with it the result is a context manager that writes new entries back.
        `keep_lock` locks the result if this container is locked. `views` says that `fn` returns only views: the
        result of a memory-mapped or shared TensorDict is then memory-mapped or shared, too.
        """

    @abstractmethod
    def _fan_out(
        self,
        fn: Callable[[Tensor], Sequence[Tensor]],
        batch_sizes: Sequence[torch.Size],
        names: Names,
        *,
        keep_lock: bool = False,
    ) -> tuple[Self, ...]:
        """Apply `_move` for a `fn` that returns views, one per result."""

    @abstractmethod
    def _return_unchanged(self) -> Self:
        """Return this container as the result of an operation that had nothing to do."""

    @abstractmethod
    def _bytes_as(self, dtype: torch.dtype, batch_size: Any) -> Self:
        """View the bytes of every leaf as another dtype, sharing memory; `batch_size` None keeps this one's."""

    @abstractmethod
    def _expanded_as(self, other: Any, lead: int) -> Self:
        """Expand each leaf to the shape of the leaf that another container has under its key.

        The batch gets `lead` new dimensions; if that is negative, it loses some.
        """

    def _in_rows(self) -> Any:
        """Return this container with leaves whose first dimensions are its batch, down to the last level."""
        return self

    @abstractmethod
    def _apply_inplace_result(self, result: Any, what: str, inplace: bool) -> Self:
        """Return a result or, `inplace`, this container with the result's entries; nested containers stay the same."""

    @abstractmethod
    def _leaf_list(self) -> list[Tensor]:
        """Return the tensor leaves, depth first in key order."""

    def _walk_plain(self) -> Iterable[Tensor | None]:
        """Yield the leaves, depth first; None for one that is no dense tensor or parameter in memory, perhaps the last.

        Of a lazy stack, yield those of its elements.
        """
        return (None,)

    def _plain_leaves(self) -> list[Tensor] | None:
        """Return all leaves, if each is a dense tensor or parameter in memory and no stack is below; else None."""
        return None

    def _memory_leaves(self) -> list[Tensor] | None:
        """Return what `_plain_leaves` does; of a lazy stack, the leaves of its elements."""
        leaves: list[Tensor] = []
        for leaf in self._walk_plain():
            if leaf is None:
                return None
            leaves.append(leaf)
        return leaves


def check_container(value: object, what: str) -> None:
    """Refuse an argument that is no TensorDict.

    Args:
        value: the argument.
        what: its name, for the message.

    Raises:
        InvalidTypeError: it is something else.
    """
    if not isinstance(value, OpsBase):
        raise refuse_type(what, "a TensorDict", value)
