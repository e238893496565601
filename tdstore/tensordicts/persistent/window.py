"""What a container over a store shows of it: all there is, or a view with rows, entries and a batch size of its own.

A view is what indexing (`td[rows]`) and choosing keys (`td.select(...)`) give. As in memory, its structure is its own:
an entry that is removed from it stays in the store, and its batch size may be another. What is written through it goes
to the store, and what is added to it, too.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable
from types import EllipsisType
from typing import Any, Self

import torch
from torch import Tensor

from tdstore.arguments import as_device
from tdstore.container.core.container import GROUP, LEAF, VALUE
from tdstore.container.core.dim_names import extend_names
from tdstore.container.core.locks import LOCKED
from tdstore.container.core.tensorclasses import class_of, rewrap, unwrap
from tdstore.container.storage.describe import STACK_KIND
from tdstore.container.storage.entry_kinds import Entry
from tdstore.container.storage.handle import StoreHandle
from tdstore.container.storage.open_and_save import stored
from tdstore.container.values.nontensor import NonTensorData
from tdstore.errors import KeyNotFoundError, UnsupportedError
from tdstore.header import Group
from tdstore.index.index_terms import as_terms, indexed_names, spelled_out
from tdstore.index.selection import Selection, index_shape
from tdstore.tensordicts.base import TensorDictBase
from tdstore.tensordicts.persistent.row_expansion import dense
from tdstore.types import DeviceLike, Names, Path


class View:
    """The structure of a view."""

    __slots__ = ("hidden", "keys", "more", "nested", "single")

    def __init__(
        self,
        keys: Iterable[str] | None = None,
        nested: dict[str, Any] | None = None,
        more: tuple[int, ...] = (),
        hidden: int = 0,
        single: Iterable[str] = (),
    ) -> None:
        self.keys: dict[str, None] | None = None if keys is None else dict.fromkeys(keys)
        """The entries, in their order; None: those of the store."""
        self.nested: dict[str, Any] = nested or {}
        """The nested TensorDicts that were asked for: they have a structure of their own, too."""
        self.more = more
        """Dimensions of the leaves that are batch dimensions here and not in the store, where all rows are seen."""
        self.hidden = hidden
        """How many of the last dimensions that are selected from are no batch dimensions here."""
        self.single = set(single)
        """Values that were given once for all rows of this view: in the store each row has its own."""

    @property
    def is_own(self) -> bool:
        """Whether it shows other entries or batch dimensions than the store has, or its nested TensorDicts may."""
        return self.keys is not None or bool(self.nested or self.more or self.hidden)

    def duplicate(self, nested: Callable[[Any], Any]) -> View:
        """Copy, with copies of the nested TensorDicts."""
        return View(self.keys, {k: nested(td) for k, td in self.nested.items()}, self.more, self.hidden, self.single)

    def parts(self) -> tuple[Any, ...]:
        """List the arguments of `View` for pickles, in types that any pickle may have."""
        keys = None if self.keys is None else list(self.keys)
        return keys, self.nested, tuple(self.more), self.hidden, sorted(self.single)


class WindowTree(TensorDictBase):
    """Which entries and rows of a group of a store are shown, and under which batch size."""

    __slots__ = ("_encoded_column", "_handle", "_path", "_view", "_window")

    _handle: StoreHandle
    _path: Path
    _window: Selection | None
    """Which rows; None for all, however many there are by now."""
    _view: View | None
    """None: this is the TensorDict of the store itself, which a change of structure changes."""
    _encoded_column: tuple[Path, dict[str, Tensor]] | None
    """Values as leaves, made for a copy."""

    def _setup(
        self,
        handle: StoreHandle,
        path: Path,
        sel: Selection | None,
        view: View | None,
        device: Any,
        names: Names | EllipsisType = ...,
    ) -> None:
        group = handle.groups[path]
        self._handle, self._path, self._view = handle, path, view
        self._window = sel
        if sel is not None and sel.shape == sel.src_shape:
            self._choose(sel)
        self._names = group.names if isinstance(names, EllipsisType) else names
        if device is not None:
            self._device = as_device(device)
        else:
            self._device = None if group.device is None else _usable_device(group.device)
        self._parents = self._undo = self._encoded_column = None
        self._state = 0

    @classmethod
    def _over(
        cls,
        handle: StoreHandle,
        path: Path = (),
        sel: Selection | None = None,
        view: View | None = None,
        device: DeviceLike | None = None,
        names: Names | EllipsisType = ...,
    ) -> Self:
        """Create a container over a group. `names` are those of this view, by default the store's."""
        td = cls.__new__(cls)
        td._setup(handle, path, sel, view, device, names)
        return td

    def _choose(self, sel: Selection | None) -> None:
        self._window = sel
        if sel is not None and sel.is_full:
            self._window = None
            if self._view is not None:
                self._view.more = tuple(sel.src_shape[len(self._group().batch_size or ()) :])

    # -- rows --------------------------------------------------------------------------------
    @property
    def _sel(self) -> Selection:
        """What is selected of the leading dimensions that all leaves here share."""
        if self._window is not None:
            return self._window
        batch = (self._handle.groups.get(self._path) or self._group()).batch_size or ()
        return _whole_of(batch if self._view is None else (*batch, *self._view.more))

    @property
    def _batch_size(self) -> torch.Size:  # type: ignore[override]
        view = self._view
        if view is None:
            return torch.Size(self._group().batch_size or ())
        shape = (self._window or self._sel).shape
        return torch.Size(shape[: len(shape) - view.hidden]) if view.hidden else shape

    def _source(self) -> torch.Size:
        """Return the current sizes of the dimensions that `_sel` selects from: the store may have grown."""
        batch, src = self._group().batch_size or (), self._sel.src_shape
        return torch.Size((*batch[: len(src)], *src[len(batch) :]))

    def _sel_on_tensor(self, t: Tensor) -> Tensor:
        self._sel.check_there(t.shape)
        plan = self._sel.read_plan()
        return plan.finish(t[plan.index])

    def _group(self) -> Group:
        try:
            return self._handle.groups[self._path]
        except KeyError:
            raise KeyNotFoundError(f"the group {self._path!r} of {self._handle.store.url} was removed") from None

    def _at(self, index: Any) -> Self:
        view, sel = self._view, self._window or self._sel
        ndim = len(sel.shape) - (0 if view is None else view.hidden)
        if isinstance(index, tuple):
            index = spelled_out(index, ndim)
        if view is not None and view.hidden:
            index_shape(self._batch_size, index)  # raises for more terms than there are batch dimensions
        names = None if self._names is None else indexed_names(self._names, index, ndim)
        if view is None:
            own = View()
        else:
            own = View(view.keys, None, (), view.hidden, view.single)
            if view.nested:
                terms = spelled_out(as_terms(index), ndim)
                own.nested = {k: self._as_wide(td)._at(terms) for k, td in view.nested.items()}
        window = self._over(self._handle, self._path, sel[index], own, self._device, names)
        if self._state & LOCKED:
            window._lock(None)
        return window

    def _as_wide(self, nested: Any) -> Any:
        """Return a nested TensorDict with at least the batch dimensions of this one, as it can be indexed."""
        if nested.batch_dims < len(self._batch_size):
            nested = nested.clone(recurse=False)
            unwrap(nested)._set_batch_size(self._batch_size)
        return nested

    # -- entries -----------------------------------------------------------------------------
    def _first_keys(self) -> Iterable[str]:
        keys = (self._handle.groups.get(self._path) or self._group()).keys
        if self._view is None or self._view.keys is None:
            return keys
        there = set(keys)
        return [k for k in self._view.keys if k in there]

    def _entry(self, key: str) -> Entry | None:
        """Return the entry of the store that a first-level key shows here, or None."""
        view = self._view
        if view is not None and view.keys is not None and key not in view.keys:
            return None
        return self._handle.entries[(*self._path, key)]

    def _kind(self, key: str) -> str | None:
        entry = self._entry(key)
        return None if entry is None else entry.kind

    def _groups(self) -> list[Any]:
        # Those of the store itself are made when asked for, and inherit the lock then.
        return [] if self._view is None else list(self._view.nested.values())

    def _child(self, key: str) -> Any:
        path = (*self._path, key)
        if path not in self._handle.groups and self._kind(key) in (VALUE, LEAF):  # a nested tensor has leaves, too
            return self._raw(key)
        group = self._handle.groups[path]
        view = self._view
        if view is not None and (known := view.nested.get(key)) is not None and self._still(known, path, group):
            return known
        child = self._stack_child(key) if group.kind == STACK_KIND else self._group_child(path, group)
        if self._state & LOCKED:
            unwrap(child)._lock(weakref.ref(self))
        if view is not None:
            view.nested[key] = child
        return child

    def _still(self, known: Any, path: Path, group: Group) -> bool:
        """Return whether a nested TensorDict is that of the current group. Another may have replaced it."""
        bare = unwrap(known)
        if not isinstance(bare, WindowTree) or bare._path != path:
            return group.kind == STACK_KIND  # a lazy stack, or an element of one
        batch = tuple(group.batch_size or ())
        return group.kind != STACK_KIND and tuple(bare._sel.src_shape)[1 : len(batch)] == batch[1:]

    def _group_child(self, path: Path, group: Group) -> Any:
        view, sel = self._view, self._window or self._sel
        n = len(sel.src_shape)
        further = (group.batch_size or ())[n:]
        names: Names | EllipsisType = ...
        if self._names is None and group.names is None:
            names = None
        elif view is not None or self._names != self._group().names:
            mine = extend_names(self._names or (), len(sel.shape)) or ()
            every = mine + (group.names[n:] if group.names else (None,) * len(further))
            names = every if any(every) else None
        all_rows = self._window is None and not (view is not None and view.more)
        rows = None if all_rows else sel.extend(further)
        return self._over(self._handle, path, rows, None if view is None else View(), self._device, names)

    def _stack_child(self, key: str) -> Any:
        """Build a lazy stack as this container sees it."""
        td = stored(self._handle, (*self._path, key), self._device)
        if self._window is not None:
            terms = self._window.by_dimension()
            if terms is None:
                raise UnsupportedError(
                    f"the lazy stack {key!r} cannot be seen through a window with new or zipped dimensions",
                    hint=f"index td[{key!r}] instead",
                )
            for dim in reversed(range(len(terms))):
                td = td._at((*(slice(None),) * dim, terms[dim]))
        return td if self._view is None else _as_view(td)

    # -- structure ---------------------------------------------------------------------------
    def _selected(self, wanted: dict[str, Any]) -> Self:
        view = self._view
        own = View(wanted) if view is None else View(wanted, None, view.more, view.hidden, view.single)
        for key, sub in wanted.items():
            if sub is not None:
                own.nested[key] = self._child(key)._selected(sub)
            elif self._kind(key) == GROUP:
                own.nested[key] = self._child(key)  # the same one, as in memory
        return self._over(self._handle, self._path, self._window, own, self._device, self._names)

    def _duplicate(self, device: Any, nested: Callable[[Any], Any]) -> Self:
        """Create another container of the same entries and rows. `nested` makes those of nested TensorDicts."""
        view = None if self._view is None else self._view.duplicate(nested)
        return self._over(self._handle, self._path, self._window, view, device, self._names)

    def _forget(self, view: View, keys: Iterable[str]) -> None:
        """Show these entries no longer."""
        gone = set(keys)
        view.keys = {k: None for k in self._first_keys() if k not in gone}
        view.single -= gone
        for key in gone:
            view.nested.pop(key, None)

    def _take_batch(self, view: View, batch_size: torch.Size) -> None:
        """Show another number of leading dimensions as batch dimensions."""
        sel, n = self._sel, len(batch_size)
        if batch_size[: len(sel.shape)] != sel.shape[:n]:
            raise UnsupportedError(
                f"a view of {self._handle.store.url} that selects {list(sel.shape)} cannot have the batch size "
                f"{list(batch_size)}",
                url=self._handle.store.url,
                hint="to_tensordict() reads it into memory",
            )
        keys = list(self._first_keys())
        nested = [self._child(k) for k in keys if self._kind(k) == GROUP]
        if n > len(sel.shape):
            view.keys = dict.fromkeys(keys)  # others need not have these dimensions
            self._choose(sel.extend(batch_size[len(sel.shape) :]))
        view.hidden = max(0, len(sel.shape) - n)
        names = extend_names(self._names and self._names[:n], n)
        self._names = names if names and any(names) else None
        for td in nested:
            if td.batch_size[:n] != batch_size:
                unwrap(td)._set_batch_size(batch_size)

    def _added(self, view: View, entries: Iterable[tuple[str, Any]]) -> None:
        """Show entries that were set, as they were given."""
        for key, entry in entries:
            view.nested.pop(key, None)
            view.single.discard(key)
            if view.keys is not None:
                view.keys[key] = None
            kind = self._kind(key)
            if kind == VALUE and self._window is not None and isinstance(entry, NonTensorData):
                view.single.add(key)
            elif kind == GROUP and isinstance(child := self._child(key), WindowTree):
                td: Any = dense(entry)
                own, keys = child._view or View(), list(td._first_keys())
                if set(keys) != set(child._first_keys()):
                    own.keys = dict.fromkeys(keys)  # the store has more, for the rows outside of the window
                child._added(own, [(k, td._raw(k)) for k in keys if td._kind(k) != LEAF])
                if child.batch_size != td.batch_size:
                    child._set_batch_size(td.batch_size)
                if td._names and child._names != td._names:
                    child._set_names(td._names)


_whole_of = functools.lru_cache(256)(Selection.full)


def _as_view(td: Any) -> Any:
    """Return a container over a store, or a stack of them, as a view of the same rows."""
    bare = unwrap(td)
    if isinstance(bare, WindowTree):
        return td._at(())
    return rewrap(class_of(td), bare._each(_as_view))


def _usable_device(device: str) -> torch.device:
    """Return the stored device, or the CPU where this machine lacks it or does not know it."""
    try:
        found = torch.device(device)
    except RuntimeError:
        return torch.device("cpu")
    if found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
        return torch.device("cpu")
    return found
