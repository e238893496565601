"""Actors that send TensorDicts through queues and pipes, a learner that gathers them, pickles in between."""

import pickle

import torch
import torch.multiprocessing as mp
from tensordict import NonTensorData, TensorDict, lazy_stack, tensorclass


@tensorclass
class Report:
    scores: torch.Tensor
    worker: int = 0
    notes: dict | None = None


def act(worker, queue, pipe):
    for episode in range(2):
        length = worker + episode + 1
        queue.put(
            TensorDict(
                {
                    "obs": torch.full((length, 2), float(worker)),
                    "worker": torch.full((length,), worker),
                    "tag": f"w{worker}e{episode}",
                },
                [length],
            ).numpy()
            if episode == 1
            else pickle.dumps(
                TensorDict({"obs": torch.full((length, 2), float(worker)), "tag": f"w{worker}"}, [length])
            )
        )
    request = pipe.recv()
    pipe.send(pickle.dumps(TensorDict({"answer": request["question"] * 2, "from": NonTensorData(worker)}, [])))


def main():
    context = mp.get_context("fork")
    queue = context.Queue()
    pipes = [context.Pipe() for _ in range(2)]
    workers = [context.Process(target=act, args=(i, queue, pipes[i][1])) for i in range(2)]
    for worker in workers:
        worker.start()
    received = [queue.get(timeout=200) for _ in range(4)]
    pickled = sorted((pickle.loads(r) for r in received if isinstance(r, bytes)), key=lambda td: td["tag"])
    arrays = sorted((r for r in received if isinstance(r, dict)), key=lambda r: len(r["obs"]))
    print([(td["tag"], tuple(td.batch_size)) for td in pickled])
    print([(r["obs"].shape, type(r["obs"]).__name__) for r in arrays])
    rebuilt = [TensorDict.from_dict(r, auto_batch_size=True) for r in arrays]
    print([td["obs"].sum().item() for td in rebuilt], [td.batch_size[0] for td in rebuilt])

    for number, (mine, _) in enumerate(pipes):
        mine.send(TensorDict({"question": torch.tensor([number, 1])}, []))
    answers = [pickle.loads(mine.recv()) for mine, _ in pipes]
    print([a["answer"].tolist() for a in answers], [a["from"] for a in answers])
    for worker in workers:
        worker.join()
    print([worker.exitcode for worker in workers])

    ragged = lazy_stack([td.select("obs") for td in pickled])
    print(ragged.batch_size, pickle.loads(pickle.dumps(ragged)).get("obs", as_list=True)[1].tolist())
    joined = torch.cat([td.select("obs") for td in pickled])
    print(joined.batch_size, joined["obs"][:, 0].tolist())
    td = TensorDict({"a": torch.arange(4), "n": {"b": torch.ones(4)}}, [4], names=["row"]).lock_()
    copy = pickle.loads(pickle.dumps(td))
    print(copy.is_locked, copy.names, copy["n"].batch_size, (copy == td).all())
    view = pickle.loads(pickle.dumps(td[1:3]))
    print(view["a"].tolist(), view.batch_size)
    consolidated = td.consolidate()
    print(pickle.loads(pickle.dumps(consolidated))["n", "b"].sum().item())
    print(pickle.loads(pickle.dumps(pickled[0]))["tag"])
