"""Names of batch dimensions: set, refined, followed through shapes, indices, stacks and time."""

import torch
from tensordict import TensorDict, lazy_stack


def rollout(envs, steps):
    return TensorDict(
        {
            "obs": torch.arange(envs * steps * 2).view(envs, steps, 2).float(),
            "next": {"reward": torch.ones(envs, steps, 1)},
        },
        batch_size=[envs, steps],
        names=["env", "time"],
    )


def main():
    td = rollout(3, 5)
    print(td.names, td["next"].names)
    print(td[0].names, td[:, 1].names, td[:, None].names, td[..., :2].names, td[[0, 2]].names)
    print(td.transpose(0, 1).names, td.permute(1, 0).names, td.unsqueeze(-1).names, td.unsqueeze(0).squeeze(0).names)
    print(td.view(-1).names, td.reshape(15).names, td.flatten(0, 1).names)
    print([part.names for part in td.split(2, 1)], td.unbind(1)[0].names)
    print(torch.stack([td, td], 0).names, torch.stack([td, td], 2).names, torch.cat([td, td], 1).names)
    print(lazy_stack([td, td]).names, td.expand(2, 3, 5).names, td.clone().names)

    td.names = ["environment", "step"]
    print(td.names, td["next"].names)
    td.names = None
    print(td.names, td["next"].names)
    plain = TensorDict({"a": torch.zeros(2, 3, 4)}, [2, 3, 4])
    print(plain.refine_names(None, "time", ...).names)
    try:
        plain.names = ["a", "a", "b"]
    except ValueError:
        print("names are unique")
    try:
        plain.names = ["a"]
    except (ValueError, RuntimeError):
        print("three names are needed")

    named = rollout(2, 4)
    time = named.names.index("time")
    returns = named["next", "reward"].flip(time).cumsum(time).flip(time)
    print(returns[..., 0].tolist())
    means = named.mean(dim=time)
    print(means.batch_size, means.names, means["obs"].shape)
    last = named.select("obs")[:, -1]
    print(last.names, last["obs"].tolist())
    named["mask"] = torch.zeros(2, 4, dtype=torch.bool)
    named["extra"] = TensorDict({"z": torch.zeros(2, 4)}, [2, 4])
    print(named["extra"].names, named.batch_dims)
    merged = torch.cat([named, rollout(2, 4).set("mask", named["mask"]).set("extra", named["extra"].clone())], dim=time)
    print(merged.batch_size, merged.names)
    windows = torch.stack([merged[:, i : i + 3] for i in range(0, 6, 3)], 1)
    print(windows.batch_size, windows.names)
    shared = named.select("obs").memmap("named")
    print(shared.names, TensorDict.load_memmap("named").batch_size)
