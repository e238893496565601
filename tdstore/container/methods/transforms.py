"""Copy a TensorDict, map a function over its leaves, convert it to plain Python."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal, Self

import torch
from torch import Tensor

from tdstore.container.core.container import GROUP, VALUE, Container
from tdstore.container.core.dim_names import as_names
from tdstore.container.entries.unbatched import is_batched
from tdstore.container.methods.access import NO_DEFAULT
from tdstore.container.methods.apply import Mapper, writes_in_place
from tdstore.container.values.nontensor import NonTensor
from tdstore.index.shapes import as_size
from tdstore.types import Path

if TYPE_CHECKING:
    from tdstore.tensordicts.resident.tensordict import TensorDict


class TransformsMixin(Container):
    """clone, replace, to_dict, apply, ..."""

    __slots__ = ()

    # -- copying -----------------------------------------------------------------------------
    def empty(
        self, recurse: bool = False, *, batch_size: Any = None, device: Any = NO_DEFAULT, names: Any = None
    ) -> Self:
        """Return a TensorDict of the same batch size without tensors.

        Args:
            recurse: keep the tree: nested TensorDicts, empty of tensors, and what is no tensor.
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
        """Give an in-memory TensorDict without other owners this one's class, if that is a subclass of its own."""
        cls: Any = type(self)
        plain = self._resident_class
        if cls is plain or not issubclass(cls, plain) or type(td) is not plain:
            return td
        return cls._new({}, td._batch_size, td._device, td._names)._become(td)

    def clone(self, recurse: bool = True) -> Self:
        """Copy leaves and values too (`recurse=True`), or only the tree around the same ones.

        Values are copied as `copy.deepcopy` does it. One that it refuses, such as a lock, is in both. Dicts and lists
        are copied in either case: they are part of the tree.

        Example:
            >>> td = TensorDict({"a": torch.zeros(3)}, [3])
            >>> td.clone()["a"] is td["a"], td.clone(recurse=False)["a"] is td["a"]
            (False, True)
        """
        td = self._resident()
        data: dict[str, Any] = {}
        for key, value in td._data.items():
            if type(value) is Tensor or is_batched(value):
                data[key] = value.clone() if recurse else value
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
        """Copy the tree around the same leaves."""
        return self.clone(recurse=False)

    def __copy__(self) -> Any:
        return self.clone(recurse=False)

    def replace(self, *args: Any, **kwargs: Any) -> Self:
        """Copy shallowly, with some entries replaced. Stored data is copied into memory; the store stays as it is."""
        if not kwargs and (not args or args[0] is None or (isinstance(args[0], dict) and not args[0])):
            return self
        return self._own_copy().update(*args, **kwargs)

    def _own_copy(self) -> Self:
        """Copy shallowly. Changes of the copy do not reach a store."""
        return self._shallow()

    def contiguous(self, *, canonical: bool = False, inplace: bool = False) -> Self:
        """Make the leaves contiguous. A stored TensorDict is read into memory.

        Args:
            canonical: leaves also get the strides that torch gives a new tensor of their shape. A dimension
                of size 1 may have any other stride and still be contiguous.
            inplace: this TensorDict takes over the leaves and is returned.
        """
        td = self._resident()
        made = [
            t if t.is_contiguous() and not (canonical and _has_unusual_strides(t)) else _compact(t)
            for t in td._leaf_list()
        ]
        return self._apply_inplace_result(td._with_leaves(iter(made)), "contiguous", inplace)

    def is_contiguous(self) -> bool:
        """Return whether every leaf is contiguous in memory."""
        return self._resident() is self and all(t.is_contiguous() for t in self._leaf_list())

    def to_tensordict(self, *, retain_none: bool | None = None) -> TensorDict:
        """Return a plain in-memory TensorDict with copies of all entries."""
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
        """Convert to nested plain dicts.

        Args:
            retain_none: keep entries whose value is None.
            convert_tensors: tensors become lists of numbers, or with "numpy" arrays.
            tolist_first: nested TensorDicts with batch dimensions become lists of dicts, and values lists of them.
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

    # -- mapping -----------------------------------------------------------------------------
    def apply(
        self,
        fn: Callable[..., Any],
        *others: Any,
        batch_size: Any = None,
        device: Any = NO_DEFAULT,
        names: Any = NO_DEFAULT,
        inplace: bool = False,
        default: Any = NO_DEFAULT,
        filter_empty: bool | None = None,
        propagate_lock: bool = False,
        call_on_nested: bool = False,
        is_leaf: Callable[[type], bool] | None = None,
        out: Any = None,
    ) -> Self:
        """Map `fn(leaf, *leaves of others)` over tensor leaves into a new TensorDict.

        A result of None drops the entry; `apply` returns None when every entry was dropped and
        `filter_empty` is not False.

        Args:
            batch_size: of the result, when `fn` changes leading dimensions.
            default: stands for an entry that one of `others` lacks; without it that is a `KeyError`.
            filter_empty: leave out nested TensorDicts that end up empty.
            call_on_nested: call `fn` on nested TensorDicts and values too, instead of going into them.
            is_leaf: tells by its type whether `fn` is called on an entry that is no tensor; with `is_leaf_nontensor`,
                it is called on values.
            inplace: write the results into this TensorDict.
            out: this one takes the results, and its batch size is that of the results; where it is locked or its
                leaves lie in files they are written into its leaves. Stored leaves are then read, and their results
                written, in blocks of rows of bounded memory (so too with `inplace`): `fn` sees some rows at a time.
        """
        made: Self = self._map_leaves(
            fn,
            others,
            False,
            batch_size=batch_size,
            device=device,
            names=names,
            inplace=inplace,
            default=default,
            filter_empty=filter_empty,
            propagate_lock=propagate_lock,
            call_on_nested=call_on_nested,
            is_leaf=is_leaf,
            out=out,
        )
        return made

    def named_apply(self, fn: Callable[..., Any], *others: Any, nested_keys: bool = False, **kwargs: Any) -> Self:
        """Apply `fn` as `apply` does, with the key first: its last part, or the whole path with `nested_keys`."""

        def call(path: Path, *leaves: Any) -> Any:
            key = path if nested_keys and len(path) > 1 else path[-1]
            return fn(key, *leaves)

        made: Self = self._map_leaves(call, others, True, **kwargs)
        return made

    def apply_(self, fn: Callable[..., Any], *others: Any, **kwargs: Any) -> Self:
        """Map `fn` over the leaves and write the results back in place."""
        self.apply(fn, *others, inplace=True, **kwargs)
        return self

    def _map_leaves(
        self,
        fn: Callable[..., Any],
        others: tuple[Any, ...],
        named: bool,
        *,
        batch_size: Any = None,
        device: Any = NO_DEFAULT,
        names: Any = NO_DEFAULT,
        inplace: bool = False,
        default: Any = NO_DEFAULT,
        filter_empty: bool | None = None,
        propagate_lock: bool = False,
        call_on_nested: bool = False,
        is_leaf: Callable[[type], bool] | None = None,
        out: Any = None,
    ) -> Any:
        target = self if inplace else out
        batch = self._batch_size if batch_size is None else as_size(batch_size)
        if batch_size is None and target is not None and -1 not in target.batch_size:
            batch = target.batch_size
        made = self._mapped(Mapper(fn, named, default, filter_empty, call_on_nested, is_leaf), others, (), batch)
        if target is not None:
            if made is not None:
                target.update(made, inplace=inplace or writes_in_place(target, made))
            return target
        if made is None:
            return None
        if device is not NO_DEFAULT:
            made = made.clear_device_() if device is None else made.to(device)
        if names is not NO_DEFAULT:
            made._set_names(as_names(names, len(batch)))
        if propagate_lock and self.is_locked:
            made.lock_()
        return made

    def _mapped(self, plan: Mapper, others: Sequence[Any], path: Path, batch: torch.Size) -> Any:
        """Apply the function of `apply` to this container, at a path of the one that `apply` was called on."""
        return plan.run(self._resident(), [o._resident() for o in others], path, batch)

    def __deepcopy__(self, memo: Any) -> Any:
        copy = self.clone()
        memo[id(self)] = copy
        return copy


def _compact(t: Tensor) -> Tensor:
    return t.clone(memory_format=torch.contiguous_format)


def _has_unusual_strides(t: Tensor) -> bool:
    """Return whether a contiguous tensor has other strides than torch gives, in dimensions of size 1 above all."""
    return t.stride() != torch.empty(t.shape, device="meta").stride()
