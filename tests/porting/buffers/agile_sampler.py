"""A DataLoader over an iterable dataset of a replay buffer, and multi-agent batches that algorithms take apart."""

import torch
from tensordict import TensorDict, from_module
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

AGENTS = ("wolf", "sheep")


class ReplayDataset(IterableDataset):
    def __init__(self, storage, batch_size):
        self.storage, self.batch_size = storage, batch_size

    def __iter__(self):
        yield self.storage[torch.randint(len(self.storage), (self.batch_size,))]


def collate(batch):
    return TensorDict.stack(batch)


class Actor(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(3, 4)
        self.head = nn.Linear(4, 2)

    def forward(self, obs):
        return self.head(self.encoder(obs).relu())


def soft_update(source, target, tau=0.1):
    target.update_(target.lerp(source, tau))


def main():
    n = 12
    storage = TensorDict(
        {
            "obs": {a: torch.randn(n, 3) for a in AGENTS},
            "action": {a: torch.randint(2, (n, 1)) for a in AGENTS},
            "reward": {a: torch.ones(n, 1) * (1 if a == "wolf" else -1) for a in AGENTS},
            "done": {a: torch.zeros(n, 1) for a in AGENTS},
        },
        batch_size=[n],
    )
    loader = DataLoader(ReplayDataset(storage, 5), batch_size=1, collate_fn=collate)
    for batch in loader:
        print(batch.batch_size, batch["obs", "wolf"].shape)
        batch = batch.squeeze(0)
        print(batch.batch_size, sorted(batch["reward"].keys()))

    rewards = {agent: value for agent, value in batch["reward"].items()}
    print({agent: value.sum().item() for agent, value in rewards.items()})
    joint = torch.cat(list(batch["obs"].values()), -1)
    print(joint.shape, len(batch["obs"]), isinstance(batch["obs"], TensorDict))

    actors = {agent: Actor() for agent in AGENTS}
    actions = TensorDict({a: net(batch["obs"][a]).argmax(-1, keepdim=True) for a, net in actors.items()})
    print(actions.batch_size, actions["wolf"].dtype, actions.shape)

    net, target = Actor(), Actor()
    params, target_params = from_module(net).detach(), from_module(target).detach().clone().lock_()
    before = target_params["encoder", "weight"].clone()
    soft_update(params, target_params, 0.5)
    expected = (before + net.encoder.weight.detach()) / 2
    print(torch.allclose(target_params["encoder", "weight"], expected), target_params.is_locked)
    encoder = from_module(net.encoder).detach()
    print(sorted(encoder.keys()), encoder["bias"].requires_grad)

    mask = TensorDict({a: torch.ones(5, dtype=torch.bool) for a in AGENTS}, [5])
    mask["wolf"][2] = False
    print(mask["wolf"].logical_and(mask["sheep"]).tolist(), batch[mask["wolf"]].batch_size)
    moved = batch.to(torch.device("cpu"))
    print(moved.device, moved["obs"].device, batch.device)
    halves = batch.to(dtype=torch.float16)
    print(halves["obs", "sheep"].dtype, halves["action", "sheep"].dtype)
