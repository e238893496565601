"""Circular, n-step and prioritised replay over one TensorDict, in the way of libraries of evolutionary RL."""

from collections import deque

import numpy as np
import torch
from tensordict import TensorDict, is_tensor_collection


class ReplayBuffer:
    def __init__(self, max_size, device="cpu", dtype=torch.float32):
        self.max_size, self.device, self.dtype = max_size, device, dtype
        self.counter, self.cursor, self.size = 0, 0, 0
        self._storage = None
        self.initialized = False

    def __len__(self):
        return self.size

    @staticmethod
    def _rows(data, n):
        """Gives every entry a batch dimension, and numbers a feature dimension."""
        for key, item in data.items():
            if is_tensor_collection(item):
                data[key] = ReplayBuffer._rows(item, n)
            elif item.ndim == 0 or item.shape[0] != n:
                data[key] = item.unsqueeze(0)
        for key, item in data.items():
            if not is_tensor_collection(item) and item.ndim == 1:
                data[key] = item.unsqueeze(-1)
        data.batch_size = [n]
        return data

    def _allocate(self, data):
        self._storage = data[0].expand((self.max_size, *data[0].shape)).clone().zero_()
        self.initialized = True

    def add(self, data):
        data = data.to(self.device)
        n = data.shape[0] if data.batch_dims else 1
        data = self._rows(data.clone(), n)
        if not self.initialized:
            self._allocate(data)
        start, stop = self.cursor, self.cursor + n
        if stop <= self.max_size:
            self._storage[start:stop] = data
        else:
            first = self.max_size - start
            self._storage[start:] = data[:first]
            self._storage[: n - first] = data[first:]
        self.cursor = stop % self.max_size
        self.size = min(self.size + n, self.max_size)
        self.counter += n

    def sample(self, batch_size, return_idx=False):
        indices = torch.randperm(self.size)[:batch_size]
        batch = self._storage[indices]
        if return_idx:
            batch["idxs"] = indices
        return batch.to(self.device)

    def clear(self):
        self.cursor = self.size = 0
        self._storage = None
        self.initialized = False


class NStepBuffer(ReplayBuffer):
    def __init__(self, max_size, n_step=3, gamma=0.9):
        super().__init__(max_size)
        self.n_step, self.gamma = n_step, gamma
        self.window = deque(maxlen=n_step)

    def add(self, data):
        self.window.append(data)
        if len(self.window) < self.n_step:
            return None
        super().add(self._fold())
        return self.window[0]

    def _fold(self):
        first = self.window[0].clone()
        alive = 1.0 - first["done"].float()
        for i, later in enumerate(list(self.window)[1:], 1):
            first["reward"] += self.gamma**i * later["reward"] * alive
            first["next_obs"] = torch.where(alive.bool()[:, None], later["next_obs"], first["next_obs"])
            first["done"] = torch.maximum(first["done"], later["done"])
            alive = alive * (1.0 - later["done"].float())
        return first

    def sample_from_indices(self, indices):
        return self._storage[indices]


class PrioritisedBuffer(ReplayBuffer):
    def __init__(self, max_size, alpha=0.6):
        super().__init__(max_size)
        self.priorities, self.alpha, self.max_priority = np.zeros(max_size), alpha, 1.0

    def add(self, data):
        rows = (np.arange(data.shape[0]) + self.cursor) % self.max_size
        super().add(data)
        self.priorities[rows] = self.max_priority**self.alpha

    def sample(self, batch_size, beta=0.4):
        p = self.priorities[: self.size] / self.priorities[: self.size].sum()
        indices = torch.from_numpy(np.random.default_rng(0).choice(self.size, batch_size, p=p))
        batch = self._storage[indices]
        weights = torch.as_tensor((self.size * p[indices.numpy()]) ** -beta, dtype=torch.float32)
        batch.update({"weights": weights / weights.max(), "idxs": indices})
        return batch

    def update_priorities(self, idxs, priorities):
        self.priorities[idxs.cpu().numpy()] = np.asarray(priorities) ** self.alpha
        self.max_priority = max(self.max_priority, float(max(priorities)))


def steps(n, start=0):
    i = torch.arange(start, start + n).float()
    return TensorDict(
        {
            "obs": torch.stack([i, -i], -1),
            "action": i.long() % 2,
            "reward": i,
            "next_obs": torch.stack([i + 1, -i - 1], -1),
            "done": (i % 4 == 3).float(),
        },
        batch_size=[n],
    )


def main():
    buffer = ReplayBuffer(6)
    buffer.add(steps(4))
    print(len(buffer), buffer.cursor, buffer._storage.batch_size, buffer._storage["reward"].shape)
    buffer.add(steps(4, 4))
    print(len(buffer), buffer.cursor, buffer._storage["reward"].squeeze(-1).tolist())
    single = TensorDict(
        {
            "obs": torch.zeros(2),
            "action": torch.tensor(1),
            "reward": torch.tensor(9.0),
            "next_obs": torch.ones(2),
            "done": torch.tensor(0.0),
        }
    )
    buffer.add(single)
    print(buffer.counter, buffer._storage["action"].dtype, buffer._storage["obs"][2].tolist())
    batch = buffer.sample(3, return_idx=True)
    print(
        batch.batch_size,
        sorted(batch.keys()),
        (batch["reward"] == buffer._storage["reward"][batch["idxs"]]).all().item(),
    )
    obs, actions, rewards = (batch[key] for key in ("obs", "action", "reward"))
    print(obs.shape, actions.shape, rewards.shape)

    folded = NStepBuffer(10)
    oldest = [folded.add(steps(2, 2 * i)) for i in range(4)]
    print([None if td is None else td["reward"].tolist() for td in oldest])
    print(len(folded), [[round(x, 3) for x in row] for row in folded._storage["reward"][:4].tolist()])
    print(
        folded.sample_from_indices(torch.tensor([0, 3]))["next_obs"].tolist(), folded._storage["done"][:4, 0].tolist()
    )

    nested = ReplayBuffer(4)
    for i in range(5):
        nested.add(
            TensorDict(
                {
                    "obs": {"image": torch.full((1, 2, 2), i, dtype=torch.uint8), "speed": torch.ones(1, 1) * i},
                    "reward": torch.ones(1, 1),
                },
                batch_size=[1],
            )
        )
    print(nested._storage["obs", "image"][:, 0, 0].tolist(), nested._storage["obs"].batch_size, len(nested))

    ranked = PrioritisedBuffer(8)
    ranked.add(steps(5))
    ranked.update_priorities(torch.tensor([0, 1]), [5.0, 2.0])
    batch = ranked.sample(4)
    print(sorted(batch.keys()), batch["weights"].max().item(), batch["idxs"].tolist())
    buffer.clear()
    print(len(buffer), buffer._storage)
