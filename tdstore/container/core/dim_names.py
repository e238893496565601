"""Names of batch dimensions: pure functions, and the mixin over them."""

from __future__ import annotations

from abc import abstractmethod
from types import EllipsisType
from typing import Any, Self

from tdstore.arguments import as_list
from tdstore.errors import InvalidArgumentError, InvalidStateError
from tdstore.index.tracing import traced_setters
from tdstore.ops.base import OpsBase
from tdstore.types import Names, NamesLike


def as_names(names: NamesLike, ndim: int) -> Names:
    """Check names for `ndim` batch dimensions; all-None becomes None.

    Raises:
        InvalidArgumentError: wrong number, a repeated name, or something that is not a string.
    """
    if names is None:
        return None
    out = tuple(as_list(names, "names", "a sequence of strings and None"))
    if len(out) != ndim:
        raise InvalidArgumentError(f"{len(out)} names {list(out)} for {ndim} batch dimensions")
    named = [n for n in out if n is not None]
    if not all(isinstance(n, str) for n in named):
        raise InvalidArgumentError(f"dimension names are strings or None, not {list(out)}")
    if len(set(named)) != len(named):
        raise InvalidArgumentError(f"dimension names must differ: {list(out)}")
    # Strings of numpy and of enums become plain ones, as keys do.
    return tuple(None if n is None else str.__str__(n) for n in out) if named else None


def names_or_none(names: Names) -> Names:
    """Return names, or None where no dimension has one."""
    return names if names is not None and any(names) else None


def extend_names(names: Names, ndim: int) -> Names:
    """Return names for a nested TensorDict with further batch dimensions."""
    return None if names is None else names + (None,) * (ndim - len(names))


def names_below(names: Names, own: Names, ndim: int) -> Names:
    """Return names for a nested TensorDict of `ndim` dimensions: its parent's, then its own for further ones."""
    if names is None:
        return None
    return names + own[len(names) :] if own is not None else extend_names(names, ndim)


def names_moved(names: Names, td: Any, ndim: int, new: int) -> Names:
    """Return names for a nested TensorDict after the first `ndim` dimensions of its batch were moved.

    Args:
        names: of the parent, after the move.
        td: the nested TensorDict before it, whose further dimensions keep their names; None to leave them without.
        new: number of dimensions of its batch after the move.
    """
    own: Names = None if td is None else td._dim_names()
    return extend_names(names, new) if names is None or own is None else names + own[ndim:]


@traced_setters
class NamesMixin(OpsBase):
    """`names`, `refine_names`, `rename`, `rename_`."""

    __slots__ = ()

    _names: Names

    @property
    def names(self) -> list[str | None]:
        """Name of each batch dimension, or None.

        Setting them, or None for no names, sets them in nested TensorDicts too, whose further dimensions keep their
        names. A TensorDict without names takes those of a named one that is set into it.
        """
        return [None] * len(self.batch_size) if self._names is None else list(self._names)

    @names.setter
    def names(self, names: NamesLike) -> None:
        wanted = as_names(names, len(self.batch_size))
        self._check_names(wanted)
        self._set_names(wanted or (None,) * len(self.batch_size))

    @abstractmethod
    def _check_names(self, names: Names) -> None:
        """Raise a ValueError for names that further dimensions of nested TensorDicts have."""

    def _dim_names(self) -> Names:
        return self._names

    def _set_names(self, names: Names) -> None:
        raise NotImplementedError

    def _shallow(self) -> Self:
        raise NotImplementedError

    def _copy_with_names(self, names: Names) -> Self:
        """Return a shallow copy with other names, without changing the store."""
        td = self._shallow()
        td._set_names(names or (None,) * len(self.batch_size))
        return td

    def refine_names(self, *names: str | EllipsisType | None) -> Self:
        """Name dimensions that have no name; an ellipsis stands for those to leave as they are.

        Raises:
            InvalidStateError: a dimension already has another name.
        """
        old = self.names
        wanted: list[Any] = list(names)
        if wanted.count(Ellipsis) > 1:
            raise InvalidArgumentError(f"refine_names takes one ellipsis at most, not {names}")
        if Ellipsis in wanted:
            at = wanted.index(Ellipsis)
            wanted[at : at + 1] = old[at : len(old) - (len(wanted) - at - 1)]
        for have, want in zip(old, wanted, strict=False):
            if have is not None and have != want:
                raise InvalidStateError(f"cannot refine the name {have!r} to {want!r}: use rename")
        self.names = wanted
        return self

    def rename_(self, *names: str | None, **rename_map: str) -> Self:
        """Rename dimensions in place: all by position, or some by `old=new`."""
        self.names = self._renamed(names, rename_map)
        return self

    def _renamed(self, names: tuple[Any, ...], rename_map: dict[str, str]) -> Any:
        if names and rename_map:
            raise InvalidArgumentError("give names by position or as old=new, not both")
        if rename_map:
            unknown = set(rename_map) - set(self.names)
            if unknown:
                raise InvalidArgumentError(f"no dimension is named {sorted(unknown)[0]!r}; the names are {self.names}")
            names = tuple(rename_map.get(n, n) if n is not None else None for n in self.names)
        elif len(names) == 1 and isinstance(names[0], (list, tuple)):
            names = tuple(names[0])
        elif names == (None,):
            return None
        return names

    def rename(self, *names: str | None, **rename_map: str) -> Self:
        """Return a shallow copy with other names of the batch dimensions. It shares the tensors.

        Args:
            *names: all names, in order; None for no name, and one None for no names at all.
            **rename_map: some names, as `old="new"`.

        Raises:
            InvalidArgumentError: both forms, a name that no dimension has, another number of names, or a name that a
                further dimension of a nested TensorDict has.

        Example:
            >>> td = TensorDict({"a": torch.zeros(3, 4)}, [3, 4], names=["time", "env"])
            >>> td.rename(env="worker").names
            ['time', 'worker']
        """
        wanted = as_names(self._renamed(names, rename_map), len(self.batch_size))
        self._check_names(wanted)
        return self._copy_with_names(wanted)
