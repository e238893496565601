"""Packing documents into rows of one length for pretraining, with document ids, and a collate that pads."""

import torch
from tensordict import TensorDict, pad, pad_sequence
from tensordict.utils import assert_close


def documents():
    for i, length in enumerate([4, 7, 2, 9, 5, 3]):
        ids = torch.arange(length) + 100 * i
        yield TensorDict({"ids": ids, "document": torch.full((length,), i), "position": torch.arange(length)}, [length])


def pack(stream, size):
    """Rows of `size` tokens; what is left is padded."""
    rest, rows = None, []
    for document in stream:
        rest = document if rest is None else torch.cat([rest, document], dim=0)
        while rest.shape[0] >= size:
            rows.append(rest[:size])
            rest = rest[size:]
    if rest is not None and rest.numel():
        rows.append(pad(rest, [0, size - rest.shape[0]], value=-1))
    return torch.stack(rows, 0)


def collate(batch):
    padded = pad_sequence(batch, pad_dim=0, padding_value=0)
    padded["labels"] = padded["ids"].clone()
    return padded


def main():
    packed = pack(documents(), 8)
    print(packed.batch_size, packed["ids"].tolist())
    print(packed["document"].tolist())
    starts = packed["position"] == 0
    print(starts.sum(-1).tolist(), (packed["document"] < 0).sum().item())
    same = packed["document"][:, :, None] == packed["document"][:, None, :]
    causal = torch.ones(8, 8, dtype=torch.bool).tril()
    packed["attention"] = same & causal
    print(packed["attention"].sum((1, 2)).tolist(), packed.batch_size)

    batch = collate(list(documents()))
    print(batch.batch_size, batch["ids"].shape, batch["labels"].sum().item())
    masked = pad_sequence(list(documents()), pad_dim=0, padding_value=0, return_mask="mask")
    print(type(masked["mask"]).__name__, sorted(masked.keys()))

    wide = pad(packed, [1, 0, 0, 2], value=7)
    print(wide.batch_size, wide["position"][0].unique().tolist(), wide["ids"][:, -1].tolist())
    again = torch.stack(packed.unbind(0))
    assert_close(again, packed)
    try:
        assert_close(again, packed + 1)
    except AssertionError:
        print("differ")
    halves = packed.split(2, 0)
    joined = torch.cat(halves)
    print((joined == packed).all(), [h.shape for h in halves])
    lengths = torch.tensor([d.shape[0] for d in documents()])
    buckets = TensorDict({"length": lengths, "index": torch.arange(6)}, [6])
    order = buckets["length"].argsort(descending=True)
    print(buckets[order]["index"].tolist(), buckets[order].split([2, 4])[1]["length"].tolist())
