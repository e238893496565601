"""Apply a function to each leaf: `apply`, `named_apply`, `apply_`, and the walk over the trees."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
from torch import Tensor

from tdstore.arguments import as_device, check_callable
from tdstore.container.core.container import Container
from tdstore.container.core.dim_names import as_names
from tdstore.container.core.tensorclasses import unwrap
from tdstore.container.methods.access import NO_DEFAULT
from tdstore.container.storage.block_writer import leaf_forms
from tdstore.container.values.nontensor import NonTensor, NonTensorData
from tdstore.errors import BatchSizeError, KeyNotFoundError, NotAGroupError
from tdstore.index.shapes import as_size
from tdstore.ops.base import check_container
from tdstore.storekit.pages import HOLES
from tdstore.types import DeviceLike, NamesLike, Path, SizeLike, path_text


def check_trees(others: Sequence[object], out: object = None) -> None:
    """Refuse what `apply` cannot take beside the function, or as `out`.

    Raises:
        InvalidTypeError: it is no TensorDict.
        ReadOnlyError: `out`, or a TensorDict in it, was opened for reading.
    """
    for other in others:
        check_container(other, "what apply() takes beside the function")
    if out is not None:
        check_container(out, "out")
        target: Container = unwrap(out)
        target._check_all_writable()


def keeps_leaves(out: Any) -> bool:
    """Return whether a container is locked, or has its leaves in files or in shared memory."""
    return bool(out.is_locked or out.is_memmap() or (out.is_shared() and not out.is_cuda))


def writes_in_place(out: Any, made: Any) -> bool:
    """Return whether results are written into the leaves of a container, instead of becoming its leaves.

    Those of `keeps_leaves` do, and a stored one does where its leaves have the shapes and dtypes of the results.
    """
    out = unwrap(out)
    if keeps_leaves(out):
        return True
    if not isinstance(out, Container._stored_class):
        return False
    there = dict(leaf_forms(out))
    return all(there.get(path) == facts for path, facts in leaf_forms(made))


class Mapper:
    """One run of `apply`: a function over the leaves of a tree and the corresponding leaves of others."""

    __slots__ = ("call_on_nested", "default", "device", "filter_empty", "fn", "is_leaf", "least", "named")

    def __init__(
        self,
        fn: Callable[..., Any],
        named: bool,
        default: Any,
        filter_empty: bool | None,
        call_on_nested: bool,
        is_leaf: Callable[[type], bool] | None = None,
        device: DeviceLike | None = NO_DEFAULT,
    ) -> None:
        self.device = device
        self.fn, self.named, self.default, self.is_leaf = fn, named, default, is_leaf
        self.filter_empty, self.call_on_nested = filter_empty, call_on_nested
        self.least: torch.Size | None = None

    def calls(self, entry: Any) -> bool:
        """Return whether the function is called on an entry that is not a tensor."""
        return self.call_on_nested or (self.is_leaf is not None and self.is_leaf(type(entry)))

    def run(self, td: Any, others: list[Any], path: Path, batch: torch.Size) -> Container | None:
        fn, named, n = self.fn, self.named, len(td._batch_size)
        # Below another batch size, a larger one of its own stays only where the results have it.
        above, self.least = self.least, None
        least = above if above is not None and len(above) < len(batch) and batch[: len(above)] == above else None
        data: dict[str, Any] = {}
        dropped = False
        names = td._names if batch == td._batch_size else None
        device = td._device if self.device is NO_DEFAULT else self.device
        plain = td._resident_class
        built = plain._new(data, batch, device, names)
        for key, value in td._data.items():
            is_leaf = type(value) is Tensor
            unmapped = (
                not is_leaf
                and isinstance(value, NonTensor)
                and not (isinstance(value, Tensor) and batch == td._batch_size)
            )
            if unmapped and not self.calls(value):
                if isinstance(value, (NonTensorData, Tensor)) or batch == td._batch_size:  # else whose rows are they?
                    copy = value.own_copy()
                    if isinstance(copy, NonTensorData) and copy.batch_size != batch:
                        copy = copy.for_batch(batch)
                    data[key] = built._coerce(key, copy)
                continue
            rest = [_other_entry(o, (*path, key), self.default) for o in others] if others else ()
            if is_leaf or isinstance(value, Tensor) or self.calls(value):
                made = fn((*path, key), value, *rest) if named else fn(value, *rest)
            else:
                nested: Any = value
                wide = batch
                if len(nested._batch_size) != n:
                    wide = torch.Size((*batch, *nested._batch_size[n:]))
                below = [_or_empty(r, self.default, nested, (*path, key)) for r in rest]
                self.least = batch
                made = nested._mapped(self, below, (*path, key) if named or others else (), wide)
            if made is None:
                dropped = True
            elif device is None and (
                (type(made) is Tensor and not made.is_nested and starts_with(made.shape, batch))
                or (type(made) is plain and names is None and made._batch_size == batch)
            ):
                data[key] = made
            else:
                try:
                    data[key] = built._coerce(key, made)
                except BatchSizeError:
                    if least is None:
                        raise
                    batch, least = least, None
                    built = td._resident_class._new(data, batch, device, None)
                    data[key] = built._coerce(key, made)
        if not data and (self.filter_empty or (self.filter_empty is None and dropped)):
            return None
        result: Container = built
        return result


class ApplyMixin(Container):
    """apply, named_apply, apply_."""

    __slots__ = ()

    def apply(
        self,
        fn: Callable[..., object],
        *others: Container,
        batch_size: SizeLike | None = None,
        device: DeviceLike | None = NO_DEFAULT,
        names: NamesLike = NO_DEFAULT,
        inplace: bool = False,
        default: object = NO_DEFAULT,
        filter_empty: bool | None = None,
        propagate_lock: bool = False,
        call_on_nested: bool = False,
        is_leaf: Callable[[type], bool] | None = None,
        out: Container | None = None,
    ) -> Self:
        """Call a function on each tensor, and return a TensorDict of the results.

        With `others`, it is called with the tensors of the same key: `fn(leaf, *leaves of others)`. A result of None
        drops the entry. If every entry was dropped and `filter_empty` is not False, `apply` returns None; `inplace` and
        `out` then change nothing.

        Args:
            fn: called with tensors of shape `[*B, ...]`; returns a tensor.
            *others: TensorDicts with the keys of this one.
            batch_size: of the result, when `fn` changes leading dimensions.
            device: of the result.
            names: names of the batch dimensions of the result.
            inplace: write the results into this TensorDict.
            default: used for an entry that one of `others` lacks; without it, that is a `KeyNotFoundError`.
            filter_empty: leave out nested TensorDicts that end up empty.
            propagate_lock: lock the result if this TensorDict is locked.
            call_on_nested: call `fn` on nested TensorDicts and values too, instead of going into them.
            is_leaf: called with the type of an entry that is not a tensor; True calls `fn` on the entry. With
                `is_leaf_nontensor`, `fn` is called on values.
            out: a TensorDict for the results, with the batch size of the results. If it is locked, or its tensors are
                in files, the results are written into its tensors. Stored tensors are then read, and their results
                written, in blocks of rows of bounded memory (also with `inplace`): `fn` gets some rows at a time.

        Raises:
            KeyNotFoundError: one of `others` lacks an entry, and there is no `default`.
            BatchSizeError: a result does not have the batch size.
            LockedError: `inplace`, the TensorDict is locked, and a result cannot be written into its entry.
            ReadOnlyError: what is written, `out` or with `inplace` this TensorDict, has entries of a store that was
                opened for reading.

        Example:
            >>> td = TensorDict({"a": torch.ones(2), "n": {"b": torch.zeros(2)}}, [2])
            >>> td.apply(lambda x, y: x + 2 * y, td)["a"]
            tensor([3., 3.])
        """
        if (
            not (others or propagate_lock or call_on_nested)
            and batch_size is None
            and out is None
            and is_leaf is None
            and filter_empty is None
            and device is NO_DEFAULT
            and names is NO_DEFAULT
            and not (inplace and HOLES)  # `fn` may write into what it is given, whose pages are reserved before
            and self._is_plain_tree()
        ):
            check_callable(fn, "fn")
            if inplace:
                self._check_all_writable()
            results: Self | None = self._map_plain(fn)
            if not inplace or results is None:
                return results  # type: ignore[return-value]  # None where all results were
            return self.update(results, inplace=True)
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

    def named_apply(
        self,
        fn: Callable[..., object],
        *others: Container,
        nested_keys: bool = False,
        batch_size: SizeLike | None = None,
        device: DeviceLike | None = NO_DEFAULT,
        names: NamesLike = NO_DEFAULT,
        inplace: bool = False,
        default: object = NO_DEFAULT,
        filter_empty: bool | None = None,
        propagate_lock: bool = False,
        call_on_nested: bool = False,
        is_leaf: Callable[[type], bool] | None = None,
        out: Container | None = None,
    ) -> Self:
        """Call a function on each tensor with its key: like `apply`, with `fn(key, leaf, *leaves of others)`.

        Args:
            fn: called with the key first.
            *others: TensorDicts with the keys of this one.
            nested_keys: pass the whole path of a nested entry, a tuple; False passes its last part.
            batch_size, device, names, inplace, default, filter_empty, propagate_lock, call_on_nested, is_leaf, out: as
                of `apply`.

        Raises:
            KeyNotFoundError: one of `others` lacks an entry, and there is no `default`.

        Example:
            >>> td = TensorDict({"a": torch.ones(2), "n": {"b": torch.ones(2)}}, [2])
            >>> td.named_apply(lambda key, x: x if key == "a" else -x)["n", "b"]
            tensor([-1., -1.])
        """
        check_callable(fn, "fn")

        def call(path: Path, *leaves: Any) -> Any:
            key = path if nested_keys and len(path) > 1 else path[-1]
            return fn(key, *leaves)

        made: Self = self._map_leaves(
            call,
            others,
            True,
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

    def apply_(self, fn: Callable[..., object], *others: Container, **kwargs: Any) -> Self:
        """Call a function on each tensor, and write the results into the tensors in place.

        Args:
            fn: called with tensors, as in `apply`; returns a tensor of the same shape.
            *others: TensorDicts with the keys of this one.
            **kwargs: those of `apply`.

        Returns:
            This TensorDict. A tensor for which `fn` returned None stays as it is.

        Raises:
            KeyNotFoundError: one of `others` lacks an entry, and there is no `default`.
            ReadOnlyError: the dataset was opened in mode "r".

        Example:
            >>> td = TensorDict({"a": torch.ones(2)}, [2])
            >>> td.apply_(lambda x: x + 1)["a"]
            tensor([2., 2.])
        """
        self.apply(fn, *others, inplace=True, **kwargs)
        return self

    def _is_plain_tree(self) -> bool:
        """Check whether all entries are plain tensors, or nested TensorDicts of them, without devices and names."""
        return False

    def _map_plain(self, fn: Callable[..., Any]) -> Any:
        """Apply a function to the tensors of a plain tree."""
        raise NotImplementedError

    def _map_leaves(
        self,
        fn: Callable[..., Any],
        others: tuple[Any, ...],
        named: bool,
        *,
        batch_size: SizeLike | None = None,
        device: DeviceLike | None = NO_DEFAULT,
        names: Any = NO_DEFAULT,
        inplace: bool = False,
        default: Any = NO_DEFAULT,
        filter_empty: bool | None = None,
        propagate_lock: bool = False,
        call_on_nested: bool = False,
        is_leaf: Callable[[type], bool] | None = None,
        out: Any = None,
    ) -> Any:
        check_callable(fn, "fn")
        check_trees(others, out)
        target = self if inplace else out
        if inplace:
            self._check_all_writable()  # `fn` may write into what it is given
        batch = self._batch_size if batch_size is None else as_size(batch_size)
        if batch_size is None and target is not None and -1 not in target.batch_size:
            batch = target.batch_size
        if device is not NO_DEFAULT and device is not None:
            device = as_device(device)
        of = NO_DEFAULT if target is not None else device
        if is_leaf is not None:
            check_callable(is_leaf, "is_leaf")
        plan = Mapper(fn, named, default, filter_empty, call_on_nested, is_leaf, of)
        made = self._mapped(plan, others, (), batch)
        if target is not None:
            if made is None:
                return None
            target.update(made, inplace=inplace or writes_in_place(target, made))
            return target
        if made is None:
            return None
        if device is not NO_DEFAULT and made.device != device:  # what was mapped as it is, a stored element above all
            made = made.clear_device_() if device is None else made.to(device)
        if names is not NO_DEFAULT:
            made._set_names(as_names(names, len(batch)))
        if propagate_lock and self.is_locked:
            made.lock_()
        return made

    def _mapped(self, plan: Mapper, others: Sequence[Any], path: Path, batch: torch.Size) -> Any:
        """Apply the function of `apply` to this container, at a path of the one that `apply` was called on."""
        return plan.run(self._resident(), [o._resident() for o in others], path, batch)


def starts_with(shape: torch.Size, batch: torch.Size) -> bool:
    """Check whether a shape starts with a batch size.

    Args:
        shape: the shape of a tensor.
        batch: the batch size.
    """
    if len(batch) == 1:  # comparing slices of shapes takes several times longer
        return len(shape) > 0 and shape[0] == batch[0]
    return not batch or shape[: len(batch)] == batch


def _or_empty(entry: Any, default: Any, like: Any, path: Path) -> Any:
    if isinstance(entry, Container):
        return entry
    if entry is not default:
        raise NotAGroupError(f"apply: the entry {path_text(path)} is a TensorDict, but not that of another TensorDict")
    return like._resident_class._new({}, like._batch_size, None, None)


def _other_entry(other: Any, path: Path, default: Any) -> Any:
    value = other._data.get(path[-1])
    if value is None:
        if default is NO_DEFAULT:
            raise KeyNotFoundError(f"apply: another TensorDict has no entry {path_text(path)}")
        return default
    return value
