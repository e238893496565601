"""Merge rollouts of workers: responses of different lengths, texts, padding with masks, one buffer to send."""

import pickle

import torch
from tensordict import LazyStackedTensorDict, NonTensorStack, TensorDict, lazy_stack, pad_sequence


def rollout(worker, lengths):
    rows = []
    for i, length in enumerate(lengths):
        rows.append(
            TensorDict(
                {
                    "tokens": torch.arange(length) + 10 * worker,
                    "logp": -torch.ones(length),
                    "score": torch.tensor(float(worker + i)),
                    "text": f"w{worker}r{i}",
                    "info": {"worker": worker, "turns": [f"turn {n}" for n in range(i + 1)]},
                }
            )
        )
    return lazy_stack(rows)


def report(name, td):
    print(name, type(td).__name__, tuple(td.batch_size), sorted(map(str, td.keys())))


def main():
    workers = [rollout(0, [2, 4]), rollout(1, [3]), rollout(2, [1, 2, 5])]
    merged = torch.cat(workers)
    report("merged", merged)
    print(list(merged["text"]), merged["score"].tolist(), [len(t) for t in merged.get("tokens", as_list=True)])
    print(merged["info", "worker"].tolist(), merged[4]["info", "worker"].item())

    padded = merged.get("tokens", as_padded_tensor=True, padding_value=-1)
    print(padded.shape, padded[0].tolist(), (padded != -1).sum(-1).tolist())
    nested = merged.get("tokens", as_nested_tensor=True)
    print(nested.is_nested, [len(row) for row in nested.unbind()])

    best = merged[merged["score"] >= 2]
    report("best", best)
    print(list(best["text"]), best["score"].tolist())
    order = merged["score"].argsort(descending=True, stable=True)
    print([merged[int(i)]["text"] for i in order])
    merged[0].update(rollout(9, [6])[0])
    print(merged[0]["text"], merged[0]["tokens"].tolist(), workers[0][0]["text"])

    groups = lazy_stack([merged[:2], merged[2:4], merged[4:]])
    report("groups", groups)
    print(groups.stack_dim, list(groups[1]["text"]), groups[2, 1]["text"], groups["score"].tolist())
    print([list(row) for row in groups["text"]])
    advantage = torch.stack([group["score"] - group["score"].mean() for group in groups.unbind(0)])
    groups["advantage"] = advantage
    print(merged[0]["advantage"].item() if "advantage" in merged[0].keys() else "own", groups[0, 0]["advantage"].item())

    rows = [row.select("tokens", "logp") for row in merged.unbind(0)]
    for row in rows:
        row.auto_batch_size_()
    print([tuple(row.batch_size) for row in rows])
    batch = pad_sequence(rows, return_mask=True)
    print(batch.batch_size, batch["tokens"].shape, batch["masks", "tokens"].sum(-1).tolist())
    loss = (batch["logp"] * batch["masks", "logp"]).sum(-1)
    print(loss.tolist())

    dense = merged.select("score", "text").contiguous()
    report("dense", dense)
    dense["text"] = NonTensorStack(*[text.upper() for text in dense["text"]])
    print(list(dense["text"]), dense[2]["text"])

    sent = pickle.loads(pickle.dumps(dense.consolidate()))
    print(sent.is_consolidated(), sent.is_locked, list(sent["text"]), sent["score"].tolist())
    sent["rank"] = torch.arange(6)
    print(sent[1]["rank"].item(), sent.select("rank").batch_size)

    merged.append(rollout(5, [1])[0])
    merged.extend(rollout(6, [2, 2]))
    print(merged.batch_size, isinstance(merged, LazyStackedTensorDict), merged[-1]["text"])
    dropped = merged.exclude("info", "text").apply(lambda x: x.double())
    print(dropped[0]["tokens"].dtype, dropped[-1]["logp"].dtype, sorted(dropped.keys()))
