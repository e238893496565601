"""A batch of tensors with an array of objects beside it, sent between workers of an LLM trainer."""

from __future__ import annotations

import copy
import pickle
from dataclasses import dataclass, field

import numpy as np
import torch
from tensordict import TensorDict


def union(first: TensorDict, second: TensorDict) -> TensorDict:
    assert first.batch_size == second.batch_size, (first.batch_size, second.batch_size)
    for key in second.keys():
        if key not in first.keys():
            first[key] = second[key]
        else:
            assert first[key].equal(second[key]), f"{key} is in both and differs"
    return first


@dataclass
class DataProto:
    batch: TensorDict = None
    non_tensor_batch: dict = field(default_factory=dict)
    meta_info: dict = field(default_factory=dict)

    def __len__(self):
        return self.batch.batch_size[0] if self.batch is not None else len(next(iter(self.non_tensor_batch.values())))

    def __getitem__(self, item):
        if isinstance(item, (int, np.integer)):
            return self.batch[item], {k: v[item] for k, v in self.non_tensor_batch.items()}
        if isinstance(item, list):
            item = torch.tensor(item)
        rows = item.numpy() if isinstance(item, torch.Tensor) else item
        return DataProto(self.batch[item], {k: v[rows] for k, v in self.non_tensor_batch.items()}, self.meta_info)

    def __getstate__(self):
        import io

        buffer = io.BytesIO()
        batch = self.batch.contiguous() if self.batch is not None else None
        if batch is not None:
            batch = batch.consolidate()
        torch.save(batch, buffer)
        return buffer.getvalue(), self.non_tensor_batch, self.meta_info

    def __setstate__(self, state):
        import io

        data, self.non_tensor_batch, self.meta_info = state
        self.batch = torch.load(io.BytesIO(data), weights_only=False)

    @classmethod
    def from_dict(cls, tensors, non_tensors=None, meta_info=None):
        size = next(iter(tensors.values())).shape[0]
        objects = {k: np.array(v, dtype=object) for k, v in (non_tensors or {}).items()}
        return cls(TensorDict(source=tensors, batch_size=(size,)), objects, meta_info or {})

    def select(self, batch_keys):
        return DataProto(self.batch.select(*batch_keys), {}, copy.deepcopy(self.meta_info))

    def pop(self, batch_keys):
        return DataProto.from_dict({key: self.batch.pop(key) for key in batch_keys})

    def rename(self, old, new):
        self.batch.rename_key_(old, new)
        return self

    def union(self, other):
        self.batch = union(self.batch, other.batch)
        return self

    def reorder(self, indices):
        self.batch = self.batch[indices]
        self.non_tensor_batch = {k: v[indices.numpy()] for k, v in self.non_tensor_batch.items()}

    def repeat(self, times, interleave=True):
        if interleave:
            tensors = {k: v.repeat_interleave(times, dim=0) for k, v in self.batch.items()}
        else:
            tensors = {
                k: v.unsqueeze(0).expand(times, *v.shape).reshape(-1, *v.shape[1:]) for k, v in self.batch.items()
            }
        objects = {
            k: np.repeat(v, times) if interleave else np.tile(v, times) for k, v in self.non_tensor_batch.items()
        }
        return DataProto(TensorDict(tensors, batch_size=(len(self) * times,)), objects, self.meta_info)

    def chunk(self, chunks):
        parts = self.batch.chunk(chunks=chunks, dim=0)
        objects = [
            dict(zip(self.non_tensor_batch, p))
            for p in zip(*(np.array_split(v, chunks) for v in self.non_tensor_batch.values()))
        ]
        return [DataProto(part, o, self.meta_info) for part, o in zip(parts, objects, strict=True)]

    @staticmethod
    def concat(parts):
        keys = parts[0].non_tensor_batch
        objects = {k: np.concatenate([p.non_tensor_batch[k] for p in parts]) for k in keys}
        return DataProto(torch.cat([p.batch for p in parts], dim=0), objects, parts[0].meta_info)


def pad_to_divisor(data, divisor):
    missing = -len(data) % divisor
    return (DataProto.concat([data, data[:missing]]) if missing else data), missing


def main():
    data = DataProto.from_dict(
        {"prompts": torch.arange(15).view(5, 3), "mask": torch.ones(5, 3, dtype=torch.bool)},
        {"uid": [f"u{i}" for i in range(5)], "extra": [{"answer": i} for i in range(5)]},
        {"temperature": 0.7},
    )
    print(len(data), data.batch.batch_size, sorted(data.batch.keys()), data[2][1])
    data.union(DataProto.from_dict({"responses": torch.zeros(5, 2)}))
    try:
        data.union(DataProto.from_dict({"responses": torch.ones(5, 2)}))
    except AssertionError as error:
        print(error)
    padded, missing = pad_to_divisor(data, 4)
    print(len(padded), missing, padded.non_tensor_batch["uid"].tolist())
    parts = padded.chunk(4)
    print([len(p) for p in parts], [p.non_tensor_batch["uid"].tolist() for p in parts], parts[1].batch.batch_size)
    sent = [pickle.loads(pickle.dumps(p)) for p in parts]
    whole = DataProto.concat(sent)
    print(whole.batch.batch_size, torch.equal(whole.batch["prompts"], padded.batch["prompts"]), whole.meta_info)
    print(
        data.repeat(2).batch["prompts"][:, 0].tolist(),
        data.repeat(2, interleave=False).non_tensor_batch["uid"].tolist(),
    )
    data.reorder(torch.tensor([4, 0, 1, 3, 2]))
    print(data.batch["prompts"][:, 0].tolist(), data.non_tensor_batch["uid"].tolist())
    popped = data.pop(["mask"])
    print(
        sorted(data.batch.keys()),
        popped.batch["mask"].sum().item(),
        sorted(data.rename("responses", "answers").batch.keys()),
    )
    picked = data[[0, 2]]
    print(picked.batch["prompts"].tolist(), data[1:3].batch.batch_size, data.select(["prompts"]).meta_info)
    moved = data.batch.to("cpu")
    print(moved.device, sum(v.numel() * v.element_size() for v in moved.values()))
    print(data.batch.is_contiguous() if hasattr(data.batch, "is_contiguous") else None)
