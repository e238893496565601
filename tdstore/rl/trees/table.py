"""The stored form of a tree: a flat table of nodes, and one of the steps between them, with row offsets.

A tree is as deep as its longest path, and shares nodes; nested folders would be too deep, and shared nodes would be
stored twice. So a tree is stored as tables on every backend. Nodes whose data differs in keys, shapes or dtypes are in
tables of their own.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor

import tdstore
from tdstore.errors import CorruptStoreError, InvalidTypeError, OutOfRangeError

VERSION = 1
_SCALARS = ("count", "wins", "hash", "node_id")
_NUMBERS: dict[str, Callable[[Any], Any]] = {"bool": bool, "int": int, "float": float}


class TreeTable(tdstore.TensorClass):
    """Tree as tables; opening one returns the tree.

    Args:
        nodes: for each group of nodes with similar data, in the order of breadth-first search, a TensorDict of batch
            size `[n]`: `count`, `wins`, `hash`, `node_id`, and `node_data`.
        rollouts: for each group of steps with similar data, a TensorDict of batch size `[steps]`.
        places: int64 `[N, 2]`, for each node its group in `nodes` and its row there.
        steps: int64 `[N, 3]`, for each node the group in `rollouts`, the first row and the number of rows; the group is
            -1 where there are none.
        edges: int64 `[E, 2]`, parent and child as rows of `places`, ordered by parent, children in their order.
        index: int64 `[M]`, the `index` of all nodes, one after the other.
        index_ends: int64 `[N, 2]`, where the `index` of a node starts and ends in `index`; -1 where it is None.
        roots: int64 `[*B]`, the rows of `places` that the saved tree consists of: one, or those of a stack.
        layout: JSON: the version of this layout, the kinds of numbers of each group of nodes, and the specs.
    """

    nodes: tdstore.TensorDict
    rollouts: tdstore.TensorDict | None
    places: Tensor
    steps: Tensor
    edges: Tensor
    index: Tensor
    index_ends: Tensor
    roots: Tensor
    layout: str

    grow: ClassVar[Callable[[TreeTable], Any]]
    """Builds the tree of a table; set by the module of the tree, which imports this one."""

    def __opened__(self) -> Any:
        """Return the tree."""
        return type(self).grow(self)


class _Group:
    """Records with the same keys, shapes and dtypes."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.rows = 0
        self.parts: list[Any] = []


class _Groups:
    """Groups by signature, in the order in which they were found."""

    def __init__(self) -> None:
        self._found: dict[Any, _Group] = {}

    def of(self, signature: Any) -> _Group:
        return self._found.setdefault(signature, _Group(len(self._found)))

    def items(self) -> Iterable[tuple[Any, _Group]]:
        return self._found.items()


def flatten(nodes: list[Any], children: list[list[int]], roots: Tensor, specs: Any, keys: Any) -> TreeTable:
    """Build the tables of a tree.

    Args:
        nodes: the nodes, each once, in the order of breadth-first search.
        children: for each node the numbers of its children.
        roots: int64 `[*B]`, the numbers of the nodes that the tree consists of.
        specs: reduced specifications, as `reduce_specs` returns them.
        keys: observation and action keys, which go into `layout`.
    """
    records, rollouts = _Groups(), _Groups()
    places, steps, index, ends = [], [], [], []
    index_rows = 0
    for node in nodes:
        scalars = {name: value for name in _SCALARS if (value := getattr(node, name)) is not None}
        data, rollout, rows = node.node_data, node.rollout, node.index
        kinds = tuple((name, _kind(name, value)) for name, value in scalars.items())
        group = records.of((kinds, None if data is None else _signature(data, 0)))
        places.append((group.number, len(group.parts)))
        group.parts.append((scalars, data))
        if rollout is None:
            steps.append((-1, 0, 0))
        else:
            flat = rollout.ndim == 1
            group = rollouts.of((flat, _signature(rollout, 1 if flat else 0)))
            length = len(rollout) if flat else 1
            steps.append((group.number, group.rows, length))
            group.rows += length
            group.parts.append(rollout if flat else rollout.unsqueeze(0))
        if rows is None:
            ends.append((-1, -1))
        else:
            index.append(rows.reshape(-1).cpu())
            ends.append((index_rows, index_rows + rows.numel()))
            index_rows += rows.numel()
    edges = [(parent, child) for parent, below in enumerate(children) for child in below]
    layout = {
        "version": VERSION,
        "kinds": [dict(signature[0]) for signature, _ in records.items()],
        "data": [signature[1] is not None for signature, _ in records.items()],
        "flat": [signature[0] for signature, _ in rollouts.items()],
        "specs": specs,
        "keys": keys,
    }
    joined = {str(group.number): torch.cat(group.parts) for _, group in rollouts.items()}
    return TreeTable(
        nodes=tdstore.TensorDict({str(group.number): _joined(group.parts) for _, group in records.items()}),
        rollouts=tdstore.TensorDict(joined) if joined else None,
        places=torch.tensor(places, dtype=torch.int64),
        steps=torch.tensor(steps, dtype=torch.int64),
        edges=torch.tensor(edges, dtype=torch.int64).reshape(-1, 2),
        index=torch.cat(index) if index else torch.zeros(0, dtype=torch.int64),
        index_ends=torch.tensor(ends, dtype=torch.int64),
        roots=roots,
        layout=json.dumps(layout),
    )


def unflatten(table: Any, make: Callable[[dict[str, Any]], Any]) -> tuple[list[Any], list[list[int]], dict[str, Any]]:
    """Build the nodes of a table, without their children.

    Args:
        table: the table, in memory.
        make: builds a node from its fields.

    Returns:
        The nodes; for each node the numbers of its children; and the layout.

    Raises:
        CorruptStoreError: the table is of a newer version, or its parts do not fit one another.
    """
    layout = json.loads(table.layout)
    if layout.get("version") != VERSION:
        raise CorruptStoreError(
            f"a tree of layout version {layout.get('version')!r} cannot be read: this tdstore knows {VERSION}",
            hint="install a newer tdstore",
        )
    groups = [_rows(table.nodes[str(i)], kinds) for i, kinds in enumerate(layout["kinds"])]
    rollouts = [] if table.rollouts is None else [table.rollouts[str(i)] for i in range(len(layout["flat"]))]
    index = table.index
    nodes = []
    places, steps, ends = table.places.tolist(), table.steps.tolist(), table.index_ends.tolist()
    if not len(places) == len(steps) == len(ends):
        raise CorruptStoreError(f"a tree has {len(places)} nodes, {len(steps)} rollouts and {len(ends)} indices")
    try:
        for (group, row), (of, first, length), (start, stop) in zip(places, steps, ends, strict=True):
            fields = groups[group][row]
            if of >= 0:
                rollout = rollouts[of]
                fields["rollout"] = rollout[first : first + length] if layout["flat"][of] else rollout[first]
            if start >= 0:
                fields["index"] = index[start:stop]
            nodes.append(make(fields))
        children: list[list[int]] = [[] for _ in nodes]
        for parent, child in table.edges.tolist():
            if not 0 <= child < len(nodes):
                raise OutOfRangeError(f"node {child}")
            children[parent].append(child)
    except IndexError as error:
        raise CorruptStoreError(f"the tables of a tree do not fit one another: {error}") from error
    return nodes, children, layout


def _kind(name: str, value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{value.dtype} {list(value.shape)}"
    for kind in ("bool", "int", "float"):  # a bool is an int, so in this order
        if isinstance(value, _NUMBERS[kind]):  # type: ignore[arg-type]
            return kind
    raise InvalidTypeError(f"the {name} of a node is a tensor or a number, not a {type(value).__name__}")


def _signature(td: Any, rows: int) -> Any:
    """Return the facts that the records of one table share: keys, shapes after the first `rows` dimensions, dtypes."""
    found = []
    for key, value in td.items(include_nested=True, leaves_only=True):
        plain = isinstance(value, Tensor)
        found.append((key, (tuple(value.shape[rows:]), value.dtype) if plain else "value"))
    return tuple(td.batch_size[rows:]), tuple(sorted(found, key=str))


def _joined(parts: list[tuple[dict[str, Any], Any]]) -> Any:
    made = tdstore.TensorDict({}, batch_size=[len(parts)])
    for name, first in parts[0][0].items():
        column = [scalars[name] for scalars, _ in parts]
        made[name] = torch.stack(column) if isinstance(first, Tensor) else torch.tensor(column, dtype=_dtype(first))
    if parts[0][1] is not None:
        made["node_data"] = torch.stack([data for _, data in parts])
    return made


def _dtype(value: Any) -> torch.dtype:
    return torch.bool if isinstance(value, bool) else torch.int64 if isinstance(value, int) else torch.float64


def _rows(group: Any, kinds: dict[str, str]) -> list[dict[str, Any]]:
    """Return the fields of each node of a group."""
    rows: list[dict[str, Any]] = [{} for _ in range(group.batch_size[0])]
    for name, kind in kinds.items():
        column = group[name]
        values = column.unbind(0) if kind not in _NUMBERS else map(_NUMBERS[kind], column.tolist())
        for row, value in zip(rows, values, strict=True):
            row[name] = value
    if "node_data" in group.keys():  # noqa: SIM118  # iterating a TensorDict gives rows
        for row, data in zip(rows, group["node_data"].unbind(0), strict=True):
            row["node_data"] = data
    return rows
