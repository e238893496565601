"""Facts of a node at run time: its parents, its keys, the table of its data.

A node is a wrapper around a container, made again at each access. So these facts are stored beside the containers, by
identity, and disappear with them; they are never saved.
"""

from __future__ import annotations

import weakref
from typing import Any

from tdstore import TensorDictBase

Key = str | tuple[str, ...]


class Links:
    """The run-time facts of one container."""

    __slots__ = ("action_keys", "observation_keys", "owner", "parents", "table")

    def __init__(self, owner: weakref.ref[Any]) -> None:
        self.owner = owner
        self.parents: list[weakref.ref[Any]] = []
        self.observation_keys: tuple[Key, ...] | None = None
        self.action_keys: tuple[Key, ...] | None = None
        self.table: Any = None


_LINKS: dict[int, Links] = {}


def find(container: TensorDictBase) -> Links | None:
    """Return the facts of a container; None where it has none."""
    links = _LINKS.get(id(container))
    return links if links is not None and links.owner() is container else None


def make(container: TensorDictBase) -> Links:
    """Return the facts of a container; they are created if it has none."""
    links = find(container)
    if links is None:
        key = id(container)

        def forget(owner: weakref.ref[Any]) -> None:
            if key in _LINKS and _LINKS[key].owner is owner:
                del _LINKS[key]

        links = _LINKS[key] = Links(weakref.ref(container, forget))
    return links


def adopt(parent: TensorDictBase, children: list[Any]) -> None:
    """Record a container as a parent of others, once each."""
    for child in children:
        links = make(child)
        links.parents = [ref for ref in links.parents if ref() is not None]
        if not any(ref() is parent for ref in links.parents):
            links.parents.append(weakref.ref(parent))


def disown(parent: TensorDictBase, children: list[Any]) -> None:
    """Record that a container is no longer a parent of others."""
    for child in children:
        if (links := find(child)) is not None:
            links.parents = [ref for ref in links.parents if ref() is not None and ref() is not parent]


def parents(container: TensorDictBase) -> list[weakref.ref[Any]]:
    """Return the references to the parents that still exist."""
    links = find(container)
    return [] if links is None else [ref for ref in links.parents if ref() is not None]
