"""A rollout buffer of vectorised environments: preallocated, GAE, minibatches, padded episodes with hidden states."""

from collections import OrderedDict

import torch
from tensordict import TensorDict, TensorDictBase


class RolloutBuffer:
    def __init__(self, capacity, num_envs, obs_shapes, hidden=None, gamma=0.99, gae_lambda=0.95):
        self.capacity, self.num_envs, self.gamma, self.gae_lambda = capacity, num_envs, gamma, gae_lambda
        self.pos, self.full = 0, False
        shape = (capacity, num_envs)
        source = OrderedDict()
        source["observations"] = OrderedDict((k, torch.zeros(*shape, *s)) for k, s in obs_shapes.items())
        source["actions"] = torch.zeros(*shape, 1)
        source.update({k: torch.zeros(shape) for k in ("rewards", "values", "log_probs", "advantages", "returns")})
        source["dones"] = torch.zeros(shape, dtype=torch.bool)
        if hidden is not None:
            source["hidden_states"] = {k: torch.zeros(*shape, *s) for k, s in hidden.items()}
        self.buffer = TensorDict(source, batch_size=list(shape), device="cpu")

    def add(self, **step):
        if self.pos == self.capacity:
            raise ValueError("the buffer is full")
        current = OrderedDict(step)
        current["actions"] = torch.as_tensor(step["actions"]).reshape(self.num_envs, -1)
        self.buffer[self.pos] = TensorDict(current, batch_size=[self.num_envs], device="cpu")
        self.pos += 1
        self.full = self.pos == self.capacity

    def compute_returns_and_advantages(self, last_value, last_done):
        buffer, advantage = self.buffer, torch.zeros(self.num_envs)
        advantages = torch.zeros(self.pos, self.num_envs)
        for t in reversed(range(self.pos)):
            last = t == self.pos - 1
            alive = 1.0 - (last_done if last else buffer["dones"][t + 1]).float()
            following = last_value if last else buffer["values"][t + 1]
            delta = buffer["rewards"][t] + self.gamma * following * alive - buffer["values"][t]
            advantage = delta + self.gamma * self.gae_lambda * alive * advantage
            advantages[t] = advantage
        buffer["advantages"][: self.pos] = advantages
        buffer["returns"][: self.pos] = advantages + buffer["values"][: self.pos]

    def get_tensor_batch(self, batch_size=None, device="cpu"):
        valid = self.buffer[: self.pos]
        assert isinstance(valid, TensorDictBase)
        total = self.pos * self.num_envs
        flat = valid.reshape(total).to(device)
        if batch_size is None or batch_size >= total:
            return flat
        return flat[torch.randperm(total)[:batch_size]]

    def minibatches(self, batch_size):
        flat = self.buffer[: self.pos].view(-1)
        for indices in torch.randperm(flat.shape[0]).split(batch_size):
            yield flat[indices]

    def padded_episodes(self):
        """All episodes, in rows of one length, with a mask."""
        valid = self.buffer[: self.pos].select("observations", "actions", "hidden_states").clone()
        valid["pad_mask"] = torch.ones(valid.batch_size, dtype=torch.bool)
        parts = []
        for env in range(self.num_envs):
            start = 0
            ends = self.buffer["dones"][: self.pos, env].nonzero().squeeze(-1).tolist()
            for end in [*ends, self.pos - 1]:
                if end >= start:
                    parts.append(valid[start : end + 1, env])
                start = end + 1
        longest = max(len(part) for part in parts)
        rows = []
        for part in parts:
            padding = part[:1].clone().zero_().expand(longest - len(part))
            rows.append(torch.cat([part, padding], 0) if len(padding) else part)
        return torch.stack(rows)


def main():
    buffer = RolloutBuffer(6, 2, {"image": (2, 2), "speed": (1,)}, hidden={"h": (1, 3)})
    print(buffer.buffer.batch_size, buffer.buffer["observations"].batch_size, buffer.buffer.device)
    for t in range(6):
        buffer.add(
            observations={"image": torch.full((2, 2, 2), float(t)), "speed": torch.tensor([[t], [t + 10]]).float()},
            actions=[t % 3, (t + 1) % 3],
            rewards=torch.tensor([1.0, 0.5]),
            dones=torch.tensor([t == 2, t == 3]),
            values=torch.tensor([0.1 * t, 0.2]),
            log_probs=torch.tensor([-0.5, -0.7]),
            hidden_states={"h": torch.full((2, 1, 3), t / 10)},
        )
    try:
        buffer.add(actions=[0, 0])
    except ValueError as error:
        print(error, buffer.full)
    buffer.compute_returns_and_advantages(torch.tensor([0.3, 0.3]), torch.tensor([False, True]))
    print([[round(x, 4) for x in row] for row in buffer.buffer["advantages"].tolist()])
    print([round(x, 4) for x in buffer.buffer["returns"].sum(0).tolist()])

    flat = buffer.get_tensor_batch()
    print(flat.batch_size, flat["observations", "image"].shape, flat["actions"].squeeze(-1).tolist())
    sample = buffer.get_tensor_batch(5)
    print(sample.batch_size, sample["hidden_states"]["h"].shape)
    sizes = [(tuple(batch.shape), batch["returns"].shape) for batch in buffer.minibatches(5)]
    print(sizes)

    episodes = buffer.padded_episodes()
    print(
        episodes.batch_size,
        episodes["pad_mask"].sum(1).tolist(),
        episodes["observations", "speed"].squeeze(-1).tolist(),
    )
    print(episodes["hidden_states", "h"][:, 0, 0, 0].tolist())
    arrays = buffer.buffer[:2].numpy() if hasattr(buffer.buffer, "numpy") else {}
    print(type(arrays).__name__, sorted(arrays), arrays["observations"]["speed"].shape)
    state = {k: v for k, v in buffer.__dict__.items() if not isinstance(v, TensorDict)}
    print(sorted(state))
