"""Forms of state dicts: flat with dotted keys, nested, and those of older versions."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec
import torch
from torch import Tensor

from tdstore.container.core.container import GROUP, Container
from tdstore.container.core.tensor_attrs import TensorAttrs
from tdstore.container.values.nontensor import MetaData, NonTensor, NonTensorData, NonTensorStack
from tdstore.errors import InvalidTypeError, StateDictError
from tdstore.index.shapes import as_size

BATCH, DEVICE = "__batch_size", "__device"
_STACK = "LazyStackedTensorDict"


class Tree(msgspec.Struct):
    """One level of a state dict of any form. None means unknown."""

    batch: torch.Size | None = None
    device: torch.device | None = None
    names: tuple[str | None, ...] | None = None
    stack_dim: int | None = None
    """The stack dimension of a lazy stack that is stored by element, with numbers as keys."""
    entries: dict[str, Any] = msgspec.field(default_factory=dict)
    """Tensors, wrapped values, and trees."""
    typed: tuple[str, tuple[str, ...]] | None = None
    """For a tensorclass: its name, and the fields that are None."""
    declared: bool = False
    """Whether the level lists its values that are not tensors, so that an unlisted one is missing."""

    def below(self, key: str) -> Tree:
        """Return the tree at a key, which is created where there is none."""
        found = self.entries.setdefault(key, Tree(declared=self.declared))
        if not isinstance(found, Tree):
            raise StateDictError(f"the state dict has the key {key!r} and keys below it")
        return found


# -- out ---------------------------------------------------------------------------------------
def _metadata(tree: Tree) -> dict[str, Any]:
    found: dict[str, Any] = {"batch_size": tree.batch, "device": tree.device}
    if tree.names is not None:
        found["names"] = tree.names
    if tree.stack_dim is not None:
        found |= {"_type": _STACK, "stack_dim": tree.stack_dim}
    elif tree.typed is not None:
        name, empty = tree.typed
        values = {k: v.plain() for k, v in tree.entries.items() if _is_field(tree, v)}
        found |= {"_type": name, "_non_tensor": dict.fromkeys(empty) | values}
    return found


def _is_field(tree: Tree, value: Any) -> bool:
    """Check whether a value is stored with the fields of its tensorclass, and not separately."""
    return tree.typed is not None and type(value) is NonTensorData


def _is_value(note: Mapping[str, Any]) -> bool:
    """Check whether metadata describes a single value, not a tensorclass, which lists the values of all fields."""
    return "_is_non_tensor" in note.get("_non_tensor", ())


def _value_metadata(value: NonTensor) -> dict[str, Any]:
    rows = isinstance(value, NonTensorStack)  # of any class
    wrapped = {"data": value.tolist() if rows else value.plain()}
    return {
        "batch_size": value.batch_size,
        "device": None,
        "_type": NonTensorStack.__name__ if rows else type(value).__name__,
        "_non_tensor": wrapped | {"_is_non_tensor": True, "_metadata": None},
    }


def _add(out: Any, key: str, value: Any) -> None:
    if key in out:
        raise StateDictError(
            f"two entries have the key {key!r} in a flat state dict", hint="pass state_dict(flatten=False)"
        )
    out[key] = value


def write_flat(tree: Tree, out: Any, prefix: str) -> None:
    """Write dotted keys, and other facts to `out._metadata`."""
    notes = getattr(out, "_metadata", {})
    notes[prefix[:-1]] = _metadata(tree)
    for key, value in tree.entries.items():
        if isinstance(value, Tree):
            write_flat(value, out, f"{prefix}{key}.")
        elif isinstance(value, NonTensor) and not isinstance(value, Tensor):
            if not _is_field(tree, value):
                notes[prefix + key] = _value_metadata(value)
        else:
            _add(out, prefix + key, value)


def write_nested(tree: Tree, out: Any, prefix: str) -> None:
    """Write one ordered dict per level, each with its own `_metadata`."""
    getattr(out, "_metadata", {})[prefix[:-1]] = _metadata(tree)
    for key, value in tree.entries.items():
        if _is_field(tree, value):
            continue
        if isinstance(value, Tensor):
            _add(out, prefix + key, value)
            continue
        below: Any = OrderedDict()
        below._metadata = OrderedDict()
        if isinstance(value, Tree):
            write_nested(value, below, "")
        else:
            below._metadata[""] = _value_metadata(value)
        _add(out, prefix + key, below)


def write_legacy(tree: Tree, out: Any, prefix: str, flatten: bool) -> None:
    """Write the form of older versions, where values are entries too."""
    for key, value in tree.entries.items():
        if isinstance(value, NonTensorStack):
            _add(out, prefix + key, value.tolist())
        elif not isinstance(value, Tree):
            _add(out, prefix + key, value.plain() if isinstance(value, NonTensor) else value)
        elif flatten:
            write_legacy(value, out, f"{prefix}{key}.", True)
        else:
            below: Any = OrderedDict()
            write_legacy(value, below, "", False)
            _add(out, prefix + key, below)
    out[prefix + BATCH], out[prefix + DEVICE] = tree.batch, tree.device


# -- in ----------------------------------------------------------------------------------------
def read(state: Mapping[str, Any], target: Any, from_flatten: bool | None) -> Tree:
    """Read a state dict of any form; `target` is the container to load it into."""
    if not isinstance(state, Mapping) or isinstance(state, Container):
        raise InvalidTypeError(f"load_state_dict takes a dict, not a {type(state).__name__}")
    notes: Mapping[str, Any] = getattr(state, "_metadata", None) or {}
    nested = any(isinstance(value, Mapping) for value in state.values())
    if nested or from_flatten is False:
        return _read_nested(state)
    groups = {path for path, note in notes.items() if not _is_value(note)}
    groups |= {key[: -len(BATCH) - 1] for key in state if key.endswith(f".{BATCH}")}
    places = _Places(groups, target, split=bool(from_flatten))
    root = Tree(declared="batch_size" in notes.get("", ()) or BATCH in state)
    for name, value in state.items():
        group, _, mark = name.rpartition(".") if not name.startswith("__") else ("", "", name)
        if mark in (BATCH, DEVICE):
            _mark(_at(root, places.group(group)), mark, value)
            continue
        *above, key = places.path(name)
        _put(_at(root, above), key, value)
    for name, note in notes.items():
        if _is_value(note):
            *above, key = places.path(name)
            _at(root, above).entries[key] = _value(note)
        elif "batch_size" in note:  # and not what other modules say of themselves
            _note(_at(root, places.group(name)), note)
    return root


def _at(tree: Tree, path: Iterable[str]) -> Tree:
    for key in path:
        tree = tree.below(key)
    return tree


def _put(tree: Tree, key: str, value: Any) -> None:
    if key in tree.entries:
        raise StateDictError(f"the state dict has the key {key!r} twice")
    tree.entries[key] = value if isinstance(value, (Tensor, NonTensor)) else NonTensorData(value)


def _note(tree: Tree, note: Mapping[str, Any]) -> None:
    _mark(tree, BATCH, note["batch_size"])
    _mark(tree, DEVICE, note.get("device"))
    names = note.get("names")
    tree.names = None if names is None else tuple(names)
    if note.get("_type") == _STACK:
        tree.stack_dim = int(note["stack_dim"])
    values = note.get("_non_tensor", {})  # of a tensorclass
    tree.typed = (str(note.get("_type")), tuple(key for key, value in values.items() if value is None))
    for key, value in values.items():
        if value is not None:
            tree.entries[key] = NonTensorData(value, tree.batch)


def _mark(tree: Tree, mark: str, value: Any) -> None:
    tree.declared = True
    if mark == BATCH:
        tree.batch = as_size(value)
    else:
        tree.device = None if value is None else torch.device(value)


def _value(note: Mapping[str, Any]) -> NonTensor:
    data, batch = note["_non_tensor"]["data"], as_size(note.get("batch_size"))
    if note.get("_type") == NonTensorStack.__name__:
        return NonTensorStack.from_list(data, len(batch))
    if note.get("_type") == TensorAttrs.__name__:
        return TensorAttrs.from_data(data, batch)
    return (MetaData if note.get("_type") == MetaData.__name__ else NonTensorData)(data, batch)


def _read_nested(state: Mapping[str, Any]) -> Tree:
    if state.keys() == {"_tensordict", "_non_tensordict"}:  # of an older tensorclass
        tree = _read_nested(state["_tensordict"])
        values = state["_non_tensordict"].items()
        tree.entries |= {key: NonTensorData(value, tree.batch) for key, value in values if value is not None}
        return tree
    note = (getattr(state, "_metadata", None) or {}).get("", {})
    tree = Tree(declared="batch_size" in note)
    if tree.declared:
        _note(tree, note)
    for key, value in state.items():
        if key in (BATCH, DEVICE):
            _mark(tree, key, value)
        elif not isinstance(value, Mapping):
            _put(tree, key, value)
        else:
            own = (getattr(value, "_metadata", None) or {}).get("", {})
            tree.entries[key] = _value(own) if _is_value(own) else _read_nested(value)
    return tree


class _Places:
    """Paths of dotted names: keys may have dots of their own, so what is known of the groups decides.

    Args:
        groups: dotted names of nested TensorDicts, as the state dict tells.
        target: what is loaded into; its entries decide where the state dict does not.
        split: split at every dot.
    """

    def __init__(self, groups: set[str], target: Any, *, split: bool) -> None:
        self._groups, self._target, self._split = groups, target, split
        self._known: dict[str, list[str]] = {"": []}

    def group(self, name: str) -> list[str]:
        """Return the path of a group."""
        if name not in self._known:
            self._known[name] = self.path(name)
        return self._known[name]

    def path(self, name: str) -> list[str]:
        """Return the path of a leaf."""
        if self._split:
            return name.split(".")
        for end in _dots(name):
            if name[:end] in self._groups:
                return [*self.group(name[:end]), name[end + 1 :]]
        return [name] if self._groups else _path_in(self._target, name)


def _dots(name: str) -> Iterator[int]:
    """Return the positions of the dots, the last one first."""
    return (i for i in range(len(name) - 1, 0, -1) if name[i] == ".")


def _path_in(td: Any, name: str) -> list[str]:
    """Return the path of a dotted name, by the entries of a container; split at dots where it has none of them."""
    kind = td._kind(name)
    if kind is None:
        for end in _dots(name):
            if td._kind(name[:end]) == GROUP:
                return [name[:end], *_path_in(td._raw(name[:end]), name[end + 1 :])]
    return name.split(".") if kind is None else [name]
