"""A small vectorised environment and collector in TensorDicts: reset, step, rollouts, splitting into episodes."""

import torch
from tensordict import TensorDict, TensorDictBase, pad
from tensordict.utils import expand_as_right


class Pendulum:
    def __init__(self, batch_size=(4,), horizon=6):
        self.batch_size, self.horizon = torch.Size(batch_size), horizon
        self.params = TensorDict(
            {"dt": torch.full(batch_size, 0.1), "limits": {"speed": torch.full(batch_size, 2.0)}}, batch_size
        )

    def reset(self, td=None) -> TensorDictBase:
        start = torch.linspace(-1, 1, self.batch_size.numel()).view(self.batch_size)
        fresh = TensorDict(
            {
                "observation": {"angle": start, "speed": torch.zeros(self.batch_size)},
                "step_count": torch.zeros((*self.batch_size, 1), dtype=torch.int64),
                "done": torch.zeros((*self.batch_size, 1), dtype=torch.bool),
            },
            self.batch_size,
        )
        if td is None or "_reset" not in td.keys():
            return fresh
        return fresh.where(td["_reset"].squeeze(-1), td.exclude("_reset", "next", "action"))

    def step(self, td):
        angle, speed = td["observation", "angle"], td["observation", "speed"]
        dt, limit = self.params["dt"], self.params["limits", "speed"]
        speed = (speed + dt * (-angle.sin() + td["action"].squeeze(-1))).clamp(-limit, limit)
        count = td["step_count"] + 1
        following = TensorDict(
            {
                "observation": {"angle": angle + dt * speed, "speed": speed},
                "reward": -(angle**2).unsqueeze(-1),
                "step_count": count,
                "done": (count >= self.horizon) | (angle.abs() > 0.99).unsqueeze(-1) & (count > 2),
            },
            td.batch_size,
        )
        td["next"] = following
        return td


def step_mdp(td):
    following = td["next"].exclude("reward")
    return following.set("action", torch.zeros_like(td["action"])).exclude("action")


def collect(env, policy, frames):
    td, rows = env.reset(), []
    for _ in range(frames):
        td["action"] = policy(td)
        td = env.step(td)
        rows.append(td.clone())
        td = step_mdp(td)
        if td["done"].any():
            td = env.reset(td.set("_reset", td["done"].clone()))
    return torch.stack(rows, 1).refine_names(..., "time")


def main():
    env = Pendulum()
    policy = lambda td: 0.3 * td["observation", "angle"].unsqueeze(-1)  # noqa: E731
    data = collect(env, policy, 10)
    print(data.batch_size, data.names, sorted(map(str, data.keys(True, True))))
    print(data["next", "done"].squeeze(-1).int().tolist())
    print(data["step_count"].squeeze(-1).tolist())
    print([round(x, 4) for x in data["next", "reward"].sum(1).squeeze(-1).tolist()])

    flat = data.reshape(-1)
    traj = data["next", "done"].roll(1, 1)
    traj[:, 0] = True
    ids = traj.reshape(-1).cumsum(0) - 1
    data["traj"] = ids.view(data.batch_size)
    lengths = ids.bincount().tolist()
    parts = flat.split(lengths)
    print(lengths, [p["step_count"].max().item() for p in parts])
    longest = max(lengths)
    padded = torch.stack(
        [pad(p.set("mask", torch.ones(len(p), dtype=torch.bool)), [0, longest - len(p)]) for p in parts]
    )
    print(padded.batch_size, padded["mask"].sum(-1).tolist(), padded["next", "reward"].shape)
    weights = expand_as_right(padded["mask"], padded["next", "reward"])
    print(
        weights.shape,
        round((padded["next", "reward"] * weights).sum().item(), 4) == round(data["next", "reward"].sum().item(), 4),
    )

    gamma, returns = 0.9, torch.zeros(len(parts))
    for t in reversed(range(longest)):
        returns = padded["next", "reward"][:, t, 0] * padded["mask"][:, t] + gamma * returns
    print([round(x, 4) for x in returns.tolist()])
    shuffled = flat[torch.randperm(len(flat))]
    print(sum(batch["action"].numel() for batch in shuffled.split(8)), env.params.batch_size)
    tensor_only = data.select("action", ("next", "reward")).to(torch.float64)
    print(tensor_only["next", "reward"].dtype, tensor_only.names)
    folded = data.apply(lambda x: x.float().mean(), batch_size=[])
    print(folded.batch_size, sorted(folded.keys()), round(folded["next", "step_count"].item(), 3))
