"""Two ranks of torch.distributed (gloo) that send, receive, reduce and broadcast TensorDicts."""

import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from tensordict import TensorDict


def example(rank):
    return TensorDict(
        {
            "a": torch.full((3,), float(rank)),
            "n": {"b": torch.arange(6).view(3, 2) + rank},
            "mask": torch.ones(3, dtype=torch.bool),
        },
        [3],
    )


def first(lines):
    example(1).send(1)
    example(2).isend(1)
    for work in example(8).isend(1, return_early=True) or []:
        work.wait()
    example(6).init_remote(1)
    total = example(3)
    total.exclude("mask").reduce(0, op=dist.ReduceOp.SUM)
    lines.append(("reduced", total["a"].tolist(), total["n", "b"][:, 0].tolist()))
    own = example(4)
    own.broadcast(0)
    lines.append(("sent", sorted(own.keys())))


def second(lines):
    target = example(5)
    target.recv(0)
    lines.append(("received", target["a"].tolist(), target["n", "b"].tolist()))
    for future in target.irecv(0, return_premature=True):
        future.wait()
    lines.append(("at once", target["a"].tolist(), target["mask"].all().item()))
    target.irecv(0)
    lines.append(("waited", target["a"].tolist()))
    made = TensorDict.from_remote_init(0)
    lines.append(("made", made.batch_size, sorted(map(str, made.keys(True, True)))))
    target.exclude("mask").reduce(0, op=dist.ReduceOp.SUM)
    got = target.broadcast(0)
    lines.append(("broadcast", got["a"].tolist(), got["n", "b"][0].tolist()))


def work(rank, rendezvous, queue):
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    lines = []
    (first, second)[rank](lines)
    dist.barrier()
    queue.put((rank, lines))
    dist.destroy_process_group()


def main():
    context = mp.get_context("fork")
    queue = context.Queue()
    rendezvous = os.path.abspath("rendezvous")
    ranks = [context.Process(target=work, args=(rank, rendezvous, queue)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    results = dict(queue.get(timeout=120) for _ in ranks)
    for rank in ranks:
        rank.join()
    for rank in sorted(results):
        for line in results[rank]:
            print(rank, *line)
    print([rank.exitcode for rank in ranks])
