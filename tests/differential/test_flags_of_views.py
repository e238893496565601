"""What is memory-mapped or shared stays so in its views, with its lock; a copy is an ordinary TensorDict."""

from __future__ import annotations

import pytest

from .programs import check

VIEWS = """
    unbind(1)[0] | unbind(0)[0] | split(1)[0] | split([1, 3])[1] | chunk(2)[0] | tensor_split(2)[0] | view(-1)
    | view(2, 2, 5) | permute(1, 0) | transpose(0, 1) | movedim(0, 1) | swapaxes(0, 1) | unsqueeze(0) | unsqueeze(-1)
    | squeeze()
    | narrow(0, 0, 2) | to_lazystack()[0] | __getitem__(0) | __getitem__(slice(2)) | __iter__().__next__()
"""
COPIES = """
    expand(2, 4, 5) | clone() | reshape(-1) | flatten(0, 1) | unflatten(0, (2, 2)) | repeat(2, 1) | contiguous()
    | gather(0, torch.zeros(1, 5).long()) | to_tensordict() | apply(lambda x: x)
    | masked_select(torch.ones(4, 5).bool())
"""


@pytest.mark.parametrize("way", ["memmap_(tmp)", "share_memory_()"])
@pytest.mark.parametrize("call", [c.strip() for c in (VIEWS + " | " + COPIES).split(" | ")])
def test_flags(call: str, way: str) -> None:
    check(f"""
td = TensorDict({{"a": torch.zeros(4, 5), "n": {{"b": torch.ones(4, 5, 2)}}}}, [4, 5]).{way}
made = td.{call}
[(x.is_memmap(), x.is_shared(), x.is_locked, list(x.batch_size)) for x in (made, made["n"])]
""")


@pytest.mark.parametrize("way", ["memmap_(tmp)", "share_memory_()"])
def test_a_write_into_a_view_is_in_the_memory_and_structure_is_locked(way: str) -> None:
    check(f"""
td = TensorDict({{"a": torch.zeros(4, 5), "s": "text"}}, [4, 5]).{way}
for row in td:
    row.set_("a", torch.ones(5))
td.permute(1, 0).fill_("a", 3)
td.view(-1)[0] = TensorDict(a=torch.tensor(7.0))
(td, M.attempt(lambda: td.unbind(0)[0].set("b", torch.zeros(5))), M.attempt(lambda: td.view(-1).set("b", 1)))
""")
