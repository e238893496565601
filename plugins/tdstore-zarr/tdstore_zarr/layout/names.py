"""Keys as names of zarr nodes, one folder of siblings at a time: reversible, and distinct where case is ignored."""

from __future__ import annotations

import re
from collections.abc import Iterable

from tdstore.errors import OptionError
from tdstore.keys import decode_file_name, encode_file_name, encode_names, fold
from tdstore.types import Path, path_text

# Names that zarr gives a meaning, and those that begin like them; zarr reserves two underscores for itself. And ours.
_RESERVED = re.compile(r"__|zarr\.json\Z|\.z(group|array|attrs|metadata)\Z|tdstore\.(log-|claim\Z)", re.IGNORECASE)


class Names:
    """The node of each leaf and group, and the key of each node's name."""

    def __init__(self) -> None:
        self.nodes: dict[Path, str] = {(): ""}
        self._used: dict[str, dict[str, str]] = {}
        """Parent node -> names of its children, by their folded form."""

    def node(self, path: Path) -> str:
        """Return the node of a path; assign names to it and the groups above it if necessary.

        Raises:
            OptionError: a key that no storage can represent.
        """
        known = self.nodes.get(path)
        if known is not None:
            return known
        parent = self.node(path[:-1])
        siblings = self._used.setdefault(parent, {})
        key = path[-1]
        try:
            name = encode_file_name(key)
            if fold(name) in siblings:
                name = encode_names([key], taken=siblings.values())[key]
            if _RESERVED.match(name):
                name = f"%{ord(name[0]):02X}{name[1:]}"
        except ValueError as error:
            raise OptionError(f"{path_text(path)} cannot be the name of a zarr node: {error}") from None
        node = f"{parent}/{name}" if parent else name
        self.put(path, node)
        return node

    def put(self, path: Path, node: str) -> None:
        """Register an existing node."""
        parent, _, name = node.rpartition("/")
        self.nodes[path] = node
        if node:
            self._used.setdefault(parent, {})[fold(name)] = name

    def drop(self, path: Path) -> None:
        """Remove a deleted node."""
        node = self.nodes.pop(path, None)
        if node:
            parent, _, name = node.rpartition("/")
            self._used.get(parent, {}).pop(fold(name), None)


def decode_nodes(nodes: Iterable[str]) -> dict[str, Path]:
    """Return the paths of another program's nodes (`a/b` is the path of a and b), each once.

    A name that the codec of tdstore never writes is its own key.
    """
    found: dict[str, Path] = {"": ()}
    used: set[Path] = {()}
    for node in sorted(nodes, key=lambda n: (n.count("/"), n)):
        if not node:
            continue
        parent, _, name = node.rpartition("/")
        above = found.get(parent)
        if above is None:
            above = tuple(parent.split("/"))
        path = (*above, _key(name))
        if path in used:
            path = (*above, name)
        used.add(path)
        found[node] = path
    return found


def _key(name: str) -> str:
    try:
        key = decode_file_name(name)
        return key if Names().node((key,)) == name else name
    except (ValueError, OptionError):
        return name
