"""A Dataset over a memory-mapped TensorDict that gives windows, with batched fetching and a custom collate."""

import torch
from tensordict import TensorDict
from torch.utils.data import BatchSampler, DataLoader, Dataset, SequentialSampler


class WindowDataset(Dataset):
    def __init__(self, data, window, stride=1):
        self.data = data
        self.window = window
        self.starts = range(0, data.shape[0] - window + 1, stride)

    def __len__(self):
        return len(self.starts)

    def __getitem__(self, index):
        start = self.starts[index]
        return self.data[start : start + self.window]


class RowDataset(Dataset):
    """Fetches all rows of a batch at once."""

    def __init__(self, data):
        self.data = data

    def __len__(self):
        return self.data.batch_size[0]

    def __getitems__(self, indices):
        return self.data[torch.as_tensor(indices)]


def collate(windows):
    return TensorDict.stack(windows, 0)


def main():
    steps = torch.arange(40)
    series = TensorDict(
        {
            "price": steps.float().view(40, 1) * 1.5,
            "volume": steps,
            "meta": TensorDict({"weekday": steps % 5}, [40]),
        },
        [40],
        names=["time"],
    ).memmap_("series")

    windows = WindowDataset(series, window=8, stride=4)
    print(len(windows), windows[0].shape, windows[2]["volume"].tolist())
    loader = DataLoader(windows, batch_size=3, collate_fn=collate, num_workers=2, multiprocessing_context="fork")
    for batch in loader:
        print(batch.batch_size, batch["meta", "weekday"][:, 0].tolist(), batch.names)
    rows = DataLoader(RowDataset(series), batch_size=16, collate_fn=lambda x: x)
    print([(b.shape[0], b["volume"].sum().item()) for b in rows])
    sampler = BatchSampler(SequentialSampler(windows), batch_size=4, drop_last=True)
    print(list(sampler))
    for indices in sampler:
        stacked = collate([windows[i] for i in indices])
        changes = stacked.apply(lambda x: x.float().diff(dim=1), batch_size=[4, 7])
        print(changes["price"].unique().tolist(), changes["volume"].sum().item(), changes.batch_size)

    iterated = [chunk["volume"][0].item() for chunk in series.split(10)]
    print(iterated, [part.batch_size for part in series.chunk(3)])
    print(series.names, series[3:6].names, series[2].names)
