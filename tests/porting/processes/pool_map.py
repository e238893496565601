"""Preprocessing in pools of processes: map and map_iter, chunks, outputs on disk, generators per worker."""

import multiprocessing as mp

import torch
from tensordict import TensorDict, tensorclass


@tensorclass
class Clip:
    frames: torch.Tensor
    label: torch.Tensor


def brighten(td):
    return td.apply(lambda x: x + 1)


def summarise(td):
    return TensorDict({"mean": td["x"].float().mean(-1), "index": td["index"]}, td.batch_size)


def only_even(td):
    return td[td["index"] % 2 == 0]


def to_row(row):
    return TensorDict({"double": row["index"] * 2}, [])


def main():
    td = TensorDict({"x": torch.arange(40).view(20, 2), "index": torch.arange(20)}, [20])
    options = {"mp_start_method": "fork"}
    brighter = td.map(brighten, dim=0, num_workers=2, **options)
    print(type(brighter).__name__, brighter.batch_size, (brighter["x"] - td["x"]).unique().tolist())

    means = td.map(summarise, dim=0, num_workers=2, chunksize=4, **options)
    print(means["index"].tolist() == list(range(20)), means["mean"][:3].tolist())
    rows = td.map(to_row, dim=0, num_workers=2, chunksize=0, **options)
    print(rows.batch_size, rows["double"].tolist()[-3:])
    even = td.map(only_even, dim=0, num_workers=2, num_chunks=4, **options)
    print(even.batch_size, even["index"].tolist())

    out = TensorDict({"mean": torch.zeros(20), "index": torch.zeros(20, dtype=torch.int64)}, [20]).memmap_("out")
    td.map(summarise, dim=0, num_workers=2, out=out, **options)
    print(TensorDict.load_memmap("out")["index"].sum().item(), out.is_memmap())

    with mp.get_context("fork").Pool(2) as pool:
        again = td.map(brighten, dim=0, pool=pool)
        print((again == brighter).all())
        stored = td.memmap("source")
        print(stored.map(summarise, pool=pool)["mean"].sum().item())

    pieces = list(td.map_iter(summarise, dim=0, num_workers=2, chunksize=5, shuffle=False, **options))
    print([p.batch_size for p in pieces], sorted(torch.cat(pieces)["index"].tolist()) == list(range(20)))
    shuffled = torch.cat(list(td.map_iter(only_even, num_workers=2, chunksize=5, shuffle=True, **options)))
    print(sorted(shuffled["index"].tolist()))

    clips = Clip(frames=torch.zeros(6, 3, 4), label=torch.arange(6), batch_size=[6])
    done = clips.map(brighten, num_workers=2, **options)
    print(type(done).__name__, done.frames.sum().item(), done.label.tolist())
    columns = TensorDict({"x": torch.zeros(2, 6)}, [2, 6]).map(brighten, dim=1, num_workers=2, **options)
    print(columns.batch_size, columns["x"].sum().item())
    try:
        td.map(summarise, dim=0, num_workers=2, chunksize=2, num_chunks=3, **options)
    except (ValueError, TypeError, RuntimeError):
        print("either chunksize or num_chunks")
