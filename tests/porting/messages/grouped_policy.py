"""Group-relative policy optimisation on TensorDicts: samples per prompt, advantages, minibatches and the loss."""

import torch
from tensordict import TensorDict, lazy_stack
from torch import nn


class TinyModel(nn.Module):
    def __init__(self, vocabulary=11, width=8):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids):
        return self.head(self.embedding(ids).cumsum(-2))

    def log_probs(self, ids):
        logits = self(ids[..., :-1]).log_softmax(-1)
        return logits.gather(-1, ids[..., 1:, None]).squeeze(-1)


def rollout(model, prompts, samples, length):
    ids = prompts[:, None].expand(-1, samples, -1)
    rng = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for _ in range(length):
            p = model(ids)[..., -1, :].softmax(-1)
            token = torch.multinomial(p.flatten(0, 1), 1, generator=rng).view(*ids.shape[:2], 1)
            ids = torch.cat([ids, token], -1)
        log_probs = model.log_probs(ids)
    mask = torch.ones_like(log_probs, dtype=torch.bool)
    mask[..., : prompts.shape[-1] - 1] = False
    return TensorDict(
        {"ids": ids, "log_probs": log_probs, "mask": mask, "reward": (ids[..., -length:] % 3 == 0).float().mean(-1)},
        batch_size=ids.shape[:2],
        names=["prompt", "sample"],
    )


def advantages(td):
    reward = td["reward"]
    td["advantage"] = (reward - reward.mean(-1, keepdim=True)) / (reward.std(-1, keepdim=True) + 1e-6)
    return td


def loss_fn(model, batch, clip=0.2):
    ratio = (model.log_probs(batch["ids"]) - batch["log_probs"]).exp()
    advantage = batch["advantage"][:, None]
    objective = torch.min(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage)
    loss = -(objective * batch["mask"]).sum() / batch["mask"].sum()
    return TensorDict({"loss": loss, "ratio": ratio[batch["mask"]].mean().detach()}, [])


def main():
    torch.manual_seed(2)
    model = TinyModel()
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-2)
    data = rollout(model, torch.arange(12).view(4, 3) % 11, samples=3, length=4)
    print(data.batch_size, data.names, data["ids"].shape, data["log_probs"].shape)
    data = advantages(data)
    print(data["advantage"].sum(-1).abs().max().item() < 1e-4, data["reward"].shape)

    flat = data.reshape(-1)
    print(flat.batch_size, flat.names, flat["mask"].sum(-1).unique().tolist())
    useful = flat[flat["advantage"].abs() > 1e-3]
    print(useful.batch_dims, len(useful) <= len(flat))
    logs = []
    for _ in range(2):
        order = torch.randperm(len(flat))
        for batch in flat[order].split(4):
            losses = loss_fn(model, batch)
            optimiser.zero_grad()
            losses["loss"].backward()
            optimiser.step()
            logs.append(losses.detach())
    stacked = torch.stack(logs)
    print(stacked.batch_size, stacked["loss"].shape, bool(stacked["ratio"].isfinite().all()))
    summary = stacked.mean(dim=0)
    print(sorted(summary.keys()), summary["ratio"].ndim, round(stacked[0]["ratio"].item(), 4))

    groups = flat.unflatten(0, (4, 3))
    print(groups.batch_size, torch.equal(groups["reward"], data["reward"]))
    answers = lazy_stack(
        [row.exclude("mask").set("ids", row["ids"][: 4 + i % 3]) for i, row in enumerate(flat.unbind(0))]
    )
    print(answers.batch_size, [len(ids) for ids in answers.get("ids", as_list=True)])
    best = data.gather(1, data["reward"].argmax(-1, keepdim=True))
    print(best.batch_size, torch.equal(best["reward"][:, 0], data["reward"].max(-1).values))
