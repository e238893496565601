"""A tensorclass as a dataset: built once, memory-mapped, trained on with a DataLoader."""

from __future__ import annotations

import torch
from tensordict import MemoryMappedTensor, tensorclass
from torch import nn
from torch.utils.data import DataLoader


@tensorclass
class ImageData:
    images: torch.Tensor
    targets: torch.Tensor
    part: str = "train"

    @classmethod
    def from_arrays(cls, images, targets, part="train"):
        data = cls(
            images=MemoryMappedTensor.empty((len(images), *images[0].shape), dtype=torch.float32),
            targets=MemoryMappedTensor.empty((len(images),), dtype=torch.int64),
            part=part,
            batch_size=[len(images)],
        )
        for i, (image, target) in enumerate(zip(images, targets, strict=True)):
            data[i] = cls(images=image, targets=torch.tensor(target), part=part, batch_size=[])
        return data

    @property
    def classes(self):
        return self.targets.unique().numel()

    def augment(self):
        return ImageData(
            images=torch.cat([self.images, self.images.flip(-1)]),
            targets=self.targets.repeat(2),
            part=self.part,
            batch_size=[2 * self.batch_size[0]],
        )


def main():
    rng = torch.Generator().manual_seed(1)
    images = [torch.rand(1, 4, 4, generator=rng) + i % 3 for i in range(18)]
    train = ImageData.from_arrays(images, [i % 3 for i in range(18)])
    print(type(train).__name__, train.batch_size, train.classes, train.part, len(train))
    train = train.augment().memmap("train")
    print(train.is_memmap(), train.shape, train.images.shape, train.part)

    net = nn.Sequential(nn.Flatten(), nn.Linear(16, 3))
    with torch.no_grad():
        for p in net.parameters():
            p.zero_()
    optimiser = torch.optim.SGD(net.parameters(), lr=0.1)
    losses = []
    for _ in range(3):
        for batch in DataLoader(train, batch_size=9, collate_fn=lambda x: x):
            assert isinstance(batch, ImageData)
            loss = nn.functional.cross_entropy(net(batch.images), batch.targets)
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            losses.append(round(loss.item(), 3))
    print(losses[0] > losses[-1], len(losses))

    again = ImageData.load_memmap("train")
    print(type(again).__name__, again.batch_size, again.part, torch.equal(again.targets, train.targets))
    correct = (net(again.images).argmax(-1) == again.targets).float().mean()
    print(correct.item() > 0.3)
    first, rest = again[:4], again[4:]
    print(type(first).__name__, first.shape, rest.shape, type(again.to_tensordict()).__name__)
    print(again[3].targets.item(), again[[1, 2]].targets.tolist(), again[again.targets == 2].shape)
