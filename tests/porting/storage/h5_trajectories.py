"""Trajectories in an HDF5 file, written from simulations and read in minibatches."""

import torch
from tensordict import PersistentTensorDict, TensorDict


def simulate(n, steps):
    position = torch.arange(n).float()[:, None] + torch.arange(steps).float() / 10
    return TensorDict(
        {
            "observation": {"position": position[..., None], "velocity": torch.full((n, steps, 1), 0.1)},
            "action": torch.ones(n, steps, 2),
            "reward": position.sin(),
        },
        batch_size=[n, steps],
    )


def main():
    source = simulate(6, 5)
    stored = PersistentTensorDict.from_dict(source, "simulations.h5")
    print(type(stored).__name__, stored.batch_size, sorted(stored.keys()))
    print(sorted(str(key) for key in stored.keys(include_nested=True, leaves_only=True)))
    print(type(stored["observation", "position"]).__name__, stored["observation", "position"].shape)

    minibatch = stored[torch.tensor([0, 3, 5])]
    print(tuple(minibatch.shape), minibatch["reward"].shape, minibatch["reward"][1, 0].item() == source["reward"][3, 0])
    stored["success"] = torch.zeros(6, 5, dtype=torch.bool)
    stored.set_at_("success", torch.ones(5, dtype=torch.bool), 2)
    print(stored["success"].any(1).tolist(), stored["success"].dtype)
    stored.set(("observation", "goal"), torch.randn(6, 5, 3))
    print(sorted(stored["observation"].keys()), ("observation", "goal") in stored.keys(True))

    dense = stored.to_tensordict()
    print(type(dense).__name__, torch.equal(dense["reward"], source["reward"]))
    stored.close()

    again = PersistentTensorDict(filename="simulations.h5", batch_size=[6, 5], mode="r")
    print(again["success"].sum().item(), again.get(("observation", "velocity")).mean().item() > 0)
    subset = again.to_tensordict().select("action", "reward")
    print(sorted(subset.keys()), subset["action"].shape)
    moments = again.apply(lambda x: x.float().mean((0, 1)), batch_size=[])
    print(round(moments["reward"].item(), 4), moments["action"].tolist())
    again.close()

    by_method = simulate(3, 2).to_h5("method.h5")
    print(by_method.batch_size, by_method["action"].sum().item())
    print(len(by_method))
    for i in range(len(by_method)):
        print(i, tuple(by_method[i]["observation"]["position"].shape))
    by_method.close()
