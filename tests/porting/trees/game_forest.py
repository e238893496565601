"""Games recorded as nested TensorDicts keyed by moves: walking, pruning, merging and counting."""

import torch
from tensordict import TensorDict, is_tensor_collection, merge_tensordicts, unravel_key

RESULTS = {"e4 e5": 1.0, "e4 c5": 0.5, "d4 d5 c4": 1.0, "d4 Nf6": 0.0, "d4 d5 Nf3": 0.5}


def insert(tree, game, result):
    node = tree
    for move in game.split():
        if move not in node.keys():
            node[move] = TensorDict({"count": torch.tensor(0), "score": torch.tensor(0.0)})
        node = node[move]
        node["count"] = node["count"] + 1
        node["score"] = node["score"] + result
    return tree


def moves(tree):
    return {move: child for move, child in tree.items() if is_tensor_collection(child)}


def walk(tree, prefix=()):
    for move, child in moves(tree).items():
        yield (*prefix, move), child
        yield from walk(child, (*prefix, move))


def prune(tree, least):
    for move, child in moves(tree).items():
        if child["count"] < least:
            del tree[move]
        else:
            prune(child, least)
    return tree


def main():
    tree = TensorDict({}, [])
    for game, result in RESULTS.items():
        insert(tree, game, result)
    print(sorted(tree.keys()), len(list(walk(tree))))
    for path, node in walk(tree):
        print(" ".join(path), node["count"].item(), node["score"].item())

    keys = sorted(map(str, tree.keys(include_nested=True, leaves_only=True)))
    print(len(keys), keys[:3])
    print(tree["d4", "d5", "c4", "score"].item(), tree.get(("e4", "a6"), None), ("d4", "d5") in tree.keys(True))
    print(unravel_key(("d4", ("d5", "c4"))), unravel_key(("e4",)))

    other = insert(insert(TensorDict({}, []), "c4", 1.0), "c4 g6", 0.0)
    merged = merge_tensordicts(tree, other)
    print(sorted(merged.keys()), merged["c4", "count"].item())
    tree.update(other)
    print(sorted(tree.keys()), tree["c4", "g6", "count"].item())

    copy = tree.clone()
    prune(copy, 2)
    print(sorted(" ".join(path) for path, _ in walk(copy)), sorted(tree.keys()))
    flat = tree.flatten_keys("/")
    counts = {key: flat[key].item() for key in sorted(flat.keys()) if key.endswith("count")}
    print(counts)
    print((flat.unflatten_keys("/") == tree).all())
    totals = tree.select(*[(move, "count") for move in moves(tree)])
    print({move: totals[move, "count"].item() for move in totals.keys()}, totals.numel())
    means = {}
    for move, child in moves(tree).items():
        means[move] = round((child["score"] / child["count"]).item(), 3)
    print(means)
    scaled = tree.named_apply(lambda name, x: x * 10 if name[-1] == "score" else x, nested_keys=True)
    print(scaled["e4", "score"].item(), scaled["e4", "count"].item())
    depth = max(len(path) for path, _ in walk(tree))
    print(depth, tree.is_empty(), TensorDict({"a": {"b": {}}}).is_empty())
    tree["e4"].rename_key_("e5", "open game")
    print(sorted(tree["e4"].keys()), tree.pop("c4")["score"].item(), "c4" in tree)
