"""Monte Carlo tree search with nodes that are nested tensorclasses; children are stacks that grow."""

from __future__ import annotations

import math

import torch
from tensordict import TensorClass, TensorDict, lazy_stack


class Node(TensorClass["nocast"]):
    state: TensorDict
    visits: torch.Tensor
    value: torch.Tensor
    action: torch.Tensor | None = None
    children: Node | None = None
    path: str = "root"

    @classmethod
    def leaf(cls, state, action=None, path="root"):
        return cls(state=state, visits=torch.zeros(()), value=torch.zeros(()), action=action, path=path)

    @property
    def is_leaf(self):
        return self.children is None

    @property
    def num_children(self):
        return 0 if self.children is None else self.children.batch_size[0]

    def score(self, parent_visits, c=1.4):
        if self.visits == 0:
            return math.inf
        return (self.value / self.visits + c * math.sqrt(math.log(parent_visits) / self.visits)).item()

    def depth(self):
        return 0 if self.is_leaf else 1 + max(child.depth() for child in self.children.unbind(0))


class Nim:
    """Take one to three stones; taking the last one wins."""

    @staticmethod
    def actions(state):
        return [a for a in (1, 2, 3) if a <= state["stones"].item()]

    @staticmethod
    def play(state, action):
        return TensorDict({"stones": state["stones"] - action, "player": 1 - state["player"]})

    @staticmethod
    def winner(state):
        return 1 - state["player"].item() if state["stones"].item() == 0 else None


def expand(node):
    children = []
    for action in Nim.actions(node.state):
        state = Nim.play(node.state, action)
        children.append(Node.leaf(state, torch.tensor(action), f"{node.path}/{action}"))
    node.children = lazy_stack(children)


def rollout(state, rng):
    while (winner := Nim.winner(state)) is None:
        actions = Nim.actions(state)
        state = Nim.play(state, actions[torch.randint(len(actions), (), generator=rng).item()])
    return winner


def search(root, simulations):
    rng = torch.Generator().manual_seed(0)
    for _ in range(simulations):
        node, path = root, [root]
        while not node.is_leaf:
            scores = [child.score(max(node.visits.item(), 1)) for child in node.children.unbind(0)]
            node = node.children[scores.index(max(scores))]
            path.append(node)
        if Nim.winner(node.state) is None and node.visits > 0:
            expand(node)
            node = node.children[0]
            path.append(node)
        winner = rollout(node.state, rng)
        for visited in path:
            visited.visits += 1
            visited.value += float(winner != visited.state["player"].item())
    return root


def main():
    root = Node.leaf(TensorDict({"stones": torch.tensor(5), "player": torch.tensor(0)}))
    print(root.is_leaf, root.num_children, root.batch_size, root.path)
    search(root, 60)
    print(root.visits.item(), root.num_children, root.depth())
    print([int(v) for v in root.children.visits.tolist()], root.children.action.tolist())
    best = root.children[root.children.visits.argmax()]
    print(best.action.item(), best.path, best.state["stones"].item(), type(best).__name__)
    print([c.path for c in root.children.unbind(0)], type(root.children).__name__)
    print(root.children.state["stones"].tolist(), root.children.state.batch_size)

    total = sum(child.visits.item() for child in root.children.unbind(0))
    print(total <= root.visits.item(), best.children is None)

    def walk(node, level=0):
        yield level, node.path, int(node.visits)
        if not node.is_leaf:
            for child in node.children.unbind(0):
                yield from walk(child, level + 1)

    lines = list(walk(root))
    print(len(lines), lines[:6])
    copy = root.clone()
    copy.visits.zero_()
    print(copy.visits.item(), root.visits.item() > 0, copy.children.visits.tolist() == root.children.visits.tolist())
    grown = lazy_stack([*root.children.unbind(0), Node.leaf(root.state, torch.tensor(0), "pass")])
    root.children = grown
    print(root.num_children, root.children[-1].path, root.children[-1].is_leaf)
