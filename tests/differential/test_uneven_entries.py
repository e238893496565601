"""Entries that cannot be stacked: beside others under `torch.vmap`, and as stacks of values of several lengths."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import tdstore
from tdstore import LazyStackedTensorDict, NonTensorStack, TensorDict, lazy_stack
from tdstore.errors import UnevenError

from .programs import check, programs

START = """
def rows(*lengths, batch=(), dim=0):
    row = lambda n: TensorDict({"x": torch.zeros(*batch, n), "y": torch.full((*batch, 2), float(n))}, batch)
    return lazy_stack([row(n) for n in lengths], dim)
"""


@programs("""
torch.vmap(lambda t: t["y"] + 1)(rows(1, 2))
---
torch.vmap(lambda t: t["x"] + 1)(rows(1, 2))
---
torch.vmap(lambda t: t)(rows(1, 2))
---
torch.vmap(lambda t: t.get("x", None))(rows(1, 2))
---
torch.vmap(lambda t: t.set("z", t["y"] * 2))(rows(1, 2))
---
torch.vmap(lambda t: t.set("z", t["y"] * 2)["z"])(rows(1, 2))
---
torch.vmap(lambda t: t.apply(lambda x: x + 1))(rows(1, 2))
---
torch.vmap(lambda t: t.get("zz", torch.ones(3)))(rows(1, 2))
---
torch.vmap(lambda t, v: t["y"] + v, (0, None))(rows(1, 2), torch.ones(2))
---
torch.vmap(lambda t: t["y"] * 2)(rows(1, 2, batch=(3,)))
---
torch.vmap(lambda t: t["y"] * 2, (1,))(rows(1, 2, batch=(3,)))
---
torch.vmap(lambda t: t["y"] * 2)(rows(1, 2, batch=(3,), dim=1))
---
torch.vmap(lambda t: t["y"] * 2, (1,))(rows(1, 2, batch=(3,), dim=1))
---
torch.vmap(lambda t: t["x"], (1,))(rows(1, 2, batch=(3,), dim=1))
---
torch.vmap(lambda t: t["n", "y"])(lazy_stack([TensorDict({"n": row}) for row in rows(1, 2).unbind(0)]))
---
keys = []
torch.vmap(lambda t: (keys.append((sorted(t.keys()), t.batch_size)), t["y"])[1])(rows(1, 2, batch=(3,)))
keys
""")
def test_vmap_beside_entries_that_cannot_be_stacked(source: str) -> None:
    check(START + source)


def uneven() -> Any:
    return lazy_stack([TensorDict({"x": torch.zeros(n), "y": torch.ones(2)}) for n in (1, 2)])


@pytest.mark.parametrize(
    "use", [lambda x: x.shape, lambda x: x + 1, lambda x: torch.sum(x), lambda x: x[0], lambda x: x.clone()]
)
def test_any_use_of_such_an_entry_names_it(use: Any) -> None:
    with pytest.raises(UnevenError, match=r"'x'.*\[1\], \[2\]"):
        torch.vmap(lambda t: (use(t["x"]), t["y"])[1])(uneven())


def test_such_an_entry_is_printed_and_left_out() -> None:
    texts = []
    made = torch.vmap(lambda t: (texts.append(repr(t)), t.exclude("x"))[1])(uneven())
    assert type(made) is LazyStackedTensorDict and made.batch_size == (2,) and made["y"].shape == (2, 2)
    assert "x: MappedUneven" in texts[0]


def test_elements_of_several_batch_sizes_are_refused() -> None:
    with pytest.raises(UnevenError):
        torch.vmap(lambda t: t["y"])(lazy_stack([TensorDict({"y": torch.ones(n)}, [n]) for n in (1, 2)]))


@programs("""
NonTensorStack(NonTensorStack("a", "b"), NonTensorStack("c")).tolist()
---
s = NonTensorStack(NonTensorStack("a", "b"), NonTensorStack("c"))
[s[0].tolist(), s[1].tolist()]
---
td = TensorDict({"s": NonTensorStack(NonTensorStack("a", "b"), NonTensorStack("c"))}, [2])
(td["s"], td[0]["s"])
---
NonTensorStack(NonTensorStack("a", "b"), NonTensorData("c"))
---
NonTensorStack(NonTensorStack("a", "b"), NonTensorStack("c", "d"))[:, 1].tolist()
""")
def test_stacks_of_values_of_several_lengths(source: str) -> None:
    check(source)


def test_one_dimension_of_values_is_of_lists() -> None:
    stack = NonTensorStack(NonTensorStack("a", "b"), NonTensorStack("c"))
    assert stack.batch_size == (2,) and stack[0].data == ["a", "b"]
    with pytest.raises(RuntimeError):
        NonTensorStack(NonTensorStack("a", "b"), NonTensorStack("c"), stack_dim=1)


PARAMS = """
params = TensorDictParams(TensorDict({"a": torch.ones(3), "n": {"c": torch.ones(2)}}))
weight = torch.ones(3, requires_grad=True)
def shown(p):
    kinds = [(k, type(v).__name__, v.grad_fn is not None) for k, v in p.items(True, True)]
    return type(p).__name__, kinds, [k for k, _ in p.named_parameters()], [k for k, _ in p.named_buffers()]
"""


@programs("""
shown(params.replace(a=weight * 2))
---
shown(params.replace({"n": {"c": weight[:2] * 2}}))
---
shown(params.replace({"n": {"z": weight[:2] * 2}}))
---
shown(params.replace({("n", "c"): torch.zeros(2)}))
---
shown(params.replace(a=torch.nn.Parameter(torch.zeros(3))))
---
shown(params.replace(z=torch.zeros(3)))
---
made = params.replace(a=weight * 2)
made["b"] = torch.zeros(2)
shown(made)
---
shown(params.replace(a=weight * 2).clone())
---
(params.replace() is params, params.replace({}) is params)
---
params.replace(a=weight * 2)["a"].sum().backward()
weight.grad
---
params.replace(a=weight * 2)
shown(params)
---
params.lock_()
shown(params.replace(a=torch.zeros(3)))
""")
def test_what_replaces_a_parameter_is_no_parameter(source: str) -> None:
    check(PARAMS + source)


def test_a_replaced_parameter_is_copied() -> None:
    params = tdstore.TensorDictParams(TensorDict({"a": torch.ones(3), "b": torch.ones(3)}))
    made = copy.deepcopy(params.replace(a=torch.zeros(3)))
    assert type(made) is tdstore.TensorDictParams and [k for k, _ in made.named_parameters()] == ["b"]
