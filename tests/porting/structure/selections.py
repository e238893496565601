"""Reading and writing by integers, slices, masks, index tensors, ellipses; where, gather, masked_fill, splits."""

import numpy as np
import torch
from tensordict import TensorDict


def grid():
    return TensorDict({"x": torch.arange(12).view(3, 4), "n": {"y": torch.arange(24.0).view(3, 4, 2)}}, [3, 4])


def main():
    td = grid()
    for index in (
        0,
        -1,
        slice(1, 3),
        (slice(None), 2),
        (1, 2),
        Ellipsis,
        (..., 0),
        None,
        (None, 1),
        [0, 2],
        (slice(None, None, 2),),
    ):
        got = td[index]
        print(index, tuple(got.batch_size), got["x"].tolist())
    print(
        td[torch.tensor([[0, 1], [2, 0]])].batch_size, td[np.array([2, 1])]["x"][:, 0].tolist(), td[range(2)].batch_size
    )
    mask = td["x"] % 3 == 0
    print(
        td[mask].batch_size, td[mask]["x"].tolist(), td[mask.any(1)].batch_size, td.masked_select(mask)["n", "y"].shape
    )
    print(td[:, torch.tensor([True, False, True, False])].batch_size, td[[0, 1], [2, 3]]["x"].tolist())

    td[0] = TensorDict({"x": torch.zeros(4, dtype=torch.int64), "n": {"y": torch.zeros(4, 2)}}, [4])
    td[:, 1] = td[:, 2]
    print(td["x"].tolist())
    td[mask] = td[mask].apply(lambda v: -v)
    print(td["x"].tolist(), td["n", "y"].min().item())
    td[[1, 2], 0] = grid()[[0, 0], 3]
    print(td["x"][:, 0].tolist())
    td.set_at_("x", 100, (2, 3))
    td.set_at_(("n", "y"), torch.ones(3, 2), (slice(None), 0))
    print(td["x"][2].tolist(), td["n", "y"][:, 0].sum().item(), td.get_at("x", (1, slice(2))).tolist())
    td.fill_("x", 7)
    print(td["x"].unique().tolist())

    td = grid()
    chosen = td.where(mask, td * 0 - 1)
    print(chosen["x"].tolist(), torch.where(mask, td, td)["x"].sum().item())
    filled = td.masked_fill(mask, 5)
    print(filled["x"][0].tolist(), td["x"][0].tolist())
    td.clone().masked_fill_(mask, 0.0)
    best = td["n", "y"].sum(-1).argmax(1, keepdim=True)
    print(td.gather(1, best).batch_size, td.gather(1, best)["x"].tolist())
    print(
        [p.batch_size for p in td.split([1, 3], 1)],
        [p.batch_size for p in td.chunk(2, 1)],
        [p.batch_size for p in td.unbind(0)],
    )
    print(td.tensor_split(3, 1)[0].batch_size)
    print(
        torch.cat([td, td], -1).batch_size,
        torch.stack([td, td], -1).batch_size,
        torch.stack(list(td), 0)["x"].equal(td["x"]),
    )
    print(td.roll(1, 0)["x"][:, 0].tolist(), td.flip(1)["x"][0].tolist(), td.repeat(2, 1).batch_size)
    order = torch.randperm(3)
    print(torch.equal(td[order]["x"], td["x"][order]), td.squeeze().batch_size, td[:1].squeeze(0).batch_size)
    for wrong in (5, (0, 0, 0), torch.ones(4, dtype=torch.bool)):
        try:
            td[wrong]
            print("read")
        except IndexError:
            print("refused")
    try:
        td[:2] = TensorDict({"x": torch.zeros(9, 4)}, [9, 4])
    except RuntimeError:
        print("shapes differ")
    print(
        td.view(2, 6)["n", "y"].shape,
        td.flatten()["x"].shape,
        td.unflatten(1, (2, 2)).batch_size,
        td.movedim(0, 1).batch_size,
    )
