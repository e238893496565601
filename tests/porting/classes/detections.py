"""Object detection: images of different sizes with boxes, labels and metadata, gathered into lazy batches."""

from __future__ import annotations

import torch
from tensordict import NonTensorData, TensorClass, TensorDict, lazy_stack, maybe_dense_stack, tensorclass
from torch.utils.data import DataLoader, Dataset


class Boxes(TensorClass):
    corners: torch.Tensor
    score: torch.Tensor

    @property
    def area(self):
        size = self.corners[..., 2:] - self.corners[..., :2]
        return size.clamp(min=0).prod(-1)

    def iou(self, other):
        low = torch.maximum(self.corners[:, None, :2], other.corners[None, :, :2])
        high = torch.minimum(self.corners[:, None, 2:], other.corners[None, :, 2:])
        overlap = (high - low).clamp(min=0).prod(-1)
        return overlap / (self.area[:, None] + other.area[None] - overlap)

    def nms(self, threshold):
        order, kept = self.score.argsort(descending=True).tolist(), []
        overlaps = self.iou(self)
        for i in order:
            if all(overlaps[i, j] <= threshold for j in kept):
                kept.append(i)
        return self[kept]


@tensorclass
class Detection:
    image: torch.Tensor
    boxes: Boxes
    labels: torch.Tensor
    path: str = ""


class Images(Dataset):
    def __len__(self):
        return 5

    def __getitem__(self, i):
        n = i + 1
        low = torch.arange(n * 2).view(n, 2).float() * 2
        boxes = Boxes(corners=torch.cat([low, low + 3 + i], -1), score=torch.linspace(1, 0.5, n), batch_size=[n])
        return Detection(
            image=torch.full((3, 4 + i, 6), i / 5),
            boxes=boxes,
            labels=torch.arange(n) % 3,
            path=f"{i}.png",
            batch_size=[],
        )


def main():
    dataset = Images()
    one = dataset[2]
    print(type(one.boxes).__name__, one.boxes.batch_size, one.boxes.area.tolist(), one.path, one.batch_size)
    print(one.boxes.nms(0.3).batch_size, [round(x, 3) for x in one.boxes.iou(one.boxes)[0].tolist()])

    loader = DataLoader(dataset, batch_size=3, collate_fn=lazy_stack)
    for batch in loader:
        print(type(batch).__name__, batch.batch_size, [tuple(d.image.shape) for d in batch.unbind(0)])
        print([d.path for d in batch.unbind(0)], [len(d.labels) for d in batch.unbind(0)])
        print(batch.get("labels", as_padded_tensor=True, padding_value=-1).tolist())

    kept = [d.boxes.nms(0.2) for d in batch.unbind(0)]
    print([k.batch_size[0] for k in kept], [type(k).__name__ for k in kept])
    every = torch.cat([d.boxes for d in batch.unbind(0)])
    print(every.batch_size, type(every).__name__, every[every.score > 0.9].corners.shape)
    best = every[every.score.argmax()]
    print(best.corners.tolist(), round(best.score.item(), 3), best.area.item())

    same = [dataset[1], dataset[1]]
    dense = maybe_dense_stack(same)
    print(type(dense).__name__, dense.batch_size, dense.image.shape, dense.boxes.corners.shape)
    ragged = maybe_dense_stack([dataset[0], dataset[1]])
    print(ragged.batch_size, [tuple(b.shape) for b in (ragged[0].image, ragged[1].image)])

    sample = TensorDict({"detection": one, "camera": NonTensorData({"id": 3, "fps": 30.0})}, [])
    print(sample["detection"].labels.tolist(), sample["camera"], sample["detection", "boxes", "score"].shape)
    sample["detection"].boxes.score = sample["detection"].boxes.score * 0
    print(one.boxes.score.tolist(), sample["detection"].path)
    flipped = one.clone()
    flipped.image = flipped.image.flip(-1)
    flipped.boxes.corners = 6 - flipped.boxes.corners[:, [2, 1, 0, 3]]
    print(flipped.boxes.corners[0].tolist(), one.boxes.corners[0].tolist())
    moved = one.to(torch.float64)
    print(moved.image.dtype, moved.labels.dtype, moved.path)
