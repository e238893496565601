"""Dimensions that are added to what has none left have no name, and are counted."""

from __future__ import annotations

from .programs import check, programs


@programs("""
row.unsqueeze(0)
---
row[None]
---
row.expand(2)
---
torch.stack([row, row])
---
torch.stack([row.clone(), td[-1]], 0)
---
lazy_stack([td, td])[0][0].unsqueeze(0)
---
td.sum(0)[None]
---
row.view(1)
""")
def test_names_of_new_dimensions(source: str) -> None:
    make = 'td = TensorDict({"a": torch.zeros(3, 2), "n": {"c": torch.zeros(3)}}, [3], names=["t"])\nrow = td[0]\n'
    check(f'{make}made = {source}\n(made.batch_size, made.names, made["n"].names)')


@programs("""
td.max((0,))
---
td.min((0,), keepdim=True)
---
td.cummax((0,))
---
td.cummin((0,))
""")
def test_a_tuple_of_one_dimension_is_that_dimension(source: str) -> None:
    check(f'td = TensorDict({{"a": torch.tensor([[3, 1], [2, 5]])}}, [2])\n{source}.indices["a"], {source}.values["a"]')
