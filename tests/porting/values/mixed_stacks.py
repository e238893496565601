"""Stacks of TensorDicts that differ in shapes and keys: lazy, densified, padded, with values that are missing."""

import torch
from tensordict import (
    LazyStackedTensorDict,
    TensorDict,
    dense_stack_tds,
    lazy_stack,
    maybe_dense_stack,
    pad_sequence,
    set_lazy_legacy,
    stack,
)


def agent(observation, action, **more):
    return TensorDict({"observation": torch.ones(observation), "action": torch.zeros(action), **more}, [])


def main():
    agents = [agent(3, 2), agent(5, 2, camera=torch.zeros(2, 2)), agent(4, 2)]
    lazy = lazy_stack(agents)
    print(type(lazy).__name__, lazy.batch_size, sorted(lazy.keys()))
    print(lazy["action"].shape, [tuple(o.shape) for o in lazy.get("observation", as_list=True)])
    print(sorted(lazy[1].keys()), lazy[1] is agents[1], lazy.get("camera", None))
    try:
        lazy["camera"]
    except KeyError:
        print("not in all")
    try:
        torch.stack(agents)
    except RuntimeError:
        print("keys or shapes differ")

    maybe = maybe_dense_stack([agent(3, 2), agent(3, 2)])
    print(type(maybe).__name__, type(maybe_dense_stack(agents)).__name__, maybe["observation"].shape)
    shared = [a.select("action") for a in agents]
    print(type(stack(shared)).__name__, dense_stack_tds(shared, 0)["action"].shape)

    lazy["reward"] = torch.tensor([1.0, 2.0, 3.0])
    print([a["reward"].item() for a in agents], lazy["reward"].tolist())
    lazy[0]["reward"] = torch.tensor(9.0)
    print(lazy["reward"].tolist(), lazy[[0, 2]]["reward"].tolist(), lazy[1:].batch_size)
    grown = lazy.apply(lambda x: x + 1)
    print(
        type(grown).__name__,
        grown["action"][0].tolist(),
        [o.sum().item() for o in grown.get("observation", as_list=True)],
    )
    print(
        lazy.select("action", "reward").contiguous()["reward"].shape, type(lazy.select("action").contiguous()).__name__
    )
    lazy.insert(1, agent(1, 2, reward=torch.tensor(0.5)))
    lazy.append(agent(7, 2, reward=torch.tensor(0.25)))
    print(lazy.batch_size, [len(o) for o in lazy.get("observation", as_list=True)], lazy["reward"].tolist())
    print(lazy.get("observation", as_padded_tensor=True, padding_value=-1).shape)

    time = [lazy_stack([agent(3, 2), agent(4, 2)]) for _ in range(3)]
    both = lazy_stack(time, 1)
    print(both.batch_size, both.stack_dim, both[0].batch_size, both[0]["observation"].shape)
    dense_time = torch.stack(list(time), 0)
    print(type(dense_time).__name__, dense_time.batch_size, dense_time[:, 0]["observation"].shape)
    print(type(LazyStackedTensorDict(*time[0].unbind(0), stack_dim=0)).__name__)

    episodes = [TensorDict({"obs": torch.full((n, 2), float(n)), "n": {"r": torch.ones(n)}}, [n]) for n in (2, 4, 3)]
    padded = pad_sequence(episodes)
    print(padded.batch_size, padded["n", "r"].sum(-1).tolist(), padded["obs"][0, :, 0].tolist())
    joined = torch.cat(episodes)
    print(joined.batch_size, [part.shape[0] for part in joined.split([2, 4, 3])])
    ragged = lazy_stack(episodes)
    print(ragged.batch_size, ragged[2].batch_size, [e.batch_size[0] for e in ragged.unbind(0)])
    with set_lazy_legacy(True):
        print(type(torch.stack([agent(3, 2), agent(3, 2)])).__name__)
    print(type(torch.stack([agent(3, 2), agent(3, 2)])).__name__)
    print(len(lazy), [a["action"].shape[0] for a in lazy], lazy.numel() > 0)
