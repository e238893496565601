"""A dataset of images, preallocated on disk, filled in chunks and read by a DataLoader with workers."""

import torch
from tensordict import MemoryMappedTensor, TensorDict
from torch.utils.data import DataLoader, Dataset

SIZE = 24


class Shapes(Dataset):
    """Squares of random brightness, one class for each quadrant that they lie in."""

    def __len__(self):
        return SIZE

    def __getitem__(self, index):
        image = torch.zeros(3, 8, 8, dtype=torch.uint8)
        quadrant = index % 4
        rows = slice(0, 4) if quadrant < 2 else slice(4, 8)
        columns = slice(0, 4) if quadrant % 2 == 0 else slice(4, 8)
        image[:, rows, columns] = index * 10
        return image, quadrant


def preallocate(path):
    data = TensorDict(
        {
            "images": MemoryMappedTensor.empty((SIZE, 3, 8, 8), dtype=torch.uint8),
            "targets": MemoryMappedTensor.empty((SIZE,), dtype=torch.int64),
        },
        batch_size=[SIZE],
    )
    source = DataLoader(Shapes(), batch_size=6)
    filled = 0
    for images, targets in source:
        n = images.shape[0]
        data[filled : filled + n] = TensorDict({"images": images, "targets": targets}, batch_size=[n])
        filled += n
    return data.memmap(path)


class Collate:
    def __init__(self, transform=None):
        self.transform = transform

    def __call__(self, batch):
        batch = batch.clone() if batch.is_locked else batch
        if self.transform is not None:
            batch["images"] = self.transform(batch["images"])
        return batch


def normalise(images):
    return images.float().div(255).sub(0.5)


def main():
    data = preallocate("shapes")
    print(data.is_memmap(), data.batch_size, sorted(data.keys()), data.is_locked)
    print(type(data["images"]).__name__, data["images"].dtype, data["images"].sum().item())

    loader = DataLoader(
        TensorDict.load_memmap("shapes"),
        batch_size=8,
        num_workers=2,
        collate_fn=Collate(normalise),
        multiprocessing_context="fork",
    )
    total = 0
    for batch in loader:
        print(type(batch).__name__, tuple(batch.batch_size), batch["images"].dtype, batch["targets"].tolist())
        print(round(batch["images"].mean().item(), 5))
        total += batch.shape[0]
    print(total == len(data))

    sampler = torch.utils.data.RandomSampler(range(SIZE), generator=torch.Generator().manual_seed(3))
    shuffled = DataLoader(data, sampler=sampler, batch_size=12, collate_fn=lambda batch: batch)
    print([batch["targets"].tolist() for batch in shuffled])

    listed = DataLoader(data, batch_size=5, drop_last=True, collate_fn=lambda b: b)
    print([tuple(batch.shape) for batch in listed])
