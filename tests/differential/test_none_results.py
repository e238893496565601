"""`apply` whose function gives None with a target, gradients beside values, and a merge of one dimension."""

from __future__ import annotations

import pytest
import torch

import tdstore

from .programs import NEWER, check, programs

MADE = 'TensorDict({"t": torch.ones(2), "n": {"u": torch.ones(2)}}, [2])'
KINDS = [MADE, f"{MADE}.lock_()", f"{MADE}.memmap_()", f'PersistentTensorDict.from_dict({MADE}, tmp + "/f.h5")']


@pytest.mark.parametrize("kind", [*KINDS, f"lazy_stack([{MADE}, {MADE}])"])
@pytest.mark.parametrize(
    "call", ["apply(gone, inplace=True)", "apply_(gone)", "named_apply(lambda k, x: None, inplace=True)"]
)
def test_a_function_that_gives_none(kind: str, call: str) -> None:
    mark = "" if call != "apply_(gone)" or kind.startswith("lazy") else NEWER
    check(f"""{mark}
gone = lambda x: None
td = {kind}
(td.{call} is None, td["t"].sum(), td["n", "u"].sum())
""")


@pytest.mark.parametrize("kind", KINDS)
def test_a_function_that_gives_none_for_one_entry(kind: str) -> None:
    check(f"""
td = {kind}
same = td.named_apply(lambda k, x: None if k == "t" else x + 1, inplace=True) is td
(same, td["t"].sum(), td["n", "u"].sum())
""")


@programs(f"""
td = {MADE}
out = {MADE}
(td.apply(lambda x: None, out=out), out["t"])
---
td = TensorDict({{}}, [2])
td.apply(lambda x: None, inplace=True) is td
---
{MADE}.apply(lambda x: None, inplace=True, filter_empty=False)
---
TensorDict({{"a": torch.ones(2), "s": "x"}}, [2]).grad
---
TensorDict({{"a": torch.ones(2), "n": {{"s": "x"}}}}, [2]).grad
---
TensorDict({{"a": torch.ones(2), "n": {{"b": torch.ones(2)}}}}, [2]).grad
---
lazy_stack([TensorDict({{"a": torch.ones(2), "s": "x"}}, [2])] * 2).grad
---
td = TensorDict({{"a": torch.ones(2, requires_grad=True), "s": "x", "n": {{"b": torch.ones(2)}}}}, [2])
td["a"].sum().backward()
(td.grad, td.lock_().grad.is_locked)
---
td = {MADE}
flat = td.flatten(0, 0)
(flat is td, flat["n"] is td["n"], flat["t"].data_ptr() == td["t"].data_ptr())
---
td = {MADE}.lock_().flatten(0, 0)
(td, td.is_locked)
---
@tensorclass
class C:
    a: torch.Tensor
    d: dict
td = TensorDict({{"c": C(torch.zeros(2), {{"x": 1}}, batch_size=[2]), "t": torch.ones(2)}}, [2])
other = td.to_dict()
other["c"] = dict(other["c"], d={{"x": 2}})
((td == td.to_dict()).all(), (td != td.to_dict()).any(), (td == other).all())
""")
def test_results(source: str) -> None:
    check(source)


def test_a_dict_beside_a_value_of_a_nested_tensordict() -> None:
    """The peer fails here: a value in a nested TensorDict, and a value of a tensorclass by itself."""
    td = tdstore.TensorDict({"a": torch.ones(2), "n": {"b": torch.ones(2)}}, [2])
    td["n"].set_non_tensor("d", {"x": 1})
    assert (td == td.to_dict()).all() and not (td != td.to_dict()).any()
    other = td.to_dict()
    other["n"]["d"] = {"x": 2}
    assert not (td == other).all() and (td != other).any()


def test_flatten_of_one_dimension_keeps_its_name() -> None:
    td = tdstore.TensorDict({"a": torch.ones(2, 3)}, [2, 3], names=["x", "y"])
    assert td.flatten(1, 1).names == ["x", "y"]
