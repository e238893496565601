"""A cache of preprocessed samples: a tensorclass on disk, filled in part, read by rows, refreshed, extended, split."""

import os
from pathlib import Path

import torch
from tensordict import TensorDict, load_memmap, tensorclass


@tensorclass
class Sample:
    image: torch.Tensor
    target: torch.Tensor
    meta: TensorDict
    source: str = "unknown"

    @classmethod
    def blank(cls, count, size):
        return cls(
            image=torch.zeros(count, 1, size, size, dtype=torch.uint8),
            target=torch.zeros(count, dtype=torch.int64),
            meta=TensorDict({"seen": torch.zeros(count, dtype=torch.bool)}, [count]),
            source="generated",
            batch_size=[count],
        )

    def normalised(self):
        return self.image.float() / 255.0


def preprocess(index, size):
    rng = torch.Generator().manual_seed(index)
    return torch.randint(256, (1, size, size), generator=rng, dtype=torch.uint8)


def fill(cache, rows):
    for row in rows:
        cache.image[row] = preprocess(row, cache.image.shape[-1])
        cache.target[row] = row % 3
        cache.meta["seen"][row] = True


def main():
    cache = Sample.blank(10, 4).memmap_like("cache")
    print(type(cache).__name__, cache.batch_size, cache.is_memmap(), cache.is_locked, cache.source)
    fill(cache, range(6))
    print(Path(cache.saved_path).parts[0], os.path.isdir("cache"), cache.meta["seen"].sum().item())

    reader = Sample.load_memmap("cache")
    print(type(reader).__name__, reader.meta["seen"].tolist(), reader.target.tolist())
    same = (reader[:6].image == torch.stack([preprocess(i, 4) for i in range(6)])).all().item()
    print(same, reader[2].normalised().shape, round(reader[2].normalised().mean().item(), 4))

    fill(cache, range(6, 10))
    again = Sample.load_memmap("cache")
    print(again.meta["seen"].all().item(), again.target.tolist(), type(again.meta).__name__)

    picked = again[torch.tensor([7, 1, 4])]
    print(type(picked).__name__, picked.target.tolist(), picked.is_memmap(), picked.source)
    train, test = again.split([7, 3])
    print(train.batch_size, test.target.tolist(), test.source)
    halves = again.chunk(2)
    print([half.target.sum().item() for half in halves], [half.source for half in halves])

    copy = again.clone()
    copy.target += 100
    print(copy.is_memmap(), copy.is_locked, copy.target[0].item(), again.target[0].item())
    try:
        again.extra = torch.zeros(10)
    except (AttributeError, RuntimeError):
        print("a class has its fields")

    table = TensorDict({"samples": again.clone(), "weight": torch.ones(10)}, [10])
    table.memmap("table")
    loaded = load_memmap("table")
    print(type(loaded["samples"]).__name__, loaded["samples"].source, loaded["samples", "target"].tolist())
    row = loaded[3]
    print(row["samples"].target.item(), type(row["samples"]).__name__, row["weight"].item())

    batches = [loaded[i : i + 4] for i in range(0, 10, 4)]
    print([list(b.batch_size) for b in batches], torch.cat(batches)["samples"].target.tolist())
    means = torch.stack([b["samples"].normalised().mean() for b in batches])
    print([round(m, 3) for m in means.tolist()])
    moved = loaded["samples"].to_tensordict()
    print(type(moved).__name__, sorted(map(str, moved.keys(True, True))), moved["meta", "seen"].all().item())
