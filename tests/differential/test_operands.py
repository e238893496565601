"""Operands of other batch sizes, keys and locks: what the result is, and what is refused with nothing changed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import tdstore
from tdstore import TensorDict
from tdstore.errors import BatchSizeError

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


# --- a tensor of a larger shape widens the batch ---
def grid(M, batch=(3, 4)):
    """Nested TensorDicts of the batch and of one dimension more, and a leaf with features."""
    inner = {"b": M.td({"b": t(*batch, 2)}, batch), "c": M.td({"c": t(*batch, 2)}, [*batch, 2])}
    return M.td({"a": t(*batch), "f": t(*batch, 5, start=7), **inner}, batch)


def tensor(shape):
    return t(*shape, start=2)


TENSORS = [(2, 3, 4), (1, 3, 4), (2, 1, 1), (2, 3, 1), (5, 2, 3, 4), (4,), (3, 1), (2, 4, 3)]
TAKING = {
    "*": lambda td, x: td * x,
    "* from the left": lambda td, x: x * td,
    "-": lambda td, x: td - x,
    "add, alpha": lambda td, x: td.add(x, alpha=2),
    "/": lambda td, x: td / x,
    "**": lambda td, x: td ** (x / 60),
    "==": lambda td, x: td == x,
    "== from the left": lambda td, x: x == td,
    "!=": lambda td, x: td != x,
    "<": lambda td, x: td < x,
    "maximum": lambda td, x: td.maximum(x),
    "clamp": lambda td, x: td.clamp(x, x + 1),
    "clamp to a high bound": lambda td, x: td.clamp(torch.zeros(1), x),
    "clamp_min": lambda td, x: td.clamp_min(x),
    "lerp": lambda td, x: td.lerp(x, x / 60),
    "addcmul": lambda td, x: td.addcmul(x, x),
    "logical_and": lambda td, x: td.logical_and(x),
}
for shape in TENSORS:
    for name, do in TAKING.items():
        case(f"grid {name} {list(shape)}", lambda M, s=shape, f=do: f(grid(M), tensor(s)))
for batch, shape in [((1, 4), (3, 4)), ((1, 4), (3, 1)), ((3, 1), (2, 3, 4)), ((), (3,)), ((), (2, 3)), ((3, 1), (4,))]:
    for name in ("*", "==", "clamp", "addcmul"):
        case(f"{batch} {name} {list(shape)}", lambda M, b=batch, s=shape, f=TAKING[name]: f(grid(M, b), tensor(s)))
case("empty * wide tensor", lambda M: grid(M).empty() * tensor((2, 3, 4)))
case("named * wide tensor", lambda M: M.td({"a": t(3)}, [3], names=["t"]) * tensor((2, 3)))
case("in place with a wide tensor", lambda M: M.td({"a": t(3)}, [3]).mul_(tensor((2, 3))))
for name in ("==", "*"):
    case(f"more nested dimensions {name} tensor", lambda M, f=TAKING[name]: f(grid(M, (3,)), tensor((3,))))
    case(f"one more nested dimension {name} tensor", lambda M, f=TAKING[name]: f(deep(M), tensor((3,))))


def deep(M):
    return M.td({"n": M.td({"a": t(3, 1)}, [3, 1])}, [3])


def mixed(M):
    return M.td({"a": t(3), "l": M.lazy_stack([M.td({"b": t(3, 4)}, [3]), M.td({"b": t(3, 4)}, [3])], 1)}, [3])


for shape in ((3,), (2, 3)):
    for name in ("==", "*", "maximum"):
        case(
            f"a nested lazy stack {name} {list(shape)}",
            lambda M, s=shape, f=TAKING[name]: f(mixed(M), tensor(s)).to_tensordict(),
        )


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


STORES = ["memory", "memmap", "h5", "lazy", "params"]


@pytest.mark.parametrize("kind", STORES)
@pytest.mark.parametrize("shape", [(2, 3), (2, 1), (3,)])
def test_a_tensor_of_a_larger_shape_widens_the_batch(kind: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    source = TensorDict({"a": t(3), "n": TensorDict({"b": t(3, 2)}, [3, 2])}, [3])
    td = {
        "memory": lambda: source,
        "memmap": lambda: source.memmap(tmp_path / "d"),
        "h5": lambda: source.save(tmp_path / "x.h5"),
        "lazy": lambda: tdstore.lazy_stack(list(source.unbind(0))),
        "params": lambda: tdstore.TensorDictParams(source.float(), no_convert=True),
    }[kind]()
    x = tensor(shape)
    batch = torch.broadcast_shapes(shape, (3,))
    for do in (TAKING["*"], TAKING["=="], TAKING["<"], TAKING["addcmul"]):
        made = do(td, x)
        assert made.batch_size == batch and made["n"].batch_size == (*batch, 2)
        assert torch.equal(made["a"], do(t(3), x).to(made["a"].dtype))
        assert torch.equal(made["n", "b"], do(t(3, 2), x[..., None]).to(made["n", "b"].dtype))


def test_a_wide_tensor_is_refused_in_place_and_changes_nothing() -> None:
    td = TensorDict({"a": t(3), "n": TensorDict({"b": t(3, 1)}, [3, 1])}, [3])
    before = td.clone()
    for write in (td.mul_, td.add_, td.clamp_max_):
        with pytest.raises(BatchSizeError, match=r"shape \[2, 3\] cannot be broadcast to batch size \[3\]"):
            write(tensor((2, 3)))
        assert (td == before).all()
