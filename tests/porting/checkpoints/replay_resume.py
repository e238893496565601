"""A replay buffer that is saved with its counters and loaded again, in place and into new memory."""

import json
import shutil
from pathlib import Path

import torch
from tensordict import TensorDict


class MemmapReplay:
    def __init__(self, capacity, path=None):
        self.capacity, self.path = capacity, path
        self.data, self.cursor, self.size = None, 0, 0

    def extend(self, batch):
        if self.data is None:
            empty = batch[0].expand(self.capacity).clone().zero_()
            self.data = empty.memmap(self.path) if self.path else empty
        rows = torch.arange(self.cursor, self.cursor + len(batch)) % self.capacity
        self.data[rows] = batch
        self.cursor = (self.cursor + len(batch)) % self.capacity
        self.size = min(self.capacity, self.size + len(batch))
        return rows

    def sample(self, n):
        return self.data[torch.randint(self.size, (n,))]

    def dumps(self, path):
        path = Path(path)
        path.mkdir(exist_ok=True)
        self.data[: self.size].memmap(path / "data", copy_existing=True)
        (path / "counters.json").write_text(json.dumps({"cursor": self.cursor, "size": self.size}))

    def loads(self, path):
        path = Path(path)
        saved = TensorDict.load_memmap(path / "data")
        counters = json.loads((path / "counters.json").read_text())
        if self.data is None:
            self.data = saved[0].expand(self.capacity).clone().zero_()
        self.data[: counters["size"]] = saved
        self.cursor, self.size = counters["cursor"], counters["size"]

    def state_dict(self):
        return {"data": self.data.state_dict(), "cursor": self.cursor, "size": self.size}

    def load_state_dict(self, state):
        self.data.load_state_dict(state["data"])
        self.cursor, self.size = state["cursor"], state["size"]


def batch(n, start):
    i = torch.arange(start, start + n)
    return TensorDict(
        {"observation": i[:, None].float().expand(n, 3), "next": {"reward": i.float(), "done": i % 3 == 2}}, [n]
    )


def main():
    replay = MemmapReplay(8, "live")
    print(replay.extend(batch(5, 0)).tolist(), replay.extend(batch(5, 5)).tolist())
    print(replay.data.is_memmap(), replay.data["next", "reward"].tolist(), replay.cursor, replay.size)
    sample = replay.sample(4)
    print(sample.batch_size, sample.is_memmap(), sample.is_locked)
    sample["priority"] = torch.ones(4)

    replay.dumps("saved")
    print(sorted(p.name for p in Path("saved").iterdir()))
    other = MemmapReplay(8)
    other.loads("saved")
    print((other.data == replay.data).all(), other.cursor, other.data.is_memmap())
    other.extend(batch(2, 100))
    print(other.data["next", "reward"].tolist(), replay.data["next", "reward"].tolist())

    third = MemmapReplay(8)
    third.extend(batch(1, 0))
    third.load_state_dict(replay.state_dict())
    print((third.data == replay.data).all(), third.size)

    replay.dumps("saved")
    again = TensorDict.load_memmap("saved/data")
    print(again["next", "done"].tolist())
    moved = shutil.move("saved", "moved")
    print(TensorDict.load_memmap(Path(moved) / "data")["next"].batch_size)
    copy = replay.data.clone()
    replay.data.zero_()
    print(TensorDict.load_memmap("live")["observation"].sum().item(), copy["observation"].sum().item() > 0)
    del replay, again
    shutil.rmtree("live")
    print(Path("live").exists())
