"""Views of the keys, values and items of a container, nested or not."""

from __future__ import annotations

from collections import abc
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from tdstore.arguments import check_callable
from tdstore.container.core.container import GROUP, LEAF, VALUE, Container
from tdstore.container.core.paths import entry_path
from tdstore.container.core.tensorclasses import unwrap

IsLeaf = Callable[[type], bool]
M = TypeVar("M", bound=Callable[..., Any])


def signature_of(method: M) -> Callable[[Callable[..., Any]], M]:
    """Give a faster override the signature of the method that it overrides, whose overloads are then written once."""
    return lambda override: override  # type: ignore[return-value]  # to type checkers it is the other method


def walk(
    td: Container,
    include_nested: bool,
    leaves_only: bool,
    is_leaf: IsLeaf | None,
    sort: bool,
    group_first: bool,
    prefix: Any = (),
) -> Iterator[tuple[Any, Container, str]]:
    """Yield `(key, container, first-level key)`; keys are strings at the root and tuples below.

    A nested container comes after its entries, or before them with `group_first`.
    """
    if is_leaf is not None:
        check_callable(is_leaf, "is_leaf")
    keys = sorted(td._first_keys()) if sort else list(td._first_keys())
    for key in keys:
        kind = td._kind(key)
        full = (*prefix, key) if prefix else key
        closed = is_leaf is not None and kind != LEAF and is_leaf(type(td._raw(key)))
        if kind == GROUP and not closed:
            if group_first and not leaves_only:
                yield full, td, key
            if include_nested:
                yield from walk(td._raw(key), True, leaves_only, is_leaf, sort, group_first, (*prefix, key))
            if not group_first and not leaves_only:
                yield full, td, key
        elif kind == LEAF or closed or not leaves_only or (kind == VALUE and td._is_unbatched(key)):
            yield full, td, key


class FirstKeys(abc.KeysView[str]):
    """First-level keys of a container that is a dict inside."""

    __slots__ = ()
    _mapping: dict[str, Any]

    def __iter__(self) -> Iterator[str]:
        return iter(self._mapping)

    def __contains__(self, key: object) -> bool:
        if type(key) is str:
            return key in self._mapping
        path = entry_path(key)  # type: ignore[arg-type]
        return len(path) == 1 and path[0] in self._mapping

    def __repr__(self) -> str:
        return f"FirstKeys({list(self._mapping)})"


class SortedKeys(FirstKeys):
    """The same in alphabetical order."""

    __slots__ = ()

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._mapping))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({list(self)})"


class KeysView(abc.KeysView[Any]):
    """Keys of a container, as `td.keys(...)` returns them: iterable, with `in`, `len` and set-like comparison."""

    __slots__ = ("_args", "_td")

    def __init__(
        self, td: Container, include_nested: bool, leaves_only: bool, is_leaf: IsLeaf | None, sort: bool
    ) -> None:
        self._td = td
        self._args = (include_nested, leaves_only, is_leaf, sort)

    def __iter__(self) -> Iterator[Any]:
        include_nested, leaves_only, _, sort = self._args
        if not (include_nested or leaves_only):
            return iter(sorted(self._td._first_keys()) if sort else list(self._td._first_keys()))
        return (key for key, _, _ in walk(self._td, *self._args, sort))

    def __len__(self) -> int:
        include_nested, leaves_only, _, _ = self._args
        nested = include_nested or leaves_only
        keys: Iterable[Any] = walk(self._td, *self._args, True) if nested else self._td._first_keys()
        return sum(1 for _ in keys)  # `list(view)` asks for it: no entry is read

    def __contains__(self, key: object) -> bool:
        path = entry_path(key)  # type: ignore[arg-type]
        include_nested, leaves_only, is_leaf, _ = self._args
        if len(path) > 1 and not include_nested:
            return False
        node = self._td
        for part in path[:-1]:
            if node._kind(part) != GROUP:
                return False
            node = node._raw(part)
        kind = node._kind(path[-1])
        if kind is None or not leaves_only or kind == LEAF:
            return kind is not None
        if kind == VALUE and node._is_unbatched(path[-1]):
            return True
        return is_leaf is not None and is_leaf(type(node._raw(path[-1])))

    def __eq__(self, other: object) -> bool:
        return set(self) == set(other) if isinstance(other, (KeysView, set, type({}.keys()))) else NotImplemented

    def __and__(self, other: Any) -> set[Any]:
        return set(self) & set(other)

    def __or__(self, other: Any) -> set[Any]:
        return set(self) | set(other)

    def __sub__(self, other: Any) -> set[Any]:
        return set(self) - set(other)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({list(self)})"


class NestedKeys(KeysView):
    """Nested keys of a TensorDict in memory, those of groups too, listed at once whenever they are asked for."""

    __slots__ = ()

    def __iter__(self) -> Iterator[Any]:
        td: Any = self._td
        out: list[Any] = []
        td._list_keys((), out, False, self._args[3])
        return iter(out)

    def __len__(self) -> int:
        count, waiting = 0, [self._td]  # `list(keys)` asks for it: no key is made
        for td in waiting:  # which grows
            if isinstance(td, Container._resident_class):
                count += len(td._data)
                waiting += map(unwrap, td._groups())
            else:
                count += len(td.keys(True))
        return count


class LeafKeys(list[Any]):
    """Leaf keys of a TensorDict in memory, listed at once; nested keys may be asked for in every form."""

    __slots__ = ()

    def __contains__(self, key: object) -> bool:
        path = entry_path(key)  # type: ignore[arg-type]
        return list.__contains__(self, path[0] if len(path) == 1 else path)


def _entry(node: Any, key: str) -> Any:
    return node._named(key)


class ItemsView(KeysView):
    """Items of a container with options, or of one that is not a plain dict inside, as `td.items(...)` returns them."""

    __slots__ = ()

    def __iter__(self) -> Iterator[Any]:
        return ((key, _entry(node, last)) for key, node, last in walk(self._td, *self._args, True))

    def __contains__(self, item: object) -> bool:
        return any(item == pair for pair in self)


class ValuesView(ItemsView):
    """Values of such a container, as `td.values(...)` returns them."""

    __slots__ = ()

    def __iter__(self) -> Iterator[Any]:
        return (_entry(node, last) for _, node, last in walk(self._td, *self._args, True))
