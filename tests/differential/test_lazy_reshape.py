"""A lazy stack that is flattened shares the memory of its elements."""

from __future__ import annotations

from .programs import check, programs

START = """
one = lambda: TensorDict({"x": torch.zeros(3, 2), "n": {"y": torch.zeros(3)}}, [3])
make = lambda d: lazy_stack([one() for _ in range(4)], d)
def written(source, made):
    made.fill_("x", 1.0)
    sums = [float(td["x"].sum()) for td in source.tensordicts]
    return type(made).__name__, list(made.batch_size), sums, made.is_locked
"""
CALLS = [
    "reshape(-1)", "reshape(12)", "reshape((12,))", "reshape(2, 6)", "reshape(2, 2, 3)", "reshape(4, 3)", "flatten()",
    "flatten(0, 1)", "flatten(0, -1)", "view(-1)", "unflatten(0, (2, 2))", "unsqueeze(0)", "reshape(5)",
]  # fmt: skip


PAIRS = [(call, d) for call in CALLS for d in (0, 1) if not d or not call.startswith("un")]


@programs("\n---\n".join(f"lazy = make({d})\nwritten(lazy, lazy.{call})" for call, d in PAIRS))
def test_shapes(source: str) -> None:
    check(START + source)


@programs("""
make(0).lock_().reshape(-1).is_locked
---
make(0).reshape(-1)[3]["n"]
---
td = TensorDict({"l": make(0)}, [4, 3])
written(td["l"], td.reshape(-1)["l"])
---
td = TensorDict({"l": make(0)}, [4])
written(td["l"], td.reshape(2, 2)["l"])
---
td = TensorDict({"l": make(1)}, [3, 4])
written(td["l"], td.flatten(0, 1)["l"])
---
lazy_stack([TensorDict({"x": torch.zeros(3, 2), "s": f"t{i}"}, [3]) for i in range(2)]).reshape(-1)["s"]
---
lazy_stack([TensorDict({"x": torch.zeros(3, n)}, [3]) for n in (1, 2)]).flatten()[5]["x"]
""")
def test_more(source: str) -> None:
    check(START + source)
