"""Nodes and steps in the tree of a forest: pure, over rows and hashes."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterator

from tdstore.errors import InvalidArgumentError
from tdstore.rl.trees.maps import DataMap, NodeMap

SPARE = 10_000
"""Copies of nodes that loops may cost, in addition to ten for each step."""


@dataclasses.dataclass(slots=True)
class Plan:
    """A node of a tree that has not been made yet."""

    rows: list[int]
    """The rows of the steps from the branching point of the parent."""
    pair: int | None
    """The hash of the first of them."""
    observation: int
    """The hash of the observation at the end."""
    depth: int
    inside: frozenset[int]
    """Observations of the path that lie on a loop with the one at the end."""
    cycle: bool = False
    """Whether the observation at the end was on the path before."""
    children: list[int] = dataclasses.field(default_factory=list)


class Planner:
    """Planner of the tree below one observation.

    The tree below a node depends on the observations on the path to it, as far as they can be reached again: those of
    its own strongly connected component. So nodes are shared by paths that agree in these; in a graph without loops,
    all paths do.
    """

    def __init__(self, data: DataMap, nodes: NodeMap, root: int, max_depth: int | None, compact: bool) -> None:
        self._data, self._nodes = data, nodes
        self._max_depth, self._compact = max_depth, compact
        self._component = components(data, nodes, root)
        self.plans: list[Plan] = []
        self._known: dict[tuple[int, frozenset[int], int], int] = {}
        self._plan(root)

    def _rows(self, observation: int) -> list[int]:
        node = self._nodes.get(observation)
        return [] if node is None else node.rows

    def _plan(self, root: int) -> None:
        first = Plan([], None, root, 0, frozenset([root]))
        if len(self._rows(root)) == 1:  # a step that must be taken belongs to the root
            self._step(first, self._rows(root)[0])
            if self._compact:
                self._follow(first)
        self.plans.append(first)
        queue = deque([0])
        limit = SPARE + 10 * len(self._data)
        while queue:
            plan = self.plans[queue.popleft()]
            if plan.cycle or (self._max_depth is not None and plan.depth > self._max_depth):
                continue
            for row in self._rows(plan.observation):
                number, fresh = self._child(plan, row)
                plan.children.append(number)
                if fresh:
                    queue.append(number)
            if len(self.plans) > limit:
                raise InvalidArgumentError(
                    f"the observations of this forest form loops with more than {limit} paths: pass max_depth"
                )

    def _child(self, parent: Plan, row: int) -> tuple[int, bool]:
        """Return the number of the node at the end of a step, and whether it is new."""
        inside = parent.inside if self._joined(parent.observation, self._data.reached[row]) else frozenset[int]()
        key = (row, inside, -1 if self._max_depth is None else parent.depth + 1)
        number = self._known.get(key)
        if number is not None:
            return number, False
        plan = Plan([], self._data.pairs[row], parent.observation, parent.depth + 1, parent.inside)
        self._step(plan, row)
        if self._compact:
            self._follow(plan)
        self._known[key] = number = len(self.plans)
        self.plans.append(plan)
        return number, True

    def _step(self, plan: Plan, row: int) -> None:
        """Move the end of a node along a step."""
        reached = self._data.reached[row]
        plan.rows.append(row)
        joined = self._joined(plan.observation, reached)
        plan.cycle = joined and reached in plan.inside
        if not plan.cycle:
            plan.inside = plan.inside | {reached} if joined else frozenset([reached])
        plan.observation = reached

    def _follow(self, plan: Plan) -> None:
        """Move the end of a node on while a single step leads on."""
        while not plan.cycle and len(rows := self._rows(plan.observation)) == 1:
            self._step(plan, rows[0])

    def _joined(self, one: int, other: int) -> bool:
        """Check whether two observations lie on a loop."""
        return self._component[one] == self._component[other]


def components(data: DataMap, nodes: NodeMap, root: int) -> dict[int, int]:
    """Return the number of the strongly connected component of each observation that can be reached (Tarjan)."""
    index: dict[int, int] = {}
    low: dict[int, int] = {}
    found: dict[int, int] = {}
    stack: list[int] = []
    work: list[tuple[int, Iterator[int]]] = []

    def enter(observation: int) -> None:
        index[observation] = low[observation] = len(index)
        stack.append(observation)
        node = nodes.get(observation)
        work.append((observation, iter([] if node is None else [data.reached[row] for row in node.rows])))

    enter(root)
    while work:
        observation, rest = work[-1]
        follower = next(rest, None)
        if follower is None:
            work.pop()
            if work:
                above = work[-1][0]
                low[above] = min(low[above], low[observation])
            if low[observation] == index[observation]:
                while observation not in found:
                    found[stack.pop()] = index[observation]
        elif follower not in index:
            enter(follower)
        elif follower not in found:
            low[observation] = min(low[observation], index[follower])
    return found
