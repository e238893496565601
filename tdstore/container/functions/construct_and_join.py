"""Constructors of containers: from dicts, keys and schemas, and by joining others."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, overload

import torch
from torch import Tensor

from tdstore.arguments import as_list
from tdstore.container.core.container import GROUP, Container
from tdstore.container.core.dim_names import extend_names
from tdstore.container.core.tensorclasses import Typed, rewrap, unwrap, unwrap_all
from tdstore.container.entries.unbatched import is_batched
from tdstore.container.values.nontensor import NonTensor, merge
from tdstore.container.varlen.nested_rows import concat_rows
from tdstore.errors import (
    BatchSizeError,
    DifferentKeysError,
    InvalidArgumentError,
    InvalidStateError,
    InvalidTypeError,
    KeyNotFoundError,
)
from tdstore.index.shapes import as_dim, as_size
from tdstore.ops.base import check_container
from tdstore.settings import Switch
from tdstore.types import DeviceLike, Names, Path, path_text

if TYPE_CHECKING:
    from tdstore.tensordicts.base import TensorDictBase
    from tdstore.tensordicts.lazystack.stack import LazyStackedTensorDict

_TENSORS = {Tensor}

T = TypeVar("T")
TypedT = TypeVar("TypedT", bound=Typed)


def _columns(tds: Sequence[Any], what: str, path: Path) -> dict[str, list[Any]]:
    """Return the entries of each key, side by side; all TensorDicts must have the same keys."""
    datas = [td._data for td in tds]
    first = datas[0]
    count = len(first)
    try:
        if set(map(len, datas)) == {count}:
            return {key: [d[key] for d in datas] for key in first}
    except KeyError:
        pass  # told below, with all the keys that differ
    have = {k: sum(k in d for d in datas) for d in datas for k in sorted(d)}
    rare = [f"{path_text((*path, k))} is in {n} of {len(tds)}" for k, n in have.items() if n < len(tds)]
    raise DifferentKeysError(
        f"cannot {what} TensorDicts with different keys: {', '.join(rare[:20])}{', ...' if len(rare) > 20 else ''}",
        hint="select(*keys) what all have" + ("; or lazy_stack them" if what == "stack" else ""),
    )


def _join(tds: Sequence[Any], fn: Any, dim: int, new: torch.Size, names: Names, path: Path = ()) -> Any:
    """Join containers entry by entry with `torch.stack` or `torch.cat`."""
    first = tds[0]
    what = fn.__name__
    n = len(first._batch_size)
    data: dict[str, Any] = {}
    for key, column in _columns(tds, what, path).items():
        value = column[0]
        if is_batched(value):
            try:
                data[key] = fn(column, dim) if dim or fn is torch.stack else _cat_first(column)
            except (RuntimeError, TypeError, ValueError) as error:  # the last of nested tensors, from torch 2.6
                where = path_text((*path, key))
                if fn is torch.stack and _any_nested(column):
                    raise InvalidStateError(
                        f"cannot stack the entries {where}: they are nested tensors, and one with two dimensions of "
                        "rows does not exist",
                        hint="tdstore.lazy_stack() keeps them apart; torch.cat() joins their rows",
                    ) from error
                raise InvalidStateError(f"cannot {what} the entries {where}: {error}") from error
        elif _all_plain(column):
            below = value._batch_size  # the common case, without a look at each
            wide = new if len(below) == n else torch.Size((*new, *below[n:]))
            data[key] = _join(
                column,
                fn,
                dim,
                wide,
                nested_names(column if fn is torch.stack else column[:1], names, n, new),
                (*path, key),
            )
        elif isinstance(value, NonTensor):
            if not all(isinstance(v, NonTensor) for v in column):
                raise InvalidStateError(f"cannot {what} {path_text((*path, key))}: some are tensors, some are not")
            data[key] = merge(column, lambda parts: fn(parts, dim), collapse=fn is torch.cat)
        else:
            if len(set(map(type, column))) > 1 and not all(isinstance(v, Container) for v in column):
                raise InvalidStateError(f"cannot {what} {path_text((*path, key))}: some are TensorDicts, some are not")
            tensorclass, column = unwrap_all(column)
            if any(isinstance(v, Container._stack_class) for v in column):
                data[key] = rewrap(tensorclass, (stack if fn is torch.stack else cat)(column, dim))
                continue
            parts = [v._resident() for v in column]
            below = value.batch_size
            wide = new if len(below) == n else torch.Size((*new, *below[n:]))
            made = _join(
                parts,
                fn,
                dim,
                wide,
                nested_names(column if fn is torch.stack else column[:1], names, n, new),
                (*path, key),
            )
            data[key] = rewrap(tensorclass, made)
    device = first._device
    if fn is torch.cat and any(td._device != device for td in tds):
        device = None
    return first._new(data, new, device, names)


def _cat_first(column: Sequence[Any]) -> Tensor:
    if column[0].is_nested or (set(map(type, column)) != _TENSORS and _any_nested(column)):
        return concat_rows(column)
    try:
        return torch.cat(column)  # type: ignore[arg-type]
    except (RuntimeError, TypeError):
        if _any_nested(column):  # which torch joins with no plain tensor
            return concat_rows(column)
        raise


def _any_nested(column: Sequence[Any]) -> bool:
    return any(part.is_nested for part in column if is_batched(part))


def nested_names(column: Sequence[Any], names: Names, n: int, new: torch.Size) -> Names:
    """Return names for joined nested TensorDicts: the parent's, and their own for further dimensions.

    Args:
        column: what is joined; one is enough where the names of the first count.
        names: of the result that it is an entry of, whose batch size is `new`.
        n: how many dimensions the parents have that are joined.
    """
    own: Names = column[0]._names
    wide = len(new) + column[0].batch_dims - n
    if own is None or not any(own[n:]) or any(v._names != own for v in column):
        return names and extend_names(names, wide)
    return (names or (None,) * len(new)) + own[n:]


@overload
def stack(input: Iterable[TypedT], dim: int = 0, *, out: TypedT | None = None) -> TypedT: ...
@overload
def stack(input: Iterable[T], dim: int = 0, *, out: T | None = None) -> T: ...
def stack(input: Iterable[Any], dim: int = 0, *, out: Any = None) -> Any:
    """Stack TensorDicts along a new batch dimension, as `torch.stack`.

    Lazy stacks of equal length give a lazy stack of their elements, stacked; see also `set_lazy_legacy`. The result has
    dimension names if all have the same ones.

    Args:
        input: TensorDicts of one batch size `[*B]`, with the same keys and leaf shapes.
        dim: the place of the new dimension, from `-len(B) - 1` to `len(B)`.
        out: a TensorDict to write the result into, in place.

    Raises:
        DifferentKeysError: a key that not all of them have.
        BatchSizeError: batch sizes differ.
        DimensionError: `dim` is out of range.
        InvalidStateError: leaf shapes differ, or there are no TensorDicts.

    Example:
        >>> tdstore.stack([TensorDict({"a": torch.zeros(3, 2)}, [3]) for _ in range(4)], 1)["a"].shape
        torch.Size([3, 4, 2])
    """
    parts = as_list(input, "what stack() takes", "a sequence of TensorDicts")
    if out is not None:
        check_container(out, "out")
    if set_lazy_legacy.on and parts:
        return lazy_stack(parts, dim, out=out)
    if not _all_plain(parts):
        _check_all(parts, "stack")
        tensorclass, parts = unwrap_all(parts)
        if tensorclass is not None:
            return rewrap(tensorclass, stack(parts, dim, out=unwrap(out)), out)
        if (together := _side_by_side(parts)) is not None:
            return _stack_elements(together, dim, out)
        parts = [td._resident() for td in parts]
    if not parts:
        raise InvalidStateError("stack needs at least one TensorDict")
    batch, names = parts[0]._batch_size, parts[0]._names
    for part in parts:
        if part._batch_size != batch:
            raise BatchSizeError(f"cannot stack batch sizes {list(batch)} and {list(part._batch_size)}")
        if part._names is not names and part._names != names:
            names = None
    at = as_dim(dim, len(batch) + 1)
    new = torch.Size((*batch[:at], len(parts), *batch[at:]))
    made = _join(parts, torch.stack, at, new, names and (*names[:at], None, *names[at:]))
    return made if out is None else _into(out, made)


@overload
def cat(input: Iterable[TypedT], dim: int = 0, *, out: TypedT | None = None) -> TypedT: ...
@overload
def cat(input: Iterable[T], dim: int = 0, *, out: T | None = None) -> T: ...
def cat(input: Iterable[Any], dim: int = 0, *, out: Any = None) -> Any:
    """Concatenate TensorDicts along a batch dimension, as `torch.cat`. With a lazy stack among them, the result is one.

    Args:
        input: TensorDicts with the same keys, whose batch sizes differ in `dim` at most.
        dim: the batch dimension to concatenate along.
        out: a TensorDict to write the result into, in place.

    Raises:
        DifferentKeysError: a key that not all of them have.
        BatchSizeError: batch sizes differ in another dimension.
        DimensionError: `dim` is out of range.
        InvalidStateError: feature shapes differ, or there are no TensorDicts.

    Example:
        >>> tdstore.cat([TensorDict({"a": torch.zeros(n, 2)}, [n]) for n in (3, 4)])["a"].shape
        torch.Size([7, 2])
    """
    parts = as_list(input, "what cat() takes", "a sequence of TensorDicts")
    if out is not None:
        check_container(out, "out")
    if not _all_plain(parts):
        _check_all(parts, "cat")
        tensorclass, parts = unwrap_all(parts)
        if tensorclass is not None:
            return rewrap(tensorclass, cat(parts, dim, out=unwrap(out)), out)
        lazy = next((td for td in parts if isinstance(td, Container._stack_class)), None)
        if lazy is not None:
            return _cat_elements(parts, lazy, dim, out)
        parts = [td._resident() for td in parts]
    if not parts:
        raise InvalidStateError("cat needs at least one TensorDict")
    batch = parts[0]._batch_size
    at = as_dim(dim, len(batch))
    length = 0
    for part in parts:
        other = part._batch_size
        if other == batch:
            length += batch[at]
            continue
        if len(other) != len(batch) or other[:at] != batch[:at] or other[at + 1 :] != batch[at + 1 :]:
            raise BatchSizeError(f"cannot concatenate batch sizes {list(batch)} and {list(other)} along {at}")
        length += other[at]
    new = torch.Size((*batch[:at], length, *batch[at + 1 :]))
    made = _join(parts, torch.cat, at, new, parts[0]._names)
    return made if out is None else _into(out, made)


def _check_all(tds: Sequence[Any], what: str) -> None:
    for td in tds:
        if not isinstance(td, (Container, Typed)):
            raise InvalidTypeError(
                f"{what} takes TensorDicts together with TensorDicts only, not with a {type(td).__name__}"
            )


def _all_plain(tds: Sequence[Any]) -> bool:
    """Check whether all are TensorDicts of live tensors: the common case, which avoids a second look at each."""
    return set(map(type, tds)) == {Container._resident_class}


def _side_by_side(tds: Sequence[Any]) -> list[Any] | None:
    """Return lazy stacks with equally many elements along one dimension, element by element; None for anything else."""
    if not tds or not all(isinstance(td, Container._stack_class) for td in tds):
        return None
    first = tds[0]
    if not first._tds or any((len(t._tds), t._stack_dim) != (len(first._tds), first._stack_dim) for t in tds):
        return None
    return list(tds)


def _stack_elements(tds: list[Any], dim: int, out: Any) -> Any:
    first = tds[0]
    at, d = as_dim(dim, len(first._batch_size) + 1), first._stack_dim
    made = [stack(column, at - (at > d)) for column in zip(*(td._tds for td in tds), strict=True)]
    lazy = first._of(made, d + (at <= d), first._dim_name if all(t._dim_name == first._dim_name for t in tds) else None)
    return lazy if out is None else _into(out, lazy)


def _cat_elements(tds: list[Any], lazy: Any, dim: int, out: Any) -> Any:
    d = lazy._stack_dim
    ndim = len(lazy._batch_size)
    at = as_dim(dim, ndim)
    if any(td.batch_dims != ndim for td in tds):
        raise BatchSizeError(f"cannot concatenate batch sizes {', '.join(str(list(td.batch_size)) for td in tds)}")
    columns = [td.unbind(d) for td in tds]
    if at == d:
        elements = [td for column in columns for td in column]
        sizes = {td.batch_size for td in elements}
        if len(sizes) > 1 and not any(-1 in td.batch_size for td in tds):
            raise BatchSizeError(f"cannot concatenate batch sizes {', '.join(str(list(t.batch_size)) for t in tds)}")
    else:
        if len({len(column) for column in columns}) > 1:
            raise BatchSizeError(f"cannot concatenate lazy stacks of {[len(c) for c in columns]} elements along {at}")
        elements = [cat(row, at - (at > d)) for row in zip(*columns, strict=True)]
    made = lazy._of(elements, d, lazy._dim_name, lazy._empty_batch_size)
    return made if out is None else _into(out, made)


@overload
def lazy_stack(
    input: Iterable[TypedT],
    dim: int = 0,
    *,
    device: DeviceLike | None = None,
    out: Any = None,
    stack_dim_name: str | None = None,
    strict_shape: bool = False,
) -> TypedT: ...
@overload
def lazy_stack(
    input: Iterable[TensorDictBase],
    dim: int = 0,
    *,
    device: DeviceLike | None = None,
    out: Any = None,
    stack_dim_name: str | None = None,
    strict_shape: bool = False,
) -> LazyStackedTensorDict: ...
@overload
def lazy_stack(
    input: Iterable[T],
    dim: int = 0,
    *,
    device: DeviceLike | None = None,
    out: Any = None,
    stack_dim_name: str | None = None,
    strict_shape: bool = False,
) -> T: ...
def lazy_stack(
    input: Iterable[Any],
    dim: int = 0,
    *,
    device: DeviceLike | None = None,
    out: Any = None,
    stack_dim_name: str | None = None,
    strict_shape: bool = False,
) -> Any:
    """Stack TensorDicts without copying them, into a `LazyStackedTensorDict`: shapes and keys may differ.

    The elements stay separate; reading a key stacks the tensors of that key.

    Args:
        input: TensorDicts, or tensors, which are stacked.
        dim: the new batch dimension.
        device: move the elements there.
        out: a TensorDict to write the result into, in place.
        stack_dim_name: name of the new dimension.
        strict_shape: refuse different batch sizes. Otherwise a batch dimension that differs has size -1.

    Raises:
        InvalidStateError: there is nothing to stack.
        TypeError: an element is not a TensorDict.
        BatchSizeError: the elements have different numbers of batch dimensions; or `strict_shape`, and sizes differ.
        ValueError: names of dimensions differ.

    Example:
        >>> td = tdstore.lazy_stack([TensorDict({"a": torch.zeros(n)}) for n in (2, 3)])
        >>> td[1]["a"].shape, td.get("a", as_list=True)[0].shape
        (torch.Size([3]), torch.Size([2]))
    """
    tds = as_list(input, "what lazy_stack() takes", "a sequence of TensorDicts")
    if not tds:
        raise InvalidStateError("lazy_stack needs at least one TensorDict")
    if all(isinstance(td, (Tensor, NonTensor)) for td in tds):
        return torch.stack(tds, dim, out=out)
    if out is not None:
        check_container(out, "out")
    mixed = not all(isinstance(td, Typed) for td in tds)
    tensorclass, tds = unwrap_all(tds)
    if tensorclass is not None and not tensorclass._open:
        tensorclass = None if mixed else tensorclass
        made = lazy_stack(
            tds, dim, device=device, out=unwrap(out), stack_dim_name=stack_dim_name, strict_shape=strict_shape
        )
        return rewrap(tensorclass, made, out)
    if tensorclass is not None:  # such an object is a TensorDict itself: an element, as it is
        tds = [tensorclass._wrap_if_fits(td) for td in tds]
    made = Container._stack_class(
        *tds, stack_dim=dim, device=device, stack_dim_name=stack_dim_name, strict_shape=strict_shape
    )
    return made if out is None else out.update(made, inplace=True)


def maybe_dense_stack(input: Iterable[T], dim: int = 0, *, out: T | None = None, **kwargs: Any) -> T:
    """Stack as `torch.stack` where keys and shapes allow it, else as `lazy_stack`; nested TensorDicts one by one."""
    tds = as_list(input, "what maybe_dense_stack() takes", "a sequence of TensorDicts")
    if tds and all(isinstance(td, NonTensor) for td in tds):
        return lazy_stack(tds, dim, out=out)
    try:
        return stack(tds, dim, out=out)
    except (RuntimeError, KeyNotFoundError):
        if not tds:
            raise
        made = None if out is not None or kwargs else _dense_outside(tds, dim)
        return lazy_stack(tds, dim, out=out, **kwargs) if made is None else made


def _dense_outside(tds: list[Any], dim: int) -> Any:
    """Stack densely, except for nested TensorDicts that cannot be; return None if other entries prevent it."""
    plain = Container._resident_class
    if any(type(td) is not plain or td.batch_size != tds[0].batch_size for td in tds):
        return None
    groups = [k for k in tds[0]._first_keys() if tds[0]._kind(k) == GROUP]
    columns = [[td._data.get(k) for td in tds] for k in groups]
    if any(type(e) is not plain or e.batch_size != c[0].batch_size for c in columns for e in c):
        return None
    try:
        made = stack([td.exclude(*groups) for td in tds], dim)
    except (RuntimeError, KeyNotFoundError):
        return None
    for key, column in zip(groups, columns, strict=True):
        made.set(key, maybe_dense_stack(column, dim))
    made._reorder(list(tds[0]._first_keys()))
    return made


def lazy_legacy() -> bool:
    """Return whether `torch.stack` of TensorDicts returns lazy stacks; see `set_lazy_legacy`."""
    return set_lazy_legacy.on


class set_lazy_legacy(Switch):  # noqa: N801  # the name that users know
    """Make `torch.stack` of TensorDicts lazy, as it was long ago, or not: in a `with` block, a function, or for good.

    Example:
        >>> with set_lazy_legacy(True):
        ...     stack = torch.stack([TensorDict({"x": torch.ones(2)})] * 2)
        >>> type(stack).__name__
        'LazyStackedTensorDict'
    """

    on = False


def _into(out: Any, made: Any) -> Any:
    if out.batch_size != made.batch_size:
        raise BatchSizeError(f"out has batch size {list(out.batch_size)}, the result {list(made.batch_size)}")
    if isinstance(made, Container._stack_class):
        return out.update(made, inplace=True)
    return out.update(made.select(*[k for k in made.keys(True, True) if k in out]), inplace=True)


def from_dict(
    cls: type[T],
    source: Mapping[Any, Any],
    batch_size: Any,
    auto: bool | None,
    batch_dims: Any,
    device: Any,
    names: Any,
) -> T:
    """Build a TensorDict from nested dicts.

    Args:
        batch_size: of every level.
        auto: gives every level its largest batch size, of at most `batch_dims` dimensions; by default where there are
            `batch_dims`.

    Raises:
        InvalidArgumentError: both `batch_size` and `batch_dims`.
    """
    if batch_size is not None and batch_dims is not None:
        raise InvalidArgumentError("give batch_size or batch_dims, not both")
    new: Any = cls
    td: Any = new(source, batch_size=as_size(batch_size), device=device)
    if batch_size is None and (batch_dims is not None if auto is None else auto):
        td.auto_batch_size_(batch_dims)
    if names is not None:
        td.names = names
    made: T = td
    return made


def from_container(source: Any, batch_size: Any, device: Any, names: Any) -> Any:
    """Return a TensorDict passed to `from_dict`, with its own batch sizes unless others are requested."""
    found: Any = source
    if batch_size is not None and as_size(batch_size) != source.batch_size:
        found = found.clone(recurse=False)
        found.batch_size = batch_size
    if names is not None and list(names) != list(found.names):
        found = found.clone(recurse=False) if found is source else found
        found.names = names
    return found if device is None else found.to(device)
