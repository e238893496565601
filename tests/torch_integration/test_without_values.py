"""TensorDicts of tensors without values (FakeTensorMode, the meta device, export), and in a DataLoader."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.data import DataLoader, Dataset, default_collate

import tdstore
from tdstore import LazyStackedTensorDict, TensorDict, lazy_stack
from tdstore.errors import UnsupportedError
from tests.torch_integration.containers import content, sample

SHAPES = {
    "int": (lambda td: td[0], [2]),
    "slice": (lambda td: td[1:, :1], [2, 1]),
    "list": (lambda td: td[[0, -1]], [2, 2]),
    "rows": (lambda td: td[torch.tensor([0, 2, 1, 1])], [4, 2]),
    "two tensors": (lambda td: td[torch.tensor([0, 2]), torch.tensor([1, 1])], [2]),
    "maths": (lambda td: (td + 1).exp() / td, [3, 2]),
    "reduce": (lambda td: td.mean(dim=0), [2]),
    "stack": (lambda td: torch.stack([td, td]), [2, 3, 2]),
    "lazy stack": (lambda td: lazy_stack([td, td]).to_tensordict(), [2, 3, 2]),
    "view": (lambda td: td.view(6), [6]),
    "where": (lambda td: td.where(torch.ones(3, 2, dtype=torch.bool, device=td["a"].device), 0), [3, 2]),
    "unbind": (lambda td: td.unbind(0)[0], [2]),
    "update": (lambda td: td.clone().update_(td + 1), [3, 2]),
    "write": (lambda td: (td := td.clone(), td.__setitem__(torch.tensor([0, 1]), td[1:]))[0], [3, 2]),
    "cast": (lambda td: td.to(torch.float16), [3, 2]),
}


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("kind", ["fake", "meta"])
def test_shapes_are_known(name, kind):
    program, batch = SHAPES[name]
    if kind == "fake":
        with FakeTensorMode():
            td = sample()
            got = program(td)
        assert isinstance(got["a"], FakeTensor)
    else:
        got = program(sample().to("meta"))
        assert got["a"].is_meta
    assert got.batch_size == torch.Size(batch)
    assert got["a"].shape == torch.Size([*batch, 4])


def test_meta_rows_and_allocation():
    td = sample().to("meta")
    assert td[torch.tensor([0, 2], device="meta")].batch_size == torch.Size([2, 2])
    made = torch.zeros_like(td, device="cpu")
    assert made.device == torch.device("cpu")
    assert content(made) == content(sample() * 0)
    assert TensorDict({"a": torch.ones(3)}, [3], device="meta")["a"].is_meta


@pytest.mark.parametrize("place", ["td", "td.h5", "td.zarr"])
def test_nothing_is_saved_of_no_values(place, tmp_path):
    with FakeTensorMode():
        fake = sample()
    for td in (fake, sample().to("meta")):
        with pytest.raises(UnsupportedError, match="'a' has no data"):
            td.save(tmp_path / place)
    assert not list(tmp_path.iterdir())


def test_shared_memory_of_no_values():
    with FakeTensorMode(), pytest.raises(UnsupportedError, match="FakeTensor"):
        sample().share_memory_()


@pytest.mark.parametrize("place", ["td", "td.h5"])
def test_a_dataset_opened_in_a_fake_mode_gives_fakes(place, tmp_path):
    sample().save(tmp_path / place)
    with FakeTensorMode(), tdstore.open(tmp_path / place) as td:
        assert isinstance(td["a"], FakeTensor)
        assert isinstance((td + 1)["n", "b"], FakeTensor)
        assert td[1:]["a"].shape == (2, 2, 4)


def test_a_module_that_takes_a_tensordict_is_exported(tmp_path):
    class Module(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(4, 2)

        def forward(self, td):
            return TensorDict({"y": self.layer(td["a"]), "z": td["n", "b"] + 1}, td.batch_size)

    module = Module()
    program = torch.export.export(module, (sample(),), strict=False)
    out, want = program.module()(sample()), module(sample())
    assert isinstance(out, TensorDict)
    assert content(out) == content(want)
    with pytest.raises((ValueError, AssertionError, RuntimeError)):
        program.module()(sample().select("a"))


class Rows(Dataset):
    def __init__(self, td):
        self.td = td

    def __len__(self):
        return len(self.td)

    def __getitem__(self, row):
        return self.td[row]


def test_collate():
    td = sample().set("s", "hello")
    rows = list(td.unbind(0))
    batch = default_collate(rows)
    assert isinstance(batch, TensorDict)
    assert content(batch) == content(td)
    nested = default_collate([{"td": row, "i": i} for i, row in enumerate(rows)])
    assert content(nested["td"]) == content(td)
    assert nested["i"].tolist() == [0, 1, 2]
    stacks = default_collate([lazy_stack([row, row]) for row in rows])
    assert isinstance(stacks, LazyStackedTensorDict)
    with pytest.raises(RuntimeError, match="different keys"):
        default_collate([rows[0], rows[1].exclude("a")])


@pytest.mark.parametrize("place", ["memory", "td.h5"])
def test_a_loader_stacks_rows(place, tmp_path):
    td = sample() if place == "memory" else sample().save(tmp_path / place)
    batches = list(DataLoader(Rows(td), batch_size=2))
    assert [type(b) for b in batches] == [TensorDict, TensorDict]
    assert content(torch.cat(batches)) == content(sample())


def test_workers_stack_rows(tmp_path):
    td = sample().save(tmp_path / "td.h5")
    batches = list(DataLoader(Rows(td), batch_size=2, num_workers=1))
    assert content(torch.cat(batches)) == content(sample())


# -- autograd through the methods ---------------------------------------------------------

FLOWS = {
    "maths": lambda td: (td * 2 + td).exp(),
    "index": lambda td: td[torch.tensor([0, 0, 2])],
    "slice": lambda td: td[1:],
    "view": lambda td: td.view(6).permute(0),
    "stack": lambda td: torch.stack([td, td * 3]),
    "cat": lambda td: torch.cat([td, td * 3]),
    "lazy stack": lambda td: lazy_stack([td, td * 3]).to_tensordict(),
    "update": lambda td: td.empty(recurse=True).update(td * 2),
    "apply": lambda td: td.apply(torch.sigmoid),
    "cast": lambda td: td.to(torch.float64),
    "where": lambda td: torch.where(torch.tensor([True, False, True]), td, td * 3),
    "gather": lambda td: td.gather(0, torch.tensor([[1, 1]])),
    "mean": lambda td: td.mean(dim=0),
    "flatten_keys": lambda td: td.flatten_keys(),
    "clone": lambda td: td.clone(),
    "split": lambda td: torch.cat(td.split(2)),
    "write": lambda td: (out := torch.zeros_like(td), out.__setitem__(slice(0, 2), td[1:]))[0],
    "update_": lambda td: torch.zeros_like(td).update_(td * 2),
}


@pytest.mark.parametrize("name", FLOWS)
def test_gradients_flow(name):
    program = FLOWS[name]

    def run(leaves):
        td = TensorDict({"a": leaves[0], "n": {"b": leaves[1]}}, [3, 2])
        return program(td)

    leaves = [t.clone().double().requires_grad_() for t in sample().values(True, True)]
    out = run(leaves)
    grads = torch.autograd.grad((out**2).sum(reduce=True), leaves)
    eps = 1e-6
    for leaf, grad in zip(leaves, grads, strict=True):
        way = torch.randn_like(leaf)
        up, down = ([t + s * eps * way if t is leaf else t for t in leaves] for s in (1, -1))
        with torch.no_grad():
            change = ((run(up) ** 2).sum(reduce=True) - (run(down) ** 2).sum(reduce=True)) / (2 * eps)
        assert torch.allclose(change, (grad * way).sum(), rtol=1e-4), name
