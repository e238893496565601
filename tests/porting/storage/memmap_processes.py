"""One process allocates on disk, others open the folder and write their rows."""

import multiprocessing as mp
from pathlib import Path

import torch
from tensordict import TensorDict
from tensordict.memmap import MemoryMappedTensor


def fill(data, worker, rows):
    for row in rows:
        data["state"][row] = worker + 1
        data["step", "index"][row] = row
    data["done"][rows[0] : rows[-1] + 1] = True


def main():
    example = TensorDict({"state": torch.zeros(4), "step": {"index": torch.tensor(0)}, "done": torch.tensor(False)}, [])
    data = example.expand(10).memmap_like("results")
    print(data.is_memmap(), data.batch_size, data["state"].shape, data["state"].sum().item())
    print(all(isinstance(leaf, MemoryMappedTensor) for leaf in data.values(True, True)))

    context = mp.get_context("fork")
    jobs = [context.Process(target=fill, args=(data, w, range(w * 5, w * 5 + 5))) for w in range(2)]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join()
    print([job.exitcode for job in jobs])
    print(data["state"][:, 0].tolist(), data["step", "index"].tolist(), data["done"].all().item())

    opened = TensorDict.load_memmap("results")
    print((opened == data).all(), opened["step"].batch_size)
    print(Path("results").is_dir())

    nested = data["step"]
    print(type(nested).__name__, nested.is_memmap(), nested.is_locked)
    row = data[3]
    print(row.is_memmap(), row["state"].tolist())
    batch = data[[1, 2, 7]]
    print(batch["state"].sum().item(), type(batch["state"]).__name__)

    try:
        data["new"] = torch.zeros(10)
    except RuntimeError as error:
        print("refused", "lock" in str(error).lower())
    data.set_at_("state", torch.full((4,), 9.0), 0)
    data.update_at_(TensorDict({"state": torch.full((2, 4), 5.0)}, [2]), slice(8, 10))
    print(TensorDict.load_memmap("results")["state"][:, 1].tolist())
    copy = data.clone()
    print(copy.is_memmap(), copy.is_locked, type(copy["state"]) is torch.Tensor)
    copy["state"].zero_()
    print(data["state"].sum().item() > 0)
