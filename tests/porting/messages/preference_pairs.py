"""Pairs of chosen and rejected answers from dataclasses, with a loss over both in one forward pass."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from tensordict import TensorDict, from_dataclass, is_tensorclass, lazy_stack, tensorclass


@dataclass
class Completion:
    """What an inference engine gives."""

    text: str
    token_ids: torch.Tensor
    logprob: float
    finish_reason: str | None = None
    stop: str | None = None


@tensorclass
class Side:
    ids: torch.Tensor
    reference: torch.Tensor
    text: str | None = None


@tensorclass
class Pair:
    chosen: Side
    rejected: Side
    margin: torch.Tensor | None = None

    @property
    def lengths(self):
        return self.chosen.ids.shape[-1], self.rejected.ids.shape[-1]


def scores(ids, weight):
    return weight[ids].sum(-1)


def dpo(pair, weight, beta=0.5):
    both = torch.cat([pair.chosen.ids, pair.rejected.ids])
    chosen, rejected = scores(both, weight).chunk(2)
    logits = (chosen - pair.chosen.reference) - (rejected - pair.rejected.reference)
    return -F.logsigmoid(beta * logits - (pair.margin if pair.margin is not None else 0.0)).mean()


def main():
    completion = Completion("fine", torch.tensor([3, 4]), -0.5, "stop")
    td = from_dataclass(completion)
    print(is_tensorclass(td), td.text, td.token_ids.tolist(), td.logprob, td.finish_reason, td.stop)
    made = TensorDict.from_dataclass(completion, as_tensorclass=False)
    print(type(made).__name__, made["text"], made["token_ids"].tolist(), made["logprob"], made.batch_size)

    pairs = []
    for i in range(4):
        chosen = Side(ids=torch.tensor([i, i + 1, 1]), reference=torch.tensor(0.1 * i), text=f"good {i}")
        rejected = Side(ids=torch.tensor([i + 2, 0, 0]), reference=torch.tensor(-0.1), text=f"bad {i}")
        pairs.append(Pair(chosen=chosen, rejected=rejected, margin=torch.tensor(0.05)))
    batch = torch.stack(pairs)
    print(type(batch).__name__, batch.batch_size, batch.chosen.ids.shape, batch.lengths, type(batch.chosen).__name__)
    print(list(batch.chosen.text), batch[2].rejected.text)

    weight = torch.zeros(8, requires_grad=True)
    optimiser = torch.optim.SGD([weight], lr=0.5)
    losses = []
    for _ in range(4):
        loss = dpo(batch, weight)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(round(loss.item(), 3))
    print(losses[0] > losses[-1], len(losses))

    swapped = Pair(chosen=batch.rejected, rejected=batch.chosen, batch_size=batch.batch_size)
    print(swapped.margin, dpo(swapped, weight).item() > losses[-1])
    td = batch.to_tensordict()
    print(sorted(map(str, td.keys(True, True, is_leaf=lambda c: issubclass(c, torch.Tensor)))))
    ids = td.select(("chosen", "ids"), ("rejected", "ids"))
    print(ids.batch_size, ids["chosen"].batch_size, torch.stack(list(ids.values(True, True))).shape)
    ragged = lazy_stack([Side(ids=torch.arange(n), reference=torch.tensor(0.0), text="t") for n in (1, 3)])
    print(ragged.get("ids", as_padded_tensor=True, padding_value=9).tolist(), ragged.reference.tolist())
    subset = batch[torch.tensor([True, False, True, False])]
    print(subset.batch_size, subset.chosen[1].ids.tolist(), type(subset.chosen[1]).__name__)
    print(TensorDict({"pair": batch}, [4])[1]["pair", "chosen", "ids"].tolist())
