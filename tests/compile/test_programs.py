"""Each program gives under torch.compile(fullgraph=True) what it gives without."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounter

import tdstore
from tdstore import PersistentTensorDict, TensorDict
from tdstore.index.selection import Selection
from tests.differential.oracle import describe, differences

from .programs import PROGRAMS, floats, sample

pytestmark = pytest.mark.skipif(
    torch.__version__ < "2.11", reason="torch 2.6 cannot trace attributes that a base class has in its __slots__"
)
AOT = ["construct", "index with a tensor", "arithmetic with TensorDicts", "update in place", "stack"]


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """No program finds another's graphs."""
    torch._dynamo.reset()
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        yield
    torch._dynamo.reset()


def arguments(program: Callable[..., Any]) -> list[Any]:
    """A fresh TensorDict and the tensors that the program has for defaults."""
    first, *others = inspect.signature(program).parameters.values()
    return [sample(), *(p.default.to(torch.get_default_device()) for p in others)]


def compiled(program: Callable[..., Any], backend: str = "eager") -> Callable[..., Any]:
    return torch.compile(program, fullgraph=True, backend=backend)


def same(want: Any, got: Any) -> None:
    found = list(differences(describe(want), describe(got)))
    assert not found, "\n".join(found)


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=list(PROGRAMS))
def test_a_program_is_one_graph(program):
    same(program(*arguments(program)), compiled(program)(*arguments(program)))


def test_there_are_many_programs():
    assert len(PROGRAMS) >= 60


@pytest.mark.parametrize("name", AOT)
def test_a_program_through_aot_autograd(name):
    program = PROGRAMS[name]
    same(program(*arguments(program)), compiled(program, "aot_eager")(*arguments(program)))


def test_a_gradient_flows_through():
    def loss(td):
        return (td * 2).exp().sum(reduce=True)

    td, twin = floats(), floats()
    for either in (td, twin):
        either.requires_grad_()
    loss(td).backward()
    compiled(loss, "aot_eager")(twin).backward()
    same(td.grad, twin.grad)


def test_a_program_that_ran_runs_again_with_other_data():
    """Guards hold for what stays, and other keys and batch sizes compile anew."""
    program = compiled(lambda td: (td + 1)[1:])
    for td in (sample(), sample() * 3, sample().select("a"), sample()[:, 0], TensorDict({"z": torch.ones(5)}, [5])):
        same((td + 1)[1:], program(td))


def test_what_is_kept_about_a_locked_one_is_not_in_the_graph():
    """A graph that was compiled before anything was kept does for one of which everything is, and the other way."""
    counter = CompileCounter()
    program = torch.compile(
        lambda td, other: (td.lerp_(other, 0.5).flatten_keys("."), td.depth), fullgraph=True, backend=counter
    )
    for warm in (False, True, False):
        td, other = floats().lock_(), floats().lock_()
        if warm:
            td.add_(other).flatten_keys(".")
        want = td.clone().lerp_(other, 0.5).flatten_keys("."), td.depth
        got = program(td, other)
        same(want[0], got[0])
        assert got[1] == want[1]
    assert counter.frame_count == 1


def test_what_a_program_writes_stays_written():
    td = sample()

    def write(td):
        td["a"].add_(1)
        td["new"] = td["i"] * 2
        td.set_("i", td["i"] + 5)
        td[0] = td[1]

    want = td.clone()
    write(want)
    compiled(write)(td)
    same(want, td)


@pytest.mark.parametrize("place", ["memmap", "shared"])
def test_leaves_that_live_elsewhere(place, tmp_path):
    td = sample().memmap(tmp_path / "td") if place == "memmap" else sample().share_memory_()

    def program(td):
        td.set_("i", td["i"] * 2)
        return td["a"] + 1, td[1:]["n", "b"], td[0], td * 2, torch.stack([td, td])

    want = program(sample().lock_())
    got = compiled(program)(td)
    assert [describe(w["i"]) for w in want[3:]] == [describe(g["i"]) for g in got[3:]]
    same(want[:2], got[:2])
    same(sample()["i"] * 2, td["i"])


@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace")
def test_a_dataset_that_is_stored_breaks_the_graph_and_is_right(tmp_path):
    sample().save(tmp_path / "td.h5")

    def program(td):
        td.set_("i", td["i"] + 1)
        return td["a"] * 2, td[1:]["n", "b"] + 1

    with tdstore.open(tmp_path / "td.h5", "r+") as td:
        assert isinstance(td, PersistentTensorDict)
        got = torch.compile(program, backend="eager")(td)
        same(program(sample()), got)
        same(sample()["i"] + 1, td["i"])


@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace")
def test_the_reads_and_writes_of_a_dataset_are_not_compiled(tmp_path, monkeypatch):
    compiling = []
    for name in ("read_plan", "write_plan"):

        def plan(self, original=getattr(Selection, name)):
            compiling.append(torch.compiler.is_compiling())
            return original(self)

        monkeypatch.setattr(Selection, name, plan)
    sample().save(tmp_path / "td.h5")
    with tdstore.open(tmp_path / "td.h5", "r+") as td:

        def program(td):
            td.set_at_("i", td["i"][1:] + 1, slice(1, None))
            td[1:] = td[:-1]
            return td[1:]["n", "b"] + 1

        torch.compile(program, backend="eager")(td)
    assert len(compiling) > 3
    assert not any(compiling)


def test_negative_rows_and_rows_that_are_not_there():
    program = compiled(lambda td, rows: td[rows])
    same(sample()[torch.tensor([-1, 0])], program(sample(), torch.tensor([-1, 0])))
    with pytest.raises(IndexError):
        program(sample(), torch.tensor([0, 3]))


def test_values_per_row_pass_through():
    td = sample()[:, 0]
    td["s"] = ["a", "b", "c"]
    got = compiled(lambda td: (td * 2)[1:])(td)
    assert got["s"] == ["b", "c"]
