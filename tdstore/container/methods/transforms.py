"""Copy a TensorDict, and convert it to plain Python."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Literal, Self

import torch
from torch import Tensor

from tdstore.container.core.container import GROUP, VALUE, Container
from tdstore.container.core.tensorclasses import class_of, rewrap
from tdstore.container.entries.unbatched import is_batched
from tdstore.container.functions.pack_layout import PackLayout, pack
from tdstore.container.methods.access import NO_DEFAULT
from tdstore.container.values.nontensor import NonTensor
from tdstore.errors import UnevenError
from tdstore.index.shapes import as_size
from tdstore.index.tracing import traced
from tdstore.types import DeviceLike, NamesLike, SizeLike

if TYPE_CHECKING:
    from tdstore.tensordicts.resident.tensordict import TensorDict


class TransformsMixin(Container):
    """empty, clone, replace, contiguous, to_tensordict, to_dict."""

    __slots__ = ()

    # -- copying -----------------------------------------------------------------------------
    def empty(
        self,
        recurse: bool = False,
        *,
        batch_size: SizeLike | None = None,
        device: DeviceLike | None = NO_DEFAULT,
        names: NamesLike = None,
    ) -> Self:
        """Return a TensorDict of the same batch size, device and names, without tensors.

        Args:
            recurse: keep the nested TensorDicts, empty of tensors, and the values that are not tensors.
            batch_size: another batch size.
            device: another device, or None for no device.
            names: other names of the batch dimensions.

        Raises:
            InvalidArgumentError: the number of `names` is not that of the batch dimensions.

        Example:
            >>> td = TensorDict({"a": torch.zeros(2), "n": {"b": torch.zeros(2)}}, [2])
            >>> list(td.empty().keys()), list(td.empty(recurse=True).keys())
            ([], ['n'])
        """
        batch = self._batch_size if batch_size is None else as_size(batch_size)
        if names is None and batch_size is None:
            names = self._names
        where = self._device if device is NO_DEFAULT else device
        td: Any = self._in_class(self._resident_class({}, batch_size=batch, device=where, names=names))
        if recurse:
            for key in self._first_keys():
                kind = self._kind(key)
                if kind == GROUP:
                    td._data[key] = self._raw(key).empty(recurse=True, device=where)
                elif kind == VALUE:
                    td._data[key] = td._coerce(key, self._raw(key))
        made: Self = td
        return made

    def _in_class(self, td: Any) -> Any:
        """Give an in-memory TensorDict without other owners this one's class, if that is a subclass of its class."""
        cls: Any = type(self)
        plain = self._resident_class
        if cls is plain or not issubclass(cls, plain) or type(td) is not plain:
            return td
        return cls._new({}, td._batch_size, td._device, td._names)._become(td)

    def clone(self, recurse: bool = True) -> Self:
        """Copy the TensorDict. A stored one is read into memory.

        Values are copied as by `copy.deepcopy`. A value that cannot be copied, such as a lock, is shared. Dicts and
        lists are copied in either case: they are part of the structure.

        Args:
            recurse: copy tensors and values too. False copies the structure only: the copy has the same tensors, but
                keys can be added and removed without changing the original.

        Returns:
            An unlocked TensorDict.

        Example:
            >>> td = TensorDict({"a": torch.zeros(3)}, [3])
            >>> td.clone()["a"] is td["a"], td.clone(recurse=False)["a"] is td["a"]
            (False, True)
        """
        td = self._resident()
        data: dict[str, Any] = {}
        first = next(iter(td._data.values()), None)
        copies = _copies_on_gpu(td._data) if recurse and type(first) is Tensor and first.is_cuda else {}
        for key, value in td._data.items():
            if type(value) is Tensor or is_batched(value):
                data[key] = value if not recurse else copies[key] if copies and key in copies else value.clone()
            elif isinstance(value, Container):
                data[key] = value.clone(recurse)
            elif recurse:
                data[key] = value.own_values()
            else:  # what is done in place to one of them is not done to the other
                data[key] = value.own_lists()
        made: Self = td._new(data, td._batch_size, td._device, td._names)
        return made

    def _shallow(self) -> Self:
        return self.clone(recurse=False)

    def copy(self) -> Self:
        """Copy the structure around the same tensors: `clone(recurse=False)`. `clone()` copies tensors too.

        Example:
            >>> td = TensorDict({"a": torch.zeros(3)}, [3])
            >>> td.copy().set("b", torch.ones(3))["a"] is td["a"], "b" in td
            (True, False)
        """
        return self.clone(recurse=False)

    def __copy__(self) -> Any:
        return self.clone(recurse=False)

    def replace(self, *args: Any, **kwargs: Any) -> Self:
        """Copy the structure around the same tensors, with some entries replaced: `copy().update(...)`.

        A dataset is not changed: its entries are read into memory.

        Args:
            *args: the arguments of `update`: first a TensorDict or a dict.
            **kwargs: those of `update`, or entries by their keys.

        Raises:
            BatchSizeError: a new entry does not have the batch size.

        Example:
            >>> td = TensorDict({"a": torch.zeros(2), "b": torch.zeros(2)}, [2])
            >>> td.replace(a=torch.ones(2))["a"], td["a"]
            (tensor([1., 1.]), tensor([0., 0.]))
        """
        if not kwargs and (not args or args[0] is None or (isinstance(args[0], dict) and not args[0])):
            return self
        return self._own_copy().update(*args, **kwargs)

    def _own_copy(self) -> Self:
        """Copy shallowly. Changes of the copy do not reach a store."""
        return self._shallow()

    def contiguous(self, *, canonical: bool = False, inplace: bool = False) -> Self:
        """Return a TensorDict whose tensors are contiguous in memory; contiguous tensors are shared, not copied.

        A stored TensorDict is read into memory, and a lazy stack is made dense, also one among the entries.

        Args:
            canonical: also give tensors the strides that torch gives a new tensor of their shape. A tensor with another
                stride in a dimension of size 1 can still be contiguous.
            inplace: this TensorDict takes over the tensors and is returned.

        Raises:
            LockedError: `inplace`, and this TensorDict is locked.

        Example:
            >>> td = TensorDict({"a": torch.zeros(2, 3)}, [2, 3]).transpose(0, 1)
            >>> td.is_contiguous(), td.contiguous().is_contiguous()
            (False, True)
        """
        own: Any = self._resident()
        td = _stacked_below(own)
        leaves = td._leaf_list()
        if own is not self and td is own and not (canonical or inplace) and all(t.is_contiguous() for t in leaves):
            return td  # type: ignore[no-any-return]  # nothing else has what was just read
        made = [t if t.is_contiguous() and not (canonical and _has_unusual_strides(t)) else _compact(t) for t in leaves]
        return self._apply_inplace_result(td._with_leaves(iter(made)), "make contiguous", inplace)

    def pack(self, dim: int = -1, *, layout: PackLayout | None = None) -> tuple[Tensor, PackLayout]:
        """Join the features of all leaves in one tensor. `PackLayout.unpack` makes a TensorDict of it again.

        Leaves are flattened behind the batch dimensions, and joined in the order of their sorted keys. A stored
        TensorDict is read into memory.

        Args:
            dim: the position of the features in the result, from `-(batch_dims + 1)` to `batch_dims`.
            layout: a layout of an earlier call, whose order is used: this TensorDict must have its leaves and `dim`.

        Returns:
            A contiguous tensor of the batch size and the number of features, and its layout.

        Raises:
            InvalidTypeError: an entry is no dense tensor of the batch, or the dtypes differ.
            DeviceError: the leaves are on several devices.
            UnevenError: elements of a lazy stack have different keys or shapes.
            DimensionError: there is no such `dim`.
            DifferentKeysError: the leaves are not those of the layout.
            InvalidArgumentError: a leaf or `dim` does not fit the layout.

        Example:
            >>> td = TensorDict({"p": torch.zeros(5), "v": torch.ones(5, 3)}, [5])
            >>> flat, layout = td.pack()
            >>> flat.shape, layout.keys, layout.unpack(flat[:2])["v"].shape
            (torch.Size([5, 4]), ('p', 'v'), torch.Size([2, 3]))
        """
        return pack(self, dim, layout)

    def is_contiguous(self) -> bool:
        """Return whether every leaf is contiguous in memory."""
        plain = self._plain_leaves()
        if plain is not None:
            return False not in [t.is_contiguous() for t in plain]
        if self._resident() is not self or _stacked_below(self) is not self:
            return False
        return all(t.is_contiguous() for t in self._leaf_list())

    def to_tensordict(self, *, retain_none: bool | None = None) -> TensorDict:
        """Return a `TensorDict` in memory with copies of all entries, whatever this container is.

        A stored TensorDict is read, a lazy stack is made dense, and nested tensorclasses become plain TensorDicts.

        Args:
            retain_none: accepted for compatibility: entries whose value is None are kept.

        Raises:
            UnevenError: elements of a lazy stack differ in shape and cannot be made dense.

        Example:
            >>> td = tdstore.lazy_stack([TensorDict({"a": torch.tensor(i)}) for i in range(3)])
            >>> type(td.to_tensordict()).__name__, td.to_tensordict()["a"]
            ('TensorDict', tensor([0, 1, 2]))
        """
        td = self._resident()
        data: dict[str, Any] = {}
        for key, value in td._data.items():
            if isinstance(value, NonTensor):
                data[key] = value.own_copy()
            else:
                data[key] = value.clone() if isinstance(value, Tensor) else value.to_tensordict(retain_none=retain_none)
        return self._resident_class._new(data, td._batch_size, td._device, td._names)

    def to_dict(
        self,
        *,
        retain_none: bool = True,
        convert_tensors: bool | Literal["numpy"] = False,
        tolist_first: bool = False,
    ) -> dict[str, Any]:
        """Convert to nested plain dicts. Tensors are shared, not copied; those of a stored TensorDict are read.

        Args:
            retain_none: keep entries whose value is None.
            convert_tensors: True converts tensors to lists of numbers, "numpy" to arrays.
            tolist_first: nested TensorDicts with batch dimensions become lists of dicts, and values lists of values.

        Raises:
            TypeError: `convert_tensors="numpy"`, and numpy lacks the dtype of a tensor, such as bfloat16.

        Example:
            >>> TensorDict({"a": torch.arange(2), "n": {"b": torch.ones(2)}}, [2]).to_dict(convert_tensors=True)
            {'a': [0, 1], 'n': {'b': [1.0, 1.0]}}
        """
        out: dict[str, Any] = {}
        for key, value in self._plain_entries():
            if isinstance(value, NonTensor):
                if convert_tensors and isinstance(value, Tensor):  # an unbatched one
                    plain: Any = value.numpy() if convert_tensors == "numpy" else value.tolist()
                else:
                    plain = value.tolist() if tolist_first else value.plain()
                if plain is not None or retain_none:
                    out[key] = plain
            elif isinstance(value, Tensor):
                out[key] = value.numpy() if convert_tensors == "numpy" else value.tolist() if convert_tensors else value
            elif tolist_first and value.batch_dims:
                out[key] = value.tolist(convert_tensors=convert_tensors, tolist_first=True)
            else:
                out[key] = value.to_dict(
                    retain_none=retain_none, convert_tensors=convert_tensors, tolist_first=tolist_first
                )
        return out

    def _plain_entries(self) -> Iterable[tuple[str, Any]]:
        """Read the first-level entries into memory by one batched read."""
        return self._resident()._data.items()  # type: ignore[no-any-return]

    def __deepcopy__(self, memo: Any) -> Any:
        copy = self.clone()
        memo[id(self)] = copy
        return copy


def _compact(t: Tensor) -> Tensor:
    return t.clone(memory_format=torch.contiguous_format)


def _has_unusual_strides(t: Tensor) -> bool:
    """Return whether a contiguous tensor has other strides than torch would give it, mostly in dimensions of size 1."""
    return t.stride() != torch.empty(t.shape, device="meta").stride()


def _stacked_below(td: Any) -> Any:
    """Stack the lazy stacks in a TensorDict, those that can be stacked; return it unchanged if there are none."""
    changed: dict[str, Any] = {}
    for key, value in td._data.items():
        if type(value) is Tensor or not isinstance(value, Container) or isinstance(value, NonTensor):
            continue
        try:
            made = _stacked_below(value._resident())
        except UnevenError:
            continue  # its elements are contiguous each
        if made is not value:
            changed[key] = rewrap(class_of(value), made)
    if not changed:
        return td
    return td._new({**td._data, **changed}, td._batch_size, td._device, td._names)


def _copies_on_gpu(entries: dict[str, Any]) -> dict[str, Tensor]:
    """Copy the tensors of a GPU that need no gradients together: a few kernels instead of one for each.

    Returns:
        The copies by key; none if the first entry is on the CPU.
    """
    together: dict[str, Tensor] = {}
    if traced():
        return together  # `is_neg` is no part of a graph
    for key, value in entries.items():
        if type(value) is Tensor and value.is_cuda:
            if not (value.is_nested or value.requires_grad or value.layout is not torch.strided or value.is_neg()):
                together[key] = value
        elif not together:
            return {}
    if len(together) < 2:
        return {}
    copies = {key: torch.empty_like(value) for key, value in together.items()}
    torch._foreach_copy_(list(copies.values()), list(together.values()))
    return copies
