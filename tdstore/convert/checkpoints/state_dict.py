"""state_dict and load_state_dict.

A state dict is an ordered dict of tensors under dotted keys. Its attribute `_metadata` has, for each nested
TensorDict and each value that is not a tensor, the facts that the keys do not hold. A state dict to load may also be
nested, or have the form of older versions, where `__batch_size` and `__device` are entries.
"""

from __future__ import annotations

import functools
import sys
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self

import msgspec
import torch
from torch import Tensor

from tdstore.arguments import refuse_type
from tdstore.container.core.container import GROUP, LEAF, VALUE, Container
from tdstore.container.core.locks import BOUND, MAPPED, READONLY, SHARED
from tdstore.container.core.tensorclasses import class_of, takes, unwrap
from tdstore.container.entries.nested_tensors import leaf_shape
from tdstore.container.entries.unbatched import UnbatchedTensor
from tdstore.container.functions.uneven_stacks import even
from tdstore.container.storage.change_plan import Changes
from tdstore.container.values.nontensor import NonTensor, NonTensorData, NonTensorStack
from tdstore.convert.checkpoints.state_dict_forms import Tree, read, write_flat, write_legacy, write_nested
from tdstore.errors import BatchSizeError, StateDictError
from tdstore.index.tracing import traced
from tdstore.types import Path


class StateDictMixin(Container):
    """state_dict, load_state_dict."""

    __slots__ = ()

    def state_dict(
        self,
        destination: Any = None,
        prefix: str = "",
        keep_vars: bool = False,
        flatten: bool = True,
        *,
        legacy: bool = False,
    ) -> dict[str, Any]:
        """Return the tensors as an `OrderedDict`, as `torch.nn.Module.state_dict` does: detached, with the same memory.

        Those of `share_memory_()` are copies, so that `torch.save` writes them and nothing else.
        Its attribute `_metadata` holds batch sizes, devices, names and values that are not tensors. A lazy stack
        is stored stacked or, where its elements differ, by element. The loaders of torchdata, which ask a
        data set for its position, get an empty state.

        Args:
            destination: an ordered dict to add to.
            prefix: put before each key.
            keep_vars: whether not to detach the tensors.
            flatten: True joins keys by dots; False nests ordered dicts.
            legacy: whether to use the form of older versions, where `__batch_size`, `__device` and values are entries.

        Raises:
            StateDictError: two entries would have one key.

        Example:
            >>> dict(TensorDict({"u": torch.zeros(2), "v": {"w": torch.ones(2)}}).state_dict())
            {'u': tensor([0., 0.]), 'v.w': tensor([1., 1.])}
        """
        if _asked_by_a_loader():
            return {}
        if not isinstance(prefix, str):
            raise refuse_type("prefix", "a string", prefix)
        out: dict[str, Any] = OrderedDict() if destination is None else destination
        if destination is None and flatten and not legacy and _write_plain(self, out, prefix, keep_vars):
            return out
        if not hasattr(out, "_metadata") and isinstance(out, OrderedDict):
            out._metadata = OrderedDict()  # type: ignore[attr-defined]
        tree = _tree_of(self, keep_vars)
        if legacy:
            write_legacy(tree, out, prefix, flatten)
        elif flatten:
            write_flat(tree, out, prefix)
        else:
            write_nested(tree, out, prefix)
        return out

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False, from_flatten: bool | None = None
    ) -> Self:
        """Write the result of `state_dict()` into the entries, in place: on stored data, into the store.

        Args:
            state_dict: flat, nested, or of the older form; also that of a module with the same names.
            strict: whether keys on one side only are an error, except nested TensorDicts without entries. False does
                not change entries that the state dict lacks, and adds entries that only the state dict has; to
                parameters it adds none.
            assign: whether to use the tensors themselves instead of copying their values.
            from_flatten: whether to split keys at dots. Default: derived from the state dict and the entries.

        Returns:
            This TensorDict.

        Raises:
            StateDictError: the keys do not match. After an error nothing is changed.
            BatchSizeError: an entry has another shape.

        Example:
            >>> td = TensorDict({"a": torch.zeros(2)}, [2])
            >>> td.load_state_dict(TensorDict({"a": torch.ones(2)}, [2]).state_dict())["a"]
            tensor([1., 1.])
        """
        if _asked_by_a_loader():
            return self
        if not assign and from_flatten is not False and _load_plain(self, state_dict):
            return self
        tree = read(state_dict, self, from_flatten)
        job = _Loading(strict, assign, grows=not isinstance(self, torch.nn.Module))
        job.plan(self, tree, ())
        job.run()
        return self


def _asked_by_a_loader() -> bool:
    """Check whether torchdata asks for the state of a data set, to resume from later.

    A container has no such state: the position is that of the sampler. With its entries as the state, each checkpoint
    would contain all rows, and loading one would overwrite newer rows.
    """
    if "torchdata" not in sys.modules:
        return False
    frame = sys._getframe(2)
    while frame is not None and str(frame.f_globals.get("__name__")).startswith("tdstore."):
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None and str(frame.f_globals.get("__name__")).partition(".")[0] == "torchdata"


# -- out ---------------------------------------------------------------------------------------
def _write_plain(td: Any, out: Any, prefix: str, keep_vars: bool) -> bool:
    """Write a TensorDict of plain tensors to an empty flat state dict; False, and nothing written, for another."""
    notes: dict[str, Any] = OrderedDict()
    if not _collect_plain(td, out, notes, prefix, keep_vars):
        out.clear()
        return False
    out._metadata = notes
    return True


def _collect_plain(td: Any, out: Any, notes: dict[str, Any], prefix: str, keep_vars: bool) -> bool:
    if (
        type(td) is not Container._resident_class
        or class_of(td) is not None
        or td._state & SHARED
        or td._names is not None
    ):
        return False
    notes[prefix[:-1]] = {"batch_size": td._batch_size, "device": td._device}
    for key, value in td._data.items():
        name = prefix + key
        if type(value) is Tensor:
            if name in out:
                return False
            out[name] = value if keep_vars else value.detach()
        elif not _collect_plain(value, out, notes, f"{name}.", keep_vars):
            return False
    return True


def _tree_of(td: Any, keep_vars: bool) -> Tree:
    tensorclass, td = class_of(td), unwrap(td)
    if isinstance(td, td._stack_class) and not even(td):
        elements = {str(i): _tree_of(e, keep_vars) for i, e in enumerate(td.tensordicts)}
        return Tree(td.batch_size, td.device, td._names, td.stack_dim, elements)
    td = td._resident()
    tree = Tree(td.batch_size, td.device, td._names)
    shared = bool(td._state & SHARED) and not keep_vars
    for key in td._first_keys():
        value = td._raw(key)
        if isinstance(value, Tensor):
            leaf = value if keep_vars else value.detach()
            # Leaves in one shared file are one storage to torch.save, which refuses it with several dtypes.
            one_file = shared and leaf.untyped_storage().nbytes() != leaf.nbytes
            tree.entries[key] = leaf.clone() if one_file else leaf
        else:
            tree.entries[key] = _tree_of(value, keep_vars) if isinstance(value, Container) else value
    if tensorclass is not None:
        tree.typed = (tensorclass.__name__, tuple(sorted(tensorclass._field_names - tree.entries.keys())))
    return tree


# -- in ----------------------------------------------------------------------------------------
def _load_plain(td: Any, state: Mapping[str, Any]) -> bool:
    """Load a flat state dict of a TensorDict of the same plain tensors; False, and nothing written, for another."""
    notes = getattr(state, "_metadata", None)
    mine: list[Tensor] = []
    theirs: list[Tensor] = []
    if not notes or traced() or not _match_plain(td, state, notes, "", mine, theirs):
        return False
    if not mine or len(mine) != len(state) or len(notes) != 1 + sum(1 for _ in _groups_below(td)):
        return False
    with torch.no_grad():
        torch._foreach_copy_(mine, theirs)
    return True


def _groups_below(td: Any) -> Iterator[Any]:
    for group in td._groups():
        yield group
        yield from _groups_below(group)


def _match_plain(
    td: Any, state: Mapping[str, Any], notes: Mapping[str, Any], prefix: str, mine: list[Tensor], theirs: list[Tensor]
) -> bool:
    """Pair the tensors of a TensorDict with those of its state dict, where copying them cannot fail."""
    if (
        type(td) is not Container._resident_class
        or class_of(td) is not None
        or td._state & (READONLY | MAPPED | SHARED | BOUND)
    ):
        return False
    if notes.get(prefix[:-1]) != {"batch_size": td._batch_size, "device": td._device} or td._names is not None:
        return False
    for key, leaf in td._data.items():
        if type(leaf) is not Tensor:
            if not _match_plain(leaf, state, notes, f"{prefix}{key}.", mine, theirs):
                return False
            continue
        other = state.get(prefix + key)
        if (
            type(other) is not Tensor
            or leaf.is_nested
            or other.is_nested
            or other.dtype is not leaf.dtype
            or other.shape != leaf.shape
            or leaf.requires_grad
            or not (leaf.is_cpu and leaf.is_contiguous() and other.is_cpu)
            or other.layout is not torch.strided
        ):
            return False
        mine.append(leaf)
        theirs.append(other)
    return True


class _Part(msgspec.Struct):
    """Changes of one container."""

    td: Any
    tree: Tree
    writes: dict[str, Any] = msgspec.field(default_factory=dict)
    fresh: dict[str, Any] = msgspec.field(default_factory=dict)
    empty: list[str] = msgspec.field(default_factory=list)
    """Fields of a tensorclass that hold a value, but are None in the state dict."""


class _Loading:
    """One `load_state_dict`: all entries are checked before the first is written."""

    def __init__(self, strict: bool, assign: bool, grows: bool) -> None:
        self._strict, self._assign, self._grows = strict, assign, grows
        self._missing: list[str] = []
        self._extra: list[str] = []
        self._parts: list[_Part] = []

    def plan(self, td: Container, tree: Tree, path: Path) -> None:
        """Plan the change of each entry."""
        if tree.stack_dim is not None or _is_of_elements(td, tree):
            self._elements(td, tree, path)
            return
        part = _Part(td, tree)
        for key, value in tree.entries.items():
            kind, name = td._kind(key), ".".join((*path, key))
            if kind == VALUE and isinstance(value, Tensor) and isinstance(td._raw(key), UnbatchedTensor):
                value = UnbatchedTensor(value, td.batch_size)
            elif kind is None or (kind == VALUE and isinstance(td._raw(key), NonTensorStack)):
                value = _of_rows(value, td.batch_size if tree.batch is None else tree.batch)
            if kind is None:
                if isinstance(value, Tree) and self._strict and _is_empty(value):
                    continue
                if not (isinstance(value, NonTensor) and _is_field(td, key)):
                    self._extra.append(name)
                if self._grows and takes(td, key):
                    part.fresh[key] = _entry(td, value)
            elif kind != _kind_of(value):
                raise StateDictError(
                    f"{name!r} is a {kind} in the TensorDict, and a {_kind_of(value)} in the state dict"
                )
            elif kind == GROUP:
                self.plan(td._raw(key), value, (*path, key))
            elif self._assign:
                part.fresh[key] = value
            else:
                part.writes[key] = value
                if kind == LEAF and (shape := leaf_shape(value)) != td._leaf_shape(key):
                    raise BatchSizeError(
                        f"{name!r} has shape {list(td._leaf_shape(key))}, and {list(shape)} in the state dict",
                        hint="assign=True accepts tensors of any shape",
                    )
        for key in td._first_keys():
            if key not in tree.entries:
                if td._kind(key) == VALUE and tree.typed is not None and key in tree.typed[1] and _is_field(td, key):
                    part.empty.append(key)
                elif td._kind(key) == GROUP and td._raw(key).is_empty():
                    continue
                elif td._kind(key) != VALUE or tree.declared:
                    self._missing.append(".".join((*path, key)))
                self._check_unlisted(td, key, tree, path)
        if tree.typed is not None and class_of(unwrap(td)) is not None:
            self._extra += [".".join((*path, name)) for name in tree.typed[1] if not takes(td, name)]
        self._parts.append(part)

    def _elements(self, td: Any, tree: Tree, path: Path) -> None:
        numbers = [str(i) for i in range(len(tree.entries))]
        if not isinstance(td, td._stack_class) or len(td.tensordicts) != len(numbers):
            raise StateDictError(
                f"{'.'.join(path) or 'the state dict'} holds the {len(numbers)} elements of a lazy stack",
                hint="load it into a lazy stack of as many",
            )
        for number, element in zip(numbers, td.tensordicts, strict=True):
            self.plan(element, tree.entries[number], (*path, number))

    def _check_unlisted(self, td: Any, key: str, tree: Tree, path: Path) -> None:
        """Check that an entry that the state dict lacks fits its batch size."""
        if tree.batch is None or td._kind(key) == VALUE:
            return
        shape = td._leaf_shape(key) if td._kind(key) == LEAF else td._raw(key).batch_size
        if shape[: len(tree.batch)] != tree.batch:
            name = ".".join((*path, key))
            raise BatchSizeError(
                f"{name!r} is not in the state dict, and does not fit its batch size, {list(tree.batch)}"
            )

    def run(self) -> None:
        """Write all planned changes.

        Raises:
            StateDictError: `strict`, and keys do not match.
        """
        if self._strict and (self._missing or self._extra):
            sides = [("only in the state dict", self._extra), ("only in the TensorDict", self._missing)]
            text = "; ".join(f"{where}: {', '.join(map(repr, keys))}" for where, keys in sides if keys)
            raise StateDictError(f"the keys do not match: {text}", hint="pass strict=False to load the keys that do")
        for part in self._parts:
            if (part.fresh or part.empty) and part.td.is_locked:
                raise part.td._refuse_locked(f"add or replace {', '.join(map(repr, [*part.fresh, *part.empty]))}")
        with torch.no_grad():
            for part in self._parts:
                _set_batch(part)
            changes = Changes()
            for part in self._parts:
                td = part.td
                changes.write(td, {key: td._coerce_existing(key, value) for key, value in part.writes.items()})
                changes.set(td, {key: td._coerce(key, value) for key, value in part.fresh.items()})
                if part.empty:
                    changes.then(functools.partial(td._drop, part.empty))
            changes.run()


def _is_empty(tree: Tree) -> bool:
    """Check whether a level of a state dict, with all levels below it, has no entries."""
    return tree.stack_dim is None and all(isinstance(v, Tree) and _is_empty(v) for v in tree.entries.values())


def _is_field(td: Any, key: str) -> bool:
    """Check whether a name is a field of a tensorclass, which may be None."""
    return class_of(unwrap(td)) is not None and takes(td, key)


def _is_of_elements(td: Any, tree: Tree) -> bool:
    """Check whether a level of an older, unmarked form holds the elements of a lazy stack."""
    if not isinstance(td, td._stack_class):
        return False
    return tree.entries.keys() == {str(i) for i in range(len(td.tensordicts))} and all(
        isinstance(element, Tree) for element in tree.entries.values()
    )


def _of_rows(value: Any, batch: torch.Size) -> Any:
    """Convert a list of the batch's shape to a value per row: older forms do not distinguish it from one list value."""
    if type(value) is NonTensorData and not value.batch_size and batch and _has_shape(value.data, batch):
        return NonTensorStack.from_list(value.data, len(batch))
    return value


def _has_shape(value: Any, shape: Sequence[int]) -> bool:
    return not shape or (
        isinstance(value, list) and len(value) == shape[0] and all(_has_shape(v, shape[1:]) for v in value)
    )


def _kind_of(value: Any) -> str:
    if isinstance(value, Tree):
        return GROUP
    return VALUE if isinstance(value, NonTensor) else LEAF


def _entry(td: Any, value: Any) -> Any:
    """Build an entry that the target does not have yet."""
    if not isinstance(value, Tree):
        return value
    entries = {key: _entry(td, item) for key, item in value.entries.items()}
    if value.stack_dim is not None:
        return td._stack_class(*entries.values(), stack_dim=value.stack_dim)
    return td._resident_class(entries, batch_size=value.batch, names=value.names)


def _set_batch(part: _Part) -> None:
    td, tree = part.td, part.tree
    if tree.batch is not None and tree.batch != td.batch_size:
        td._drop([key for key in part.fresh if td._kind(key) is not None])  # replaced in a moment
        td.batch_size = tree.batch
    if tree.names is not None and tuple(td.names) != tree.names:
        td.names = tree.names
