"""A learner and its actors exchange observations and weights through shared memory."""

import torch
import torch.multiprocessing as mp
from tensordict import TensorDict
from torch import nn


def act(weights, transitions, lock, actor):
    net = nn.Linear(3, 2)
    with lock, weights.to_module(net), torch.no_grad():
        for step in range(4):
            observation = torch.full((3,), float(step))
            transitions[actor, step] = TensorDict({"observation": observation, "action": net(observation)}, [])
    transitions["count"][actor] += 4


def main():
    torch.manual_seed(0)
    net = nn.Linear(3, 2)
    nn.init.constant_(net.weight, 0.5)
    nn.init.zeros_(net.bias)
    weights = TensorDict.from_module(net).data.clone().share_memory_()
    print(weights.is_shared(), weights.is_locked, sorted(weights.keys()))

    transitions = TensorDict(
        {
            "observation": torch.zeros(2, 4, 3),
            "action": torch.zeros(2, 4, 2),
            "count": torch.zeros(2, 4, dtype=torch.int64),
        },
        batch_size=[2, 4],
    ).share_memory_()
    print(transitions.is_shared(), transitions["action"].is_shared(), transitions.is_memmap())

    context = mp.get_context("fork")
    lock = context.Lock()
    actors = [context.Process(target=act, args=(weights, transitions, lock, i)) for i in range(2)]
    for actor in actors:
        actor.start()
    for actor in actors:
        actor.join()
    print(transitions["action"].tolist())
    print(transitions["count"].tolist(), transitions[0].is_shared())

    weights.apply_(lambda w: w.fill_(1.0))
    print(weights["weight"].tolist(), weights["bias"].is_shared())
    weights.update_(TensorDict({"weight": torch.zeros(2, 3), "bias": torch.ones(2)}, []))
    print(weights["weight"].sum().item(), weights["bias"].tolist())
    try:
        weights.del_("bias")
    except RuntimeError:
        print("locked")
    with weights.unlock_():
        weights["version"] = torch.tensor(3)
    print("version" in weights, weights.is_locked)
