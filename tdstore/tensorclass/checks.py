"""Checks of a class: shapes in annotations, and rows that are written."""

from __future__ import annotations

import typing
from collections.abc import Iterable
from types import NoneType, UnionType
from typing import Annotated, Any, TypeVar, Union

from torch import Tensor

from tdstore.container.core.container import GROUP, LEAF, Container
from tdstore.container.core.tensorclasses import Typed, unwrap
from tdstore.errors import InvalidArgumentError
from tdstore.tensorclass.fields import resolved
from tdstore.types import Path, is_key, path_text

T = TypeVar("T", bound=Typed)
Dims = tuple[int | str, ...]
MANY = "..."
"""Any number of dimensions."""


def check(self: T) -> T:
    """Check whether fields have the shapes of their annotations, such as `Annotated[Tensor, "b t 3"]`; returns `self`.

    Nothing else looks at them. A name is one size in all fields of an object (the first ones are the batch), a
    number that size, `_` any, `...` any number of dimensions. What jaxtyping writes is read too. Nested tensorclasses
    are checked by their own annotations.

    Raises:
        InvalidArgumentError: some fields have other shapes; the message names all of them.

    Example:
        >>> class Step(TensorClass):
        ...     obs: Annotated[torch.Tensor, "b 3"]
        >>> Step(obs=torch.zeros(2, 3), batch_size=[2]).check().batch_size
        torch.Size([2])
    """
    if wrong := list(_wrong(self, {}, ())):
        raise InvalidArgumentError(f"{type(self).__name__} is not what its annotations say: {'; '.join(wrong)}")
    return self


def check_rows(obj: Any, index: Any, value: Any) -> None:
    """Look whether `obj[index] = value` is a write of rows of the class.

    Raises:
        InvalidArgumentError: the index is a key, or the value has other entries than the class, or is of another kind.
    """
    name = type(obj).__name__
    if is_key(index):
        raise InvalidArgumentError(f"a {name} is indexed by rows: its fields are attributes, not {index!r}")
    if isinstance(value, Typed) and type(value) is not type(obj):
        mine, theirs = (set(unwrap(o)._first_keys()) for o in (obj, value))
        if mine != theirs:
            raise InvalidArgumentError(
                f"rows of {name} take {name} or a class with the same entries; "
                f"{type(value).__name__} differs in {sorted(mine ^ theirs)}"
            )
    elif isinstance(value, Container) and not isinstance(value, Typed) and (unknown := obj._extra_keys(value)):
        raise InvalidArgumentError(f"{name} has no field {unknown[0]!r}, which the rows have")
    elif not isinstance(value, (Container, Tensor, bool, int, float, complex)):
        raise InvalidArgumentError(
            f"rows of {name} take an object of the class, a TensorDict, a number or a tensor, "
            f"not a {type(value).__name__}"
        )


def _wrong(obj: Any, sizes: dict[str, tuple[int, str]], prefix: Path) -> Iterable[str]:
    td, hints = obj._tensordict, resolved(type(obj), extras=True)
    for name in obj._plan.names:
        kind, dims = td._kind(name), dims_of(hints.get(name))
        if dims is not None and kind in (LEAF, GROUP):
            shape = list(td._leaf_shape(name) if kind == LEAF else td._raw(name).batch_size)
            place = path_text((*prefix, name))
            for fault in _faults(dims, shape, sizes, place):
                yield f"{place} of shape {shape} is annotated {' '.join(map(str, dims))!r}: {fault}"
        if kind == GROUP and isinstance(inner := td._raw(name), Typed):
            yield from _wrong(inner, {}, (*prefix, name))


def _faults(dims: Dims, shape: list[int], sizes: dict[str, tuple[int, str]], place: str) -> Iterable[str]:
    if MANY in dims:
        at = dims.index(MANY)
        dims = (*dims[:at], *["_"] * (len(shape) - len(dims) + 1), *dims[at + 1 :])
    if len(dims) != len(shape):
        yield f"{len(shape)} dimensions, not {len(dims)}"
        return
    for at, (dim, size) in enumerate(zip(dims, shape, strict=True)):
        if isinstance(dim, int):
            if size != dim:
                yield f"dimension {at} is {size}, not {dim}"
        elif dim != "_" and (known := sizes.setdefault(dim, (size, place)))[0] != size:
            yield f"{dim} is {size} here and {known[0]} in {known[1]}"


def dims_of(hint: Any) -> Dims | None:
    """Return the dimensions in `Annotated[Tensor, "b 3"]` and in `Float[Tensor, "b 3"]` (jaxtyping)."""
    origin = typing.get_origin(hint)
    if origin in (Union, UnionType):
        left = [part for part in typing.get_args(hint) if part is not NoneType]
        return dims_of(left[0]) if len(left) == 1 else None
    if origin is Annotated:
        found = [d for d in map(_dims, hint.__metadata__) if d is not None]
        return found[0] if found else dims_of(hint.__origin__)
    return _dims(getattr(hint, "dim_str", None))


def _dims(said: Any) -> Dims | None:
    parts = said.split() if isinstance(said, str) else said
    if not isinstance(parts, (list, tuple)) or not all(isinstance(part, (str, int)) for part in parts):
        return None
    dims = tuple(map(_dim, parts))
    return dims if dims.count(MANY) < 2 else None


def _dim(part: str | int) -> int | str:
    if isinstance(part, int) or part.isdecimal():
        return int(part)
    if part == MANY or part[0] == "*":
        return MANY
    return part if part.isidentifier() else "_"
