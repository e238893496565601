"""Orders of traversal: each node once, or each path once, without recursion; the methods are in `tree`."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

N = TypeVar("N")
Path = tuple[int, ...]


def nodes_by_breadth(roots: list[N], children: Callable[[N], list[N]], identity: Callable[[N], Any]) -> list[N]:
    """Return each node once, by breadth-first search from the roots, which are all different."""
    seen = {identity(root) for root in roots}
    order = list(roots)
    for node in order:  # grows during the loop
        for child in children(node):
            key = identity(child)
            if key not in seen:
                seen.add(key)
                order.append(child)
    return order


def paths_by_breadth(root: N, children: Callable[[N], list[N]]) -> Iterator[tuple[Path, N, bool]]:
    """Yield each path, the node at its end, and whether that is a leaf; a shared node once for each path to it."""
    queue: deque[tuple[Path, N]] = deque([((), root)])
    while queue:
        path, node = queue.popleft()
        below = children(node)
        yield path, node, not below
        queue.extend(((*path, i), child) for i, child in enumerate(below))


def paths_by_depth(root: N, children: Callable[[N], list[N]]) -> Iterator[tuple[Path, N]]:
    """Yield each path and the node at its end, a node before its children, all below one child before the next."""
    stack: list[tuple[Path, N]] = [((), root)]
    while stack:
        path, node = stack.pop()
        yield path, node
        stack.extend(reversed([((*path, i), child) for i, child in enumerate(children(node))]))


def longest_path(order: list[Any], children: Callable[[Any], list[Any]], identity: Callable[[Any], Any]) -> int:
    """Return the number of edges of the longest path from the first of `order`, which are all nodes below it."""
    below = {identity(node): children(node) for node in order}
    length: dict[Any, int] = {}
    stack = [order[0]]
    while stack:
        node = stack[-1]
        missing = [child for child in below[identity(node)] if identity(child) not in length]
        if missing:
            stack += missing
            continue
        length[identity(node)] = max((1 + length[identity(child)] for child in below[identity(node)]), default=0)
        stack.pop()
    return length[identity(order[0])]
