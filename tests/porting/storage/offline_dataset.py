"""An offline dataset on disk: preallocate from one example, write episodes, normalise, sample windows."""

import json
import random
from pathlib import Path

import torch
from tensordict import TensorDict, load_memmap, pad_sequence


def episode(length, seed):
    rng = torch.Generator().manual_seed(seed)
    obs = torch.randn(length + 1, 4, generator=rng)
    done = torch.zeros(length, 1, dtype=torch.bool)
    done[-1] = True
    return TensorDict(
        {
            "observation": obs[:-1],
            "action": torch.randint(3, (length,), generator=rng),
            "next": {"observation": obs[1:], "reward": torch.ones(length, 1), "done": done},
            "episode": torch.full((length,), seed),
        },
        batch_size=[length],
    )


def write(path):
    lengths = [5, 3, 8, 4]
    example = episode(1, 0)[0]
    data = example.expand(sum(lengths)).clone().zero_().memmap(path)
    start = 0
    for seed, length in enumerate(lengths):
        data[start : start + length] = episode(length, seed)
        start += length
    Path(path, "info.json").write_text(json.dumps({"lengths": lengths}))
    return data


def windows(data, size, count):
    starts = [s for s in range(len(data) - size) if data["episode"][s] == data["episode"][s + size - 1]]
    random.Random(0).shuffle(starts)
    return torch.stack([data[s : s + size] for s in starts[:count]])


def main():
    write("offline")
    data = load_memmap("offline")
    info = json.loads(Path("offline", "info.json").read_text())
    print(len(data) == sum(info["lengths"]), data["next"].batch_size)

    stats = data.select("observation", ("next", "observation"))
    mean, std = stats.mean(dim=0), stats.std(dim=0)
    print(mean.batch_size, mean["observation"].shape, std["next", "observation"].shape)
    scaled = (stats - mean) / std
    print(scaled["observation"].mean(0).abs().max().item() < 1e-5, type(scaled).__name__)

    batch = windows(data, 3, 6)
    print(batch.batch_size, batch["action"].tolist(), batch["episode"].tolist())
    ends = data["next", "done"].squeeze(-1).nonzero().squeeze(-1)
    print(ends.tolist())
    episodes = data.split((ends.diff(prepend=torch.tensor([-1]))).tolist())
    print([len(e) for e in episodes], [e["next", "reward"].sum().item() for e in episodes])
    padded = pad_sequence(list(episodes), pad_dim=0, return_mask=True)
    print(padded.batch_size, padded["masks", "action"].sum(1).tolist() if "masks" in padded.keys() else None)
    longest = max(episodes, key=len)
    print(longest["episode"].unique().tolist(), longest[-1]["next", "done"].item())
    returns = [e["next", "reward"].flip(0).cumsum(0).flip(0)[0].item() for e in episodes]
    print(returns)
