"""A batched search tree as arrays in one TensorDict: select by PUCT, expand, back up; many roots at once."""

import torch
from tensordict import TensorDict

UNVISITED = -1


class ArrayTree:
    def __init__(self, roots, num_actions, capacity):
        self.roots, self.num_actions = roots, num_actions
        self.td = TensorDict(
            {
                "visits": torch.zeros(roots, capacity),
                "value": torch.zeros(roots, capacity),
                "parent": torch.full((roots, capacity), UNVISITED),
                "action": torch.full((roots, capacity), UNVISITED),
                "edges": {
                    "child": torch.full((roots, capacity, num_actions), UNVISITED),
                    "prior": torch.zeros(roots, capacity, num_actions),
                    "visits": torch.zeros(roots, capacity, num_actions),
                    "value": torch.zeros(roots, capacity, num_actions),
                },
            },
            batch_size=[roots, capacity],
            names=["root", "node"],
        )
        self.size = torch.ones(roots, dtype=torch.int64)
        self.rows = torch.arange(roots)
        self.td["edges", "prior"][:, 0] = 1 / num_actions

    def at(self, nodes):
        return self.td[self.rows, nodes]

    def select(self):
        node = torch.zeros(self.roots, dtype=torch.int64)
        action = torch.zeros_like(node)
        active = torch.ones(self.roots, dtype=torch.bool)
        while active.any():
            edges = self.at(node)["edges"]
            q = edges["value"] / edges["visits"].clamp(min=1)
            u = edges["prior"] * edges["visits"].sum(-1, keepdim=True).add(1).sqrt() / (1 + edges["visits"])
            choice = (q + 1.5 * u).argmax(-1)
            child = edges["child"].gather(-1, choice[:, None]).squeeze(-1)
            action = torch.where(active, choice, action)
            goes_on = active & (child != UNVISITED)
            node = torch.where(goes_on, child, node)
            active = goes_on
        return node, action

    def expand(self, node, action, prior, value):
        new = self.size.clone()
        self.td["edges", "child"][self.rows, node, action] = new
        fresh = self.at(new).clone()
        fresh["parent"] = node
        fresh["action"] = action
        fresh["edges", "prior"] = prior
        self.td[self.rows, new] = fresh
        self.size += 1
        self.back_up(new, value)

    def back_up(self, node, value):
        active = torch.ones(self.roots, dtype=torch.bool)
        while active.any():
            rows, nodes = self.rows[active], node[active]
            self.td["visits"][rows, nodes] += 1
            self.td["value"][rows, nodes] += value[active]
            here = self.at(node)
            has_parent = active & (here["parent"] != UNVISITED)
            r, p, a = self.rows[has_parent], here["parent"][has_parent], here["action"][has_parent]
            self.td["edges", "visits"][r, p, a] += 1
            self.td["edges", "value"][r, p, a] += value[has_parent]
            node = torch.where(has_parent, here["parent"], node)
            active = has_parent


def main():
    tree = ArrayTree(roots=3, num_actions=4, capacity=30)
    print(tree.td.batch_size, tree.td["edges"].batch_size, tree.td.names, tree.td["edges"].names)
    target = torch.tensor([0, 2, 3])
    for _ in range(24):
        node, action = tree.select()
        reward = (action == target).float()
        prior = torch.full((3, 4), 0.25)
        tree.expand(node, action, prior, reward)
    root = tree.td[:, 0]
    print(root.batch_size, root["edges", "visits"].sum(-1).tolist(), root["visits"].tolist())
    print(root["edges", "visits"].argmax(-1).tolist(), tree.size.tolist())
    print((tree.td["edges", "child"] != UNVISITED).sum((1, 2)).tolist())

    used = tree.td[:, : int(tree.size.max())]
    print(used.shape, used["parent"].max().item() < used.shape[1], used.names)
    leaves = (used["edges", "child"] == UNVISITED).all(-1) & (used["visits"] > 0)
    print(used[leaves].batch_size == (int(leaves.sum()),), used[leaves]["edges", "prior"].unique().tolist())
    policy = root["edges"].select("visits").apply(lambda v: v / v.sum(-1, keepdim=True))
    print([[round(x, 3) for x in row] for row in policy["visits"].tolist()])
    subtree = tree.td[0]
    print(subtree.batch_size, subtree["edges"]["child"][0].tolist() == tree.td["edges", "child"][0, 0].tolist())
    grown = torch.cat([tree.td, tree.td.clone().zero_()], dim=1)
    print(grown.batch_size, grown["visits"].sum().item() == tree.td["visits"].sum().item())
    flat = used.flatten_keys(".")
    print(sorted(flat.keys()), flat.unflatten_keys(".")["edges"].batch_size)
