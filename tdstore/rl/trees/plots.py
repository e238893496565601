"""Figures of trees, drawn by plotly, which is imported on first use."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tdstore.errors import MissingDependencyError
from tdstore.rl.trees import walks
from tdstore.rl.trees.walks import Path

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

FIGURES = ("tree", "box")
INFO = ("node_id", "count", "wins")
_LETTER, _LEVEL, _MARGIN = 7, 110, 60
"""Pixels of a letter, of a level of the tree, and of the margin, which has room for a title."""
_NARROWEST, _WIDEST = 700, 1600
"""Pixels of a figure."""


def plot(
    tree: Any,
    backend: str,
    figure: str,
    info: Sequence[str] | None,
    make_labels: Callable[[Any, Path], str] | None,
    show: bool,
) -> Figure:
    """Draw a tree; see `Tree.plot`.

    Args:
        tree: the tree.
        backend: "plotly".
        figure: "tree" or "box".
        info: names of the attributes that are shown when the pointer is over a node.
        make_labels: returns the label of a node; default: `label`.
        show: whether to open the figure as well.

    Raises:
        NotImplementedError: another backend or figure. MissingDependencyError: plotly is not installed.
    """
    if backend != "plotly":
        raise NotImplementedError(f"trees are drawn by the backend 'plotly', not {backend!r}")
    if figure not in FIGURES:
        raise NotImplementedError(f"a tree is drawn as {' or '.join(map(repr, FIGURES))}, not {figure!r}")
    nodes = [(path, node) for path, node, _ in walks.paths_by_breadth(tree, type(tree).children)]
    labels = [(make_labels or label)(node, path) for path, node in nodes]
    hover = [_hover(node, INFO if info is None else info) for _, node in nodes]
    draw = _draw_tree if figure == "tree" else _draw_box
    made: Figure = draw(nodes, labels, hover)
    if show:
        made.show()
    return made


def label(node: Any, path: Path) -> str:
    """Return the action that led to a node, and its number of visits."""
    action = node.branching_action if path else None
    name = "root" if not path else "" if action is None else str(action.tolist())
    visits = float(node.count or 0)
    return f"{name}<br>{visits:g}" if visits else name or str(path[-1])


def layout(paths: Sequence[Path]) -> dict[Path, tuple[float, int]]:
    """Return the position `(x, depth)` of each node: leaves side by side, others centred above their children.

    Args:
        paths: the paths of all nodes, a node before its children.
    """
    below: dict[Path, list[Path]] = {path: [] for path in paths}
    for path in paths:
        if path:
            below[path[:-1]].append(path)
    # Depth first, so that the leaves of one node lie together.
    order: list[Path] = []
    stack: list[Path] = [()]
    while stack:
        path = stack.pop()
        order.append(path)
        stack.extend(reversed(below[path]))
    x: dict[Path, float] = {}
    leaves = 0
    for path in reversed(order):
        if below[path]:
            x[path] = (x[below[path][0]] + x[below[path][-1]]) / 2
        else:
            x[path] = float(-leaves)
            leaves += 1
    return {path: (x[path] + leaves - 1, len(path)) for path in order}


def shown_labels(places: Mapping[Path, tuple[float, int]], labels: Mapping[Path, str], step: float) -> set[Path]:
    """Return the nodes whose labels have room beside those of the same depth; from left to right.

    Args:
        places: position `(x, depth)` of each node.
        labels: their labels, with lines separated by `<br>`.
        step: pixels between two leaves.
    """
    free: dict[int, float] = {}
    made = set()
    for path in sorted(places, key=lambda path: places[path][0]):
        x, depth = places[path]
        half = label_width(labels[path]) / 2
        if x * step - half >= free.get(depth, -math.inf):
            free[depth] = x * step + half
            made.add(path)
    return made


def label_width(text: str) -> float:
    """Return the most pixels that a label takes."""
    return max(map(len, text.split("<br>"))) * _LETTER + _LETTER


def _hover(node: Any, names: Sequence[str]) -> str:
    return "<br>".join(f"{name}: {_shown(getattr(node, name))}" for name in names)


def _shown(value: Any) -> str:
    return str(value.tolist() if hasattr(value, "tolist") else value)


def _plotly() -> Any:
    if importlib.util.find_spec("plotly") is None:
        raise MissingDependencyError("Tree.plot needs the package plotly", hint="pip install 'tdstore[plot]'")
    import plotly.graph_objects

    return plotly.graph_objects


def _draw_tree(nodes: list[tuple[Path, Any]], labels: list[str], hover: list[str]) -> Any:
    graphs = _plotly()
    places = layout([path for path, _ in nodes])
    leaves, depth = 1 + max(x for x, _ in places.values()), max(depth for _, depth in places.values())
    # As wide as the labels of all leaves need, within what can be scrolled; labels without room are shown by hovering.
    width = min(_WIDEST, max(_NARROWEST, leaves * max(map(label_width, labels)) + 2 * _MARGIN))
    step = (width - 2 * _MARGIN) / leaves
    shown = shown_labels(places, {path: text for (path, _), text in zip(nodes, labels, strict=True)}, step)
    xs: list[float | None] = []
    ys: list[float | None] = []
    for path, _ in nodes[1:]:
        (x0, y0), (x1, y1) = places[path[:-1]], places[path]
        xs += [x0, x1, None]
        ys += [-y0, -y1, None]
    lines = graphs.Scatter(
        x=xs, y=ys, mode="lines", line={"color": "#b0b0b0", "width": 1}, hoverinfo="none", showlegend=False
    )
    inner = {path[:-1] for path, _ in nodes if path}  # no line crosses a label below a leaf
    drawn = [path in shown for path, _ in nodes]
    visits = [float(node.count or 0) for _, node in nodes]
    dots = graphs.Scatter(
        x=[places[path][0] for path, _ in nodes],
        y=[-places[path][1] for path, _ in nodes],
        mode="markers+text",
        text=[text if seen else "" for text, seen in zip(labels, drawn, strict=True)],
        hovertext=[m if seen else f"{text}<br>{m}" for text, m, seen in zip(labels, hover, drawn, strict=True)],
        hoverinfo="text",
        marker={
            "size": 16,
            "color": visits,
            "colorscale": "Blues",
            "line": {"color": "#808080", "width": 1},
            "showscale": max(visits) > 0,
            "colorbar": {"title": "visits"},
        },
        textposition=["top center" if path in inner else "bottom center" for path, _ in nodes],
        showlegend=False,
        cliponaxis=False,
    )
    figure = graphs.Figure([lines, dots])
    figure.update_xaxes(visible=False, range=[-0.5, leaves - 0.5])
    figure.update_yaxes(visible=False, range=[-depth - 0.6, 0.6])
    figure.update_layout(
        plot_bgcolor="white",
        margin={"l": _MARGIN, "r": _MARGIN, "t": _MARGIN, "b": 20},
        width=width,
        height=max(300, _LEVEL * (depth + 1)),
    )
    return figure


def _draw_box(nodes: list[tuple[Path, Any]], labels: list[str], hover: list[str]) -> Any:
    graphs = _plotly()
    ids = ["/".join(map(str, ("root", *path))) for path, _ in nodes]
    weight = {path: max(float(node.count or 0), 1.0) for path, node in nodes}
    for path in reversed([path for path, _ in nodes]):  # a box holds those of the children
        inside = sum(weight[below] for below in ((*path, i) for i in range(_children(weight, path))))
        weight[path] = max(weight[path], inside)
    return graphs.Figure(
        graphs.Treemap(
            ids=ids,
            parents=["" if not path else name.rpartition("/")[0] for name, (path, _) in zip(ids, nodes, strict=True)],
            labels=labels,
            values=[weight[path] for path, _ in nodes],
            branchvalues="total",
            hovertext=hover,
            hoverinfo="text",
        )
    )


def _children(weight: dict[Path, float], path: Path) -> int:
    number = 0
    while (*path, number) in weight:
        number += 1
    return number
