"""Entries that are given as lists: of numbers, tensors, texts, TensorDicts, tensorclasses and values."""

from __future__ import annotations

import torch
from tensordict import NonTensorData, TensorDict, tensorclass


@tensorclass
class Vote:
    weight: torch.Tensor
    voter: str


def main():
    td = TensorDict(batch_size=[2])
    td["number"] = [1, 2]
    td["tensor"] = [torch.ones(3), torch.zeros(3)]
    td["text"] = ["yes", "no"]
    td["table"] = [TensorDict({"x": torch.ones(2)}), TensorDict({"x": torch.zeros(2)})]
    td["vote"] = [Vote(weight=torch.tensor(0.5), voter="ann"), Vote(weight=torch.tensor(1.5), voter="bob")]
    td["value"] = [NonTensorData("first"), NonTensorData("second")]
    td.set(("deep", "rows"), [TensorDict({"y": torch.tensor(i)}) for i in range(2)])
    for key in ("number", "tensor", "table", "vote"):
        print(key, type(td[key]).__name__, tuple(td[key].shape))
    print(list(td["text"]), list(td["value"]), td["deep", "rows", "y"].tolist())
    print(td["table", "x"].tolist(), td["vote"].weight.tolist(), list(td["vote"].voter))
    print(td[1]["vote"].voter, td[1]["table"]["x"].tolist(), td[0]["value"], td[1]["number"].item())
    made = TensorDict({"rows": [td[0].select("number"), td[1].select("number")], "other": torch.zeros(2)}, [2])
    print(made["rows"].batch_size, made["rows", "number"].tolist())
    for wrong in ([TensorDict({"x": torch.ones(2)}), TensorDict({"x": torch.ones(3)})], [torch.ones(1)] * 3):
        try:
            td["wrong"] = wrong
        except RuntimeError:
            print("refused", "wrong" in td)
    td.update({"table": [TensorDict({"x": torch.full((2,), 5.0)}) for _ in range(2)]})
    print(td["table", "x"].tolist(), sorted(td.keys()))
