"""Writes in place that the sweep over containers found: rows of entries, restructured copies, names, parameters."""

from __future__ import annotations

import pytest
import torch

from tdstore import TensorDict

from .programs import check, check_error, programs

START = """
nest = lambda batch=(): TensorDict({"n": {"x": torch.arange(6.0).view(2, 3)}, "b": torch.arange(6.0).view(2, 3)}, batch)
rows = TensorDict({"b": torch.ones(3), "n": {"x": torch.ones(3)}})
stored = lambda: PersistentTensorDict.from_dict(nest(), filename=tmp + "/f.h5")
entries = lambda td: (td["b"].detach(), td["n", "x"].detach(), td.batch_size)
@tensorclass
class Item:
    b: torch.Tensor
item = lambda: Item(torch.zeros(2, 3), batch_size=[2, 3])
lazy = lambda: lazy_stack([nest([2, 3]), nest([2, 3])])
"""
KINDS = ["nest()", "TensorDictParams(nest())", "stored()", "nest().lock_()", "nest().memmap_(tmp + '/d')"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("index", ["0", "slice(0, 1)", "(..., 0)", "(0, 1)", "5"])
@pytest.mark.parametrize(
    "source", ["{'b': torch.tensor(7.0)}", "{'b': torch.tensor(7.0), ('n', 'x'): torch.tensor(8.0)}"]
)
def test_update_at_reaches_past_the_batch(kind: str, index: str, source: str) -> None:
    program = f"{START}\ntd = {kind}\ntd.update_at_({source}, {index})\nentries(td)"
    check_error(program) if index == "5" else check(program)


def test_rows_past_the_batch_are_all_written_or_none() -> None:
    td = TensorDict({"a": torch.zeros(3), "b": torch.zeros(2)})
    with pytest.raises(IndexError):
        td.update_at_({"a": torch.tensor(1.0), "b": torch.tensor(1.0)}, 2)
    assert not td["a"].any()


@pytest.mark.parametrize("kind", ["nest([2, 3])", "nest([2, 3]).memmap_()", "lazy()"])
@pytest.mark.parametrize("call", ["set", "set_"])
def test_a_locked_source_takes_what_its_copy_changed(kind: str, call: str) -> None:
    check(
        f"{START}\ntd = {kind}.lock_()\nwith td.flatten_keys('.') as v:\n    v.{call}('n.x', torch.ones(td.shape))\n"
        "[td['b'], td['n', 'x'], td.is_locked]"
    )


def test_a_locked_source_refuses_what_its_copy_added() -> None:
    td = TensorDict({"n": {"x": torch.zeros(3)}}).lock_()
    with pytest.raises(RuntimeError, match="locked"), td.flatten_keys(".") as flat:
        flat["n.x"], flat["more"] = torch.ones(3), torch.ones(3)
    assert not td["n", "x"].any() and list(td.keys()) == ["n"]


@programs("""
from torch.utils._pytree import tree_map
type(tree_map(lambda x: x, TensorDictParams(nest()))).__name__
---
from torch.utils._pytree import tree_flatten, tree_unflatten
params = TensorDictParams(nest())
made = tree_unflatten(*tree_flatten(params))
(type(made).__name__, [type(p).__name__ for p in made.parameters()], made["n", "x"] is params["n", "x"])
---
from torch.utils._pytree import tree_map
made = tree_map(lambda x: x.detach() * 2, TensorDictParams(nest()))
(type(made).__name__, entries(made))
---
params = TensorDictParams(nest())
(type(params.densify()).__name__, type(params.from_dict_instance(params.to_dict())).__name__)
---
params = TensorDictParams(nest())
params.load_state_dict({"more": torch.ones(3), "n.more": torch.ones(3), "b": torch.ones(2, 3)}, strict=False)
(list(params.keys(True, True)), params["b"].detach())
---
params = TensorDictParams(nest())
params.load_state_dict({"more": torch.ones(3)}, strict=True)
---
td = lazy()
td.set(("n", "m"), TensorDict({"a": torch.ones(2, 2, 3)}, [2, 2, 3], names=["t", "u", "v"]))
(td.names, td["n"].names, td[0].names)
---
type(lazy().view(torch.int32)).__name__
---
td = lazy()
td.view(torch.int32)["b"].fill_(0)
td["b"]
---
made = lazy().new_zeros((4,), empty_lazy=True)
(type(made).__name__, made.batch_size)
""")
def test_alike(source: str) -> None:
    check(START + source)


@programs("""
nest([2, 3])["a", 0]
---
nest([2, 3])[None, "a"]
---
nest([2, 3])[nest([2, 3])]
---
nest([2, 3])[3.5]
---
lazy()["a", 0]
---
lazy()[3.5]
---
list(nest())
---
list(item()[0, 0])
---
item().update_({"nope": torch.zeros(2, 3)})
---
item().update({"nope": torch.zeros(2, 3)})
---
item().select("nope")
""")
def test_errors_are_caught_as_there(source: str) -> None:
    check_error(START + source)
