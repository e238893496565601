"""The indices of chunks, read in as many rounds as their trees have levels.

HDF5 visits the nodes of such a tree one after the other, and files keep them between the chunks: each would be a
request that waits for the one before.
"""

from __future__ import annotations

import struct

MAGIC = b"TREE"
CHUNKS = 1
"""The type of a node of version 1 that locates chunks."""
_HEAD = struct.Struct("<4sBBH16x")
_ADDRESS = struct.Struct("<Q")


def children(node: memoryview, rank: int) -> list[int]:
    """Return where the nodes below an inner node of a tree of chunks begin; nothing for all other bytes.

    Args:
        node: the bytes of a node.
        rank: the number of dimensions of the dataset.
    """
    if len(node) < _HEAD.size:
        return []
    magic, kind, level, used = _HEAD.unpack_from(node)
    key = 8 + 8 * (rank + 1)
    if magic != MAGIC or kind != CHUNKS or not level or _HEAD.size + used * (key + 8) > len(node):
        return []
    return [_ADDRESS.unpack_from(node, _HEAD.size + at * (key + 8) + key)[0] for at in range(used)]
