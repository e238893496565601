"""What training does with data on a GPU: datasets and loaders, buffers, modules, graphs, and other processes."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import tdstore
from tdstore import TensorDict, TensorDictParams, lazy_stack
from tdstore.data import Epochs, TensorDictDataset
from tdstore.rl import (
    LazyMemmapStorage,
    LazyStorage,
    LazyTensorStorage,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)
from tests.conftest import assert_same
from tests.cuda.test_moves import GPU, Item, on_gpu
from tests.data_loading.places import numbered

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")
STORED = {"memory": None, "memmap": "", "h5": ".h5", "tdz": ".tdz"}


def stored(kind: str, folder: Path) -> Any:
    td = numbered(60)
    if STORED[kind] is None:
        return td
    td.save(folder / f"x{STORED[kind]}").close()
    return folder / f"x{STORED[kind]}"


@pytest.mark.parametrize("shuffle", [True, False, "blocks"])
@pytest.mark.parametrize("prefetch", [0, 3])
@pytest.mark.parametrize("kind", STORED)
def test_epochs_are_those_of_the_cpu(kind: str, prefetch: int, shuffle: Any, tmp_path: Path) -> None:
    data = stored(kind, tmp_path)
    options: dict[str, Any] = {"shuffle": shuffle, "seed": 3, "prefetch": prefetch, "block_rows": 8}
    here, there = Epochs(data, 7, **options), Epochs(data, 7, device="cuda", **options)
    for _ in range(2):
        pairs = list(zip(here, there, strict=True))
        assert len(pairs) == 9
        for want, got in pairs:
            assert got.device == GPU
            assert on_gpu(got)
            assert_same(got.cpu(), want.to("cpu"))


def test_epochs_resume(tmp_path: Path) -> None:
    data = stored("h5", tmp_path)
    first = Epochs(data, 7, device="cuda", seed=1, prefetch=2)
    taken = [batch["row"].tolist() for batch in itertools.islice(first, 4)]
    state = first.state_dict()
    rest = [batch["row"].tolist() for batch in first]
    second = Epochs(data, 7, device="cuda", seed=1, prefetch=2)
    second.load_state_dict(state)
    assert [batch["row"].tolist() for batch in second] == rest
    assert sorted(sum(taken + rest, [])) == list(range(60))


@pytest.mark.parametrize("kind", STORED)
def test_a_dataset_to_the_gpu(kind: str, tmp_path: Path) -> None:
    dataset = TensorDictDataset(stored(kind, tmp_path), device="cuda")
    assert dataset[7]["row"].device == GPU
    batch = dataset.__getitems__([5, 3])
    assert on_gpu(batch)
    assert batch["row"].tolist() == [5, 3]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("context", ["fork", "spawn"])
@pytest.mark.parametrize("kind", ["memmap", "h5"])
def test_a_loader_that_pins(kind: str, context: str, workers: int, tmp_path: Path) -> None:
    """Workers are forked from a process that uses the GPU, and do not touch it."""
    torch.zeros(1, device="cuda")
    dataset = TensorDictDataset(stored(kind, tmp_path))
    loader = DataLoader(
        dataset,
        8,
        num_workers=workers,
        pin_memory=True,
        collate_fn=TensorDictDataset.collate,
        multiprocessing_context=context if workers else None,
    )
    rows = []
    for batch in loader:
        assert batch["row"].is_pinned()
        moved = batch.to("cuda", non_blocking=True)
        rows += moved["row"].tolist()
        assert list(batch["name"]) == [f"r{i}" for i in batch["row"].tolist()]
    assert rows == list(range(60))


def test_a_loader_of_epochs_that_pins(tmp_path: Path) -> None:
    epochs = Epochs(stored("memmap", tmp_path), 8, seed=1)
    want = [batch["row"].tolist() for batch in Epochs(stored("memory", tmp_path), 8, seed=1)]
    loader = DataLoader(epochs, batch_size=None, num_workers=2, pin_memory=True, multiprocessing_context="fork")
    got = list(loader)
    assert [batch["row"].tolist() for batch in got] == want
    assert all(batch["next", "x"].is_pinned() for batch in got)


def test_a_forked_child_reads_what_is_stored(tmp_path: Path) -> None:
    """The parent uses the GPU; the child, which cannot, opens, reads and writes stores."""
    torch.ones(3, device="cuda").sum().item()
    td = numbered(20)
    td.save(tmp_path / "x.h5").close()
    td.save(tmp_path / "m").close()
    pid = os.fork()
    if not pid:
        code = 1
        try:
            for name in ("x.h5", "m"):
                with tdstore.open(tmp_path / name) as opened:
                    assert opened[[3, 1]]["row"].tolist() == [3, 1]
                    assert list(opened[:2]["name"]) == ["r0", "r1"]
            td.clone().save(tmp_path / "child").close()
            assert (td.exclude("name") + 1)["row"][0].item() == 1
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert tdstore.open(tmp_path / "child")["row"].tolist() == list(range(20))


# -- other processes -------------------------------------------------------------------------
def _takes(tasks: Any, answers: Any) -> None:
    td = tasks.get()
    answers.put((str(td.device), td["a"].tolist(), td["s"], str(td["n", "b"].device)))
    td["a"].add_(1)
    torch.cuda.synchronize()
    answers.put("done")
    tasks.get()


def test_sent_to_a_process() -> None:
    """By CUDA IPC: the receiver has the memory of the sender."""
    context = torch.multiprocessing.get_context("spawn")
    tasks, answers = context.Queue(), context.Queue()
    process = context.Process(target=_takes, args=(tasks, answers))
    process.start()
    try:
        td = TensorDict({"a": torch.arange(4.0), "n": {"b": torch.zeros(4)}, "s": "text"}, [4]).to("cuda")
        tasks.put(td)
        assert answers.get(timeout=60) == ("cuda:0", [0, 1, 2, 3], "text", "cuda:0")
        assert answers.get(timeout=60) == "done"
        assert td["a"].tolist() == [1, 2, 3, 4]
        tasks.put(None)
        process.join(60)
    finally:
        process.kill()
    assert process.exitcode == 0


# -- buffers ---------------------------------------------------------------------------------
def steps(n: int, start: int = 0) -> TensorDict:
    row = torch.arange(start, start + n)
    return TensorDict({"obs": row[:, None] * torch.ones(3), "row": row, "next": {"reward": row.float()}}, [n])


@pytest.mark.parametrize("source", ["cpu", "cuda"])
def test_a_buffer_on_the_gpu(source: str) -> None:
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(50, device="cuda"), batch_size=16)
    buffer.extend(steps(30).to(source))
    buffer.add(steps(1, 30)[0].to(source))
    batch = buffer.sample()
    assert batch["obs"].device == batch["next", "reward"].device == GPU
    assert torch.equal(batch["obs"][:, 0].cpu().long(), batch["row"].cpu())
    assert buffer[3]["row"].item() == 3
    assert buffer[torch.tensor([4, 2], device="cuda")]["row"].tolist() == [4, 2]
    buffer.extend(steps(40, 100).to(source))
    assert len(buffer) == 50
    state = buffer.state_dict()
    other = TensorDictReplayBuffer(storage=LazyTensorStorage(50, device="cuda"), batch_size=16)
    other.load_state_dict(state)
    assert on_gpu(other.sample())
    assert sorted(other[:]["row"].tolist()) == sorted(buffer[:]["row"].tolist())


def test_priorities_from_the_gpu() -> None:
    buffer = TensorDictPrioritizedReplayBuffer(
        alpha=0.7, beta=0.5, storage=LazyTensorStorage(50, device="cuda"), batch_size=16, priority_key="td_error"
    )
    buffer.extend(steps(30).to("cuda"))
    batch = buffer.sample()
    batch["td_error"] = torch.rand(16, device="cuda")
    buffer.update_tensordict_priority(batch)
    buffer.update_priority(torch.tensor([0, 1], device="cuda"), torch.tensor([5.0, 6.0], device="cuda"))
    again = buffer.sample()
    assert on_gpu(again.exclude("index"))


def test_a_stored_buffer_to_the_gpu(tmp_path: Path) -> None:
    buffer = TensorDictReplayBuffer(
        storage=LazyMemmapStorage(50, scratch_dir=str(tmp_path)),
        batch_size=16,
        pin_memory=True,
        prefetch=2,
    )
    buffer.extend(steps(30).to("cuda"))
    for _ in range(4):
        batch = buffer.sample()
        assert batch["obs"].is_pinned()
        batch = batch.to("cuda", non_blocking=True)
        assert batch["obs"].device == GPU
        assert torch.equal(batch["obs"][:, 0].cpu().long(), batch["row"].cpu())


@pytest.mark.parametrize("place", ["h5", "zarr", "memmap"])
def test_rows_of_the_gpu_in_a_stored_buffer(place: str, tmp_path: Path) -> None:
    storage = LazyStorage(50, place, path=tmp_path / "rows")
    buffer = TensorDictReplayBuffer(storage=storage, batch_size=16)
    buffer.extend(steps(30).to("cuda"))
    buffer.add(steps(1, 30)[0].to("cuda"))
    assert buffer[:]["row"].tolist() == list(range(31))
    buffer[torch.tensor([2, 0], device="cuda")] = steps(2, 100).to("cuda")
    assert buffer[:4]["row"].tolist() == [101, 1, 100, 3]
    buffer.close()


# -- modules ---------------------------------------------------------------------------------
def net() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))


def test_parameters_of_modules() -> None:
    module = net().cuda()
    params = TensorDict.from_module(module)
    assert on_gpu(params)
    x = torch.rand(8, 3, device="cuda")
    want = module(x)
    zeroed = params.data.clone().zero_()
    with zeroed.to_module(module):
        assert not module(x).any()
    torch.testing.assert_close(module(x), want)
    held = TensorDictParams(params.clone())
    assert held.device == GPU or held.device is None
    moved = TensorDictParams(TensorDict.from_module(net())).cuda()
    assert all(p.device == GPU for p in moved.parameters())
    assert isinstance(moved, TensorDictParams)
    back = moved.cpu()
    assert all(p.device.type == "cpu" for p in back.parameters())


def test_trained_there() -> None:
    module, x = torch.nn.Linear(3, 2).cuda(), torch.rand(32, 3, device="cuda")
    params = TensorDictParams(TensorDict.from_module(module).data.clone())
    optimizer = torch.optim.Adam(params.parameters(), 0.05)
    losses = []
    for _ in range(20):
        with params.to_module(module):
            loss = (module(x) - x[:, :2]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2


def test_ensembles() -> None:
    modules = [net().eval().cuda() for _ in range(3)]
    params = torch.stack([TensorDict.from_module(m).data for m in modules])
    x = torch.rand(5, 3, device="cuda")
    base = net().eval().cuda()

    def call(p: Any, x: torch.Tensor) -> torch.Tensor:
        with p.to_module(base):
            return base(x)

    got = torch.vmap(call, (0, None))(params, x)
    torch.testing.assert_close(got, torch.stack([m(x) for m in modules]))


def test_vmap_and_gradients_of_tensordicts() -> None:
    td = TensorDict({"a": torch.rand(4, 3), "n": {"b": torch.rand(4)}}, [4]).to("cuda")
    made = torch.vmap(lambda x: x.apply(lambda t: t * 2))(td)
    assert on_gpu(made)
    torch.testing.assert_close(made["a"], td["a"] * 2)
    grads = torch.func.grad(lambda x: (x["a"] ** 2).sum() + x["n", "b"].sum())(td)
    torch.testing.assert_close(grads["a"], 2 * td["a"])


# -- compiled, and graphs --------------------------------------------------------------------
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_compiled(backend: str) -> None:
    def program(td: TensorDict) -> TensorDict:
        made = td + 1
        made["c"] = made["a"].sum(-1) * td["n", "b"]
        return torch.stack([made, made * 2])[0]

    td = TensorDict({"a": torch.rand(4, 3), "n": {"b": torch.rand(4)}}, [4]).to("cuda")
    got = torch.compile(program, backend=backend, fullgraph=True)(td)
    want = program(td)
    assert got.device == GPU
    for key in ("a", ("n", "b"), "c"):
        torch.testing.assert_close(got[key], want[key])


# torch warns so of the graph that it warms up with.
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_compiled_for_less_overhead() -> None:
    """`mode="reduce-overhead"` replays CUDA graphs."""
    step = torch.compile(lambda td: (td * 2 + 1)["a"], mode="reduce-overhead")
    for i in range(4):
        td = TensorDict({"a": torch.full((4,), float(i))}, [4]).to("cuda")
        torch.compiler.cudagraph_mark_step_begin()
        assert step(td).tolist() == [2.0 * i + 1] * 4


def test_a_cuda_graph_over_a_tensordict() -> None:
    held = TensorDict({"a": torch.zeros(4), "n": {"b": torch.zeros(4)}}, [4]).to("cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            made = held * 2 + 1
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = held * 2 + 1
        picked = made[1:3].clone()
    held.update_(TensorDict({"a": torch.arange(4.0), "n": {"b": torch.ones(4)}}, [4]))
    graph.replay()
    torch.cuda.synchronize()
    assert made["a"].tolist() == [1, 3, 5, 7]
    assert picked["n", "b"].tolist() == [3, 3]


def test_collated_stacks_and_classes_are_pinned() -> None:
    data = [TensorDict({"a": torch.arange(i % 3 + 1.0)}) for i in range(8)]
    loader = DataLoader(data, 4, collate_fn=lazy_stack, pin_memory=True)
    for batch in loader:
        assert all(t.is_pinned() for t in batch.get("a", as_list=True))
        assert on_gpu(batch.to("cuda", non_blocking=True)[0])
    items = [Item(a=torch.full((2,), float(i))) for i in range(8)]
    for item in DataLoader(items, 4, collate_fn=torch.stack, pin_memory=True):
        assert isinstance(item, Item)
        assert item.a.is_pinned()
        assert item.cuda().a.device == GPU
