"""The two sets of leaves that the tests of the memmap backend save. By itself: a traced child imports little."""

from __future__ import annotations

import torch

OLD = {("a",): torch.arange(2000.0), ("n", "b"): torch.arange(600).view(30, 20), ("s",): torch.tensor(7)}
NEW = {
    ("a",): torch.arange(2000.0) * 3 + 1,
    ("n", "c"): torch.ones(40, 3).to(torch.bfloat16),
    ("z",): torch.zeros(0, 4),
}
