"""torch.vmap and torch.func over TensorDicts."""

from __future__ import annotations

import pytest
import torch

import tdstore
from tdstore import LazyStackedTensorDict, NonTensorStack, TensorDict, lazy_stack
from tdstore.container.functions.vmap import Box
from tdstore.errors import UnsupportedError
from tests.torch_integration.containers import CONTAINERS, content, sample

IN_MEMORY = ["TensorDict", "memmap", "lazy stack", "lazy stack along 1", "lazy inside"]


@pytest.mark.parametrize("place", IN_MEMORY)
@pytest.mark.parametrize("dims", [(0, 0), (1, 0), (0, 1), (1, 1), (-1, 0)])
def test_the_mapped_dimension_is_a_batch_dimension(place, dims, tmp_path):
    in_dim, out_dim = dims
    td = CONTAINERS[place](tmp_path)
    seen = []

    def double(row):
        seen.append((type(row), row.batch_size, row["n"].batch_size, row["a"].shape))
        return (row * 2).copy().set("s", row["a"].sum(-1))  # a copy: what is memory-mapped is locked

    out = torch.vmap(double, in_dim, out_dim)(td)
    kept = 2 if in_dim == 0 else 3
    kind = LazyStackedTensorDict if place.startswith("lazy stack") else TensorDict
    assert type(out) is kind
    assert seen == [(kind, torch.Size([kept]), torch.Size([kept]), torch.Size([kept, 4]))]
    rows = [double(row) for row in sample().unbind(in_dim)]
    assert content(out) == content(torch.stack(rows, out_dim))


MATHS = {
    "numbers": lambda x: x * 2 + 1,
    "reversed": lambda x: 1 - x / 2,
    "functions": lambda x: x.exp().sigmoid().log().abs(),
    "TensorDicts": lambda x: x + x.sqrt(),
    "powers": lambda x: x**2,
    "clamp": lambda x: x.clamp(0.2, 1.0),
    "lerp": lambda x: x.lerp(x + 1, 0.5),
    "compare": lambda x: (x > 0.5) | (x == x),
    "reduce": lambda x: x.mean(dim=0),
    "in place": lambda x: x.clone().add_(1).mul_(2).exp_(),
    "augmented": lambda x: x.clone().__iadd__(x),
    "float": lambda x: x.to(torch.float64),
    "zeros": lambda x: x.zero_() if False else x.clone().zero_(),
    "shapes": lambda x: x.unsqueeze(0).expand(3, 2).permute(1, 0).reshape(-1),
    "index": lambda x: (x[0], x[:1], x[[1, 0]], x[torch.tensor([1, -1])], x[None]),
    "stack": lambda x: torch.stack([x, x * 2]),
    "cat": lambda x: torch.cat([x, x * 2]),
    "lazy stack": lambda x: lazy_stack([x, x * 2]) + 1,
    "where": lambda x: torch.where(torch.tensor([True, False]), x, 0.0),
    "apply": lambda x: x.apply(lambda t: t.sin()),
    "update": lambda x: x.copy().update({"new": x["n", "b"] + 1}),
    "structure": lambda x: x.flatten_keys().select("a"),
}


@pytest.mark.parametrize("name", MATHS)
def test_methods_work_inside(name):
    program = MATHS[name]
    want = [program(row) for row in sample().unbind(0)]
    if isinstance(want[0], tuple):
        want = [torch.stack(column) for column in zip(*want, strict=True)]
    else:
        want = torch.stack([w.to_tensordict() for w in want])
    assert content(torch.vmap(program)(sample())) == content(want)


@pytest.mark.skipif(torch.__version__ < "2.7", reason="torch 2.6 cannot map rows, not even of a tensor")
def test_rows_may_be_mapped_too():
    td, rows = sample(), torch.tensor([2, 0])
    assert content(torch.vmap(lambda i: td[i])(rows)) == content(td[rows])
    many = torch.tensor([[2, 0], [1, 1]])
    assert content(torch.vmap(lambda i: td[i] + 1)(many)) == content(td[many] + 1)


def test_what_goes_in_beside():
    td = sample()
    out = torch.vmap(lambda x, y, z: x + y + z["n", "b"].sum(), in_dims=(0, None, None))(td, 1, td)
    assert content(out) == content(td + 1 + td["n", "b"].sum())
    out, total = torch.vmap(lambda d: (d["td"] * d["t"], d["td"]["a"].sum()), in_dims=({"td": 0, "t": 1},))(
        {"td": td, "t": torch.ones(2, 3)}
    )
    assert content(out) == content(td)
    assert torch.allclose(total, td["a"].sum((1, 2)))


def test_what_is_not_mapped_goes_in_as_it_is(tmp_path):
    td = sample().save(tmp_path / "td.h5")
    seen = []
    torch.vmap(lambda x, stored: seen.append(stored) or x * 2, in_dims=(0, None))(torch.ones(2), td)
    assert seen == [td] if False else seen[0] is td


def test_a_tensordict_may_come_out_alone():
    out = torch.vmap(lambda x: TensorDict({"x": x, "n": {"y": x.sum()}}, []))(torch.ones(3, 2))
    assert out.batch_size == torch.Size([3])
    assert out["n"].batch_size == torch.Size([3])
    out = torch.vmap(lambda x: TensorDict({"x": x}, [2]), out_dims=1)(torch.ones(3, 2))
    assert out["x"].shape == out.batch_size == torch.Size([2, 3])


def test_names_and_values():
    td = sample().set("s", "hello")
    td.names = ["t", "env"]
    seen = []
    out = torch.vmap(lambda x: seen.append((x.names, x["s"])) or x, 1, 1)(td)
    assert seen == [(["t"], "hello")]
    assert out.names == ["t", None]
    assert out["s"] == "hello"
    td["s"] = NonTensorStack.from_list([["a", "b"], ["a", "c"], ["a", "d"]], 2)
    out = torch.vmap(lambda x: seen.append(x["s"]) or x)(td)
    assert seen[1] == out["s"] == [["a", "b"], ["a", "c"], ["a", "d"]]
    td["s"] = NonTensorStack.from_list([["a", "b"]] * 3, 2)
    assert torch.vmap(lambda x: x)(td)["s"] == [["a", "b"]] * 3


def test_nested_and_in_chunks():
    td = sample()
    seen = []
    out = torch.vmap(torch.vmap(lambda x: seen.append(x.batch_size) or x.exp() + 1))(td)
    assert seen == [torch.Size([])]
    assert content(out) == content(td.exp() + 1)
    assert content(torch.vmap(lambda x: x * 2, chunk_size=2)(td)) == content(td * 2)
    empty = torch.vmap(lambda x: x)(TensorDict({}, [3]))
    assert empty.batch_size == torch.Size([3])


@pytest.mark.parametrize("place", ["h5", "zarr", "window"])
def test_stored_entries_are_to_be_read_first(place, tmp_path):
    td = CONTAINERS[place](tmp_path)
    with pytest.raises(UnsupportedError, match="to_tensordict"):
        torch.vmap(lambda x: x * 2)(td)
    assert content(torch.vmap(lambda x: x * 2)(td.to_tensordict())) == content(sample() * 2)


def test_dimensions_that_are_not_there():
    with pytest.raises(IndexError, match="dimension 2"):
        torch.vmap(lambda x: x, 2)(sample())
    with pytest.raises(IndexError, match="dimension 2"):
        torch.vmap(lambda x: x, 0, 2)(sample())
    with pytest.raises(ValueError, match="negative"):
        torch.vmap(lambda x: x, 0, -1)(sample())
    with pytest.raises(ValueError, match="vmap"):
        torch.vmap(lambda x: x, in_dims=(0, 0))(sample())


def test_uneven_lazy_stacks_say_so():
    td = LazyStackedTensorDict(TensorDict({"x": torch.ones(2)}), TensorDict({"x": torch.ones(3)}))
    with pytest.raises(UnsupportedError):
        torch.vmap(lambda x: x)(td)


def test_tensors_map_as_ever():
    x = torch.arange(6.0).reshape(2, 3)
    assert torch.equal(torch.vmap(lambda t: t.sum())(x), x.sum(1))
    assert torch.equal(torch.func.vmap(torch.dot)(x, x), (x * x).sum(1))
    with pytest.raises(ValueError, match="square"):

        def square(t):
            return t * t

        torch.vmap(square, in_dims=5)(x)
    assert torch.utils._pytree.tree_leaves(Box(None, None, [])) == []


def test_an_ensemble_of_modules():
    """The pattern of `stack_module_state`: parameters are a TensorDict with a batch dimension."""
    modules = [torch.nn.Linear(2, 1) for _ in range(3)]
    params = torch.stack([TensorDict(dict(m.named_parameters())) for m in modules]).detach()
    x = torch.randn(4, 2)
    out = torch.vmap(lambda p: torch.func.functional_call(modules[0], p.to_dict(), x))(params)
    assert torch.allclose(out, torch.stack([m(x) for m in modules]))


# -- gradients ----------------------------------------------------------------------------


def energy(td):
    return (td**2).sum(reduce=True)


@pytest.mark.parametrize("place", IN_MEMORY)
def test_grad_by_a_tensordict(place, tmp_path):
    td = CONTAINERS[place](tmp_path)
    grads = torch.func.grad(energy)(td)
    assert content(grads) == content(sample() * 2)
    grads, value = torch.func.grad_and_value(energy)(td)
    assert torch.allclose(value, energy(sample()))


def test_grad_keeps_values_and_names():
    td = sample().set("s", "hello")
    td.names = ["t", "env"]
    grads = torch.func.grad(lambda td: td["a"].sum())(td)
    assert (grads["s"], grads.names, grads.batch_size) == ("hello", ["t", "env"], td.batch_size)


def test_jacobians_by_a_tensordict():
    td = sample()
    for jacobian in (torch.func.jacrev, torch.func.jacfwd):
        found = jacobian(lambda td: td["a"].sum((0, 1)))(td)
        assert found["a"].shape == (4, 3, 2, 4)
        assert found["n", "b"].shape == (4, 3, 2)


def test_per_sample_gradients():
    td, w = sample(), torch.ones(4)
    grads = torch.vmap(torch.func.grad(lambda w, row: (row["a"] @ w).sum()), in_dims=(None, 0))(w, td)
    assert torch.allclose(grads, td["a"].sum(1))
    grads = torch.vmap(torch.func.grad(energy))(td)
    assert content(grads) == content(td * 2)


def test_jvp_and_vjp():
    td = sample()
    value, tangent = torch.func.jvp(energy, (td,), (torch.ones_like(td),))
    assert torch.allclose(tangent, (td * 2).sum(reduce=True))
    value, pull = torch.func.vjp(lambda td: td * 3, td)
    assert content(pull(torch.ones_like(td))[0]) == content(torch.full_like(td, 3))
    assert isinstance(value, tdstore.TensorDict)
