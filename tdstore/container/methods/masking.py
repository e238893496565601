"""Choose rows or elements by a mask: `masked_fill`, `masked_select`, `where`."""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor

from tdstore.arguments import as_operand, check_mask
from tdstore.container.core.container import Container, EntrySource
from tdstore.container.core.tensorclasses import unwrap
from tdstore.container.entries.unbatched import is_batched
from tdstore.container.functions.broadcast import expanded_as, uneven, widened
from tdstore.container.methods.apply import check_trees, keeps_leaves
from tdstore.container.storage.block_writer import into, rows_of
from tdstore.container.values.nontensor import NonTensor, NonTensorData, NonTensorStack
from tdstore.errors import BatchSizeError, InvalidTypeError, KeyNotFoundError, UnsupportedError
from tdstore.keys import unravel
from tdstore.types import Number, Path, path_text


class MaskingMixin(Container):
    """masked_fill, masked_fill_, masked_select, where."""

    __slots__ = ()

    def masked_fill_(self, mask: Tensor, value: EntrySource | Tensor | Number) -> Self:
        """Set the rows where a mask is true, in place, in every entry.

        Args:
            mask: a bool tensor of the batch size or of its leading dimensions.
            value: a number, or what `td[mask] = value` accepts.

        Returns:
            This TensorDict.

        Raises:
            BatchSizeError: the mask is not bool, or its shape does not fit.
            ReadOnlyError: the dataset was opened in mode "r".

        Example:
            >>> TensorDict({"a": torch.ones(2)}, [2]).masked_fill_(torch.tensor([True, False]), 9)["a"]
            tensor([9., 1.])
        """
        self._check_mask(mask)
        self[mask] = value
        return self

    def masked_fill(self, mask: Tensor, value: EntrySource | Tensor | Number) -> Self:
        """Copy, with `value` in the rows where `mask` is true."""
        return self.clone().masked_fill_(mask, value)

    def masked_select(self, mask: Tensor, *, inplace: bool = False) -> Self:
        """Return the rows where `mask` is true, as one batch dimension: `td[mask]`.

        Args:
            mask: a bool tensor of the batch size or of its leading dimensions.
            inplace: take over these rows, and return this TensorDict. Nested TensorDicts stay the same objects.

        Raises:
            LockedError: `inplace`, and this TensorDict is locked.
            UnsupportedError: `inplace`, and this TensorDict is stored, of parameters, a lazy stack or has one.

        Example:
            >>> td = TensorDict({"a": torch.arange(3)}, [3])
            >>> td.masked_select(torch.tensor([True, False, True]), inplace=True)["a"], td.batch_size
            (tensor([0, 2]), torch.Size([2]))
        """
        check_mask(mask, "mask")
        if mask.dtype != torch.bool:
            raise InvalidTypeError(f"a mask is a bool tensor, not one of {mask.dtype}")
        if inplace:
            self._refuse_masking()
        made: Self = self._at(mask)._resident()
        return self._apply_inplace_result(made, "masked_select", inplace)

    def _refuse_masking(self) -> None:
        """Refuse `masked_select(inplace=True)` where entries cannot be replaced by some of their rows."""
        if isinstance(self, (self._stored_class, self._stack_class, torch.nn.Module)):
            raise UnsupportedError(
                f"masked_select(inplace=True) of a {type(self).__name__}, or of a TensorDict that has one",
                hint="td.masked_select(mask) returns a new TensorDict",
            )
        for group in self._groups():
            unwrap(group)._refuse_masking()

    def _expanded_as(self, other: Any, lead: int) -> Any:
        return expanded_as(self._resident(), other, lead)

    def _check_mask(self, mask: Tensor) -> None:
        check_mask(mask, "mask")
        if mask.dtype != torch.bool or mask.shape != self._batch_size[: mask.ndim]:
            raise BatchSizeError(
                f"a mask is a bool tensor of the batch's leading shape {list(self._batch_size)}, "
                f"not {mask.dtype} of shape {list(mask.shape)}"
            )

    def where(
        self,
        condition: Tensor,
        other: Container | Tensor | Number,
        *,
        out: Self | None = None,
        pad: Number | None = None,
        update_batch_size: bool = False,
    ) -> Self:
        """Select rows of this TensorDict where a condition is true, and of `other` elsewhere.

        Args:
            condition: a bool tensor, of the batch size or of its leading dimensions.
            other: a TensorDict, a tensor or a number.
            out: a TensorDict that takes the result. One in memory gets new tensors, a locked one keeps its own. In
                files and shared memory the result is written in blocks of rows of bounded memory, so that none of the
                three has to fit in memory. Without it the result is in memory.
            pad: a number to use for entries that one side lacks.
            update_batch_size: whether `out` adopts this batch size.

        Raises:
            KeyNotFoundError: one side lacks an entry, and there is no `pad`.
            RuntimeError: the shapes of two leaves do not broadcast.
            ReadOnlyError: `out`, or a TensorDict in it, was opened for reading.

        Example:
            >>> td = TensorDict({"a": torch.tensor([1, 2, 3])}, [3])
            >>> td.where(torch.tensor([True, False, True]), 0)["a"]
            tensor([1, 0, 3])
        """
        check_mask(condition, "condition")
        if out is not None:
            check_trees((), out)
        if update_batch_size and out is not None:
            out.batch_size = self.batch_size
        if out is None:
            made: Self = self._chosen(condition, other, pad)
            return made
        # In memory, another TensorDict may show the tensors of `out`: they are replaced, as by `apply(out=)`.
        inplace = isinstance(out, self._stored_class) or keeps_leaves(unwrap(out))
        if inplace and pad is None and self._where_into(condition, other, out):
            return out
        written: Self = out.update(self._chosen(condition, other, pad), inplace=inplace)
        return written

    def _chosen(self, condition: Tensor, other: Any, pad: Any) -> Any:
        """Compute the result of `where` in memory."""
        td = self._resident()

        def pick(a: Any, b: Any) -> Tensor:
            like = a if isinstance(a, Tensor) and (a.ndim or not isinstance(b, Tensor)) else b
            if not is_batched(like):
                unbatched: Tensor = like
                return unbatched  # an unbatched tensor has no rows to choose
            wide = condition.reshape((*condition.shape, *(1,) * (like.ndim - condition.ndim)))
            return torch.where(wide, a, b)

        if uneven(td, (other,)) and widened(td, (other,)) is not None:
            raise BatchSizeError(
                f"where: a TensorDict of batch size {list(other.batch_size)} for one of {list(td.batch_size)}",
                hint="expand() the smaller one first",
            )
        leaves: list[Tensor] = []
        if pad is None and not td._collect(leaves):
            return td._mixed(lambda node, *parts: node.where(condition, *parts), (other,))
        if not isinstance(other, (Container, Tensor)):
            other = as_operand(other)
        if not isinstance(other, (Container, Tensor)):
            return td.apply(lambda a: pick(a, other), filter_empty=False, propagate_lock=True)
        rhs = other if isinstance(other, Tensor) else other._resident()
        if pad is None and not leaves and isinstance(rhs, Container) and (unmatched := _first_leaf(rhs)):
            raise KeyNotFoundError(
                f"{path_text(unmatched)} is in one TensorDict and not in the other",
                hint="pass pad= to stand for entries that one of them lacks",
            )
        if pad is None or isinstance(other, Tensor):
            made = td._foreach(lambda xs, ys: [pick(x, y) for x, y in zip(xs, ys, strict=True)], rhs)
            if isinstance(rhs, Container):
                made.unlock_()
        else:
            made = _where_padded(td, rhs, pick, pad)
        rows = _values_where(condition, td, rhs)
        if not rows:
            return made
        locked = made.is_locked
        made.unlock_().update(rows)
        return made.lock_() if locked else made

    def _where_into(self, condition: Tensor, other: Any, out: Any) -> bool:
        def run(block: Any, rows: slice) -> Any:
            return block.where(condition[rows] if condition.ndim else condition, rows_of(other, rows, self._batch_size))

        if condition.ndim and condition.shape[0] != self._batch_size[:1].numel():
            return False
        if not into(self, out, run):
            return False
        out.update(_values_where(condition, self, other), inplace=True)
        return True


def _first_leaf(td: Any) -> Path | None:
    """Return the path of a tensor of a TensorDict, or None if it has none."""
    return next((unravel(key) for key in td.keys(True, True) if is_batched(td.get(key))), None)


def _values_where(condition: Tensor, td: Any, other: Any) -> dict[Any, NonTensor]:
    """Apply `where` row by row to the values of `td` that differ from those of `other`."""
    rows: dict[Any, NonTensor] = {}
    for key, mine in td.non_tensor_items(True) if isinstance(other, Container) else ():
        theirs = other.get(key, None)
        if isinstance(theirs, NonTensor) and not mine.same(theirs):
            wide = condition.reshape((*condition.shape, *(1,) * (mine.ndim - condition.ndim))).expand(mine.batch_size)
            pairs = zip(wide.flatten().tolist(), mine.flat(), theirs.flat(), strict=True)
            values = [a if chosen else b for chosen, a, b in pairs]
            at = torch.arange(len(values), device="cpu").reshape(mine.batch_size)
            rows[key] = NonTensorStack._make(values, at) if mine.ndim else NonTensorData(values[0])
    return rows


def _where_padded(td: Any, other: Any, pick: Any, pad: Any) -> Any:
    td, other = td._resident(), other._resident()
    data: dict[str, Any] = {}
    for key in dict.fromkeys([*td._data, *other._data]):
        a, b = td._data.get(key), other._data.get(key)
        if isinstance(a, NonTensor) or isinstance(b, NonTensor):
            data[key] = a if isinstance(a, NonTensor) else b
        elif isinstance(a, Container) and isinstance(b, Container):
            data[key] = _where_padded(a, b, pick, pad)
        elif isinstance(a, Container):
            data[key] = a._resident().apply(lambda x: pick(x, _number_like(pad, x)))
        elif isinstance(b, Container):
            data[key] = b._resident().apply(lambda y: pick(_number_like(pad, y), y))
        else:
            data[key] = pick(_number_like(pad, b) if a is None else a, _number_like(pad, a) if b is None else b)
    return td._new(data, td._batch_size, td._device, td._names)


def _number_like(number: Any, leaf: Tensor) -> Tensor:
    """Return the substitute for a missing entry in the dtype of the existing one, which decides that of the result."""
    return torch.full((), number, dtype=leaf.dtype, device=leaf.device)
