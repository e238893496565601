"""Operands of other batch sizes, keys and locks: what the result is, and what is refused with nothing changed."""

from __future__ import annotations

import torch

from .cases import Case, Cases
from .structures import t
from .test_access import after

case = Cases()

# --- batch sizes broadcast, as tensors do ---
PAIRS = [((3,), (2, 3)), ((2, 3), (3,)), ((1,), (3,)), ((3, 1), (1, 4)), ((), (3,)), ((3,), ()), ((1, 3), (2, 3))]
OPERATIONS = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "/": lambda a, b: a / (b + 1),
    "==": lambda a, b: a == b,
    "!=": lambda a, b: a != b,
    "<": lambda a, b: a < b,
    "maximum": lambda a, b: a.maximum(b),
    "clamp_min": lambda a, b: a.clamp_min(b),
    "addcmul": lambda a, b: a.addcmul(b, b),
    "locked +": lambda a, b: a.lock_() + b,
}
for left, right in PAIRS:
    for name, do in OPERATIONS.items():
        case(
            f"{left} {name} {right}",
            lambda M, a=left, b=right, f=do: f(M.td({"a": t(*a)}, a), M.td({"a": t(*b, start=3)}, b)),
        )
        case(
            f"{left} {name} {right} with features",
            lambda M, a=left, b=right, f=do: f(M.td({"a": t(*a, 5)}, a), M.td({"a": t(*b, 5, start=3)}, b)),
        )
case(
    "nested batch sizes",
    lambda M: (
        M.td({"a": t(3), "n": M.td({"b": t(3, 2)}, [3, 2])}, [3])
        + M.td({"a": t(4, 3), "n": M.td({"b": t(4, 3, 2)}, [4, 3, 2])}, [4, 3])
    ),
)
case("named + wide", lambda M: M.td({"a": t(3)}, [3], names=["t"]) + M.td({"a": t(2, 3)}, [2, 3], names=["e", "t"]))
case("batch sizes that do not fit", lambda M: M.td({"a": t(3)}, [3]) + M.td({"a": t(2)}, [2]))
case("in place with a wide operand", lambda M: M.td({"a": t(3)}, [3]).mul_(M.td({"a": t(2, 3)}, [2, 3])))


# --- keys that one side lacks ---
MASK = torch.tensor([True, False, True])
case("where of nothing", lambda M: M.td({}, [3]).where(MASK, M.td({"a": t(3)}, [3])))
case("where of a nested nothing", lambda M: M.td({"n": {}}, [3]).where(MASK, M.td({"n": {"a": t(3)}}, [3])))
case("where and nothing", lambda M: M.td({"a": t(3)}, [3]).where(MASK, M.td({}, [3])))
case("where of nothing and nothing", lambda M: M.td({}, [3]).where(MASK, M.td({}, [3])))
case("where of nothing and a number", lambda M: M.td({}, [3]).where(MASK, 1.0))
case("where of nothing, padded", lambda M: M.td({}, [3]).where(MASK, M.td({"a": t(3)}, [3]), pad=0))
case("where of empty()", lambda M: (lambda td: td.empty().where(MASK, td))(M.td({"a": t(3)}, [3])))


# --- keys_to_update: a sequence of keys, whatever kind of sequence ---
def abc(M, start=0):
    return M.td({"a": t(3, start=start), "b": t(3, start=start + 1), "n": {"c": t(3, start=start + 2)}}, [3])


KEYS = {
    "a tuple": ("a", "b"),
    "a list": ["a", "b"],
    "one in a tuple": ("a",),
    "one in a list": ["b"],
    "a nested one in a list": [("n", "c")],
    "a nested one in a tuple": (("n", "c"),),
    "tuples in a tuple": (("n", "c"), ("a",)),
    "names and tuples": ("b", ("n", "c")),
    "none": (),
}
for name, keys in KEYS.items():
    case(f"update {name}", lambda M, k=keys: abc(M).update(abc(M, 50), keys_to_update=k))
    case(f"update_ {name}", lambda M, k=keys: abc(M).update_(abc(M, 50), keys_to_update=k))
    case(f"update_at_ {name}", lambda M, k=keys: abc(M).update_at_(abc(M, 50)[:1], slice(0, 1), keys_to_update=k))


# --- a locked target keeps its batch size ---
WIDE = {"a": (2, 3), "b": (2, 3)}


def wide(M):
    return M.td({key: t(*shape, start=9) for key, shape in WIDE.items()}, [2, 3])


def narrow(M):
    return M.td({"a": t(3), "b": t(3)}, [3])


case("update of the batch size", lambda M: narrow(M).update(wide(M), update_batch_size=True))
case(
    "update of the batch size, locked",
    lambda M: (lambda td: (M.attempt(lambda: td.update(wide(M), update_batch_size=True)), td))(narrow(M).lock_()),
)
case(
    "update of the same batch size, in place, locked",
    after("nested", lambda M, td: td.lock_().update(M.sample("nested"), inplace=True, update_batch_size=True)),
)


@case.parametrize
def test_operands(case: Case) -> None:
    case.check()
