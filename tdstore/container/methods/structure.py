"""Trees as a whole: choosing and renaming entries, copying, mapping, converting to plain Python."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal, Self

import torch
from torch import Tensor

from tdstore.container.core.container import GROUP, VALUE, Container
from tdstore.container.core.dim_names import as_names
from tdstore.container.core.paths import entry_path
from tdstore.container.entries.unbatched import is_batched
from tdstore.container.functions.broadcast import uneven, widened
from tdstore.container.methods.access import NO_DEFAULT
from tdstore.container.methods.apply import Mapper, writes_in_place
from tdstore.container.values.nontensor import NonTensor
from tdstore.errors import InvalidArgumentError, KeyExistsError, OptionError
from tdstore.index.shapes import as_size
from tdstore.types import NestedKey, Path, path_text

if TYPE_CHECKING:
    from tdstore.tensordicts.resident.tensordict import TensorDict


class StructureMixin(Container):
    """select, exclude, flatten_keys, clone, apply, to_dict, ..."""

    __slots__ = ()

    # -- choosing ----------------------------------------------------------------------------
    def select(self, *keys: NestedKey, inplace: bool = False, strict: bool = True, as_tensordict: bool = False) -> Self:
        """Return a TensorDict with only these (nested) entries, in this order. It shares them.

        Args:
            keys: keys, or one list of them. Of a key and one below it, only the one below is selected.
            inplace: remove the other entries from this TensorDict, and return it.
            strict: refuse keys that do not exist. Else they are ignored.
            as_tensordict: return a plain TensorDict for a tensorclass.

        Raises:
            KeyNotFoundError: `strict`, and a key does not exist.
            LockedError: `inplace`, and this TensorDict is locked.

        Example:
            >>> td = TensorDict({"a": torch.zeros(3), "n": {"b": torch.zeros(3), "c": torch.zeros(3)}}, [3])
            >>> list(td.select(("n", "b")).keys(True, True))
            [('n', 'b')]
        """
        if len(keys) == 1 and isinstance(keys[0], (list, set)):
            keys = tuple(keys[0])
        wanted: dict[str, Any] = {}
        for key in keys:
            if type(key) is str and self._kind(key) is not None:
                wanted.setdefault(key, None)
                continue
            if strict:
                self._existing(key)
            self._want(wanted, entry_path(key))
        return self._keep(wanted, inplace, "select")

    def _want(self, tree: dict[str, Any], path: Path) -> None:
        """Add a path to a tree of keys (None: the whole entry), as far as there are entries."""
        first, below = path[0], path[1:]
        kind = self._kind(first)
        if kind is None or (below and kind != GROUP):
            return
        if not below:
            tree.setdefault(first, None)
            return
        if tree.get(first) is None:
            tree[first] = {}
        self._raw(first)._want(tree[first], below)

    def exclude(self, *keys: NestedKey, inplace: bool = False) -> Self:
        """Return a TensorDict without these (nested) entries. Keys that do not exist are ignored.

        Raises:
            InvalidKeyError: a key that is neither a string nor a tuple of strings.
            LockedError: `inplace`, and this TensorDict is locked.

        Example:
            >>> list(TensorDict({"a": torch.zeros(3), "b": torch.zeros(3)}, [3]).exclude("a").keys())
            ['b']
        """
        if len(keys) == 1 and isinstance(keys[0], (list, set)):
            keys = tuple(keys[0])
        return self._keep(self._all_but([entry_path(k) for k in keys]), inplace, "exclude")

    def _all_but(self, gone: list[Path]) -> dict[str, Any]:
        remaining: dict[str, Any] = {}
        for key in self._first_keys():
            below = [path[1:] for path in gone if path[0] == key]
            if not below:
                remaining[key] = None
            elif () not in below:
                remaining[key] = self._raw(key)._all_but(below) if self._kind(key) == GROUP else None
        return remaining

    def _keep(self, wanted: dict[str, Any], inplace: bool, what: str) -> Self:
        """Keep the entries of a tree of keys (None: the whole entry)."""
        if inplace:
            if self.is_locked:
                raise self._refuse_locked(what)
            self._drop([k for k in self._first_keys() if k not in wanted])
            if list(self._first_keys()) != list(wanted):
                self._reorder(list(wanted))
            for key, sub in wanted.items():
                if sub is not None:
                    self._raw(key)._keep(sub, True, what)
            return self
        return self._selected(wanted)

    def _selected(self, wanted: dict[str, Any]) -> Self:
        td = self._resident()
        data = {k: td._data[k] if sub is None else td._data[k]._selected(sub) for k, sub in wanted.items()}
        made: Self = td._new(data, td._batch_size, td._device, td._names)
        return made

    def split_keys(
        self,
        *key_sets: Iterable[NestedKey] | dict[NestedKey, NestedKey],
        inplace: bool = False,
        default: Any = NO_DEFAULT,
        strict: bool = True,
        reproduce_struct: bool = False,
    ) -> tuple[Self, ...]:
        """Split into one TensorDict per set of keys, and a last one with all other keys.

        Args:
            key_sets: iterables of (nested) keys, or dicts that give each of these keys its name in the result.
            inplace: take the keys out of this TensorDict, which is the last one of the result.
            default: stands for keys that are not there; None leaves them out.
            strict: without `default`, refuse keys that are not there.
            reproduce_struct: keep nested TensorDicts that are empty, in each of the results.

        Raises:
            KeyNotFoundError: a key is not there, or was taken already by itself or as part of another.
            OptionError: a dict gives two keys one name.

        Example:
            >>> td = TensorDict({"obs": torch.zeros(2), "action": torch.ones(2)}, [2])
            >>> renamed, rest = td.split_keys({"obs": "observation"})
            >>> sorted(renamed.keys()), sorted(rest.keys())
            (['observation'], ['action'])
        """
        parts = []
        used: list[Path] = []
        for key_set in key_sets:
            part = self._without_values() if reproduce_struct else self.empty()
            for path, name in _names_of(key_set).items():
                found = self._find(path)
                if found is not None and not any(path[: len(t)] == t for t in used):
                    entry: Any = found[0]._raw(found[1])
                    if isinstance(entry, Container):
                        node: Any = entry
                        entry = node._selected(node._all_but([t[len(path) :] for t in used if t[: len(path)] == path]))
                    part.set(name, entry)
                    used.append(path)
                elif default is NO_DEFAULT and strict:
                    raise self._missing(path[0] if len(path) == 1 else path)
                elif default is not NO_DEFAULT and default is not None:
                    part.set(name, default)
            parts.append(part)
        rest = self.exclude(*used, inplace=inplace)
        if self.is_locked and not inplace:
            rest = rest.clone(recurse=False)  # the nested ones can be changed, too
        if not reproduce_struct:
            rest.filter_empty_()
        return (*parts, rest)

    def _without_values(self) -> Any:
        """Return the nested TensorDicts alone, empty."""
        td: Any = self.empty()
        for key in self._first_keys():
            if self._kind(key) == GROUP:
                td._data[key] = self._raw(key)._without_values()
        return td

    def _aligned(self, other: Any, default: Any) -> tuple[Any, Any]:
        """Give both the keys that both have (`default="intersection"`), or the keys that either has."""
        mine, theirs = self._resident(), other._resident()
        if uneven(mine, (theirs,)) and (wide := widened(mine, (theirs,))) is not None:
            mine, (theirs,) = wide
        out: tuple[dict[str, Any], dict[str, Any]] = ({}, {})
        for key in dict.fromkeys([*mine._data, *theirs._data]):
            a, b = mine._data.get(key), theirs._data.get(key)
            if a is None or b is None:
                if isinstance(default, str):
                    if default != "intersection":
                        raise InvalidArgumentError(f"default is a number, a tensor or 'intersection', not {default!r}")
                    continue
                a, b = (_filled(b, default), b) if a is None else (a, _filled(a, default))
            elif isinstance(a, Container) and isinstance(b, Container):
                a, b = a._aligned(b, default)
            out[0][key], out[1][key] = a, b
        made = [
            td._new(data, td._batch_size, td._device, td._names) for td, data in zip((mine, theirs), out, strict=True)
        ]
        if self.is_locked:
            made[0].lock_()
        return made[0], made[1]

    def filter_non_tensor_data(self) -> Self:
        """Return a TensorDict without the entries that are not tensors. It shares the tensors."""
        return self._selected(self._tensors_only())

    def _tensors_only(self) -> dict[str, Any]:
        kinds = {key: self._kind(key) for key in self._first_keys()}
        return {
            k: self._raw(k)._tensors_only() if kind == GROUP else None
            for k, kind in kinds.items()
            if kind != VALUE or self._is_unbatched(k)
        }

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
                raise KeyExistsError(f"flattening with {separator!r} makes the key {key!r} twice")
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
        split: list[tuple[list[str], Any]] = []
        for key, value in td._data.items():
            parts = key.split(separator)
            if len(parts) > 1:
                split.append((parts, value))
            else:
                tree[key] = value
        mine: set[int] = set()  # the nested TensorDicts made here; those of others are copied before they change
        for parts, value in split:
            node = tree
            for part in parts[:-1]:
                inner: Any = node.get(part)
                if inner is None or id(inner) not in mine:
                    if inner is None:
                        inner = td._new({}, td._batch_size, td._device, td._names)
                    elif isinstance(inner, Container):
                        inner = inner._resident()._shallow()
                    else:
                        raise KeyExistsError(f"unflattening {separator.join(parts)!r}: {part!r} is already an entry")
                    mine.add(id(inner))
                    node[part] = inner
                node = inner._data
            if parts[-1] in node:
                raise KeyExistsError(f"unflattening {separator.join(parts)!r}: {parts[-1]!r} is already there")
            node[parts[-1]] = value
        return self._restructured(tree, inplace, lambda v: v.flatten_keys(separator))

    def _restructured(self, data: dict[str, Any], inplace: bool, undo: Callable[[Any], Any]) -> Self:
        if inplace:
            if self.is_locked:
                raise self._refuse_locked("change the key structure")
            self._whole("change the key structure")
            self._drop(list(self._first_keys()))
            self._assign(data)
            return self
        td = self._resident()
        out = td._new(data, td._batch_size, td._device, td._names)
        out._undo = (weakref.ref(self), undo)
        return out  # type: ignore[no-any-return]

    def create_nested(self, key: NestedKey) -> Self:
        """Put an empty nested TensorDict at a key, replacing what is there."""
        return self.set(key, self._resident_class._new({}, self._batch_size, self._device, self._names))

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


def _names_of(key_set: Any) -> dict[Path, Path]:
    """Map each key of one of the sets of `split_keys` to its path in the result."""
    if not isinstance(key_set, dict):
        return {path: path for path in map(entry_path, [key_set] if isinstance(key_set, str) else key_set)}
    names = {entry_path(key): entry_path(name) for key, name in key_set.items()}
    for name in set(names.values()):
        if len(keys := [path_text(key) for key, other in names.items() if other == name]) > 1:
            raise OptionError(f"split_keys: {' and '.join(keys)} cannot both be {path_text(name)}")
    return names


def _filled(entry: Any, value: Any) -> Any:
    """Build the tree of `entry` with `value` in every leaf."""
    if isinstance(entry, NonTensor):
        return entry.own_copy()
    if isinstance(entry, Container):
        td = entry._resident()
        return td._new({k: _filled(v, value) for k, v in td._data.items()}, td._batch_size, td._device, td._names)
    return torch.as_tensor(value, dtype=entry.dtype, device=entry.device).expand(entry.shape)


def _compact(t: Tensor) -> Tensor:
    return t.clone(memory_format=torch.contiguous_format)


def _has_unusual_strides(t: Tensor) -> bool:
    """Return whether a contiguous tensor has other strides than torch gives, in dimensions of size 1 above all."""
    return t.stride() != torch.empty(t.shape, device="meta").stride()
