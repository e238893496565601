"""Lazy stacks whose elements differ in keys or shapes: masks, updates at rows, dense stacks."""

from __future__ import annotations

from .programs import check, programs

HETERO = """
def stack(dim):
    one = TensorDict({"a": torch.zeros(3, 2), "b": torch.zeros(3), "n": {"x": torch.zeros(3)}}, [3])
    two = TensorDict({"a": torch.zeros(3, 2), "c": torch.zeros(3), "n": {"y": torch.zeros(3)}}, [3])
    return lazy_stack([one, two], dim)
def ragged():
    return lazy_stack([TensorDict({"a": torch.arange(4 * n).view(4, n), "b": torch.arange(4)}, [4]) for n in (2, 3)], 1)
"""


@programs("""
m = torch.tensor([True, False])
s = stack(0).masked_fill(m, 9)
---
m = torch.tensor([[True, False], [True, True], [False, False]])
s = stack(1).masked_fill(m, 9)
---
m = torch.tensor([[True, False, True], [False, True, True]])
s = stack(0).masked_fill_(m, 9)
---
s = stack(0).masked_fill(torch.zeros(2, dtype=torch.bool), 9)
""")
def test_masks_reach_entries_that_only_some_elements_have(source: str) -> None:
    check(f"{HETERO}{source}\n[[(k, td[k]) for k in sorted(td.keys(True, True), key=str)] for td in s.tensordicts]")


@programs("""
s.update_at_(ragged()[1].clone(), 0)
---
s.update_at_(ragged()[2:].clone(), slice(0, 2))
---
s.update_at_(ragged()[:, 0].clone() * 0, (slice(None), 0))
""")
def test_rows_of_ragged_stacks_are_updated(source: str) -> None:
    check(f"{HETERO}s = ragged()\n{source}\n[(td['a'], td['b']) for td in s.tensordicts]")


@programs("""
td = TensorDict({"a": torch.zeros(3)}, [3])
dense_stack_tds(td) is td
---
td = TensorDict({"l": lazy_stack([TensorDict({"a": torch.zeros(n)}) for n in (2, 3)])}, [2])
dense_stack_tds(td) is td
---
r = dense_stack_tds(lazy_stack([TensorDict({"a": torch.zeros(n)}) for n in (2, 3)]))
type(r).__name__, r.batch_size, r[1]["a"]
---
r = dense_stack_tds([TensorDict({"a": torch.zeros(n)}) for n in (2, 3)], 0)
type(r).__name__, r.batch_size, r[1]["a"]
---
r = dense_stack_tds([TensorDict({"a": torch.zeros(1)}), TensorDict({"b": torch.zeros(1)})], 0)
type(r).__name__, r.batch_size, r[1]["b"]
---
r = dense_stack_tds(stack(1))
type(r).__name__, r.stack_dim
---
lazy_stack([TensorDict({"a": torch.zeros(4), "n": {"x": torch.zeros(4)}}, [4], names=["y"])] * 3).densify().names
""")
def test_dense_where_possible(source: str) -> None:
    check(f"{HETERO}{source}")
