"""What a collector yields: frames by environment and time, weights shared with its workers, and what a learner does."""

import torch
from tensordict import TensorDict, from_module
from torch import nn

ENVS, STEPS = 3, 5


def collected(policy, batch):
    frames = []
    obs = torch.arange(float(ENVS)).unsqueeze(-1).expand(ENVS, 2) + batch
    for step in range(STEPS):
        td = TensorDict({"observation": obs, "step_count": torch.full((ENVS, 1), step)}, batch_size=[ENVS])
        td["action"] = policy(td["observation"])
        obs = obs * 0.5 + td["action"].mean(-1, keepdim=True)
        done = torch.tensor([step == STEPS - 1, step == 2, False]).unsqueeze(-1)
        td["next"] = {"observation": obs, "reward": obs.sum(-1, keepdim=True), "done": done, "terminated": done.clone()}
        td["collector"] = {"traj_ids": torch.arange(ENVS) + ENVS * batch}
        td["task"] = [f"maze-{i}" for i in range(ENVS)]
        frames.append(td)
    data = torch.stack(frames, -1)
    data.refine_names(..., "time")
    return data


def returns(data, gamma=0.9):
    total = torch.zeros(ENVS, 1)
    found = []
    for td in reversed(data.unbind(-1)):
        total = td["next", "reward"] + gamma * total * ~td["next", "done"]
        found.append(total)
    return torch.stack(found[::-1], 1)


def main():
    torch.manual_seed(0)
    policy = nn.Linear(2, 2)
    nn.init.constant_(policy.weight, 0.25)
    nn.init.zeros_(policy.bias)
    weights = from_module(policy).share_memory_()
    print(weights.is_shared(), policy.weight.is_shared(), weights["weight"] is policy.weight, weights.is_locked)
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.01)
    for batch in range(2):
        with torch.no_grad():
            data = collected(policy, batch)
        print(data.batch_size, data.names, sorted(data.keys(True, True), key=str)[:3], data["task"][0][0])
        data["value_target"] = returns(data)
        flat = data.reshape(-1)
        kept = flat[~flat["next", "done"].squeeze(-1)]
        print(flat.batch_size, kept.batch_size, kept["collector", "traj_ids"].unique().tolist())
        value = torch.vmap(lambda td: (td["observation"] * 0.1).sum())(kept)
        print(value.shape, [round(x, 3) for x in value[:3].tolist()])
        for part in kept.exclude("collector", "task").split(4):
            loss = (policy(part["observation"]).mean(-1, keepdim=True) - part["value_target"]).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(round(weights["weight"].sum().item(), 4), weights["weight"].is_shared(), weights["weight"].requires_grad)
        last = data[:, -1].select("observation", ("next", "done"), ("next", "reward"))
        print(last.batch_size, last["next"].batch_size, last["next", "done"].squeeze(-1).tolist())
    stats = kept["next"].select("reward").mean(0)
    print(round(stats["reward"].item(), 4), sorted(kept.flatten_keys(".").keys())[:4])


if __name__ == "__main__":
    main()
