"""Containers sent to other processes: writes are seen both ways, and files are opened anew."""

from __future__ import annotations

import multiprocessing

import pytest
import torch

from tdstore import TensorDict


def write_and_report(td, queue) -> None:
    seen = float(td["a"][0].sum())
    td["a"][1] = 5
    td["n"].set_("b", torch.full((3,), 7))
    queue.put(seen)


def read_rows(td, rows, queue) -> None:
    queue.put(td[rows].to_tensordict()["a"].tolist())


def run(method, target, *args):
    context = multiprocessing.get_context(method)
    queue = context.Queue()
    process = context.Process(target=target, args=(*args, queue))
    process.start()
    result = queue.get(timeout=120)
    process.join(200)
    assert process.exitcode == 0
    return result


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.parametrize("backend", ["shared", "named shared", "memmap"])
def test_writes_are_seen_both_ways(method, backend, place):
    td = TensorDict({"a": torch.zeros(3, 2), "n": {"b": torch.zeros(3, dtype=torch.int64)}}, [3]).save(**place(backend))
    td["a"][0] = 2
    assert run(method, write_and_report, td) == 4
    assert td["a"][1].tolist() == [5, 5]
    assert td["n", "b"].tolist() == [7, 7, 7]
    td.close()


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.parametrize("backend", ["memmap", "h5"])
def test_workers_read_windows(method, backend, place):
    where = place(backend)
    TensorDict({"a": torch.arange(40.0).reshape(10, 4)}, [10]).save(**where).close()
    td = TensorDict.load(where["location"])
    assert td["a"][0, 0] == 0  # a handle is open in the parent when the child starts
    assert run(method, read_rows, td, [7, 2]) == [[28, 29, 30, 31], [8, 9, 10, 11]]
    assert td[3]["a"].tolist() == [12, 13, 14, 15]
    td.close()


class Rows(torch.utils.data.Dataset):
    def __init__(self, td) -> None:
        self.td = td

    def __len__(self) -> int:
        return len(self.td)

    def __getitem__(self, i):
        return self.td[i]["a"]

    def __getitems__(self, indices):
        return self.td.read(indices)["a"]


@pytest.mark.parametrize("context", ["fork", "spawn"])
@pytest.mark.parametrize("backend", ["memmap", "h5"])
def test_a_data_loader_with_workers(backend, context, place):
    where = place(backend)
    TensorDict({"a": torch.arange(32.0)}, [32]).save(**where).close()
    td = TensorDict.load(where["location"])
    assert td["a"].sum() == 496
    loader = torch.utils.data.DataLoader(
        Rows(td), batch_size=8, num_workers=2, collate_fn=identity, multiprocessing_context=context
    )
    assert sum(float(batch.sum()) for batch in loader) == 496
    td.close()


@pytest.mark.parametrize("backend", ["memmap", "h5"])
def test_what_was_written_is_sent_with_a_container_opened_for_writing(backend, place):
    where = place(backend)
    TensorDict({"a": torch.zeros(10, 4)}, [10]).save(**where).close()
    td = TensorDict.load(where["location"], mode="r+")
    td[2] = TensorDict({"a": torch.ones(4)}, [])
    assert run("spawn", read_rows, td, [2, 1]) == [[1, 1, 1, 1], [0, 0, 0, 0]]
    td[1] = TensorDict({"a": torch.full((4,), 2.0)}, [])
    td.close()
    assert TensorDict.load(where["location"])["a"].sum() == 12


@pytest.mark.parametrize("backend", ["memory", "memmap", "h5"])
def test_a_data_loader_over_the_container_itself(backend, place):
    td = TensorDict({"a": torch.arange(32.0), "n": {"b": torch.arange(32)}}, [32]).save(**place(backend))
    batches = list(torch.utils.data.DataLoader(td, batch_size=8, collate_fn=identity))
    assert [type(b) for b in batches] == [TensorDict] * 4
    assert batches[1]["n", "b"].tolist() == list(range(8, 16))
    td.close()


def identity(x):
    return x
