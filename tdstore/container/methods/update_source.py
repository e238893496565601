"""Sources of `update` and related methods: pairs of keys and values, from dicts and TensorDicts alike."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from tdstore import errors
from tdstore.arguments import as_list
from tdstore.container.core.container import GROUP, VALUE, Container
from tdstore.container.core.key_views import IsLeaf
from tdstore.container.core.paths import entry_path
from tdstore.container.core.tensorclasses import unwrap
from tdstore.container.values.elements import spread_over
from tdstore.container.values.nested_lists import levels_of
from tdstore.container.values.nontensor import NonTensor, NonTensorStack
from tdstore.index.index_terms import as_terms
from tdstore.index.selection import index_shape
from tdstore.types import Path


def check_may_resize(td: Any, inplace: bool, some_keys: bool) -> None:
    """Raise a BatchSizeError for an update that cannot adopt another batch size."""
    if inplace or some_keys:
        how = "inplace=True" if inplace else "keys_to_update="
        raise errors.BatchSizeError(f"update: with {how}, the batch size stays {list(td.batch_size)}")


def unequal_batches(mine: Any, theirs: Any) -> list[tuple[Any, Any]]:
    """List containers of two trees side by side, where their batch sizes differ in a dimension that both have."""
    mine, theirs = unwrap(mine), unwrap(theirs)
    if not isinstance(theirs, Container):
        groups = [(mine._raw(k), v) for k, v in theirs.items() if isinstance(k, str) and mine._kind(k) == GROUP]
        return [pair for a, b in groups if isinstance(b, Container) for pair in unequal_batches(a, b)]
    if isinstance(mine, Container._stack_class) and isinstance(theirs, Container._stack_class):
        if len(mine._tds) == len(theirs._tds) and mine._stack_dim == theirs._stack_dim:
            return [pair for a, b in zip(mine._tds, theirs._tds, strict=True) for pair in unequal_batches(a, b)]
        return []
    pairs = []
    if any(a != b for a, b in zip(mine.batch_size, theirs.batch_size, strict=False)):
        pairs.append((mine, theirs))
    for key in mine._first_keys():
        if mine._kind(key) == GROUP and theirs._kind(key) == GROUP:
            pairs += unequal_batches(mine._raw(key), theirs._raw(key))
    return pairs


UPDATE_OPTIONS = frozenset({"non_blocking", "keys_to_update", "is_leaf", "update_batch_size", "ignore_lock"})
"""What `update` takes by name beside entries, `clone` and `inplace`."""


def source_of(mapping: Any, kwargs: Mapping[str, Any]) -> Container | Mapping[Any, Any]:
    """Return the source of the entries of `update(mapping, **kwargs)`: the mapping itself if there are no kwargs."""
    if not kwargs:
        return {} if mapping is None else mapping
    return {**dict(pairs_of({} if mapping is None else mapping)), **kwargs}


def pairs_of(source: Any) -> Iterable[tuple[Any, Any]]:
    """Return the keys and values of a TensorDict or a dict.

    Raises:
        InvalidTypeError: `source` is neither.
    """
    if hasattr(source, "items") and not isinstance(source, NonTensor):
        pairs: Iterable[tuple[Any, Any]] = source.items()
        return pairs
    raise errors.InvalidTypeError(f"update takes a TensorDict or a dict, not a {type(source).__name__}")


def flat_pairs(source: Any, prefix: Path = (), *, stacks: bool = True) -> Iterator[tuple[Path, Any]]:
    """Yield entries by their paths, also those of lazy stacks. With `stacks=False` they are yielded whole."""
    for key, value in pairs_of(source):
        path = (*prefix, *entry_path(key))
        if isinstance(value, Container._stack_class) and not stacks:
            yield path, value
        elif isinstance(value, (Container, Mapping)):
            yield from flat_pairs(value, path, stacks=stacks)
        else:
            yield path, value


def by_first_key(source: Any) -> Iterator[tuple[str, Any]]:
    """Collect the pairs of a source by first-level keys: the nested keys of one TensorDict together."""
    pairs = [(entry_path(key), value) for key, value in pairs_of(source)]
    if all(len(path) == 1 for path, _ in pairs):
        yield from ((path[0], value) for path, value in pairs)
        return
    merged: dict[str, Any] = {}
    for (first, *rest), value in pairs:
        before = merged.get(first)
        if not rest:
            merged[first] = value
        elif isinstance(before, Container):
            shallow: Any = before._shallow()
            merged[first] = shallow.update(_nest(tuple(rest), value))
        else:
            merged[first] = _merged(before if isinstance(before, Mapping) else {}, rest, value)
    yield from merged.items()


def _merged(into: Mapping[Any, Any], path: Sequence[str], value: Any) -> dict[Any, Any]:
    """Copy nested mappings, with one more value."""
    first, *rest = path
    out = dict(into)
    below = out.get(first)
    out[first] = _merged(below if isinstance(below, Mapping) else {}, rest, value) if rest else value
    return out


def as_key_list(keys: Any) -> list[Any]:
    """Return keys as a list: a string is one key, any other sequence holds keys, which may be nested."""
    return [keys] if isinstance(keys, str) else as_list(keys, "keys_to_update", "a key or a sequence of keys")


def _nest(path: Path, value: Any) -> Any:
    for part in reversed(path):
        value = {part: value}
    return value


def pick(value: Any, paths: list[Path]) -> dict[str, Any]:
    """Copy the entries at some paths of nested mappings into nested dicts."""
    picked: dict[str, Any] = {}
    for path in paths:
        node, inner = picked, value
        for part in path[:-1]:
            inner = inner[part]
            node = node.setdefault(part, {})
        node[path[-1]] = inner[path[-1]]
    return picked


def stops_at(is_leaf: IsLeaf | None, value: Any) -> bool:
    """Return whether `is_leaf` says that a nested value is one entry, which is not traversed."""
    return is_leaf is not None and is_leaf(type(value))


def spread_list(td: Any, key: str, value: Any, at: tuple[Any, ...]) -> object:
    """Return the value to write to rows of an entry: of a list, one element to each row."""
    if type(value) is not list or not value or td._kind(key) != VALUE:
        return value
    shape = index_shape(td._batch_size, as_terms(at))
    if not shape:
        return value
    stack = NonTensorStack.from_list(value, levels_of(value, len(shape)))
    return stack if stack.batch_size == shape else NonTensorStack.from_list(spread_over(stack, shape), 1).reshape(shape)
