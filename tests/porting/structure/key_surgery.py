"""Adapt batches of one library to the keys of another: rename, split, merge, flatten, replace, and put back."""

import torch
from tensordict import TensorDict, TensorDictBase, merge_tensordicts


def collected(steps):
    return TensorDict(
        {
            "observation": {"pixels": torch.arange(steps * 4.0).view(steps, 4), "vector": torch.ones(steps, 2)},
            "action": torch.arange(steps),
            "next": {"observation": {"pixels": torch.zeros(steps, 4), "vector": torch.zeros(steps, 2)}},
            "task": "reach",
        },
        batch_size=[steps],
        names=["time"],
    )


def show(td):
    return sorted(".".join(key) if isinstance(key, tuple) else key for key in td.keys(True, True))


def shapes(name, leaf):
    return leaf.unsqueeze(0) if name.endswith("pixels") else leaf[None]


def main():
    td = collected(3)
    print(show(td), td.names)

    inputs, actions, rest = td.split_keys({("observation", "pixels"): "x", ("observation", "vector"): "v"}, ["action"])
    print(show(inputs), show(actions), show(rest), inputs.batch_size)
    inputs["x"] += 1
    print(td["observation", "pixels"][0].tolist(), sorted(td.keys()))
    first, others = collected(3).split_keys([("next", "observation", "pixels")], strict=True)
    print(show(first), show(others), first["next"].batch_size)
    try:
        td.split_keys({"reward": "r"})
    except KeyError:
        print("no such key:", "reward" in td)
    kept = td.clone()
    parts = kept.split_keys(["action"], inplace=True)
    print(parts[-1] is kept, "action" in kept, parts[0]["action"].tolist())

    flat = td.flatten_keys("/")
    print(show(flat), flat.names, flat["observation/pixels"] is td["observation", "pixels"])
    back = flat.unflatten_keys("/")
    print((back == td).all(), show(back) == show(td))
    print(list(td.select("action", ("next", "observation")).keys(True, sort=True)))
    print([key for key, _ in td.items(include_nested=True, leaves_only=True, sort=True)])

    renamed = td.clone(False)
    renamed.rename_key_("action", ("policy", "action"))
    renamed.rename_key_(("observation", "pixels"), "image")
    print(show(renamed), "action" in td)

    replaced = td.replace(action=td["action"] * 2)
    print(replaced["action"].tolist(), td["action"].tolist(), replaced["task"])
    replaced = td.replace({"next": {"observation": {"vector": torch.full((3, 2), 5.0)}}})
    print(replaced["next", "observation", "vector"].sum().item(), td["next", "observation", "vector"].sum().item())

    merged = merge_tensordicts(inputs, actions, TensorDict({"reward": torch.zeros(3)}, [3]))
    print(show(merged), merged.batch_size)

    stacked = td.select("observation", "action").named_apply(shapes, nested_keys=False, batch_size=[1, 3])
    print(stacked["observation", "pixels"].shape, stacked["action"].shape, stacked.batch_size)
    norms = td.select("observation").apply(lambda x: x.norm(dim=-1), filter_empty=True)
    print([round(v, 3) for v in norms["observation", "vector"].tolist()])
    seen = []
    nothing = td.named_apply(lambda name, leaf: seen.append(name), nested_keys=True, filter_empty=True)
    print(nothing, sorted(map(str, seen)))

    empty = td.empty(recurse=True)
    print(
        sorted(empty.keys()), list(empty["next"].keys(True, True)), empty.batch_size, isinstance(empty, TensorDictBase)
    )
    blank = torch.zeros_like(td)
    print(blank["action"].tolist(), blank["task"], torch.ones_like(td)["observation", "vector"].sum().item())
    full = td.exclude("task").new_full((2, 3), 4)
    print(full.batch_size, full["observation", "pixels"].shape, full["action"].unique().tolist())
    print(td.get_item_shape(("observation", "pixels")), td.get("missing", "nothing"), td.pop("task"), show(td))
    td.set_at_("action", torch.tensor([9, 8]), slice(0, 2))
    print(td["action"].tolist(), td.get_at("action", -1).item())
