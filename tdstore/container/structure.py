"""Trees as a whole: choosing and renaming entries, copying, mapping, converting to plain Python."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Self

import torch
from torch import Tensor

from tdstore.container.access import NO_DEFAULT, AccessMixin
from tdstore.container.core import GROUP, Container
from tdstore.container.names import as_names
from tdstore.container.nontensor import NonTensor
from tdstore.errors import KeyNotFoundError
from tdstore.keys import unravel
from tdstore.shapes import as_size
from tdstore.types import NestedKey, Path


class StructureMixin(AccessMixin):
    """select, exclude, flatten_keys, clone, apply, to_dict, ..."""

    __slots__ = ()

    # -- choosing ----------------------------------------------------------------------------
    def select(self, *keys: NestedKey, inplace: bool = False, strict: bool = True) -> Self:
        """A TensorDict with only these (nested) entries, sharing them.

        Raises:
            KeyNotFoundError: `strict` and one is not there.
        """
        if len(keys) == 1 and isinstance(keys[0], (list, set)):
            keys = tuple(keys[0])
        wanted: dict[str, Any] = {}
        for key in keys:
            path = unravel(key)
            node = self._node(path[:-1])
            if node is None or node._kind(path[-1]) is None:
                if strict:
                    raise self._missing(key)
                continue
            _want(wanted, path)
        return self._keep(wanted, inplace, "select")

    def exclude(self, *keys: NestedKey, inplace: bool = False) -> Self:
        """A TensorDict without these (nested) entries; keys that are not there are ignored."""
        if len(keys) == 1 and isinstance(keys[0], (list, set)):
            keys = tuple(keys[0])
        return self._keep(self._all_but([unravel(k) for k in keys]), inplace, "exclude")

    def _all_but(self, gone: list[Path]) -> dict[str, Any]:
        kept: dict[str, Any] = {}
        for key in self._first_keys():
            below = [path[1:] for path in gone if path[0] == key]
            if not below:
                kept[key] = None
            elif () not in below:
                kept[key] = self._raw(key)._all_but(below) if self._kind(key) == GROUP else None
        return kept

    def _keep(self, wanted: dict[str, Any], inplace: bool, what: str) -> Self:
        """Keep the entries of a tree of keys (None: the whole entry)."""
        if inplace:
            if self.is_locked:
                raise self._refuse_locked(what)
            self._drop([k for k in self._first_keys() if k not in wanted])
            for key, sub in wanted.items():
                if sub is not None:
                    self._raw(key)._keep(sub, True, what)
            return self
        return self._kept(wanted)  # type: ignore[no-any-return]

    def _kept(self, wanted: dict[str, Any]) -> Any:
        td = self._resident()
        data = {k: td._data[k] if sub is None else td._data[k]._kept(sub) for k, sub in wanted.items()}
        return td._new(data, td._batch_size, td._device, td._names)

    def split_keys(
        self,
        *key_sets: Iterable[NestedKey],
        inplace: bool = False,
        default: Any = NO_DEFAULT,
        strict: bool = True,
        reproduce_struct: bool = False,
    ) -> tuple[Self, ...]:
        """One TensorDict per set of keys, and a last one with all the others."""
        parts = []
        taken: list[NestedKey] = []
        for key_set in key_sets:
            keys = [key_set] if isinstance(key_set, str) else list(key_set)
            present = [k for k in keys if k in self]
            missing = [k for k in keys if k not in self]
            if missing and default is NO_DEFAULT and strict:
                raise self._missing(missing[0])
            part = self.select(*present)
            if default is not NO_DEFAULT:
                for key in missing:
                    part.set(key, default)
            parts.append(part)
            taken += present
        rest = self.exclude(*taken, inplace=inplace)
        if not reproduce_struct:
            rest.filter_empty_()
        return (*parts, rest)

    def filter_empty_(self) -> Self:
        """Remove nested TensorDicts without any leaf, in place."""
        for key in [k for k in self._first_keys() if self._kind(k) == GROUP]:
            self._raw(key).filter_empty_()
            if not list(self._raw(key)._first_keys()):
                self._drop([key])
        return self

    # -- key structure -----------------------------------------------------------------------
    def flatten_keys(
        self, separator: str = ".", inplace: bool = False, is_leaf: Callable[[type], bool] | None = None
    ) -> Self:
        """Join nested keys with a separator: `("a", "b")` becomes `"a.b"`.

        Raises:
            KeyError: two keys would become one.
        """
        td = self._resident()
        flat: dict[str, Any] = {}
        for path, value in td._flat_entries((), is_leaf):
            key = separator.join(path)
            if key in flat:
                raise KeyError(f"flattening with {separator!r} makes the key {key!r} twice")
            flat[key] = value
        return self._restructured(flat, inplace, lambda v: v.unflatten_keys(separator))

    def _flat_entries(self, prefix: Path, is_leaf: Callable[[type], bool] | None) -> list[tuple[Path, Any]]:
        out: list[tuple[Path, Any]] = []
        for key in self._first_keys():
            value = self._raw(key)
            path = (*prefix, key)
            if isinstance(value, Container) and not (is_leaf is not None and is_leaf(type(value))):
                nested: Any = value
                out += nested._flat_entries(path, is_leaf)
            else:
                out.append((path, value))
        return out

    def unflatten_keys(self, separator: str = ".", inplace: bool = False) -> Self:
        """Split keys at a separator into nested TensorDicts: the inverse of `flatten_keys`.

        Raises:
            KeyError: a key is both an entry and the start of another.
        """
        td = self._resident()
        tree: dict[str, Any] = {}
        for key in td._first_keys():
            value = td._raw(key)
            parts = key.split(separator)
            node = tree
            for part in parts[:-1]:
                node = node.setdefault(part, {})
                if not isinstance(node, dict):
                    raise KeyError(f"unflattening {key!r} at {separator!r}: {part!r} is already an entry")
            if parts[-1] in node:
                raise KeyError(f"unflattening {key!r} at {separator!r}: {parts[-1]!r} is already there")
            node[parts[-1]] = value

        def build(node: Mapping[str, Any]) -> dict[str, Any]:
            return {
                k: td._new(build(v), td._batch_size, td._device, td._names) if isinstance(v, dict) else v
                for k, v in node.items()
            }

        return self._restructured(build(tree), inplace, lambda v: v.flatten_keys(separator))

    def _restructured(self, data: dict[str, Any], inplace: bool, undo: Callable[[Any], Any]) -> Self:
        if inplace:
            if self.is_locked:
                raise self._refuse_locked("change the key structure")
            self._drop(list(self._first_keys()))
            self._assign(data)
            return self
        td = self._resident()
        out = td._new(data, td._batch_size, td._device, td._names)
        out._undo = (weakref.ref(self), undo)
        if self.is_locked:
            out.lock_()
        return out  # type: ignore[no-any-return]

    def create_nested(self, key: NestedKey) -> Self:
        """Put an empty nested TensorDict at a key, replacing what is there."""
        return self.set(key, self._resident_class._new({}, self._batch_size, self._device, self._names))

    # -- copying -----------------------------------------------------------------------------
    def empty(
        self, recurse: bool = False, *, batch_size: Any = None, device: Any = NO_DEFAULT, names: Any = None
    ) -> Any:
        """A TensorDict of the same batch size without entries; with `recurse`, with the same empty groups."""
        batch = self._batch_size if batch_size is None else as_size(batch_size)
        if names is None and batch_size is None:
            names = self._names
        where = self._device if device is NO_DEFAULT else device
        td = self._resident_class({}, batch_size=batch, device=where, names=names)
        if recurse:
            for key in self._first_keys():
                if self._kind(key) == GROUP:
                    td._data[key] = self._raw(key).empty(recurse=True, device=where)
        return td

    def clone(self, recurse: bool = True) -> Any:
        """A copy: of the leaves too (`recurse=True`), or of the tree around the same leaves."""
        td = self._resident()
        data: dict[str, Any] = {}
        for key, value in td._data.items():
            if isinstance(value, Tensor):
                data[key] = value.clone() if recurse else value
            elif isinstance(value, Container):
                data[key] = value.clone(recurse)  # type: ignore[attr-defined]
            else:
                data[key] = value
        return td._new(data, td._batch_size, td._device, td._names)

    def _shallow(self) -> Any:
        return self.clone(recurse=False)

    def copy(self) -> Any:
        """A copy of the tree around the same leaves."""
        return self.clone(recurse=False)

    def __copy__(self) -> Any:
        return self.clone(recurse=False)

    def replace(self, *args: Any, **kwargs: Any) -> Any:
        """A shallow copy with some entries replaced."""
        if not kwargs and (not args or (len(args) == 1 and not args[0])):
            return self
        return self._shallow().update(*args, **kwargs)

    def contiguous(self) -> Any:
        """Leaves made contiguous; a stored TensorDict is read into memory."""
        return self._resident()._foreach(lambda leaves: [t.contiguous() for t in leaves])

    def is_contiguous(self) -> bool:
        """Whether every leaf is contiguous in memory."""
        return self._resident() is self and all(t.is_contiguous() for t in self._leaf_list())

    def to_tensordict(self, *, retain_none: bool | None = None) -> Any:
        """A plain in-memory TensorDict with copies of all entries."""
        td = self._resident()
        data: dict[str, Any] = {}
        for key, value in td._data.items():
            if isinstance(value, NonTensor):
                data[key] = value
            else:
                data[key] = value.clone() if isinstance(value, Tensor) else value.to_tensordict()
        return self._resident_class._new(data, td._batch_size, td._device, td._names)

    def to_dict(
        self, *, retain_none: bool = True, convert_tensors: bool = False, tolist_first: bool = False
    ) -> dict[str, Any]:
        """Nested plain dicts.

        Args:
            retain_none: keep entries whose value is None.
            convert_tensors: tensors become lists of numbers.
        """
        out: dict[str, Any] = {}
        td = self._resident()
        for key, value in td._data.items():
            if isinstance(value, NonTensor):
                plain = value.plain()
                if plain is not None or retain_none:
                    out[key] = plain
            elif isinstance(value, Tensor):
                out[key] = value.tolist() if convert_tensors else value
            else:
                out[key] = value.to_dict(retain_none=retain_none, convert_tensors=convert_tensors)
        return out

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
        out: Any = None,
        **constructor_kwargs: Any,
    ) -> Any:
        """Map `fn(leaf, *leaves of others)` over tensor leaves into a new TensorDict.

        A result of None drops the entry; `apply` returns None when every entry was dropped and
        `filter_empty` is not False.

        Args:
            batch_size: of the result, when `fn` changes leading dimensions.
            default: stands for an entry that one of `others` lacks; without it that is a `KeyError`.
            filter_empty: leave out nested TensorDicts that end up empty.
            call_on_nested: call `fn` on nested TensorDicts too, instead of going into them.
            inplace: write the results into this TensorDict.
            out: write the results into this one.
        """
        return self._apply(
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
            out=out,
        )

    def named_apply(self, fn: Callable[..., Any], *others: Any, nested_keys: bool = False, **kwargs: Any) -> Any:
        """As `apply`, with the key as first argument: the last part, or the whole path with `nested_keys`."""

        def call(path: Path, *leaves: Any) -> Any:
            key = path if nested_keys and len(path) > 1 else path[-1]
            return fn(key, *leaves)

        return self._apply(call, others, True, **kwargs)

    def apply_(self, fn: Callable[..., Any], *others: Any, **kwargs: Any) -> Self:
        """Map `fn` over the leaves and write the results back in place."""
        self.apply(fn, *others, inplace=True, **kwargs)
        return self

    def _apply(
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
        out: Any = None,
        **constructor_kwargs: Any,
    ) -> Any:
        target = self if inplace else out
        td = self._resident()
        batch = td._batch_size if batch_size is None else as_size(batch_size)
        plan = _Map(fn, named, len(td._batch_size), default, filter_empty, call_on_nested)
        made = plan.run(td, [o._resident() for o in others], (), batch)
        if target is not None:
            if made is not None:
                target.update(made, inplace=True)
            return target
        if made is None:
            return None
        if device is not NO_DEFAULT and device is not None:
            made = made.to(device)
        if names is not NO_DEFAULT:
            made._set_names(as_names(names, len(batch)))
        if propagate_lock and self.is_locked:
            made.lock_()
        return made

    def __deepcopy__(self, memo: Any) -> Any:
        copy = self.clone()
        memo[id(self)] = copy
        return copy


class _Map:
    """One walk of `apply`: a function over the leaves of a tree and of others beside it."""

    __slots__ = ("call_on_nested", "default", "filter_empty", "fn", "n", "named")

    def __init__(
        self,
        fn: Callable[..., Any],
        named: bool,
        n: int,
        default: Any,
        filter_empty: bool | None,
        call_on_nested: bool,
    ) -> None:
        self.fn, self.named, self.n, self.default = fn, named, n, default
        self.filter_empty, self.call_on_nested = filter_empty, call_on_nested

    def run(self, td: Any, others: list[Any], path: Path, batch: torch.Size) -> Any:
        fn, named = self.fn, self.named
        data: dict[str, Any] = {}
        dropped = False
        names = td._names if batch == td._batch_size else None
        built = td._resident_class._new(data, batch, td._device, names)
        for key, value in td._data.items():
            if isinstance(value, NonTensor):
                data[key] = built._coerce(key, value)
                continue
            rest = [_other_entry(o, (*path, key), self.default) for o in others] if others else ()
            if isinstance(value, Tensor) or self.call_on_nested:
                made = fn((*path, key), value, *rest) if named else fn(value, *rest)
            else:
                nested: Any = value._resident()
                wide = batch
                if len(nested._batch_size) != self.n:
                    wide = torch.Size((*batch, *nested._batch_size[self.n :]))
                below = [_or_empty(r, self.default, nested)._resident() for r in rest]
                made = self.run(nested, below, (*path, key) if named or others else (), wide)
            if made is None:
                dropped = True
            elif type(made) is Tensor and td._device is None and made.shape[: len(batch)] == batch:
                data[key] = made
            else:
                data[key] = built._coerce(key, made)
        if not data and (self.filter_empty or (self.filter_empty is None and dropped)):
            return None
        return built


def _or_empty(entry: Any, default: Any, like: Any) -> Any:
    return entry if entry is not default else like._resident_class._new({}, like._batch_size, None, None)


def _other_entry(other: Any, path: Path, default: Any) -> Any:
    value = other._data.get(path[-1])
    if value is None:
        if default is NO_DEFAULT:
            raise KeyNotFoundError(f"apply: another TensorDict has no entry {path!r}")
        return default
    return value


def _want(tree: dict[str, Any], path: Path) -> None:
    for part in path[:-1]:
        nxt = tree.setdefault(part, {})
        if nxt is None:
            return  # the whole group is wanted already
        tree = nxt
    tree[path[-1]] = None
