"""A ring of episodes of different lengths: a lazy stack whose rows are replaced by index."""

import torch
from tensordict import LazyStackedTensorDict, TensorDict, lazy_stack


def episode(number, length):
    return TensorDict(
        {
            "tokens": torch.arange(length) + 10 * number,
            "extra": {"scores": torch.ones(length) * number},
            "length": torch.tensor(length),
        },
        [],
    )


class EpisodeRing:
    def __init__(self, capacity):
        self.capacity, self.cursor, self.data = capacity, 0, None

    def extend(self, episodes):
        batch = lazy_stack(episodes)
        if self.data is None:
            self.data = lazy_stack([episodes[0].clone() for _ in range(self.capacity)])
        rows = (torch.arange(len(batch)) + self.cursor) % self.capacity
        self.data[rows] = batch
        self.cursor = (self.cursor + len(batch)) % self.capacity
        return rows.tolist()

    def sample(self, rows):
        return self.data[rows]


def main():
    ring = EpisodeRing(4)
    print(ring.extend([episode(1, 3), episode(2, 1)]), ring.data["length"].tolist())
    print(ring.extend([episode(3, 2), episode(4, 5), episode(5, 4)]), ring.data["length"].tolist())
    print([t.tolist() for t in ring.data.get("tokens", as_list=True)])
    print([s.tolist() for s in ring.data.get(("extra", "scores"), as_list=True)])
    batch = ring.sample(torch.tensor([1, 3, 1]))
    print(isinstance(batch, LazyStackedTensorDict), batch["length"].tolist(), batch[0]["tokens"].tolist())
    ring.data[[0, 1]] = ring.data[[2, 2]].clone()
    print(ring.data["length"].tolist(), ring.data[0]["tokens"].tolist())
    ring.data[2]["tokens"][0] = -1
    print(ring.data[0]["tokens"].tolist(), ring.data[2]["tokens"].tolist())
    ring.data["seen"] = torch.zeros(4, dtype=torch.bool)
    ring.data[2:]["seen"] = torch.ones(2, dtype=torch.bool)
    print(ring.data["seen"].tolist())
    for wrong in (0, slice(0, 1)):
        try:
            ring.data[wrong] = episode(9, 9).set("seen", torch.tensor(True)).expand(() if wrong == 0 else (1,))
        except (RuntimeError, ValueError):
            print("written in place, and of another shape")
    padded = ring.data.get("tokens", as_padded_tensor=True, padding_value=0)
    print(padded.shape, (padded != 0).sum(-1).tolist())
