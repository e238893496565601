"""From and to nested lists, tuples, dicts and named tuples, with the same ones after both conversions."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from tdstore.container.core.container import Container
from tdstore.container.functions.construct_and_join import from_dict
from tdstore.container.values.nontensor import NonTensor, NonTensorData
from tdstore.errors import InvalidArgumentError, StoreError
from tdstore.types import SizeLike

MARK = "_pytree_type"
"""The entry with the type of a level, as plain data, which can be stored."""
_KINDS: dict[str, Any] = {"list": list, "tuple": tuple, "dict": dict, "OrderedDict": OrderedDict}
_NAMES = {kind: name for name, kind in _KINDS.items()}
_named: dict[str, Any] = {}
"""Classes of named tuples that this process has converted to TensorDicts, by their full names."""


def from_pytree(
    pytree: Any, *, batch_size: SizeLike | None = None, auto_batch_size: bool = False, batch_dims: int | None = None
) -> Any:
    """Build a TensorDict from any nesting of lists, tuples, dicts and named tuples; `to_pytree` reverses it.

    Positions are the keys "0", "1", ...; so are dict keys that are not strings. The entry `_pytree_type` of each level
    holds its type. Numbers and arrays become tensors, other leaves values. An object without entries is returned as a
    leaf.

    Args:
        pytree: the nested lists, tuples, dicts and named tuples.
        batch_size: the batch size; default: `[]`.
        auto_batch_size: whether each level gets the largest batch size that its entries share.
        batch_dims: with `auto_batch_size`, the largest number of batch dimensions.

    Raises:
        InvalidArgumentError: both `batch_size` and `auto_batch_size`.

    Example:
        >>> tree = [torch.zeros(2), {"a": (torch.ones(2),), 5: None}]
        >>> from_pytree(tree).to_pytree()
        [tensor([0., 0.]), {'a': (tensor([1., 1.]),), 5: None}]
    """
    if batch_size is not None and auto_batch_size:
        raise InvalidArgumentError("give batch_size or auto_batch_size=True, not both")
    entries = _entries(pytree)
    if isinstance(entries, dict):
        return from_dict(Container._resident_class, entries, batch_size, auto_batch_size, batch_dims, None, None)
    if isinstance(entries, Container):
        return entries
    leaf = Container._resident_class({"leaf": entries}).get("leaf")
    return leaf.plain() if isinstance(leaf, NonTensor) else leaf


def is_namedtuple_class(cls: type) -> bool:
    """Return whether a class was made by `collections.namedtuple` or `typing.NamedTuple`."""
    return issubclass(cls, tuple) and hasattr(cls, "_fields")


def is_namedtuple(value: object) -> bool:
    """Return whether a value is a named tuple."""
    return is_namedtuple_class(type(value))


def _entries(tree: Any) -> Any:
    kind = type(tree)
    if kind is dict or kind is OrderedDict:
        mark: dict[str, Any] = {"kind": _NAMES[kind]}
        if all(type(key) is str and key != MARK for key in tree):
            entries = dict(tree)
        else:
            mark["keys"] = list(tree)
            entries = _numbered(tree.values())
    elif is_namedtuple(tree):
        mark = {"kind": f"{kind.__module__}.{kind.__qualname__}", "fields": list(tree._fields)}
        _named[mark["kind"]] = kind
        entries = _numbered(tree)
    elif kind is list or kind is tuple:
        mark = {"kind": _NAMES[kind]}
        entries = _numbered(tree)
    else:
        return tree
    return {**{key: _entries(value) for key, value in entries.items()}, MARK: NonTensorData(mark)}


def _numbered(values: Any) -> dict[str, Any]:
    return {str(i): value for i, value in enumerate(values)}


def to_pytree(td: Container) -> Any:
    """Rebuild the argument of `from_pytree`; return a TensorDict of another origin unchanged."""
    mark = td.get(MARK, None)
    mark = mark.flat()[0] if isinstance(mark, NonTensor) and mark.numel() else None
    if not isinstance(mark, dict) or "kind" not in mark:
        return td
    values = [_back(value) for key, value in td._resident().items() if key != MARK]
    names = [key for key in td._first_keys() if key != MARK]
    kind, fields = mark["kind"], mark.get("fields")
    if kind in ("dict", "OrderedDict"):
        return _KINDS[kind](zip(mark.get("keys", names), values, strict=True))
    order = sorted(range(len(names)), key=lambda i: int(names[i]))  # stores may have an order of their own
    values = [values[i] for i in order]
    if fields is None:
        return _KINDS[kind](values)
    known = _named.get(kind)
    if known is None or list(known._fields) != fields:
        raise StoreError(
            f"the named tuple {kind} with the fields {fields} is not known in this process",
            hint="call from_pytree() with an instance of it first",
        )
    return known(*values)


def _back(value: Any) -> Any:
    if isinstance(value, Container):
        return to_pytree(value)
    return value.plain() if isinstance(value, NonTensor) else value
