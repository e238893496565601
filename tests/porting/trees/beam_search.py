"""Beam search whose beams, scores and caches live in one TensorDict that is expanded and gathered every step."""

import torch
from tensordict import TensorDict


def model(state, token):
    """Logits from a fixed table, and a cache that counts."""
    table = torch.tensor([[0.1, 2.0, 0.3, 0.0], [0.5, 0.1, 1.9, 0.4], [1.0, 0.2, 0.3, 2.2], [0.0, 0.0, 0.0, 3.0]])
    cache = state.apply(lambda layer: layer + 1)
    return table[token].log_softmax(-1), cache


def beam_search(batch, width, steps, end=3):
    beams = TensorDict(
        {
            "tokens": torch.zeros(batch, width, 1, dtype=torch.int64),
            "score": torch.full((batch, width), -1e9),
            "done": torch.zeros(batch, width, dtype=torch.bool),
            "cache": {f"layer{i}": torch.zeros(batch, width, 2) for i in range(2)},
        },
        batch_size=[batch, width],
    )
    beams["score"][:, 0] = 0
    for _ in range(steps):
        log_probs, beams["cache"] = model(beams["cache"], beams["tokens"][..., -1])
        vocabulary = log_probs.shape[-1]
        stay = torch.full_like(log_probs, -1e9)
        stay[..., end] = 0
        log_probs = torch.where(beams["done"][..., None], stay, log_probs)
        candidates = (beams["score"][..., None] + log_probs).flatten(1)
        score, index = candidates.topk(width, -1)
        parent, token = index // vocabulary, index % vocabulary
        beams = beams.gather(1, parent)
        beams["tokens"] = torch.cat([beams["tokens"], token[..., None]], -1)
        beams["score"] = score
        beams["done"] = beams["done"] | (token == end)
        if beams["done"].all():
            break
    return beams


def main():
    beams = beam_search(batch=2, width=3, steps=4)
    print(beams.batch_size, beams["tokens"].shape, beams["cache"].batch_size)
    print(beams["tokens"][0].tolist())
    print([round(x, 4) for x in beams["score"][0].tolist()], beams["done"][0].tolist())
    print(beams["cache", "layer0"][0, :, 0].tolist())

    normalised = beams["score"] / (beams["tokens"] != 3).sum(-1).float()
    best = beams[torch.arange(2), normalised.argmax(-1)]
    print(best.batch_size, best["tokens"].tolist(), best["cache"]["layer1"].shape)
    order = normalised.argsort(-1, descending=True)
    ranked = beams.gather(dim=1, index=order)
    print(ranked["tokens"][0, 0].tolist() == best["tokens"][0].tolist())
    top, rest = ranked.split([1, 2], dim=1)
    print(top.squeeze(1).batch_size, rest.batch_size)
    alive = beams[~beams["done"]]
    print(alive.batch_size, alive.is_empty())
    wide = beams[:, :1].expand(2, 5)
    print(wide.batch_size, wide["tokens"].shape, wide["cache"].batch_size)
    repeated = beams.repeat_interleave(2, dim=0)
    print(repeated.batch_size, repeated["done"].shape)
    print(beams.permute(1, 0).batch_size, beams.transpose(0, 1)["score"].shape)
