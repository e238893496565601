"""LazyStackedTensorDict: TensorDicts side by side as if they were stacked, of any shapes and wherever they are."""

from __future__ import annotations

from collections.abc import KeysView, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self, overload

import torch

from tdstore import pickling
from tdstore.arguments import as_list
from tdstore.container.core.container import Container, EntrySource
from tdstore.container.core.dim_names import as_names
from tdstore.container.core.key_views import FirstKeys, IsLeaf, signature_of
from tdstore.container.core.locks import LOCKED
from tdstore.container.core.one_buffer import is_one_buffer, reduced
from tdstore.container.display.compact import compact_text
from tdstore.container.display.options import level_lines, ordered_lines, shows
from tdstore.container.display.text import entry_text, indent
from tdstore.container.methods.access import AS_SET, AccessMixin
from tdstore.container.values.nontensor import NonTensor, NonTensorData
from tdstore.errors import BatchSizeError, UnsupportedError
from tdstore.index.shapes import as_dim, as_size
from tdstore.tensordicts.lazystack.elements import ElementTree
from tdstore.tensordicts.lazystack.ops import LazyOps
from tdstore.tensordicts.lazystack.reading import check_elements
from tdstore.types import DeviceLike, Entry, Fault, IndexType, NamesLike, NestedKey, SizeLike

if TYPE_CHECKING:
    from tdstore.tensordicts.base import TensorDictBase
    from tdstore.tensordicts.resident.tensordict import TensorDict


class LazyStackedTensorDict(ElementTree):
    """A stack of TensorDicts that is not made: reading a key stacks it, writing one writes into the elements.

    The elements may differ in shapes and keys, and may live anywhere: in memory, in files, in windows of a
    dataset. The keys of the stack are those that all elements have; `repr` shows the others. Indexing the
    stack dimension with an int gives the element itself.

    Args:
        *tensordicts: the elements, of batch sizes of one length; where these differ, the stack's has -1.
        stack_dim: where the new batch dimension goes.
        batch_size: checked against the stack's; without elements, that of those to come.
        device: move the elements there.
        names: of the batch dimensions.
        stack_dim_name: of the stack dimension.
        strict_shape: refuse elements of different batch sizes.

    Raises:
        TypeError: an element is not a TensorDict. BatchSizeError: their batch sizes do not fit.

    Example:
        >>> short, long = TensorDict({"x": torch.ones(2)}), TensorDict({"x": torch.zeros(3)})
        >>> stack = LazyStackedTensorDict(short, long)
        >>> stack[0] is short, stack.get_item_shape("x")
        (True, torch.Size([2, -1]))
        >>> stack.get("x", as_padded_tensor=True)
        tensor([[1., 1., 0.],
                [0., 0., 0.]])
    """

    __slots__ = ()

    def __init__(
        self,
        *tensordicts: Any,
        stack_dim: int = 0,
        hook_out: None = None,
        hook_in: None = None,
        batch_size: SizeLike | None = None,
        device: DeviceLike | None = None,
        names: NamesLike = None,
        stack_dim_name: str | None = None,
        strict_shape: bool = False,
    ) -> None:
        tds = list(tensordicts)
        empty_batch_size = torch.Size(()) if tds or batch_size is None else as_size(batch_size)
        self._stack_dim = (
            check_elements(tds, stack_dim, strict_shape) if tds else as_dim(stack_dim, len(empty_batch_size) + 1)
        )
        self._tds = tds if device is None else [td.to(device) for td in tds]
        self._dim_name, self._empty_batch_size = stack_dim_name, empty_batch_size
        self._parents = self._undo = self._binding = None
        self._state = 0
        if tds and batch_size is not None and as_size(batch_size) != self._batch_size:
            raise BatchSizeError(f"batch_size={list(as_size(batch_size))} for a stack of {list(self._batch_size)}")
        if names is not None:
            self._set_names(as_names(names, len(self._batch_size)))

    @classmethod
    def from_dict(
        cls,
        input_dict: Any,
        *other: Any,
        auto_batch_size: bool | None = None,
        batch_size: SizeLike | None = None,
        device: DeviceLike | None = None,
        batch_dims: int | None = None,
        names: NamesLike = None,
        stack_dim_name: str | None = None,
        stack_dim: int = 0,
    ) -> Self:
        """Build a lazy stack from a list of dicts, or from a dict of them by number. Other dicts give a TensorDict.

        Args:
            *other: more dicts to stack, after those of `input_dict`.
            batch_size, batch_dims, auto_batch_size, device: of every element.
            names: of the stack's batch dimensions.

        Example:
            >>> LazyStackedTensorDict.from_dict([{"x": torch.ones(2)}, {"x": torch.ones(3)}]).get_item_shape("x")
            torch.Size([2, -1])
        """
        how: dict[str, Any] = {
            "auto_batch_size": bool(auto_batch_size),
            "batch_size": batch_size,
            "batch_dims": batch_dims,
            "device": device,
        }
        dicts = input_dict.values() if isinstance(input_dict, Mapping) else input_dict
        parts = as_list(dicts, "what from_dict() takes", "a dict or a list of dicts")
        numbered = isinstance(input_dict, Mapping) and list(input_dict) == [str(i) for i in range(len(parts))]
        if isinstance(input_dict, Mapping) and not (numbered and parts and all(isinstance(p, Mapping) for p in parts)):
            return super().from_dict(input_dict, names=names, **how)
        tds = [cls._resident_class.from_dict(part, **how) for part in (*parts, *other)]
        return cls(*tds, stack_dim=stack_dim, stack_dim_name=stack_dim_name, names=names)

    def __repr__(self) -> str:
        if shows("compact"):
            return compact_text(self)
        common = set(self._first_keys())
        fields = ",\n".join(ordered_lines(f"{key}: {entry_text(self, key)}" for key in self._first_keys()))
        alone = []
        for i, td in enumerate(self._tds):
            own = ",\n".join(f"{key}: {entry_text(td, key)}" for key in td._first_keys() if key not in common)
            if own:
                alone.append(f"{i} ->\n{indent(own)}")
        exclusive = indent(",\n".join(alone))
        lines = [
            f"fields={{\n{indent(fields)}}}" if fields else "fields={\n}",
            f"exclusive_fields={{\n{exclusive}}}" if exclusive else "exclusive_fields={\n}",
            *level_lines(self),
            f"stack_dim={self._stack_dim}",
            *self._dataset_lines(),
        ]
        return f"{type(self).__name__}(\n" + ",\n".join(indent(line) for line in lines) + ")"

    @overload  # type: ignore[override]  # an element of another class than the stack
    def __getitem__(self, index: str | tuple[str, ...]) -> Entry: ...
    @overload
    def __getitem__(self, index: IndexType) -> TensorDictBase: ...
    def __getitem__(self, index: Any) -> Any:
        if type(index) is str:
            found = self._quick(index)
            if found is not None:
                return found
        found = super().__getitem__(index)
        if self._state & LOCKED and isinstance(found, LazyStackedTensorDict) and not found.is_locked:
            found.lock_()
        return found

    def get(self, key: NestedKey, default: object = AS_SET, **kwargs: object) -> Entry:
        """Return the entry, stacked, or `default` if not all elements have it.

        Args:
            as_list: what each element has, in a list.
            as_padded_tensor: stacked after padding with `padding_value` (0) at `padding_side` ("right", "left").
            as_nested_tensor: a nested tensor of `layout` (`torch.jagged`).

        Raises:
            UnsupportedError: the shapes differ, and none of these was asked for.
        """
        if type(key) is str:
            if not kwargs:
                found = self._quick(key)
                if found is not None:
                    return found
            elif kwargs == {"as_list": True} and (parts := self._tensors(key)) is not None:
                return parts
        return super().get(key, default, **kwargs)

    def _quick(self, key: str) -> Any:
        """Return the stacked tensor of the usual case, or None for any other."""
        parts = self._tensors(key)
        try:
            return torch.stack(parts, self._stack_dim) if parts else None
        except RuntimeError:
            return None  # told by the slow way

    @signature_of(AccessMixin.keys)
    def keys(
        self,
        include_nested: bool = False,
        leaves_only: bool = False,
        is_leaf: IsLeaf | None = None,
        *,
        sort: bool = False,
    ) -> Any:
        if include_nested or leaves_only or sort:
            return super().keys(include_nested, leaves_only, is_leaf, sort=sort)
        return FirstKeys(dict.fromkeys(self._first_keys()))

    def __reduce__(self) -> tuple[Any, ...]:
        if is_one_buffer(self):
            return reduced(self)
        own = bool(self._state & LOCKED)
        return pickling.rebuild, (
            "LazyStackedTensorDict",
            self._tds,
            self._stack_dim,
            self._dim_name,
            self._empty_batch_size,
            own,
        )

    def update_at_(
        self,
        input_dict_or_td: EntrySource,
        idx: IndexType,
        clone: bool = False,
        *,
        non_blocking: bool = False,
        keys_to_update: Sequence[NestedKey] | None = None,
    ) -> Self:
        source = input_dict_or_td
        if keys_to_update is None and isinstance(source, LazyOps) and not self._new_keys(source):
            self._set_rows(idx, source)  # element by element: they need not have the same shapes
            return self
        return super().update_at_(source, idx, clone, non_blocking=non_blocking, keys_to_update=keys_to_update)

    def _new_keys(self, source: Any) -> set[Any]:
        mine = set().union(*(td.keys(True, True) for td in self._tds))
        return {key for td in source._tds for key in td.keys(True, True)} - mine

    def valid_keys(self) -> KeysView[str]:
        """Return the first-level keys that all elements have."""
        return self.keys()

    def densify(self, layout: torch.layout = torch.strided) -> TensorDict:
        """Build one TensorDict. Entries that cannot be stacked become nested tensors; missing ones have no rows.

        Args:
            layout: of the nested tensors, `torch.strided` or `torch.jagged`, which has one ragged dimension only.

        Raises:
            UnsupportedError: something is ragged, and the stack dimension is not the first. RuntimeError: tensors that
                the layout cannot hold.

        Example:
            >>> stack = lazy_stack([TensorDict({"x": torch.ones(n)}, [n]) for n in (1, 3)])
            >>> stack.densify().batch_size
            torch.Size([2, -1])
        """
        batch, d = self._batch_size, self._stack_dim
        keys = dict.fromkeys(k for td in self._tds for k in td._first_keys())
        data: dict[str, Any] = {}
        for key in keys:
            column = [td._raw(key) if td._kind(key) is not None else None for td in self._tds]
            known = next(v for v in column if v is not None)
            if isinstance(known, Container):
                filled = [td.empty() if v is None else v for td, v in zip(self._tds, column, strict=True)]
                data[key] = self._of(filled, d).densify(layout)
            elif isinstance(known, NonTensor):
                values = [
                    NonTensorData(None, td._batch_size) if v is None else v
                    for td, v in zip(self._tds, column, strict=True)
                ]
                data[key] = self._stacked(key, values, d)
            else:
                parts = [known.new_empty((0, *known.shape[1:])) if v is None else v for v in column]
                if len({p.shape for p in parts}) == 1:
                    data[key] = torch.stack(parts, d)
                    continue
                self._stacked_first(key)
                data[key] = torch.nested.as_nested_tensor(parts, layout=layout)
        if self._ragged:
            self._stacked_first("its batch size")
            if any(isinstance(v, NonTensor) for v in data.values()):  # whose rows are the elements
                batch = batch[: batch.index(-1)]
        return self._resident_class._new(data, batch, self._device, as_names(self.names[: len(batch)], len(batch)))

    def _stacked_first(self, what: str) -> None:
        if self._stack_dim:
            raise UnsupportedError(
                f"densify: {what!r} is ragged, and a nested tensor is stacked along its first dimension, "
                f"not along {self._stack_dim}",
                hint="LazyStackedTensorDict(*td.tensordicts).densify()",
            )

    def to_lazystack(self, dim: int = 0) -> Self:
        """Return this stack, or one along another dimension over the same memory."""
        at = as_dim(dim, len(self._inner) + 1)
        if at == self._stack_dim:
            return self
        return self._of(self.unbind(at), at, None)

    def close(self) -> None:
        """Close the dataset that the stack is over, or those that its elements are over."""
        if self._binding is not None:
            handle = self._binding[0]
            self._mark_closed(handle.store.url)
            handle.close()
        else:
            for td in self._tds:
                td.close()

    def verify(self) -> list[Fault]:
        """Verify as `TensorDict.verify`. Faults of elements in places of their own begin with their number."""
        if self._binding is not None:
            return super().verify()
        return [Fault((str(i), *fault.path), fault.reason) for i, td in enumerate(self._tds) for fault in td.verify()]


def rebuilt(tds: list[Any], dim: int, name: str | None, empty_batch_size: Any, locked: bool) -> LazyStackedTensorDict:
    """Rebuild a stack from its pickle."""
    td = LazyStackedTensorDict._of(tds, dim, name, empty_batch_size)
    return td.lock_() if locked else td


Container._stack_class = LazyStackedTensorDict
