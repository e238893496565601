"""What repeats and compiles rows of lazy stacks, and what a TensorDict does with a lazy stack among its entries."""

from __future__ import annotations

from .programs import check, programs

START = """
def base(n=4):
    a = torch.arange(15.0 * n).view(n, 3, 5)
    e = {"f": torch.arange(6.0 * n).view(n, 3, 2)}
    return TensorDict({"a": a, "n": {"c": torch.ones(n, 3) * 2, "e": e}}, [n, 3])
def make(d):
    return lazy_stack([part.clone() for part in base().unbind(d)], d)
def nested():
    n = base()["n"]
    return TensorDict({"a": base()["a"], "n": lazy_stack([part.clone() for part in n.unbind(1)], 1)}, [4, 3])
def kind(td):
    return type(td).__name__, getattr(td, "stack_dim", None), td
"""
REPEATS = [
    "repeat(2, 1)", "repeat(1, 2)", "repeat(2, 3)", "repeat_interleave(2, dim=0)", "repeat_interleave(2, dim=-1)",
    "repeat_interleave(torch.tensor([1, 0, 2, 1]), dim=0)", "repeat_interleave(torch.tensor([2, 0, 1]), dim=1)",
]  # fmt: skip


@programs("\n---\n".join(f"kind(make({d}).{call})" for call in REPEATS for d in (0, 1)))
def test_repeats_are_lazy(source: str) -> None:
    check(START + source)


@programs("""
lazy = make(0)
lazy.repeat(2, 1).zero_()
lazy
---
lazy_stack([TensorDict({"x": torch.ones(3, n + 1)}, [3]) for n in range(2)]).repeat_interleave(2, dim=0)[3]
---
lazy_stack([TensorDict({"x": torch.tensor(float(n)), "s": f"t{n}"}) for n in range(2)]).repeat_interleave(2)["s"]
""")
def test_repeats_are_copies(source: str) -> None:
    check(START + source)


@programs("""
kind(torch.compile(lambda td: td.view(-1), backend="eager")(make(0)))
---
kind(torch.compile(lambda td: td.view(12), backend="eager")(make(1)))
---
kind(torch.compile(lambda td: td.reshape(-1), backend="eager")(make(0)))
---
torch.compile(lambda td: td.view(-1)["a"] + 1, backend="eager")(make(0))
---
lazy = make(0)
torch.compile(lambda td: td.view(-1).fill_("a", 1.0), backend="eager")(lazy)
lazy
""")
def test_compiled_views(source: str) -> None:
    check(START + source)


@programs("""
td = nested()
td.where(torch.eye(4, 3, dtype=torch.bool), td.exclude("a"), pad=0)["a"]
---
td = nested()
td.where(torch.eye(4, 3, dtype=torch.bool), td.clone().zero_(), pad=0)["n", "e", "f"]
---
td = nested()
td.exclude("n").where(torch.eye(4, 3, dtype=torch.bool), td, pad=7)["n", "c"]
---
td = nested()
td[0] = {"a": torch.zeros(3, 5), "n": {"c": torch.zeros(3), "e": {"f": torch.zeros(3, 2)}}}
td
---
td = nested()
td[:, 1] = {"a": torch.zeros(4, 5), "n": {"c": torch.zeros(4), "e": {"f": torch.zeros(4, 2)}}}
td
---
td = nested()
td[torch.tensor([0, 2])] = {"n": {"c": torch.zeros(2, 3)}}
td
---
td = nested()
(type(td.contiguous()["n"]).__name__, td.contiguous(), td.is_contiguous(), td.contiguous().is_contiguous())
""")
def test_lazy_stacks_as_entries(source: str) -> None:
    check(START + source)


@programs("""
td = nested()
kind((td == td)["n"])
---
td = nested()
kind((td != td.clone())["n"]), bool((td == td.clone()).all())
---
td = nested()
kind((td == 2)["n"]), bool((td == 2).any())
---
td = nested()
kind((td == torch.zeros(()))["n"])
---
td = nested()
kind((td == td.to_tensordict())["n"])
---
td = nested()
kind((td.to_tensordict() == td)["n"])
---
uneven = lambda: TensorDict({"l": lazy_stack([TensorDict({"x": torch.ones(n)}) for n in (1, 2)])}, [2])
one, other = uneven(), uneven()
other["l"][1]["x"].zero_()
(bool((one == uneven()).all()), bool((one == other).all()), (one != other)["l"][1]["x"], bool((one == 1).all()))
""")
def test_comparisons_of_entries(source: str) -> None:
    check(START + source)
